// Says what a launch of rowmm does, as its blocks read it, and which part of it each block has.
//
// All units of all weights of a launch, in order, are cut into `ranges` of about equal bytes; a block has one. The cut
// depends on the weights' shapes and the device's multiprocessors alone. A tile (128 outputs, all of K) that two or
// more ranges share is summed by the block that finishes last, in the order of ranges, from partial sums in scratch.
#pragma once

#include "rowmm_layout.h"

namespace luce {

constexpr int ROWMM_MAX_RANGES = 512;
constexpr int BLOCKS_PER_SM = 2;

struct RowmmSegment {
    const uint8_t *packed;
    const float *output_scale; // [N], null: none
    float *out;
    const float *residual;
    int64_t out_row, residual_row;
    int32_t N, type;
    int32_t first_unit, n_units; // in the launch; of this matrix
    int32_t units_k; // units along K
    int32_t whole_units; // units of tiles of 128 outputs: those that follow are narrower
    int32_t last_fragments; // of each of those
    int32_t fragment_bytes;
    int32_t vectors; // 1: rows of out and residual are whole and aligned float4
};

struct RowmmParams {
    const uint8_t *x;
    float *partial; // [ranges][2: the tile it began in the middle, the tile it left unfinished][rows][TILE]
    uint32_t *counters; // [ranges] how many ranges have left their part of the tile that begins in this one
    int32_t columns, rows; // of a chunk of x; how many of them are rows
    int32_t n_segments, ranges;
    int32_t slots, slot_bytes; // of the ring of weights
    RowmmSegment segments[ROWMM_MAX_WEIGHTS];
    int32_t first[ROWMM_MAX_RANGES + 1]; // unit at which a range begins
};

// The kernels (rowmm_kernel.cuh), each compiled on its own: for up to 8, 16 and 32 rows with mma.sync, for up to 32 and
// 64 with wgmma. mma.sync and wgmma give the same bits.
struct RowmmKernel {
    void (*kernel)(RowmmParams);
    int threads;
    int row_bytes; // of shared memory, before the ring of weights
    int blocks; // on a multiprocessor at once
};
constexpr int ROWMM_MAX_SLOTS = 16;
RowmmKernel rowmm_kernel_8();
RowmmKernel rowmm_kernel_16();
RowmmKernel rowmm_kernel_32();
RowmmKernel rowmm_kernel_32_wide();
RowmmKernel rowmm_kernel_64_wide();

// Whether the current device has wgmma and the wide kernels were compiled for it.
bool rowmm_has_wgmma();

} // namespace luce
