// Runs the rows of a tree: members of a Worker (deltanet/worker.cuh). The registers keep the parent's state over its
// leaves, so siblings follow at no cost. A row whose parent's state is not there starts from the nearest saved ancestor
// (depths 0, 5, 10 are saved in shared memory) or from the committed state, and replays the rows between.
#pragma once

#include "deltanet/worker.cuh"

namespace luce {
namespace {

// Finds every row's ancestors, one thread a row, and which rows have children. The caller's barrier
// follows.
template <int S, bool APPEND, bool ONE> __device__ void Worker<S, APPEND, ONE>::find_ancestors() {
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

template <int S, bool APPEND, bool ONE> __device__ void Worker<S, APPEND, ONE>::save(int depth, int row) {
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
template <int S, bool APPEND, bool ONE> __device__ void Worker<S, APPEND, ONE>::enter(int parent) {
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

// Writes o of row t, in one lane of those that hold the same columns.
template <int S, bool APPEND, bool ONE> __device__ void Worker<S, APPEND, ONE>::emit(int t, const Cols &sum) {
    if (t >= 0 && lane_k == 0) {
        float *to = a.out + (int64_t(row0 + t) * a.shape.Hv + h) * S + j0 + group;
        const float scale = 1.0f / sqrtf(float(S));
        *reinterpret_cast<Cols *>(to) = {sum.x[0] * scale, sum.x[1] * scale};
    }
}

template <int S, bool APPEND, bool ONE> __device__ void Worker<S, APPEND, ONE>::emit_last() {
    const float acc[1][COLS] = {{out[0], out[1]}};
    Cols sum[1];
    reduce(acc, sum);
    emit(n_rows - 1, sum[0]);
}

// Runs row r of a tile, which is row t of the sequence, in a tree, and emits the o of row t - 1 on the way.
template <int S, bool APPEND, bool ONE>
template <bool KEEP>
__device__ void Worker<S, APPEND, ONE>::run_row(const Rows &tile, int r, int t) {
    Slice<S> q, k;
    k.load(tile.k[r], lane_k);
    q.load(tile.q[r], lane_k);
    float acc[2][COLS] = {{}, {out[0], out[1]}};
    Cols sum[2], delta;
    part.template predict<KEEP>(k, sh.decay[t], acc[0]);
    reduce(acc, sum);
#pragma unroll
    for (int c = 0; c < COLS; c++) {
        delta.x[c] = sh.beta[t] * (tile.v[r][group + c] - sum[0].x[c]);
        out[c] = 0.0f;
    }
    part.template advance<KEEP>(q, k, sh.decay[t], delta, out);
    emit(t - 1, sum[1]);
    if (lane_k == 0) {
        *reinterpret_cast<Cols *>(&sh.delta[t][group]) = delta;
        *reinterpret_cast<Cols *>(log + a.delta + t * a.row_values + h * S + j0 + group) = delta;
    }
}

template <int S, bool APPEND, bool ONE>
__device__ void Worker<S, APPEND, ONE>::run_tree(const Rows &tile, int t0, int n) {
#pragma unroll 1
    for (int r = 0; r < n; r++) {
        const int t = t0 + r;
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

template <int S, bool APPEND, bool ONE> __device__ void Worker<S, APPEND, ONE>::run_trees() {
    for (int t = 0; t < n_rows; t += TILE_ROWS) {
        const Rows &tile = take_rows(t);
        const int n = min(TILE_ROWS, n_rows - t);
        log_keys(tile, t, n);
        run_tree(tile, t, n);
    }
}

} // namespace
} // namespace luce
