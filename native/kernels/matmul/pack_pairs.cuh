// Packs a chunk of one row by a block, of which a thread has two values. What a value needs is found by all threads at once,
// for a launch this short waits for one warp's instructions more than for memory. Then one warp packs what the others left
// in shared memory, and another adds up squares. Gates of many rows have two rows a block, and a warp packs each.
//
// All addresses are found while the launch ahead has not ended (found()), so that behind it all loads come at once.
#pragma once

#include "matmul/pack.cuh"
#include "matmul/partials.cuh"
#include "matmul/ptx.cuh"
#include "matmul/shape.h"

namespace luce {
namespace {

__device__ __forceinline__ float2 fetch_pair(const float *p) {
    return __ldcg(reinterpret_cast<const float2 *>(p));
}

// Knows where the parts of a thread's two values lie, of which the first N are fetched at once.
template <int N> struct PairParts {
    const float *from[N]; // the last part stands for those that there are not
    int count, step; // the next part lies so many values further

    __device__ PairParts(const RowmmParts &p, int weight, int row, int k) {
        const LaneParts<1> of(p, weight, row, k / 4 * 4);
        count = of.count;
        step = int(of.step) * 4;
        from[0] = reinterpret_cast<const float *>(of.first) + k % 4;
#pragma unroll
        for (int i = 1; i < N; i++) {
            from[i] = from[i - 1] + (i < count ? step : 0);
        }
    }
    __device__ uint32_t bits() const {
        uint32_t all = uint32_t(count | step);
#pragma unroll
        for (int i = 0; i < N; i++) {
            all |= address_bits(from[i]);
        }
        return all;
    }
    // fetch() and sum() take another row's parts, which lie so many values behind.
    __device__ __forceinline__ void fetch(float2 (&x)[N], int behind = 0) const {
#pragma unroll
        for (int i = 0; i < N; i++) {
            x[i] = fetch_pair(from[i] + behind);
        }
    }
    // Returns a zero of which the compiler does not know that it is one, made of a value that was fetched last: a sum that
    // begins with it begins when all is on its way. Else the compiler adds the first part before it asks for the last.
    __device__ __forceinline__ float zero(float last) const {
        return __uint_as_float(__float_as_uint(last) & uint32_t(count >> 31));
    }
    // Returns the sum of all parts, of which x has the first N, and of v, which is zero.
    __device__ __forceinline__ float2 sum(const float2 (&x)[N], float2 v = {}, int behind = 0) const {
        v.x += x[0].x, v.y += x[0].y;
#pragma unroll
        for (int i = 1; i < N; i++) {
            if (i < count) {
                v.x += x[i].x, v.y += x[i].y;
            }
        }
#pragma unroll 1
        for (int i = N; i < count; i++) {
            const float2 more = fetch_pair(from[0] + i * step + behind);
            v.x += more.x, v.y += more.y;
        }
        return v;
    }
};

// Says what a thread of a block has. The grid is {chunks, blocks of rows}, and a warp packs one of the block's rows.
struct PairPlace {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, chunk = blockIdx.x;
    int row; // the block's first
    int own = threadIdx.x * 2; // this is its first value in the chunk, and k is the same in the row
    int k = chunk * CHUNK + own;
    bool there; // the row has it
    int at; // it is k, or 0 where the row ends before
    float *copy;
    PackedPlace packed;

    template <class Args> // with K, out and copy
    __device__ PairPlace(const Args &a, const RowsLayout &layout, int rows = 1)
        : row(int(blockIdx.y) * rows), there(k < int(a.K)), at(there ? k : 0),
          copy(a.copy != nullptr && there ? a.copy + row * a.K + k : nullptr),
          packed(place(a, layout, row + warp % rows)) {}
    template <class Args>
    __device__ PackedPlace place(const Args &a, const RowsLayout &layout, int packed_row) const {
        const int set = packed_row >= layout.set ? 1 : 0; // a step has two at most
        uint8_t *out = static_cast<uint8_t *>(a.out) +
                       int64_t(set * int(chunks_of(a.K)) + chunk) * chunk_bytes(layout.columns);
        return PackedPlace(out, layout.columns, packed_row - set * layout.set, layout.wide, lane);
    }
    __device__ uint32_t bits() const { return address_bits(copy) | packed.bits(); }
    // Leaves two values in shared memory.
    __device__ __forceinline__ void leave(float4 *values, float2 v) const {
        reinterpret_cast<float2 *>(values)[threadIdx.x] = v;
    }
    // Returns eight that are there.
    __device__ __forceinline__ void take(float (&v)[OWN], const float4 *values) const {
        const float4 a = values[lane * 2], b = values[lane * 2 + 1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    }
    __device__ __forceinline__ void keep(float2 v, int64_t behind = 0) const {
        if (copy != nullptr) {
            *reinterpret_cast<float2 *>(copy + behind) = v;
        }
    }
    __device__ __forceinline__ void pack(const float4 *values) const {
        float v[OWN];
        take(v, values);
        packed.store(v, largest(v), lane);
    }
};

// Packs the sum of parts and, where there is one, the residual, times a norm's weights.
__global__ void __launch_bounds__(PAIR_THREADS)
    pack_norm_kernel(const __grid_constant__ RowmmPackArgs a, RowsLayout layout,
                     const __grid_constant__ RowmmParts parts) {
    constexpr int AHEAD = 8;
    __shared__ float4 sums[CHUNK / 4], normed[CHUNK / 4];
    let_next_start();
    const PairPlace place(a, layout);
    const PairParts<AHEAD> of(parts, 0, place.row, place.at);
    const bool adds = a.x != nullptr;
    const float *residual = adds ? a.x + place.row * a.x_row + place.at : of.from[0];
    float *square = reinterpret_cast<float *>(static_cast<uint8_t *>(a.out) + squares_offset(a.T, a.K)) +
                    place.row * int(chunks_of(a.K)) + place.chunk;
    const float2 w = *reinterpret_cast<const float2 *>(a.w + place.at);
    found(of.bits() | address_bits(square) | address_bits(residual) | place.bits());
    wait_for_previous();
    float2 x[AHEAD];
    of.fetch(x);
    const float2 y = fetch_pair(residual);
    float2 v = of.sum(x, {of.zero(y.x), of.zero(y.y)});
    v.x = place.there ? v.x + (adds ? y.x : 0.0f) : 0.0f;
    v.y = place.there ? v.y + (adds ? y.y : 0.0f) : 0.0f;
    place.leave(sums, v);
    place.leave(normed, {v.x * w.x, v.y * w.y});
    place.keep(v);
    __syncthreads();
    if (place.warp == 0) {
        place.pack(normed);
    } else if (place.warp == 1) {
        float own[OWN];
        place.take(own, sums);
        const float sum = warp_sum(squares(own), WARP);
        if (place.lane == 0) {
            *square = sum;
        }
    }
}

// Packs f(x) * y, which are sums of parts, of ROWS rows a block.
template <int ROWS, Activation F>
__global__ void __launch_bounds__(PAIR_THREADS)
    pack_glu_kernel(const __grid_constant__ RowmmPackArgs a, RowsLayout layout,
                    const __grid_constant__ RowmmParts parts) {
    constexpr int AHEAD = 2;
    static_assert(SET % ROWS == 0, "a block's rows are of one set");
    __shared__ float4 values[ROWS][CHUNK / 4];
    let_next_start();
    const PairPlace place(a, layout, ROWS);
    const PairParts<AHEAD> of_x(parts, 0, place.row, place.at), of_y(parts, 1, place.row, place.at);
    found(of_x.bits() | of_y.bits() | place.bits());
    wait_for_previous();
    float2 x[ROWS][AHEAD], y[ROWS][AHEAD];
    float gates[2 * ROWS], gated[2 * ROWS], up[2 * ROWS];
    // The first row stands for one that there is not.
    const auto behind = [&](int r) { return place.row + r < a.T ? r * TILE : 0; };
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        of_x.fetch(x[r], behind(r));
        of_y.fetch(y[r], behind(r));
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float2 gate = of_x.sum(x[r], {}, behind(r)), value = of_y.sum(y[r], {}, behind(r));
        gates[2 * r] = gate.x, gates[2 * r + 1] = gate.y;
        up[2 * r] = value.x, up[2 * r + 1] = value.y;
    }
    activate<F>(gates, gated);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float2 v = {place.there ? gated[2 * r] * up[2 * r] : 0.0f,
                          place.there ? gated[2 * r + 1] * up[2 * r + 1] : 0.0f};
        place.leave(values[r], v);
        if (place.row + r < a.T) {
            place.keep(v, r * a.K);
        }
    }
    __syncthreads();
    if (place.warp < ROWS && place.row + place.warp < a.T) {
        place.pack(values[place.warp]);
    }
}

// Packs heads, normed and gated. Each warp finds the scales of all the chunk's heads itself.
__global__ void __launch_bounds__(PAIR_THREADS)
    pack_heads_kernel(const __grid_constant__ RowmmPackArgs a, RowsLayout layout) {
    __shared__ float4 values[CHUNK / 4];
    let_next_start();
    const PairPlace place(a, layout);
    const int eight = place.chunk * CHUNK + place.lane * OWN;
    const float *row = a.x + place.row * a.x_row, *all = row + (eight < a.K ? eight : 0),
                *own = row + place.at, *gate = a.y + place.row * a.y_row + place.at;
    const float2 w = *reinterpret_cast<const float2 *>(a.w + place.k % a.head);
    const float share = 1.0f / float(a.head);
    found(address_bits(all) | address_bits(own) | address_bits(gate) | place.bits() | __float_as_uint(share));
    wait_for_previous();
    float of_head[OWN];
    fetch_values(of_head, all);
    const float2 x = fetch_pair(own), y = fetch_pair(gate);
    const float scale = __shfl_sync(~0u, head_scale(of_head, a.head, share, a.eps), place.own / OWN);
    const float both[2] = {y.x, y.y};
    float gates[2];
    activate<SILU>(both, gates);
    float2 v = {x.x * scale * w.x * gates[0], x.y * scale * w.y * gates[1]};
    v = place.there ? v : float2{};
    place.leave(values, v);
    place.keep(v);
    __syncthreads();
    if (place.warp == 0) {
        place.pack(values);
    }
}

} // namespace
} // namespace luce
