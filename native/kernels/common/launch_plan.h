// Says how a kernel is launched. Each chapter's launch_plan.h makes these of a device's limits and a shape.
#pragma once

#include <stdint.h>

namespace luce {

struct LaunchPlan {
    int x = 1, y = 1, z = 1; // the grid has so many blocks
    int threads = 0; // of a block
    int64_t shared = 0; // a block's bytes of shared memory, beside what its kernel declares
};

constexpr int divided(int64_t n, int64_t by) { // rounded up
    return int((n + by - 1) / by);
}

} // namespace luce
