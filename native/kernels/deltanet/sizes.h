// Says which heads DeltaNet has kernels for.
#pragma once

#include "common/sizes.h"

namespace luce {

using StateSizes = Sizes<16, 32, 64, 128>; // S
using ChunkedStateSizes = Sizes<64, 128>; // of which long prompts are computed in chunks
using SummedStateSizes = Sizes<128>; // of which deltanet_layer adds a product's partial sums up
constexpr int CONV_TAPS = 4;

// Says in a file's words what a layer of Hk key heads and Hv value heads of S values lacks, or "" where it lacks nothing.
inline std::string delta_lacks(int64_t S, int64_t Hk, int64_t Hv) {
    if (!StateSizes::has(S)) {
        return "ssm.state_size is " + std::to_string(S) + ": luce runs " + StateSizes::text();
    }
    if (Hk < 1 || Hv < 1 || Hv % Hk != 0) {
        return "ssm.time_step_rank is " + std::to_string(Hv) + ", no multiple of ssm.group_count, which is " +
               std::to_string(Hk);
    }
    return "";
}
inline std::string conv_lacks(int64_t taps) {
    return taps == CONV_TAPS
               ? ""
               : "ssm.conv_kernel is " + std::to_string(taps) + ": luce runs " + std::to_string(CONV_TAPS);
}

} // namespace luce
