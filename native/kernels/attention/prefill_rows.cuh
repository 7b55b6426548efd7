// A warp's part of a prompt's attention, which is the same by whatever instructions scores and sums are made: which rows it has
// and what they see, their weights, and what is added up.
#pragma once

#include "attention/prefill.h"
#include "attention/tile.cuh"
#include "common/lanes.cuh"

namespace luce {
namespace {

constexpr float LOG2E = 1.44269504f;
constexpr int QUAD = 4; // so many lanes share a row of a warp's tile

// What a range of positions gave one row: its largest score, in units of log2, the sum of 2^(score - largest), and that of
// 2^(score - largest) * v, which is `value` for one column.
struct Sum {
    float most, weights;
};

// Returns the factors of two sums that are added up, and makes the first one both.
__device__ float2 add_up(Sum &sum, const Sum &more) {
    const float most = fmaxf(sum.most, more.most), base = most == -INFINITY ? 0.0f : most;
    const float2 factors = {exp2_fast(sum.most - base), exp2_fast(more.most - base)};
    sum = {most, sum.weights * factors.x + more.weights * factors.y};
    return factors;
}

// A group has ROWS rows of one sequence, of one head, a warp 16 of them, and KEYS keys a tile. A thread has columns
// lane % 4 * 2 and the next of each 8 in rows lane / 4 and lane / 4 + 8 of the warp's.
template <int D, int ROWS, int KEYS, int SHARES> struct PrefillRows {
    static constexpr int N = KEYS / 8, C = D / 8 / SHARES;
    const PrefillAttentionArgs &a;
    // `warp` counts those that have other rows, and `share` those that have other columns of the same.
    const int head, lane = threadIdx.x % WARP, warp, share;
    const int group = int(gridDim.x - 1 - blockIdx.x), // those with most keys come first
        i_seq = seq_of_group(*a.ctl, group, ROWS);
    const SeqCtl &seq = a.ctl->seqs[i_seq];
    const int begin = (group - first_group(seq, i_seq, ROWS)) * ROWS; // of the sequence's rows
    const int n_rows = min(seq.n_rows - begin, ROWS), first_row = seq.row0 + begin;
    const int32_t first_position = seq.n_past + begin;
    // No row sees a key from here on.
    const int32_t end =
        n_rows > 0 ? prefill_row_end(a, first_row + n_rows - 1, first_position + n_rows - 1) : 0;
    float o[C][4];
    Sum sums[2];

    __device__ PrefillRows(const PrefillAttentionArgs &args, int of_head, int of_warp, int of_share)
        : a(args), head(of_head), warp(of_warp), share(of_share) {}

    __device__ int row(int half) const { return warp * 16 + half * 8 + lane / 4; } // in the group
    __device__ bool has(int half) const { return row(half) < n_rows; }
    __device__ int column() const { return share * C * 8 + lane % 4 * 2; } // the thread's first
    __device__ float *out(int half) const {
        return a.out + (int64_t(first_row + row(half)) * a.H + head) * D + column();
    }
    __device__ int kv_head() const { return head / (a.H / a.Hkv); }
    // Returns the keys that the block adds up: those that any row sees, or those of its range.
    __device__ int2 keys() const {
        const int32_t low = lowest_visible(first_position, a.first, a.window) / KEYS * KEYS;
        const int32_t from = int32_t(blockIdx.z) * PREFILL_RANGE;
        return a.apart ? int2{max(low, from), min(end, from + PREFILL_RANGE)} : int2{low, end};
    }

    // Calls put(row, word, values) for each 8 values of the group's queries, which `threads` threads share.
    template <typename Put> __device__ void each_query(int tid, int threads, Put put) const {
        const float factor = a.softcap > 0 ? a.scale / a.softcap : a.scale * LOG2E;
        for (int i = tid; i < ROWS * (D / 8); i += threads) {
            const int r = i / (D / 8), word = i % (D / 8);
            uint4 words = {};
            if (r < n_rows) {
                const auto *x = reinterpret_cast<const float4 *>(
                    a.q + (int64_t(first_row + r) * a.H + head) * D + word * 8);
                const float4 left = x[0], right = x[1];
                words = {pack_halves(left.x * factor, left.y * factor),
                         pack_halves(left.z * factor, left.w * factor),
                         pack_halves(right.x * factor, right.y * factor),
                         pack_halves(right.z * factor, right.w * factor)};
            }
            put(r, word, words);
        }
    }

    __device__ void begin_range() {
#pragma unroll
        for (int c = 0; c < C; c++) {
            o[c][0] = o[c][1] = o[c][2] = o[c][3] = 0;
        }
        sums[0] = sums[1] = {-INFINITY, 0};
    }

    // Makes scores, which are -inf where a row does not see the key, weights of F16.
    __device__ void weigh(float (&s)[N][4], int32_t first, uint32_t (&weights)[N][2]) {
        if (a.softcap > 0) {
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    s[n][e] = a.softcap * tanhf(s[n][e]) * LOG2E;
                }
            }
        }
        const int32_t earliest = first_position + warp * 16; // the warp's first row
        if (first + KEYS - 1 > earliest || first < lowest_visible(earliest + 15, a.first, a.window)) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int32_t p = first_position + row(half), low = lowest_visible(p, a.first, a.window);
                const int32_t end_of_row = has(half) ? prefill_row_end(a, first_row + row(half), p) : end;
#pragma unroll
                for (int n = 0; n < N; n++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int32_t key = first + n * 8 + lane % 4 * 2 + e;
                        if (key >= end_of_row || key < low) {
                            s[n][2 * half + e] = -INFINITY;
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Sum &sum = sums[half];
            float most = s[0][2 * half];
#pragma unroll
            for (int n = 0; n < N; n++) {
                most = fmaxf(most, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
            }
            most = fmaxf(sum.most, warp_max(most, QUAD));
            const float origin = most == -INFINITY ? 0.0f : most, factor = exp2_fast(sum.most - origin);
            float added = 0;
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float x = exp2_fast(s[n][2 * half] - origin),
                            y = exp2_fast(s[n][2 * half + 1] - origin);
                added += x + y;
                weights[n][half] = pack_halves(x, y);
            }
            sum = {most, sum.weights * factor + added};
            if (__any_sync(~0u, factor != 1.0f)) {
#pragma unroll
                for (int c = 0; c < C; c++) {
                    o[c][2 * half] *= factor;
                    o[c][2 * half + 1] *= factor;
                }
            }
        }
    }

    // Adds the warps' lanes up, where a range ends.
    __device__ void end_range() {
        sums[0].weights = warp_sum(sums[0].weights, QUAD);
        sums[1].weights = warp_sum(sums[1].weights, QUAD);
    }

    // Leaves the range's sums for add_ranges_kernel.
    __device__ void leave() const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (!has(half)) {
                continue;
            }
            float *to = prefill_range(a, blockIdx.z, first_row + row(half), head);
            if (lane % 4 == 0 && share == 0) {
                to[0] = sums[half].most;
                to[1] = sums[half].weights;
            }
#pragma unroll
            for (int c = 0; c < C; c++) {
                *reinterpret_cast<float2 *>(to + 2 + column() + c * 8) = {o[c][2 * half], o[c][2 * half + 1]};
            }
        }
    }

    // Adds the range's sums to those before, which lie in the result, and divides what is the last.
    __device__ void keep(Sum (&whole)[2], bool is_first, bool is_last) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (!has(half)) {
                continue;
            }
            float2 factors = {};
            if (is_first) {
                whole[half] = sums[half];
            } else {
                factors = add_up(whole[half], sums[half]);
            }
            float *to = out(half);
#pragma unroll
            for (int c = 0; c < C; c++) {
                auto *at = reinterpret_cast<float2 *>(to + c * 8);
                float2 x = {o[c][2 * half], o[c][2 * half + 1]};
                if (!is_first) {
                    const float2 before = *at;
                    x = {before.x * factors.x + x.x * factors.y, before.y * factors.x + x.y * factors.y};
                }
                if (is_last) {
                    x = {x.x / whole[half].weights, x.y / whole[half].weights};
                }
                *at = x;
            }
        }
    }

    // Adds the keys() up: add(first, stop) does so for those of a range.
    template <typename Add> __device__ void run(Add add) {
        const int2 all = keys();
        if (a.apart) {
            begin_range();
            add(all.x, all.y);
            end_range();
            leave();
            return;
        }
        Sum whole[2];
        for (int32_t first = all.x; first < all.y;) {
            const int32_t stop = min(all.y, (first / PREFILL_RANGE + 1) * PREFILL_RANGE);
            begin_range();
            add(first, stop);
            end_range();
            keep(whole, first == all.x, stop == all.y);
            first = stop;
        }
    }
};

} // namespace
} // namespace luce
