// From a block's sums to the outputs: tiles that are whole in a range go there at once, of others each range leaves its
// part in scratch, to be added in the order of ranges: by the block that is last, of many rows by a kernel behind.
#pragma once

#include "rowmm_rings.cuh"

namespace luce {

constexpr int SETTLE_TILES =
    2; // of 8 rows that the last block adds; of more the few last blocks would take too long

__device__ __forceinline__ void write_out(const RowmmSegment &s, int t, int n, float x) {
    if (s.residual != nullptr) {
        x += s.residual[t * s.residual_row + n];
    }
    s.out[t * s.out_row + n] = x;
}

// A tile at one end of a range: 0 where it begins, 1 where it ends (not open if that is the same tile).
struct Edge {
    int segment, tile;
    int from, to; // the ranges that have a part of it
    bool open; // it is not whole in this range
    bool last; // this range was the last to leave its part

    __device__ void find(const RowmmParams &p, int range, int end) {
        const int unit = end == 0 ? p.first[range] : p.first[range + 1] - 1;
        segment = 0;
        while (segment + 1 < p.n_segments && p.segments[segment + 1].first_unit <= unit) {
            segment++;
        }
        const RowmmSegment &s = p.segments[segment];
        tile = (unit - s.first_unit) / s.units_k;
        const int begin = s.first_unit + tile * s.units_k;
        from = to = range;
        while (p.first[from] > begin) {
            from--;
        }
        while (p.first[to + 1] < begin + s.units_k) {
            to++;
        }
        open = from < to && !(end == 1 && p.first[range] >= begin); // end 0 has found it
    }
};

// Where range r leaves its part of a tile that begins in range `from`: in the middle of range r, or further on.
__device__ __forceinline__ float *part_of(const RowmmParams &p, int r, int from) {
    return p.partial + (int64_t(r) * 2 + (r == from ? 1 : 0)) * p.rows * TILE;
}

// What a warp has of a tile: into `out`, or into the range's part of it where others have parts as well.
template <int NT>
__device__ void write_tile(const RowmmParams &p, const RowmmSegment &s, const Sums<NT> &acc, int tile,
                           float *part) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int o = int(threadIdx.x / WARP) * FRAGMENT + lane / 4 + k / 2 * 8, n = tile * TILE + o;
        const float scale = s.output_scale != nullptr && n < s.N ? s.output_scale[n] : 1.0f;
#pragma unroll
        for (int j = 0; j < NT; j++) {
            const int t = j * 8 + lane % 4 * 2 + k % 2;
            if (t < p.rows && part != nullptr) {
                __stcg(part + t * TILE + o, acc[j][k] * scale);
            } else if (t < p.rows && n < s.N) {
                write_out(s, t, n, acc[j][k] * scale);
            }
        }
    }
}

__device__ __forceinline__ float4 add(float4 a, float4 b) {
    return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// The sum of a tile's parts, in the order of ranges: of its i-th four outputs, row after row.
__device__ __forceinline__ void add_parts(const RowmmParams &p, const Edge &edge, int i) {
    constexpr int AHEAD = 8; // loads in flight
    const RowmmSegment &s = p.segments[edge.segment];
    const int64_t step = int64_t(2) * p.rows * (TILE / 4);
    const float4 *first = reinterpret_cast<const float4 *>(part_of(p, edge.from, edge.from)) + i;
    const float4 *others = reinterpret_cast<const float4 *>(part_of(p, edge.from + 1, edge.from)) + i;
    const int n_others = edge.to - edge.from;
    float4 sum = __ldcg(first);
    for (int r = 0; r < n_others; r += AHEAD) {
        float4 x[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            x[j] = r + j < n_others ? __ldcg(others + (r + j) * step) : float4{};
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            sum = r + j < n_others ? add(sum, x[j]) : sum;
        }
    }
    const int t = i / (TILE / 4), n = edge.tile * TILE + i % (TILE / 4) * 4;
    if (s.vectors) { // then N is a multiple of 4
        if (n < s.N) {
            if (s.residual != nullptr) {
                sum = add(sum, *reinterpret_cast<const float4 *>(s.residual + t * s.residual_row + n));
            }
            *reinterpret_cast<float4 *>(s.out + t * s.out_row + n) = sum;
        }
    } else {
        const float x[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (n + j < s.N) {
                write_out(s, t, n + j, x[j]);
            }
        }
    }
}

__device__ __forceinline__ void takers_sync() { // without the filling warp
    asm volatile("bar.sync 1, %0;" ::"n"(TAKERS) : "memory");
}

// At the end of a range: whoever is the last to leave its part of a tile adds the tile up.
__device__ inline void settle(const RowmmParams &p, Edge (&edges)[2]) {
    takers_sync();
    if (threadIdx.x < 2 && edges[threadIdx.x].open) {
        Edge &edge = edges[threadIdx.x];
        edge.last = int(count_arrival(p.counters + edge.from)) == edge.to - edge.from;
        if (edge.last) {
            p.counters[edge.from] = 0; // for the next launch
        }
    }
    takers_sync();
    for (const Edge &edge : edges) {
        for (int i = threadIdx.x; edge.open && edge.last && i < p.rows * (TILE / 4); i += TAKERS) {
            add_parts(p, edge, i);
        }
    }
}

} // namespace luce
