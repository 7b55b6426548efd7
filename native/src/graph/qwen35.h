// The rows of the table of architectures for qwen35 and qwen35moe (Qwen3.5 and Qwen3.6), and what drafters share of their
// blocks.
#pragma once

#include "graph/architecture.h"

namespace luce {

extern const Architecture QWEN35, QWEN35MOE;

// Gated full attention of rows x {E, T}, which are normed -> {E, T}. Their K and V go into their cells first.
Val attention(Val x, const Attention &w, const KvLayer &kv, float eps);

// SwiGLU of x {E, T}, or the mixture of experts that a block may have in its place -> {E, T}.
Val ffn(Val x, const Ffn &w);
Val feed_forward(Val x, const Block &block);

} // namespace luce
