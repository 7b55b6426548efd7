// The blocks that architectures and drafters are made of: how their tensors are named and taken, and their graphs. What one
// family alone has stands in its own file.
#pragma once

#include "graph/drafter.h"

#include <functional>

namespace luce {

// Takes the tensors of attention and of SwiGLU that begin with `prefix` ("blk.0."), over rows of E values.
Attention read_attention(WeightReader &reader, const std::string &prefix, const AttentionShape &shape,
                         int64_t E, bool gated);
Ffn read_ffn(WeightReader &reader, const std::string &prefix, int64_t E, int64_t FF, const char *suffix = "");
// Takes the router and the experts of a mixture. `scaled`: the file has a number for each expert, by which its part is
// multiplied.
Moe read_mixture(WeightReader &reader, const std::string &prefix, const MoeShape &shape, int64_t E,
                 bool in_ram, bool scaled = false);

// Attention of rows x {E, T}, which are normed -> {E, T}. Their K and V go into their cells first. `block`: the rows of a
// sequence all see each other.
Val attention(Val x, const Attention &w, const KvLayer &kv, float eps, bool block = false);
// Writes K and V of rows x {E, T} into their cells, without attention over them.
Val write_kv(Val x, const Attention &w, const KvLayer &kv, float eps);

// SwiGLU of x {E, T}, or the mixture of experts that a block may have in its place -> {E, T}.
Val ffn(Val x, const Ffn &w, Activation activation = SILU);
Val feed_forward(Val x, const Block &block);
// The weighted sum of what the experts that the router's logits {n, T} choose give rows x {E, T} -> {E, T}.
Val mixture(Val x, Val logits, const Moe &w);

// The residual stream {E, T}: one value, or each rank's (Model::n_ranks), which all have the same bits.
using Stream = std::vector<Val>;
Stream embed_stream(Plain &g);
// Adds to it what a layer's block, or each rank's block, makes of it: make(x, block) -> {E, T}. Ranks' parts are added to each
// other first, in the order of the ranks.
using Part = std::function<Val(Val x, uint32_t block)>;
void add_part(Stream &x, uint32_t layer, const Part &make);
// Returns the sum alone.
Stream sum_of_parts(const Stream &x, uint32_t layer, const Part &make);

// What follows the blocks of a trunk, whose last one put out x {E, T}: its logits and choices, and what drafters read. A
// prefill has logits of its last row or none, and a verify of all rows.
void end_step(const Stream &x, const std::vector<Val> &outputs);

} // namespace luce
