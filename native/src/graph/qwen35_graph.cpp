// Builds the graphs of qwen35 and qwen35moe (Qwen3.5/3.6). A block is DeltaNet or full attention, followed by
// a SwiGLU FFN or by a mixture of them. The NextN head predicts the token after the next one, from a hidden
// state and the next token's embedding.
#include "graph/qwen35.h"
#include "matmul/layout.h"
#include "ops/sampling.h"

namespace luce {

static Stream feed_forward(const StepBuild &b, const Stream &s, const Block &block, const Norm &next) {
    if (block.moe() == nullptr) {
        return ffn(b, s, *block.dense(), next);
    }
    return moe(b, s, *block.moe(), next);
}

// Returns the last row {E, 1} of t {E, T}.
static ggml_tensor *last(ggml_context *ctx, ggml_tensor *t) {
    return ggml_view_2d(ctx, t, t->ne[0], 1, t->nb[1], size_t(t->ne[1] - 1) * t->nb[1]);
}

static ggml_tensor *first_entry(ggml_context *ctx, ggml_tensor *t) {
    return ggml_view_1d(ctx, t, 1, 0);
}

static StepOutputs choose(const StepBuild &b, ggml_tensor *logits) {
    StepOutputs out;
    out.logits = logits; // {V, n_out}
    ChooseArgs a{};
    a.ahead = 1;
    out.choice = ops::choose(b.ctx, {out.logits, b.in.ctl, b.cache.drafts(), b.cache.given()}, a);
    return out;
}

// Computes the head's input x = eh_proj [RMS(embed(token))*enorm ; RMS(h)*hnorm], h {E, T} -> {E, T}.
static Stream nextn_input(const StepBuild &b, const NextN &head, ggml_tensor *h) {
    const float eps = head.rms_eps;
    ggml_tensor *e = rms_norm(b.ctx, embed(b, head.token_embd), head.enorm, eps); // {E, T}
    return matmul_add(b, head.eh_proj, plain(ggml_concat(b.ctx, e, rms_norm(b.ctx, h, head.hnorm, eps), 0)),
                      nullptr, {head.block.attn_norm, eps});
}

// The same for a step's rows, whose h are rows hidden_from of the kept ones.
static Stream nextn_step_input(const StepBuild &b, const NextN &head) {
#ifdef LUCE_USE_CUDA
    const int64_t E = head.enorm->ne[0], T = b.in.tokens->ne[0];
    if (is_packed(head.eh_proj) && E % CHUNK == 0 && nextn_has_table(head.token_embd->type)) {
        NextnPackArgs a{};
        a.eps = head.rms_eps;
        ggml_tensor *y = ops::nextn_pack(b.ctx,
                                         {b.in.tokens, b.cache.drafts(), head.token_embd, b.cache.hidden(),
                                          b.in.hidden_from, head.enorm, head.hnorm},
                                         a);
        const MatmulInput in = {ROWMM_PLAIN, y, nullptr, nullptr, 0, 2 * E, T};
        made_input(b, in, true, [&] { return y; });
        return matmul_add(b, head.eh_proj, in, nullptr, {head.block.attn_norm, head.rms_eps}); // {E, T}
    }
#endif
    return nextn_input(b, head, ggml_get_rows(b.ctx, b.cache.hidden(), b.in.hidden_from));
}

// Keeps the hidden states h {E, T} of a step's rows.
static void keep_hidden(const StepBuild &b, const MatmulInput &h) {
    ggml_tensor *hidden = b.cache.hidden(), *kept;
#ifdef LUCE_USE_CUDA
    if (b.model.device().gpu) {
        KeepHiddenArgs a{};
        a.eps = h.eps;
        kept = ops::keep_hidden(b.ctx, {h.x, h.w, hidden, b.in.hidden_to}, a);
        ggml_build_forward_expand(b.graph, kept);
        return;
    }
#endif
    kept = ggml_set_rows(b.ctx, hidden, input_values(b, h), b.in.hidden_to);
    ggml_build_forward_expand(b.graph, kept);
}

// Returns what gives the logits of the first n tokens: the first n rows of a matrix {K, V}. On a GPU packed weights lie in
// tiles of 128 rows, so n is a multiple of that. Behind the last row of F32 and BF16 ones lie the scales of all rows
// (matmul/layout.h), so of these it is the whole matrix.
static ggml_tensor *first_rows(const StepBuild &b, ggml_tensor *output, int64_t n) {
    const bool whole = is_packed(output) && (output->type == GGML_TYPE_F32 || output->type == GGML_TYPE_BF16);
    if (whole || n == output->ne[1]) {
        return output;
    }
    ggml_tensor *part = ggml_view_2d(b.ctx, output, output->ne[0], n, output->nb[1], 0); // {K, n}
    part->op_params[0] = output->op_params[0]; // is_packed reads it
    return part;
}

// Writes the head's KV of the rows of its input.
static void nextn_kv(const StepBuild &b, const NextN &head, const Stream &input) {
    write_kv(b, input.normed, *head.block.attention(), {b.cache.head_kv(), KV_HEAD}, head.rms_eps);
}

// Chooses a draft's tokens among the first n by what the head puts out, h {E, T}, and keeps these rows.
static void choose_draft(const StepBuild &b, const NextN &head, const MatmulInput &h, int64_t n) {
    ggml_tensor *output = first_rows(b, head.output, n);
    keep_hidden(b, h);
    ggml_tensor *logits = matmul(b, output, h); // {V, T}
    if (output->ne[1] > n) {
        logits = ggml_cont(b.ctx, ggml_view_2d(b.ctx, logits, n, h.T, logits->nb[1], 0)); // {n, T}
    }
    ggml_build_forward_expand(b.graph, choose(b, logits).choice);
    keep_lists(b, logits);
}

void build_qwen35_draft(const StepBuild &b) {
    const NextN &head = *b.model.weights().head;
    if (b.kind == StepKind::feed) {
        nextn_kv(b, head, nextn_step_input(b, head));
        return;
    }
    const Block &block = head.block;
    const float eps = head.rms_eps;
    const KvLayer kv = {b.cache.head_kv(), KV_HEAD};
    Stream s = attend(b, nextn_step_input(b, head), *block.attention(), kv, nullptr,
                      {block.post_norm, eps, block.moe() != nullptr});
    s = feed_forward(b, s, block, {head.norm, eps});
    choose_draft(b, head, s.normed,
                 b.kind == StepKind::draft_part ? b.cache.params().n_part : head.output->ne[1]);
}

// Keeps the hidden states h {E, T} of the step's rows, and writes the head's KV rows: row p comes from the
// hidden state at p - 1 and token p. A verify of one row leaves that to a feed (cache.h).
static void feed_head(const StepBuild &b, const NextN &head, const MatmulInput &normed) {
    ggml_context *ctx = b.ctx;
    ggml_tensor *hidden = b.cache.hidden();
    if (b.prefill()) { // here each row follows the one above it
        ggml_tensor *h = input_values(b, normed);
        const int64_t T = h->ne[1];
        ggml_tensor *before = ggml_get_rows(ctx, hidden, first_entry(ctx, b.in.hidden_from)); // {E, 1}
        if (T > 1) {
            before =
                ggml_concat(ctx, before, ggml_view_2d(ctx, h, h->ne[0], T - 1, h->nb[1], 0), 1); // {E, T}
        }
        nextn_kv(b, head, nextn_input(b, head, before));
        ggml_build_forward_expand(b.graph,
                                  ggml_set_rows(ctx, hidden, last(ctx, h), first_entry(ctx, b.in.hidden_to)));
    } else { // here each row follows its parent, which may be a row of this step
        keep_hidden(b, normed);
        if (feeds_head(b.in.tokens->ne[0])) {
            nextn_kv(b, head, nextn_step_input(b, head));
        }
    }
}

StepOutputs build_qwen35(const StepBuild &b) {
    ggml_context *ctx = b.ctx;
    const HParams &hp = b.model.hparams();
    const Weights &w = b.model.weights();

    ggml_tensor *mask = b.prefill() ? prefill_mask(b, 0) : nullptr;
    const float eps = hp.rms_eps;
    ggml_tensor *x = embed(b, w.token_embd); // {E, T}
    Stream s = {x, rms(x, w.blocks[0].attn_norm, eps)};
    std::vector<ggml_tensor *> outputs; // these are what the blocks put out
    for (uint32_t il = 0; il < hp.n_layer; il++) {
        if (b.has_layer(il)) {
            const Block &block = w.blocks[il];
            const Norm post = {block.post_norm, eps, block.moe() != nullptr};
            const Norm next = {il + 1 < hp.n_layer ? w.blocks[il + 1].attn_norm : w.output_norm, eps};
            if (const Attention *attention = block.attention()) {
                s = attend(b, s, *attention, {b.cache.kv(il), KV_TRUNK}, mask, post);
            } else {
                s = deltanet(b, s, *block.deltanet(), b.cache.delta(il), post);
            }
            s = feed_forward(b, s, block, next);
            ggml_format_name(s.x, "l_out-%u", il);
        }
        outputs.push_back(s.x);
    }
    if (b.cache.has_drafter()) {
        feed_dflash(b, *w.drafter, outputs);
    }
    if (b.cache.has_head()) {
        feed_head(b, *w.head, s.normed);
    }
    if (b.kind == StepKind::prefill) {
        ggml_build_forward_expand(b.graph, s.x);
        return {};
    }
    // the logits' input is the same whether a head has been fed or not
    const bool one = b.prefill() && s.x->ne[1] > 1;
    StepOutputs out =
        choose(b, matmul(b, w.output, one ? rms(last(ctx, s.x), w.output_norm, eps) : s.normed));
    if (b.kind == StepKind::verify) {
        out.hidden = s.x; // {E, T}; on a CPU it is a view that nothing else reads
        ggml_set_output(out.hidden);
        ggml_build_forward_expand(b.graph, out.hidden);
    }
    ggml_set_output(out.logits);
    ggml_set_output(out.choice);
    ggml_build_forward_expand(b.graph, out.choice);
    return out;
}

} // namespace luce
