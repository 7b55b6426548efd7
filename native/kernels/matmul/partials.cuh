// Says how a kernel adds up what a launch of rowmm has left in parts (RowmmArgs.parts).
#pragma once

#include "matmul/plan.h"

namespace luce {

// Knows where a lane finds the parts of 4 * V neighbouring values of a row, and sums them in the order of
// ranges.
template <int V> struct LaneParts {
    const float4 *first;
    int count;
    int64_t step; // the next part lies so many float4 further

    LaneParts() = default;
    // This may run before the launch that leaves them has ended. `n` is the first value's index, a multiple
    // of 4 * V below the weight's N.
    __device__ LaneParts(const RowmmParts &p, int weight, int row, int64_t n) {
        const auto &w = p.weights[weight];
        const int tile = int(n / TILE), begin = w.first_unit + tile * w.units_k;
        const int from = range_of(p, begin), to = range_of(p, begin + w.units_k - 1);
        count = to - from + 1;
        step = int64_t(p.rows) * (TILE / 4);
        first = reinterpret_cast<const float4 *>(p.parts) + (from + w.first_tile + tile) * step +
                n % TILE / 4 + at_row(p, row);
    }
    // Returns how far the parts of a row lie from those of row 0.
    static_assert(ROWMM_MAX_ROWS <= 2 * SET, "a step has at most two sets");
    static __device__ int64_t at_row(const RowmmParts &p, int row) {
        return row < p.set ? row * (TILE / 4) : p.set_size / 4 + (row - p.set) * (TILE / 4);
    }
    // Returns the same of another row than it was made for.
    __device__ LaneParts of_row(const RowmmParts &p, int made_for, int row) const {
        LaneParts other = *this;
        other.first += at_row(p, row) - at_row(p, made_for);
        return other;
    }
    // Finds the range of a unit. Ranges are about equally long, so it is nearly where it would be if they were: two
    // guesses by the mean come next to it, and a search by halves would wait for nine values in turn.
    static __device__ int range_of(const RowmmParts &p, int unit) {
        const float rate = __fdividef(float(p.ranges), float(p.first[p.ranges]));
        const int guess = min(int(float(unit) * rate), p.ranges - 1);
        int r = min(max(guess + int(float(unit - p.first[guess]) * rate), 0), p.ranges - 1);
        while (p.first[r] > unit) {
            r--;
        }
        while (p.first[r + 1] <= unit) {
            r++;
        }
        return r;
    }
    // Reads parts r .. r + N - 1, as far as there are any.
    template <int N> __device__ void fetch(float4 (&x)[N][V], int r) const {
        const float4 *from = first + r * step;
#pragma unroll
        for (int j = 0; j < N; j++, from += step) {
#pragma unroll
            for (int i = 0; i < V; i++) {
                x[j][i] = r + j < count ? __ldcg(from + i) : float4{};
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
