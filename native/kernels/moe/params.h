// Has what the kernels of up and down are told (moe/matmul.cu), and how much their blocks hold.
#pragma once

#include "common/small_shared.h"
#include "common/warp.cuh"
#include "moe/matrix.h"
#include "moe/plan.h"

namespace luce {

constexpr int ITEM_THREADS = ITEM_WARPS * WARP;
constexpr int MAX_SLOTS = 4; // a warp has so many units in shared memory at most
constexpr int MAX_TASKS = ITEM_THREADS / MAX_ITEM_ROWS; // a block lists so many
constexpr int SHARED = -1, NONE = -2; // these stand in an expert's place
constexpr int BARRIER_BYTES = ((ITEM_WARPS * MAX_SLOTS + 6) * 8 + 127) / 128 * 128;
// In up of one row each warp has a barrier for its units, and the row has one.
constexpr int ONE_BARRIERS = ((ITEM_WARPS + 1) * 8 + 127) / 128 * 128;
constexpr int BLOCKS_SM = 2; // a multiprocessor has so many blocks at once: a third would spill registers
constexpr int SMALL_BLOCKS_SM = 3; // the same of steps of one row and a few more, whose kernels are smaller
// Registers are shared out among so many blocks. Where a multiprocessor has 100 KB of shared memory (8.6, 8.9 and 12.0), there is no
// room for three of the fewest rows' blocks, nor for two of many rows', whose threads then would keep 28 to 112 bytes in memory.
// With three on 8.0, whose memory is slower, the fewest rows' would keep 64.
#if SMALL_SHARED
constexpr int FEWEST_BLOCKS = 2, MANY_BLOCKS = 1;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int FEWEST_BLOCKS = 2, MANY_BLOCKS = BLOCKS_SM;
#else
constexpr int FEWEST_BLOCKS = SMALL_BLOCKS_SM, MANY_BLOCKS = BLOCKS_SM;
#endif
// The kernels declare so many bytes of shared memory: that of some rows, of FEWEST_ROWS, up of one row, and that of many.
constexpr int BLOCK_OWN = 11776, FEWEST_OWN = 3648, ONE_OWN = 3840, MANY_OWN = 8832;
// Many rows are in shared memory for so many chunks at once.
constexpr int MANY_STAGES = 2, MANY_STAGE = MANY_ROWS * chunk_bytes(1);
// Those that wgmma multiplies are so too, as it reads them.
template <int ROWS> struct WideShape {
    static constexpr int STAGES = 3, STAGE = chunk_bytes(ROWS);
    static constexpr int GROUP = 4; // so many steps are in flight while as many are made
    static constexpr int OWN = 284 * ROWS; // what the kernel declares of shared memory
};

struct Group { // it is for the experts, or for the shared expert
    Matrix matrices[2];
    int32_t N, K, chunks, fragments, record;
    // K has so many parts, of which so many warps have their own, and a block has so many sixteenths at once.
    int32_t log_parts, log_across, log_fragments;
    int32_t tasks; // an item has so many

    // Returns the first unit of a part of K.
    ROWMM_BOTH int begin(int part, int units) const { return (chunks * part >> log_parts) * units; }
};

struct MatmulParams {
    uint8_t *routed;
    const float *h; // it is null where the rows are those that route packed
    const uint8_t *records; // h packed, a record for each place, or null
    float *out;
    int64_t out_row, h_row;
    int32_t T, n_used, n_expert, n_shared, max_items;
    int32_t activation;
    int32_t log_matrices, slot_bytes, slots;
    int32_t row_bytes, capacity; // so many rows are in shared memory, so far from each other
    int32_t item_rows, steps; // an item has so many rows at most, and a task so many steps of outputs
    Group experts, shared;
    MoeDims dims;
    RoutedLayout at;

    // Counts the tasks of so many of the experts' items and of all of the shared expert's, which come first.
    ROWMM_BOTH int tasks_of(int items) const { return n_shared * shared.tasks + items * experts.tasks; }
};

// Says which item a task is of: the shared expert's are below zero.
struct TaskAt {
    int item, x;

    ROWMM_BOTH TaskAt(const MatmulParams &p, int task) {
        const int of_experts = task - p.n_shared * p.shared.tasks;
        const bool shared = of_experts < 0;
        const int tasks = shared ? p.shared.tasks : p.experts.tasks, at = shared ? task : of_experts;
        item = at / tasks - (shared ? p.n_shared : 0);
        x = at % tasks;
    }
};

} // namespace luce
