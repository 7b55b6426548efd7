// Does an item of the gated delta rule, as one thread sees it: rows come through shared memory, TILE_ROWS at a time, STAGES - 1
// tiles ahead, and the state stays in registers.
#pragma once

#include "common/overlap.cuh"
#include "deltanet/block.cuh"

#include <cuda_pipeline.h>
#include <cuda_runtime.h>

namespace luce {
namespace {

// A worker is one item as one thread sees it. Rows are counted from the sequence's first one.
// Where the step is of ONE row, the kernel has that in the tile before it is run, and its gates too.
template <int S, bool APPEND, bool ONE = false> struct Worker {
    using L = Layout<S>;
    using Rows = Tile<S, ONE ? 1 : TILE_ROWS>;
    const Params &a;
    Shared<S, APPEND, ONE> &sh;
    Cols *saves; // [n_saves][K][THREADS], each thread's own
    const int tid = threadIdx.x, lane = tid % WARP;
    const int lane_k = lane / GROUPS; // it is 0 .. LANES - 1
    // It is the group's first column, counted in the block.
    const int group = (tid / WARP * GROUPS + lane % GROUPS) * COLS;
    const int h, kh, j0;
    int bank, n_pending, row0, n_rows, n_seqs;
    const float *x; // it points to x of the first row
    float *log, *state;
    Part<S> part;
    // This thread's part of S^T q of the last row, which is reduced beside the next row's D^T k.
    float out[COLS] = {};
    // The places in the ring of tiles that are filled and taken next, and what the tiles to fill have.
    int filled = 0, taken = 0, pending_at = 0, rows_at = 0;
    const float *q_from, *v_from; // they point to this thread's values of the rows to fill with
    // They point to what this thread writes of a tile's results, deltas and keys, for the sequence's first tile.
    float *out_to, *delta_to, *key_to;
    const bool logs_keys; // the first v head of a k head does, in its first block
    // In a tree, these are the row whose state the registers hold and those whose states are saved.
    int held = -1;
    int saved[SAVES];

    __device__ Worker(const Params &args, Shared<S, APPEND, ONE> &shared, Cols *save_space, const Item &item)
        : a(args), sh(shared), saves(save_space), h(item.at / L::BLOCKS), kh(h % a.shape.Hk),
          j0(item.at % L::BLOCKS * L::W), logs_keys(j0 == 0 && h < args.shape.Hk) {
        state = a.state + (int64_t(h) * S + Slice<S>::entry(0, lane_k)) * S + j0 + group;
#pragma unroll
        for (int i = 0; i < SAVES; i++) {
            saved[i] = -1;
        }
    }

    // Reads where sequence i has its rows and its slot, and returns false where the step has no such
    // sequence. All else waits for these values, so the block loads them at once, by words.
    static constexpr int CONTROL = sizeof(SeqCtl) / sizeof(int32_t), N_WORDS = CONTROL / L::THREADS + 1;
    struct Words {
        int32_t x[N_WORDS]; // the one after the last is n_seqs
    };
    __device__ Words load_control(int i) const {
        const int32_t *words = reinterpret_cast<const int32_t *>(&a.ctl->seqs[i]);
        Words own;
#pragma unroll
        for (int n = 0; n < N_WORDS; n++) {
            const int w = tid + n * L::THREADS;
            own.x[n] = *(w < CONTROL ? words + w : &a.ctl->n_seqs);
        }
        return own;
    }
    __device__ bool read_control(int i) { return take_control(load_control(i), i); }
    __device__ bool take_control(const Words &own, int i) {
#pragma unroll
        for (int n = 0; n < N_WORDS; n++) {
            const int w = tid + n * L::THREADS;
            if (w <= CONTROL) {
                reinterpret_cast<int32_t *>(&sh.ctl)[w] = own.x[n];
            }
        }
        __syncthreads();
        const SeqCtl &seq = sh.ctl.seq;
        bank = seq.bank;
        n_pending = seq.n_replay;
        row0 = seq.row0;
        n_rows = seq.n_rows;
        x = a.x + row0 * a.C;
        q_from = x + tid / (S / 4) * a.C + kh * S + tid % (S / 4) * 4;
        v_from = x + tid / (L::W / 4) * a.C + (2 * a.shape.Hk + h) * S + j0 + tid % (L::W / 4) * 4;
        const int slot = seq.slot;
        log = a.log + slot * a.log_size;
        state += slot * a.state_size;
        n_seqs = sh.ctl.n_seqs;
        return i < n_seqs;
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

    // Reads exp(g) and beta of rows t0 .. t0 + THREADS of an append, one thread a row.
    __device__ void read_gates(int t0) {
        if (const int t = t0 + tid; t < n_rows) {
            const int64_t at = int64_t(row0 + t) * a.shape.Hv + h;
            set_gates(t, a.alpha[at], a.beta[at], a.dt[h], a.a[h]);
        }
    }
    // Reads the parents of a verify's rows, and returns whether they are no chain.
    __device__ bool read_parents() {
        const bool follows = tid >= n_rows || read_parent(tid);
        const bool tree = uniform(__syncthreads_or(!follows));
        if (tree) {
            find_ancestors(); // the barrier of the first tile follows
        }
        return tree;
    }
    // Reads the parent of row t, and returns whether it is the row before.
    __device__ bool read_parent(int t) {
        const int parent = max(a.ctl->rows[row0 + t].parent - row0, -1);
        sh.parent[t] = int8_t(parent);
        sh.inner[t] = 0;
        return parent == t - 1;
    }
    __device__ void set_gates(int t, float alpha, float beta, float dt, float rate) {
        set_decay(t, alpha, dt, rate);
        set_beta(t, beta);
    }
    __device__ void set_beta(int t, float beta) { sh.beta[t % L::THREADS] = 1.0f / (1.0f + expf(-beta)); }
    // In a verify it is logged too.
    __device__ void set_decay(int t, float alpha, float dt, float rate) {
        const float decay = expf(rate * softplus(alpha + dt));
        sh.decay[t % L::THREADS] = decay;
        if (!APPEND && j0 == 0) { // the head's first block logs its decays
            log[a.decay[bank ^ 1] + t * a.decay_row + h] = decay;
        }
    }

    // ---- the ring of tiles ----

    // The next rows, or pending rows p0 .. p0 + n - 1, go into a tile, with at most one copy of each kind a thread.
    static_assert(TILE_ROWS * S / 4 <= L::THREADS, "a tile's rows are copied at once");

    __device__ void stage_rows(Rows &tile, int n) {
        if (tid / (S / 4) < n) {
            __pipeline_memcpy_async(&tile.q[0][0] + tid * 4, q_from, 16);
            __pipeline_memcpy_async(&tile.k[0][0] + tid * 4, q_from + a.shape.Hk * S, 16);
        }
        if (tid / (L::W / 4) < n) {
            __pipeline_memcpy_async(&tile.v[0][0] + tid * 4, v_from, 16);
        }
        q_from += TILE_ROWS * a.C;
        v_from += TILE_ROWS * a.C;
    }
    __device__ void stage_pending(Rows &tile, int p0, int n) {
        const int32_t *rows = sh.ctl.seq.pending + p0;
        const float *key = log + a.key[bank] + kh * S, *delta = log + a.delta + h * S + j0;
        if (const int r = tid / (S / 4), i = tid % (S / 4) * 4; r < n) {
            __pipeline_memcpy_async(&tile.k[r][i], key + rows[r] * a.key_row + i, 16);
        }
        if (const int r = tid / (L::W / 4), j = tid % (L::W / 4) * 4; r < n) {
            __pipeline_memcpy_async(&tile.v[r][j], delta + rows[r] * a.row_values + j, 16);
        }
        if (tid < n) {
            __pipeline_memcpy_async(&tile.decay[tid], log + a.decay[bank] + rows[tid] * a.decay_row + h, 4);
        }
    }

    __device__ void move_on(int &place) const { place = place + 1 == STAGES ? 0 : place + 1; }
    // These stage copies with one commit for each call, so that the waits can count.
    __device__ void fill_rows() {
        stage_rows(sh.tile[filled], min(TILE_ROWS, n_rows - rows_at));
        rows_at += TILE_ROWS;
        move_on(filled);
        __pipeline_commit();
    }
    __device__ void fill_pending() {
        if (pending_at < n_pending) {
            stage_pending(sh.tile[filled], pending_at, min(TILE_ROWS, n_pending - pending_at));
        }
        pending_at += TILE_ROWS;
        move_on(filled);
        __pipeline_commit();
    }
    // Waits for the next tile. All have left the one before it, whose place is filled next.
    __device__ const Rows &take() {
        __pipeline_wait_prior(STAGES - 2);
        __syncthreads();
        const Rows &tile = sh.tile[taken];
        move_on(taken);
        return tile;
    }

    // ---- trees (deltanet/tree.cuh) ----

    __device__ void find_ancestors();
    __device__ void save(int depth, int row);
    __device__ void enter(int parent);
    __device__ void emit(int t, const Cols &sum);
    __device__ void emit_last();
    template <bool KEEP> __device__ void run_row(const Rows &tile, int r, int t);
    __device__ void run_tree(const Rows &tile, int t0, int n);
    __device__ void run_trees();
    __device__ Cols *save_of(int i) const { return saves + i * L::K * L::THREADS + tid; }

    // ---- rows ----

    __device__ void replay_tile(const Rows &tile, int n) {
        for (int r = 0; r < n; r++) {
            Slice<S> k;
            k.load(tile.k[r], lane_k);
            part.replay(k, tile.decay[r], *reinterpret_cast<const Cols *>(&tile.v[r][group]));
        }
    }

    // What a lane takes of a pending row, straight from the log: of one row there is no ring.
    struct Pending {
        Slice<S> k;
        Cols delta;
        float decay;
    };
    __device__ Pending read_pending(int p) const {
        Pending of;
        const int row = sh.ctl.seq.pending[p];
        of.k.load(log + a.key[bank] + row * a.key_row + kh * S, lane_k);
        of.delta = *reinterpret_cast<const Cols *>(log + a.delta + row * a.row_values + h * S + j0 + group);
        of.decay = log[a.decay[bank] + row * a.decay_row + h];
        return of;
    }
    // Reads N pending rows from row p on, as far as there are any: all at once, since each comes from far away.
    template <int N> __device__ void read_pending(Pending (&rows)[N], int p) const {
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (p + i < n_pending) {
                rows[i] = read_pending(p + i);
            }
        }
    }
    // Replays the pending rows, of which `rows` has the first.
    template <int N> __device__ void replay_pending(Pending (&rows)[N]) {
#pragma unroll 1
        for (int p = 0; p < n_pending; p += N) {
            if (p > 0) {
                read_pending(rows, p);
            }
#pragma unroll
            for (int i = 0; i < N; i++) {
                if (p + i < n_pending) {
                    part.replay(rows[i].k, rows[i].decay, rows[i].delta);
                }
            }
        }
    }

    // An Input is what a lane reads of a row of a tile.
    struct Input {
        Slice<S> q, k;
        Cols v;
    };
    __device__ Input input_of(const Rows &tile, int r) const {
        Input in;
        in.k.load(tile.k[r], lane_k);
        in.q.load(tile.q[r], lane_k);
        in.v = *reinterpret_cast<const Cols *>(&tile.v[r][group]);
        return in;
    }

    // The results of N rows that run_chain() has run, before their sums over lanes, and the delta that this lane logs.
    template <int N> struct Ran {
        float outs[N][COLS] = {}, own_delta = 0.0f;
    };
    // Runs N rows of a tile from row r0, which is row t of the sequence, each the child of the one before it. Nothing
    // branches between them. What `meanwhile` does hides behind the first row's sums, and comes before `ran` is written.
    template <int N, typename F>
    __device__ void run_chain(const Rows &tile, int r0, int t, Ran<N> &ran, const F &meanwhile) {
        const int mine = own_row(lane);
        const auto decay = *reinterpret_cast<const Pack<N> *>(&sh.decay[unsigned(t) % L::THREADS]);
        const auto beta = *reinterpret_cast<const Pack<N> *>(&sh.beta[unsigned(t) % L::THREADS]);
        Input in = input_of(tile, r0), next = in;
#pragma unroll
        for (int r = 0; r < N; r++) {
            if (r + 1 < N) {
                next = input_of(tile, r0 + r + 1);
            }
            float acc[1][COLS] = {};
            Cols delta[1];
            part.template predict<true>(in.k, decay.x[r], acc[0]);
            reduce(acc, delta);
            if (r == 0) {
                meanwhile();
                ran = {};
            }
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                delta[0].x[c] = beta.x[r] * (in.v.x[c] - delta[0].x[c]);
            }
            part.template advance<true>(in.q, in.k, decay.x[r], delta[0], ran.outs[r]);
            ran.own_delta = pick(mine == r, pick(lane & 4, delta[0].x[1], delta[0].x[0]), ran.own_delta);
            in = next;
        }
    }
    // Writes what N rows from row t on have left; `there` says that they are there. There are as many lanes to a group as
    // results of a tile, so each takes one of them and a warp stores all rows at once.
    static_assert(TILE_ROWS * COLS == LANES, "own_row() and own_column() say so");
    template <int N> __device__ void write(const Ran<N> &ran, int t, bool there) {
        const float own_out = reduce_rows(ran.outs, lane);
        if (own_row(lane) < N && there) {
            out_to[t * a.row_values] = own_out * (1.0f / sqrtf(float(S)));
            if (!APPEND) {
                delta_to[t * a.row_values] = ran.own_delta;
            }
        }
    }

    // Logs the keys of rows t0 .. t0 + n - 1.
    __device__ void log_keys(const Rows &tile, int t0, int n) {
        if (logs_keys && tid / (S / 4) < n) {
            *reinterpret_cast<float4 *>(key_to + t0 * a.key_row) =
                *reinterpret_cast<const float4 *>(&tile.k[0][0] + tid * 4);
        }
    }

    // ---- chains, and all of an item (deltanet/run.cuh) ----

    __device__ void run_singly();
    __device__ void run_singly(const Input &in, int t, Ran<1> &ran);
    __device__ void run_chains();
    __device__ bool prepare();
    template <bool SINGLY> __device__ bool run(Item &item);

    // ---- what an item is made of ----

    // Replays the pending rows, which steps before this one have left.
    __device__ void run_pending() {
        for (int i = 0; i < STAGES - 1; i++) {
            fill_pending();
        }
        for (int p = 0; p < n_pending; p += TILE_ROWS) {
            const Rows &tile = take();
            fill_pending();
            replay_tile(tile, min(TILE_ROWS, n_pending - p));
        }
        filled = taken; // what is filled ahead is empty
    }
    // Takes the tile of row t, and has the one behind those that are on their way filled.
    __device__ const Rows &take_rows(int t) {
        const Rows &tile = take_at(t);
        if constexpr (!ONE) {
            fill_rows();
        }
        return tile;
    }
    // Takes the tile of row t.
    __device__ const Rows &take_at(int t) {
        if constexpr (ONE) {
            return sh.tile[0];
        }
        const Rows &tile = take();
        if (APPEND && t > 0 && t % L::THREADS == 0) {
            read_gates(t);
            __syncthreads();
        }
        return tile;
    }
    // Asks L2 for an item's state, where a thread has a row of W columns.
    __device__ void prefetch(const Item &item) const {
        const int64_t row = int64_t(item.at / L::BLOCKS) * S + tid;
        const float *of_slot = a.state + a.ctl->seqs[item.seq].slot * a.state_size;
        if (tid < S) {
            const float *from = of_slot + row * S + item.at % L::BLOCKS * L::W;
            prefetch_line(from);
        }
    }

    // Has the committed state in registers.
    __device__ void begin() {
        if (sh.ctl.seq.fresh) {
            part = {};
        } else {
            load();
        }
        const int column = h * S + j0 + group + own_column(lane), mine = own_row(lane);
        out_to = a.out + int64_t(row0 + mine) * a.row_values + column;
        delta_to = log + a.delta + mine * a.row_values + column;
        key_to = log + a.key[bank ^ 1] + h * S + tid / (S / 4) * a.key_row + tid % (S / 4) * 4;
    }
    // Stores the committed state where the next step will not find the sequence fresh, nor its rows pending.
    __device__ void store_committed() const {
        if (sh.ctl.seq.fresh || n_pending > 0) {
            store();
        }
    }
};

} // namespace
} // namespace luce
