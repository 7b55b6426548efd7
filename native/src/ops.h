// Graph blocks that architectures share. Building is pure: a block adds nodes and names nothing it did not get.
// T is the number of rows; shapes are in ggml order.
#pragma once

#include "cache.h"

#include <utility>
#include <vector>

namespace luce {

// A step's inputs, on the device.
struct StepInputs {
    ggml_tensor *tokens; // {T} I32, or references to drafts (kernels.h: TokensArgs)
    ggml_tensor *positions; // {T} I32
    ggml_tensor *ctl; // {sizeof(StepCtl) / 4} I32
    ggml_tensor *pages; // {n} I32: the page table
    ggml_tensor
        *hidden_from; // {T} I32: the row of Cache::hidden of the position before each; a prefill's first only
    ggml_tensor *hidden_to; // {T} I64: where each row's hidden state goes; a prefill's last row's is entry 0
};

enum class StepKind { prefill, prefill_last, verify, draft, block };

// What a graph is built from.
struct StepBuild {
    ggml_context *ctx;
    ggml_cgraph *graph;
    const Model &model;
    const Cache &cache;
    StepInputs in;
    StepKind kind;
    int64_t n_kv; // prefill: cells that attention reads
    mutable std::vector<std::pair<ggml_tensor *, ggml_tensor *>> packed = {}; // inputs of matmuls, and packed

    bool prefill() const { return kind == StepKind::prefill || kind == StepKind::prefill_last; }
};

// RMS(x) * weight over the first dimension.
ggml_tensor *rms_norm(ggml_context *ctx, ggml_tensor *x, ggml_tensor *weight, float eps);

// weight {K, N} with x {K, T} -> {N, T}, summed in F32.
ggml_tensor *matmul(const StepBuild &b, ggml_tensor *weight, ggml_tensor *x);

// The same of at most 4 weights {K, N} with one x.
std::vector<ggml_tensor *> matmuls(const StepBuild &b, const std::vector<ggml_tensor *> &weights,
                                   ggml_tensor *x);

// The embeddings of the step's tokens in a table {E, V} -> {E, T}.
ggml_tensor *embed(const StepBuild &b, ggml_tensor *table);

// Which layer's KV: a trunk block's, a drafter's, or the NextN head's, which has no row 0.
struct KvLayer {
    KvCells cells;
    KvOwner owner;
};

// RoPE of heads x {D, heads, T} at the rows' positions. Plain NEOX: for text, M-RoPE's axes are all equal.
ggml_tensor *rope(const StepBuild &b, ggml_tensor *x, const AttentionShape &s);

// K and V of the rows x {E, T} into their cells.
void write_kv(const StepBuild &b, ggml_tensor *x, const Attention &w, const KvLayer &kv, float eps);

// Gated full attention of the rows x {E, T} -> {E, T}. Reads what write_kv, called before it, has written.
// mask: of a prefill (prefill_mask), else null.
ggml_tensor *attend(const StepBuild &b, ggml_tensor *x, const Attention &w, const KvLayer &kv,
                    ggml_tensor *mask, float eps);

// The "attention" op of a step (not of a prefill) over what its rows see: q {D, H, T} -> {D*H, T}. gate: null, or
// {2*D*H, T} with q(D) then gate(D) for each head. block: the rows of a sequence all see each other.
ggml_tensor *attend_pages(const StepBuild &b, ggml_tensor *q, ggml_tensor *gate, const AttentionShape &s,
                          const KvLayer &kv, bool block);

// The mask of a prefill's rows over n_kv cells {n_kv, T} F16.
ggml_tensor *prefill_mask(const StepBuild &b, int32_t window);

// Gated DeltaNet, x {E, T} -> {E, T}.
ggml_tensor *deltanet(const StepBuild &b, ggml_tensor *x, const DeltaNet &w, const DeltaState &state,
                      float eps);

// SwiGLU: down(silu(gate x) * up x), x {E, T} -> {E, T}.
ggml_tensor *ffn(const StepBuild &b, ggml_tensor *x, const Ffn &w);

} // namespace luce
