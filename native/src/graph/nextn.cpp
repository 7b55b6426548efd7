// The NextN head (MTP) predicts the token after the next one, from a hidden state and the next token's embedding: it is one
// block of the target's kind between norms of its own and a language-model head.
#include "graph/drafter.h"
#include "graph/qwen35.h"

namespace luce {

Val write_kv(Val x, const Attention &w, const KvLayer &kv, float eps) {
    const auto [k, v] = matmul(x, {w.k, w.v});
    return kv_write(kv, rope(head_norm(k, w.k_norm, eps), w.shape), v);
}

// eh_proj [RMS(embed(token)) * enorm ; RMS(h) * hnorm], h {E, T} -> {E, T}
static Val input(const NextN &head, Val h) {
    const Val e = norm(embed(*h.graph, head.token_embd), head.enorm, head.rms_eps);
    return matmul(concat(e, norm(h, head.hnorm, head.rms_eps)), head.eh_proj);
}

static KvLayer kv_of(const Plain &g) {
    return {g.cache.head_kv(), KV_HEAD};
}

// Writes the head's KV of rows whose hidden states before are h {E, T}.
static void feed(const NextN &head, Val h) {
    const Val x = norm(input(head, h), head.block.attn_norm, head.rms_eps);
    write_kv(x, *head.block.attention(), kv_of(*h.graph), head.rms_eps);
}

void feed_nextn(const NextN &head, Val h) {
    Plain &g = *h.graph;
    if (g.prefill()) { // here each row follows the one above it
        feed(head, previous(h));
        keep_hidden(h);
        return;
    }
    keep_hidden(h);
    if (feeds_head(g.T)) { // here each row follows its parent, which may be a row of this step
        feed(head, kept_hidden(g));
    }
}

void draft_nextn(Plain &g) {
    const NextN &head = *g.model.weights().head;
    const Block &block = head.block;
    const float eps = head.rms_eps;
    if (g.kind == StepKind::feed) {
        feed(head, kept_hidden(g));
        return;
    }
    Val x = input(head, kept_hidden(g)); // {E, T}
    x = add(x, attention(norm(x, block.attn_norm, eps), *block.attention(), kv_of(g), eps));
    x = add(x, feed_forward(norm(x, block.post_norm, eps), block));
    const Val h = norm(x, head.norm, eps);
    keep_hidden(h);
    Val logits = matmul(h, head.output); // {V, T}
    if (g.kind == StepKind::draft_part) {
        logits = first(logits, g.cache.params().n_part);
    }
    choose(logits, /*ahead=*/true);
    keep_best(logits);
}

} // namespace luce
