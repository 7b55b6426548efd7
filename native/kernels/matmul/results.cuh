// Takes a block's sums to the outputs. Tiles that are whole in a range go there at once. Of others each range
// leaves its part in scratch, to be added in the order of ranges by a kernel behind. Or all tiles stay parts
// (RowmmArgs.parts).
#pragma once

#include "matmul/rings.cuh"

namespace luce {

__device__ __forceinline__ void write_out(const RowmmSegment &s, int t, int n, float x) {
    if (s.residual != nullptr) {
        x += s.residual[t * s.residual_row + n];
    }
    s.out[t * s.out_row + n] = x;
}

// This is the tile that a range leaves unfinished.
struct OpenTile {
    int segment, tile;
    int from, to; // these ranges have a part of it; it is whole where from == to

    // Finds the tile in which range r ends.
    __device__ OpenTile(const RowmmParams &p, int r) : segment(0), from(r), to(r) {
        const int unit = p.first[r + 1] - 1;
        while (segment + 1 < p.n_segments && p.segments[segment + 1].first_unit <= unit) {
            segment++;
        }
        const RowmmSegment &s = p.segments[segment];
        tile = (unit - s.first_unit) / s.units_k;
        const int begin = s.first_unit + tile * s.units_k;
        while (p.first[from] > begin) {
            from--;
        }
        while (p.first[to + 1] < begin + s.units_k) {
            to++;
        }
    }
};

// Returns where range r leaves its part of a tile that it begins, or that it began in the middle.
__device__ __forceinline__ float *part_of(const RowmmParams &p, int r, bool middle) {
    return p.partial + (int64_t(r) * 2 + (middle ? 0 : 1)) * p.rows * TILE;
}

// Says where a lane's results go: rows t, t + 1, t + 8 .. of outputs 0 and 8 behind `to`.
struct Target {
    float *to;
    const float *residual; // it is null, or lies as `to` does
    int64_t row, residual_row; // the next row lies so many values further
    float scale[2];
    bool present[2];
};
template <int NT, bool RESIDUAL>
__device__ __forceinline__ void write_rows(const Target &target, const Sums<NT> &acc, const float *scales,
                                           int t, int rows) {
    float *to[2] = {target.to + t * target.row, target.to + (t + 1) * target.row};
    const int left = rows - t; // the lane's rows are those before this one
    scales += t;
#pragma unroll
    for (int j = 0; j < NT; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float of_row = scales[j * 8 + i];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float x = acc[j][i + 2 * r] * target.scale[r] * of_row;
                if (target.present[r] && j * 8 + i < left) {
                    if constexpr (RESIDUAL) {
                        x += target.residual[(j * 8 + t + i) * target.residual_row + r * 8];
                    }
                    __stcg(to[i] + r * 8, x);
                }
            }
            to[i] += 8 * target.row;
        }
    }
}

// Writes what a warp has of a tile into `out`, or into the range's part of it. `scales` has one for each row.
template <int NT>
__device__ __forceinline__ void write_tile(const RowmmParams &p, const RowmmSegment &s, const Sums<NT> &acc,
                                           int tile, float *part, const float *scales) {
    const int lane = threadIdx.x % WARP, o = fragment_of_warp() * FRAGMENT + lane / 4, n = tile * TILE + o;
    Target target;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const bool exists = n + r * 8 < s.N;
        target.present[r] = part != nullptr || exists;
        target.scale[r] = s.output_scale != nullptr && exists ? s.output_scale[n + r * 8] : 1.0f;
    }
    if (part != nullptr) {
        target.to = part + o;
        target.row = TILE;
    } else {
        target.to = s.out + n;
        target.row = s.out_row;
    }
    if (part == nullptr && s.residual != nullptr) {
        target.residual = s.residual + n;
        target.residual_row = s.residual_row;
        write_rows<NT, true>(target, acc, scales, lane % 4 * 2, p.rows);
    } else {
        write_rows<NT, false>(target, acc, scales, lane % 4 * 2, p.rows);
    }
}

// Says where a lane's results of a tile go where nothing is done to them but to write them. It is found ahead of the tile's units.
struct TileEnd {
    float *to; // outputs 0 and 8 of row 0; null says that more is to be done
    int row; // the next row lies so many values further
    int flags; // bit r says that output 8 r is there; the others are for who has this

    __device__ TileEnd(const RowmmParams &p, const RowmmSegment &s, int tile, float *part, int more_flags)
        : flags(more_flags) {
        const int o = fragment_of_warp() * FRAGMENT + int(threadIdx.x) % WARP / 4, n = tile * TILE + o;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            flags |= int(part != nullptr || n + r * 8 < s.N) << r;
        }
        to = part != nullptr ? part + o : s.residual == nullptr ? s.out + n : nullptr;
        to = s.output_scale == nullptr ? to : nullptr;
        row = part != nullptr ? TILE : int(s.out_row);
        hold(to); // all are kept in registers from here on
        hold(row);
        hold(flags);
    }
    // Writes the sums of so many rows, each times its row's scale.
    template <int NT>
    __device__ __forceinline__ void write(const Sums<NT> &acc, const float *scales, int rows) const {
        const int t = int(threadIdx.x) % WARP % 4 * 2,
                  left = rows - t; // the lane's rows are those before `left`
        float *at[2] = {to + int64_t(t) * row, to + int64_t(t + 1) * row};
        scales += t;
#pragma unroll
        for (int j = 0; j < NT; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float of_row = scales[j * 8 + i];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    if ((flags >> r & 1) != 0 && j * 8 + i < left) {
                        __stcg(at[i] + r * 8, acc[j][i + 2 * r] * of_row);
                    }
                }
                at[i] += 8 * row;
            }
        }
    }
};

__device__ __forceinline__ float4 add(float4 a, float4 b) {
    return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// Adds a tile's parts in the order of ranges: those of its i-th four outputs, row after row.
__device__ __forceinline__ void add_parts(const RowmmParams &p, const OpenTile &open, int i) {
    constexpr int AHEAD = 8; // so many loads are in flight
    const RowmmSegment &s = p.segments[open.segment];
    const int64_t step = int64_t(2) * p.rows * (TILE / 4);
    const float4 *first = reinterpret_cast<const float4 *>(part_of(p, open.from, false)) + i;
    const float4 *others = reinterpret_cast<const float4 *>(part_of(p, open.from + 1, true)) + i;
    const int n_others = open.to - open.from;
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
    const int t = i / (TILE / 4), n = open.tile * TILE + i % (TILE / 4) * 4;
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

} // namespace luce
