// Says which heads and cells attention has kernels for.
#pragma once

#include "common/sizes.h"

namespace luce {

using HeadSizes = Sizes<64, 128, 256>; // D
using SummedHeadSizes = Sizes<128, 256>; // of which attention_heads adds a product's partial sums up
using KvTypes = Sizes<0, 1, 2, 8>; // ggml's F32, F16, Q4_0 and Q8_0

} // namespace luce
