// Has one thread's part of a DeltaNet state and the arithmetic on it. The part is a rectangle of 2 columns (v
// dimensions) by S / 8 k entries, in registers. 8 lanes of a warp hold the same columns. A warp holds four
// such groups, by the lowest bits of the lane, so that neighbouring lanes load neighbouring columns. Every sum
// has one order: over a lane's k entries, then the butterfly of reduce(). Products are rounded before they
// are added except where fmaf says otherwise (-fmad=false), so an update and its replay agree in each bit.
#pragma once

#include "deltanet/layout.h"
#include "deltanet/ptx.cuh"

#include <cuda_runtime.h>

namespace luce {
namespace {

template <int N> struct alignas(4 * N) Pack {
    float x[N];
};
using Cols = Pack<COLS>;
__device__ void store(Cols *to, const Cols &from) {
    store_back(to, float2{from.x[0], from.x[1]});
}

// A slice is the k entries of one lane out of a row of S: VEC neighbours, then those LANES * VEC further on.
template <int S> struct Slice {
    using L = Layout<S>;
    float x[L::K];

    __device__ void load(const float *row, int lane) {
#pragma unroll
        for (int i = 0; i < L::K; i += L::VEC) {
            const auto part = reinterpret_cast<const Pack<L::VEC> *>(row)[i / L::VEC * LANES + lane];
#pragma unroll
            for (int j = 0; j < L::VEC; j++) {
                x[i + j] = part.x[j];
            }
        }
    }
    __device__ static int entry(int i, int lane) { return (i / L::VEC * LANES + lane) * L::VEC + i % L::VEC; }
};

__device__ float softplus(float x) {
    return x > 20.0f ? x : log1pf(expf(x));
}

// Returns a value that is the same in all lanes of a warp, so that nvcc knows it. A warp that might have
// split at a branch on it checks before each shuffle that it has not, and takes a third longer over a row.
__device__ int uniform(int x) {
    return __shfl_sync(~0u, x, 0);
}

// Computes the sums of N groups of columns over the 8 lanes, in each of them: that takes more shuffles than handing
// columns over, but nothing has to be brought back. N are done at once to hide the latency.
template <int N> __device__ void reduce(const float (&acc)[N][COLS], Cols (&sum)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        sum[n] = {acc[n][0], acc[n][1]};
    }
#pragma unroll
    for (int mask = GROUPS; mask < WARP; mask *= 2) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                sum[n].x[c] += __shfl_xor_sync(~0u, sum[n].x[c], mask);
            }
        }
    }
}
// Computes the same sums of one row's columns, or of four rows', by handing over: a lane ends with the sum of column
// own_column() of row own_row(), or of the one row.
template <int N> __device__ float reduce_rows(const float (&acc)[N][COLS], int lane) {
    static_assert(N == 1 || N == 4);
    const bool odd = lane & 4, second = lane & 8, third = lane & 16;
    float sum[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        sum[n] = pick(odd, acc[n][1], acc[n][0]) + __shfl_xor_sync(~0u, pick(odd, acc[n][0], acc[n][1]), 4);
    }
    if constexpr (N == 1) {
        const float pair = sum[0] + __shfl_xor_sync(~0u, sum[0], 8);
        return pair + __shfl_xor_sync(~0u, pair, 16);
    } else {
        const float low =
            pick(second, sum[1], sum[0]) + __shfl_xor_sync(~0u, pick(second, sum[0], sum[1]), 8);
        const float up = pick(second, sum[3], sum[2]) + __shfl_xor_sync(~0u, pick(second, sum[2], sum[3]), 8);
        return pick(third, up, low) + __shfl_xor_sync(~0u, pick(third, low, up), 16);
    }
}
__device__ int own_column(int lane) {
    return lane >> 2 & 1;
}
__device__ int own_row(int lane) {
    return lane >> 3;
}

// A Part is one thread's part of the state.
template <int S> struct Part {
    using L = Layout<S>;
    Cols s[L::K];

    // Applies a known row again: S = fma(k, delta, exp(g)*S).
    __device__ void replay(const Slice<S> &k, float decay, const Cols &delta) {
#pragma unroll
        for (int i = 0; i < L::K; i++) {
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                s[i].x[c] = fmaf(k.x[i], delta.x[c], decay * s[i].x[c]);
            }
        }
    }
    // A new row is applied in two steps. Without KEEP the state stays as it was.
    // The first one computes D = exp(g)*S, and this thread's part of D^T k.
    template <bool KEEP> __device__ void predict(const Slice<S> &k, float decay, float (&acc)[COLS]) {
#pragma unroll
        for (int i = 0; i < L::K; i++) {
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                const float d = decay * s[i].x[c];
                acc[c] = fmaf(d, k.x[i], acc[c]);
                s[i].x[c] = KEEP ? d : s[i].x[c];
            }
        }
    }
    // The second one computes S = fma(k, delta, D), and this thread's part of S^T q.
    template <bool KEEP>
    __device__ void advance(const Slice<S> &q, const Slice<S> &k, float decay, const Cols &delta,
                            float (&acc)[COLS]) {
#pragma unroll
        for (int i = 0; i < L::K; i++) {
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                const float next = fmaf(k.x[i], delta.x[c], KEEP ? s[i].x[c] : decay * s[i].x[c]);
                acc[c] = fmaf(next, q.x[i], acc[c]);
                s[i].x[c] = KEEP ? next : s[i].x[c];
            }
        }
    }
};

} // namespace
} // namespace luce
