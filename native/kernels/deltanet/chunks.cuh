// Says how the chunked delta rule lays out what its two kernels share.
//
// In a chunk of 32 rows of a sequence from state S0, with G_t = g_0 + .. + g_t and rows beyond its last counting as
// k = q = g = 0:
//   A_ij = beta_i exp(G_i - G_j) (k_i . k_j) for j < i;  T = (I + A)^-1 diag(beta)
//   P_ij = exp(G_i - G_j) (q_i . k_j) for j <= i
//   delta = T (v - diag(exp(G)) K S0);  o = (diag(exp(G)) Q S0 + P delta) / sqrt(S)
//   S1 = exp(G_31) S0 + K^T diag(exp(G_31 - G)) delta
// The first kernel makes T, P and the powers of all chunks at once, the second walks through the chunks of a head.
#pragma once

#include "deltanet/block.cuh"
#include "deltanet/layout.h"
#include "deltanet/mma_bf16.cuh"

namespace luce {
namespace {

constexpr int ROWS = CHUNK_ROWS;

template <int S> struct Chunk : ChunkLayout<S> {
    static __device__ int at(int row, int group) { return row * S * 2 + (group ^ (row & 7)) * 16; }
};
// Returns the same of T and P, where two rows share the banks.
__device__ int square_at(int row, int group) {
    return row * ROWS * 2 + (group ^ (row >> 1 & 3)) * 16;
}

// Chunks are numbered as first_group() says.
struct ChunkParams : Params {
    uint8_t *keys, *heads; // [chunks][Hk][KEYS], [chunks][Hv][HEAD]
};

// The rows of the chunk of a number: n of the call's, from `first` on. Some numbers have none, and n is not positive.
struct ChunkRows {
    int first, n;

    __device__ ChunkRows(const StepCtl &ctl, int chunk) {
        const int i = seq_of_group(ctl, chunk, ROWS);
        const SeqCtl &seq = ctl.seqs[i];
        const int begin = (chunk - first_group(seq, i, ROWS)) * ROWS;
        first = seq.row0 + begin;
        n = min(seq.n_rows - begin, ROWS);
    }
};

} // namespace
} // namespace luce
