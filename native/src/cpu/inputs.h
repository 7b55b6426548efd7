// Makes the inputs of the CPU's matmuls: what ggml would compute in several nodes, each of them a pass over the rows by one
// thread, is one op, which leaves both forms that a weight may take. A row's bits do not depend on the other rows.
#pragma once

#include "cpu/matmul.h"
#include "graph/blocks.h"

namespace luce {

// An input of T rows of K values, from x [T][K]:
//   with z      RMS(x) * w * silu(z), the mean over each head of S values
//   with up     silu(x) * up
//   with w      RMS(x + residual) * w, where the residual may be null
struct RowsInputArgs {
    int32_t T;
    int64_t K, S; // of a norm S is that of w, else 0
    float eps;
    const float *x, *w, *z, *up, *residual;
    float *sum; // [T][K] is x + residual; it is null where there is none
    float *values; // [T][K]
    PackedBlock *packed; // [K/32][T]; it is null where K is no multiple of 32
};

// Returns the rows' values {K, T}, as input_values does, or null where the op does not take this input. With a residual
// *sum becomes x + residual {K, T}.
ggml_tensor *rows_input_values(const StepBuild &b, const MatmulInput &input, ggml_tensor *residual,
                               ggml_tensor **sum);

// x + residual (which may be null), and its norm.
Stream add_rows(const StepBuild &b, ggml_tensor *x, ggml_tensor *residual, const Norm &next);

RowsInputArgs rows_input_args(const ggml_tensor *dst);
void cpu_rows_input(const RowsInputArgs &args, int ith, int nth);

} // namespace luce
