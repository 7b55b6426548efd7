// Says how a kernel adds up what a launch of rowmm has left in parts (RowmmArgs.parts).
#pragma once

#include "rowmm_plan.h"

namespace luce {

// Knows where a lane finds the parts of 4 * V neighbouring values of a row, and sums them in the order of
// ranges.
template <int V> struct LaneParts {
    const float4 *first;
    int count;
    int64_t step; // from one part to the next

    // This may run before the launch that leaves them has ended. `n` is the first value's index, a multiple
    // of 4 * V below the weight's N.
    __device__ LaneParts(const RowmmParts &p, int weight, int row, int64_t n) {
        const auto &w = p.weights[weight];
        const int tile = int(n / TILE), begin = w.first_unit + tile * w.units_k;
        const int from = range_of(p, begin), to = range_of(p, begin + w.units_k - 1);
        count = to - from + 1;
        step = int64_t(p.rows) * (TILE / 4);
        first = reinterpret_cast<const float4 *>(p.parts + row / p.set * p.set_size) +
                (from + w.first_tile + tile) * step + row % p.set * (TILE / 4) + n % TILE / 4;
    }
    static __device__ int range_of(const RowmmParts &p, int unit) {
        int low = 0, high = p.ranges - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (p.first[middle] <= unit) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        return low;
    }
    // Reads parts r .. r + N - 1.
    template <int N> __device__ void fetch(float4 (&x)[N][V], int r) const {
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float4 *from = first + min(r + j, count - 1) * step;
#pragma unroll
            for (int i = 0; i < V; i++) {
                x[j][i] = __ldcg(from + i);
            }
        }
    }
    // Returns the sum of all parts, of which x has the first N.
    template <int N> __device__ void add(float4 (&x)[N][V], float (&v)[4 * V]) const {
#pragma unroll 1
        for (int r = 0;; fetch(x, r)) {
#pragma unroll
            for (int j = 0; j < N; j++) {
#pragma unroll
                for (int i = 0; i < V; i++) {
                    if (r + j < count) {
                        v[4 * i] += x[j][i].x, v[4 * i + 1] += x[j][i].y;
                        v[4 * i + 2] += x[j][i].z, v[4 * i + 3] += x[j][i].w;
                    }
                }
            }
            r += N;
            if (r >= count) {
                return;
            }
        }
    }
};

} // namespace luce
