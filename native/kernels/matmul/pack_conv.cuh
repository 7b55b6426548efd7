// Packs what a convolution over a block's rows makes (BlockConvPackArgs), between products. A block has a chunk of one row, and a
// thread two values, as in pack_pairs.cuh. Taps are taken two at a time, whose loads are on their way together.
#pragma once

#include "common/kernels.h"
#include "matmul/pack_pairs.cuh"

namespace luce {
namespace {

// Adds up what a row adds to the kernels of two taps, for the groups that a chunk's values are of. A lane has a tap and a group,
// and a warp every SLICES-th part: there are about as many parts as chunks of K where a product has few outputs.
struct AddedSums {
    static constexpr int SLICES = PAIR_THREADS / WARP, AHEAD = 5, MOST = 2 * (CHUNK / 2 + 1);
    const BlockConvPackArgs &a;
    const RowmmParts &parts;
    int row, side, in_group, first, n; // the first group, and how many there are
    float (*sums)[MOST]; // [SLICES], in shared memory

    __device__ AddedSums(const BlockConvPackArgs &args, const RowmmParts &of, const PairPlace &place,
                         int of_side, float (*room)[MOST])
        : a(args), parts(of), row(place.row), side(of_side), in_group(int(args.K) / args.groups),
          first(place.chunk * CHUNK / in_group),
          n((min(place.chunk * CHUNK + CHUNK, int(args.K)) - 1) / in_group - first + 1), sums(room) {}

    // Knows where the parts of one of the sums lie.
    struct Column {
        const float *first;
        int count, step;
        __device__ uint32_t bits() const { return uint32_t(count | step) | address_bits(first); }
    };
    __device__ Column column(int tap, int item) const {
        const int of = min(tap + item / n, a.taps - 1),
                  c = (side * a.taps + of) * a.groups + first + item % n;
        const LaneParts<1> lane(parts, 0, row, c / 4 * 4);
        return {reinterpret_cast<const float *>(lane.first) + c % 4, lane.count, int(lane.step) * 4};
    }
    __device__ Column first_column(int tap) const {
        return column(tap, min(int(threadIdx.x % WARP), 2 * n - 1));
    }
    // Leaves the sums of taps `tap` and tap + 1. `own` is the first of the lane's.
    __device__ void leave(int tap, Column own) const {
        const int warp = threadIdx.x / WARP;
        for (int item = threadIdx.x % WARP; item < 2 * n; item += WARP) {
            const Column of = item < WARP ? own : column(tap, item);
            float x[AHEAD], sum = 0;
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int part = warp + i * SLICES;
                x[i] = part < of.count ? __ldcg(of.first + part * of.step) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                sum += x[i];
            }
#pragma unroll 1
            for (int part = warp + AHEAD * SLICES; part < of.count; part += SLICES) {
                sum += __ldcg(of.first + part * of.step);
            }
            sums[warp][item] = sum;
        }
    }
    // Returns that of a tap (0 or 1) and of a value in the chunk.
    __device__ float at(int tap, int k) const {
        const int item = tap * n + k / in_group - first;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < SLICES; i++) {
            sum += sums[i][item];
        }
        return sum;
    }
};

// The grid is {chunks, rows}. Where BEHIND is not, `parts` are not looked at.
template <bool BEHIND>
__global__ void __launch_bounds__(PAIR_THREADS)
    pack_conv_kernel(const __grid_constant__ BlockConvPackArgs a, RowsLayout layout,
                     const __grid_constant__ RowmmParts added, const __grid_constant__ RowmmParts parts) {
    constexpr int AHEAD = 8;
    __shared__ float4 sums[CHUNK / 4], values[CHUNK / 4];
    __shared__ float room[AddedSums::SLICES][AddedSums::MOST];
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
    const AddedSums kernels(a, added, place, side, room);
    AddedSums::Column column = kernels.first_column(0);
    const float share = 1.0f / float(a.K);
    // Where the row ends ahead of a thread's values it has others of the chunk, which are not used.
    const int in_chunk = max(place.at, place.chunk * CHUNK);
    int rows[2] = {place.row, a.taps > 1 ? a.ctl->rows[place.row].parent : -1};
    found(of.bits() | column.bits() | place.bits() | address_bits(x) | __float_as_uint(share) |
          (__float_as_uint(w.x) & 0x7fffffff)); // found() takes no sign
    wait_for_previous();
    float2 v = BEHIND ? fetch_pair(x + place.row * a.x_row) : float2{};
    for (int tap = 0;;) {
        const bool second = rows[1] >= 0;
        const int other = second ? rows[1] : rows[0];
        float2 y[2], base[2];
        if constexpr (BEHIND) {
            const int at[2] = {
                int(LaneParts<1>::at_row(parts, rows[0]) - LaneParts<1>::at_row(parts, place.row)) * 4,
                int(LaneParts<1>::at_row(parts, other) - LaneParts<1>::at_row(parts, place.row)) * 4};
            float2 found[2][AHEAD];
            of.fetch(found[0], at[0]);
            of.fetch(found[1], at[1]);
            kernels.leave(tap, column);
            y[0] = of.sum(found[0], {}, at[0]);
            y[1] = of.sum(found[1], {}, at[1]);
        } else {
            y[0] = fetch_pair(x + rows[0] * a.x_row);
            y[1] = fetch_pair(x + other * a.x_row);
            float sum[2] = {};
            for (int c = place.lane; c < chunks; c += WARP) {
                sum[0] += __ldcg(squares + rows[0] * chunks + c);
                sum[1] += __ldcg(squares + other * chunks + c);
            }
            kernels.leave(tap, column);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float scale = rsqrtf(warp_sum(sum[i]) * share + a.eps);
                y[i] = {y[i].x * w.x * scale, y[i].y * w.y * scale};
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t of_tap = int64_t(side * a.taps + tap + (second ? i : 0)) * a.K;
            base[i] = *reinterpret_cast<const float2 *>(a.base + of_tap + place.at);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (i == 0 || second) {
                const float more = kernels.at(i, in_chunk);
                v.x += (base[i].x + more) * y[i].x;
                v.y += (base[i].y + more) * y[i].y;
            }
        }
        tap += 2;
        rows[0] = second ? a.ctl->rows[rows[1]].parent : -1;
        if (tap >= a.taps || rows[0] < 0) {
            break;
        }
        rows[1] = tap + 1 < a.taps ? a.ctl->rows[rows[0]].parent : -1;
        column = kernels.first_column(tap);
        __syncthreads(); // the sums are done with
    }
    v = place.there ? v : float2{};
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
