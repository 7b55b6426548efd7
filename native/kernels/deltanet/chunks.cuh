// Says how the chunked delta rule lays out what its two kernels share.
//
// In a chunk of 32 rows from state S0, with G_t = g_0 + .. + g_t and rows beyond the prompt counting as k = q = g = 0:
//   A_ij = beta_i exp(G_i - G_j) (k_i . k_j) for j < i;  T = (I + A)^-1 diag(beta)
//   P_ij = exp(G_i - G_j) (q_i . k_j) for j <= i
//   delta = T (v - diag(exp(G)) K S0);  o = (diag(exp(G)) Q S0 + P delta) / sqrt(S)
//   S1 = exp(G_31) S0 + K^T diag(exp(G_31 - G)) delta
// The first kernel makes T, P and the powers of all chunks at once, the second walks through the chunks of a head.
#pragma once

#include "deltanet/block.cuh"
#include "deltanet/mma_bf16.cuh"

namespace luce {
namespace {

constexpr int ROWS = 32; // a chunk has four tiles of 8 rows, which the products below write out
constexpr int SPAN = 64; // a block of the second kernel has so many v dimensions, 16 for each warp
constexpr int SPAN_WARPS = SPAN / 16;

// These are bytes of one chunk, in scratch and in shared memory. Matrices are BF16 in rows, in groups of 8
// values whose places within a row are exchanged so that 8 rows of one group lie in different banks.
template <int S> struct Chunk {
    // A k head has keys and queries, in high and low parts.
    static constexpr int MATRIX = ROWS * S * 2;
    static constexpr int KEY_HIGH = 0, KEY_LOW = MATRIX, QUERY_HIGH = 2 * MATRIX, QUERY_LOW = 3 * MATRIX;
    static constexpr int KEYS = 4 * MATRIX;
    // A v head has T and P, then exp(G) and exp(G_31 - G) in F32.
    static constexpr int SQUARE = ROWS * ROWS * 2;
    static constexpr int T_HIGH = 0, T_LOW = SQUARE, P_HIGH = 2 * SQUARE, P_LOW = 3 * SQUARE;
    static constexpr int GROWN = 4 * SQUARE, LEFT = GROWN + ROWS * 4;
    static constexpr int HEAD = LEFT + ROWS * 4;
    // A stage of the second kernel has both, then v in F32.
    static constexpr int V_ROW = SPAN + 4; // a warp's reads then meet different banks
    static constexpr int HEAD_AT = KEYS, V_AT = KEYS + HEAD, STAGE = V_AT + ROWS * V_ROW * 4;

    static __device__ int at(int row, int group) { return row * S * 2 + (group ^ (row & 7)) * 16; }
};
// Returns the same of T and P, where two rows share the banks.
__device__ int square_at(int row, int group) {
    return row * ROWS * 2 + (group ^ (row >> 1 & 3)) * 16;
}

struct ChunkParams : Params {
    uint8_t *keys, *heads; // [chunks][Hk][KEYS], [chunks][Hv][HEAD]
    int n_chunks;
};

} // namespace
} // namespace luce
