// Says which heads DeltaNet has kernels for.
#pragma once

#include "common/sizes.h"

namespace luce {

using StateSizes = Sizes<16, 32, 64, 128>; // S
using ChunkedStateSizes = Sizes<64, 128>; // of which long prompts are computed in chunks
using SummedStateSizes = Sizes<128>; // of which deltanet_layer adds a product's partial sums up
constexpr int CONV_TAPS = 4;

} // namespace luce
