// Adds matmuls to a graph, with what is computed into their input.
#include "ops.h"

#include "../kernels/gemm.h"
#include "custom_op.h"
#include "gemm_op.h"
#include "rowmm_op.h"
#include "rows_matmul.h"

namespace luce {

MatmulInput plain(ggml_tensor *x) {
    return {ROWMM_PLAIN, x, nullptr, nullptr, 0};
}

MatmulInput rms(ggml_tensor *x, ggml_tensor *w, float eps) {
    return {ROWMM_RMS, x, w, nullptr, eps};
}

MatmulInput swiglu(ggml_tensor *gate, ggml_tensor *up) {
    return {ROWMM_SWIGLU, gate, nullptr, up, 0};
}

MatmulInput gated_heads(ggml_tensor *x, ggml_tensor *w, ggml_tensor *gate, float eps) {
    return {ROWMM_HEAD_RMS, x, w, gate, eps};
}

MatmulInput gated(ggml_tensor *x, ggml_tensor *gate) {
    return {ROWMM_GATED, x, nullptr, gate, 0};
}

ggml_tensor *rms_norm(ggml_context *ctx, ggml_tensor *x, ggml_tensor *weight, float eps) {
    return ggml_mul(ctx, ggml_rms_norm(ctx, x, eps), weight);
}

ggml_tensor *made_input(const StepBuild &b, const MatmulInput &input, bool packed,
                        const std::function<ggml_tensor *()> &make) {
    for (const MadeInput &known : b.inputs) {
        if (known.input == input && known.packed == packed) {
            return known.node;
        }
    }
    ggml_tensor *node = make();
    b.inputs.push_back({input, packed, node});
    return node;
}

ggml_tensor *input_values(const StepBuild &b, const MatmulInput &in) {
    if (in.kind == ROWMM_PLAIN) {
        return in.x;
    }
    return made_input(b, in, false, [&] {
        ggml_context *ctx = b.ctx;
        if (in.kind == ROWMM_RMS) {
            return rms_norm(ctx, in.x, in.w, in.eps);
        }
        if (in.kind == ROWMM_SWIGLU) {
            return ggml_swiglu_split(ctx, in.x, in.y);
        }
        if (in.kind == ROWMM_GATED) {
            ggml_tensor *gate = ggml_cont_2d(ctx, in.y, in.x->ne[0], in.x->ne[1]); // {D*H, T}
            return ggml_mul(ctx, in.x, ggml_sigmoid(ctx, gate));
        }
        const int64_t S = in.w->ne[0], H = in.x->ne[0] / S, T = in.x->ne[1];
        ggml_tensor *x = rms_norm(ctx, ggml_reshape_3d(ctx, in.x, S, H, T), in.w, in.eps); // {S, H, T}
        x = ggml_mul(ctx, x, ggml_silu(ctx, ggml_reshape_3d(ctx, in.y, S, H, T)));
        return ggml_reshape_2d(ctx, x, S * H, T);
    });
}

ggml_tensor *packed_rows(const StepBuild &b, ggml_tensor *x) {
    return made_input(b, plain(x), true, [&] {
        const int64_t bytes = x->ne[0] / 32 * int64_t(sizeof(PackedBlock));
        return add_op(b.ctx, "pack_rows", GGML_TYPE_I8, bytes, x->ne[1], {x});
    });
}

// The products of those weights that take x in this form, in one op.
static void add_rows_matmul(const StepBuild &b, RowsInput form, const std::vector<ggml_tensor *> &weights,
                            ggml_tensor *x, std::vector<ggml_tensor *> &out) {
    std::vector<ggml_tensor *> args = {nullptr};
    int64_t values = 0;
    for (ggml_tensor *w : weights) {
        if (rows_input(w->type) == form) {
            args.push_back(w);
            values += w->ne[1] * x->ne[1];
        }
    }
    if (args.size() == 1) {
        return;
    }
    args[0] = form == RowsInput::packed ? packed_rows(b, x) : x;
    ggml_tensor *y = add_op(b.ctx, *find_op("rows_matmul"), GGML_TYPE_F32, values, 1, args.data(),
                            int(args.size()), nullptr, 0);
    size_t offset = 0;
    for (size_t i = 0; i < weights.size(); i++) {
        if (const int64_t N = weights[i]->ne[1]; rows_input(weights[i]->type) == form) {
            out[i] = ggml_view_2d(b.ctx, y, N, x->ne[1], size_t(N) * sizeof(float), offset); // {N, T}
            offset += size_t(N * x->ne[1]) * sizeof(float);
        }
    }
}

#ifdef LUCE_USE_CUDA
static ggml_tensor *packed(const StepBuild &b, const MatmulInput &in) {
    const int64_t bytes = rowmm_op_bytes(in.x->ne[1], in.x->ne[0]);
    const int32_t eps = bits_of_real(in.eps);
    switch (in.kind) {
        case ROWMM_RMS: return add_op(b.ctx, "rowmm_pack_rms", GGML_TYPE_I8, bytes, 1, {in.x, in.w}, {eps});
        case ROWMM_SWIGLU:
            return add_op(b.ctx, "rowmm_pack_swiglu", GGML_TYPE_I8, bytes, 1, {in.x, in.y}, {eps});
        case ROWMM_HEAD_RMS:
            return add_op(b.ctx, "rowmm_pack_gated", GGML_TYPE_I8, bytes, 1, {in.x, in.w, in.y}, {eps});
        default: return add_op(b.ctx, "rowmm_pack", GGML_TYPE_I8, bytes, 1, {in.x}, {eps});
    }
}

// The products of packed weights, in one launch. A residual is added to that of the one weight there is.
static void add_rowmm(const StepBuild &b, const std::vector<ggml_tensor *> &weights, const MatmulInput &in,
                      ggml_tensor *residual, std::vector<ggml_tensor *> &out) {
    std::vector<ggml_tensor *> args = {nullptr, b.cache.rowmm_scratch()};
    if (residual != nullptr) {
        args.push_back(residual);
    }
    const int32_t T = int32_t(in.x->ne[1]);
    bool all = true;
    int64_t n = 0;
    for (ggml_tensor *w : weights) {
        if (is_packed(w)) {
            args.push_back(w);
            n += w->ne[1] * T;
        }
        all = all && is_packed(w);
    }
    if (n == 0) {
        return;
    }
    // what rowmm_pack does not compute: heads of fewer values, and attention's gate
    const bool packs = in.kind != ROWMM_GATED && (in.kind != ROWMM_HEAD_RMS || in.w->ne[0] >= 32);
    const MatmulInput form =
        all && packs ? in : plain(input_values(b, in)); // ggml's matmul needs the values too
    args[0] = made_input(b, form, true, [&] { return packed(b, form); });
    const CustomOp &op = *find_op(residual != nullptr ? "rowmm_add" : "rowmm");
    ggml_tensor *y = add_op(b.ctx, op, GGML_TYPE_F32, n, 1, args.data(), int(args.size()), &T, 1);
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
// a CPU (rows_matmul), where a prefill has them too, and on a GPU (rowmm). On a GPU weights lie in their order, so a
// prefill of few rows has them too, and one of many writes the weights out for cuBLAS (gemm_op.h), but for K that
// cuBLAS does not take: ggml's matmul could not read packed weights.
static std::vector<ggml_tensor *> products(const StepBuild &b, const std::vector<ggml_tensor *> &weights,
                                           const MatmulInput &in, ggml_tensor *residual) {
    std::vector<ggml_tensor *> out(weights.size());
    bool added = false;
#ifdef LUCE_USE_CUDA
    if (uses_gemm(b, in.x->ne[1]) && gemm_has(in.x->ne[0])) {
        for (size_t i = 0; i < weights.size(); i++) {
            out[i] = add_gemm(b, weights[i], in, residual);
        }
        added = out[0] != nullptr;
    } else if (b.model.device().gpu) {
        add_rowmm(b, weights, in, residual, out);
        added = out[0] != nullptr;
    }
#endif
    if (!b.model.device().gpu) {
        add_rows_matmul(b, RowsInput::packed, weights, input_values(b, in), out);
        add_rows_matmul(b, RowsInput::f32, weights, input_values(b, in), out);
    }
    for (size_t i = 0; i < weights.size(); i++) {
        if (out[i] == nullptr) {
            out[i] = ggml_mul_mat(b.ctx, weights[i], input_values(b, in));
            ggml_prec_set_acc(out[i], GGML_PREC_F32); // cuBLAS may sum F16 products in F16 otherwise
        }
        if (residual != nullptr && !added) {
            out[i] = ggml_add(b.ctx, out[i], residual);
        }
    }
    return out;
}

std::vector<ggml_tensor *> matmuls(const StepBuild &b, const std::vector<ggml_tensor *> &weights,
                                   const MatmulInput &input) {
    return products(b, weights, input, nullptr);
}

ggml_tensor *matmul(const StepBuild &b, ggml_tensor *weight, const MatmulInput &input,
                    ggml_tensor *residual) {
    return products(b, {weight}, input, residual)[0];
}

} // namespace luce
