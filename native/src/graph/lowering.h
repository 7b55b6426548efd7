// The class of the lowering (lower.h): what devices share is in lower.cpp, a device's own part in lower_cpu.cpp and
// lower_gpu.cpp.
#pragma once

#include "graph/lower.h"
#include "ops/attention.h"
#include "ops/deltanet.h"

#include <memory>

namespace luce {

enum class Form { rows, packed, packed_rows, f16, partials, count };

// A norm that a value is: RMS(x) * w.
struct NormOf {
    Val x;
    ggml_tensor *w;
    float eps;
};

class Lowering {
public:
    Lowering(Plain &plain, const std::vector<StepInputs> &in, ggml_context *ctx, ggml_cgraph *nodes);
    virtual ~Lowering() = default;

    StepOutputs run();

protected:
    // ---- forms ----
    ggml_tensor *rows(Val v); // {n, T}, or {D, heads, T} where a node leaves heads
    ggml_tensor *flat(Val v); // {n, T}
    ggml_tensor *by_heads(Val v, int64_t D); // {D, heads, T}
    // The rows as a product reads them: what a device makes of a norm or activation in one op of its own.
    virtual ggml_tensor *values(Val v) { return flat(v); }
    ggml_tensor *&made(Val v, Form form) {
        return made_[(size_t(v.node) * MAX_OUT + size_t(v.out)) * size_t(Form::count) + size_t(form)];
    }
    bool as_norm(Val v, NormOf &norm) const;
    bool gives_logits(Val product) const {
        const Node &n = plain.at(product);
        return plain.model.weights().is_output((n.op == Op::matmul_first ? part(n, "M") : n).w[0]);
    }

    // ---- emission; each sets the rows of a node's outputs, and what else it leaves ----
    void emit(int32_t node);
    virtual void emit_own(const Node &n, Val y) = 0; // an op that a device does in its own way
    virtual void keep(Val h); // of a step's rows, for drafters that read hidden rows
    virtual const OpRow<DeltaArgs> &delta_op(const DeltaShape &) { return ops::deltanet; }

    // The products of an op become the rows of those outputs of `v` whose weights it took.
    void split_products(const OpNode &y, const std::vector<size_t> &which, Val v);
    ggml_tensor *mul_mat(ggml_tensor *weight, ggml_tensor *x, bool logits);
    ggml_tensor *norm_rows(ggml_tensor *x, ggml_tensor *w, float eps);
    ggml_tensor *expand(ggml_tensor *t);
    std::vector<ggml_tensor *>
    weights_of(const Node &n) const; // of a product: of a matrix {K, N} its first rows or all
    const Node &part(const Node &n, const char *name) const { return plain.nodes[size_t(n.part(name))]; }
    DeltaShape delta_shape(const Node &n) const;
    OpNode attention(const OpRow<AttentionArgs> &op, const Node &n, ggml_tensor *plan, int32_t layer);
    ggml_tensor *block_node(const Node &n);
    ggml_tensor *host_experts(ggml_tensor *routed, ggml_tensor *x, const Moe &w, int64_t T);
    // Where the experts' matrices of a weight are {n_expert}, or null where they lie one behind the other.
    ggml_tensor *offsets(const ExpertSlots *slots, const ggml_tensor *weight);
    // What counts a step's choices of a mixture's experts, or null. Prompts are not counted: they read nearly all.
    ggml_tensor *counts(const Moe &w) const;

    // Attention of prompts' rows. As it stands it is ggml's over each sequence's cells, put side by side.
    virtual ggml_tensor *attend_prompt(const Node &n);
    // Prompts' cells in a pool, K or V of these cells, side by side {D*Hkv, n_kv}, of the type. With a window those that no row
    // sees may be missing.
    ggml_tensor *gathered(const KvCells &cells, ggml_tensor *pool, ggml_type type, uint32_t window = 0);
    // The positions that RoPE turns a layer's rows to, where they have one each. A layer without axes turns rows of images by
    // the index.
    ggml_tensor *positions_of(const AttentionShape &s) const {
        const bool others = in->rope_positions != nullptr && (s.has_axes() || plain.cache.params().gaps);
        return others ? in->rope_positions : in->positions;
    }
    // Up to where prompts' rows see in a layer, or null: up to themselves.
    ggml_tensor *row_ends_of(const AttentionShape &s) const {
        return plain.images && s.window > 0 && plain.model.images_are_whole() ? in->row_ends : nullptr;
    }
    ggml_tensor *pages_of(const KvCells &cells) const { return cells.sliding ? in->window_pages : in->pages; }
    ggml_tensor *last_rows(ggml_tensor *x); // {n, T} -> {n, prompts}
    ggml_tensor *
    of_prompts(ggml_tensor *input) const; // the entries of its sequences in an input of a prefill

    // What is emitted runs on this stage, and `in` is there.
    uint32_t stage_index() const { return outputs_.runs.back().stage; }
    const Stage &stage() const { return plain.cache.stages()[stage_index()]; }

    Plain &plain;
    const StepInputs *in;
    ggml_context *const ctx;
    ggml_cgraph *const graph;
    const bool gpu;

private:
    static constexpr size_t MAX_OUT = 4;

    ggml_tensor *mask(const AttentionShape &s, uint32_t n_kv, uint32_t more);
    void go_to(uint32_t stage);
    void turn_to(uint32_t stage);
    void next_stage();
    void emit_norm_rope(const Node &n, Val y);
    ggml_tensor *previous(ggml_tensor *h);
    ggml_tensor *embedding(ggml_tensor *table);
    ggml_tensor *with_images(ggml_tensor *x); // rows of images in their places
    ggml_tensor *chosen() const;
    ggml_tensor *rotated(ggml_tensor *x, ggml_tensor *factors, const AttentionShape &s);
    ggml_tensor *gate_of(Val gate);
    void store(ggml_tensor *k, ggml_tensor *v, const KvLayer &kv);

    const std::vector<StepInputs> &inputs_;
    std::vector<ggml_tensor *> made_;
    // Of prompts' attention, by stage, window and number of cells. Their rows are the step's, and ATTEND_ROWS more where attention
    // of few rows wants them.
    std::map<std::tuple<uint32_t, uint32_t, uint32_t>, ggml_tensor *> masks_;
    StepOutputs outputs_;
};

std::unique_ptr<Lowering> cpu_lowering(Plain &plain, const std::vector<StepInputs> &in, ggml_context *ctx,
                                       ggml_cgraph *nodes);
// luce has it where it is built with CUDA.
std::unique_ptr<Lowering> gpu_lowering(Plain &plain, const std::vector<StepInputs> &in, ggml_context *ctx,
                                       ggml_cgraph *nodes);

} // namespace luce
