// Has the index arithmetic of a mixture of experts (moe.h), for host and device. It says what route leaves
// and where, how rows make items, and which part of a matrix each warp has.
#pragma once

#include "matmul/layout.h"
#include "moe/moe.h"

namespace luce {

constexpr int MAX_ITEM_ROWS = 8; // each row is a column of the tensor core's tile
// Many rows, which a prompt has, make wider items: then a fragment is made into operands for all of them at once. Fewer would
// leave most of an item empty.
constexpr int MANY_ROWS = 32, MANY_FROM = 384;
// By wgmma they are wider still, where an expert has so many rows on average. On an H200 prompts of 2,048 of the 35b-a3b took 72.8 ms
// without it and 68.3 with it, those of the 26b-a4b 79.3 and 75.1. Up and down of 512 rows, 16 an expert, would take half as long again.
constexpr int WIDE_ROWS = 80, WIDE_FROM = 48;
constexpr int ITEM_WARPS = 8; // a block of up and down has so many warps

// An item is up to item_rows rows of one expert: places[first .. first + count) of the routed list.
struct MoeItem {
    int32_t expert, first, count, reserved;
};

constexpr ROWMM_BOTH int64_t align16(int64_t n) {
    return (n + 15) / 16 * 16;
}
constexpr ROWMM_BOTH int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

// ---- items ----

// Hopper has room for items of MAX_ITEM_ROWS, and its code knows it.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define MOE_MOST(dims) MAX_ITEM_ROWS
#else
#define MOE_MOST(dims) (dims).most
#endif

// Says whether a step has few rows: then up and down choose the experts themselves, there is no list, and an item has room
// for all rows. (Of very few rows up alone chooses: polled_pairs.) A pair is a row and one of its ranks.
constexpr int FEW_ROWS = MAX_ITEM_ROWS, FEW_PAIRS = 64;
constexpr ROWMM_BOTH bool few_rows(const MoeDims &d) {
    return d.T <= MOE_MOST(d) && d.T * d.n_used <= FEW_PAIRS;
}
// Says whether they are so few that a lane has one pair, and that three blocks at once on a multiprocessor are best.
constexpr int FEWEST_ROWS = 2;
constexpr ROWMM_BOTH bool fewest_rows(const MoeDims &d) {
    return d.T <= FEWEST_ROWS && d.T * d.n_used <= FEW_PAIRS / 2;
}

constexpr ROWMM_BOTH bool many_rows(const MoeDims &d) {
    return d.T >= MANY_FROM;
}
// Says whether wgmma multiplies them, which has its own order of a row's activations (matmul/layout.h).
constexpr ROWMM_BOTH bool wide_rows(const MoeDims &d) {
    return many_rows(d) && d.wide > 0;
}
// Returns how many rows an item has at most. Few rows of a step choose the same expert, and room for more would only
// keep other blocks from a multiprocessor.
constexpr ROWMM_BOTH int item_rows(const MoeDims &d) {
    return many_rows(d)                      ? (d.wide > 0 ? d.wide : MANY_ROWS)
           : few_rows(d) || d.T > 64         ? MOE_MOST(d)
           : MOE_MOST(d) < MAX_ITEM_ROWS / 2 ? MOE_MOST(d)
                                             : MAX_ITEM_ROWS / 2;
}

// Returns how many pairs of a step have an expert that up leaves as soon as it is chosen, so that who is behind up waits for it
// and need not choose too. Route leaves -1 there. It is 0 of more rows than were measured.
constexpr int POLLED_ROWS = 4;
constexpr ROWMM_BOTH int polled_pairs(const MoeDims &d) {
    return few_rows(d) && d.T <= POLLED_ROWS ? d.T * d.n_used : 0;
}

// The shared expert has all rows. Its items come first, and are known without route.
constexpr ROWMM_BOTH int shared_items(const MoeDims &d) {
    return d.shared() ? (d.T + item_rows(d) - 1) / item_rows(d) : 0;
}
// Returns how many items an expert with so many rows has.
constexpr ROWMM_BOTH int items_of(const MoeDims &d, int rows) {
    return (rows + item_rows(d) - 1) / item_rows(d);
}
// Returns the most items that the experts can have: an item that is not full is its expert's last.
constexpr ROWMM_BOTH int64_t max_items(const MoeDims &d) {
    const int64_t pairs = int64_t(d.T) * d.n_used, experts = least(d.n_expert, pairs);
    const int64_t most = item_rows(d);
    return d.T <= most ? experts : (pairs + (most - 1) * experts) / most;
}
// Returns the k-th of an expert's items, where `begin` is where its rows begin in the list.
constexpr ROWMM_BOTH MoeItem item_of(const MoeDims &d, int expert, int begin, int rows, int k) {
    const int most = item_rows(d);
    return {expert, begin + k * most, int32_t(least(rows - k * most, most)), 0};
}
// ---- what route leaves ----

// A row's activations are chunks of one column each (matmul/layout.h), side by side.
constexpr ROWMM_BOTH int64_t row_record(int64_t K) {
    return chunks_of(K) * chunk_bytes(1);
}
// Counts the logits of a row, of which that of the shared gate is the last.
constexpr ROWMM_BOTH int router_outputs(const MoeDims &d) {
    return d.n_expert + (d.gated() ? 1 : 0);
}
// Route packs so many rows for each of a step: a dense layer's are normed by weights of their own, and lie behind the experts'.
constexpr ROWMM_BOTH int packed_rows(const MoeDims &d) {
    return d.dense != 0 ? 2 : 1;
}
constexpr ROWMM_BOTH int64_t first_row(const MoeDims &d, bool shared) {
    return shared && d.dense != 0 ? d.T : 0;
}

// Says how far a row's logits lie from the next row's: a warp reads them by whole vectors, and may read beyond their end.
constexpr ROWMM_BOTH int logits_row(const MoeDims &d) {
    return (router_outputs(d) + 255) / 256 * 256;
}

struct RoutedLayout {
    // These are offsets, and at `head` lies the number of items.
    int64_t rows, ids, weights, open, logits, head, items, places, bytes;

    RoutedLayout() = default;
    ROWMM_BOTH RoutedLayout(const MoeDims &d) {
        const int64_t T = d.T, pairs = T * d.n_used;
        rows = 0;
        ids = align16(packed_rows(d) * T * row_record(d.E));
        weights = ids + align16(pairs * 4);
        open = weights + align16(pairs * 4);
        logits = open + align16(T * 4);
        head = logits + T * logits_row(d) * 4;
        items = head + 16;
        places = items + max_items(d) * int64_t(sizeof(MoeItem));
        bytes = places + align16(pairs * 4);
    }
};

// ---- which part of a matrix a warp has ----

// K is cut into so many parts, of whole chunks. Each is summed by itself, and they are added by pairs.
constexpr int MAX_PARTS = 4;
constexpr ROWMM_BOTH int k_parts(int64_t K) {
    return chunks_of(K) >= MAX_PARTS ? MAX_PARTS : chunks_of(K) >= 2 ? 2 : 1;
}
// Returns the logarithm of a power of two.
constexpr ROWMM_BOTH int log2_of(int n) {
    return n == 1 ? 0 : 1 + log2_of(n / 2);
}
constexpr ROWMM_BOTH int first_chunk(int64_t K, int part) {
    return int(chunks_of(K) * part / k_parts(K));
}
// Returns how far a row's chunks lie apart in a block's shared memory. It is an odd number of 64 bytes, so
// that a column's banks differ from its neighbour's.
constexpr ROWMM_BOTH int shared_row(int64_t K) {
    return int(chunks_of(K) | 1) * chunk_bytes(1);
}

// ---- what a block needs ----

// A block of route has so many threads, up to so many rows, and so many of the router's outputs.
constexpr int ROUTE_THREADS = 256, ROUTE_ROWS = 8, ROUTE_OUTPUTS = 4;
// Of many rows up to so many, and so many outputs at a time. On an H200 2,048 rows of the 35b-a3b took 412 us by the blocks above,
// a fifth of the prompt.
constexpr int ROUTE_MANY_ROWS = 16, ROUTE_MANY_OUTPUTS = 16;
// The block that makes the list of many rows has the experts of all pairs in shared memory, and behind these a count of each
// expert's rows for each warp.
constexpr ROWMM_BOTH int64_t route_ids_bytes(const MoeDims &d) {
    return align16(int64_t(d.T) * d.n_used * 2);
}
constexpr ROWMM_BOTH int64_t route_list_bytes(const MoeDims &d) {
    return route_ids_bytes(d) + ROUTE_THREADS / 32 * MOE_MAX_EXPERTS * 4;
}
constexpr int64_t ONE_ROW_MAX_E =
    2048; // the kernel whose blocks have one row each has rows of so many values at most
constexpr int64_t CANDIDATE_BYTES = 1056; // a row's experts that may be chosen take so much (moe/choice.cuh)
constexpr int SUM_WARPS =
    2; // a block of sum has few, so that a small step's rows are spread over multiprocessors
// A block of end has so many warps at most, of which so many share a place: the 35b-a3b's have 18.
constexpr int END_WARPS = 20, END_ACROSS = 2;
// The kernels' own variables and barriers take less than so many bytes beside rows and weights.
constexpr int64_t ROUTE_BESIDES = 3072, MATMUL_BESIDES = 12288;

// Where a block of route has no room for ROUTE_ROWS it has fewer, and at least so many: each tile of rows has a counter.
constexpr int LEAST_ROUTE_ROWS = 5;
static_assert((MOE_MAX_ROWS + LEAST_ROUTE_ROWS - 1) / LEAST_ROUTE_ROWS + 1 <= MOE_COUNTER_BYTES / 4);

// Returns the bytes of shared memory that a block needs for any T, where an item of a step has `rows` at most. The units are the
// largest fragments of the matrices of up and of down, in bytes.
constexpr ROWMM_BOTH int64_t least_shared(const MoeDims &d, int64_t up_unit, int64_t down_unit, int rows) {
    const int64_t route = ROUTE_BESIDES + LEAST_ROUTE_ROWS * d.E * int64_t(sizeof(float));
    const int64_t up = MATMUL_BESIDES + ITEM_WARPS * up_unit + rows * shared_row(d.E);
    const int64_t down = MATMUL_BESIDES + ITEM_WARPS * down_unit + rows * shared_row(d.h_row());
    const int64_t most = up > down ? up : down;
    return most > route ? most : route;
}

} // namespace luce
