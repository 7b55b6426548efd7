// Computes attention of a DFlash block, where the rows of a sequence all see each other and the context
// before them. Each sequence's keys are cut into SPLITS parts of whole tiles, which depend on its own length
// alone. A block of threads takes one part for one KV head, and a warp takes some of the (row, head) pairs
// that share it. A second kernel adds the head's sink and the parts up in order, and packs the sums. A draft decides no
// token, so this is plain F32, and made to be short.
#include "attention/chunks.h"
#include "attention/kv_types.cuh"
#include "attention/launch_plan.h"
#include "common/kernels.h"
#include "common/lanes.cuh"
#include "common/overlap.cuh"
#include "matmul/pack.cuh"

#include <cuda_runtime.h>

namespace luce {
namespace {

constexpr int WARPS = DRAFT_WARPS, THREADS = WARP * WARPS;
constexpr int TILE = DRAFT_KEYS; // keys of a tile, of which each lane has one
constexpr int SPLITS = BLOCK_ATTENTION_SPLITS, QUERY_VALUES = DRAFT_QUERY_VALUES;
constexpr int GROUP =
    4; // a warp works on so many pairs side by side, with the keys and values that it reads once

template <int D> struct Shape {
    static constexpr int PAIRS = QUERY_VALUES / D; // so many pairs are worked on at once
    static constexpr int MINE = PAIRS / WARPS; // a warp has so many of them, every WARPS-th
    static constexpr int LANE = D / WARP; // a lane has so many values, one behind the other
    static constexpr int KEY = draft_key(D);
    static_assert(draft_bytes(D) <= 101376, "a block's shared memory on GPUs of compute capability 8.6");
    static_assert(MINE % GROUP == 0 && LANE % 2 == 0 && KEY % 4 == 0);
};

// Returns where a part's largest score lies, with its sum of e^(score - largest) and that of e^(score -
// largest) * v.
__device__ float *part_of(const AttentionArgs &a, int row, int head, int split) {
    return a.scratch + ((int64_t(row) * a.H + head) * SPLITS + split) * (a.pool.D + 2);
}

// Says how a sequence's keys are cut into parts, of which there are `n`.
struct Parts {
    int32_t low, end, each; // a part has so many keys
    int n;

    __device__ Parts(const AttentionArgs &a, const SeqCtl &seq)
        : low(lowest_visible(seq.n_past, a.first, a.window)), end(seq.n_past + seq.n_rows) {
        const int32_t tiles = (end - low + TILE - 1) / TILE, of_part = (tiles + SPLITS - 1) / SPLITS;
        each = of_part * TILE;
        n = (tiles + of_part - 1) / of_part;
    }
};

// A tile is keys first .. first + TILE - 1 of one KV head and their values, and zeros from `end` on. All of what a thread has of it
// is on its way before any of it goes to shared memory: behind a store the compiler asks for nothing.
template <int TYPE, int D> struct Tile {
    static constexpr int PARTS = D / 8, MINE = 2 * TILE * PARTS / THREADS;
    static_assert(MINE * THREADS == 2 * TILE * PARTS && MINE % 2 == 0, "the first half are keys");
    float x[MINE][8];

    static __device__ int key_of(int m) { return (m % (MINE / 2) * THREADS + int(threadIdx.x)) / PARTS; }
    static __device__ int value_of() { return int(threadIdx.x) % PARTS * 8; }
    static_assert(THREADS % PARTS == 0);

    __device__ void fetch(const AttentionArgs &a, const SeqCtl &seq, int head, int32_t first, int32_t end) {
        int64_t rows[MINE / 2];
#pragma unroll
        for (int m = 0; m < MINE / 2; m++) {
            const int32_t position = min(first + key_of(m), end - 1);
            rows[m] = a.pool.row(a.pages[seq.pages + position / PAGE], position, head);
        }
#pragma unroll
        for (int m = 0; m < MINE; m++) {
            const uint8_t *from = m < MINE / 2 ? a.pool.k : a.pool.v;
            load_row<TYPE>(from + rows[m % (MINE / 2)] * kv_bytes<TYPE>(D), value_of(), x[m]);
        }
#pragma unroll
        for (int m = 0; m < MINE; m++) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                x[m][j] = first + key_of(m) < end ? x[m][j] : 0.0f;
            }
        }
    }
    __device__ void put(float *keys, float *values) const {
#pragma unroll
        for (int m = 0; m < MINE; m++) {
            float *row = m < MINE / 2 ? keys + key_of(m) * Shape<D>::KEY : values + key_of(m) * D;
            float4 *to = reinterpret_cast<float4 *>(row + value_of());
            to[0] = {x[m][0], x[m][1], x[m][2], x[m][3]};
            to[1] = {x[m][4], x[m][5], x[m][6], x[m][7]};
        }
    }
};

// Queries of a KV head from pair `first` on, and zeros behind the last pair.
template <int D> struct Queries {
    static constexpr int MINE = QUERY_VALUES / 4 / THREADS;
    float4 x[MINE];

    __device__ void fetch(const AttentionArgs &a, const SeqCtl &seq, int head, int first, int pairs) {
        const int G = a.H / a.pool.Hkv;
#pragma unroll
        for (int m = 0; m < MINE; m++) {
            const int i = (m * THREADS + int(threadIdx.x)) * 4, pair = first + i / D;
            const int64_t row = seq.row0 + pair / G;
            const float *from = a.q + (row * a.H + head * G + pair % G) * D + i % D;
            x[m] = pair < pairs ? *reinterpret_cast<const float4 *>(from) : float4{};
        }
    }
    __device__ void put(float *queries) const {
#pragma unroll
        for (int m = 0; m < MINE; m++) {
            reinterpret_cast<float4 *>(queries)[m * THREADS + int(threadIdx.x)] = x[m];
        }
    }
};

// Sums are those of a group of a warp's pairs over the keys so far.
template <int D> struct Sums {
    using S = Shape<D>;
    float most[GROUP], sum[GROUP], out[GROUP][S::LANE];

    __device__ Sums() {
#pragma unroll
        for (int m = 0; m < GROUP; m++) {
            most[m] = -INFINITY;
            sum[m] = 0;
#pragma unroll
            for (int d = 0; d < S::LANE; d++) {
                out[m][d] = 0;
            }
        }
    }

    // Adds a tile's values. Scores are those of the lane's key, and -inf where it is not seen.
    __device__ void add(const float (&scores)[GROUP], const float *values, int lane) {
        float weights[GROUP];
#pragma unroll
        for (int m = 0; m < GROUP; m++) {
            const float largest = fmaxf(most[m], warp_max(scores[m]));
            const float base = largest == -INFINITY ? 0.0f : largest;
            weights[m] = expf(scores[m] - base);
            const float shrink = expf(most[m] - base);
            sum[m] = fmaf(sum[m], shrink, warp_sum(weights[m]));
            most[m] = largest;
#pragma unroll
            for (int d = 0; d < S::LANE; d++) {
                out[m][d] *= shrink;
            }
        }
#pragma unroll 8
        for (int j = 0; j < TILE; j++) {
            float v[S::LANE];
#pragma unroll
            for (int d = 0; d < S::LANE; d += 2) {
                const float2 both = *reinterpret_cast<const float2 *>(values + j * D + lane * S::LANE + d);
                v[d] = both.x, v[d + 1] = both.y;
            }
#pragma unroll
            for (int m = 0; m < GROUP; m++) {
                const float p = __shfl_sync(~0u, weights[m], j);
#pragma unroll
                for (int d = 0; d < S::LANE; d++) {
                    out[m][d] = fmaf(p, v[d], out[m][d]);
                }
            }
        }
    }

    __device__ void write(int m, float *part, int lane) const {
        if (lane == 0) {
            part[0] = most[m];
            part[1] = sum[m];
        }
#pragma unroll
        for (int d = 0; d < S::LANE; d += 2) {
            *reinterpret_cast<float2 *>(part + 2 + lane * S::LANE + d) = {out[m][d], out[m][d + 1]};
        }
    }
};

// Finds the scores of a group of queries, WARPS apart, with the lane's key.
template <int D>
__device__ void find_scores(const AttentionArgs &a, const float *queries, const float *key,
                            float (&scores)[GROUP]) {
#pragma unroll
    for (int m = 0; m < GROUP; m++) {
        scores[m] = 0;
    }
#pragma unroll 8
    for (int d = 0; d < D; d += 4) {
        const float4 k = *reinterpret_cast<const float4 *>(key + d);
#pragma unroll
        for (int m = 0; m < GROUP; m++) {
            const float4 q = *reinterpret_cast<const float4 *>(queries + m * WARPS * D + d);
            scores[m] = fmaf(q.x, k.x, scores[m]);
            scores[m] = fmaf(q.y, k.y, scores[m]);
            scores[m] = fmaf(q.z, k.z, scores[m]);
            scores[m] = fmaf(q.w, k.w, scores[m]);
        }
    }
#pragma unroll
    for (int m = 0; m < GROUP; m++) {
        scores[m] *= a.scale;
        scores[m] = a.softcap > 0 ? a.softcap * tanhf(scores[m] / a.softcap) : scores[m];
    }
}

// The grid is KV heads * SPLITS, sequences.
template <int TYPE, int D> __global__ void __launch_bounds__(THREADS) parts_kernel(AttentionArgs a) {
    using S = Shape<D>;
    extern __shared__ float4 shared[];
    float *queries = reinterpret_cast<float *>(shared), *keys = queries + QUERY_VALUES,
          *values = keys + TILE * S::KEY;
    let_next_start();
    if (int(blockIdx.y) >= a.ctl->n_seqs) {
        return;
    }
    const SeqCtl &seq = a.ctl->seqs[blockIdx.y];
    const int head = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int G = a.H / a.pool.Hkv, pairs = seq.n_rows * G;
    const Parts parts(a, seq);
    const int32_t from = parts.low + split * parts.each, to = min(parts.end, from + parts.each);
    if (split >= parts.n) {
        return;
    }
    const bool one = to - from <= TILE; // then keys and values are loaded once
    wait_for_previous();
    for (int pair0 = 0; pair0 < pairs; pair0 += S::PAIRS) {
        const int here = min(pairs - pair0, S::PAIRS);
        Queries<D> of_pairs;
        Tile<TYPE, D> tile;
        of_pairs.fetch(a, seq, head, pair0, pairs);
        if (one && pair0 == 0) {
            tile.fetch(a, seq, head, from, to);
        }
        __syncthreads(); // the last pairs are done with
        of_pairs.put(queries);
        if (one && pair0 == 0) {
            tile.put(keys, values);
        }
        for (int group = 0; group * WARPS < here; group += GROUP) {
            Sums<D> sums;
            for (int32_t first = from; first < to; first += TILE) {
                if (!one) {
                    tile.fetch(a, seq, head, first, to);
                    __syncthreads(); // the last tile is done with
                    tile.put(keys, values);
                }
                __syncthreads();
                float scores[GROUP];
                find_scores<D>(a, queries + (group * WARPS + warp) * D, keys + lane * S::KEY, scores);
#pragma unroll
                for (int m = 0; m < GROUP; m++) {
                    const int pair = pair0 + (group + m) * WARPS + warp, key = first + lane;
                    const bool seen =
                        key < to && key >= lowest_visible(seq.n_past + pair / G, a.first, a.window);
                    scores[m] = seen ? scores[m] : -INFINITY;
                }
                sums.add(scores, values, lane);
            }
#pragma unroll
            for (int m = 0; m < GROUP; m++) {
                if (const int pair = pair0 + (group + m) * WARPS + warp; pair < pairs) {
                    sums.write(m, part_of(a, seq.row0 + pair / G, head * G + pair % G, split), lane);
                }
            }
        }
    }
}

// Adds up a row's parts of a chunk of 256 values, and leaves or packs them. A thread has two values, which a warp's are of one
// head, and a lane finds the weight of the part that its number is. The grid is {chunks, rows}.
static_assert(SPLITS == WARP);
__global__ void __launch_bounds__(CHUNK / 2)
    combine_kernel(const __grid_constant__ AttentionArgs a, RowsLayout layout) {
    __shared__ float4 values[CHUNK / 4];
    let_next_start();
    const int row = blockIdx.y, lane = threadIdx.x % WARP, D = a.pool.D, K = a.H * D;
    const int k = int(blockIdx.x) * CHUNK + threadIdx.x * 2, n = k < K ? k : 0, head = n / D;
    const int sequence = a.ctl->rows[row].seq;
    const int parts = k < K && sequence >= 0 ? Parts(a, a.ctl->seqs[sequence]).n : 0;
    const float sink = a.sinks != nullptr ? a.sinks[head] : -INFINITY; // -INFINITY adds 0 to the sum
    const float *part = part_of(a, row, head, lane), *own = part_of(a, row, head, 0) + 2 + n % D;
    wait_for_previous();
    float2 x[SPLITS], v = {};
#pragma unroll
    for (int split = 0; split < SPLITS; split++) {
        x[split] = split < parts ? *reinterpret_cast<const float2 *>(own + split * (D + 2)) : float2{};
    }
    const float2 of_lane = lane < parts ? *reinterpret_cast<const float2 *>(part) : float2{-INFINITY, 0};
    const float most = fmaxf(sink, warp_max(of_lane.x)), base = most == -INFINITY ? 0.0f : most;
    const float weight = expf(of_lane.x - base), sum = expf(sink - base) + warp_sum(of_lane.y * weight);
#pragma unroll
    for (int split = 0; split < SPLITS; split++) {
        const float scale = __shfl_sync(~0u, weight, split);
        v.x = fmaf(x[split].x, scale, v.x);
        v.y = fmaf(x[split].y, scale, v.y);
    }
    v = sum == 0 || parts == 0 ? float2{} : float2{v.x / sum, v.y / sum};
    if (a.packed == nullptr) {
        if (k < K) {
            *reinterpret_cast<float2 *>(a.out + int64_t(row) * K + k) = v;
        }
        return;
    }
    reinterpret_cast<float2 *>(values)[threadIdx.x] = v;
    __syncthreads();
    if (threadIdx.x < WARP) {
        float eight[OWN];
        load_values(eight, reinterpret_cast<const float *>(values), lane * OWN, CHUNK);
        const int C = layout.columns;
        uint8_t *out = static_cast<uint8_t *>(a.packed) +
                       (row / layout.set * chunks_of(K) + int64_t(blockIdx.x)) * chunk_bytes(C);
        pack_chunk(out, C, row % layout.set, layout.wide, eight, largest(eight), lane);
    }
}

template <int TYPE, int D> int run(const AttentionArgs &a, cudaStream_t stream) {
    DeviceLimits device;
    if (const int error = cuda::device_limits(device); error != 0) {
        return error;
    }
    cudaError_t error = launch_kernel(parts_kernel<TYPE, D>, plan_draft_attention(a), stream, true, a);
    if (error == cudaSuccess) {
        const RowsLayout layout(a.T, a.packed != nullptr && device.wgmma);
        error = launch_kernel(combine_kernel, plan_draft_combine(a), stream, true, a, layout);
    }
    return int(error);
}

template <int TYPE> int run(const AttentionArgs &a, cudaStream_t stream) {
    return BlockHeadSizes::with(a.pool.D, int(cudaErrorInvalidValue),
                                [&](auto D) { return run<TYPE, D()>(a, stream); });
}

} // namespace

int cuda::block_attention(const AttentionArgs &args, void *stream) {
    if (args.T <= 0 || args.T > MAX_ROWS || args.pool.Hkv <= 0 || args.H % args.pool.Hkv != 0 ||
        args.block < 1 || args.gate != nullptr) {
        return int(cudaErrorInvalidValue);
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    return KvTypes::with(args.pool.type, int(cudaErrorInvalidValue),
                         [&](auto type) { return run<type()>(args, st); });
}

} // namespace luce
