// Norms and rotates a head by one warp, of which a lane has D / 32 neighbouring values. A head's bits depend on that head
// alone.
#pragma once

#include "attention/sine.cuh"
#include "common/lanes.cuh"

#include <cuda_runtime.h>
#include <stdint.h>

namespace luce {

// RopeRoom is what a warp needs of shared memory.
template <int D> struct RopeRoom {
    float head[D];
    float cosine[D / 2], sine[D / 2]; // each pair has an angle, and these are its cosine and sine
};

template <int D> struct LaneRope {
    static constexpr int LANES = 32, OWN = D / LANES;

    // Finds the angles of a position, of which the first rope_dim values of a head rotate. Frequencies are divided by `factors`,
    // where there are any. All lanes have left `room`.
    __device__ static void find(int32_t position, int rope_dim, float base, const float *factors,
                                RopeRoom<D> &room, int lane) {
        find_by([=](int) { return position; }, rope_dim, base, factors, room, lane);
    }
    // The same where each pair has a position of its own: position_of(pair).
    template <class PositionOf>
    __device__ static void find_by(const PositionOf &position_of, int rope_dim, float base,
                                   const float *factors, RopeRoom<D> &room, int lane) {
        for (int pair = lane; pair < rope_dim / 2; pair += LANES) {
            float angle = float(position_of(pair)) * powf(base, float(-2 * pair) / float(rope_dim));
            angle = factors != nullptr ? angle / factors[pair] : angle;
            sine_and_cosine(angle, room.sine[pair], room.cosine[pair]);
        }
    }
    // Makes v the head's values: RMS(v) * norm, rotated. `norm` has the lane's own values.
    __device__ static void apply(float (&v)[OWN], const float *norm, float eps, int rope_dim,
                                 RopeRoom<D> &room, int lane) {
        const int half = rope_dim / 2;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            sum = fmaf(v[i], v[i], sum);
        }
        const float scale = 1.0f / sqrtf(warp_sum(sum) / float(D) + eps);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            v[i] = v[i] * scale * norm[i];
            room.head[lane * OWN + i] = v[i];
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int j = lane * OWN + i;
            const bool low = j < half, rotates = j < rope_dim;
            const int pair = rotates ? low ? j : j - half : 0;
            const float cosine = rotates ? room.cosine[pair] : 1.0f, sine = rotates ? room.sine[pair] : 0.0f;
            const float other = rotates ? room.head[low ? j + half : pair] : 0.0f;
            v[i] = fmaf(other, low ? -sine : sine, v[i] * cosine);
        }
        __syncwarp(); // all have read
    }
};

} // namespace luce
