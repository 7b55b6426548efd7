// Packs whole rows that are normed behind, of which a block has one and a warp a chunk (matmul/pack_post.cuh, moe/post.cu).
#pragma once

#include "matmul/pack.cuh"
#include "matmul/ptx.cuh"
#include "matmul/shape.h"

namespace luce {

// Returns what the norm of a row multiplies it by, where warps have left the sums of squares of their chunks.
__device__ __forceinline__ float post_norm(const float *of_chunks, int chunks, int K, float eps) {
    float sum = 0;
    for (int i = 0; i < chunks; i++) {
        sum += of_chunks[i];
    }
    return rsqrtf(sum / float(K) + eps);
}

// Packs a warp's chunk of a row that is normed behind, times that norm's weights.
__device__ __forceinline__ void pack_behind(float (&v)[OWN], const float *weights, uint8_t *out,
                                            const RowsLayout &layout, int T, int K, int row, int chunk,
                                            int lane) {
    const int chunks = int(chunks_of(K)), k = chunk * CHUNK + lane * OWN, C = layout.columns;
    const float sum = warp_sum(squares(v), WARP);
    if (lane == 0) {
        reinterpret_cast<float *>(out + squares_offset(T, K))[row * chunks + chunk] = sum;
    }
    float w[OWN];
    load_values(w, weights, k < K ? k : 0, K);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        v[i] *= w[i];
    }
    pack_chunk(out + (row / layout.set * int64_t(chunks) + chunk) * chunk_bytes(C), C, row % layout.set,
               layout.wide, v, largest(v), lane);
}

} // namespace luce
