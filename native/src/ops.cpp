#include "ops.h"

#include "custom_op.h"

#include <cmath>

namespace luce {

ggml_tensor *rms_norm(ggml_context *ctx, ggml_tensor *x, ggml_tensor *weight, float eps) {
    return ggml_mul(ctx, ggml_rms_norm(ctx, x, eps), weight);
}

ggml_tensor *matmul(ggml_context *ctx, ggml_tensor *weight, ggml_tensor *x) {
    ggml_tensor *y = ggml_mul_mat(ctx, weight, x);
    ggml_prec_set_acc(y, GGML_PREC_F32); // cuBLAS may sum F16 products in F16 otherwise
    return y;
}

// Plain NEOX RoPE: for text, M-RoPE's axes are all equal.
static ggml_tensor *rope(ggml_context *ctx, ggml_tensor *x, ggml_tensor *positions, const HParams &hp) {
    if (hp.rope_dim == 0) {
        return x;
    }
    return ggml_rope_ext(ctx, x, positions, nullptr, int(hp.rope_dim), GGML_ROPE_TYPE_NEOX, 0, hp.rope_base,
                         1.0f, 0.0f, 1.0f, 0.0f, 0.0f);
}

void write_kv(ggml_context *ctx, ggml_cgraph *graph, ggml_tensor *x, const AttentionWeights &w,
              const KvCells &kv, ggml_tensor *positions, ggml_tensor *cells, const HParams &hp) {
    const int64_t D = hp.head_dim, Hkv = hp.n_head_kv, T = x->ne[1];
    ggml_tensor *k = matmul(ctx, w.k, x); // {D*Hkv, T}
    ggml_tensor *v = matmul(ctx, w.v, x); // {D*Hkv, T}
    k = rms_norm(ctx, ggml_reshape_3d(ctx, k, D, Hkv, T), w.k_norm, hp.rms_eps);
    k = rope(ctx, k, positions, hp); // {D, Hkv, T}
    // expanded here, since attention reads the cells and not these nodes
    ggml_build_forward_expand(graph, ggml_set_rows(ctx, kv.k, ggml_reshape_2d(ctx, k, D * Hkv, T), cells));
    ggml_build_forward_expand(graph, ggml_set_rows(ctx, kv.v, v, cells));
}

ggml_tensor *attend(ggml_context *ctx, ggml_tensor *x, const AttentionWeights &w, const KvCells &kv,
                    ggml_tensor *positions, ggml_tensor *mask, const HParams &hp) {
    const int64_t D = hp.head_dim, H = hp.n_head, Hkv = hp.n_head_kv, T = x->ne[1], n_kv = mask->ne[0];
    const size_t f = sizeof(float);
    ggml_tensor *q_gate = matmul(ctx, w.q, x);                                        // {2*D*H, T}
    ggml_tensor *q = ggml_view_3d(ctx, q_gate, D, H, T, 2 * D * f, 2 * D * H * f, 0); // {D, H, T}
    q = rope(ctx, rms_norm(ctx, q, w.q_norm, hp.rms_eps), positions, hp);
    q = ggml_permute(ctx, q, 0, 2, 1, 3); // {D, T, H}
    ggml_tensor *K = ggml_view_3d(ctx, kv.k, D, n_kv, Hkv, kv.k->nb[1], ggml_row_size(kv.k->type, D), 0);
    ggml_tensor *V = ggml_view_3d(ctx, kv.v, D, n_kv, Hkv, kv.v->nb[1], ggml_row_size(kv.v->type, D), 0);
    ggml_tensor *o = ggml_flash_attn_ext(ctx, q, K, V, mask, 1.0f / std::sqrt(float(D)), 0.0f, 0.0f);
    ggml_prec_set_acc(o, GGML_PREC_F32);
    o = ggml_reshape_2d(ctx, o, D * H, T); // {D*H, T}
    ggml_tensor *gate = ggml_view_3d(ctx, q_gate, D, H, T, 2 * D * f, 2 * D * H * f, D * f);
    gate = ggml_sigmoid(ctx, ggml_cont_2d(ctx, gate, D * H, T)); // {D*H, T}
    return matmul(ctx, w.out, ggml_mul(ctx, o, gate));
}

ggml_tensor *deltanet(ggml_context *ctx, ggml_tensor *x, const DeltaNetWeights &w, const DeltaState &state,
                      const StepInputs &in, const HParams &hp, uint32_t n_log_rows, DeltaMode mode) {
    const int64_t S = hp.state_size, Hv = hp.n_v_heads, T = x->ne[1];
    const int32_t R = int32_t(n_log_rows), hk = int32_t(hp.n_k_heads), hv = int32_t(Hv), s = int32_t(S);

    ggml_tensor *qkv = matmul(ctx, w.qkv, x);     // {C, T}
    ggml_tensor *z = matmul(ctx, w.gate, x);      // {Hv*S, T}
    ggml_tensor *beta = matmul(ctx, w.beta, x);   // {Hv, T}
    ggml_tensor *alpha = matmul(ctx, w.alpha, x); // {Hv, T}

    qkv = add_op(ctx, "deltanet_conv", GGML_TYPE_F32, hp.conv_dim, T,
                 {qkv, w.conv, state.window, state.log, in.ctl}, {R, hk, hv, s, mode});
    ggml_tensor *o =
        add_op(ctx, "deltanet", GGML_TYPE_F32, Hv * S, T,
               {qkv, alpha, beta, w.dt, w.a, state.state, state.log, in.ctl}, {R, hk, hv, s, mode});

    o = rms_norm(ctx, ggml_reshape_3d(ctx, o, S, Hv, T), w.norm, hp.rms_eps);          // {S, Hv, T}
    o = ggml_mul(ctx, o, ggml_silu(ctx, ggml_reshape_3d(ctx, z, S, Hv, T)));
    return matmul(ctx, w.out, ggml_reshape_2d(ctx, o, S * Hv, T));
}

ggml_tensor *ffn(ggml_context *ctx, ggml_tensor *x, const Block &block) {
    ggml_tensor *up = matmul(ctx, block.ffn_up, x);     // {FF, T}
    ggml_tensor *gate = matmul(ctx, block.ffn_gate, x); // {FF, T}
    return matmul(ctx, block.ffn_down, ggml_swiglu_split(ctx, gate, up));
}

} // namespace luce
