// Says how the blocks of DeltaNet's kernels are made up: their threads, their share of a state, and what they have of shared
// memory.
#pragma once

#include "common/kernels.h"
#include "common/warp.cuh"
#include "deltanet/sizes.h"

namespace luce {
namespace {

// ---- the gated delta rule, row by row ----

constexpr int LANES = 8; // as many lanes share a group of columns
constexpr int GROUPS = WARP / LANES; // a warp has so many
constexpr int COLS = 2; // a group has so many columns

template <int S> struct Layout {
    static constexpr int W = S < 32 ? S : 32; // a block has so many columns
    static constexpr int THREADS = W / COLS * LANES; // there are at least MAX_ROWS
    static constexpr int K = S / LANES; // a thread has so many entries of k
    static constexpr int VEC = K < 4 ? K : 4; // as many of them are neighbours
    static constexpr int BLOCKS = S / W; // a head has so many blocks
    static constexpr int STATE_BYTES = S * W * int(sizeof(float));
};

constexpr int TILE_ROWS = 4;
constexpr int STAGES = 3;
constexpr int SAVES = 3; // shared memory keeps so many states; with 4 an SM holds two blocks, not three
constexpr int STRIDE = 5; // saved states are so many depths apart
constexpr int TREE_ROWS = 4; // up to here a replay from the committed state is short enough

// Returns how many states a block saves for the paths of a tree at most. A plan has as many, or fewer.
inline int most_saves(const DeltaShape &s) {
    return s.mode == DELTA_APPEND || s.T <= TREE_ROWS ? 0 : SAVES;
}
// Returns the bytes that the kernel of a verify declares (deltanet/block.cuh).
constexpr int own_bytes(int S) {
    return S == 16 ? 11600 : S == 32 ? 18000 : S == 64 ? 21072 : 27216;
}

// ---- the same in chunks ----

constexpr int PREPARE_THREADS = 256;
constexpr int CHUNK_ROWS = 32; // a chunk has four tiles of 8 rows, which the products below write out
constexpr int SPAN = 64; // a block of the second kernel has so many v dimensions, 16 for each warp
constexpr int SPAN_WARPS = SPAN / 16;

// These are bytes of one chunk, in scratch and in shared memory. Matrices are BF16 in rows, in groups of 8
// values whose places within a row are exchanged so that 8 rows of one group lie in different banks.
template <int S> struct ChunkLayout {
    // A k head has keys and queries, in high and low parts.
    static constexpr int MATRIX = CHUNK_ROWS * S * 2;
    static constexpr int KEY_HIGH = 0, KEY_LOW = MATRIX, QUERY_HIGH = 2 * MATRIX, QUERY_LOW = 3 * MATRIX;
    static constexpr int KEYS = 4 * MATRIX;
    // A v head has T and P, then exp(G) and exp(G_31 - G) in F32.
    static constexpr int SQUARE = CHUNK_ROWS * CHUNK_ROWS * 2;
    static constexpr int T_HIGH = 0, T_LOW = SQUARE, P_HIGH = 2 * SQUARE, P_LOW = 3 * SQUARE;
    static constexpr int GROWN = 4 * SQUARE, LEFT = GROWN + CHUNK_ROWS * 4;
    static constexpr int HEAD = LEFT + CHUNK_ROWS * 4;
    // A stage of the second kernel has both, then v in F32.
    static constexpr int V_ROW = SPAN + 4; // a warp's reads then meet different banks
    static constexpr int HEAD_AT = KEYS, V_AT = KEYS + HEAD, STAGE = V_AT + CHUNK_ROWS * V_ROW * 4;
};

// ---- the conv ----

constexpr int TAPS = CONV_TAPS, WINDOW = TAPS - 1;
constexpr int GROUP = 16; // a block of a verify has at most so many sequences
constexpr int APPEND_WARPS = 8;
constexpr int APPEND_RUN = 8; // a warp has so many neighbouring rows, and slides the taps in registers
constexpr int APPEND_ROWS = APPEND_WARPS * APPEND_RUN;
constexpr int SUM_TILE = 128; // a block that adds up parts has so many results of each row

} // namespace
} // namespace luce
