// Declares what a step's graph puts out, and the builders for a DFlash drafter. Each architecture has a file
// with its graph builders (architecture.h is the table of them), and so has the DFlash drafter, which goes
// with any. Builders only add nodes to the graph and return its outputs.
#pragma once

#include "graph/blocks.h"

namespace luce {

struct StepOutputs {
    ggml_tensor *logits = nullptr; // {V, n_out} F32; it is null where none were asked for
    ggml_tensor *hidden = nullptr; // {E, T} F32 of a verify, before the output norm
    ggml_tensor *choice = nullptr; // {CHOICE_WIDTH, n_out} I32; a row is a ChoiceRow (kernels.h)
};

// Computes the rows' context for a DFlash drafter: K and V of each of its layers, from what the trunk's
// blocks put out (outputs[il] {E, T}).
void feed_dflash(const StepBuild &build, const DFlash &drafter, const std::vector<ggml_tensor *> &outputs);

// Computes a block for each of the step's sequences, whose rows are [anchor, mask, mask ..]. The choices of
// all rows are kept but the anchors'. Logits are of all rows, over the target's vocabulary.
StepOutputs build_dflash_block(const StepBuild &build);

} // namespace luce
