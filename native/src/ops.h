// Architectures share these graph blocks. Building is pure: a block only adds nodes, over what it was given.
// T is the number of rows; shapes are in ggml order.
#pragma once

#include "../kernels/rowmm.h"
#include "cache.h"

#include <functional>
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

// draft_part is a draft that chooses among the first tokens of the vocabulary alone.
enum class StepKind { prefill, prefill_last, verify, draft, draft_part, block };

// What a weight {K, N} is multiplied with: values {K, T} made of x {K, T}. Luce's own matmul on a GPU computes them
// while it packs its input (kernels/rowmm.h), elsewhere ggml's ops do.
struct MatmulInput {
    RowmmInput kind;
    ggml_tensor *x;
    ggml_tensor *w; // rms {K}, gated_heads {S}
    ggml_tensor *y; // swiglu, gated_heads {K, T}, gated {D, H, T}
    float eps;

    bool operator==(const MatmulInput &o) const {
        return kind == o.kind && x == o.x && w == o.w && y == o.y && eps == o.eps;
    }
};
MatmulInput plain(ggml_tensor *x);
MatmulInput rms(ggml_tensor *x, ggml_tensor *w, float eps); // RMS(x) * w
MatmulInput swiglu(ggml_tensor *gate, ggml_tensor *up); // silu(gate) * up
// RMS(x) * w * silu(gate), the mean over each head of S values
MatmulInput gated_heads(ggml_tensor *x, ggml_tensor *w, ggml_tensor *gate, float eps);
// x {D*H, T} * sigmoid(gate), gate {D, H, T} being the second half of each head of {2*D*H, T}
MatmulInput gated(ggml_tensor *x, ggml_tensor *gate);

struct MadeInput {
    MatmulInput input;
    bool packed; // as a matmul of luce's own takes it
    ggml_tensor *node;
};

// What a graph is built from.
struct StepBuild {
    ggml_context *ctx;
    ggml_cgraph *graph;
    const Model &model;
    const Cache &cache;
    StepInputs in;
    StepKind kind;
    int64_t n_kv; // prefill: cells that attention reads
    mutable std::vector<MadeInput> inputs = {}; // of matmuls, so that none is made twice

    bool prefill() const { return kind == StepKind::prefill || kind == StepKind::prefill_last; }
};

// RMS(x) * weight over the first dimension.
ggml_tensor *rms_norm(ggml_context *ctx, ggml_tensor *x, ggml_tensor *weight, float eps);

// An input's values {K, T}, by ggml's ops.
ggml_tensor *input_values(const StepBuild &b, const MatmulInput &input);

// The op that makes an input, as it is or packed, once for all weights that it meets.
ggml_tensor *made_input(const StepBuild &b, const MatmulInput &input, bool packed,
                        const std::function<ggml_tensor *()> &make);

// x {K, T} as the CPU's rows_matmul takes it.
ggml_tensor *packed_rows(const StepBuild &b, ggml_tensor *x);

// The products of at most 4 weights {K, N} with one input -> {N, T} each, summed in F32.
std::vector<ggml_tensor *> matmuls(const StepBuild &b, const std::vector<ggml_tensor *> &weights,
                                   const MatmulInput &input);

// One of them, and residual {N, T} added where it is not null.
ggml_tensor *matmul(const StepBuild &b, ggml_tensor *weight, const MatmulInput &input,
                    ggml_tensor *residual = nullptr);

// The embeddings of the step's tokens in a table {E, V} -> {E, T}.
ggml_tensor *embed(const StepBuild &b, ggml_tensor *table);

// Which layer's KV: a trunk block's, a drafter's, or the NextN head's, which has no row 0.
struct KvLayer {
    KvCells cells;
    KvOwner owner;
};

// RoPE of heads x {D, heads, T} at the rows' positions. Plain NEOX: for text, M-RoPE's axes are all equal.
ggml_tensor *rope(const StepBuild &b, ggml_tensor *x, const AttentionShape &s);

// K and V of the rows x {E, T} into their cells, without attention over them.
void write_kv(const StepBuild &b, const MatmulInput &x, const Attention &w, const KvLayer &kv, float eps);

// residual + gated full attention of the rows x {E, T} -> {E, T}, whose K and V it writes into their cells first.
// mask: of a prefill (prefill_mask), else null.
ggml_tensor *attend(const StepBuild &b, const MatmulInput &x, const Attention &w, const KvLayer &kv,
                    ggml_tensor *mask, float eps, ggml_tensor *residual);

// The "attention" op of a step (not of a prefill) over what its rows see: q {D, H, T} -> {D*H, T}. gate: null, or
// {2*D*H, T} with q(D) then gate(D) for each head. block: the rows of a sequence all see each other.
ggml_tensor *attend_pages(const StepBuild &b, ggml_tensor *q, ggml_tensor *gate, const AttentionShape &s,
                          const KvLayer &kv, bool block);

// The mask of a prefill's rows over n_kv cells {n_kv, T} F16.
ggml_tensor *prefill_mask(const StepBuild &b, int32_t window);

// residual + gated DeltaNet of x {E, T} -> {E, T}.
ggml_tensor *deltanet(const StepBuild &b, const MatmulInput &x, const DeltaNet &w, const DeltaState &state,
                      float eps, ggml_tensor *residual);

// residual + a mixture of experts of x {E, T} -> {E, T} (moe.cpp).
ggml_tensor *moe(const StepBuild &b, const MatmulInput &x, const Moe &w, ggml_tensor *residual);

// residual + SwiGLU: down(silu(gate x) * up x), x {E, T} -> {E, T}.
ggml_tensor *ffn(const StepBuild &b, const MatmulInput &x, const Ffn &w, ggml_tensor *residual);

// Keeps the best candidates of each row of logits {V, T} in the cache's lists, where it has any.
void keep_lists(const StepBuild &b, ggml_tensor *logits);

} // namespace luce
