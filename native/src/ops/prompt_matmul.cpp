#include "ops/prompt_matmul.h"

#ifdef LUCE_USE_CUDA

#include "matmul/prompt.h"
#include "ops/row.h"

namespace luce {
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
