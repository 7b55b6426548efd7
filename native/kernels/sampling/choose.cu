// Chooses the token of each row by the rule of sampling.h, in four kernels, and a row never leaves the
// device. Maxima with ties to the lowest id, counts and sums of integer masses are the same in any order, so
// the result has the bits of the CPU.
//   most   CHOICE_PARTS blocks a row: the largest logit of each part
//   bins   where top-k or top-p ask for it: how many ids, and which mass, lie in each of SAMPLE_BINS ranges of z. That
//          tells of every range but one or a few whether it is kept.
//          Where top-k keeps fewer ids than there are parts, it lists those that reach the top_k-th largest logit of a
//          part instead, and noise passes
//   noise  the largest z + G of the ids in ranges that are kept; ids in the others that may be kept go into a list
//   pick   a block a row: which ids of the list are kept, and the best of all. Where the list is too short (all logits
//          all but equal) it searches the row itself
// A greedy row passes through bins and noise. What a kernel takes of the control block it reads before it waits.
#include "common/overlap.cuh"
#include "sampling/pick.cuh"

namespace luce {
namespace {

// The grid is parts, rows.
template <bool VECTOR>
__global__ void __launch_bounds__(THREADS) most_kernel(const __grid_constant__ ChooseArgs a, int32_t part) {
    let_next_start();
    const Row row(a, blockIdx.y);
    const Span span = part_of(blockIdx.x, part, a.n);
    wait_for_previous();
    Most most(row, a.n);
    each<VECTOR, THREADS>(row.x, span, [&](const float (&v)[4], int32_t id) { most.see(v, id, span.end); });
    most.leave(row);
}

// Waits in blocks that have work to do. The others pass, but one of the launch waits too (overlap.cuh).
__device__ bool passes(bool has_work) {
    if (has_work || (blockIdx.x == 0 && blockIdx.y == 0)) {
        wait_for_previous();
    }
    return !has_work;
}

// Lists the ids of a part that top-k may keep, where it keeps few. Most parts have none.
template <bool VECTOR> __device__ void list_few(const Row &row, Span span) {
    const float least = row.least_of_few();
    if (row.out->most[blockIdx.x].value < least) {
        return;
    }
    each<VECTOR, THREADS>(row.x, span, [&](const float (&v)[4], int32_t id) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (v[j] >= least && id + j < span.end) {
                const uint32_t at = atomicAdd(&row.out->n_listed, 1u);
                if (at < CHOICE_LIST) {
                    row.out->list[at] = {id + j, v[j]};
                }
            }
        }
    });
}

// The grid is parts, rows.
template <bool VECTOR>
__global__ void __launch_bounds__(THREADS) bins_kernel(const __grid_constant__ ChooseArgs a, int32_t part) {
    __shared__ unsigned long long mass[SAMPLE_BINS];
    __shared__ uint32_t count[SAMPLE_BINS];
    let_next_start();
    const Row row(a, blockIdx.y);
    if (passes(row.filtered(a.n))) {
        return;
    }
    if (row.few(a.n)) {
        list_few<VECTOR>(row, part_of(blockIdx.x, part, a.n));
        return;
    }
    for (int i = threadIdx.x; i < SAMPLE_BINS; i += THREADS) {
        count[i] = 0;
        mass[i] = 0;
    }
    __syncthreads();
    const float x_max = row.largest().value;
    each<VECTOR, THREADS>(row.x, part_of(blockIdx.x, part, a.n), [&](const float (&v)[4], int32_t) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float z = z_of(half_gap(v[j], x_max), row.c.scale);
            const int bin = z >= Z_MIN ? bin_of(z) : -1;
            add_by_warp(bin, bin >= 0 && row.c.top_p < TOP_P_ONE ? mass_of(z) : 0, count, mass);
        }
    });
    __syncthreads();
    for (int i = threadIdx.x; i < SAMPLE_BINS; i += THREADS) {
        if (count[i] > 0) {
            atomicAdd(&row.out->count[i], count[i]);
            atomicAdd(reinterpret_cast<unsigned long long *>(&row.out->mass[i]), mass[i]);
        }
    }
}

// The grid is parts, rows.
template <bool VECTOR>
__global__ void __launch_bounds__(THREADS) noise_kernel(const __grid_constant__ ChooseArgs a, int32_t part) {
    __shared__ Best shared[THREADS / WARP];
    __shared__ Bins<THREADS> bins;
    let_next_start();
    const Row row(a, blockIdx.y);
    if (passes(row.c.scale != 0 && !row.few(a.n))) {
        return;
    }
    const Best most = row.largest();
    Cut cut;
    if (row.filtered(a.n)) {
        bins.sum(*row.out);
        cut = bins.cut(row.c);
    }
    Best best; // the id with the largest logit is always kept
    best.see(row.score(most.value, most.value, most.id), most.id);
    each<VECTOR, THREADS>(row.x, part_of(blockIdx.x, part, a.n), [&](const float (&v)[4], int32_t id) {
        const float x = fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3]));
        const float z_most = z_of(half_gap(x, most.value), row.c.scale);
        if (!(z_most >= Z_MIN) || bin_of(z_most) > cut.last) {
            return;
        }
        Words4 words{};
        const bool can_win = z_most + NOISE_MAX >= best.value;
        if (can_win) {
            words = noise_words(row.c.seed, row.position, uint32_t(id) / 4);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float gap = half_gap(v[j], most.value), z = z_of(gap, row.c.scale);
            if (!(z >= Z_MIN)) {
                continue;
            }
            const int bin = bin_of(z);
            if (bin < cut.sure) {
                if (can_win && z + gumbel_bound(words.w[j]) >= best.value) {
                    row.see(best, gap, z, words.w[j], id + j);
                }
            } else if (cut.listed(bin)) {
                const uint32_t at = atomicAdd(&row.out->n_listed, 1u);
                if (at < CHOICE_LIST) {
                    row.out->list[at] = {id + j, v[j]};
                }
            }
        }
    });
    best.reduce_block<THREADS>(shared);
    if (threadIdx.x == 0) {
        row.out->best[blockIdx.x] = {best.id, best.value};
    }
}

// The grid is rows.
__global__ void __launch_bounds__(PICK_THREADS) pick_kernel(const __grid_constant__ ChooseArgs a) {
    __shared__ Best shared[PICK_THREADS / WARP];
    let_next_start();
    const Row row(a, blockIdx.x);
    const int32_t keep = a.drafts == nullptr ? -1 : a.ctl->rows[a.row_of(blockIdx.x)].keep;
    if (row.c.scale == 0 && threadIdx.x >= WARP) {
        return; // a warp is enough
    }
    wait_for_previous();
    bool bad = false;
    const Best most = row.largest(&bad);
    Best best = most;
    if (row.c.scale != 0) {
        best = Best();
        for (int i = threadIdx.x; i < CHOICE_PARTS && !row.few(a.n); i += PICK_THREADS) {
            best.see(row.out->best[i].value, row.out->best[i].id);
        }
        if (row.filtered(a.n)) {
            pick_listed(row, a.n, most.value, best);
        }
        best.reduce_block<PICK_THREADS>(shared);
    }
    const int32_t token = best.id == INT_MAX ? 0 : best.id; // there is nothing but NaN
    if (threadIdx.x == 0) {
        row.out->token = token;
        row.out->not_finite = bad ? 1 : 0;
        if (keep >= 0) {
            for (int32_t *kept : {a.drafts, a.given}) {
                kept[2 * int64_t(keep)] = token;
                kept[2 * int64_t(keep) + 1] = bad ? 1 : 0;
            }
        }
    }
}

template <bool VECTOR> cudaError_t launch(const ChooseArgs &args, cudaStream_t stream) {
    const int32_t part = part_size(args.n);
    cudaError_t error = cudaSuccess;
    for (const auto kernel : {most_kernel<VECTOR>, bins_kernel<VECTOR>, noise_kernel<VECTOR>}) {
        if (error == cudaSuccess) {
            error = launch_kernel(kernel, plan_choose_parts(args.T), stream, true, args, part);
        }
    }
    if (error == cudaSuccess) {
        error = launch_kernel(pick_kernel, plan_choose_pick(args.T), stream, true, args);
    }
    return error;
}

} // namespace

int cuda::choose(const ChooseArgs &args, void *stream) {
    if (args.T < 0 || args.T > MAX_ROWS || args.n <= 0 || args.n > CHOICE_MAX_IDS ||
        (args.drafts != nullptr && args.given == nullptr)) {
        return int(cudaErrorInvalidValue);
    }
    if (args.T == 0) {
        return 0;
    }
    if (args.n % 4 == 0 && reinterpret_cast<uintptr_t>(args.logits) % sizeof(float4) == 0) {
        return int(launch<true>(args, static_cast<cudaStream_t>(stream)));
    }
    return int(launch<false>(args, static_cast<cudaStream_t>(stream)));
}

} // namespace luce
