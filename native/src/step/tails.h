// Decides which rows of a prompt are its tail, as a pure function of the device and the model: a tail's rows have other bits than
// a prompt's, so nothing that an engine is opened with may move where it begins.
#pragma once

#include "common/device_limits.h"

namespace luce {

// A prompt's tail is its rows past the last multiple of so many positions, if they are few. They are multiplied as a step's rows
// are, which is sooner for few: a prompt's products read or write out all weights as F16. A tail is a prompt's end wherever its
// beginning came from, so its bits are the same; a longer prompt reads these rows again.
constexpr uint32_t TAIL = 128;

// Returns how many rows a tail has at most; more are read with the rows ahead of them. `gpu` is null on a CPU, where a pass reads
// the same weights either way. To write out all weights takes an H200 as long as the steps' matmul takes for about TAIL rows. Where
// it has copies of all as F16, a prompt's TAIL rows took 20.8 ms, a tail of 100 rows 24.6 and one of 64 14.1 (27b). A device counts
// as having them where they would leave as much memory free as they take, whether or not a long context is given that memory.
inline uint32_t longest_tail(const DeviceLimits *gpu, uint64_t memory, uint64_t weights, uint64_t copies) {
    const bool copied = gpu != nullptr && gpu->wgmma && weights + 2 * copies <= memory;
    return gpu == nullptr || copied ? TAIL / 2 : TAIL - 1;
}

} // namespace luce
