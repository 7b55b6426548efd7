// Says what a launch of rowmm does, as its blocks read it, and which part of it each block has.
//
// All units of all weights of a launch, in order, are cut into `ranges` of about equal bytes, and a block has
// one range or two. The cut depends on the weights' shapes and the device's multiprocessors alone. What a range has
// of a tile (128 outputs, all of K) is a part. The parts of a tile are added in the order of ranges, by a
// kernel behind or by whoever reads them.
#pragma once

#include "matmul/layout.h"

namespace luce {

constexpr int ROWMM_MAX_RANGES = 384;
constexpr int BLOCKS_PER_SM = 2;

struct RowmmSegment {
    const uint8_t *packed;
    const float *output_scale; // [N]; null says that there is none
    float *out;
    const float *residual;
    int64_t out_row, residual_row;
    int32_t N, type;
    int32_t first_unit, n_units; // first_unit counts in the launch, n_units counts this matrix's
    int32_t first_tile; // it counts in the launch
    int32_t units_k; // K has so many units
    int32_t whole_units; // so many units are of tiles of 128 outputs; those that follow are narrower
    int32_t last_fragments; // each of those has so many fragments
    int32_t fragment_bytes;
    int32_t vectors; // 1 says that rows of out and residual are whole and aligned float4
};

// Two ranges of one block, which begin at the same k or nearly so.
struct RowmmPair {
    uint16_t range[2]; // the second is `ranges` where there is none
    // The second begins so many stages after the first, and shares its stages of activations; -1: none.
    int16_t apart;
};

struct RowmmParams {
    const uint8_t *x;
    // This is [ranges][2][rows][TILE]. The two are the tile that the range began in the middle, and the tile
    // that it left unfinished.
    float *partial;
    float *parts; // it is null, or has the parts of all tiles: [range + tile][part_rows][TILE]
    const float *squares; // it is null, or [rows][n_squares] sums of squares of x before its norm
    int32_t n_squares, part_rows;
    float K, eps; // the norm needs both
    // They are null, or x in F32 [K], which the kernel packs itself, and the weights of its norm [K].
    const float *row, *norm;
    int32_t columns, rows; // a chunk of x has `columns`, of which `rows` are rows
    int32_t n_segments, ranges;
    int32_t slots, slot_bytes; // the ring of weights has so many slots of so many bytes
    RowmmSegment segments[ROWMM_MAX_WEIGHTS];
    int32_t first[ROWMM_MAX_RANGES + 1]; // a range begins at this unit
    RowmmPair pairs[(ROWMM_MAX_RANGES + 1) / 2];
    // The ring of activations has so many stages: fewer than Shape's with 100 KB of shared memory alone.
    int32_t stages;
};
static_assert(sizeof(RowmmParams) <= 4096, "these are a kernel's parameters");

// Says where the parts of a launch lie, for whoever adds them.
struct RowmmParts {
    const float *parts; // [set][range + tile][rows][TILE]
    int64_t set_size; // values
    int32_t set, rows; // a set of the step has `set` rows, and a set of parts has `rows`
    int32_t ranges;
    struct {
        int32_t first_unit, first_tile, units_k;
    } weights[4];
    int32_t first[ROWMM_MAX_RANGES + 1];
};
int rowmm_parts_of(const RowmmArgs &args, RowmmParts &parts);

// Returns the kernel (matmul/kernel.cuh, whose blocks are a Shape) of NT tiles of 8 rows, by wgmma where WIDE. Its number of
// rows is KNOWN when it is compiled, or ANY up to 8 NT. matmul/forms.cu lists those that there are. mma.sync serves up to 8
// rows, by kernels of 1, 2, 4 and 8 columns, whose addresses are known, and up to 16 and 32. wgmma serves up to 32 and 64,
// where there is wgmma. All give the same bits.
using RowmmKernel = void (*)(RowmmParams);
constexpr int ROWMM_MAX_SLOTS = 16;
constexpr int ANY = 0;
template <int NT, bool WIDE, int KNOWN> RowmmKernel rowmm_kernel_of();

// This is the kernel of up to ROWMM_WHOLE_ROWS rows of one weight that is not normed, whose blocks have all of K
// (matmul/whole_k.cu).
RowmmKernel rowmm_kernel_whole();

// This is the kernel of one row that is not packed (matmul/norm_first.cu).
RowmmKernel rowmm_kernel_norm();

} // namespace luce
