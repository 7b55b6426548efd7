// Launches rowmm: picks the kernel that its plan says (matmul/launch_plan.h), for each set of rows.
#include "common/pointers.h"
#include "matmul/launch_plan.h"
#include "matmul/results.cuh"

#include <algorithm>

namespace luce {
namespace {

bool valid(const RowmmArgs &a) {
    if (a.T < 0 || a.T > ROWMM_MAX_ROWS || a.n_weights < 1 || a.n_weights > ROWMM_MAX_WEIGHTS ||
        !aligned(a.x) || !aligned(a.scratch) || !aligned(a.parts)) {
        return false;
    }
    if (a.row != nullptr && (a.T > 1 || a.normed == 0 || a.norm == nullptr)) {
        return false;
    }
    int64_t units = 0;
    for (int i = 0; i < a.n_weights; i++) {
        const RowmmWeights &w = a.weights[i];
        if (rowmm_packed_bytes(w.type, a.K, w.N) == 0 || w.N > INT32_MAX - TILE || !aligned(w.packed)) {
            return false;
        }
        units += tiles_of(w.N) * chunks_of(a.K) * units_of_chunk(w.type);
    }
    return units <= INT32_MAX;
}

// Adds the parts of the tile that begins in a range and does not end there. The grid is {ranges, rows}, and a
// thread has 4 outputs.
__global__ void __launch_bounds__(SUM_THREADS) sum_kernel(const __grid_constant__ RowmmParams p) {
    let_next_start();
    const int range = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    const OpenTile tile(p, range);
    wait_for_previous();
    if (tile.from == range && tile.to > range && i < p.rows * (TILE / 4)) {
        add_parts(p, tile, i);
    }
}

RowmmKernel ring_kernel(int columns, bool wide) {
    switch (columns) {
        case 1: return rowmm_kernel_of<1, false, 1>();
        case 2: return rowmm_kernel_of<1, false, 2>();
        case 4: return rowmm_kernel_of<1, false, 4>();
        case 8: return rowmm_kernel_of<1, false, 8>();
        case 16: return rowmm_kernel_of<2, false, ANY>();
        case 32: return wide ? rowmm_kernel_of<4, true, ANY>() : rowmm_kernel_of<4, false, ANY>();
        default: return rowmm_kernel_of<8, true, ANY>();
    }
}

RowmmKernel kernel_of(const RowmmPlan &plan) {
    return plan.way == RowmmWay::NORM_FIRST ? rowmm_kernel_norm()
           : plan.way == RowmmWay::WHOLE_K  ? rowmm_kernel_whole()
                                            : ring_kernel(plan.params.columns, plan.rows.wide);
}

// Launches the product of a set of rows, and what adds up its parts, where there are any.
cudaError_t launch(const RowmmPlan &plan, cudaStream_t stream, bool overlap) {
    const RowmmParams &p = plan.params;
    const cudaError_t launched = launch_kernel(kernel_of(plan), plan.product, stream, overlap, p);
    if (launched != cudaSuccess || plan.way == RowmmWay::WHOLE_K || p.parts != nullptr) {
        return launched;
    }
    return launch_kernel(sum_kernel, plan_sum(p), stream, overlap, p);
}

} // namespace

bool rowmm_norms_row(const DeviceLimits &device, int64_t K, int32_t type) {
    return norm_first_shared(K, type) <= device.shared_block;
}

static int64_t tiles_of_all(const RowmmArgs &args) {
    int64_t tiles = 0;
    for (int i = 0; i < args.n_weights; i++) {
        tiles += tiles_of(args.weights[i].N);
    }
    return tiles;
}

int64_t rowmm_parts_bytes(const RowmmArgs &args) {
    // at least the rows of any layout
    const int64_t rows = args.T <= SET ? args.T : (args.T + SET - 1) / SET * SET;
    return (ROWMM_MAX_RANGES + tiles_of_all(args)) * rows * TILE * int64_t(sizeof(float));
}

int rowmm_parts_of(const RowmmArgs &args, RowmmParts &parts) {
    DeviceLimits device;
    if (!valid(args) || args.parts == nullptr || args.n_weights > 4) {
        return int(cudaErrorInvalidValue);
    }
    if (const int error = cuda::device_limits(device); error != 0) {
        return error;
    }
    RowmmParams p = {};
    plan_ranges(p, args, device);
    const RowsLayout layout(args.T, device.wgmma);
    parts.parts = args.parts;
    parts.set = layout.set;
    parts.rows = std::min(args.T, layout.set);
    parts.set_size = (p.ranges + tiles_of_all(args)) * parts.rows * TILE;
    parts.ranges = p.ranges;
    for (int i = 0; i < args.n_weights; i++) {
        const RowmmSegment &s = p.segments[i];
        parts.weights[i] = {s.first_unit, s.first_tile, s.units_k};
    }
    std::copy(p.first, p.first + p.ranges + 1, parts.first);
    return 0;
}

int64_t cuda::rowmm_scratch_bytes() {
    DeviceLimits device;
    if (device_limits(device) != 0) {
        return 0;
    }
    return int64_t(most_ranges(device)) * 2 * ROWMM_MAX_ROWS * TILE * int64_t(sizeof(float));
}

int cuda::rowmm(const RowmmArgs &args, void *stream) {
    DeviceLimits device;
    if (!valid(args)) {
        return int(cudaErrorInvalidValue);
    }
    if (args.T == 0) {
        return 0;
    }
    if (const int error = device_limits(device); error != 0) {
        return error;
    }
    RowmmPlan plan = plan_rowmm(device, args);
    if (!plan.fits) {
        return int(cudaErrorInvalidConfiguration);
    }
    RowmmParams &p = plan.params;
    const int set = plan.rows.set;
    for (int row = 0; row < args.T; row += set) {
        p.rows = std::min(args.T - row, set);
        if (const cudaError_t error = launch(plan, static_cast<cudaStream_t>(stream), args.overlap != 0);
            error != cudaSuccess) {
            return int(error);
        }
        p.x += p.x == nullptr ? 0 : chunks_of(args.K) * chunk_bytes(p.columns);
        p.squares += p.squares == nullptr ? 0 : int64_t(set) * p.n_squares;
        p.parts += p.parts == nullptr ? 0 : (p.ranges + tiles_of_all(args)) * int64_t(p.part_rows) * TILE;
        for (int i = 0; i < p.n_segments; i++) {
            RowmmSegment &s = p.segments[i];
            s.out += set * s.out_row;
            s.residual += s.residual == nullptr ? 0 : set * s.residual_row;
        }
    }
    return 0;
}

} // namespace luce
