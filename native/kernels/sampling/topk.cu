// Lists the best candidates of each row and their log-probabilities, in two kernels. In the first, a block
// sorts a part of the row and leaves its best. In the second, one block a row sorts those of all parts. A key
// holds the logit and the complement of the id, so an order of keys is the order of candidates, ties
// included, whatever the parts are.
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

// Sorts keys[0 .. n - 1] into descending order, where n is a power of two (bitonic).
__device__ void sort(Key *keys, int n) {
    for (int length = 2; length <= n; length *= 2) {
        for (int step = length / 2; step > 0; step /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < n / 2; i += blockDim.x) {
                const int low = 2 * i - (i & (step - 1)), high = low + step;
                const Key a = keys[low], b = keys[high];
                if ((a < b) == ((low & length) == 0)) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
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

// The grid is parts, rows.
__global__ void __launch_bounds__(THREADS) topk_parts_kernel(TopkArgs a) {
    __shared__ Key keys[TOPK_PART];
    __shared__ float shared[THREADS / WARP];
    if (a.ctl != nullptr && a.ctl->rows[blockIdx.y].keep < 0) {
        return;
    }
    const float *x = a.logits + blockIdx.y * a.n;
    const int64_t begin = int64_t(blockIdx.x) * TOPK_PART;
    float largest = -INFINITY;
    for (int i = threadIdx.x; i < TOPK_PART; i += THREADS) {
        const float value = begin + i < a.n ? x[begin + i] : -INFINITY;
        keys[i] = begin + i < a.n ? key_of(value, uint32_t(begin) + i) : 0;
        largest = fmaxf(largest, value);
    }
    largest = reduce(largest, true, shared);
    float sum = 0;
    for (int i = threadIdx.x; i < TOPK_PART && begin + i < a.n; i += THREADS) {
        sum += largest > -INFINITY ? expf(x[begin + i] - largest) : 0.0f;
    }
    sum = reduce(sum, false, shared);
    sort(keys, TOPK_PART);
    int32_t *out = part_of(a, blockIdx.y, blockIdx.x);
    for (int i = threadIdx.x; i < a.k; i += THREADS) {
        out[i] = int32_t(~uint32_t(keys[i]));
        out[a.k + i] = __float_as_int(keys[i] == 0 ? -INFINITY : logit_of(keys[i]));
    }
    if (threadIdx.x == 0) {
        out[2 * a.k] = __float_as_int(largest);
        out[2 * a.k + 1] = __float_as_int(sum);
    }
}

// Takes the keys of all parts of a row, of which n_sort have room, and sorts them.
__device__ void sort_parts(Key *keys, const TopkArgs &a, int parts, int n_sort) {
    for (int i = threadIdx.x; i < n_sort; i += PICK_THREADS) {
        Key key = 0;
        if (i < parts * a.k) {
            const int32_t *part = part_of(a, blockIdx.x, i / a.k);
            const float logit = __int_as_float(part[a.k + i % a.k]);
            key = logit > -INFINITY ? key_of(logit, uint32_t(part[i % a.k])) : 0;
        }
        keys[i] = key;
    }
    sort(keys, n_sort);
}

// The grid is rows.
__global__ void __launch_bounds__(PICK_THREADS) topk_pick_kernel(TopkArgs a, int parts, int n_sort) {
    __shared__ Key keys[TOPK_PART];
    __shared__ float largest_logit, log_sum; // they are of all logits; the sum counts the largest as 1
    const int32_t keep = a.ctl->rows[blockIdx.x].keep;
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
    sort_parts(keys, a, parts, n_sort);
    int32_t *list = a.lists + int64_t(keep) * a.entry;
    for (int i = threadIdx.x; i < a.k; i += PICK_THREADS) {
        const Key key = i < n_sort ? keys[i] : 0;
        list[i] = key == 0 ? -1 : int32_t(~uint32_t(key));
        list[a.k + i] = __float_as_int(key == 0 ? -INFINITY : logit_of(key) - largest_logit - log_sum);
    }
}

// The grid is rows. A part's sum is NaN where a logit of it is NaN or +inf.
__global__ void __launch_bounds__(PICK_THREADS)
    candidates_pick_kernel(TopkArgs a, CandidatesArgs out, int parts, int n_sort) {
    __shared__ Key keys[TOPK_PART];
    const int64_t plane = int64_t(a.T) * a.k;
    bool bad = false;
    for (int p = 0; p < parts; p++) {
        bad = bad || isnan(__int_as_float(part_of(a, blockIdx.x, p)[2 * a.k + 1]));
    }
    sort_parts(keys, a, parts, n_sort);
    for (int i = threadIdx.x; i < a.k; i += PICK_THREADS) {
        const bool there = keys[i] != 0;
        const int32_t at = there ? int32_t(~uint32_t(keys[i])) : 0;
        int32_t *to = out.out + int64_t(blockIdx.x) * a.k + i;
        to[0] = at;
        to[plane] = out.tokens == nullptr ? at : int32_t(out.tokens[at]);
        to[2 * plane] = __float_as_int(bad ? NAN : there ? logit_of(keys[i]) : -INFINITY);
    }
}

// Returns how many keys a row's parts have together, as a power of two.
int keys_of(int parts, int k) {
    int n = 2;
    while (n < parts * k) {
        n *= 2;
    }
    return n;
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
    cudaError_t error = launch_kernel(topk_parts_kernel, plan_topk_parts(args.T, args.n), st, false, all);
    if (error == cudaSuccess) {
        error = launch_kernel(candidates_pick_kernel, plan_topk_pick(args.T), st, false, all, args, parts,
                              keys_of(parts, args.K));
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
    const int parts = divided(args.n, TOPK_PART), n_sort = keys_of(parts, args.k);
    cudaError_t error = launch_kernel(topk_parts_kernel, plan_topk_parts(args.T, args.n), st, false, args);
    if (error == cudaSuccess) {
        error = launch_kernel(topk_pick_kernel, plan_topk_pick(args.T), st, false, args, parts, n_sort);
    }
    return int(error);
}

} // namespace luce
