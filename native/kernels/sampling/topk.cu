// Lists the best candidates of each row and their log-probabilities, in two kernels. In the first, a block
// selects the best of a part of the row. In the second, one block a row selects from those of all parts. A key
// holds the logit and the complement of the id, so an order of keys is the order of candidates, ties
// included, whatever the parts are.
//
// The best k are selected without sorting the rest: keys are in groups, of which each has a largest one. As many as k
// keys are at least as large as the k-th largest of these, so none below it is among the best. Those that are left
// are seldom many more than k, and each finds its place by counting the larger ones. (On an H200 16 of each of 8 rows of
// 248,320 take 15 us, and 155 us where parts were sorted, which is 2% of a round of a 27b with DFlash2.)
#include "common/kernels.h"
#include "common/lanes.cuh"
#include "common/overlap.cuh"
#include "sampling/launch_plan.h"

#include <climits>
#include <cmath>
#include <cuda_runtime.h>

namespace luce {
namespace {

constexpr int THREADS = TOPK_THREADS, PICK_THREADS = TOPK_PICK_THREADS;

using Key = unsigned long long;

// Returns a key that is larger for a larger logit, then for a smaller id. NaN counts as -inf.
__device__ Key key_of(float x, uint32_t id) {
    const uint32_t bits = __float_as_uint(isnan(x) ? -INFINITY : x + 0.0f); // there is one zero
    const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return Key(ordered) << 32 | ~id;
}

__device__ float logit_of(Key key) {
    const uint32_t ordered = uint32_t(key >> 32);
    return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

// Finds the k-th largest of n keys, for all threads; 0 where there are fewer. Equal ones are 0.
__device__ Key kth_largest(const Key *keys, int n, int k, Key &found) {
    if (threadIdx.x == 0) {
        found = 0;
    }
    __syncthreads();
    if (int(threadIdx.x) < n && keys[threadIdx.x] != 0) {
        int rank = 0;
#pragma unroll 8
        for (int i = 0; i < n; i++) {
            rank += keys[i] > keys[threadIdx.x];
        }
        if (rank == k - 1) {
            found = keys[threadIdx.x];
        }
    }
    __syncthreads();
    return found;
}

// Puts the best k of n different keys into best, in descending order, and 0 behind the last one.
__device__ void order(const Key *keys, int n, int k, Key *best) {
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
        best[i] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        int rank = 0;
        for (int j = 0; j < n; j++) {
            rank += keys[j] > keys[i];
        }
        if (rank < k) {
            best[rank] = keys[i];
        }
    }
    __syncthreads();
}

__device__ float reduce(float x, bool largest, float *shared) {
    x = largest ? warp_max(x) : warp_sum(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0) {
        shared[threadIdx.x / WARP] = x;
    }
    __syncthreads();
    x = shared[0];
    for (int w = 1; w < THREADS / WARP; w++) {
        x = largest ? fmaxf(x, shared[w]) : x + shared[w];
    }
    return x;
}

// Returns the row's scratch, which has for each part k ids, k logits, the part's largest logit and its sum.
__device__ int32_t *part_of(const TopkArgs &a, int row, int part) {
    return a.scratch + (int64_t(row) * TOPK_PARTS + part) * (2 * a.k + 2);
}

constexpr int PER_THREAD = TOPK_PART / THREADS, GROUP = 4; // a group is what so many threads have
constexpr int GROUPS = THREADS / GROUP;
static_assert(GROUPS > TOPK_MAX, "the k-th largest of the groups' largest keys is asked for");

// The grid is parts, rows.
__global__ void __launch_bounds__(THREADS) topk_parts_kernel(TopkArgs a) {
    __shared__ Key heads[THREADS], groups[GROUPS], left[TOPK_MAX * GROUP * PER_THREAD], best[TOPK_MAX], kth;
    __shared__ float shared[THREADS / WARP];
    __shared__ int n_left;
    let_next_start();
    wait_for_previous();
    if (a.ctl != nullptr && a.ctl->rows[blockIdx.y].keep < 0) {
        return;
    }
    const float *x = a.logits + blockIdx.y * a.n;
    const int64_t begin = int64_t(blockIdx.x) * TOPK_PART;
    float values[PER_THREAD], largest = -INFINITY;
    Key keys[PER_THREAD], head = 0;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int64_t id = begin + threadIdx.x + i * THREADS;
        values[i] = id < a.n ? x[id] : -INFINITY;
        keys[i] = id < a.n ? key_of(values[i], uint32_t(id)) : 0;
        largest = fmaxf(largest, values[i]);
        head = head > keys[i] ? head : keys[i];
    }
    heads[threadIdx.x] = head;
    if (threadIdx.x == 0) {
        n_left = 0;
    }
    largest = reduce(largest, true, shared);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        if (begin + threadIdx.x + i * THREADS < a.n) {
            sum += largest > -INFINITY ? expf(values[i] - largest) : 0.0f;
        }
    }
    sum = reduce(sum, false, shared);
    if (threadIdx.x < GROUPS) {
        head = 0;
        for (int i = 0; i < GROUP; i++) {
            const Key other = heads[threadIdx.x * GROUP + i];
            head = head > other ? head : other;
        }
        groups[threadIdx.x] = head;
    }
    __syncthreads();
    const Key least = kth_largest(groups, GROUPS, a.k, kth);
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        if (keys[i] != 0 && keys[i] >= least) {
            left[atomicAdd(&n_left, 1)] = keys[i];
        }
    }
    __syncthreads();
    order(left, n_left, a.k, best);
    int32_t *out = part_of(a, blockIdx.y, blockIdx.x);
    for (int i = threadIdx.x; i < a.k; i += THREADS) {
        out[i] = int32_t(~uint32_t(best[i]));
        out[a.k + i] = __float_as_int(best[i] == 0 ? -INFINITY : logit_of(best[i]));
    }
    if (threadIdx.x == 0) {
        out[2 * a.k] = __float_as_int(largest);
        out[2 * a.k + 1] = __float_as_int(sum);
    }
}

// The best of all parts of a row, in descending order.
struct Picked {
    Key heads[TOPK_PARTS], left[TOPK_MAX * TOPK_MAX], best[TOPK_MAX], kth;
    int n_left;
};

// Returns the key of one of a part's best.
__device__ Key key_in(const TopkArgs &a, int part, int at) {
    const int32_t *of = part_of(a, blockIdx.x, part);
    const float logit = __int_as_float(of[a.k + at]);
    return logit > -INFINITY ? key_of(logit, uint32_t(of[at])) : 0;
}

// Selects the best k of all parts of a row. The bound leaves few: 61 parts have 3,843 keys where k is 63, and each that is left
// is compared with each.
__device__ void pick(Picked &p, const TopkArgs &a, int parts) {
    const TopkBound bound = topk_bound(parts, a.k);
    if (int(threadIdx.x) < parts) {
        p.heads[threadIdx.x] = key_in(a, threadIdx.x, bound.deep - 1);
    }
    if (threadIdx.x == 0) {
        p.n_left = 0;
    }
    __syncthreads();
    const Key least = kth_largest(p.heads, parts, bound.rank, p.kth);
    for (int i = threadIdx.x; i < parts * a.k; i += PICK_THREADS) {
        const Key key = key_in(a, i / a.k, i % a.k);
        if (key != 0 && key >= least) {
            p.left[atomicAdd(&p.n_left, 1)] = key;
        }
    }
    __syncthreads();
    order(p.left, p.n_left, a.k, p.best);
}

// The grid is rows.
__global__ void __launch_bounds__(PICK_THREADS) topk_pick_kernel(TopkArgs a, int parts) {
    __shared__ Picked picked;
    __shared__ float largest_logit, log_sum; // they are of all logits; the sum counts the largest as 1
    let_next_start();
    const int32_t keep = a.ctl->rows[blockIdx.x].keep;
    wait_for_previous();
    if (keep < 0) {
        return;
    }
    if (threadIdx.x == 0) {
        float largest = -INFINITY, sum = 0;
        for (int p = 0; p < parts; p++) {
            largest = fmaxf(largest, __int_as_float(part_of(a, blockIdx.x, p)[2 * a.k]));
        }
        for (int p = 0; p < parts; p++) {
            const int32_t *part = part_of(a, blockIdx.x, p);
            const float of_part = __int_as_float(part[2 * a.k]);
            sum += of_part > -INFINITY ? __int_as_float(part[2 * a.k + 1]) * expf(of_part - largest) : 0.0f;
        }
        largest_logit = largest;
        log_sum = logf(sum);
    }
    pick(picked, a, parts);
    int32_t *list = a.lists + int64_t(keep) * a.entry;
    for (int i = threadIdx.x; i < a.k; i += PICK_THREADS) {
        const Key key = picked.best[i];
        list[i] = key == 0 ? -1 : int32_t(~uint32_t(key));
        list[a.k + i] = __float_as_int(key == 0 ? -INFINITY : logit_of(key) - largest_logit - log_sum);
    }
}

// The grid is rows. A part's sum is NaN where a logit of it is NaN or +inf.
__global__ void __launch_bounds__(PICK_THREADS)
    candidates_pick_kernel(TopkArgs a, CandidatesArgs out, int parts) {
    __shared__ Picked picked;
    const int64_t plane = int64_t(a.T) * a.k;
    let_next_start();
    wait_for_previous();
    const bool bad = __syncthreads_or(
        int(threadIdx.x) < parts && isnan(__int_as_float(part_of(a, blockIdx.x, threadIdx.x)[2 * a.k + 1])));
    pick(picked, a, parts);
    for (int i = threadIdx.x; i < a.k; i += PICK_THREADS) {
        const Key key = picked.best[i];
        const int32_t at = key != 0 ? int32_t(~uint32_t(key)) : 0;
        int32_t *to = out.out + int64_t(blockIdx.x) * a.k + i;
        to[0] = at;
        to[plane] = out.tokens == nullptr ? at : int32_t(out.tokens[at]);
        to[2 * plane] = __float_as_int(bad ? NAN : key != 0 ? logit_of(key) : -INFINITY);
    }
}

} // namespace

int cuda::candidates(const CandidatesArgs &args, void *stream) {
    if (args.T < 0 || args.T > MAX_ROWS || args.K < 1 || args.K > TOPK_MAX || args.n < args.K ||
        args.n > TOPK_MAX_N) {
        return int(cudaErrorInvalidValue);
    }
    if (args.T == 0) {
        return 0;
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    TopkArgs all{}; // of all rows, whatever keeps them
    all.logits = args.logits;
    all.n = args.n;
    all.T = args.T;
    all.k = args.K;
    all.scratch = args.out + 3 * int64_t(args.T) * args.K;
    const int parts = divided(args.n, TOPK_PART);
    cudaError_t error = launch_kernel(topk_parts_kernel, plan_topk_parts(args.T, args.n), st, true, all);
    if (error == cudaSuccess) {
        error = launch_kernel(candidates_pick_kernel, plan_topk_pick(args.T), st, true, all, args, parts);
    }
    return int(error);
}

int cuda::topk(const TopkArgs &args, void *stream) {
    if (args.T < 0 || args.T > MAX_ROWS || args.n <= 0 || args.n > TOPK_MAX_N || args.k < 1 ||
        args.k > TOPK_MAX || args.entry < 2 * args.k) {
        return int(cudaErrorInvalidValue);
    }
    if (args.T == 0) {
        return 0;
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    const int parts = divided(args.n, TOPK_PART);
    cudaError_t error = launch_kernel(topk_parts_kernel, plan_topk_parts(args.T, args.n), st, true, args);
    if (error == cudaSuccess) {
        error = launch_kernel(topk_pick_kernel, plan_topk_pick(args.T), st, true, args, parts);
    }
    return int(error);
}

} // namespace luce
