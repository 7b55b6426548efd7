// The row of the table of architectures for gemma4 (Gemma 4, text alone), and what its assistants have of it: keys, and layers
// that are read and computed alike.
#pragma once

#include "graph/architecture.h"

namespace luce {

extern const Architecture GEMMA4;

// The tensors of a block that Block has no place for.
struct Gemma4Block {
    ggml_tensor *attn_post_norm; // {E} behind attention
    ggml_tensor *ffn_post_norm; // {E} behind the feed-forward part
    float scale; // of the stream behind the block

    // Where there is a mixture, which stands beside a dense layer.
    Ffn dense;
    ggml_tensor *router_norm; // {E} ahead of the router
    ggml_tensor *experts_norm; // {E} ahead of the experts
    ggml_tensor *dense_post_norm; // {E} behind the dense layer
    ggml_tensor *experts_post_norm; // {E} behind the experts

    // Where there are per-layer embeddings.
    ggml_tensor *ple_gate; // {E, P}
    ggml_tensor *ple_out; // {P, E}
    ggml_tensor *ple_post_norm; // {E}
};

struct Gemma4Layer {
    Block block;
    Gemma4Block own;
};

HParams gemma4_hparams(const GgufFile &file);
// Takes layer il, whose feed-forward part is n_ff wide, with embeddings of its own of P values (0: none). Without cells it has
// no K and V.
Gemma4Layer read_gemma4_layer(WeightReader &reader, const HParams &hp, uint32_t il, uint32_t n_ff, int64_t P,
                              bool has_cells);

// Queries of normed rows as they meet keys: their products q {D*H, T}, normed and rotated.
Val gemma4_queries(Val q, const Attention &w, float eps);
// What follows a layer's attention, which made `mixed` of the stream x {E, T} -> {E, T}. of_layer {P, T} are the layer's
// embeddings, or a Val without a graph.
Val gemma4_behind_attention(Val x, Val mixed, const Block &block, const Gemma4Block &own, float eps,
                            Val of_layer = {});

} // namespace luce
