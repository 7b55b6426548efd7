// Says how the blocks of rowmm's kernels are made up: teams and warps, and what they have of shared memory.
#pragma once

#include "common/warp.cuh"
#include "matmul/plan.h"

namespace luce {

// Without bulk copies the lanes of so many warps share each copy to a block's rings.
constexpr int COPY_WARPS = 2;

// NT is the number of tiles of 8 rows. A team is eight warps, of which each has 16 outputs of a tile. A
// block's teams have a range each, and share the stages of activations.
template <int NT, bool WIDE> struct Shape {
    static constexpr int TEAMS = NT == 8 ? 2 : 1, BLOCKS = BLOCKS_PER_SM / TEAMS;
    static constexpr int WARPS = TEAMS * FRAGMENTS; // so many take from the rings
    static constexpr int FILLERS = TEAMS == 1 ? 1 : 4; // so many fill them
    static constexpr int THREADS = (WARPS + FILLERS) * WARP;
    // Returns the threads of a block: without bulk copies COPY_WARPS warps fill.
    static ROWMM_BOTH constexpr int threads(bool bulk) {
        return bulk || TEAMS == 2 ? THREADS : (WARPS + COPY_WARPS) * WARP;
    }
    static constexpr int COLUMNS = 8 * NT;
    // Each holds the activations of a unit. For 16 rows four are 2% faster on an H200 than three, and these than two.
    static constexpr int STAGES = NT == 4 ? 2 : 4;
    static constexpr int BARRIERS = 384; // all of Rings' barriers fit so many bytes
    static_assert(BARRIERS >= 16 * STAGES + 16 * ROWMM_MAX_SLOTS + 8);
    // A stage is a chunk of as many columns as the step has.
    static ROWMM_BOTH constexpr int columns(int C) { return NT == 1 ? C : COLUMNS; }
    // Returns the bytes of barriers and so many stages.
    static ROWMM_BOTH constexpr int row_bytes(int C, int stages = STAGES) {
        return (BARRIERS + stages * chunk_bytes(C) + 127) / 128 * 128;
    }
};

// The kernel that norms its row itself (matmul/norm_first.cu) has the whole row ahead of its ring: all chunks, and their
// sums of squares.
struct NormShape : Shape<1, false> {
    static constexpr int BARRIERS = (2 * ROWMM_MAX_SLOTS + 1) * 8, X = (BARRIERS + 127) / 128 * 128;
    static ROWMM_BOTH constexpr int row_bytes_of(int chunks) {
        return (X + chunks * (chunk_bytes(1) + int(sizeof(float))) + 127) / 128 * 128;
    }
};

// The kernel whose blocks have all of K (matmul/whole_k.cu) has a barrier for each warp's weights, and one for the rows.
constexpr int WHOLE_WARPS = 16, WHOLE_BARRIERS = 256;
static_assert((WHOLE_WARPS + 1) * 8 <= WHOLE_BARRIERS);

constexpr int SUM_THREADS = 256; // what adds up parts has so many

// Of what packs rows, a block of the kernels that most launches of a step have has a chunk, and a thread two values. The others
// have few warps, so that the rows of a small step are spread over multiprocessors, and a warp has a chunk.
constexpr int PAIR_THREADS = CHUNK / 2, PACK_WARPS = 2;

} // namespace luce
