// Decides which rows of a prompt are its tail, as a pure function of the device and the model: a tail's rows have other bits than
// a prompt's, so nothing that an engine is opened with may move where it begins.
#pragma once

#include "common/device_limits.h"

namespace luce {

// A prompt's tail is its rows past the last multiple of so many positions, if they are few. They are multiplied as a step's rows
// are, since a prompt's product reads or writes out all weights as F16. A tail is a prompt's end wherever its beginning came
// from, so its bits are the same; a longer prompt reads these rows again.
constexpr uint32_t TAIL = 128;

// Returns how many rows a tail has at most: more than these are read with the rows ahead of them. On a GPU, to write out all weights
// takes as long as the steps' matmul for about TAIL rows (on an H200). Where it keeps all of them as F16, TAIL rows took 20.8 ms
// there and a tail of 100 took 24.6 (27b; 64: 14.1). That is so where the copies leave as much free beside the weights as they take,
// whatever of them an engine of long contexts then has room for. On a CPU a pass reads the same weights either way.
inline uint32_t longest_tail(const DeviceLimits *gpu, uint64_t memory, uint64_t weights, uint64_t copies) {
    const bool copied = gpu != nullptr && gpu->wgmma && weights + 2 * copies <= memory;
    return gpu == nullptr || copied ? TAIL / 2 : TAIL - 1;
}

} // namespace luce
