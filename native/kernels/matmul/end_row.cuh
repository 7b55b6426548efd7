// Ends whole rows that are normed ahead of their residual, of which a block has one and a warp a chunk (matmul/pack_post.cuh,
// moe/post.cu). Sums of squares of chunks are added in their order.
#pragma once

#include "matmul/pack.cuh"
#include "matmul/ptx.cuh"
#include "matmul/quantised.h"
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

// Ends a row as RowmmPackArgs.post says: (x + RMS(v) * w) * post_scale is written, and packed where there is `out`. A lane has 8
// values of a warp's chunk, and what it has of v behind the row's end does not count. All warps of the block come here.
__device__ __forceinline__ void end_row(const RowmmPackArgs &a, const RowsLayout &layout, int row,
                                        float (&v)[OWN], const float (&x)[OWN], const float (&w)[OWN],
                                        float *of_chunks) {
    const int lane = threadIdx.x % WARP, chunk = threadIdx.x / WARP, chunks = int(blockDim.x) / WARP;
    const int K = int(a.K), k = chunk * CHUNK + lane * OWN, C = layout.columns;
    const bool there = k < K; // K is a multiple of 8
    const float sum = warp_sum(there ? squares(v) : 0.0f, WARP);
    if (lane == 0) {
        of_chunks[chunk] = sum;
    }
    __syncthreads();
    const float scale = post_norm(of_chunks, chunks, K, a.eps);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        v[i] = there ? (x[i] + v[i] * scale * w[i]) * a.post_scale : 0.0f;
    }
    if (there) {
        store_values(a.copy + int64_t(row) * K, v, k, K);
    }
    if (a.out == nullptr) {
        return;
    }
    auto *out = static_cast<uint8_t *>(a.out);
    const float packed_sum = warp_sum(squares(v), WARP);
    if (lane == 0) {
        reinterpret_cast<float *>(out + squares_offset(a.T, K))[row * chunks + chunk] = packed_sum;
    }
    float behind[OWN];
    load_values(behind, a.w, there ? k : 0, K);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        v[i] *= behind[i];
    }
    pack_chunk(out + (row / layout.set * int64_t(chunks) + chunk) * chunk_bytes(C), C, row % layout.set,
               layout.wide, v, largest(v), lane);
}

} // namespace luce
