// Norms and rotates a head by one warp, of which a lane has D / 32 neighbouring values. A head's bits depend on that head
// alone.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace luce {

template <int D> struct LaneRope {
    static constexpr int LANES = 32, OWN = D / LANES;
    float cosine[OWN], sine[OWN]; // those of values lane * OWN + i

    // Finds the angles of a position, of which the first rope_dim values of a head rotate.
    __device__ void find(int32_t position, int rope_dim, float base, int lane) {
        const int half = rope_dim / 2;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int j = lane * OWN + i, pair = j < half ? j : j - half;
            cosine[i] = 1;
            sine[i] = 0;
            if (j < rope_dim) {
                const float angle = float(position) * powf(base, float(-2 * pair) / float(rope_dim));
                sincosf(angle, &sine[i], &cosine[i]);
                sine[i] = j < half ? -sine[i] : sine[i];
            }
        }
    }
    // Makes v the head's values: RMS(v) * norm, rotated. `norm` has the lane's own values. `room` is D values of shared
    // memory.
    __device__ void apply(float (&v)[OWN], const float *norm, float eps, int rope_dim, float *room,
                          int lane) const {
        const int half = rope_dim / 2;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            sum = fmaf(v[i], v[i], sum);
        }
#pragma unroll
        for (int mask = LANES / 2; mask > 0; mask /= 2) {
            sum += __shfl_xor_sync(~0u, sum, mask);
        }
        const float scale = 1.0f / sqrtf(sum / float(D) + eps);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            v[i] = v[i] * scale * norm[i];
            room[lane * OWN + i] = v[i];
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int j = lane * OWN + i;
            const float other = j < rope_dim ? room[j < half ? j + half : j - half] : 0.0f;
            v[i] = fmaf(other, sine[i], v[i] * cosine[i]);
        }
        __syncwarp(); // all have read
    }
};

} // namespace luce
