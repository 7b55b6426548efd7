// Packs what a convolution over a block's rows makes (BlockConvPackArgs), between products. A block has a chunk of one row, and a
// thread two values, as in pack_pairs.cuh; taps are taken two at a time, whose loads are on their way together.
#pragma once

#include "common/kernels.h"
#include "matmul/pack_pairs.cuh"

namespace luce {
namespace {

// Knows where the parts of one value lie. There are about as many as chunks of K where a product has few outputs.
struct ColumnParts {
    static constexpr int AHEAD = 20; // so many are fetched at once
    const float *first;
    int count, step;

    __device__ ColumnParts(const RowmmParts &p, int row, int n) {
        const LaneParts<1> of(p, 0, row, n / 4 * 4);
        first = reinterpret_cast<const float *>(of.first) + n % 4;
        count = of.count;
        step = int(of.step) * 4;
    }
    __device__ uint32_t bits() const { return uint32_t(count | step) | address_bits(first); }
    __device__ __forceinline__ void fetch(float (&x)[AHEAD]) const {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            x[i] = __ldcg(first + min(i, count - 1) * step);
        }
    }
    __device__ __forceinline__ float sum(const float (&x)[AHEAD]) const {
        float v = x[0];
#pragma unroll
        for (int i = 1; i < AHEAD; i++) {
            v += i < count ? x[i] : 0.0f;
        }
#pragma unroll 1
        for (int i = AHEAD; i < count; i++) {
            v += __ldcg(first + i * step);
        }
        return v;
    }
};

// Two taps of a thread's two values: the rows that they take, and the kernels. Where there is no second one, its row is the
// first's.
struct TapPair {
    int rows[2];
    bool second;
    float2 base[2];
    ColumnParts added[2];

    __device__ TapPair(const BlockConvPackArgs &a, const RowmmParts &parts, const PairPlace &place, int side,
                       int tap, int row)
        : rows{row, tap + 1 < a.taps ? a.ctl->rows[row].parent : -1}, second(rows[1] >= 0),
          added{of(a, parts, place, side, tap), of(a, parts, place, side, tap + int(second))} {
        rows[1] = second ? rows[1] : row;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t at = int64_t(side * a.taps + tap + (second ? i : 0)) * a.K + place.at;
            base[i] = *reinterpret_cast<const float2 *>(a.base + at);
        }
    }
    static __device__ ColumnParts of(const BlockConvPackArgs &a, const RowmmParts &parts,
                                     const PairPlace &place, int side, int tap) {
        return {parts, place.row, (side * a.taps + tap) * a.groups + place.at / (int(a.K) / a.groups)};
    }
    __device__ uint32_t bits() const {
        return uint32_t(rows[1]) | added[0].bits() | added[1].bits() |
               (__float_as_uint(base[1].y) & 0x7fffffff);
    }
    // Adds what the taps make of x[0] and x[1].
    template <class Fetch> __device__ __forceinline__ void add(float2 &v, const Fetch &fetch) const {
        float kernels[2][ColumnParts::AHEAD];
        added[0].fetch(kernels[0]);
        added[1].fetch(kernels[1]);
        float2 x[2];
        fetch(rows, x);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (i == 0 || second) {
                const float more = added[i].sum(kernels[i]);
                v.x += (base[i].x + more) * x[i].x;
                v.y += (base[i].y + more) * x[i].y;
            }
        }
    }
};

// The grid is {chunks, rows}. Where BEHIND is not, `parts` are not looked at.
template <bool BEHIND>
__global__ void __launch_bounds__(PAIR_THREADS)
    pack_conv_kernel(const __grid_constant__ BlockConvPackArgs a, RowsLayout layout,
                     const __grid_constant__ RowmmParts added, const __grid_constant__ RowmmParts parts) {
    constexpr int AHEAD = 8;
    __shared__ float4 sums[CHUNK / 4], values[CHUNK / 4];
    let_next_start();
    const PairPlace place(a, layout);
    const int chunks = int(chunks_of(a.K)), side = BEHIND ? 1 : 0;
    const int64_t behind = squares_offset(a.T, a.K);
    const float *squares = reinterpret_cast<const float *>(static_cast<const uint8_t *>(a.normed) + behind);
    float *square =
        reinterpret_cast<float *>(static_cast<uint8_t *>(a.out) + behind) + place.row * chunks + place.chunk;
    const float *x = a.x + place.at;
    const float2 w = *reinterpret_cast<const float2 *>(a.w + place.at);
    const PairParts<AHEAD> of(BEHIND ? parts : added, 0, place.row, BEHIND ? place.at : 0);
    TapPair pair(a, added, place, side, 0, place.row);
    found(of.bits() | pair.bits() | place.bits() | address_bits(x) |
          (__float_as_uint(w.x) & 0x7fffffff)); // found() takes no sign
    wait_for_previous();
    const float2 residual = BEHIND ? fetch_pair(x + place.row * a.x_row) : float2{};
    // Two rows of what is convolved.
    const auto fetch = [&](const int (&rows)[2], float2(&found)[2]) {
        if constexpr (BEHIND) {
            float2 y[2][AHEAD];
            int at[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                at[i] =
                    int(LaneParts<1>::at_row(parts, rows[i]) - LaneParts<1>::at_row(parts, place.row)) * 4;
                of.fetch(y[i], at[i]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                found[i] = of.sum(y[i], {}, at[i]);
            }
        } else {
            float sum[2] = {};
#pragma unroll
            for (int i = 0; i < 2; i++) {
                found[i] = fetch_pair(x + rows[i] * a.x_row);
                for (int c = place.lane; c < chunks; c += WARP) {
                    sum[i] += __ldcg(squares + rows[i] * chunks + c);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float scale = rsqrtf(warp_sum(sum[i]) / float(a.K) + a.eps);
                found[i] = {found[i].x * w.x * scale, found[i].y * w.y * scale};
            }
        }
    };
    float2 v = {};
    for (int tap = 0;;) {
        pair.add(v, fetch);
        tap += 2;
        const int row = pair.second ? a.ctl->rows[pair.rows[1]].parent : -1;
        if (tap >= a.taps || row < 0) {
            break;
        }
        pair = TapPair(a, added, place, side, tap, row);
    }
    v = place.there ? float2{v.x + residual.x, v.y + residual.y} : float2{};
    place.leave(values, BEHIND ? float2{v.x * w.x, v.y * w.y} : v);
    if constexpr (BEHIND) {
        place.leave(sums, v);
        place.keep(v);
    }
    __syncthreads();
    if (place.warp == 0) {
        place.pack(values);
    } else if (BEHIND && place.warp == 1) {
        float own[OWN];
        place.take(own, sums);
        const float sum = warp_sum(luce::squares(own), WARP);
        if (place.lane == 0) {
            *square = sum;
        }
    }
}
static_assert(sizeof(BlockConvPackArgs) + sizeof(RowsLayout) + 2 * sizeof(RowmmParts) <= 4096,
              "these are a kernel's parameters");

} // namespace
} // namespace luce
