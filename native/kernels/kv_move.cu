// Moves accepted KV rows down. A thread owns one word of a cell in every row, so no thread waits for another.
// A source is never a row that an earlier move has filled (rows[i] >= i), so a batch of rows may be read
// before any of it is written; batches run in order, since a later move may fill an earlier one's source.
#include "kernels.h"

#include <cuda_runtime.h>

namespace luce {
namespace {

constexpr int THREADS = 128;
constexpr int BATCH = 8;

// grid: words of a cell, then k and v.
template <typename Word> __global__ void __launch_bounds__(THREADS) kv_move_kernel(KvMoveArgs a) {
    uint8_t *cache = blockIdx.y == 0 ? a.k : a.v;
    const int64_t row = blockIdx.y == 0 ? a.k_row : a.v_row;
    const int64_t offset = (int64_t(blockIdx.x) * THREADS + threadIdx.x) * int64_t(sizeof(Word));
    if (offset >= row) {
        return;
    }
    const int32_t base = a.path[0], n = a.path[1];
    for (int32_t i0 = 0; i0 < n; i0 += BATCH) {
        Word word[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (i0 + i < n) {
                word[i] = *reinterpret_cast<const Word *>(cache + (base + a.path[2 + i0 + i]) * row + offset);
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (i0 + i < n) {
                *reinterpret_cast<Word *>(cache + (base + i0 + i) * row + offset) = word[i];
            }
        }
    }
}

template <typename Word> void launch(const KvMoveArgs &a, cudaStream_t stream) {
    const int64_t words = (a.k_row > a.v_row ? a.k_row : a.v_row) / int64_t(sizeof(Word));
    const dim3 grid(unsigned((words + THREADS - 1) / THREADS), 2);
    kv_move_kernel<Word><<<grid, THREADS, 0, stream>>>(a);
}

} // namespace

int cuda::kv_move(const KvMoveArgs &args, void *stream) {
    if (args.k_row <= 0 || args.v_row <= 0 || args.k_row % 4 != 0 || args.v_row % 4 != 0) {
        return int(cudaErrorInvalidValue);
    }
    const uintptr_t bits = reinterpret_cast<uintptr_t>(args.k) | reinterpret_cast<uintptr_t>(args.v) |
                           uintptr_t(args.k_row) | uintptr_t(args.v_row);
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    if (bits % sizeof(uint4) == 0) {
        launch<uint4>(args, st);
    } else {
        launch<uint32_t>(args, st);
    }
    return int(cudaGetLastError());
}

} // namespace luce
