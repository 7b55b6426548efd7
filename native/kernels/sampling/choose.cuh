// Has parts of choose.cu: rows, maxima, and sums over bins.
#pragma once

#include "common/kernels.h"
#include "common/lanes.cuh"
#include "matmul/fields.cuh"
#include "sampling/launch_plan.h"

#include <climits>
#include <cmath>
#include <cuda_runtime.h>

namespace luce {
namespace {

constexpr int THREADS = CHOOSE_THREADS, PICK_THREADS = CHOOSE_PICK_THREADS;
constexpr int UNROLL = 4; // so many 16-byte loads are in flight

// Best is the largest value with the lowest id.
struct Best {
    float value = -INFINITY;
    int32_t id = INT_MAX;

    __device__ void see(float x, int32_t i) {
        if (x > value || (x == value && i < id)) {
            value = x;
            id = i;
        }
    }
    __device__ void reduce_warp() { // all lanes have the result
#pragma unroll
        for (int mask = WARP / 2; mask > 0; mask /= 2) {
            const float x = __shfl_xor_sync(~0u, value, mask);
            const int32_t i = __shfl_xor_sync(~0u, id, mask);
            see(x, i);
        }
    }
    template <int N> __device__ void reduce_block(Best *shared) { // warp 0 has the result
        reduce_warp();
        if (threadIdx.x % WARP == 0) {
            shared[threadIdx.x / WARP] = *this;
        }
        __syncthreads();
        if (threadIdx.x < WARP) {
            *this = threadIdx.x < N / WARP ? shared[threadIdx.x] : Best();
            reduce_warp();
        }
    }
};

struct Span {
    int32_t begin, end;
};

// Returns how many ids a part has, but the last one that has any, which may have fewer.
__host__ __device__ inline int32_t part_size(int64_t n) {
    return int32_t((n + CHOICE_PARTS - 1) / CHOICE_PARTS + 3) / 4 * 4;
}

__device__ Span part_of(int index, int32_t part, int64_t n) {
    const int64_t begin = int64_t(index) * part;
    return {int32_t(min(begin, n)), int32_t(min(begin + part, n))};
}

// Calls f(values, id of the first) for all ids of a span whose begin is a multiple of 4, four at a time, with
// -inf beyond its end. All threads of a warp call f alike often.
template <bool VECTOR, int N, typename F> __device__ void each(const float *x, Span span, F &&f) {
    for (int32_t base = span.begin; base < span.end; base += 4 * N * UNROLL) {
        float v[UNROLL][4];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int32_t id = base + 4 * (u * N + int32_t(threadIdx.x));
            if (VECTOR) {
                const float4 four = id < span.end ? *reinterpret_cast<const float4 *>(x + id)
                                                  : make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
                v[u][0] = four.x;
                v[u][1] = four.y;
                v[u][2] = four.z;
                v[u][3] = four.w;
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    v[u][j] = id + j < span.end ? x[id + j] : -INFINITY;
                }
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            f(v[u], base + 4 * (u * N + int32_t(threadIdx.x)));
        }
    }
}

// ---- one row --------------------------------------------------------------------------------------------

struct Row {
    const float *x;
    ChoiceRow *out;
    ChoiceCtl c{}; // it is greedy for rows that only fill the step's width
    uint64_t position = 0; // the token to be chosen is at this position

    __device__ Row(const ChooseArgs &a, int t) : x(a.logits + t * a.n), out(a.out + t) {
        const RowCtl &row = a.ctl->rows[a.row_of(t)];
        if (row.seq >= 0) {
            c = a.ctl->seqs[row.seq].choice;
            position = uint64_t(row.position + a.ahead);
        }
    }
    __device__ bool top_k(int64_t n) const { return c.top_k > 0 && c.top_k < n; }
    __device__ bool filtered(int64_t n) const { return c.scale != 0 && (top_k(n) || c.top_p < TOP_P_ONE); }
    // Says that top-k keeps no more ids than whole parts have a largest one. So the ids that reach the top_k-th largest of
    // these are few, have all that top-k keeps among them, and nothing has to be counted.
    __device__ bool few(int64_t n) const {
        return c.scale != 0 && c.top_k > 0 && c.top_k <= n / part_size(n);
    }
    // Returns that, in every thread: each warp ranks the parts.
    __device__ float least_of_few() const {
        static_assert(CHOICE_PARTS > WARP && CHOICE_PARTS <= 2 * WARP, "a lane has two");
        const int lane = threadIdx.x % WARP;
        const float a = out->most[lane].value;
        const float b = lane + WARP < CHOICE_PARTS ? out->most[lane + WARP].value : -INFINITY;
        int before_a = 0, before_b = 0;
        for (int i = 0; i < WARP; i++) {
            const float other_a = __shfl_sync(~0u, a, i), other_b = __shfl_sync(~0u, b, i);
            before_a += (other_a > a || (other_a == a && i < lane)) + (other_b > a);
            before_b += (other_a >= b) + (other_b > b || (other_b == b && i < lane));
        }
        const unsigned is_a = __ballot_sync(~0u, before_a == c.top_k - 1);
        const unsigned is_b = __ballot_sync(~0u, before_b == c.top_k - 1);
        return is_a != 0 ? __shfl_sync(~0u, a, __ffs(int(is_a)) - 1)
                         : __shfl_sync(~0u, b, __ffs(int(is_b)) - 1);
    }

    // Returns the largest of all parts, in every thread. *bad says that a logit was not finite.
    __device__ Best largest(bool *bad = nullptr) const {
        Best best;
        bool found = false;
        for (int p = threadIdx.x % WARP; p < CHOICE_PARTS; p += WARP) {
            const int32_t id = out->most[p].id;
            found = found || id < 0;
            best.see(out->most[p].value, id < 0 ? ~id : id);
        }
        best.reduce_warp();
        if (bad != nullptr) {
            *bad = __any_sync(~0u, found);
        }
        return best;
    }
    __device__ float score(float value, float x_max, int32_t id) const {
        const Words4 words = noise_words(c.seed, position, uint32_t(id) / 4);
        return score_of(half_gap(value, x_max), c.scale, words.w[id % 4]);
    }
    // Shows it an id that top-k and top-p keep.
    __device__ void see(Best &best, float gap, float z, uint32_t word, int32_t id) const {
        const float score = score_of(gap, c.scale, word);
        if ((score > best.value || (score == best.value && id < best.id)) &&
            (c.min_mass == 0 || mass_of(z) >= c.min_mass)) {
            best.value = score;
            best.id = id;
        }
    }
    __device__ void see(Best &best, float value, float x_max, int32_t id) const {
        const float gap = half_gap(value, x_max);
        see(best, gap, z_of(gap, c.scale), noise_words(c.seed, position, uint32_t(id) / 4).w[id % 4], id);
    }
};

// Most finds the largest logit that a block sees.
struct Most {
    Best best;
    bool bad = false; // a logit is not finite

    // It also makes room for the bins of a row that needs them.
    __device__ Most(const Row &row, int64_t n) {
        if (row.filtered(n)) {
            for (int i = blockIdx.x * THREADS + threadIdx.x; i < SAMPLE_BINS; i += CHOICE_PARTS * THREADS) {
                row.out->count[i] = 0;
                row.out->mass[i] = 0;
            }
            if (blockIdx.x == 0 && threadIdx.x == 0) {
                row.out->n_listed = 0;
            }
        }
    }
    __device__ void see(const float (&v)[4], int32_t id, int32_t end) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (id + j < end) {
                bad = bad || !isfinite(v[j]);
                best.see(v[j], id + j);
            }
        }
    }
    __device__ void leave(const Row &row) {
        __shared__ Best shared[THREADS / WARP];
        best.reduce_block<THREADS>(shared);
        bad = __syncthreads_or(bad);
        if (threadIdx.x == 0) {
            row.out->most[blockIdx.x] = {bad ? ~best.id : best.id, best.value};
        }
    }
};

// ---- counts and masses by bin ---------------------------------------------------------------------------

// Adds one id to its bin, for all lanes of a warp at once. Bin -1 means none. Where all share a bin, as flat
// logits do, it is one addition.
__device__ void add_by_warp(int bin, uint64_t mass, uint32_t *count, unsigned long long *sums) {
    const unsigned there = __ballot_sync(~0u, bin >= 0);
    if (there == 0) {
        return;
    }
    const int leader = __ffs(int(there)) - 1, first = __shfl_sync(~0u, bin, leader);
    if (__all_sync(~0u, bin < 0 || bin == first)) {
        mass = warp_sum(mass);
        if (int(threadIdx.x) % WARP == leader) {
            if (count != nullptr) {
                atomicAdd(&count[first], uint32_t(__popc(there)));
            }
            atomicAdd(&sums[first], static_cast<unsigned long long>(mass));
        }
    } else if (bin >= 0) {
        if (count != nullptr) {
            atomicAdd(&count[bin], 1u);
        }
        if (mass > 0) {
            atomicAdd(&sums[bin], static_cast<unsigned long long>(mass));
        }
    }
}

// Returns the sum up to and with each thread's value, over the block.
template <int N> __device__ uint64_t block_scan(uint64_t value, uint64_t *shared) {
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
        const uint64_t below = __shfl_up_sync(~0u, value, d);
        value += int(threadIdx.x) % WARP >= d ? below : 0;
    }
    __syncthreads(); // shared may be in use
    if (threadIdx.x % WARP == WARP - 1) {
        shared[threadIdx.x / WARP] = value;
    }
    __syncthreads();
    for (int w = 0; w < int(threadIdx.x) / WARP; w++) {
        value += shared[w];
    }
    return value;
}

// A cut says which bins are kept, as far as bins can tell.
struct Cut {
    int sure = SAMPLE_BINS; // bins below it are kept
    int open = SAMPLE_BINS; // bins sure .. open may be kept, in part
    int k_bin = SAMPLE_BINS - 1; // top-k ends there
    bool k_open = false; // it ends in its middle, so that bin is listed too
    int last = SAMPLE_BINS; // it is the last bin that matters

    __device__ bool listed(int bin) const { return (bin >= sure && bin <= open) || (k_open && bin == k_bin); }
};

// Bins are sums over bins 0 .. b, in shared memory.
template <int N> struct Bins {
    uint64_t mass[SAMPLE_BINS];
    uint32_t count[SAMPLE_BINS];
    uint64_t scratch[N / WARP];

    __device__ void sum(const ChoiceRow &row) {
        constexpr int EACH = SAMPLE_BINS / N;
        const int first = int(threadIdx.x) * EACH;
        uint64_t masses = 0, counts = 0;
        for (int i = first; i < first + EACH; i++) {
            masses += row.mass[i];
            counts += row.count[i];
        }
        uint64_t mass_below = block_scan<N>(masses, scratch) - masses;
        uint64_t count_below = block_scan<N>(counts, scratch) - counts;
        for (int i = first; i < first + EACH; i++) {
            mass[i] = mass_below += row.mass[i];
            count[i] = uint32_t(count_below += row.count[i]);
        }
        __syncthreads();
    }
    __device__ uint64_t mass_below(int bin) const { return bin > 0 ? mass[bin - 1] : 0; }
    __device__ uint32_t count_below(int bin) const { return bin > 0 ? count[bin - 1] : 0; }

    // Returns the first bin at whose end `sums` reach `need`, which the last one does.
    template <typename T> __device__ static int reaches(const T *sums, uint64_t need) {
        int low = 0, high = SAMPLE_BINS - 1;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (sums[middle] >= need) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        return low;
    }

    __device__ Cut cut(const ChoiceCtl &c) const {
        Cut cut;
        if (c.top_k > 0 && uint32_t(c.top_k) < count[SAMPLE_BINS - 1]) {
            cut.k_bin = reaches(count, uint64_t(c.top_k));
            cut.k_open = count[cut.k_bin] > uint32_t(c.top_k);
        }
        if (c.top_p == TOP_P_ONE) {
            cut.sure = cut.k_open ? cut.k_bin : cut.k_bin + 1;
            cut.open = cut.sure - 1;
        } else { // the total lies between those without and with the bin where top-k ends
            const uint64_t least = cut.k_open ? mass_below(cut.k_bin) : mass[cut.k_bin];
            cut.sure = reaches(mass, needed_mass(least, c.top_p));
            cut.open = reaches(mass, needed_mass(mass[cut.k_bin], c.top_p));
        }
        cut.last = cut.k_open ? cut.k_bin : max(cut.open, cut.sure - 1);
        return cut;
    }
};

} // namespace
} // namespace luce
