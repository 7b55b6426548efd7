// Builds the graphs of the DFlash drafter: context rows from the trunk's layers, and blocks that are drafted
// in one forward.
//   context   F = RMS(fc [outputs of the tapped blocks]) * hidden_norm of each committed position; a layer's K and V
//             are k_norm(Wk F), rotated to the position, and Wv F, without the layer's own norm
//   block     rows [anchor, mask, mask ..] at the anchor's position and those after it; a layer's rows see the context
//             and, where it is not causal, all of the block; row i predicts the token at its own position
#include "graph/drafter.h"

#include "ops/sampling.h"

namespace luce {

static KvLayer drafter_kv(const StepBuild &b, size_t il) {
    return {b.cache.drafter_kv(il), KV_DRAFTER};
}

void feed_dflash(const StepBuild &b, const DFlash &d, const std::vector<ggml_tensor *> &outputs) {
    ggml_tensor *features = nullptr;
    for (const uint32_t tap : d.taps) {
        ggml_tensor *x = outputs[tap - 1]; // {E, T}
        features = features == nullptr ? x : ggml_concat(b.ctx, features, x, 0);
    }
    ggml_tensor *f = rms_norm(b.ctx, matmul(b, d.fc, plain(features)), d.hidden_norm, d.rms_eps); // {E, T}
    ggml_format_name(f, "dflash_features");
    for (size_t il = 0; il < d.layers.size(); il++) {
        write_kv(b, plain(f), d.layers[il].attention, drafter_kv(b, il), d.rms_eps);
    }
}

// s.x + attention of a block's rows s.normed, whose K and V it writes behind the context's.
static Stream attend_block(const StepBuild &b, const DFlash &d, size_t il, const Stream &s) {
    const DFlashLayer &layer = d.layers[il];
    const Attention &a = layer.attention;
    const KvLayer kv = drafter_kv(b, il);
    write_kv(b, s.normed, a, kv, d.rms_eps);
    ggml_tensor *q = matmul(b, a.q, s.normed); // {D*H, T}
    q = ggml_reshape_3d(b.ctx, q, a.shape.head_dim, a.shape.n_head, q->ne[1]); // {D, H, T}
    q = rope(b, rms_norm(b.ctx, q, a.q_norm, d.rms_eps), a.shape);
    return matmul_add(b, a.out, plain(attend_pages(b, q, nullptr, a.shape, kv, !layer.causal)), s.x,
                      {layer.ffn_norm, d.rms_eps});
}

// Computes logits over the target's vocabulary. A token that the drafter does not have gets one that nothing
// chooses.
static ggml_tensor *drafter_logits(const StepBuild &b, const DFlash &d, const MatmulInput &h) {
    constexpr float NEVER = -1e30f;
    ggml_tensor *logits = matmul(b, d.output, h); // {V, T}, or {rows of d2t, T}
    if (d.softcap > 0) {
        logits = ggml_scale(b.ctx, ggml_tanh(b.ctx, ggml_scale(b.ctx, logits, 1.0f / d.softcap)), d.softcap);
    }
    if (d.d2t == nullptr) {
        return logits;
    }
    const int64_t V = b.model.hparams().n_vocab, n = logits->ne[0], T = logits->ne[1];
    ggml_tensor *all = ggml_fill(b.ctx, ggml_new_tensor_3d(b.ctx, GGML_TYPE_F32, 1, V, T), NEVER);
    all = ggml_set_rows(b.ctx, all, ggml_reshape_3d(b.ctx, logits, 1, n, T), d.d2t);
    return ggml_reshape_2d(b.ctx, all, V, T);
}

StepOutputs build_dflash_block(const StepBuild &b) {
    ggml_context *ctx = b.ctx;
    const DFlash &d = *b.model.weights().drafter;
    ggml_tensor *x = embed(b, d.token_embd); // {E, T}
    if (d.embedding_scale != 1) {
        x = ggml_scale(ctx, x, d.embedding_scale);
    }
    Stream s = {x, rms(x, d.layers[0].attn_norm, d.rms_eps)};
    for (size_t il = 0; il < d.layers.size(); il++) {
        s = ffn(b, attend_block(b, d, il, s), d.layers[il].ffn,
                {il + 1 < d.layers.size() ? d.layers[il + 1].attn_norm : d.norm, d.rms_eps});
    }
    ggml_tensor *logits = drafter_logits(b, d, s.normed); // {V, T}
    // a mask's logits are of its own position: a choice is not ahead
    ggml_tensor *choice = ops::choose(ctx, {logits, b.in.ctl, b.cache.drafts(), b.cache.given()});
    ggml_set_output(logits);
    ggml_build_forward_expand(b.graph, choice);
    keep_lists(b, logits);
    return {logits, choice};
}

} // namespace luce
