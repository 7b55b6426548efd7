#include "ops/matmul.h"

#ifdef LUCE_USE_CUDA

#include "common/kernels.h"
#include "moe/moe.h"
#include "ops/row.h"

#include <algorithm>
#include <cstring>

namespace luce {

int64_t rowmm_op_bytes(int64_t T, int64_t K) {
    return (T + ROWMM_MAX_ROWS - 1) / ROWMM_MAX_ROWS * rowmm_x_bytes(ROWMM_MAX_ROWS, K);
}

int64_t launch_scratch_bytes() {
    return cuda::rowmm_scratch_bytes() + DELTA_TURN_BYTES + MOE_COUNTER_BYTES;
}
LaunchScratch launch_scratch(const ggml_tensor *scratch) {
    uint8_t *begin = static_cast<uint8_t *>(scratch->data);
    uint8_t *counters = begin + scratch->ne[0] - MOE_COUNTER_BYTES;
    return {begin, counters - DELTA_TURN_BYTES, counters};
}

// Returns rows t and on of an op's argument.
static const float *rows(const ggml_tensor *x, int64_t t) {
    return reinterpret_cast<const float *>(static_cast<const uint8_t *>(x->data) + size_t(t) * x->nb[1]);
}

// Says how rows t and on of an op's first arguments are packed.
static RowmmPackArgs pack_args(const ggml_tensor *dst, int64_t t, RowmmInput input, float eps) {
    const ggml_tensor *x = dst->src[0];
    const ggml_tensor *w = input == ROWMM_RMS || input == ROWMM_HEAD_RMS ? dst->src[1] : nullptr;
    const ggml_tensor *y = input == ROWMM_SWIGLU ? dst->src[1] : dst->src[2];
    RowmmPackArgs a{};
    a.x = rows(x, t);
    a.x_row = int64_t(x->nb[1] / sizeof(float));
    a.T = int32_t(std::min<int64_t>(x->ne[1] - t, ROWMM_MAX_ROWS));
    a.K = x->ne[0];
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
    return a;
}

int rowmm_pack_op(const ggml_tensor *dst, void *stream, RowmmInput input, float eps) {
    const int64_t K = dst->src[0]->ne[0], T = dst->src[0]->ne[1];
    uint8_t *out = static_cast<uint8_t *>(dst->data);
    for (int64_t t = 0; t < T; t += ROWMM_MAX_ROWS) {
        RowmmPackArgs a = pack_args(dst, t, input, eps);
        a.out = out;
        if (const int error = cuda::rowmm_pack(a, stream); error != 0) {
            return error;
        }
        out += rowmm_x_bytes(ROWMM_MAX_ROWS, K);
    }
    return 0;
}

// Fills the launch of a node without its inputs and outputs. Weights are its arguments from `first` on.
static RowmmArgs launch_of(const ggml_tensor *node, int first) {
    const RowmmOp op = rowmm_op_of(node);
    RowmmArgs a{};
    a.K = node->src[first]->ne[0];
    a.T = op.T;
    a.normed = op.normed;
    a.eps = op.eps;
    a.overlap = 1;
    for (int i = first; i < GGML_MAX_SRC && node->src[i] != nullptr; i++) {
        const ggml_tensor *w = node->src[i];
        a.weights[a.n_weights++] = {w->type, w->ne[1], w->data, nullptr, w->ne[1], nullptr, 0};
    }
    return a;
}

// Says whether an op takes its row and the norm's weights in place of what was packed. Its launch norms and packs the row.
static bool takes_unpacked_row(const ggml_tensor *node) {
    const char *name = custom_op(node)->name;
    return strcmp(name, "rowmm_norm") == 0 || strcmp(name, "rowmm_parts_norm") == 0;
}
static void take_row(RowmmArgs &a, const ggml_tensor *node) {
    a.x = nullptr;
    a.row = static_cast<const float *>(node->src[0]->data);
    a.norm = static_cast<const float *>(node->src[1]->data);
}

int rowmm_op(const ggml_tensor *dst, void *stream) {
    const bool add = strcmp(custom_op(dst)->name, "rowmm_add") == 0, norms = takes_unpacked_row(dst);
    const int32_t T = rowmm_op_of(dst).T;
    const uint8_t *x = static_cast<const uint8_t *>(dst->src[0]->data);
    for (int32_t t = 0; t < T; t += ROWMM_MAX_ROWS) {
        RowmmArgs a = launch_of(dst, add || norms ? 3 : 2);
        a.T = std::min(T - t, ROWMM_MAX_ROWS);
        a.x = x;
        a.scratch = launch_scratch(dst->src[norms ? 2 : 1]).partial;
        if (norms) {
            take_row(a, dst);
        }
        float *out = static_cast<float *>(dst->data);
        for (int i = 0; i < a.n_weights; i++) {
            RowmmWeights &weights = a.weights[i];
            weights.out = out + t * weights.N;
            if (add) {
                weights.residual = rows(dst->src[2], t);
                weights.residual_row = int64_t(dst->src[2]->nb[1] / sizeof(float));
            }
            out += T * weights.N;
        }
        if (const int error = cuda::rowmm(a, stream); error != 0) {
            return error;
        }
        x += rowmm_x_bytes(ROWMM_MAX_ROWS, a.K);
    }
    return 0;
}

// ---- parts ----

int64_t rowmm_parts_op_bytes(int64_t T, const std::vector<ggml_tensor *> &weights) {
    RowmmArgs a{};
    a.T = int32_t(T);
    for (const ggml_tensor *w : weights) {
        a.weights[a.n_weights++].N = w->ne[1];
    }
    return rowmm_parts_bytes(a);
}

RowmmArgs parts_launch(const ggml_tensor *node) {
    RowmmArgs a = launch_of(node, takes_unpacked_row(node) ? 2 : 1);
    a.parts = static_cast<float *>(node->data);
    if (takes_unpacked_row(node)) {
        take_row(a, node);
    } else {
        a.x = node->src[0]->data;
    }
    return a;
}

int rowmm_parts_op(const ggml_tensor *dst, void *stream) {
    return cuda::rowmm(parts_launch(dst), stream);
}

int rowmm_parts_rms_op(const ggml_tensor *dst, void *stream) {
    const ggml_tensor *w = dst->src[0], *x = dst->src[2];
    const RowmmArgs launch = parts_launch(dst->src[1]);
    RowmmPackArgs a{};
    if (x != nullptr) {
        a.x = rows(x, 0);
        a.x_row = int64_t(x->nb[1] / sizeof(float));
    }
    a.T = launch.T;
    a.K = w->ne[0];
    a.copy = static_cast<float *>(dst->data);
    a.out = a.copy + a.K * a.T;
    a.input = ROWMM_RMS;
    a.w = static_cast<const float *>(w->data);
    a.parts = &launch;
    a.overlap = 1;
    return cuda::rowmm_pack(a, stream);
}

int rowmm_parts_swiglu_op(const ggml_tensor *dst, void *stream) {
    const RowmmArgs launch = parts_launch(dst->src[0]);
    RowmmPackArgs a{};
    a.T = launch.T;
    a.K = launch.weights[0].N;
    a.out = dst->data;
    a.input = ROWMM_SWIGLU;
    a.parts = &launch;
    a.overlap = 1;
    return cuda::rowmm_pack(a, stream);
}

} // namespace luce

#endif
