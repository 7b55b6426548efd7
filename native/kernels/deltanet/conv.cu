// Computes the causal conv of 4 taps, SiLU, and the l2 norm of q and k heads.
// A warp computes one row of one head. A lane holds S / 32 neighbouring channels, so a row is one coalesced
// load. The norm is one butterfly sum, in the same order for every row.
// In a verify, one block a head computes the rows of up to GROUP sequences: a step has at most MAX_ROWS rows,
// however many sequences. It alone reads and then replaces their windows and logged rows of that head.
// In an append, each sequence's rows are split over blocks too, and a second kernel moves the windows once all have read them.
#include "common/kernels.h"
#include "common/overlap.cuh"
#include "deltanet/launch_plan.h"
#include "deltanet/row.cuh"
#include "matmul/partials.cuh"

#include <cstddef>

#include <cuda_runtime.h>

namespace luce {
namespace {

// Params are what a kernel takes: the arguments and, since DeltaShape's layout is for the host, its strides.
struct Params : ConvArgs {
    int64_t C; // a row has so many channels
    int64_t log_row; // one logged row is so far from the next
    int64_t log_size; // one slot's log is so far from the next
    int32_t group; // a block of a verify has so many sequences

    explicit Params(const ConvArgs &args)
        : ConvArgs(args), C(shape.conv_dim()), log_row(shape.log_qkv(1)), log_size(shape.log_size()),
          group(conv_group(shape)) {}
};

// Returns what is the same in all lanes, so that nvcc knows it. A warp that might have split at a branch on
// it checks before each shuffle that it has not.
__device__ int warp_index() {
    return __shfl_sync(~0u, threadIdx.x / WARP, 0);
}

// Control is what the control block says of one sequence, and n_seqs, in the lanes of a warp. It decides what
// is loaded next, so all of it is loaded before nvcc can wait for one value to branch on it.
struct Control {
    static constexpr int WORDS = sizeof(SeqCtl) / sizeof(int32_t), N = WORDS / WARP + 1;
    static_assert(N == 3, "get() looks into three words");
    int32_t word[N];

    __device__ void load(const StepCtl &ctl, int seq, int lane) {
        const int32_t *words = reinterpret_cast<const int32_t *>(&ctl.seqs[seq]);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int w = lane + n * WARP;
            word[n] = *(w < WORDS ? words + w : &ctl.n_seqs);
        }
    }
    // Returns the value at an offset of SeqCtl.
    __device__ int get(size_t offset) const {
        const int w = int(offset / sizeof(int32_t));
        return __shfl_sync(~0u, w < WARP ? word[0] : w < 2 * WARP ? word[1] : word[2], w % WARP);
    }
    __device__ int n_seqs() const { return get(sizeof(SeqCtl)); }
};

// Committed are the last three committed rows of one head of one sequence, oldest first. They are taken of
// the window followed by the pending rows.
template <int S> struct Committed {
    int slot;
    bool moved; // they are not what the window holds
    float *window; // it is the slot's
    const float *from[WINDOW]; // null stands for zeros
    Channels<S> row[WINDOW];

    __device__ Committed(const Params &a, const Control &ctl, int64_t c0)
        : slot(ctl.get(offsetof(SeqCtl, slot))) {
        const int n = ctl.get(offsetof(SeqCtl, n_replay));
        const bool fresh = ctl.get(offsetof(SeqCtl, fresh));
        const float *log = a.log + slot * a.log_size + c0;
        window = a.window + slot * WINDOW * a.C + c0;
        moved = fresh || n > 0;
#pragma unroll
        for (int i = 0; i < WINDOW; i++) {
            const int at = n + i - WINDOW; // it counts among the pending rows
            const int row = ctl.get(offsetof(SeqCtl, pending) + max(at, 0) * sizeof(int32_t));
            from[i] = at >= 0 ? log + row * a.log_row : fresh ? nullptr : window + (n + i) * a.C;
        }
    }
    __device__ void load(int lane) {
#pragma unroll
        for (int i = 0; i < WINDOW; i++) {
            row[i] = {};
            if (from[i] != nullptr) {
                row[i].load(from[i], lane);
            }
        }
    }
    // Takes them from where store() has left them side by side.
    __device__ void take(const float *rows, int lane) {
#pragma unroll
        for (int i = 0; i < WINDOW; i++) {
            row[i].load(rows + i * S, lane);
        }
    }
    // Leaves them at `to`, each `apart` values behind the one before it.
    __device__ void store(float *to, int64_t apart, int lane) const {
#pragma unroll
        for (int i = 0; i < WINDOW; i++) {
            row[i].store(to + i * apart, lane);
        }
    }
};

// Shared is what a block knows of its sequences, by their place in its group.
template <int S> struct Shared {
    float4 w[S]; // its channels' weights
    int32_t slot[GROUP], row0[GROUP];
    int32_t seq[MAX_ROWS], parent[MAX_ROWS]; // they are by row of the step
};

// The rows of a step: as they are, or a head's summed from parts into shared memory.
template <int S> struct Rows {
    const float *x;
    int64_t stride;
    int64_t c0;

    __device__ const float *at(int t) const { return x + t * stride + c0; }
};

// What a kernel needs to add up parts: how many values z, beta and alpha have, and where they go.
struct Summed {
    RowmmParts parts;
    int32_t N[3];
    float *out[3];
};

// The results n .. n + 127 of T rows of a weight that has N, by all warps of a block: to `out`, out_row from row to row.
// A warp has the parts of ROWS rows on their way at once, AHEAD of each.
__device__ void sum_parts(const RowmmParts &parts, int weight, int64_t n, int64_t N, int T, float *out,
                          int64_t out_row) {
    constexpr int ROWS = 2, AHEAD = 4;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP;
    const bool present = n + lane * 4 < N;
    const LaneParts<1> first(parts, weight, warp, present ? n + lane * 4 : 0);
    wait_for_previous();
    for (int t = warp; t < T; t += ROWS * n_warps) {
        float4 x[ROWS][AHEAD][1];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (i == 0 || t + i * n_warps < T) {
                first.of_row(parts, warp, t + i * n_warps).fetch(x[i], 0);
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (i == 0 || t + i * n_warps < T) {
                float v[4] = {};
                first.of_row(parts, warp, t + i * n_warps).add(x[i], v);
                if (present) {
                    *reinterpret_cast<float4 *>(out + (t + i * n_warps) * out_row + lane * 4) = {v[0], v[1],
                                                                                                 v[2], v[3]};
                }
            }
        }
    }
}

struct NotSummed {};

// What blocks behind the heads' do: tile `tile` of z, beta and alpha in order.
__device__ void sum_others(const Summed &sums, int tile, int T) {
    for (int i = 0; i < 3 && blockIdx.y == 0; i++) {
        const int tiles = (sums.N[i] + SUM_TILE - 1) / SUM_TILE, n = tile * SUM_TILE;
        if (tile < tiles) {
            sum_parts(sums.parts, i + 1, n, sums.N[i], T, sums.out[i] + n, sums.N[i]);
            break;
        }
        tile -= tiles;
    }
    wait_for_previous();
}

// The grid is heads, groups of sequences. There is a warp for each row of the step up to GROUP, and so for
// each sequence of a group. Rows -1, -2, -3 are the committed ones, newest first, each the parent of the one
// before it. What is not needed at once waits in shared memory, so that a block of 16 rows leaves registers for one of the
// delta rule (deltanet.cu) on its multiprocessor, which brings its state meanwhile. It has no more room than the sequences
// that may be there take, so that blocks of fewer rows begin beside those of the product ahead.
template <int S, typename Sums>
__global__ void __launch_bounds__(GROUP *WARP, 1)
    conv_verify_kernel(const __grid_constant__ Params a, const __grid_constant__ Sums sums) {
    constexpr bool SUMMED = sizeof(Sums) == sizeof(Summed);
    __shared__ Shared<S> sh;
    // It has committed rows [group][WINDOW][S], then summed ones [T][S].
    extern __shared__ __align__(16) float space[];
    float *summed = space + a.group * WINDOW * S;
    const auto committed_row = [&](int i, int n) { return space + (i * WINDOW + n) * S; };
    const int lane = threadIdx.x % WARP, warp = warp_index(), n_warps = blockDim.x / WARP, T = a.shape.T;
    const int64_t C = a.C, c0 = int64_t(blockIdx.x) * S;
    const int first = blockIdx.y * GROUP;
    const bool normalise = blockIdx.x < 2 * a.shape.Hk;

    let_next_start();
    if constexpr (SUMMED) {
        if (const int behind = int(blockIdx.x) - 2 * a.shape.Hk - a.shape.Hv; behind >= 0) {
            sum_others(sums, behind, T);
            return;
        }
    }
    Control ctl;
    ctl.load(*a.ctl, first + warp, lane);
    for (int i = threadIdx.x; i < S; i += blockDim.x) {
        sh.w[i] = reinterpret_cast<const float4 *>(a.w)[c0 + i];
    }
    if (threadIdx.x < T) {
        sh.seq[threadIdx.x] = a.ctl->rows[threadIdx.x].seq;
        sh.parent[threadIdx.x] = a.ctl->rows[threadIdx.x].parent;
    }
    Committed<S> committed(a, ctl, c0);
    const bool present = first + warp < ctl.n_seqs();
    if (present) {
        committed.load(lane);
        committed.store(committed_row(warp, 0), S, lane);
    }
    Rows<S> rows{a.x, C, c0};
    if constexpr (SUMMED) {
        sum_parts(sums.parts, 0, c0, C, T, summed, S);
        rows = {summed, S, 0};
        __syncthreads();
    }
    wait_for_previous();
    Channels<S> row;
    row.load(rows.at(warp), lane);
    if (present && committed.moved) {
        committed.take(committed_row(warp, 0), lane);
        committed.store(committed.window, C, lane);
    }
    if (const int row0 = ctl.get(offsetof(SeqCtl, row0)); lane == 0) {
        sh.slot[warp] = committed.slot;
        sh.row0[warp] = row0;
    }
    __syncthreads(); // from here the log may be written
    Weights<S> w;
    w.load(reinterpret_cast<const float *>(sh.w), 0, lane);
    for (int t = warp; t < T; t += n_warps) {
        const int i = sh.seq[t] - first;
        if (i < 0 || i >= GROUP) { // it is of another block, or of no sequence
            continue;
        }
        Channels<S> taps[1][TAPS];
        if (t != warp) {
            row.load(rows.at(t), lane);
        }
        taps[0][TAPS - 1] = row;
        int from = t;
#pragma unroll
        for (int tap = WINDOW - 1; tap >= 0; tap--) {
            from = from >= 0 ? sh.parent[from] : from - 1;
            if (from >= 0) {
                taps[0][tap].load(rows.at(from), lane);
            } else {
                taps[0][tap].load(committed_row(i, WINDOW + from), lane);
            }
        }
        conv_rows<S, 1>(w, taps, normalise, {a.out + t * C + c0}, lane);
        row.store(a.log + sh.slot[i] * a.log_size + (t - sh.row0[i]) * a.log_row + c0, lane);
    }
}

// The grid is heads, groups of APPEND_ROWS rows of one sequence.
template <int S>
__global__ void __launch_bounds__(APPEND_WARPS *WARP) conv_append_kernel(const __grid_constant__ Params a) {
    wait_for_previous();
    let_next_start();
    const int lane = threadIdx.x % WARP, warp = warp_index();
    const int64_t C = a.C, c0 = int64_t(blockIdx.x) * S;
    const bool normalise = blockIdx.x < 2 * a.shape.Hk;
    const int i_seq = seq_of_group(*a.ctl, blockIdx.y, APPEND_ROWS);
    const SeqCtl &seq = a.ctl->seqs[i_seq];
    const int group = int(blockIdx.y) - first_group(seq, i_seq, APPEND_ROWS);
    const int begin = group * APPEND_ROWS + warp * APPEND_RUN; // of the sequence's rows
    const int end = min(begin + APPEND_RUN, seq.n_rows);
    if (begin >= end) {
        return;
    }
    const float *x = a.x + seq.row0 * C + c0;
    float *out = a.out + seq.row0 * C + c0;
    Weights<S> w;
    w.load(a.w, c0, lane);
    Channels<S> taps[1][TAPS], next;
    next.load(x + begin * C, lane);
    if (begin == 0) {
        Control ctl;
        ctl.load(*a.ctl, i_seq, lane);
        Committed<S> committed(a, ctl, c0);
        committed.load(lane);
#pragma unroll
        for (int i = 0; i < WINDOW; i++) {
            taps[0][i] = committed.row[i];
        }
    } else {
#pragma unroll
        for (int i = 0; i < WINDOW; i++) {
            taps[0][i].load(x + (begin - WINDOW + i) * C, lane);
        }
    }
#pragma unroll 4
    for (int t = begin; t < end; t++) {
        taps[0][TAPS - 1] = next;
        if (t + 1 < end) {
            next.load(x + (t + 1) * C, lane);
        }
        conv_rows<S, 1>(w, taps, normalise, {out + t * C}, lane);
#pragma unroll
        for (int i = 0; i < WINDOW; i++) {
            taps[0][i] = taps[0][i + 1];
        }
    }
}

// Writes a sequence's window after an append: the last three of the committed rows and the T new ones. The grid is
// heads, sequences.
template <int S>
__global__ void __launch_bounds__(WARP) conv_window_kernel(const __grid_constant__ Params a) {
    wait_for_previous();
    let_next_start();
    const int lane = threadIdx.x;
    const int64_t C = a.C, c0 = int64_t(blockIdx.x) * S;
    Control ctl;
    ctl.load(*a.ctl, blockIdx.y, lane);
    const int T = ctl.get(offsetof(SeqCtl, n_rows)), row0 = ctl.get(offsetof(SeqCtl, row0));
    Channels<S> row[WINDOW];
#pragma unroll
    for (int i = 0; i < WINDOW; i++) {
        if (const int t = T - WINDOW + i; t >= 0) {
            row[i].load(a.x + (row0 + t) * C + c0, lane);
        }
    }
    Committed<S> committed(a, ctl, c0);
    if (T < WINDOW) {
        committed.load(lane);
    }
#pragma unroll
    // This is row T + i of the committed and the new ones, where T is at least 1.
    for (int i = 0; i < WINDOW; i++) {
        const Channels<S> old = T == 1 ? committed.row[(i + 1) % WINDOW] : committed.row[WINDOW - 1];
        committed.row[i] = T + i >= WINDOW ? row[i] : old;
    }
    committed.store(committed.window, C, lane);
}

template <int S> int launch(const ConvArgs &args, cudaStream_t stream) {
    const Params a(args);
    if (a.shape.mode == DELTA_VERIFY) {
        return int(launch_kernel(conv_verify_kernel<S, NotSummed>, plan_conv(a.shape), stream, true, a,
                                 NotSummed()));
    }
    cudaError_t error = launch_kernel(conv_append_kernel<S>, plan_conv_append(a.shape), stream, true, a);
    if (error == cudaSuccess) {
        error = launch_kernel(conv_window_kernel<S>, plan_conv_window(a.shape), stream, true, a);
    }
    return int(error);
}

int launch_summed(const ConvPartsArgs &args, cudaStream_t stream) {
    constexpr int S = SUM_TILE;
    const DeltaShape &s = args.shape;
    Summed sums = {};
    if (const int error = rowmm_parts_of(*args.parts, sums.parts); error != 0) {
        return error;
    }
    for (int i = 0; i < 3; i++) {
        sums.N[i] = int32_t(args.parts->weights[i + 1].N);
        sums.out[i] = args.others[i];
    }
    return int(launch_kernel(conv_verify_kernel<S, Summed>, plan_conv_parts(s, sums.N), stream, true,
                             Params(args), sums));
}

} // namespace

int cuda::conv_parts(const ConvPartsArgs &args, void *stream) {
    const DeltaShape &s = args.shape;
    const RowmmArgs *parts = args.parts;
    if (s.T < 1 || s.T > MAX_ROWS || s.n_slots < 1 || s.mode != DELTA_VERIFY || s.S != SUM_TILE ||
        parts == nullptr || parts->n_weights != 4 || parts->T != s.T || parts->weights[0].N != s.conv_dim()) {
        return int(cudaErrorInvalidValue);
    }
    for (int i = 1; i < 4; i++) {
        if (parts->weights[i].N % 4 != 0) {
            return int(cudaErrorInvalidValue);
        }
    }
    return launch_summed(args, static_cast<cudaStream_t>(stream));
}

int cuda::conv(const ConvArgs &args, void *stream) {
    const DeltaShape &s = args.shape;
    if (s.T < 1 || s.n_slots < 1 || (s.mode == DELTA_VERIFY ? s.T > MAX_ROWS : s.n_prompts < 1)) {
        return int(cudaErrorInvalidValue);
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    return StateSizes::with(s.S, int(cudaErrorInvalidValue), [&](auto S) { return launch<S()>(args, st); });
}

} // namespace luce
