// Computes rows of the conv of 4 taps of one head, SiLU, and the l2 norm of q and k heads, as a warp does it. A lane
// holds S / 32 neighbouring channels. The norm is one butterfly sum, in the same order for every row.
#pragma once

#include "deltanet/layout.h"

#include <cstdint>

#include <cuda_runtime.h>

namespace luce {
namespace {

// Channels are those of one lane of a head, moved in one access. Of a head of 16, half the lanes hold
// nothing.
template <int S> struct alignas(S < WARP ? 4 : S / WARP * 4) Channels {
    static constexpr int N = S < WARP ? 1 : S / WARP;
    float x[N];

    __device__ static bool active(int lane) { return lane * N < S; }
    __device__ void load(const float *head, int lane) {
        *this = active(lane) ? reinterpret_cast<const Channels *>(head)[lane] : Channels{};
    }
    __device__ void store(float *head, int lane) const {
        if (active(lane)) {
            reinterpret_cast<Channels *>(head)[lane] = *this;
        }
    }
};

template <int S> struct Weights {
    float4 tap[Channels<S>::N]; // x is the oldest

    __device__ void load(const float *w, int64_t c0, int lane) {
#pragma unroll
        for (int c = 0; c < Channels<S>::N; c++) {
            const int channel = Channels<S>::active(lane) ? lane * Channels<S>::N + c : 0;
            tap[c] = reinterpret_cast<const float4 *>(w)[c0 + channel];
        }
    }
};

__device__ float silu(float x) {
    return x / (1.0f + expf(-x));
}

// Computes N rows of one head, each from its four taps, oldest first. They are done at once to hide the sums' latency.
template <int S, int N>
__device__ void conv_rows(const Weights<S> &w, const Channels<S> (&taps)[N][TAPS], bool normalise,
                          float *const (&out)[N], int lane) {
    Channels<S> y[N];
    float sum[N] = {};
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int c = 0; c < Channels<S>::N; c++) {
            float acc = w.tap[c].x * taps[n][0].x[c];
            acc = fmaf(w.tap[c].y, taps[n][1].x[c], acc);
            acc = fmaf(w.tap[c].z, taps[n][2].x[c], acc);
            acc = fmaf(w.tap[c].w, taps[n][3].x[c], acc);
            y[n].x[c] = silu(acc);
            sum[n] = fmaf(y[n].x[c], y[n].x[c], sum[n]);
        }
    }
    if (normalise) {
#pragma unroll
        for (int mask = WARP / 2; mask > 0; mask /= 2) {
#pragma unroll
            for (int n = 0; n < N; n++) {
                sum[n] += __shfl_xor_sync(~0u, sum[n], mask);
            }
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float scale = 1.0f / sqrtf(sum[n] + 1e-6f);
#pragma unroll
            for (int c = 0; c < Channels<S>::N; c++) {
                y[n].x[c] *= scale;
            }
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        y[n].store(out[n], lane);
    }
}

} // namespace
} // namespace luce
