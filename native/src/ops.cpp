#include "ops.h"

#include "custom_op.h"
#include "gemm_op.h"
#include "rowmm_op.h"
#include "rows_matmul.h"

#include <cmath>
#include <cstring>

namespace luce {

ggml_tensor *rms_norm(ggml_context *ctx, ggml_tensor *x, ggml_tensor *weight, float eps) {
    return ggml_mul(ctx, ggml_rms_norm(ctx, x, eps), weight);
}

// x as rows_matmul takes it, made once for all weights that it meets.
static ggml_tensor *packed(const StepBuild &b, ggml_tensor *x) {
    for (const auto &[input, made] : b.packed) {
        if (input == x) {
            return made;
        }
    }
    ggml_tensor *made = nullptr;
    if (b.model.device().gpu) {
#ifdef LUCE_USE_CUDA
        made = add_op(b.ctx, "rowmm_pack", GGML_TYPE_I8, rowmm_op_bytes(x->ne[1], x->ne[0]), 1, {x});
#endif
    } else {
        const int64_t bytes = x->ne[0] / 32 * int64_t(sizeof(PackedBlock));
        made = add_op(b.ctx, "pack_rows", GGML_TYPE_I8, bytes, x->ne[1], {x});
    }
    b.packed.emplace_back(x, made);
    return made;
}

// The products of those weights that take x in this form, in one op.
static void add_rows_matmul(const StepBuild &b, RowsInput input, const std::vector<ggml_tensor *> &weights,
                            ggml_tensor *x, std::vector<ggml_tensor *> &out) {
    std::vector<ggml_tensor *> args = {nullptr};
    int64_t values = 0;
    for (ggml_tensor *w : weights) {
        if (rows_input(w->type) == input) {
            args.push_back(w);
            values += w->ne[1] * x->ne[1];
        }
    }
    if (args.size() == 1) {
        return;
    }
    args[0] = input == RowsInput::packed ? packed(b, x) : x;
    ggml_tensor *y = add_op(b.ctx, *find_op("rows_matmul"), GGML_TYPE_F32, values, 1, args.data(),
                            int(args.size()), nullptr, 0);
    size_t offset = 0;
    for (size_t i = 0; i < weights.size(); i++) {
        if (const int64_t N = weights[i]->ne[1]; rows_input(weights[i]->type) == input) {
            out[i] = ggml_view_2d(b.ctx, y, N, x->ne[1], size_t(N) * sizeof(float), offset); // {N, T}
            offset += size_t(N * x->ne[1]) * sizeof(float);
        }
    }
}

#ifdef LUCE_USE_CUDA
// The products of packed weights, in one launch.
static void add_rowmm(const StepBuild &b, const std::vector<ggml_tensor *> &weights, ggml_tensor *x,
                      std::vector<ggml_tensor *> &out) {
    std::vector<ggml_tensor *> args = {nullptr, b.cache.rowmm_scratch()};
    int64_t values = 0;
    for (ggml_tensor *w : weights) {
        if (is_packed(w)) {
            args.push_back(w);
            values += w->ne[1] * x->ne[1];
        }
    }
    if (args.size() == 2) {
        return;
    }
    args[0] = packed(b, x);
    const int32_t T = int32_t(x->ne[1]);
    ggml_tensor *y =
        add_op(b.ctx, *find_op("rowmm"), GGML_TYPE_F32, values, 1, args.data(), int(args.size()), &T, 1);
    size_t offset = 0;
    for (size_t i = 0; i < weights.size(); i++) {
        if (const int64_t N = weights[i]->ne[1]; is_packed(weights[i])) {
            out[i] = ggml_view_2d(b.ctx, y, N, T, size_t(N) * sizeof(float), offset); // {N, T}
            offset += size_t(N) * size_t(T) * sizeof(float);
        }
    }
}
#endif

// Steps have matmuls of luce's own, whose rows do not depend on each other, and of which further rows cost little: on
// a CPU (rows_matmul) and on a GPU (rowmm). On a GPU weights lie in their order, so a prefill of few rows has them too,
// and one of many writes the weights out for cuBLAS (gemm_op.h).
std::vector<ggml_tensor *> matmuls(const StepBuild &b, const std::vector<ggml_tensor *> &weights,
                                   ggml_tensor *x) {
    std::vector<ggml_tensor *> out(weights.size());
#ifdef LUCE_USE_CUDA
    if (uses_gemm(b, x->ne[1])) {
        for (size_t i = 0; i < weights.size(); i++) {
            out[i] = add_gemm(b, weights[i], x);
        }
    } else if (b.model.device().gpu) {
        add_rowmm(b, weights, x, out);
    }
#endif
    if (!b.prefill() && !b.model.device().gpu) {
        add_rows_matmul(b, RowsInput::packed, weights, x, out);
        add_rows_matmul(b, RowsInput::f32, weights, x, out);
    }
    for (size_t i = 0; i < weights.size(); i++) {
        if (out[i] == nullptr) {
            out[i] = ggml_mul_mat(b.ctx, weights[i], x);
            ggml_prec_set_acc(out[i], GGML_PREC_F32); // cuBLAS may sum F16 products in F16 otherwise
        }
    }
    return out;
}

ggml_tensor *matmul(const StepBuild &b, ggml_tensor *weight, ggml_tensor *x) {
    return matmuls(b, {weight}, x)[0];
}

ggml_tensor *embed(const StepBuild &b, ggml_tensor *table) {
    ggml_tensor *tokens = b.in.tokens;
    if (!b.prefill()) { // rows may be drafts that never left the device
        tokens = add_op(b.ctx, "row_tokens", GGML_TYPE_I32, tokens->ne[0], 1, {tokens, b.cache.drafts()},
                        {int32_t(table->ne[1])});
    }
    return ggml_get_rows(b.ctx, table, tokens); // {E, T}
}

ggml_tensor *rope(const StepBuild &b, ggml_tensor *x, const AttentionShape &s) {
    if (s.rope_dim == 0) {
        return x;
    }
    const Yarn &y = s.yarn; // ggml scales by 1 + 0.1 ln(factor) itself where it blends
    const bool blends = y.factor > 1;
    const float scale = blends ? y.attention / (1.0f + 0.1f * std::log(y.factor)) : 1.0f;
    return ggml_rope_ext(b.ctx, x, b.in.positions, nullptr, int(s.rope_dim), GGML_ROPE_TYPE_NEOX,
                         int(y.n_ctx_trained), s.rope_base, 1.0f / y.factor, blends ? 1.0f : 0.0f, scale,
                         blends ? y.beta_fast : 0.0f, blends ? y.beta_slow : 0.0f);
}

void write_kv(const StepBuild &b, ggml_tensor *x, const Attention &w, const KvLayer &kv, float eps) {
    const int64_t D = w.shape.head_dim, Hkv = w.shape.n_head_kv, T = x->ne[1];
    const auto y = matmuls(b, {w.k, w.v}, x);
    ggml_tensor *k = y[0], *v = y[1]; // {D*Hkv, T}
    k = rms_norm(b.ctx, ggml_reshape_3d(b.ctx, k, D, Hkv, T), w.k_norm, eps);
    k = ggml_reshape_2d(b.ctx, rope(b, k, w.shape), D * Hkv, T); // {D*Hkv, T}
    // expanded here, since attention reads the cells and not this node
    ggml_build_forward_expand(b.graph, add_op(b.ctx, "kv_store", GGML_TYPE_I32, 1, 1,
                                              {k, v, kv.cells.k, kv.cells.v, b.in.ctl, b.in.pages},
                                              {b.prefill(), kv.owner, int32_t(D)}));
}

ggml_tensor *prefill_mask(const StepBuild &b, int32_t window) {
    return add_op(b.ctx, "prefill_mask", GGML_TYPE_F16, b.n_kv, b.in.tokens->ne[0], {b.in.ctl}, {0, window});
}

static int32_t bits(float x) {
    int32_t i;
    memcpy(&i, &x, sizeof(i));
    return i;
}

// A prefill: ggml's attention over the sequence's cells, put side by side. q {D, H, T} -> {D*H, T}
static ggml_tensor *attend_prefill(const StepBuild &b, ggml_tensor *q, ggml_tensor *q_gate,
                                   const AttentionShape &s, const KvLayer &kv, ggml_tensor *mask) {
    const int64_t D = s.head_dim, H = s.n_head, Hkv = s.n_head_kv, T = q->ne[2];
    const size_t f = sizeof(float);
    const ggml_type type = kv.cells.k->type == GGML_TYPE_F32 ? GGML_TYPE_F32 : GGML_TYPE_F16;
    const auto gathered = [&](ggml_tensor *pool) { // {D, n_kv, Hkv}
        ggml_tensor *t =
            add_op(b.ctx, "kv_gather", type, D * Hkv, b.n_kv, {pool, b.in.ctl, b.in.pages}, {int32_t(D)});
        return ggml_view_3d(b.ctx, t, D, b.n_kv, Hkv, t->nb[1], ggml_row_size(type, D), 0);
    };
    ggml_tensor *K = gathered(kv.cells.k), *V = gathered(kv.cells.v);
    ggml_tensor *o = ggml_flash_attn_ext(b.ctx, ggml_permute(b.ctx, q, 0, 2, 1, 3), K, V, mask,
                                         1.0f / std::sqrt(float(D)), 0.0f, s.softcap);
    ggml_prec_set_acc(o, GGML_PREC_F32);
    o = ggml_reshape_2d(b.ctx, o, D * H, T); // {D*H, T}
    ggml_tensor *gate = ggml_view_3d(b.ctx, q_gate, D, H, T, 2 * D * f, 2 * D * H * f, D * f);
    gate = ggml_sigmoid(b.ctx, ggml_cont_2d(b.ctx, gate, D * H, T)); // {D*H, T}
    return ggml_mul(b.ctx, o, gate);
}

// Values that the attention op needs beside its result: the CPU's needs none.
static int64_t attention_room(const StepBuild &b, const AttentionShape &s, int64_t T) {
#ifdef LUCE_USE_CUDA
    if (b.model.device().gpu) {
        AttentionArgs shape{};
        shape.pool.Hkv = int32_t(s.n_head_kv);
        shape.pool.D = int32_t(s.head_dim);
        shape.T = int32_t(T);
        shape.H = int32_t(s.n_head);
        shape.max_pages = int32_t(b.cache.max_pages());
        return attention_scratch(shape);
    }
#else
    (void) b, (void) s, (void) T;
#endif
    return 0;
}

ggml_tensor *attend_pages(const StepBuild &b, ggml_tensor *q, ggml_tensor *gate, const AttentionShape &s,
                          const KvLayer &kv, bool block) {
    const int64_t D = s.head_dim, H = s.n_head, T = q->ne[2];
    q = ggml_reshape_2d(b.ctx, q, D * H, T);
    ggml_tensor *o = // the result, then room for partial ones
        add_op(b.ctx, "attention", GGML_TYPE_F32, D * H * T + attention_room(b, s, T), 1,
               {q, gate == nullptr ? q : gate, kv.cells.k, kv.cells.v, b.in.ctl, b.in.pages},
               {int32_t(D), kv.owner == KV_HEAD ? 1 : 0, int32_t(s.window), int32_t(b.cache.max_pages()),
                bits(1.0f / std::sqrt(float(D))), bits(s.softcap), gate != nullptr, block});
    return ggml_view_2d(b.ctx, o, D * H, T, D * H * sizeof(float), 0);
}

ggml_tensor *attend(const StepBuild &b, ggml_tensor *x, const Attention &w, const KvLayer &kv,
                    ggml_tensor *mask, float eps) {
    const AttentionShape &s = w.shape;
    const int64_t D = s.head_dim, H = s.n_head, T = x->ne[1];
    const size_t f = sizeof(float);
    ggml_tensor *q_gate = matmul(b, w.q, x);                                        // {2*D*H, T}
    ggml_tensor *q = ggml_view_3d(b.ctx, q_gate, D, H, T, 2 * D * f, 2 * D * H * f, 0); // {D, H, T}
    q = rope(b, rms_norm(b.ctx, q, w.q_norm, eps), s);
    if (b.prefill()) {
        return matmul(b, w.out, attend_prefill(b, q, q_gate, s, kv, mask));
    }
    return matmul(b, w.out, attend_pages(b, q, q_gate, s, kv, false));
}

ggml_tensor *deltanet(const StepBuild &b, ggml_tensor *x, const DeltaNet &w, const DeltaState &state,
                      float eps) {
    const int64_t S = w.shape.state_size, Hv = w.shape.n_v_heads, C = w.shape.conv_dim(), T = x->ne[1];
    const CacheParams &p = b.cache.params();
    const std::initializer_list<int32_t> params = {int32_t(p.n_rows),
                                                   int32_t(p.n_sequences),
                                                   int32_t(w.shape.n_k_heads),
                                                   int32_t(Hv),
                                                   int32_t(S),
                                                   b.prefill() ? DELTA_APPEND : DELTA_VERIFY};

    const auto y = matmuls(b, {w.qkv, w.gate, w.beta, w.alpha}, x);
    ggml_tensor *qkv = y[0];                 // {C, T}
    ggml_tensor *z = y[1];                   // {Hv*S, T}
    ggml_tensor *beta = y[2], *alpha = y[3]; // {Hv, T}

    qkv = add_op(b.ctx, "deltanet_conv", GGML_TYPE_F32, C, T,
                 {qkv, w.conv, state.window, state.log, b.in.ctl}, params);
    ggml_tensor *o = add_op(b.ctx, "deltanet", GGML_TYPE_F32, Hv * S, T,
                            {qkv, alpha, beta, w.dt, w.a, state.state, state.log, b.in.ctl}, params);

    o = rms_norm(b.ctx, ggml_reshape_3d(b.ctx, o, S, Hv, T), w.norm, eps); // {S, Hv, T}
    o = ggml_mul(b.ctx, o, ggml_silu(b.ctx, ggml_reshape_3d(b.ctx, z, S, Hv, T)));
    return matmul(b, w.out, ggml_reshape_2d(b.ctx, o, S * Hv, T));
}

ggml_tensor *ffn(const StepBuild &b, ggml_tensor *x, const Ffn &w) {
    const auto y = matmuls(b, {w.gate, w.up}, x); // {FF, T} each
    return matmul(b, w.down, ggml_swiglu_split(b.ctx, y[0], y[1]));
}

} // namespace luce
