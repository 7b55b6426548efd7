#include "rowmm_op.h"

#ifdef LUCE_USE_CUDA

#include <algorithm>

namespace luce {

int64_t rowmm_op_bytes(int64_t T, int64_t K) {
    return (T + ROWMM_MAX_ROWS - 1) / ROWMM_MAX_ROWS * rowmm_x_bytes(ROWMM_MAX_ROWS, K);
}

// Rows t and on of an op's argument.
static const float *rows(const ggml_tensor *x, int64_t t) {
    return reinterpret_cast<const float *>(static_cast<const uint8_t *>(x->data) + size_t(t) * x->nb[1]);
}

int rowmm_pack_op(const ggml_tensor *dst, void *stream, RowmmInput input, float eps) {
    const ggml_tensor *x = dst->src[0];
    const ggml_tensor *w = input == ROWMM_RMS || input == ROWMM_HEAD_RMS ? dst->src[1] : nullptr;
    const ggml_tensor *y = input == ROWMM_SWIGLU ? dst->src[1] : dst->src[2];
    const int64_t K = x->ne[0], T = x->ne[1];
    uint8_t *out = static_cast<uint8_t *>(dst->data);
    for (int64_t t = 0; t < T; t += ROWMM_MAX_ROWS) {
        RowmmPackArgs a{};
        a.x = rows(x, t);
        a.x_row = int64_t(x->nb[1] / sizeof(float));
        a.T = int32_t(std::min<int64_t>(T - t, ROWMM_MAX_ROWS));
        a.K = K;
        a.out = out;
        a.input = input;
        a.eps = eps;
        a.overlap = 1;
        if (w != nullptr) {
            a.w = static_cast<const float *>(w->data);
            a.head = int32_t(w->ne[0]);
        }
        if (y != nullptr) {
            a.y = rows(y, t);
            a.y_row = int64_t(y->nb[1] / sizeof(float));
        }
        if (const int error = cuda::rowmm_pack(a, stream); error != 0) {
            return error;
        }
        out += rowmm_x_bytes(ROWMM_MAX_ROWS, K);
    }
    return 0;
}

int rowmm_op(const ggml_tensor *dst, void *stream, int32_t T, bool add) {
    const int first = add ? 3 : 2; // weight
    const int64_t K = dst->src[first]->ne[0];
    const uint8_t *x = static_cast<const uint8_t *>(dst->src[0]->data);
    for (int32_t t = 0; t < T; t += ROWMM_MAX_ROWS) {
        RowmmArgs a{};
        a.T = std::min(T - t, ROWMM_MAX_ROWS);
        a.K = K;
        a.x = x;
        a.scratch = dst->src[1]->data;
        a.overlap = 1;
        float *out = static_cast<float *>(dst->data);
        for (int i = first; i < GGML_MAX_SRC && dst->src[i] != nullptr; i++) {
            const ggml_tensor *w = dst->src[i];
            RowmmWeights &weights = a.weights[a.n_weights++];
            weights.type = w->type;
            weights.N = w->ne[1];
            weights.packed = w->data;
            weights.out = out + t * w->ne[1];
            weights.out_row = w->ne[1];
            if (add) {
                weights.residual = rows(dst->src[2], t);
                weights.residual_row = int64_t(dst->src[2]->nb[1] / sizeof(float));
            }
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
