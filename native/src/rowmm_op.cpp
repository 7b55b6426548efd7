#include "rowmm_op.h"

#ifdef LUCE_USE_CUDA

#include "../kernels/rowmm.h"

#include <algorithm>

namespace luce {

int64_t rowmm_op_bytes(int64_t T, int64_t K) {
    return (T + ROWMM_MAX_ROWS - 1) / ROWMM_MAX_ROWS * rowmm_x_bytes(ROWMM_MAX_ROWS, K);
}

int rowmm_pack_op(const ggml_tensor *dst, void *stream) {
    const ggml_tensor *x = dst->src[0];
    const int64_t K = x->ne[0], T = x->ne[1];
    uint8_t *out = static_cast<uint8_t *>(dst->data);
    for (int64_t t = 0; t < T; t += ROWMM_MAX_ROWS) {
        RowmmPackArgs a{};
        a.x = static_cast<const float *>(x->data) + t * K;
        a.x_row = K;
        a.T = int32_t(std::min<int64_t>(T - t, ROWMM_MAX_ROWS));
        a.K = K;
        a.out = out;
        if (const int error = cuda::rowmm_pack(a, stream); error != 0) {
            return error;
        }
        out += rowmm_x_bytes(ROWMM_MAX_ROWS, K);
    }
    return 0;
}

int rowmm_op(const ggml_tensor *dst, void *stream, int32_t T) {
    const int64_t K = dst->src[2]->ne[0];
    const uint8_t *x = static_cast<const uint8_t *>(dst->src[0]->data);
    for (int32_t t = 0; t < T; t += ROWMM_MAX_ROWS) {
        RowmmArgs a{};
        a.T = std::min(T - t, ROWMM_MAX_ROWS);
        a.K = K;
        a.x = x;
        a.scratch = dst->src[1]->data;
        float *out = static_cast<float *>(dst->data);
        for (int i = 2; i < GGML_MAX_SRC && dst->src[i] != nullptr; i++) {
            const ggml_tensor *w = dst->src[i];
            RowmmWeights &weights = a.weights[a.n_weights++];
            weights.type = w->type;
            weights.N = w->ne[1];
            weights.packed = w->data;
            weights.out = out + t * w->ne[1];
            weights.out_row = w->ne[1];
            out += T * w->ne[1];
        }
        if (const int error = cuda::rowmm(a, stream); error != 0) {
            return error;
        }
        x += rowmm_x_bytes(ROWMM_MAX_ROWS, K);
    }
    return 0;
}

} // namespace luce

#endif
