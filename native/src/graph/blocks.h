// Architectures share these graph blocks. Building is pure: a block only adds nodes, over what it was given.
// T is the number of rows; shapes are in ggml order.
//
// What a layer of a step launches on a GPU with luce's own matmul, and what is fused there. A launch ends where each value
// needs all of the launch before, or another grid; all are dependent launches (overlap.cuh), so that a matmul fills its
// rings with weights while the small kernel ahead of it runs.
//   DeltaNet (9 or 10)   qkv z beta alpha    rowmm_parts           one pass over x; its results stay partial sums
//                        conv, delta rule    deltanet_parts        adds them up; SiLU, l2 norms, window and log; decay and
//                                                                  beta from alpha and b. Of 2 rows and more it is two kernels
//                        gated norm          rowmm_pack_gated      RMS of a head * SiLU(z), packed to F16
//                        out                 rowmm_parts
//                        residual, norm      rowmm_parts_rms       adds the parts up; x, squares of x, packed x * w
//   and the FFN          gate up             rowmm_parts           applies the norm's scale to its sums
//                        SwiGLU              rowmm_parts_swiglu    adds the parts up, packs
//                        down                rowmm_parts
//                        residual, norm      rowmm_parts_rms       of the next block
//   or, ahead of a mixture, of up to 8 rows: out, residual   rowmm_add   a block has all of K of its outputs
//   or a mixture (4)     norm, router        moe_route             of many rows also their experts, and the list of work
//                        gate up             moe_up                with SwiGLU; the shared expert's are in the same launch
//                        down                moe_down
//                        residual, norm      moe_sum               sum over experts; packed as rowmm_parts_rms does
//     of one row (3)     down, residual      moe_end               in place of the last two
//   and behind that      qkv ..              rowmm_parts_norm      each block norms and packs the row itself; so does
//                                                                  rowmm_norm of the logits
//   attention (10)       q gate k v          rowmm_parts
//                        norms, RoPE, cells  attention_heads       adds the parts up; moves accepted rows first
//                        attention           attention_packed      in two kernels: chunks, then their sum, gated and packed
//                        out, residual ..    as above, and the FFN
//   once a step          plan                attention_plan        which block of attention does what, for all layers
//   a draft has besides  its input           nextn_pack            looks embeddings up, norms both halves, packs
//                        eh_proj, norm       rowmm_parts, rowmm_parts_rms
//                        kept rows, choice   keep_hidden, rowmm, choose
//   and the links of one sequence's chain are one graph, whose launches overlap too
// What a step keeps of ggml-cuda, each op giving a row the same bits at any T. In a step of the model
// they run a few times, not once a layer, and so cost what a few launches do:
//   GET_ROWS, SET_ROWS, CONCAT, CONT, FILL   embeddings, hidden rows and reduced logits move, unchanged
//   RMS_NORM, MUL, SILU          the norm of what a DFlash drafter is fed, and its queries; what few shapes need. One
//                                block sums a row, in an order that its length decides
//   ROPE, SCALE, TANH            queries of a DFlash drafter, its keys under YaRN, an embedding's scale, a softcap:
//                                each value is computed from one or two others
//   MUL_MAT, SWIGLU, SIGMOID, ADD   products with weights of types that rowmm lacks (IQ1, IQ2, IQ3), a row at a time,
//                                and what their input and residual need
// tests/test_launches.py holds the graphs of steps to both lists. A prefill has ggml's FLASH_ATTN_EXT besides.
#pragma once

#include "engine/cache.h"
#include "matmul/quantised.h"

#include <functional>
#include <vector>

namespace luce {

// Says whether a verify of so many rows writes their KV of the NextN head.
inline bool feeds_head(int64_t rows) {
    return rows > 1;
}

// These are a step's inputs on the device.
struct StepInputs {
    ggml_tensor *tokens; // {T} I32; a draft may be referred to instead (kernels.h: TokensArgs)
    ggml_tensor *positions; // {T} I32
    ggml_tensor *ctl; // {sizeof(StepCtl) / 4} I32
    ggml_tensor *pages; // {n} I32; this is the page table
    // {T} I32: the row of Cache::hidden of the position before each; a prefill has its first row's only.
    ggml_tensor *hidden_from;
    // {T} I64; it says where each row's hidden state goes. A prefill's last row has entry 0.
    ggml_tensor *hidden_to;
};

// draft_part is a draft that chooses among the first tokens of the vocabulary alone. A feed writes the NextN head's KV
// of committed rows.
enum class StepKind { prefill, prefill_last, verify, draft, draft_part, block, feed };

// What a weight {K, N} is multiplied with: values {K, T} made of x. Luce's own matmul on a GPU computes them while it
// packs its input (kernels/rowmm.h), on a CPU an op does (cpu/inputs.h), elsewhere ggml's ops do.
struct MatmulInput {
    RowmmInput kind;
    ggml_tensor *x; // {K, T}; where y is null, swiglu takes the parts that a matmul with gate and up left
    ggml_tensor *w; // rms {K}, gated_heads {S}
    ggml_tensor *y; // swiglu, gated_heads {K, T}, gated {D, H, T}
    float eps;
    int64_t K, T;

    bool operator==(const MatmulInput &o) const {
        return kind == o.kind && x == o.x && w == o.w && y == o.y && eps == o.eps;
    }
};
MatmulInput plain(ggml_tensor *x);
MatmulInput rms(ggml_tensor *x, ggml_tensor *w, float eps); // it makes RMS(x) * w
MatmulInput swiglu(ggml_tensor *gate, ggml_tensor *up); // it makes silu(gate) * up
// RMS(x) * w * silu(gate), the mean over each head of S values
MatmulInput gated_heads(ggml_tensor *x, ggml_tensor *w, ggml_tensor *gate, float eps);
// Makes x {D*H, T} * sigmoid(gate), where gate {D, H, T} is the second half of each head of {2*D*H, T}.
MatmulInput gated(ggml_tensor *x, ggml_tensor *gate);

// The rows {E, T} between blocks, and the norm of them that the next matmul takes.
struct Stream {
    ggml_tensor *x;
    MatmulInput normed;
};
struct Norm {
    ggml_tensor *weight; // {E}
    float eps;
    bool of_moe = false; // a mixture of experts takes the rows as they are, and norms them itself
};

struct MadeInput {
    MatmulInput input;
    bool packed; // it has the form that a matmul of luce's own takes
    ggml_tensor *node;
};

// An AttentionPlan says which block of attention does what (ops::attention_plan).
struct AttentionPlan {
    ggml_tensor *node;
    int32_t layers; // so many have taken it so far
};

// A graph is built from this.
struct StepBuild {
    ggml_context *ctx;
    ggml_cgraph *graph;
    const Model &model;
    const Cache &cache;
    StepInputs in;
    StepKind kind;
    int64_t n_kv; // it counts the cells that a prefill's attention reads
    bool brief = false; // of the layers of one kind it has the first alone
    // It remembers the inputs of matmuls, so that none is made twice.
    mutable std::vector<MadeInput> inputs = {};
    // It remembers the plans of attention.
    mutable std::vector<AttentionPlan> plans = {};

    bool prefill() const { return kind == StepKind::prefill || kind == StepKind::prefill_last; }
    bool has_layer(uint32_t layer) const { return !brief || model.first_of_kind(layer); }
};

// Computes RMS(x) * weight over the first dimension.
ggml_tensor *rms_norm(ggml_context *ctx, ggml_tensor *x, ggml_tensor *weight, float eps);

// Computes an input's values {K, T}.
ggml_tensor *input_values(const StepBuild &b, const MatmulInput &input);

// Returns the op that makes an input, as it is or packed. It is made once for all weights that it meets.
ggml_tensor *made_input(const StepBuild &b, const MatmulInput &input, bool packed,
                        const std::function<ggml_tensor *()> &make);

// x + residual (which may be null), and its norm, on a CPU.
Stream add_rows(const StepBuild &b, ggml_tensor *x, ggml_tensor *residual, const Norm &next);

// Says whether a step multiplies so many rows on cuBLAS.
bool uses_gemm(const StepBuild &b, int64_t T);

// Returns x {K, T} as the CPU's rows_matmul takes it.
ggml_tensor *packed_rows(const StepBuild &b, ggml_tensor *x);

// Multiplies at most 4 weights {K, N} with one input -> {N, T} each, summed in F32.
std::vector<ggml_tensor *> matmuls(const StepBuild &b, const std::vector<ggml_tensor *> &weights,
                                   const MatmulInput &input);

ggml_tensor *matmul(const StepBuild &b, ggml_tensor *weight, const MatmulInput &input);

// residual (which may be null) + the product, and its norm. Luce's own matmul leaves its results in parts, and the kernel
// that packs the norm adds them up.
Stream matmul_add(const StepBuild &b, ggml_tensor *weight, const MatmulInput &input, ggml_tensor *residual,
                  const Norm &next);

// What the gated delta rule takes: the projections of x, and qkv after its conv.
struct DeltaInputs {
    ggml_tensor *qkv; // {C, T}
    ggml_tensor *z; // {Hv*S, T}
    ggml_tensor *beta, *alpha; // {Hv, T}
};
DeltaInputs delta_inputs(const StepBuild &b, const MatmulInput &x, const DeltaNet &w, const DeltaState &state,
                         const DeltaShape &shape);

// The gated delta rule's results, and what gates them, from the parts that luce's own matmul leaves of the projections; null
// where it leaves none.
struct DeltaOutputs {
    ggml_tensor *o = nullptr, *z = nullptr; // {Hv*S, T}
};
DeltaOutputs delta_of_parts(const StepBuild &b, const MatmulInput &x, const DeltaNet &w,
                            const DeltaState &state, const DeltaShape &shape);

// Looks up the embeddings of the step's tokens in a table {E, V} -> {E, T}.
ggml_tensor *embed(const StepBuild &b, ggml_tensor *table);

// A KvLayer says which layer's KV is meant: a trunk block's, a drafter's, or the NextN head's, which has no
// row 0.
struct KvLayer {
    KvCells cells;
    KvOwner owner;
};

// Rotates heads x {D, heads, T} to the rows' positions (RoPE). It is plain NEOX, since for text the axes of
// M-RoPE are all equal.
ggml_tensor *rope(const StepBuild &b, ggml_tensor *x, const AttentionShape &s);

// Heads are what attention takes of a step's rows whose K and V are in their cells.
struct Heads {
    ggml_tensor *q; // {D*H, T}; it is normed and rotated
    ggml_tensor *gate; // {D*H, T}, or {2*D*H, T} with q(D) then gate(D) for each head
    bool stored; // it is false where there is no op that does all of it
};

// Writes K and V of a step's rows x into their cells, and makes their queries where `queries` says so, from the parts
// that one product of luce's own matmul leaves.
Heads heads_of_parts(const StepBuild &b, const MatmulInput &x, const Attention &w, const KvLayer &kv,
                     float eps, bool queries);

// Writes K and V of the rows x {E, T} into their cells, without attention over them.
void write_kv(const StepBuild &b, const MatmulInput &x, const Attention &w, const KvLayer &kv, float eps);

// s.x + gated full attention of s.normed, whose K and V it writes into their cells first. mask: of a prefill
// (prefill_mask), else null. next: the norm that follows.
Stream attend(const StepBuild &b, const Stream &s, const Attention &w, const KvLayer &kv, ggml_tensor *mask,
              const Norm &next);

// Adds the "attention" op of a step (not of a prefill) over what its rows see: q {D, H, T} -> {D*H, T}. gate
// is null, or as in Heads. With `block` the rows of a sequence all see each other.
ggml_tensor *attend_pages(const StepBuild &b, ggml_tensor *q, ggml_tensor *gate, const AttentionShape &s,
                          const KvLayer &kv, bool block);

// Makes the mask of a prefill's rows over n_kv cells {n_kv, T} F16.
ggml_tensor *prefill_mask(const StepBuild &b, int32_t window);

// s.x + gated DeltaNet of s.normed.
Stream deltanet(const StepBuild &b, const Stream &s, const DeltaNet &w, const DeltaState &state,
                const Norm &next);

// E_UNSUPPORTED names what the device has no kernel for, of a mixture in the file at `path`. A CPU can run all of them.
void check_moe(const Device &device, const char *path, const Moe &moe);

// s.x + a mixture of experts of s.normed (moe.cpp).
Stream moe(const StepBuild &b, const Stream &s, const Moe &w, const Norm &next);

// s.x + SwiGLU of s.normed: down(silu(gate x) * up x).
Stream ffn(const StepBuild &b, const Stream &s, const Ffn &w, const Norm &next);

// Keeps the best candidates of each row of logits {V, T} in the cache's lists, where it has any.
void keep_lists(const StepBuild &b, ggml_tensor *logits);

} // namespace luce
