// Drafts of a block where each depends on the one before it: convolutions over the block's rows, the tokens before, and the
// lattice of candidates. Its scores are computed row by row side by side, for all candidates above, and then a warp walks
// along each block. (topk.cu has the candidates.)
#include "common/overlap.cuh"
#include "sampling/choose.cuh"

namespace luce {
namespace {

// The grid is {parts of a row, rows}; a thread has a value.
__global__ void __launch_bounds__(BLOCK_CONV_THREADS)
    block_conv_kernel(const __grid_constant__ BlockConvArgs a) {
    let_next_start();
    const int c = blockIdx.x * BLOCK_CONV_THREADS + threadIdx.x, t = blockIdx.y;
    wait_for_previous();
    if (c >= a.E) {
        return;
    }
    const int64_t group = c / (a.E / a.groups), per_side = int64_t(a.taps) * a.groups;
    const float *added = a.added + int64_t(t) * 2 * per_side + a.side * per_side + group;
    const float *base = a.base + int64_t(a.side) * a.taps * a.E + c;
    float sum = 0;
    int row = t;
    for (int tap = 0; tap < a.taps && row >= 0; tap++, row = a.ctl->rows[row].parent) {
        sum += (base[int64_t(tap) * a.E] + added[tap * a.groups]) * a.x[int64_t(row) * a.E + c];
    }
    a.out[int64_t(t) * a.E + c] = sum;
}

__global__ void prior_tokens_kernel(const __grid_constant__ PriorArgs a) { // a thread has a row
    wait_for_previous();
    const int t = threadIdx.x;
    if (t < a.T) {
        a.out[t] = token_of(prior_of(a, t), a.drafts, a.n_vocab);
    }
}

// ---- the lattice ----

// The grid is {candidates above, rows}; a warp has a candidate of the row after another.
__global__ void __launch_bounds__(LATTICE_THREADS)
    lattice_scores_kernel(const __grid_constant__ LatticeArgs a) {
    __shared__ float scores[TOPK_MAX];
    let_next_start();
    const int from = blockIdx.x, t = blockIdx.y, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const RowCtl row = a.ctl->rows[t];
    const int above = drafted_above(*a.ctl, t);
    wait_for_previous();
    if (row.keep < 0 || (above < 0 && from > 0)) {
        return;
    }
    const int64_t plane = int64_t(a.T) * a.K;
    const int32_t *ids = a.candidates + plane + int64_t(t) * a.K, *bits = ids + plane;
    const float *before = above < 0 ? a.anchors + int64_t(a.ctl->seqs[row.seq].row0) * a.R
                                    : a.before + (int64_t(above) * a.K + from) * a.R;
    for (int to = warp; to < a.K; to += LATTICE_THREADS / WARP) {
        const float *behind = a.behind + (int64_t(t) * a.K + to) * a.R;
        float sum = 0;
#pragma unroll 8
        for (int r = lane; r < a.R; r += WARP) {
            sum += before[r] * (a.gates == nullptr ? 1.0f : a.gates[int64_t(t) * a.R + r]) * behind[r];
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            scores[to] = __int_as_float(bits[to]) + sum;
        }
    }
    __syncthreads();
    float *out = a.out + (int64_t(t) * a.K + from) * a.K;
    for (int i = threadIdx.x; i < a.K; i += LATTICE_THREADS) {
        out[i] = scores[i];
    }
    if (a.lists == nullptr) {
        return;
    }
    int32_t *entry = a.lists + int64_t(row.keep) * a.entry;
    for (int i = threadIdx.x; from == 0 && i < a.K; i += LATTICE_THREADS) {
        entry[i] = ids[i];
    }
    if (warp > 0) {
        return;
    }
    float largest = -INFINITY, sum = 0;
    for (int i = lane; i < a.K; i += WARP) {
        largest = fmaxf(largest, scores[i]);
    }
    largest = warp_max(largest);
    for (int i = lane; i < a.K; i += WARP) {
        sum += expf(scores[i] - largest);
    }
    const float log_sum = logf(warp_sum(sum));
    for (int i = lane; i < a.K; i += WARP) {
        entry[(from + 1) * a.K + i] = __float_as_int(scores[i] - largest - log_sum);
    }
}

// The grid is {candidates above, rows} of a warp each.
__global__ void __launch_bounds__(WARP) confidence_kernel(const __grid_constant__ ConfidenceArgs a) {
    let_next_start();
    const int from = blockIdx.x, t = blockIdx.y, lane = threadIdx.x;
    const RowCtl row = a.ctl->rows[t];
    const int above = drafted_above(*a.ctl, t);
    wait_for_previous();
    if (row.keep < 0 || (above < 0 && from > 0)) {
        return;
    }
    const float *of = above < 0 ? a.anchors + int64_t(a.ctl->seqs[row.seq].row0) * a.R
                                : a.before + (int64_t(above) * a.K + from) * a.R;
    const float *head = static_cast<const float *>(a.head), *hidden = a.hidden + int64_t(t) * a.E;
    float x = 0;
#pragma unroll 8
    for (int i = lane; i < a.n; i += WARP) {
        x += head[i] * (i < a.E ? hidden[i] : of[i - a.E]);
    }
    x = warp_sum(x) + (a.bias == nullptr ? 0.0f : a.bias[0]);
    if (lane == 0) {
        const float found = (x > 0 ? 0.0f : x) - log1pf(expf(-fabsf(x)));
        a.out[int64_t(t) * a.K + from] = found;
        a.lists[int64_t(row.keep) * a.entry + a.K * (a.K + 1) + from] = __float_as_int(found);
    }
}

// A row's candidates in the order (score descending, token ascending), in shared memory.
struct Ordered {
    int32_t at[TOPK_MAX], tokens[TOPK_MAX];
    float scores[TOPK_MAX];
    int32_t n_kept;
};

// Returns which candidate a sequence's settings take of scores s [K], in all lanes of a warp. What is kept is counted by
// one lane, as score_candidates does (cpu/sampler.cpp).
__device__ int taken(const ChoiceCtl &choice, uint64_t position, const int32_t *ids, const float *s, int K,
                     Ordered &best) {
    const int lane = threadIdx.x % WARP;
    if (choice.scale == 0) {
        Best first;
        for (int i = lane; i < K; i += WARP) {
            first.see(s[i], ids[i]);
        }
        first.reduce_warp();
        int at = 0;
        for (int i = lane; i < K; i += WARP) {
            at = ids[i] == first.id ? i : at;
        }
        return int(warp_max(float(at)));
    }
    for (int i = lane; i < K; i += WARP) {
        int rank = 0;
        for (int j = 0; j < K; j++) {
            rank += s[j] > s[i] || (s[j] == s[i] && ids[j] < ids[i]);
        }
        best.at[rank] = i;
        best.tokens[rank] = ids[i];
        best.scores[rank] = s[i];
    }
    __syncwarp();
    const auto gap = [&](int i) { return half_gap(best.scores[i], best.scores[0]); };
    if (lane == 0) {
        const int most = choice.top_k > 0 ? min(K, choice.top_k) : K;
        uint64_t total = 0, kept = 0;
        for (int i = 0; i < most; i++) {
            total += mass_of(z_of(gap(i), choice.scale));
        }
        const uint64_t needed = needed_mass(total, choice.top_p);
        int n = 0;
        for (; n < most && kept < needed; n++) {
            const uint64_t mass = mass_of(z_of(gap(n), choice.scale));
            if (mass < choice.min_mass) {
                break;
            }
            kept += mass;
        }
        best.n_kept = n;
    }
    __syncwarp();
    Best noisy;
    for (int i = lane; i < best.n_kept; i += WARP) {
        const int32_t token = best.tokens[i];
        const Words4 words = noise_words(choice.seed, position, uint32_t(token) / 4);
        noisy.see(score_of(gap(i), choice.scale, words.w[token % 4]), token);
    }
    noisy.reduce_warp();
    for (int i = 0; i < best.n_kept; i++) {
        if (best.tokens[i] == noisy.id) {
            return best.at[i];
        }
    }
    return best.at[0];
}

// A walk waits for one row's scores after another, so those of a block are brought closer first, where they are few.
constexpr int WALK_SCORES = 6144, WALK_IDS = 640;
static_assert(WALK_IDS * WALK_IDS >= MAX_ROWS * WALK_SCORES,
              "rows * K is at most the root of MAX_ROWS * rows * K * K");

// The grid is as many as sequences may be; the first warp walks along a block.
__global__ void __launch_bounds__(WALK_THREADS) lattice_walk_kernel(const __grid_constant__ LatticeArgs a) {
    __shared__ Ordered best;
    __shared__ float near_scores[WALK_SCORES];
    __shared__ int32_t near_ids[WALK_IDS];
    let_next_start();
    const int K = a.K, begin = int(blockIdx.x) < a.ctl->n_seqs ? a.ctl->seqs[blockIdx.x].row0 : 0;
    wait_for_previous();
    if (int(blockIdx.x) >= a.ctl->n_seqs) {
        return;
    }
    const SeqCtl &seq = a.ctl->seqs[blockIdx.x];
    const float *scores = a.out + int64_t(begin) * K * K;
    const int32_t *ids = a.candidates + (int64_t(a.T) + begin) * K;
    const int n = seq.n_rows * K;
    if (n * K <= WALK_SCORES) {
        for (int i = threadIdx.x; i < n * K; i += WALK_THREADS) {
            near_scores[i] = scores[i];
        }
        for (int i = threadIdx.x; i < n; i += WALK_THREADS) {
            near_ids[i] = ids[i];
        }
        scores = near_scores;
        ids = near_ids;
    }
    __syncthreads();
    if (threadIdx.x >= WARP) {
        return;
    }
    int chosen = 0; // of the row above
    for (int t = begin; t < begin + seq.n_rows; t++, scores += K * K, ids += K) {
        const RowCtl row = a.ctl->rows[t];
        if (row.keep < 0) {
            continue;
        }
        const float *s = scores + (drafted_above(*a.ctl, t) < 0 ? 0 : chosen) * K;
        bool bad = false;
        for (int i = threadIdx.x; i < K; i += WARP) {
            bad = bad || !isfinite(s[i]);
        }
        bad = __any_sync(~0u, bad);
        chosen = bad ? 0 : taken(seq.choice, uint64_t(row.position + a.ahead), ids, s, K, best);
        __syncwarp();
        if (threadIdx.x == 0) {
            for (int32_t *kept : {a.drafts, a.given}) {
                kept[2 * int64_t(row.keep)] = ids[chosen];
                kept[2 * int64_t(row.keep) + 1] = bad ? 1 : 0;
            }
        }
    }
}

} // namespace

int cuda::block_conv(const BlockConvArgs &args, void *stream) {
    if (args.T < 1 || args.T > MAX_ROWS || args.groups < 1 || args.E % args.groups != 0) {
        return int(cudaErrorInvalidValue);
    }
    return int(launch_kernel(block_conv_kernel, plan_block_conv(args.T, args.E),
                             static_cast<cudaStream_t>(stream), true, args));
}

int cuda::prior_tokens(const PriorArgs &args, void *stream) {
    if (args.T < 1 || args.T > MAX_ROWS) {
        return int(cudaErrorInvalidValue);
    }
    return int(launch_kernel(prior_tokens_kernel, plan_prior_tokens(), static_cast<cudaStream_t>(stream),
                             true, args));
}

int cuda::lattice(const LatticeArgs &args, void *stream) {
    if (args.T < 1 || args.T > MAX_ROWS || args.K < 1 || args.K > TOPK_MAX || args.R < 1) {
        return int(cudaErrorInvalidValue);
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    cudaError_t error =
        launch_kernel(lattice_scores_kernel, plan_lattice_scores(args.T, args.K), st, true, args);
    if (error == cudaSuccess && args.chooses != 0) {
        error = launch_kernel(lattice_walk_kernel, plan_lattice_walk(args.T), st, true, args);
    }
    return int(error);
}

int cuda::confidence(const ConfidenceArgs &args, void *stream) {
    if (args.T < 1 || args.T > MAX_ROWS || args.K < 1 || args.K > TOPK_MAX || args.n < args.E) {
        return int(cudaErrorInvalidValue);
    }
    return int(launch_kernel(confidence_kernel, plan_confidence(args.T, args.K),
                             static_cast<cudaStream_t>(stream), true, args));
}

} // namespace luce
