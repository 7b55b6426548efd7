// The rows of the table of architectures for qwen35 and qwen35moe (Qwen3.5 and Qwen3.6). qwen35.cpp reads their files;
// graph/qwen35_graph.cpp builds their graphs.
#pragma once

#include "graph/architecture.h"

namespace luce {

extern const Architecture QWEN35, QWEN35MOE;

// Builds the trunk over the step's rows. A prefill has logits of its last row or none, and a verify of all
// rows. Where the engine drafts, the rows' hidden states are kept and the head's KV rows are written too.
StepOutputs build_qwen35(const StepBuild &build);

// A feed, or one link of the NextN chains of the step's sequences: a row each, whose choice and hidden state are
// kept for the next link.
void build_qwen35_draft(const StepBuild &build);

} // namespace luce
