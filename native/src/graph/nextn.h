// The NextN head (MTP), as an architecture reads it (Architecture::read_head).
#pragma once

#include "graph/drafter.h"

namespace luce {

extern const DrafterKind NEXTN;

// One attention block between its own norms and a language-model head.
struct NextN : Drafter {
    Block block;
    float rms_eps;
    ggml_tensor *eh_proj; // {2E, E}  it multiplies [embedding, hidden]
    ggml_tensor *enorm; // {E}
    ggml_tensor *hnorm; // {E}
    ggml_tensor *norm; // {E}  it is shared_head_norm, or the trunk's output_norm
    ggml_tensor *token_embd; // {E, V}  it is embed_tokens, or the trunk's

    const Moe *moe() const override { return block.moe(); }
    void feed(Plain &g, const Seen &seen) const override;
    void draft(Plain &g) const override;

private:
    Val input(Plain &g, Val before) const;
};

} // namespace luce
