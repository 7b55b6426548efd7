// Graph blocks that architectures share. Building is pure: a block adds nodes and names nothing it did not get.
// T is the number of rows; shapes are in ggml order.
#pragma once

#include "cache.h"

namespace luce {

// A step's inputs, on the device.
struct StepInputs {
    ggml_tensor *tokens; // {T} I32
    ggml_tensor *positions; // {T} I32
    ggml_tensor *cells; // {T} I64: the KV cell each row is written to
    ggml_tensor *mask; // {n_kv, T} F16: 0 where the row sees the cell, else -inf
    ggml_tensor *ctl; // {CTL_SIZE} I32 (kernels.h)
};

// RMS(x) * weight over the first dimension.
ggml_tensor *rms_norm(ggml_context *ctx, ggml_tensor *x, ggml_tensor *weight, float eps);

// weight {K, N} with x {K, T} -> {N, T}, summed in F32.
ggml_tensor *matmul(ggml_context *ctx, ggml_tensor *weight, ggml_tensor *x);

// Gated full attention, x {E, T} -> {E, T}; writes this step's K and V rows into the cells first.
ggml_tensor *attention(ggml_context *ctx, ggml_cgraph *graph, ggml_tensor *x, const AttentionWeights &w,
                       const KvCells &kv, const StepInputs &in, const HParams &hp);

// Gated DeltaNet, x {E, T} -> {E, T}.
ggml_tensor *deltanet(ggml_context *ctx, ggml_tensor *x, const DeltaNetWeights &w, const DeltaState &state,
                      const StepInputs &in, const HParams &hp, uint32_t n_log_rows, DeltaMode mode);

// SwiGLU: down(silu(gate x) * up x), x {E, T} -> {E, T}.
ggml_tensor *ffn(ggml_context *ctx, ggml_tensor *x, const Block &block);

} // namespace luce
