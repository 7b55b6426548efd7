#include "gemm_op.h"

#ifdef LUCE_USE_CUDA

#include "../kernels/gemm.h"
#include "custom_op.h"

#include <cstring>

namespace luce {
namespace {

int32_t bits(const ggml_tensor *norm) { // of the eps of a ggml_rms_norm
    return norm->op_params[0];
}

bool is_norm(const ggml_tensor *x) { // RMS(a) * w
    return x->op == GGML_OP_MUL && x->src[0]->op == GGML_OP_RMS_NORM &&
           ggml_is_contiguous(x->src[0]->src[0]) && ggml_is_vector(x->src[1]) && x->src[1]->ne[0] == x->ne[0];
}

ggml_tensor *rows_of(const StepBuild &b, ggml_tensor *t, const ggml_tensor *like) {
    return ggml_reshape_2d(b.ctx, t, like->ne[0], like->ne[1]);
}

// x {K, T} as gemm takes it. Where x is a norm or a gate of other rows, it is packed from those, and x itself is not
// computed.
ggml_tensor *pack(const StepBuild &b, ggml_tensor *x) {
    const int64_t bytes = gemm_x_bytes(x->ne[1], x->ne[0]);
    const auto op = [&](const char *name, std::initializer_list<ggml_tensor *> args,
                        std::initializer_list<int32_t> params = {}) {
        return add_op(b.ctx, name, GGML_TYPE_I8, bytes, 1, args, params);
    };
    if (is_norm(x) && ggml_n_dims(x) <= 2) {
        const ggml_tensor *norm = x->src[0];
        return op("gemm_pack_norm", {norm->src[0], x->src[1]}, {bits(norm)});
    }
    if (x->op == GGML_OP_GLU && ggml_get_glu_op(x) == GGML_GLU_OP_SWIGLU && x->src[1] != nullptr &&
        ggml_is_contiguous(x->src[0]) && ggml_is_contiguous(x->src[1])) {
        return op("gemm_pack_swiglu", {x->src[0], x->src[1]});
    }
    const ggml_tensor *gated = x->op == GGML_OP_RESHAPE ? x->src[0] : x; // norm of each head, times silu(z)
    if (gated->op == GGML_OP_MUL && is_norm(gated->src[0]) && gated->src[1]->op == GGML_OP_UNARY &&
        ggml_get_unary_op(gated->src[1]) == GGML_UNARY_OP_SILU && ggml_is_contiguous(gated->src[1]->src[0])) {
        ggml_tensor *norm = gated->src[0], *o = norm->src[0]->src[0], *z = gated->src[1]->src[0];
        if (const int64_t head = norm->src[1]->ne[0]; head == 16 || head == 32 || head == 64 || head == 128) {
            return op("gemm_pack_heads", {rows_of(b, o, x), rows_of(b, z, x), norm->src[1]},
                      {bits(norm->src[0])});
        }
    }
    return op("gemm_pack", {x});
}

ggml_tensor *packed(const StepBuild &b, ggml_tensor *x) {
    for (const auto &[input, made] : b.packed) {
        if (input == x) {
            return made;
        }
    }
    b.packed.emplace_back(x, pack(b, x));
    return b.packed.back().second;
}

} // namespace

bool uses_gemm(const StepBuild &b, int64_t T) {
    return b.prefill() && b.model.device().own_matmul && T >= GEMM_ROWS;
}

ggml_tensor *add_gemm(const StepBuild &b, ggml_tensor *weight, ggml_tensor *x) {
    const int64_t K = weight->ne[0], N = weight->ne[1], T = x->ne[1];
    if (!uses_gemm(b, T) || !is_packed(weight) || !gemm_has(K) || !ggml_is_contiguous(x)) {
        return nullptr;
    }
    ggml_tensor *rows = packed(b, x);
    ggml_tensor *w = add_op(b.ctx, "unpack", GGML_TYPE_F16, K, N, {weight}); // {K, N}
    return add_op(b.ctx, "gemm", GGML_TYPE_F32, N, T, {rows, w});            // {N, T}
}

int gemm_pack_op(const ggml_tensor *dst, void *stream, int32_t input, float eps) {
    const ggml_tensor *x = dst->src[0], *second = dst->src[1], *third = dst->src[2];
    const auto values = [](const ggml_tensor *t) { return static_cast<const float *>(t->data); };
    RowmmPackArgs a{};
    a.x = values(x);
    a.x_row = a.y_row = a.K = x->ne[0];
    a.T = int32_t(x->ne[1]);
    a.out = dst->data;
    a.input = input;
    a.eps = eps;
    if (input == ROWMM_RMS) {
        a.w = values(second);
    } else if (input != ROWMM_PLAIN) {
        a.y = values(second);
    }
    if (input == ROWMM_HEAD_RMS) {
        a.w = values(third);
        a.head = int32_t(third->ne[0]);
    }
    return cuda::gemm_pack(a, stream);
}

int unpack_op(const ggml_tensor *dst, void *stream) {
    const ggml_tensor *w = dst->src[0];
    return cuda::rowmm_unpack({w->type, w->ne[0], w->ne[1], w->data, dst->data}, stream);
}

int gemm_op(const ggml_tensor *dst, void *stream) {
    const ggml_tensor *w = dst->src[1];
    return cuda::gemm({int32_t(dst->ne[1]), w->ne[0], w->ne[1], dst->src[0]->data, w->data,
                       static_cast<float *>(dst->data)},
                      stream);
}

} // namespace luce

#endif
