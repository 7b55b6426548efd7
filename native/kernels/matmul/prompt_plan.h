// Plans a prompt's product with sums in F16 (matmul/prompt_f16.cu), as a pure function of a device's limits and the shape.
#pragma once

#include "common/device_limits.h"
#include "common/launch_plan.h"

#include <algorithm>
#include <iterator>

namespace luce {

// So many products of F16 are summed in F16 before the sum goes on in F32. Rows are packed with |x| < 4 (gemm_pack), so that
// 64 products with weights up to 255 stay below 65,504, the largest F16, whatever their signs.
constexpr int F16_SUM = 64;
constexpr int F16_SUM_MOST_X = 4, F16_SUM_MOST_W = 255;
static_assert(F16_SUM * F16_SUM_MOST_X * F16_SUM_MOST_W < 65504);

// A block has a tile of rows and outputs, and a ring of stages, of F16_STAGE values of K each.
constexpr int F16_STAGES = 4, F16_STAGE = 32, F16_THREADS = 256;
struct F16Tile {
    int rows, outputs;
    // What a result of it costs beside one of the largest tile, where multiprocessors are full: smaller ones read more of L2 and
    // shared memory. No such card was there to measure it.
    int cost;
    constexpr int shared() const { return F16_STAGES * (rows + outputs) * F16_STAGE * 2; }
};
constexpr F16Tile F16_TILES[] = {{128, 192, 20}, {128, 128, 22}, {64, 128, 26}};

struct F16Plan {
    int tile; // of F16_TILES
    LaunchPlan launch;
};
inline LaunchPlan plan_f16_tile(const F16Tile &tile, int64_t T, int64_t N) {
    const int64_t blocks = (T + tile.rows - 1) / tile.rows * ((N + tile.outputs - 1) / tile.outputs);
    return {int(blocks), 1, 1, F16_THREADS, tile.shared()};
}
// Takes the tile whose blocks end first, if a multiprocessor takes as long for each as its results cost. No bit depends on it.
inline F16Plan plan_f16_sums(const DeviceLimits &device, int64_t T, int64_t N) {
    F16Plan best = {-1, {}};
    int64_t least = INT64_MAX;
    for (int i = 0; i < int(std::size(F16_TILES)); i++) {
        const F16Tile &tile = F16_TILES[i];
        const LaunchPlan plan = plan_f16_tile(tile, T, N);
        const int64_t each = (int64_t(plan.x) + device.multiprocessors - 1) / device.multiprocessors;
        const int64_t time = each * tile.rows * tile.outputs * tile.cost;
        if (plan.shared <= device.shared_block && time < least) {
            least = time;
            best = {i, plan};
        }
    }
    return best;
}

} // namespace luce
