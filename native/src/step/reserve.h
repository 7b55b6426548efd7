// Reckons what a device needs beyond buffers, caches and captured graphs, as a pure function of the card and the model.
#pragma once

#include "common/device_limits.h"
#include "matmul/prompt.h"

#include <algorithm>
#include <set>
#include <utility>

namespace luce {

// Returns bytes: cuBLAS's workspace; what it chooses its algorithms with, for matrices {K, N}; code that is loaded when it is first
// run; and what the driver sets aside for threads' own memory, which is for all that run at once. It is half as much again, since
// the last two are guesses: the 27b took 128 MiB on an H200, captured graphs among them, where this is 270. It was 416 MiB for all.
inline uint64_t device_reserve(const DeviceLimits &device,
                               const std::set<std::pair<int64_t, int64_t>> &matrices) {
    constexpr uint64_t MOST = uint64_t(416) << 20, CODE = uint64_t(64) << 20;
    constexpr uint64_t THREADS = 2048,
                       OWN = 256; // a multiprocessor runs so many threads, of so many bytes each
    uint64_t trial = 0;
    for (const auto &[K, N] : matrices) {
        if (gemm_has(K, N)) {
            trial = std::max(trial, uint64_t(gemm_trial_bytes(K, N)));
        }
    }
    const uint64_t own = uint64_t(device.multiprocessors) * THREADS * OWN;
    return std::min((uint64_t(GEMM_WORKSPACE) + trial + CODE + own) / 2 * 3, MOST);
}

} // namespace luce
