// Stands in for what matmul/quantised.cu says of a launch, where a check does not link it. The cut is one of its own, since rowmm's
// depends on the device.
#include "matmul/plan.h"

#include <algorithm>

__attribute__((weak)) int luce::rowmm_parts_of(const RowmmArgs &args, RowmmParts &parts) {
    int units = 0, tiles = 0;
    for (int i = 0; i < args.n_weights; i++) {
        parts.weights[i] = {units, tiles, int32_t(chunks_of(args.K))};
        tiles += int(tiles_of(args.weights[i].N));
        units += int(tiles_of(args.weights[i].N) * chunks_of(args.K));
    }
    parts.parts = args.parts;
    parts.set = SET;
    parts.rows = std::min(args.T, SET);
    parts.ranges = std::min(13, units);
    parts.set_size = int64_t(parts.ranges + tiles) * parts.rows * TILE;
    for (int r = 0; r <= parts.ranges; r++) {
        parts.first[r] = units * r / parts.ranges;
    }
    return 0;
}
