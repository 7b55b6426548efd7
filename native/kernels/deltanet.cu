// The gated delta rule over the rows of a step.
// A block owns up to 32 columns (v dimensions) of one v head's state; columns never meet, so blocks do not
// either. A thread keeps 4 columns by S / 16 k entries in registers from the first row to the last; 16 lanes
// of a warp share 4 columns and sum over k by a butterfly, in the same order for every row, so a row's bits
// depend on its ancestors only. Rows come through shared memory, TILE at a time, STAGES - 1 tiles ahead.
//
// In a tree, the registers keep the parent's state over its leaves, so siblings follow at no cost. A row
// whose parent's state is not there starts from the nearest saved ancestor (depths 0, 4, 8, 12 are saved in
// shared memory) or from the committed state, and replays the rows between. A chain saves and replays
// nothing.
#include "deltanet_part.cuh"
#include "kernels.h"

#include <cuda_pipeline.h>
#include <cuda_runtime.h>

namespace luce {
namespace {

constexpr int TILE = 4;
constexpr int STAGES = 3;
constexpr int SLOTS = 4; // saved states
constexpr int STRIDE = 4; // depths from one saved state to the next
constexpr int TREE_ROWS = 4; // up to here a replay from the committed state is short enough

// What a kernel takes: the arguments and, since DeltaShape's layout is for the host, the log by base and
// stride.
struct Params : DeltaArgs {
    int64_t C; // channels of a row of x
    int n_rows; // 0 in a flush
    int n_slots;
    float *delta, *key[2], *decay[2]; // the last two by bank
    int64_t delta_row, key_row, decay_row;

    explicit Params(const DeltaArgs &args) : DeltaArgs(args), C(shape.conv_dim()) {
        n_rows = shape.mode == DELTA_FLUSH ? 0 : shape.T;
        n_slots = shape.mode == DELTA_APPEND || n_rows <= TREE_ROWS ? 0 : SLOTS;
        delta = log + shape.log_delta(0);
        delta_row = shape.log_delta(1) - shape.log_delta(0);
        for (int bank = 0; bank < 2; bank++) {
            key[bank] = log + shape.log_key(bank, 0);
            decay[bank] = log + shape.log_decay(bank, 0);
        }
        key_row = shape.log_key(0, 1) - shape.log_key(0, 0);
        decay_row = shape.log_decay(0, 1) - shape.log_decay(0, 0);
    }
};

template <int S> struct Tile {
    alignas(16) float q[TILE][S];
    float k[TILE][S];
    float v[TILE][Layout<S>::W]; // of a pending row: its delta
    float decay[TILE]; // of a pending row
};

template <int S, bool APPEND> struct Shared {
    static_assert(Layout<S>::THREADS >= MAX_ROWS, "a verify has a thread for each row");
    Tile<S> tile[STAGES];
    alignas(16) float delta[APPEND ? 1 : MAX_ROWS][Layout<S>::W];
    float decay[Layout<S>::THREADS], beta[Layout<S>::THREADS]; // of row t at t % THREADS
    int32_t ctl[CTL_SIZE];
    uint8_t inner[MAX_ROWS]; // 1 if the row has children
    uint8_t depth[MAX_ROWS];
    uint8_t up[MAX_ROWS][MAX_ROWS]; // up[t][i]: the i-th ancestor of row t, itself at 0
};

__device__ float softplus(float x) {
    return x > 20.0f ? x : log1pf(expf(x));
}

// One block's work as one thread sees it.
template <int S, bool APPEND> struct Worker {
    using L = Layout<S>;
    const Params &a;
    Shared<S, APPEND> &sh;
    Cols *slots; // [n_slots][K][THREADS], each thread's own
    const int tid = threadIdx.x, lane = tid % WARP;
    const int lane_k = lane / 2; // 0 .. LANES - 1
    const int group = (tid / WARP * 2 + lane % 2) * COLS; // first column in the block
    const int h = blockIdx.y, kh = h % a.shape.Hk, j0 = blockIdx.x * L::W;
    Part<S> part;
    float out[COLS] = {}; // this thread's part of S^T q of the last row, reduced beside the next row's D^T k
    int held = -1; // in a tree: the row whose state the registers hold
    int saved[SLOTS]; // and those whose states the slots hold

    __device__ Worker(const Params &args, Shared<S, APPEND> &shared, Cols *slot_space)
        : a(args), sh(shared), slots(slot_space) {
#pragma unroll
        for (int i = 0; i < SLOTS; i++) {
            saved[i] = -1;
        }
    }

    __device__ Cols *state(int i) const {
        const int64_t row = int64_t(h) * S + Slice<S>::entry(i, lane_k);
        return reinterpret_cast<Cols *>(a.state + row * S + j0 + group);
    }
    __device__ void load() {
#pragma unroll
        for (int i = 0; i < L::K; i++) {
            part.s[i] = *state(i);
        }
    }
    __device__ void store() const {
#pragma unroll
        for (int i = 0; i < L::K; i++) {
            luce::store(state(i), part.s[i]);
        }
    }

    // exp(g) and beta of rows t0 .. t0 + THREADS, one thread a row
    __device__ void gates(int t0) {
        const int t = t0 + tid;
        if (t < a.n_rows) {
            const int64_t at = int64_t(t) * a.shape.Hv + h;
            const float alpha = a.alpha[at], beta = a.beta[at], dt = a.dt[h], rate = a.a[h];
            sh.decay[tid] = expf(rate * softplus(alpha + dt));
            sh.beta[tid] = 1.0f / (1.0f + expf(-beta));
        }
    }

    // Rows from `row(r)` of k (and q), columns from `cols(r)`, into a tile.
    __device__ void stage_rows(Tile<S> &tile, int t0, int n) {
        for (int u = tid; u < n * (S / 4); u += L::THREADS) {
            const int r = u / (S / 4), i = u % (S / 4) * 4;
            const float *q = a.x + (t0 + r) * a.C + kh * S + i;
            __pipeline_memcpy_async(&tile.q[r][i], q, 16);
            __pipeline_memcpy_async(&tile.k[r][i], q + a.shape.Hk * S, 16);
        }
        for (int u = tid; u < n * (L::W / 4); u += L::THREADS) {
            const int r = u / (L::W / 4), j = u % (L::W / 4) * 4;
            __pipeline_memcpy_async(&tile.v[r][j], a.x + (t0 + r) * a.C + (2 * a.shape.Hk + h) * S + j0 + j,
                                    16);
        }
    }
    __device__ void stage_pending(Tile<S> &tile, int p0, int n) {
        const int bank = sh.ctl[CTL_BANK];
        const int32_t *rows = sh.ctl + CTL_PENDING + p0;
        for (int u = tid; u < n * (S / 4); u += L::THREADS) {
            const int r = u / (S / 4), i = u % (S / 4) * 4;
            __pipeline_memcpy_async(&tile.k[r][i], a.key[bank] + rows[r] * a.key_row + kh * S + i, 16);
        }
        for (int u = tid; u < n * (L::W / 4); u += L::THREADS) {
            const int r = u / (L::W / 4), j = u % (L::W / 4) * 4;
            __pipeline_memcpy_async(&tile.v[r][j], a.delta + rows[r] * a.delta_row + h * S + j0 + j, 16);
        }
        if (tid < n) {
            __pipeline_memcpy_async(&tile.decay[tid], a.decay[bank] + rows[tid] * a.decay_row + h, 4);
        }
    }

    // ---- trees ----

    // Every row's ancestors, one thread a row, and which rows have children; the caller's barrier follows.
    __device__ void find_ancestors() {
        if (tid < a.n_rows) {
            const int parent = sh.ctl[CTL_PARENT + tid];
            if (parent >= 0) {
                sh.inner[parent] = 1;
            }
            int n = 0;
            for (int row = tid; row >= 0; row = sh.ctl[CTL_PARENT + row]) {
                sh.up[tid][n++] = uint8_t(row);
            }
            sh.depth[tid] = uint8_t(n - 1);
        }
    }
    __device__ Cols *slot(int i) const { return slots + i * L::K * L::THREADS + tid; }

    __device__ void save(int depth, int row) {
        if (depth % STRIDE != 0 || depth / STRIDE >= a.n_slots) {
            return;
        }
#pragma unroll
        for (int i = 0; i < SLOTS; i++) {
            if (i == depth / STRIDE) {
                saved[i] = row;
            }
        }
#pragma unroll
        for (int i = 0; i < L::K; i++) {
            slot(depth / STRIDE)[i * L::THREADS] = part.s[i];
        }
    }

    // The state after row `parent`, -1 for the committed one.
    __device__ void enter(int parent) {
        const int depth = parent < 0 ? -1 : sh.depth[parent];
        int from = -1;
#pragma unroll
        for (int i = 0; i < SLOTS; i++) {
            if (i * STRIDE <= depth && saved[i] == sh.up[parent][depth - i * STRIDE]) {
                from = i;
            }
        }
        if (from < 0) {
            load();
        } else {
#pragma unroll
            for (int i = 0; i < L::K; i++) {
                part.s[i] = slot(from)[i * L::THREADS];
            }
        }
        for (int d = from < 0 ? 0 : from * STRIDE + 1; d <= depth; d++) {
            const int row = sh.up[parent][depth - d];
            Slice<S> k;
            k.load(a.x + row * a.C + (a.shape.Hk + kh) * S, lane_k);
            part.replay(k, sh.decay[row], *reinterpret_cast<const Cols *>(&sh.delta[row][group]));
            save(d, row);
        }
        held = parent;
    }

    // ---- tiles ----

    __device__ void replay_tile(const Tile<S> &tile, int n) {
        for (int r = 0; r < n; r++) {
            Slice<S> k;
            k.load(tile.k[r], lane_k);
            part.replay(k, tile.decay[r], *reinterpret_cast<const Cols *>(&tile.v[r][group]));
        }
    }

    // o of row t, in one lane of those that hold the same column
    __device__ void emit(int t, float sum) {
        if (t >= 0 && lane < 2 * COLS) {
            a.out[(int64_t(t) * a.shape.Hv + h) * S + j0 + group + own_column(lane)] =
                sum * (1.0f / sqrtf(float(S)));
        }
    }
    __device__ void emit_last() {
        const float acc[1][COLS] = {{out[0], out[1], out[2], out[3]}};
        float sum[1];
        reduce(acc, lane, sum);
        emit(a.n_rows - 1, sum[0]);
    }

    // Row r of a tile, row t of the step; the o of row t - 1 is emitted on the way.
    template <bool KEEP> __device__ void run_row(const Tile<S> &tile, int r, int t) {
        const int own = group + own_column(lane);
        const float decay = sh.decay[t % L::THREADS], beta = sh.beta[t % L::THREADS];
        Slice<S> q, k;
        k.load(tile.k[r], lane_k);
        q.load(tile.q[r], lane_k);
        float acc[2][COLS] = {{}, {out[0], out[1], out[2], out[3]}}, sum[2];
        part.template predict<KEEP>(k, decay, acc[0]);
        reduce(acc, lane, sum);
        const float delta = beta * (tile.v[r][own] - sum[0]);
        const Cols all = gather(delta, lane);
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            out[c] = 0.0f;
        }
        part.template advance<KEEP>(q, k, decay, all, out);
        emit(t - 1, sum[1]);
        if (!APPEND && lane < 2 * COLS) {
            sh.delta[t][own] = delta;
            a.delta[t * a.delta_row + h * S + j0 + own] = delta;
        }
    }

    __device__ void run_tile(const Tile<S> &tile, int t0, int n, bool tree) {
#pragma unroll 1
        for (int r = 0; r < n; r++) {
            const int t = t0 + r;
            if (APPEND || !tree) {
                run_row<true>(tile, r, t);
                continue;
            }
            if (const int parent = sh.ctl[CTL_PARENT + t]; parent != held) {
                enter(parent);
            }
            if (sh.inner[t]) {
                run_row<true>(tile, r, t);
                held = t;
                save(sh.depth[t], t);
            } else {
                run_row<false>(tile, r, t);
            }
            __syncwarp(); // enter() reads the warp's deltas
        }
    }

    // Keys and decays are logged by the head's first block, keys by the first v head of their k head.
    __device__ void log_keys(const Tile<S> &tile, int t0, int n) {
        if (j0 != 0) {
            return;
        }
        const int bank = sh.ctl[CTL_BANK] ^ 1;
        for (int u = tid; h < a.shape.Hk && u < n * (S / 4); u += L::THREADS) {
            const int r = u / (S / 4), i = u % (S / 4) * 4;
            *reinterpret_cast<Cols *>(a.key[bank] + (t0 + r) * a.key_row + h * S + i) =
                *reinterpret_cast<const Cols *>(&tile.k[r][i]);
        }
        if (tid < n) {
            a.decay[bank][(t0 + tid) * a.decay_row + h] = sh.decay[t0 + tid];
        }
    }
};

// grid: S / W column blocks, Hv heads. Two blocks a multiprocessor are what the 27B gives an H100; registers
// beyond that need not be saved.
template <int S, bool APPEND>
__global__ void __launch_bounds__(Layout<S>::THREADS, 2) deltanet_kernel(const __grid_constant__ Params a) {
    __shared__ Shared<S, APPEND> sh;
    extern __shared__ Cols slot_space[];
    using L = Layout<S>;
    Worker<S, APPEND> w(a, sh, slot_space);
    const int tid = threadIdx.x, T = a.n_rows;

    w.load();
    bool jumps = false;
    if (!APPEND && tid < T) {
        jumps = a.ctl[CTL_PARENT + tid] != tid - 1;
    }
    for (int i = tid; i < CTL_SIZE; i += L::THREADS) {
        sh.ctl[i] = a.ctl[i];
    }
    if (!APPEND && tid < MAX_ROWS) {
        sh.inner[tid] = 0;
    }
    w.gates(0);
    const bool tree = __syncthreads_or(jumps);
    if (!APPEND && tree) {
        w.find_ancestors(); // the barrier of the first tile follows
    }

    const int n_pending = sh.ctl[CTL_N_PENDING];
    const int pending_tiles = (n_pending + TILE - 1) / TILE, tiles = pending_tiles + (T + TILE - 1) / TILE;
    const auto stage = [&](int i) { // one commit for each call, so that the waits can count
        Tile<S> &tile = sh.tile[i % STAGES];
        if (i < pending_tiles) {
            w.stage_pending(tile, i * TILE, min(TILE, n_pending - i * TILE));
        } else if (i < tiles) {
            const int t0 = (i - pending_tiles) * TILE;
            w.stage_rows(tile, t0, min(TILE, T - t0));
        }
        __pipeline_commit();
    };
    for (int i = 0; i < STAGES - 1; i++) {
        stage(i);
    }
    for (int i = 0; i < tiles; i++) {
        __pipeline_wait_prior(STAGES - 2);
        __syncthreads(); // tile i is here; all have left tile i - 1
        stage(i + STAGES - 1);
        const Tile<S> &tile = sh.tile[i % STAGES];
        if (i < pending_tiles) {
            w.replay_tile(tile, min(TILE, n_pending - i * TILE));
            if (!APPEND && i == pending_tiles - 1) {
                w.store();
            }
            continue;
        }
        const int t0 = (i - pending_tiles) * TILE, n = min(TILE, T - t0);
        if (APPEND && t0 > 0 && t0 % L::THREADS == 0) {
            w.gates(t0);
            __syncthreads();
        }
        if (!APPEND) {
            w.log_keys(tile, t0, n);
        }
        w.run_tile(tile, t0, n, tree);
    }
    w.emit_last();
    if (APPEND) {
        w.store();
    }
}

template <int S> int launch(const DeltaArgs &args, cudaStream_t stream) {
    using L = Layout<S>;
    const Params a(args);
    const dim3 grid(S / L::W, a.shape.Hv);
    const int bytes = a.n_slots * L::SLOT_BYTES;
    if (a.shape.mode == DELTA_APPEND) {
        deltanet_kernel<S, true><<<grid, L::THREADS, 0, stream>>>(a);
        return int(cudaGetLastError());
    }
    if (bytes > 0) { // on each call, since it holds for the current device only
        const cudaError_t error = cudaFuncSetAttribute(deltanet_kernel<S, false>,
                                                       cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error != cudaSuccess) {
            return int(error);
        }
    }
    deltanet_kernel<S, false><<<grid, L::THREADS, bytes, stream>>>(a);
    return int(cudaGetLastError());
}

} // namespace

int cuda::deltanet(const DeltaArgs &args, void *stream) {
    const DeltaShape &s = args.shape;
    if (s.T < 0 || s.Hk <= 0 || s.Hv % s.Hk != 0 ||
        (s.mode == DELTA_VERIFY && (s.T > s.R || s.T > MAX_ROWS))) {
        return int(cudaErrorInvalidValue);
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    switch (s.S) {
        case 16: return launch<16>(args, st);
        case 32: return launch<32>(args, st);
        case 64: return launch<64>(args, st);
        case 128: return launch<128>(args, st);
        default: return int(cudaErrorInvalidValue);
    }
}

} // namespace luce
