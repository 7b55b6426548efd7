// What a thread that packs two values of a row knows: where their parts lie, and where they go (matmul/pack_pairs.cuh).
#pragma once

#include "matmul/pack.cuh"
#include "matmul/partials.cuh"
#include "matmul/ptx.cuh"
#include "matmul/shape.h"

namespace luce {

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
    // Returns where the sum of the chunk's squares goes.
    template <class Args> __device__ float *square(const Args &a) const {
        return reinterpret_cast<float *>(static_cast<uint8_t *>(a.out) + squares_offset(a.T, a.K)) +
               row * int(chunks_of(a.K)) + chunk;
    }
    // Ends a norm: keeps two values of the block's row, packs all times the norm's weights, and leaves the sum of their squares.
    __device__ __forceinline__ void pack_normed(float2 v, float2 w, float *square_at) const {
        __shared__ float4 values[CHUNK / 4], normed[CHUNK / 4];
        leave(values, v);
        leave(normed, {v.x * w.x, v.y * w.y});
        keep(v);
        __syncthreads();
        if (warp == 0) {
            pack(normed);
        } else if (warp == 1) {
            float eight[OWN];
            take(eight, values);
            const float sum = warp_sum(squares(eight), WARP);
            if (lane == 0) {
                *square_at = sum;
            }
        }
    }
};

} // namespace luce
