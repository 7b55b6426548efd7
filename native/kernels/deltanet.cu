// Computes the gated delta rule over the rows of a step.
// An item of work is up to 32 columns (v dimensions) of one v head's state of one sequence. Columns never
// meet, so items do not either. The grid is what the device holds at once, or less. A block takes every
// gridDim-th item of the sequences that the step has, so a step captured for many costs one no more.
// A thread keeps 4 columns by S / 16 k entries in registers from the first row to the last. 16 lanes of a
// warp share 4 columns and sum over k by a butterfly, in the same order for every row. So a row's bits depend
// on its ancestors only. Rows come through shared memory, TILE at a time, STAGES - 1 tiles ahead.
//
// In a tree, the registers keep the parent's state over its leaves, so siblings follow at no cost. A row
// whose parent's state is not there starts from the nearest saved ancestor (depths 0, 5, 10 are saved in
// shared memory) or from the committed state, and replays the rows between. A chain saves and replays none.
#include "deltanet_block.cuh"
#include "deltanet_part.cuh"
#include "kernels.h"
#include "overlap.cuh"

#include <cuda_pipeline.h>
#include <cuda_runtime.h>

namespace luce {
namespace {

// A worker is one item as one thread sees it. Rows are counted from the sequence's first one.
template <int S, bool APPEND> struct Worker {
    using L = Layout<S>;
    const Params &a;
    Shared<S, APPEND> &sh;
    Cols *saves; // [n_saves][K][THREADS], each thread's own
    const int tid = threadIdx.x, lane = tid % WARP;
    const int lane_k = lane / 2; // 0 .. LANES - 1
    const int group = (tid / WARP * 2 + lane % 2) * COLS; // the first column, in the block
    const int h, kh, j0;
    int bank, n_pending, row0, n_rows, n_seqs;
    const float *x; // that of the first row
    float *log, *state;
    Part<S> part;
    // This thread's part of S^T q of the last row, which is reduced beside the next row's D^T k.
    float out[COLS] = {};
    // In a tree, these are the row whose state the registers hold and those whose states are saved.
    int held = -1;
    int saved[SAVES];

    __device__ Worker(const Params &args, Shared<S, APPEND> &shared, Cols *save_space, const Item &item)
        : a(args), sh(shared), saves(save_space), h(item.at / L::BLOCKS), kh(h % a.shape.Hk),
          j0(item.at % L::BLOCKS * L::W) {
        state = a.state + (int64_t(h) * S + Slice<S>::entry(0, lane_k)) * S + j0 + group;
#pragma unroll
        for (int i = 0; i < SAVES; i++) {
            saved[i] = -1;
        }
    }

    // Reads where sequence i has its rows and its slot, and returns false where the step has no such
    // sequence. All else waits for these values, so the block loads them at once, by words.
    __device__ bool read_control(int i) {
        constexpr int WORDS = sizeof(SeqCtl) / sizeof(int32_t), N = WORDS / L::THREADS + 1;
        const int32_t *words = reinterpret_cast<const int32_t *>(&a.ctl->seqs[i]);
        int32_t word[N]; // the one after the last is n_seqs
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int w = tid + n * L::THREADS;
            word[n] = *(w < WORDS ? words + w : &a.ctl->n_seqs);
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int w = tid + n * L::THREADS;
            if (w <= WORDS) {
                reinterpret_cast<int32_t *>(&sh.ctl)[w] = word[n];
            }
        }
        __syncthreads();
        const SeqCtl &seq = sh.ctl.seq;
        bank = seq.bank;
        n_pending = seq.n_replay;
        row0 = APPEND ? 0 : seq.row0;
        n_rows = APPEND ? a.shape.T : seq.n_rows;
        x = a.x + row0 * a.C;
        const int slot = seq.slot;
        log = a.log + slot * a.log_size;
        state += slot * a.state_size;
        n_seqs = APPEND ? 1 : sh.ctl.n_seqs;
        return APPEND || i < n_seqs;
    }

    __device__ Cols *state_of(int i) const {
        return reinterpret_cast<Cols *>(state + Slice<S>::entry(i, 0) * S);
    }
    __device__ void load() {
#pragma unroll
        for (int i = 0; i < L::K; i++) {
            part.s[i] = *state_of(i);
        }
    }
    __device__ void store() const {
#pragma unroll
        for (int i = 0; i < L::K; i++) {
            luce::store(state_of(i), part.s[i]);
        }
    }

    // Reads exp(g), beta and, in a verify, parents of rows t0 .. t0 + THREADS, one thread a row. It returns
    // true where the row does not follow the one before it.
    __device__ bool read_rows(int t0) {
        const int t = t0 + tid;
        if (t >= n_rows) {
            return false;
        }
        const int64_t at = int64_t(row0 + t) * a.shape.Hv + h;
        const float alpha = a.alpha[at], beta = a.beta[at], dt = a.dt[h], rate = a.a[h];
        const int parent = APPEND ? -1 : max(a.ctl->rows[row0 + t].parent - row0, -1);
        sh.decay[tid] = expf(rate * softplus(alpha + dt));
        sh.beta[tid] = 1.0f / (1.0f + expf(-beta));
        if (!APPEND) {
            sh.parent[t] = int8_t(parent);
            sh.inner[t] = 0;
        }
        return parent != t - 1;
    }

    // Rows t0 .. t0 + n - 1, or pending rows p0 .. p0 + n - 1, go into a tile, with at most one copy of each
    // kind a thread.
    static_assert(TILE * S / 4 <= L::THREADS, "a tile's rows are copied at once");

    __device__ void stage_rows(Tile<S> &tile, int t0, int n) {
        if (const int r = tid / (S / 4), i = tid % (S / 4) * 4; r < n) {
            const float *q = x + (t0 + r) * a.C + kh * S + i;
            __pipeline_memcpy_async(&tile.q[r][i], q, 16);
            __pipeline_memcpy_async(&tile.k[r][i], q + a.shape.Hk * S, 16);
        }
        if (const int r = tid / (L::W / 4), j = tid % (L::W / 4) * 4; r < n) {
            __pipeline_memcpy_async(&tile.v[r][j], x + (t0 + r) * a.C + (2 * a.shape.Hk + h) * S + j0 + j,
                                    16);
        }
    }
    __device__ void stage_pending(Tile<S> &tile, int p0, int n) {
        const int32_t *rows = sh.ctl.seq.pending + p0;
        const float *key = log + a.key[bank] + kh * S, *delta = log + a.delta + h * S + j0;
        if (const int r = tid / (S / 4), i = tid % (S / 4) * 4; r < n) {
            __pipeline_memcpy_async(&tile.k[r][i], key + rows[r] * a.key_row + i, 16);
        }
        if (const int r = tid / (L::W / 4), j = tid % (L::W / 4) * 4; r < n) {
            __pipeline_memcpy_async(&tile.v[r][j], delta + rows[r] * a.delta_row + j, 16);
        }
        if (tid < n) {
            __pipeline_memcpy_async(&tile.decay[tid], log + a.decay[bank] + rows[tid] * a.decay_row + h, 4);
        }
    }

    // ---- trees ----

    // Finds every row's ancestors, one thread a row, and which rows have children. The caller's barrier
    // follows.
    __device__ void find_ancestors() {
        if (tid < n_rows) {
            if (sh.parent[tid] >= 0) {
                sh.inner[sh.parent[tid]] = 1;
            }
            int n = 0;
            for (int row = tid; row >= 0; row = sh.parent[row]) {
                sh.up[tid][n++] = uint8_t(row);
            }
            sh.depth[tid] = uint8_t(n - 1);
        }
    }
    __device__ Cols *save_of(int i) const { return saves + i * L::K * L::THREADS + tid; }

    __device__ void save(int depth, int row) {
        if (depth % STRIDE != 0 || depth / STRIDE >= a.n_saves) {
            return;
        }
#pragma unroll
        for (int i = 0; i < SAVES; i++) {
            if (i == depth / STRIDE) {
                saved[i] = row;
            }
        }
#pragma unroll
        for (int i = 0; i < L::K; i++) {
            save_of(depth / STRIDE)[i * L::THREADS] = part.s[i];
        }
    }

    // Enters the state after row `parent`, where -1 stands for the committed one.
    __device__ void enter(int parent) {
        const int depth = parent < 0 ? -1 : sh.depth[parent];
        int from = -1;
#pragma unroll
        for (int i = 0; i < SAVES; i++) {
            if (i * STRIDE <= depth && saved[i] == sh.up[parent][depth - i * STRIDE]) {
                from = i;
            }
        }
        if (from < 0) {
            load();
        } else {
#pragma unroll
            for (int i = 0; i < L::K; i++) {
                part.s[i] = save_of(from)[i * L::THREADS];
            }
        }
        for (int d = from < 0 ? 0 : from * STRIDE + 1; d <= depth; d++) {
            const int row = sh.up[parent][depth - d];
            Slice<S> k;
            k.load(x + row * a.C + (a.shape.Hk + kh) * S, lane_k);
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

    // Writes o of row t, in one lane of those that hold the same column.
    __device__ void emit(int t, float sum) {
        if (t >= 0 && lane < 2 * COLS) {
            a.out[(int64_t(row0 + t) * a.shape.Hv + h) * S + j0 + group + own_column(lane)] =
                sum * (1.0f / sqrtf(float(S)));
        }
    }
    __device__ void emit_last() {
        const float acc[1][COLS] = {{out[0], out[1], out[2], out[3]}};
        float sum[1];
        reduce(acc, lane, sum);
        emit(n_rows - 1, sum[0]);
    }

    // Runs row r of a tile, which is row t of the sequence, and emits the o of row t - 1 on the way.
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
            log[a.delta + t * a.delta_row + h * S + j0 + own] = delta;
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
            if (const int parent = sh.parent[t]; parent != held) {
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

    // Logs keys and decays. The head's first block logs them, and the first v head of a k head logs its keys.
    __device__ void log_keys(const Tile<S> &tile, int t0, int n) {
        if (j0 != 0) {
            return;
        }
        float *key = log + a.key[bank ^ 1] + h * S, *decay = log + a.decay[bank ^ 1] + h;
        if (const int r = tid / (S / 4), i = tid % (S / 4) * 4; r < n && h < a.shape.Hk) {
            *reinterpret_cast<Cols *>(key + (t0 + r) * a.key_row + i) =
                *reinterpret_cast<const Cols *>(&tile.k[r][i]);
        }
        if (tid < n) {
            decay[(t0 + tid) * a.decay_row] = sh.decay[t0 + tid];
        }
    }

    // ---- all of it ----

    // Stages copies with one commit for each call, so that the waits can count.
    __device__ void stage(int i, int pending_tiles, int tiles) {
        Tile<S> &tile = sh.tile[i % STAGES];
        if (i < pending_tiles) {
            stage_pending(tile, i * TILE, min(TILE, n_pending - i * TILE));
        } else if (i < tiles) {
            const int t0 = (i - pending_tiles) * TILE;
            stage_rows(tile, t0, min(TILE, n_rows - t0));
        }
        __pipeline_commit();
    }
    // Asks L2 for an item's state, where a thread has a row of W columns.
    __device__ void prefetch(const Item &item) const {
        const int64_t row = int64_t(item.at / L::BLOCKS) * S + tid;
        const float *of_slot = a.state + a.ctl->seqs[item.seq].slot * a.state_size;
        if (tid < S) {
            const float *from = of_slot + row * S + item.at % L::BLOCKS * L::W;
            asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
        }
    }

    // Moves `item` on to the block's next one, and returns false where it has none.
    __device__ bool run(Item &item) {
        const bool fresh = sh.ctl.seq.fresh;
        if (fresh) {
            part = {};
        } else {
            load();
        }
        wait_for_previous(); // it waits for the rows; what the step found in the caches is on its way
        const int pending_tiles = (n_pending + TILE - 1) / TILE;
        const int tiles = pending_tiles + (n_rows + TILE - 1) / TILE;
        for (int i = 0; i < STAGES - 1; i++) {
            stage(i, pending_tiles, tiles);
        }
        const bool tree = uniform(__syncthreads_or(read_rows(0))) && !APPEND;
        if (tree) {
            find_ancestors(); // the barrier of the first tile follows
        }
        if (!APPEND && fresh) {
            store(); // the next step will not find the sequence fresh
        }
        item.skip(gridDim.x, L::BLOCKS * a.shape.Hv);
        const bool more = !APPEND && item.seq < n_seqs;
        if (more) {
            prefetch(item);
        }
        for (int i = 0; i < tiles; i++) {
            __pipeline_wait_prior(STAGES - 2);
            __syncthreads(); // tile i is here; all have left tile i - 1
            stage(i + STAGES - 1, pending_tiles, tiles);
            const Tile<S> &tile = sh.tile[i % STAGES];
            if (i < pending_tiles) {
                replay_tile(tile, min(TILE, n_pending - i * TILE));
                if (!APPEND && i == pending_tiles - 1) {
                    store();
                }
                continue;
            }
            const int t0 = (i - pending_tiles) * TILE, n = min(TILE, n_rows - t0);
            if (APPEND && t0 > 0 && t0 % L::THREADS == 0) {
                read_rows(t0);
                __syncthreads();
            }
            if (!APPEND) {
                log_keys(tile, t0, n);
            }
            run_tile(tile, t0, n, tree);
        }
        emit_last();
        if (APPEND) {
            store();
        }
        return more;
    }
};

// The grid is any number of blocks up to the items of all sequences. Three blocks on an SM keep the memory
// busy where there are many sequences. Four would spill registers.
template <int S, bool APPEND>
__global__ void __launch_bounds__(Layout<S>::THREADS, 3) deltanet_kernel(const __grid_constant__ Params a) {
    __shared__ Shared<S, APPEND> sh;
    extern __shared__ Cols save_space[];
    let_next_start();
    Item item{0, 0};
    item.skip(blockIdx.x, Layout<S>::BLOCKS * a.shape.Hv);
    while (true) {
        Worker<S, APPEND> worker(a, sh, save_space, item);
        if (!worker.read_control(item.seq)) {
            wait_for_previous();
            return;
        }
        if (!worker.run(item)) {
            return;
        }
        __syncthreads(); // all have left this item's shared memory
    }
}

template <int S> int launch(const DeltaArgs &args, cudaStream_t stream) {
    using L = Layout<S>;
    const Params a(args);
    const auto kernel = a.shape.mode == DELTA_APPEND ? deltanet_kernel<S, true> : deltanet_kernel<S, false>;
    const int bytes = a.n_saves * L::STATE_BYTES;
    int blocks = L::BLOCKS * a.shape.Hv * a.shape.max_seqs(), device = 0, n_sms = 0, per_sm = 0;
    // These are asked on each call, since the answers hold for the current device only.
    cudaError_t error = cudaSuccess;
    if (bytes > 0) {
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    }
    if (error == cudaSuccess && a.shape.max_seqs() > 1) {
        error = cudaGetDevice(&device);
        if (error == cudaSuccess) {
            error = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device);
        }
        if (error == cudaSuccess) {
            error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, L::THREADS, bytes);
        }
        // This is one less than there is room for. A grid that fills an H200 exactly is not spread evenly,
        // and then some SMs get three of one sequence's items while others get one.
        blocks = min(blocks, n_sms * per_sm - 1);
    }
    if (error != cudaSuccess) {
        return int(error);
    }
    const bool overlap = a.shape.mode == DELTA_VERIFY;
    return int(launch_kernel(kernel, dim3(blocks), L::THREADS, bytes, stream, overlap, a));
}

} // namespace

int cuda::deltanet(const DeltaArgs &args, void *stream) {
    const DeltaShape &s = args.shape;
    if (s.T < 1 || s.n_slots < 1 || s.Hk < 1 || s.Hv % s.Hk != 0 ||
        (s.mode == DELTA_VERIFY && s.T > MAX_ROWS)) {
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
