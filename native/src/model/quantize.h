// Gives the converters and tests ggml's quantizers.
#pragma once

#include "luce.h"

namespace luce {

void describe_type(int32_t type, luce_type_info *out);
void quantize(int32_t type, const float *src, uint64_t n_rows, uint64_t n_per_row, void *dst,
              uint64_t dst_size);

} // namespace luce
