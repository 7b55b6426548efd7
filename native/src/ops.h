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
    ggml_tensor *hidden_to; // {T} I64: the hidden cell each row is written to
    ggml_tensor *hidden_at; // {1} I32: the hidden cell of the position before row 0 (prefill)
};

// A draft's inputs: k rows that the head owes, the last one for the anchor, then n - 1 chained rows.
struct DraftInputs {
    ggml_tensor *tokens; // {k} I32
    ggml_tensor *hidden_at; // {k} I32: hidden cell of the position before each
    ggml_tensor *positions; // {k + n - 1} I32
    ggml_tensor *cells; // {k + n - 1} I64
    ggml_tensor *mask; // {n_kv, n} F16: of the anchor's row and the chained ones
    ggml_tensor *verify_tokens; // {n + 1} I32: the next verify's tokens: anchor and drafts are written here
    ggml_tensor *drafts; // {2 * LUCE_MAX_DRAFT} I32: token and not-finite flag of each draft
};

// RMS(x) * weight over the first dimension.
ggml_tensor *rms_norm(ggml_context *ctx, ggml_tensor *x, ggml_tensor *weight, float eps);

// weight {K, N} with x {K, T} -> {N, T}, summed in F32.
ggml_tensor *matmul(ggml_context *ctx, ggml_tensor *weight, ggml_tensor *x);

// K and V of the rows x {E, T} into their cells. positions {T} I32, cells {T} I64.
void write_kv(ggml_context *ctx, ggml_cgraph *graph, ggml_tensor *x, const AttentionWeights &w,
              const KvCells &kv, ggml_tensor *positions, ggml_tensor *cells, const HParams &hp);

// Gated full attention of the rows x {E, T} over the cells, mask {n_kv, T} -> {E, T}. Reads what write_kv, called
// before it, has written.
ggml_tensor *attend(ggml_context *ctx, ggml_tensor *x, const AttentionWeights &w, const KvCells &kv,
                    ggml_tensor *positions, ggml_tensor *mask, const HParams &hp);

// Gated DeltaNet, x {E, T} -> {E, T}.
ggml_tensor *deltanet(ggml_context *ctx, ggml_tensor *x, const DeltaNetWeights &w, const DeltaState &state,
                      const StepInputs &in, const HParams &hp, uint32_t n_log_rows, DeltaMode mode);

// SwiGLU: down(silu(gate x) * up x), x {E, T} -> {E, T}.
ggml_tensor *ffn(ggml_context *ctx, ggml_tensor *x, const Block &block);

} // namespace luce
