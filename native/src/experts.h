// The experts of a mixture (MoE) on the CPU: the choice of a row's experts, their products, and the weighted
// sum. An expert's weights are read once for all rows that chose it. What it gives a row does not depend on
// the other rows.
#pragma once

#include "rows_matmul.h"

namespace luce {

constexpr int32_t MAX_USED = 64; // experts of a row

// Takes logits [T][n] and gives out [T][2*n_used]: first the experts with the largest logits, in falling
// order, of equal ones the lowest first; then the bits of their weights, a softmax over them. A row whose
// logits are not finite has NaN for weights.
struct RouteArgs {
    const float *logits;
    int32_t n, n_used, T;
    int32_t *out;
};

// Each row's product with each of its experts, out [T][n_used][N]: of one matrix w x, or of two silu(w0 x) * (w1 x).
struct ExpertsArgs {
    const int32_t *route; // [T][2*n_used]
    int32_t n_expert, n_used, T;
    int32_t n_weights; // 1 or 2
    RowsWeight weights[2]; // of expert 0; out is not used
    size_t expert_bytes[2]; // from one expert's matrix to the next
    int64_t K;
    bool own_input; // x has a row for each row and rank, [T][n_used]; else one for each row, [T]
    const void *x; // as rows_matmul takes it
    float *out;
};

// y [T][n_used][E] -> out [T][E]: the sum by rank, each times its weight.
struct ExpertsSumArgs {
    const int32_t *route;
    const float *y;
    int32_t n_used, T;
    int64_t E;
    float *out;
};

void cpu_route(const RouteArgs &args, int ith, int nth);
void cpu_experts(const ExpertsArgs &args, int ith, int nth);
void cpu_experts_sum(const ExpertsSumArgs &args, int ith, int nth);

} // namespace luce
