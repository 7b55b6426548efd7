// Computes attention of prompts' rows over the cells before them and their own, on the tensor cores (sm_80 and later).
//
// A row's bits depend on its position and on what its cells hold, and on nothing else: not on how many rows a call has,
// where they begin, or how many blocks share the work. Keys are taken in tiles of KEYS that begin at multiples of it, in
// order, and a key that a row does not see has weight 0, which changes no bit. The sums of each RANGE of positions begin
// anew, and are added to those of the ranges before in order: by the block that has the row, or where few rows have many keys,
// by another kernel from what a block for each range has left.
#include "attention/prefill.h"
#include "attention/sizes.h"
#include "attention/tile.cuh"
#include "common/lanes.cuh"

#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace luce {
namespace {

template <int D, int WARPS> struct PrefillLayout {
    static constexpr int SHARES =
        prefill_shares(D); // so many warps share a row's columns, and each has all of its scores
    static constexpr int ROW_WARPS = WARPS / SHARES;
    static constexpr int KEYS = prefill_keys(D), ROWS = 16 * ROW_WARPS, THREADS = WARP * WARPS, ROW = 2 * D;
    static_assert(ROWS == prefill_rows(D));
    static_assert(GATHER_CELLS % KEYS == 0, "no tile has cells that were not gathered and others");
    static constexpr int Q = 0, K = ROWS * ROW, V = K + KEYS * ROW, BYTES = V + KEYS * ROW;
    static_assert(BYTES <= 101376, "a block's shared memory on GPUs of compute capability 8.6");
};

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

// A block has ROWS rows of one head, a warp 16 of them, and a thread columns lane % 4 * 2 and the next of each 8 in rows
// lane / 4 and lane / 4 + 8 of the warp's.
template <int D, int WARPS> struct PrefillBlock {
    using L = PrefillLayout<D, WARPS>;
    static constexpr int N = L::KEYS / 8, C = D / 8 / L::SHARES;
    const PrefillAttentionArgs &a;
    uint8_t *const shared;
    const uint32_t base = shared_address(shared);
    // `warp` counts those that have other rows, and `share` those that have other columns of the same.
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % L::ROW_WARPS,
              share = threadIdx.x / WARP / L::ROW_WARPS;
    const int head = blockIdx.y, group = int(gridDim.x - 1 - blockIdx.x), // those with most keys come first
        i_seq = seq_of_group(*a.ctl, group, L::ROWS);
    const SeqCtl &seq = a.ctl->seqs[i_seq];
    const int begin = (group - first_group(seq, i_seq, L::ROWS)) * L::ROWS; // of the sequence's rows
    const int n_rows = min(seq.n_rows - begin, L::ROWS), first_row = seq.row0 + begin;
    const int32_t first_position = seq.n_past + begin;
    // No row sees a key from here on.
    const int32_t end =
        n_rows > 0 ? prefill_row_end(a, first_row + n_rows - 1, first_position + n_rows - 1) : 0;
    float o[C][4];
    Sum sums[2];

    __device__ PrefillBlock(const PrefillAttentionArgs &args, uint8_t *block) : a(args), shared(block) {}

    __device__ int row(int half) const { return warp * 16 + half * 8 + lane / 4; } // in the block
    __device__ int column() const { return share * C * 8 + lane % 4 * 2; } // the thread's first
    __device__ float *out(int half) const {
        return a.out + (int64_t(first_row + row(half)) * a.H + head) * D + column();
    }

    __device__ void load_queries() {
        const float factor = a.softcap > 0 ? a.scale / a.softcap : a.scale * LOG2E;
        for (int i = threadIdx.x; i < L::ROWS * (D / 8); i += L::THREADS) {
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
            *reinterpret_cast<uint4 *>(shared + L::Q + swizzle<L::ROW>(r, word)) = words;
        }
    }

    // Copies a tile of keys or values, and zeros for cells that no row of the block sees.
    __device__ void load(const uint16_t *cells, uint32_t to, int32_t first) const {
        const int kv_head = head / (a.H / a.Hkv);
        for (int i = threadIdx.x; i < L::KEYS * (D / 8); i += L::THREADS) {
            const int key = i / (D / 8), word = i % (D / 8);
            const uint16_t *from =
                cells + (int64_t(seq.cells + min(first + key, end - 1)) * a.Hkv + kv_head) * D + word * 8;
            copy_async<16>(base + to + swizzle<L::ROW>(key, word), from, first + key < end);
        }
        copies_commit();
    }

    __device__ void begin_range() {
#pragma unroll
        for (int c = 0; c < C; c++) {
            o[c][0] = o[c][1] = o[c][2] = o[c][3] = 0;
        }
        sums[0] = sums[1] = {-INFINITY, 0};
    }

    __device__ void score(float (&s)[N][4]) const {
        const uint32_t q = base + L::Q + swizzle<L::ROW>(warp * 16 + lane % 16, lane / 16);
        const uint32_t k = base + L::K + swizzle<L::ROW>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
        for (int n = 0; n < N; n++) {
            s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
        }
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            uint32_t rows[4];
            load_matrices(rows, at_word(q, d * 2));
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                uint32_t keys[4];
                load_matrices(keys, at_word(k, d * 2) + n * 8 * L::ROW);
                multiply(s[n], rows, keys[0], keys[1]);
                multiply(s[n + 1], rows, keys[2], keys[3]);
            }
        }
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
        if (first + L::KEYS - 1 > earliest || first < lowest_visible(earliest + 15, a.first, a.window)) {
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

    __device__ void add_values(const uint32_t (&weights)[N][2]) {
        const uint32_t v = base + L::V + swizzle<L::ROW>(lane % 16, share * C + lane / 16);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            const uint32_t rows[4] = {weights[n][0], weights[n][1], weights[n + 1][0], weights[n + 1][1]};
#pragma unroll
            for (int c = 0; c < C; c += 2) {
                uint32_t values[4];
                load_transposed(values, at_word(v, c) + n * 8 * L::ROW);
                multiply(o[c], rows, values[0], values[1]);
                multiply(o[c + 1], rows, values[2], values[3]);
            }
        }
    }

    // Adds the keys from `first`, a multiple of KEYS, to `stop`.
    __device__ void add_keys(int32_t first, int32_t stop) {
        begin_range();
        for (; first < stop; first += L::KEYS) {
            copies_wait<0>();
            __syncthreads(); // the keys are there, and the values before are done with
            load(a.v, L::V, first);
            float s[N][4];
            score(s);
            __syncthreads();
            if (first + L::KEYS < end) {
                load(a.k, L::K, first + L::KEYS);
            } else {
                copies_commit();
            }
            uint32_t weights[N][2];
            weigh(s, first, weights);
            copies_wait<1>();
            __syncthreads();
            add_values(weights);
        }
        sums[0].weights = warp_sum(sums[0].weights, QUAD);
        sums[1].weights = warp_sum(sums[1].weights, QUAD);
    }

    __device__ bool has(int half) const { return row(half) < n_rows; }

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
};

// The grid is groups of rows, heads, and the ranges there are where each has a block of its own. Those that no row of a group
// sees are not there.
template <int D, int WARPS>
__global__ void __launch_bounds__(WARP *WARPS, WARPS == 4 ? 2 : 1)
    prefill_attention_kernel(const __grid_constant__ PrefillAttentionArgs a) {
    using L = PrefillLayout<D, WARPS>;
    extern __shared__ __align__(1024) uint8_t shared[];
    PrefillBlock<D, WARPS> block(a, shared);
    if (block.n_rows <= 0 || int32_t(blockIdx.z) * PREFILL_RANGE >= block.end) {
        return;
    }
    int32_t first = lowest_visible(block.first_position, a.first, a.window) / L::KEYS * L::KEYS,
            end = block.end;
    if (a.apart) {
        first = max(first, int32_t(blockIdx.z) * PREFILL_RANGE);
        end = min(end, int32_t(blockIdx.z + 1) * PREFILL_RANGE);
    }
    block.load_queries();
    if (first < end) {
        block.load(a.k, L::K, first);
    }
    if (a.apart) {
        block.add_keys(first, end);
        block.leave();
        return;
    }
    Sum whole[2];
    for (bool is_first = true; first < end; is_first = false) {
        const int32_t stop = min(end, (first / PREFILL_RANGE + 1) * PREFILL_RANGE);
        block.add_keys(first, stop);
        block.keep(whole, is_first, stop == end);
        first = stop;
    }
}

// The grid is rows, heads, with a thread for each column.
__global__ void add_ranges_kernel(const __grid_constant__ PrefillAttentionArgs a) {
    const int row = blockIdx.x, head = blockIdx.y, c = threadIdx.x;
    const SeqCtl &seq = a.ctl->seqs[seq_of_row(*a.ctl, row)];
    const int n = (prefill_row_end(a, row, seq.n_past + row - seq.row0) - 1) / PREFILL_RANGE + 1;
    const float *range = prefill_range(a, 0, row, head);
    Sum sum = {range[0], range[1]};
    float x = range[2 + c];
    for (int i = 1; i < n; i++) {
        range = prefill_range(a, i, row, head);
        const float2 factors = add_up(sum, {range[0], range[1]});
        x = x * factors.x + range[2 + c] * factors.y;
    }
    a.out[(int64_t(row) * a.H + head) * a.D + c] = x / sum.weights;
}

template <int D, int WARPS> int run(const PrefillAttentionArgs &a, cudaStream_t stream) {
    using L = PrefillLayout<D, WARPS>;
    static_assert(L::BYTES == prefill_block_bytes(D));
    const auto kernel = prefill_attention_kernel<D, WARPS>;
    if (const cudaError_t error = allow_shared(kernel, L::BYTES); error != cudaSuccess) {
        return int(error);
    }
    const unsigned ranges = a.apart ? unsigned(prefill_ranges(a)) : 1;
    const dim3 grid(unsigned(groups_of(a.T, a.n_prompts, L::ROWS)), unsigned(a.H), ranges);
    kernel<<<grid, L::THREADS, L::BYTES, stream>>>(a);
    if (a.apart) {
        add_ranges_kernel<<<dim3(unsigned(a.T), unsigned(a.H)), unsigned(D), 0, stream>>>(a);
    }
    return int(cudaGetLastError());
}

} // namespace

int cuda::prefill_attention(const PrefillAttentionArgs &args, void *stream) {
    if (args.T < 0 || args.Hkv <= 0 || args.H % args.Hkv != 0 || args.n_prompts < 1) {
        return int(cudaErrorInvalidValue);
    }
    if (args.T == 0) {
        return 0;
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    return HeadSizes::with(args.D, int(cudaErrorInvalidValue), [&](auto D) { return run<D(), 4>(args, st); });
}

} // namespace luce
