// Graph builders, one per architecture file. Pure: they add nodes to `graph` and return its outputs.
#pragma once

#include "ops.h"

namespace luce {

struct StepOutputs {
    ggml_tensor *logits = nullptr; // {V, n_out} F32; null where none were asked for
    ggml_tensor *choice = nullptr; // {ARGMAX_WIDTH, n_out} I32: greedy id, not-finite flag (kernels.h)
};

enum class Logits { none, last, all };

// The trunk over T rows, T = in.tokens->ne[0]. Where the session drafts, the rows' hidden states go to their
// hidden cells, and a prefill writes the head's KV rows too.
StepOutputs build_qwen35(ggml_context *ctx, ggml_cgraph *graph, const Model &model, const Cache &cache,
                         const StepInputs &in, DeltaMode mode, Logits logits);

// A NextN chain of n drafts (n = 0: only the owed rows' KV).
void build_nextn(ggml_context *ctx, ggml_cgraph *graph, const NextN &head, const Cache &cache,
                 const DraftInputs &in, uint32_t n);

// Replays pending rows onto the recurrent state, nothing else.
void build_flush(ggml_context *ctx, ggml_cgraph *graph, const Model &model, const Cache &cache,
                 ggml_tensor *ctl);

} // namespace luce
