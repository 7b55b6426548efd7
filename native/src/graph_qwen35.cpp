// qwen35 (dense Qwen3.5/3.6): blocks of DeltaNet or full attention, each followed by a SwiGLU FFN.
#include "graph.h"

#include "custom_op.h"

namespace luce {

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
            h = attention(ctx, graph, h, block.attn, cache.kv(il), in, hp);
        }
        x = ggml_add(ctx, h, x);
        x = ggml_add(ctx, ffn(ctx, rms_norm(ctx, x, block.post_norm, hp.rms_eps), block), x);
        ggml_format_name(x, "l_out-%u", il);
    }

    StepOutputs out;
    if (logits == Logits::none) {
        ggml_build_forward_expand(graph, x);
        return out;
    }
    if (logits == Logits::last) {
        x = ggml_view_2d(ctx, x, x->ne[0], 1, x->nb[1], size_t(x->ne[1] - 1) * x->nb[1]); // {E, 1}
    }
    x = rms_norm(ctx, x, w.output_norm, hp.rms_eps);
    out.logits = matmul(ctx, w.output, x); // {V, n_out}
    out.choice = add_op(ctx, "argmax", GGML_TYPE_I32, ARGMAX_WIDTH, out.logits->ne[1], {out.logits});
    ggml_set_output(out.logits);
    ggml_set_output(out.choice);
    ggml_build_forward_expand(graph, out.choice);
    return out;
}

} // namespace luce
