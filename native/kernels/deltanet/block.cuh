// Says what a block of the gated delta rule works on: its arguments, its items and its shared memory.
#pragma once

#include "common/kernels.h"
#include "deltanet/layout.h"
#include "deltanet/state_tile.cuh"

namespace luce {
namespace {

// Params are what a kernel takes: the arguments and, since DeltaShape's layout is for the host, where things
// are in a slot's log.
struct Params : DeltaArgs {
    int64_t C; // a row of x has so many channels
    int n_saves;
    int64_t state_size, log_size, delta, key[2], decay[2]; // the last two are by bank
    int row_values; // a row of results or logged deltas has so many
    int key_row, decay_row; // one row's keys or decays are so far from the next row's

    explicit Params(const DeltaArgs &args, int saves = 0)
        : DeltaArgs(args), C(shape.conv_dim()), n_saves(saves) {
        state_size = int64_t(shape.Hv) * shape.S * shape.S;
        log_size = shape.log_size();
        delta = shape.log_delta(0);
        row_values = shape.Hv * shape.S;
        for (int bank = 0; bank < 2; bank++) {
            key[bank] = shape.log_key(bank, 0);
            decay[bank] = shape.log_decay(bank, 0);
        }
        key_row = shape.Hk * shape.S;
        decay_row = shape.Hv;
    }
};

// An item is columns at * W .. of the step's sequence `seq`. `at` counts column blocks, then v heads.
struct Item {
    int seq, at;

    __device__ void skip(int n, int n_of_seq) {
        // Without a division, since the first item must be known at once.
        for (at += n; at >= n_of_seq; at -= n_of_seq) {
            seq++;
        }
    }
};

template <int S, int ROWS = TILE_ROWS> struct Tile {
    using L = Layout<S>;
    alignas(16) float q[ROWS][S];
    float k[ROWS][S];
    float v[ROWS][L::W]; // it is the delta where the row is a pending one
    float decay[ROWS]; // only pending rows have theirs here
};

// Control is what the control block says of an item's sequence.
struct Control {
    SeqCtl seq;
    int32_t n_seqs;
};

// Where it is of ONE row, that is in `tile` from the start (deltanet/layer.cu).
template <int S, bool APPEND, bool ONE = false> struct Shared {
    using L = Layout<S>;
    static constexpr int ROWS = ONE ? 1 : MAX_ROWS, GATES = APPEND ? L::THREADS : ROWS;
    static_assert(L::THREADS >= MAX_ROWS, "a verify has a thread for each row");
    Tile<S, ONE ? 1 : TILE_ROWS> tile[ONE ? 1 : STAGES];
    alignas(16) float delta[APPEND ? 1 : ROWS][L::W];
    alignas(16) float decay[GATES]; // it has exp(g) of row t at t % THREADS
    alignas(16) float beta[GATES];
    Control ctl;
    // The following are of the sequence's rows.
    int8_t parent[ROWS]; // it is counted from the sequence's first row too
    uint8_t inner[ROWS]; // it is 1 if the row has children
    uint8_t depth[ROWS];
    uint8_t up[ROWS][ROWS]; // up[t][i] is the i-th ancestor of row t, and row t itself at 0
};
static_assert(sizeof(Shared<16, false>) == own_bytes(16) && sizeof(Shared<32, false>) == own_bytes(32) &&
              sizeof(Shared<64, false>) == own_bytes(64) && sizeof(Shared<128, false>) == own_bytes(128));

} // namespace
} // namespace luce
