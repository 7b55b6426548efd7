#include "ops/prompt_matmul.h"

#ifdef LUCE_USE_CUDA

#include "matmul/prompt.h"
#include "ops/row.h"

namespace luce {
namespace {

// Returns an input as gemm takes it.
ggml_tensor *pack(const StepBuild &b, const MatmulInput &in) {
    const int64_t bytes = gemm_x_bytes(in.T, in.K);
    const auto op = [&](const char *name, std::initializer_list<ggml_tensor *> args) {
        return add_op(b.ctx, name, GGML_TYPE_I8, bytes, 1, args, {bits_of_real(in.eps)});
    };
    const bool side_by_side = ggml_is_contiguous(in.x) && (in.y == nullptr || ggml_is_contiguous(in.y));
    if (in.kind == ROWMM_RMS && side_by_side) {
        return op("gemm_pack_norm", {in.x, in.w});
    }
    if (in.kind == ROWMM_SWIGLU && side_by_side) {
        return op("gemm_pack_swiglu", {in.x, in.y});
    }
    if (in.kind == ROWMM_GATED && ggml_is_contiguous(in.x)) {
        return op("gemm_pack_gated", {in.x, in.y});
    }
    if (in.kind == ROWMM_HEAD_RMS && side_by_side) {
        if (const int64_t head = in.w->ne[0]; head == 16 || head == 32 || head == 64 || head == 128) {
            return op("gemm_pack_heads", {in.x, in.y, in.w});
        }
    }
    ggml_tensor *x = input_values(b, in);
    return op("gemm_pack", {ggml_is_contiguous(x) ? x : ggml_cont(b.ctx, x)});
}

} // namespace

bool uses_gemm(const StepBuild &b, int64_t T) {
    return b.prefill() && b.model.device().gpu && T >= GEMM_ROWS;
}

ggml_tensor *add_gemm(const StepBuild &b, ggml_tensor *weight, const MatmulInput &input,
                      ggml_tensor *residual) {
    const int64_t K = weight->ne[0], N = weight->ne[1], T = input.T;
    if (!uses_gemm(b, T) || !is_packed(weight) || !gemm_has(K) ||
        size_t(K * N * 2) > ggml_nbytes(b.cache.gemm_scratch())) {
        return nullptr;
    }
    ggml_tensor *rows = made_input(b, input, true, [&] { return pack(b, input); });
    if (residual != nullptr) {
        return add_op(b.ctx, "gemm_add", GGML_TYPE_F32, N, T,
                      {rows, weight, b.cache.gemm_scratch(), residual});
    }
    return add_op(b.ctx, "gemm", GGML_TYPE_F32, N, T, {rows, weight, b.cache.gemm_scratch()}); // {N, T}
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
    if (input == ROWMM_GATED) {
        a.y_row = 2 * a.K;
        a.head = int32_t(second->ne[0]);
    }
    if (input == ROWMM_HEAD_RMS) {
        a.w = values(third);
        a.head = int32_t(third->ne[0]);
    }
    return cuda::gemm_pack(a, stream);
}

int gemm_op(const ggml_tensor *dst, void *stream) {
    const ggml_tensor *x = dst->src[0], *w = dst->src[1], *scratch = dst->src[2], *residual = dst->src[3];
    const int64_t K = w->ne[0], N = w->ne[1];
    if (const int error = cuda::rowmm_unpack({w->type, K, N, w->data, scratch->data}, stream); error != 0) {
        return error;
    }
    return cuda::gemm({int32_t(dst->ne[1]), K, N, x->data, scratch->data, static_cast<float *>(dst->data),
                       residual == nullptr ? nullptr : static_cast<const float *>(residual->data)},
                      stream);
}

} // namespace luce

#endif
