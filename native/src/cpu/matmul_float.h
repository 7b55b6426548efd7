// Does rows_matmul's work for F32, F16 and BF16 weights.
#pragma once

#include "cpu/matmul.h"

namespace luce {

// Multiplies rows n0 .. n1 - 1 of w with rows t0 .. t1 - 1 of the step.
void multiply_floats(const RowsMatmulArgs &a, const RowsWeight &w, int64_t n0, int64_t n1, int t0, int t1);

} // namespace luce
