// Makes the inputs of the CPU's matmuls: what ggml would compute in several nodes, each of them a pass over the rows by one
// thread, is one op, which leaves both forms that a weight may take. A row's bits do not depend on the other rows.
#pragma once

#include "common/activation.h"
#include "cpu/matmul.h"

namespace luce {

// An input of T rows of K values, from x [T][K]:
//   with z      RMS(x) * w * silu(z), the mean over each head of S values
//   with up     f(x) * up, where f is the activation
//   with w      RMS(x + residual) * w, where the residual may be null
struct RowsInputArgs {
    int32_t T;
    int64_t K, S; // of a norm S is that of w, else 0
    float eps;
    Activation activation;
    const float *x, *w, *z, *up, *residual;
    float *sum; // [T][K] is x + residual; it is null where there is none
    float *values; // [T][K]
    PackedBlock *packed; // [K/32][T]; it is null where K is no multiple of 32
};

void cpu_rows_input(const RowsInputArgs &args, int ith, int nth);

} // namespace luce
