// qwen35 (dense Qwen3.5/3.6): blocks of DeltaNet or full attention, each followed by a SwiGLU FFN; and its NextN
// head, which predicts the token after the next from a hidden state and the next token's embedding.
#include "graph.h"

#include "custom_op.h"

namespace luce {

// x = eh_proj [RMS(embed(token))*enorm ; RMS(h)*hnorm], h {E, k} -> {E, k}
static ggml_tensor *nextn_input(ggml_context *ctx, const NextN &head, ggml_tensor *tokens, ggml_tensor *h) {
    const float eps = head.hp.rms_eps;
    ggml_tensor *e = rms_norm(ctx, ggml_get_rows(ctx, head.token_embd, tokens), head.enorm, eps); // {E, k}
    return matmul(ctx, head.eh_proj, ggml_concat(ctx, e, rms_norm(ctx, h, head.hnorm, eps), 0));
}

// Residual stream x {E, T} through the head's block, its K and V already written -> {E, T}
static ggml_tensor *nextn_block(ggml_context *ctx, const NextN &head, const KvCells &kv, ggml_tensor *x,
                                ggml_tensor *positions, ggml_tensor *mask) {
    const Block &b = head.block;
    ggml_tensor *h = rms_norm(ctx, x, b.attn_norm, head.hp.rms_eps);
    x = ggml_add(ctx, attend(ctx, h, b.attn, kv, positions, mask, head.hp), x);
    return ggml_add(ctx, ffn(ctx, rms_norm(ctx, x, b.post_norm, head.hp.rms_eps), b), x);
}

static ggml_tensor *element(ggml_context *ctx, ggml_tensor *t, int64_t first, int64_t n = 1) {
    return ggml_view_1d(ctx, t, n, size_t(first) * ggml_element_size(t));
}

void build_nextn(ggml_context *ctx, ggml_cgraph *graph, const NextN &head, const Cache &cache,
                 const DraftInputs &in, uint32_t n) {
    const KvCells &kv = cache.head_kv();
    const int64_t k = in.tokens->ne[0];
    ggml_tensor *x =
        nextn_input(ctx, head, in.tokens, ggml_get_rows(ctx, cache.hidden(), in.hidden_at)); // {E, k}
    write_kv(ctx, graph, rms_norm(ctx, x, head.block.attn_norm, head.hp.rms_eps), head.block.attn, kv,
             element(ctx, in.positions, 0, k), element(ctx, in.cells, 0, k), head.hp);
    if (n == 0) {
        return;
    }
    ggml_build_forward_expand(
        graph, ggml_cpy(ctx, element(ctx, in.tokens, k - 1), element(ctx, in.verify_tokens, 0)));
    x = ggml_view_2d(ctx, x, x->ne[0], 1, x->nb[1], size_t(k - 1) * x->nb[1]); // {E, 1}: the anchor's row
    for (uint32_t i = 0; i < n; i++) {
        ggml_tensor *mask = ggml_view_2d(ctx, in.mask, in.mask->ne[0], 1, in.mask->nb[1], i * in.mask->nb[1]);
        ggml_tensor *position = element(ctx, in.positions, k - 1 + i);
        x = nextn_block(ctx, head, kv, x, position, mask);
        ggml_tensor *h = rms_norm(ctx, x, head.norm, head.hp.rms_eps);
        ggml_tensor *logits = matmul(ctx, head.output, h); // {V, 1}
        ggml_tensor *choice = add_op(ctx, "argmax", GGML_TYPE_I32, ARGMAX_WIDTH, 1, {logits});
        ggml_tensor *token = element(ctx, choice, 0);
        ggml_build_forward_expand(graph, ggml_cpy(ctx, token, element(ctx, in.verify_tokens, i + 1)));
        ggml_build_forward_expand(
            graph, ggml_cpy(ctx, element(ctx, choice, 0, 2), element(ctx, in.drafts, 2 * int64_t(i), 2)));
        if (i + 1 < n) {
            x = nextn_input(ctx, head, token, h); // chained on its own hidden state
            write_kv(ctx, graph, rms_norm(ctx, x, head.block.attn_norm, head.hp.rms_eps), head.block.attn, kv,
                     element(ctx, in.positions, k + i), element(ctx, in.cells, k + i), head.hp);
        }
    }
}

// The head's KV rows of a chunk of the prompt: row p from the hidden state at p - 1. h {E, T}: the chunk's own.
static void warm_head(ggml_context *ctx, ggml_cgraph *graph, const NextN &head, const Cache &cache,
                      const StepInputs &in, ggml_tensor *h) {
    const int64_t T = h->ne[1];
    ggml_tensor *before = ggml_get_rows(ctx, cache.hidden(), in.hidden_at); // {E, 1}
    if (T > 1) {
        before = ggml_concat(ctx, before, ggml_view_2d(ctx, h, h->ne[0], T - 1, h->nb[1], 0), 1); // {E, T}
    }
    ggml_tensor *x = nextn_input(ctx, head, in.tokens, before);
    write_kv(ctx, graph, rms_norm(ctx, x, head.block.attn_norm, head.hp.rms_eps), head.block.attn,
             cache.head_kv(), in.positions, in.cells, head.hp);
}

StepOutputs build_qwen35(ggml_context *ctx, ggml_cgraph *graph, const Model &model, const Cache &cache,
                         const StepInputs &in, DeltaMode mode, Logits logits) {
    const HParams &hp = model.hparams();
    const Weights &w = model.weights();

    ggml_tensor *x = ggml_get_rows(ctx, w.token_embd, in.tokens); // {E, T}
    for (uint32_t il = 0; il < hp.n_layer; il++) {
        const Block &block = w.blocks[il];
        ggml_tensor *h = rms_norm(ctx, x, block.attn_norm, hp.rms_eps);
        if (block.recurrent) {
            h = deltanet(ctx, h, block.delta, cache.delta(il), in, hp, cache.n_rows(), mode);
        } else {
            write_kv(ctx, graph, h, block.attn, cache.kv(il), in.positions, in.cells, hp);
            h = attend(ctx, h, block.attn, cache.kv(il), in.positions, in.mask, hp);
        }
        x = ggml_add(ctx, h, x);
        x = ggml_add(ctx, ffn(ctx, rms_norm(ctx, x, block.post_norm, hp.rms_eps), block), x);
        ggml_format_name(x, "l_out-%u", il);
    }

    StepOutputs out;
    const auto last = [&](ggml_tensor *t) { // its last row {E, 1}
        return ggml_view_2d(ctx, t, t->ne[0], 1, t->nb[1], size_t(t->ne[1] - 1) * t->nb[1]);
    };
    if (!cache.has_head() && logits == Logits::none) {
        ggml_build_forward_expand(graph, x);
        return out;
    }
    if (!cache.has_head() && logits == Logits::last) {
        x = last(x);
    }
    x = rms_norm(ctx, x, w.output_norm, hp.rms_eps); // {E, T}, or {E, 1}
    if (cache.has_head()) {
        if (mode == DELTA_APPEND) {
            warm_head(ctx, graph, *w.head, cache, in, x); // reads the hidden cell that is written next
        }
        ggml_tensor *kept = mode == DELTA_APPEND ? last(x) : x;
        ggml_build_forward_expand(
            graph, ggml_set_rows(ctx, cache.hidden(), kept, element(ctx, in.hidden_to, 0, kept->ne[1])));
    }
    if (logits == Logits::none) {
        return out;
    }
    if (logits == Logits::last && x->ne[1] > 1) {
        x = last(x);
    }
    out.logits = matmul(ctx, w.output, x); // {V, n_out}
    out.choice = add_op(ctx, "argmax", GGML_TYPE_I32, ARGMAX_WIDTH, out.logits->ne[1], {out.logits});
    ggml_set_output(out.logits);
    ggml_set_output(out.choice);
    ggml_build_forward_expand(graph, out.choice);
    return out;
}

void build_flush(ggml_context *ctx, ggml_cgraph *graph, const Model &model, const Cache &cache,
                 ggml_tensor *ctl) {
    const HParams &hp = model.hparams();
    const int32_t R = int32_t(cache.n_rows()), hk = int32_t(hp.n_k_heads), hv = int32_t(hp.n_v_heads);
    for (uint32_t il = 0; il < hp.n_layer; il++) {
        if (!hp.recurrent[il]) {
            continue;
        }
        const DeltaState &d = cache.delta(il);
        const DeltaNetWeights &w = model.weights().blocks[il].delta;
        ggml_tensor *x = ggml_view_2d(ctx, d.log, hp.conv_dim, 1, d.log->nb[1], 0); // a row nobody reads
        ggml_tensor *gate = ggml_view_2d(ctx, d.log, hv, 1, d.log->nb[1], 0);
        const std::initializer_list<int32_t> params = {R, hk, hv, int32_t(hp.state_size), DELTA_FLUSH};
        ggml_build_forward_expand(graph, add_op(ctx, "deltanet_conv", GGML_TYPE_F32, hp.conv_dim, 1,
                                                {x, w.conv, d.window, d.log, ctl}, params));
        ggml_build_forward_expand(graph, add_op(ctx, "deltanet", GGML_TYPE_F32, hv * int64_t(hp.state_size),
                                                1, {x, gate, gate, w.dt, w.a, d.state, d.log, ctl}, params));
    }
}

} // namespace luce
