// The CPU computes the experts of a mixture (MoE) here: the choice of a row's experts, their products, and
// the weighted sum. An expert's weights are read once for all rows that chose it. What it gives a row does
// not depend on the other rows.
#pragma once

#include "common/activation.h"
#include "cpu/matmul.h"

namespace luce {

constexpr int32_t MAX_USED = 64; // a row has at most this many experts

// route takes logits [T][n] and gives out [T][2*n_used]. First come the experts with the largest logits, in
// falling order, of equal ones the lowest first. Then come the bits of their weights, which are a softmax
// over their logits. A row whose logits are not finite has NaN for weights.
struct RouteArgs {
    const float *logits;
    int32_t n, n_used, T;
    int32_t *out;
};

// experts computes each row's product with each of its experts, out [T][n_used][N]. Of one matrix it is w x,
// and of two it is f(w0 x) * (w1 x), where f is the activation.
struct ExpertsArgs {
    const int32_t *route; // [T][2*n_used]
    int32_t n_expert, n_used, T;
    int32_t n_weights; // there are 1 or 2
    Activation activation; // of two
    RowsWeight weights[2]; // they are those of expert 0; out is not used
    size_t expert_bytes[2]; // one expert's matrix is so far from the next
    const int64_t *offsets[2]; // null, or [n_expert]: expert e's matrix lies so many bytes from expert 0's
    int64_t K;
    bool own_input; // x has a row for each row and rank, [T][n_used]; else one for each row, [T]
    const void *x; // its form is the one that rows_matmul takes
    float *out;

    // Returns matrix i of expert e.
    RowsWeight weight(int32_t i, int32_t e) const {
        RowsWeight w = weights[i];
        const int64_t offset = offsets[i] == nullptr ? e * int64_t(expert_bytes[i]) : offsets[i][e];
        w.data = static_cast<const uint8_t *>(w.data) + offset;
        w.scale = w.scale == nullptr ? nullptr : w.scale + e;
        return w;
    }
};

// experts_sum takes y [T][n_used][E] and gives out [T][E]: the sum by rank, where each is multiplied by its
// weight.
struct ExpertsSumArgs {
    const int32_t *route;
    const float *y;
    int32_t n_used, T;
    int64_t E;
    int32_t *counts; // null, or it adds up how often rows have had each expert
    float *out;
};

// add_shared takes y and the shared expert's result [T][E] and gives y + shared * sigmoid(open).
struct AddSharedArgs {
    const float *y, *shared;
    const float *open; // [T]
    int32_t T;
    int64_t E;
    float *out;
};

void cpu_route(const RouteArgs &args, int ith, int nth);
void cpu_experts(const ExpertsArgs &args, int ith, int nth);
void cpu_experts_sum(const ExpertsSumArgs &args, int ith, int nth);
void cpu_add_shared(const AddSharedArgs &args, int ith, int nth);

} // namespace luce
