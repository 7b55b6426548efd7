#include "ops/matmul.h"

#ifdef LUCE_USE_CUDA

#include "moe/moe.h"

namespace luce {

int64_t rowmm_op_bytes(int64_t T, int64_t K) {
    return (T + ROWMM_MAX_ROWS - 1) / ROWMM_MAX_ROWS * rowmm_x_bytes(ROWMM_MAX_ROWS, K);
}

int64_t launch_scratch_bytes() {
    return cuda::rowmm_scratch_bytes() + DELTA_TURN_BYTES + MOE_COUNTER_BYTES;
}
LaunchScratch launch_scratch(const ggml_tensor &scratch, uint8_t *address) {
    uint8_t *counters = address + scratch.ne[0] - MOE_COUNTER_BYTES;
    return {address, counters - DELTA_TURN_BYTES, counters};
}

int pack_blocks(const RowmmPackArgs &all, void *stream) {
    RowmmPackArgs a = all;
    for (int32_t t = 0; t < all.T; t += ROWMM_MAX_ROWS) {
        a.T = std::min(all.T - t, ROWMM_MAX_ROWS);
        if (const int error = cuda::rowmm_pack(a, stream); error != 0) {
            return error;
        }
        a.x += ROWMM_MAX_ROWS * a.x_row;
        a.y = a.y == nullptr ? nullptr : a.y + ROWMM_MAX_ROWS * a.y_row;
        a.out = static_cast<uint8_t *>(a.out) + rowmm_x_bytes(ROWMM_MAX_ROWS, a.K);
    }
    return 0;
}

int multiply_blocks(const RowmmArgs &all, void *stream) {
    RowmmArgs a = all;
    for (int32_t t = 0; t < all.T; t += ROWMM_MAX_ROWS) {
        a.T = std::min(all.T - t, ROWMM_MAX_ROWS);
        if (const int error = cuda::rowmm(a, stream); error != 0) {
            return error;
        }
        a.x =
            a.x == nullptr ? nullptr : static_cast<const uint8_t *>(a.x) + rowmm_x_bytes(ROWMM_MAX_ROWS, a.K);
        for (int i = 0; i < a.n_weights; i++) {
            RowmmWeights &w = a.weights[i];
            w.out += ROWMM_MAX_ROWS * w.out_row;
            w.residual = w.residual == nullptr ? nullptr : w.residual + ROWMM_MAX_ROWS * w.residual_row;
        }
    }
    return 0;
}

int prompt_matmul(const PromptMatmulArgs &args, void *stream) {
    const int error = cuda::rowmm_unpack(args.unpack, stream);
    return error != 0 ? error : cuda::gemm(args.product, stream);
}

} // namespace luce

#endif
