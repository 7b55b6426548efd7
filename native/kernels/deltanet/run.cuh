// Runs an item of the gated delta rule: members of a Worker (deltanet/worker.cuh).
#pragma once

#include "deltanet/tree.cuh"
#include "matmul/ptx.cuh"

namespace luce {
namespace {

// Returns what found() takes of a value.
__device__ uint32_t value_bits(float x) {
    return __float_as_uint(x) & 0x7fffffff;
}

// Runs the rows one after the other. A row's results are written while the next one's first sums are on their way. A
// launch meets all of its code for the first time, and of few rows this is faster than run_chains(), which is longer.
template <int S, bool APPEND, bool ONE> __device__ void Worker<S, APPEND, ONE>::run_singly() {
    static_assert(!APPEND, "keys are logged, and all rows' decays are there");
    Ran<1> ran;
#pragma unroll 1
    for (int t0 = 0; t0 < n_rows; t0 += TILE_ROWS) {
        const Rows &tile = take_rows(t0);
        const int n = min(TILE_ROWS, n_rows - t0);
        log_keys(tile, t0, n);
        Input in = input_of(tile, 0);
#pragma unroll 1
        for (int r = 0; r < n; r++) {
            run_singly(in, t0 + r, ran);
            in = input_of(tile, min(r + 1, TILE_ROWS - 1));
        }
    }
    write(ran, n_rows - 1, n_rows > 0);
}

// Runs row t, and writes the results of the one before it, which `ran` has.
template <int S, bool APPEND, bool ONE>
__device__ void Worker<S, APPEND, ONE>::run_singly(const Input &in, int t, Ran<1> &ran) {
    const float decay = sh.decay[t], beta = sh.beta[t];
    float acc[1][COLS] = {};
    Cols delta[1];
    part.template predict<true>(in.k, decay, acc[0]);
    reduce(acc, delta);
    write(ran, t - 1, t > 0);
    ran = {};
#pragma unroll
    for (int c = 0; c < COLS; c++) {
        delta[0].x[c] = beta * (in.v.x[c] - delta[0].x[c]);
    }
    part.template advance<true>(in.q, in.k, decay, delta[0], ran.outs[0]);
    ran.own_delta = pick(lane & 4, delta[0].x[1], delta[0].x[0]);
}

// A whole tile's results are written while the next one's first sums are on their way.
template <int S, bool APPEND, bool ONE> __device__ void Worker<S, APPEND, ONE>::run_chains() {
    int t = 0;
    if constexpr (!ONE) {
        Ran<TILE_ROWS> ran;
        for (; t + TILE_ROWS <= n_rows; t += TILE_ROWS) {
            const Rows &tile = take_at(t);
            run_chain<TILE_ROWS>(tile, 0, t, ran, [&] {
                write(ran, t - TILE_ROWS, t > 0);
                fill_rows();
                if (!APPEND) {
                    log_keys(tile, t, TILE_ROWS);
                }
            });
        }
        if (t > 0) {
            write(ran, t - TILE_ROWS, true);
        }
    }
    if (t < n_rows) {
        const Rows &tile = take_rows(t);
        if (!APPEND) {
            log_keys(tile, t, n_rows - t);
        }
#pragma unroll 1
        for (int r = 0; t + r < n_rows; r++) {
            Ran<1> one;
            run_chain<1>(tile, r, t + r, one, [] {});
            write(one, t + r, true);
        }
    }
}

// Prepares the item's rows, and returns whether they are no chain. Ahead of the wait it brings the state up to the committed rows
// and finds all addresses: caches and the step's inputs are there by then. Behind it, it asks for what the first rows need.
template <int S, bool APPEND, bool ONE> __device__ bool Worker<S, APPEND, ONE>::prepare() {
    constexpr bool APART = !APPEND && L::THREADS >= 2 * MAX_ROWS; // a thread has a row's decay or its beta
    begin();
    run_pending();
    if (!APPEND) {
        store_committed(); // no other launch of the step reads or writes it, and all of the step before has ended
    }
    const bool tree = !APPEND && read_parents();
    const bool of_beta = APART && tid >= L::THREADS / 2;
    const int t = of_beta ? tid - L::THREADS / 2 : tid;
    const int64_t at = int64_t(row0 + t) * a.shape.Hv + h;
    const float *from = (of_beta ? a.beta : a.alpha) + at, dt = a.dt[h], rate = a.a[h];
    found(address_bits(q_from) | address_bits(v_from) | address_bits(from) | value_bits(dt) |
          value_bits(rate));
    wait_for_previous();
    for (int i = 0; i < STAGES - 1; i++) {
        fill_rows();
    }
    const bool there = t < n_rows;
    const float gate = there ? *from : 0.0f, beta = !APART && there ? a.beta[at] : 0.0f;
    if (there && !of_beta) {
        set_decay(t, gate, dt, rate);
    }
    if (there && (of_beta || !APART)) {
        set_beta(t, APART ? gate : beta);
    }
    return tree; // the barrier of the first tile follows
}

// Moves `item` on to the block's next one, and returns false where it has none.
template <int S, bool APPEND, bool ONE>
template <bool SINGLY>
__device__ bool Worker<S, APPEND, ONE>::run(Item &item) {
    const bool tree = prepare();
    item.skip(gridDim.x, L::BLOCKS * a.shape.Hv);
    const bool more = item.seq < n_seqs;
    if (more) {
        prefetch(item);
    }
    if (tree) {
        run_trees();
        emit_last();
    } else if constexpr (SINGLY) {
        run_singly();
    } else {
        run_chains();
    }
    if (APPEND) {
        store();
    }
    return more;
}

} // namespace
} // namespace luce
