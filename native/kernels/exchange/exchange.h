// Ranks are devices that have a part of each matrix each (model/model.h). Behind products whose K they share, each has a part of
// every sum, and needs all: x + (p0 + p1 ..), added in the order of the ranks, so that all have the same bits.
//
// On GPUs each rank has a box, in its own memory or, where the devices do not reach each other's, in pinned memory of the host.
// A rank's kernel puts its part into the boxes of all others, says so there by a number that grows by one with each exchange, waits
// until all have said so in its own, and adds. A block does so for its values alone. A step's few values have no number: their place
// holds bits that none of them has until one arrives, and who has read it puts those bits back. So nothing is fenced: with a
// number beside each value the 27B took 3.42 ms a token on two H200s, and a step alone 3.79 with a number a block. Slots alternate:
// who writes a slot again has heard in between, through the exchange that had the other slot, that the readers are done: each
// sends when all that is ahead of it has ended. A step begins when all of the step before has ended.
#pragma once

#include "matmul/layout.h"
#include "matmul/quantised.h"

namespace luce {

constexpr int MAX_RANKS = 8;

struct AddPartsArgs {
    int64_t E, T;
    const float *x; // [T][E]; null: there is none
    int32_t n_parts;
    const float *parts[MAX_RANKS]; // [T][E] each
    float *out; // [T][E]
};

// The rows of the output matrix, of V, that a rank has: whole tiles, as equal as can be. The last rank, which chooses tokens, has
// the first ones, so that those of a whole matrix are its part too.
struct OutputRows {
    int64_t first, n;
};
constexpr bool has_output_rows(int64_t V, int64_t n_ranks) {
    return V % 4 == 0 && tiles_of(V) >= n_ranks;
}
constexpr ROWMM_BOTH OutputRows output_rows(int64_t V, int64_t n_ranks, int64_t rank) {
    const int64_t i = (rank + 1) % n_ranks, tiles = tiles_of(V);
    const int64_t first = tiles * i / n_ranks * TILE, end = tiles * (i + 1) / n_ranks * TILE;
    return {first, (end < V ? end : V) - first};
}
constexpr int64_t most_output_rows(int64_t V, int64_t n_ranks) {
    int64_t most = 0;
    for (int64_t rank = 0; rank < n_ranks; rank++) {
        const int64_t n = output_rows(V, n_ranks, rank).n;
        most = n > most ? n : most;
    }
    return most;
}

// Of rows' logits each rank has some: those of its rows of the output matrix.
struct GatherPartsArgs {
    int64_t V, T;
    int32_t n_parts;
    const float *parts[MAX_RANKS]; // [T][n] each, in the order of the matrix's rows
    int64_t n[MAX_RANKS];
    float *out; // [T][V]
};

constexpr int EXCHANGE_BLOCKS = 2048; // of an exchange whose blocks have numbers, at most

// A box holds two slots of so many values from each other rank, of prompts and of steps, and a number from each rank's block.
// Both numbers of values are multiples of 4. All of its bytes are 0xff when nothing was sent: no number, and no value.
constexpr int EXCHANGE_NOTHING = 0xff;
constexpr int64_t exchange_box_bytes(int64_t n_ranks, int64_t values, int64_t step_values) {
    return 2 * (n_ranks - 1) * (values + step_values) * int64_t(sizeof(float)) +
           n_ranks * EXCHANGE_BLOCKS * int64_t(sizeof(uint32_t));
}
// The numbers that a rank's blocks have reached, and behind them 1 where it has waited in vain and waits no more.
constexpr int64_t EXCHANGE_COUNTS = EXCHANGE_BLOCKS + 1;

// Where a rank meets the others.
struct ExchangeRanks {
    int32_t rank, n_ranks;
    int32_t slot; // 0 and 1 in turn, from one exchange of a step to the next
    int32_t *counts; // [EXCHANGE_COUNTS], this rank's
    int32_t *failure; // [1] in host memory: 1 + the rank that did not answer
    void *boxes[MAX_RANKS]; // each rank's
    int64_t values, step_values; // that a slot has room for
};

// Rows of many values: prompts'.
struct ExchangeArgs {
    int64_t E, T; // E is a multiple of 4
    const float *x; // [T][E]; null: there is none
    const float *part; // [T][E], this rank's
    float *out; // [T][E]
    ExchangeRanks ranks;
};

// The same of logits: the last rank has those of all afterwards.
struct GatherArgs {
    int64_t V, E, T; // a rank has E of V, multiples of 4
    const float *part; // [T][E], this rank's (output_rows)
    float *out; // [T][V] of the last rank; others write nothing
    ExchangeRanks ranks;
};

// As rowmm_pack does with parts (RowmmPackArgs): the sum over K that a launch has left in parts is this rank's part. What follows
// reads x + the sum of all ranks' packed, times a norm's weights.
struct ExchangeNormArgs {
    RowmmPackArgs pack; // with input ROWMM_RMS, parts, w and x
    ExchangeRanks ranks;
};

namespace cuda {
int exchange(const ExchangeArgs &args, void *stream);
int exchange_norm(const ExchangeNormArgs &args, void *stream);
int gather(const GatherArgs &args, void *stream);
} // namespace cuda

} // namespace luce
