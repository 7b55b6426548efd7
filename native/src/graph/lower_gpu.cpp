// The lowering on a GPU with luce's own matmul. Where a value is packed, who adds partial sums up and what norms a row itself
// is decided here. What is fused and in which form values pass, as launches of a layer of a step; a launch ends where each
// value needs all of the launch before, or another grid, and all are dependent launches (launch.cuh), so that a matmul fills
// its rings with weights while the small kernel ahead of it runs:
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
#include "graph/lowering.h"

#ifdef LUCE_USE_CUDA

#include "matmul/layout.h"
#include "matmul/prompt.h"
#include "ops/matmul.h"
#include "ops/moe.h"
#include "ops/prompt_matmul.h"
#include "ops/row.h"

#include <algorithm>

namespace luce {
namespace {

bool all_packed(const std::vector<ggml_tensor *> &weights) {
    return std::all_of(weights.begin(), weights.end(), is_packed);
}

class GpuLowering : public Lowering {
public:
    using Lowering::Lowering;

protected:
    bool looks_up(ggml_type type) const override { return nextn_has_table(type); }

    // ---- forms ----

    // How a value is packed, as the ops rowmm.. take it: T, whether a norm's scale is yet to come, epsilon.
    std::vector<int32_t> how_packed(Val v, bool as_node) const {
        NormOf norm;
        const bool normed = as_node && as_norm(v, norm);
        const Node &n = plain.at(v);
        const float eps = normed                              ? norm.eps
                          : as_node && n.op == Op::gated_norm ? std::get<float>(n.params)
                                                              : 0.0f;
        return {int32_t(n.T), normed, bits_of_real(eps)};
    }

    ggml_tensor *pack(const char *name, Val v, std::vector<ggml_tensor *> args, float eps = 0) {
        return op(name, GGML_TYPE_I8, rowmm_op_bytes(plain.at(v).T, plain.width(v)), 1, args,
                  {bits_of_real(eps)});
    }

    ggml_tensor *packed_rows(Val v) {
        ggml_tensor *&t = made(v, Form::packed_rows);
        t = t == nullptr ? pack("rowmm_pack", v, {flat(v)}) : t;
        return t;
    }

    // Packed as the node can leave it best.
    ggml_tensor *packed(Val v) {
        const Node &n = plain.at(v);
        ggml_tensor *&t = made(v, Form::packed);
        NormOf norm;
        if (as_norm(v, norm)) {
            ggml_tensor *x = flat(norm.x); // a sum's op may have packed the norm with it
            t = t == nullptr ? pack("rowmm_pack_rms", v, {x, norm.w}, norm.eps) : t;
        } else if (t != nullptr) {
            return t;
        } else if (n.op == Op::glu && reads_partials(n)) {
            t = op("rowmm_parts_swiglu", GGML_TYPE_I8, rowmm_op_bytes(n.T, n.n[0]), 1, {partials(n.in[0])});
        } else if (n.op == Op::glu) {
            t = pack("rowmm_pack_swiglu", v, {flat(n.in[0]), flat(n.in[1])});
        } else if (n.op == Op::gated_norm) {
            t = pack("rowmm_pack_gated", v, {flat(n.in[0]), n.w[0], flat(n.in[1])},
                     std::get<float>(n.params));
        } else if (n.op == Op::draft_input) {
            const Node &e_norm = part(n, "e_norm"), &h_norm = part(n, "h_norm");
            t = pack("nextn_pack", v,
                     {in.tokens, plain.cache.drafts(), part(n, "E").w[0], plain.cache.hidden(),
                      in.hidden_from, e_norm.w[0], h_norm.w[0]},
                     std::get<float>(e_norm.params));
        } else if (packs_attention(n)) {
            const int64_t bytes = rowmm_op_bytes(n.T, n.n[0]) / int64_t(sizeof(float));
            const auto [plan, layer] = plan_of(n);
            t = attention("attention_packed", n, bytes, plan, layer);
        } else {
            t = packed_rows(v);
        }
        return t;
    }

    // A drafter's block of rows that see each other has no such form.
    bool packs_attention(const Node &n) const {
        return (n.op == Op::attend || n.op == Op::gated_attend) && !plain.prefill() &&
               std::get<Attends>(n.params).kv.owner != KV_DRAFTER;
    }

    // SwiGLU adds partial sums up where the product behind it leaves such sums too. A shared expert's does not, beside experts
    // of the host: nothing waits for it.
    bool reads_partials(const Node &glu) const {
        const Target target = {plain, gpu, nullptr};
        const Node &product = plain.at(glu.in[0]);
        if (product.op != Op::matmul || glu.in[1].node != glu.in[0].node ||
            !target.leaves_partials(product.w)) {
            return false;
        }
        const auto all_read_by = [&](int32_t node, const auto &fits) {
            const std::vector<int32_t> readers = plain.readers(node);
            return std::all_of(readers.begin(), readers.end(), fits);
        };
        return all_read_by(index_of(glu), [&](int32_t down) {
            const Node &n = plain.nodes[size_t(down)];
            return n.op == Op::matmul && target.leaves_partials(n.w) && all_read_by(down, [&](int32_t sum) {
                       return plain.nodes[size_t(sum)].op == Op::add_norm;
                   });
        });
    }
    int32_t index_of(const Node &n) const { return int32_t(&n - plain.nodes.data()); }

    // A product norms and packs its row itself where it is one row, no op ahead has packed it, and a block of the device
    // has room for it.
    bool packs_itself(const std::vector<ggml_tensor *> &w, Val x, NormOf &norm) {
        if (!as_norm(x, norm) || plain.at(x).T != 1) {
            return false;
        }
        ggml_tensor *row = flat(norm.x);
        return made(x, Form::packed) == nullptr && ggml_is_contiguous(row) &&
               std::all_of(w.begin(), w.end(), [&](const ggml_tensor *weight) {
                   return rowmm_norm_shared(plain.width(x), weight->type) <=
                          cuda::shared_memory(plain.model.device().index);
               });
    }

    // The partial sums of a product, of which v is any output.
    ggml_tensor *partials(Val v) {
        const Node &n = plain.at(v);
        const Val x = n.in[0];
        ggml_tensor *&t = made({v.graph, v.node, 0}, Form::partials);
        if (t != nullptr) {
            return t;
        }
        NormOf norm;
        const bool norms = packs_itself(n.w, x, norm);
        std::vector<ggml_tensor *> args =
            norms ? std::vector<ggml_tensor *>{flat(norm.x), norm.w} : std::vector<ggml_tensor *>{packed(x)};
        args.insert(args.end(), n.w.begin(), n.w.end());
        t = op(norms ? "rowmm_parts_norm" : "rowmm_parts", GGML_TYPE_F32,
               rowmm_parts_op_bytes(n.T, n.w) / int64_t(sizeof(float)), 1, args, how_packed(x, true));
        return t;
    }

    // A prompt's input as cuBLAS reads it. What a row's norm or gate gives is packed without being stored.
    ggml_tensor *f16(Val v) {
        ggml_tensor *&t = made(v, Form::f16);
        if (t != nullptr) {
            return t;
        }
        const Node &n = plain.at(v);
        float eps = 0;
        const auto add = [&](const char *name, std::vector<ggml_tensor *> args) {
            return op(name, GGML_TYPE_I8, gemm_x_bytes(n.T, plain.width(v)), 1, args, {bits_of_real(eps)});
        };
        NormOf norm;
        if (as_norm(v, norm)) {
            eps = norm.eps;
            if (ggml_tensor *x = flat(norm.x); ggml_is_contiguous(x)) {
                return t = add("gemm_pack_norm", {x, norm.w});
            }
        } else if (n.op == Op::glu) {
            ggml_tensor *gate = flat(n.in[0]), *up = flat(n.in[1]);
            if (ggml_is_contiguous(gate) && ggml_is_contiguous(up)) {
                return t = add("gemm_pack_swiglu", {gate, up});
            }
        } else if (n.op == Op::gated && plain.at(n.in[1]).op == Op::split_heads) {
            if (ggml_tensor *x = flat(n.in[0]); ggml_is_contiguous(x)) {
                return t = add("gemm_pack_gated", {x, rows(n.in[1])});
            }
        } else if (n.op == Op::gated_norm) {
            eps = std::get<float>(n.params);
            ggml_tensor *o = flat(n.in[0]), *z = flat(n.in[1]);
            const int64_t S = n.w[0]->ne[0];
            if (ggml_is_contiguous(o) && ggml_is_contiguous(z) &&
                (S == 16 || S == 32 || S == 64 || S == 128)) {
                return t = add("gemm_pack_heads", {o, z, n.w[0]});
            }
        }
        ggml_tensor *x = flat(v);
        return t = add("gemm_pack", {ggml_is_contiguous(x) ? x : ggml_cont(ctx, x)});
    }

    // ---- products ----

    bool uses_gemm(int64_t T) const { return plain.prefill() && T >= GEMM_ROWS; }

    // Whether a prompt writes this weight out for cuBLAS. Steps have the matmul of luce's own, whose rows do not depend on
    // each other; since weights lie in its order, a prefill of few rows has it too, and one of a K that cuBLAS does not
    // take. ggml multiplies with what is not packed.
    bool by_gemm(const ggml_tensor *w, int64_t T) const {
        return uses_gemm(T) && is_packed(w) && gemm_has(w->ne[0]) &&
               size_t(w->ne[0] * w->ne[1] * 2) <= ggml_nbytes(plain.cache.gemm_scratch());
    }

    void matmul(const Node &n, Val y) {
        std::vector<ggml_tensor *> w = n.w;
        if (n.op == Op::matmul_first) {
            w = {first_rows(part(n, "M").w[0], n.n[0])};
        }
        const Val x = n.in[0];
        ggml_tensor *residual = n.op == Op::matmul_add ? flat(n.in[1]) : nullptr;
        const auto product = [&](size_t i) -> ggml_tensor *& {
            return made({y.graph, y.node, int32_t(i)}, Form::rows);
        };
        std::vector<size_t> packed_ones;
        bool gemm = false; // all packed ones take it or none does, since they share K and T
        for (size_t i = 0; i < w.size(); i++) {
            if (by_gemm(w[i], n.T)) {
                std::vector<ggml_tensor *> args = {f16(x), w[i], plain.cache.gemm_scratch()};
                if (residual != nullptr) {
                    args.push_back(residual);
                }
                product(i) =
                    op(residual != nullptr ? "gemm_add" : "gemm", GGML_TYPE_F32, w[i]->ne[1], n.T, args);
                gemm = true;
            } else if (is_packed(w[i])) {
                packed_ones.push_back(i);
            }
        }
        if (!gemm && !packed_ones.empty()) {
            rowmm(w, packed_ones, x, residual, y);
        }
        for (size_t i = 0; i < w.size(); i++) {
            if (product(i) == nullptr) {
                product(i) = mul_mat(w[i], flat(x));
            }
        }
    }

    // Multiplies packed weights in one launch. Where there is one weight, a residual may be added to its product.
    void rowmm(const std::vector<ggml_tensor *> &w, const std::vector<size_t> &which, Val x,
               ggml_tensor *residual, Val y) {
        // ggml's matmul needs the values too, so what it shares is packed of them
        const bool all = all_packed(w);
        NormOf norm;
        const bool norms = all && residual == nullptr && packs_itself(w, x, norm);
        std::vector<ggml_tensor *> args;
        if (norms) {
            args = {flat(norm.x), norm.w};
        } else {
            args = {all ? packed(x) : packed_rows(x)};
        }
        args.push_back(plain.cache.rowmm_scratch());
        if (residual != nullptr) {
            args.push_back(residual);
        }
        int64_t n = 0;
        for (const size_t i : which) {
            args.push_back(w[i]);
            n += w[i]->ne[1] * plain.at(x).T;
        }
        split_products(op(norms                 ? "rowmm_norm"
                          : residual != nullptr ? "rowmm_add"
                                                : "rowmm",
                          GGML_TYPE_F32, n, 1, args, how_packed(x, all)),
                       w, which, y);
    }

    // ---- fused ops ----

    void add_norm(const Node &n, Val y) {
        const Val normed = {y.graph, y.node, 1}, product = n.in.back();
        NormOf norm;
        as_norm(normed, norm);
        const int64_t E = plain.width(y), bytes = rowmm_op_bytes(n.T, E) / 4;
        std::vector<ggml_tensor *> args = {norm.w, partials(product)};
        if (n.in.size() > 1) {
            args.push_back(flat(n.in[0]));
        }
        ggml_tensor *t = op("rowmm_parts_rms", GGML_TYPE_F32, E * n.T + bytes, 1, args);
        made(y, Form::rows) = part_of(t, E, n.T, 0);
        made(normed, Form::packed) = ggml_view_1d(ctx, t, bytes, size_t(E * n.T) * sizeof(float));
    }

    void heads(const Node &n, Val y) {
        const Node &k_norm = part(n, "k_norm");
        const KvLayer &kv = std::get<KvLayer>(n.params);
        const AttentionShape &shape = *std::get<const AttentionShape *>(part(n, "Q").params);
        const bool queries = n.in.size() > 2;
        const int64_t K = int64_t(shape.head_dim) * shape.n_head;
        std::vector<ggml_tensor *> args = {partials(n.in[0]), k_norm.w[0], in.positions, kv.cells.k,
                                           kv.cells.v,        in.ctl,      in.pages};
        if (queries) {
            args.push_back(part(n, "q_norm").w[0]);
        }
        ggml_tensor *t = op("attention_heads", GGML_TYPE_F32, queries ? 2 * K * n.T : 1, 1, args,
                            {int32_t(shape.rope_dim), bits_of_real(shape.rope_base),
                             bits_of_real(std::get<float>(k_norm.params)), kv.owner});
        expand(t); // attention reads the cells and not this node
        for (int32_t half = 0; queries && half < 2; half++) {
            made({y.graph, y.node, 1 + half}, Form::rows) = part_of(t, K, n.T, half * K * n.T);
        }
    }

    void delta_layer(const Node &n, Val y) {
        const Recurs &r = std::get<Recurs>(n.params);
        const Node &product = plain.at(n.in[0]);
        const int64_t K = n.n[0];
        int64_t values = K * n.T;
        for (const int64_t N : product.n) {
            values += N * n.T;
        }
        ggml_tensor *t = op("deltanet_parts", GGML_TYPE_F32, values, 1,
                            {partials(n.in[0]), part(n, "C").w[0], r.state.window, r.state.log, in.ctl,
                             n.w[0], n.w[1], r.state.state, plain.cache.rowmm_scratch()},
                            delta_params(r));
        for (int32_t half : {0, 1}) { // the delta rule's results, then z
            made({y.graph, y.node, half}, Form::rows) = part_of(t, K, n.T, half * K * n.T);
        }
    }

    void keep(Val h) override {
        NormOf norm;
        if (!as_norm(h, norm)) {
            fail(LUCE_E_INTERNAL, "kept rows are normed where they are kept");
        }
        expand(op("keep_hidden", GGML_TYPE_I32, 1, 1,
                  {flat(norm.x), norm.w, plain.cache.hidden(), in.hidden_to}, {bits_of_real(norm.eps)}));
    }

    // ---- attention ----

    int64_t attention_room(const AttentionShape &s, const KvCells &cells, int64_t T, bool block) override {
        if (block) {
            return block_attention_scratch(T, s.n_head, s.head_dim);
        }
        AttentionArgs shape{};
        shape.pool = {nullptr, nullptr, cells.k->type, int32_t(s.n_head_kv), int32_t(s.head_dim)};
        shape.T = int32_t(T);
        shape.H = int32_t(s.n_head);
        shape.max_pages = int32_t(plain.cache.max_pages());
        return attention_scratch(shape);
    }

    // The plan of a trunk layer's attention is made once for all layers like it, ahead of them. A head's one layer
    // has none: its blocks make it in less time than another kernel takes.
    struct AttentionPlan {
        std::vector<int32_t> params;
        ggml_tensor *node;
        int32_t layers; // so many have taken it so far
    };
    std::pair<ggml_tensor *, int32_t> plan_of(const Node &n) {
        const Attends &a = std::get<Attends>(n.params);
        if (a.kv.owner != KV_TRUNK) {
            return {nullptr, 0};
        }
        const std::vector<int32_t> params = {int32_t(n.T),
                                             int32_t(a.shape->n_head),
                                             a.kv.owner == KV_HEAD,
                                             int32_t(a.shape->window),
                                             int32_t(a.kv.cells.k->type),
                                             int32_t(a.shape->n_head_kv),
                                             int32_t(a.shape->head_dim)};
        for (AttentionPlan &known : plans_) {
            if (known.params == params && known.layers < PLAN_LAYERS) {
                return {known.node, known.layers++};
            }
        }
        ggml_tensor *plan = op("attention_plan", GGML_TYPE_I32,
                               attention_plan_bytes() / int64_t(sizeof(int32_t)), 1, {in.ctl}, params);
        plans_.push_back({params, expand(plan), 1}); // it does not stand between a layer's kernels
        return {plan, 0};
    }

    int64_t chunks_room(const DeltaNetShape &s, int64_t T) override {
        if (!uses_gemm(T)) {
            return 0;
        }
        DeltaShape shape{};
        shape.T = int32_t(T);
        shape.Hk = int32_t(s.n_k_heads);
        shape.Hv = int32_t(s.n_v_heads);
        shape.S = int32_t(s.state_size);
        return (deltanet_chunks_scratch(shape) + 3) / 4;
    }

    // ---- mixtures ----

    // x {E, T} + the mixture of experts of its norm, and of a step, packed, the norm that follows.
    void mixture(const Node &n, Val y) {
        const Moe &w = *std::get<const Moe *>(part(n, "H").params);
        const MoeDims dims = dims_of(w, n.T);
        const Node &norm = part(n, "P");
        const int64_t E = dims.E, T = dims.T;
        const auto add = [&](const char *name, ggml_type type, int64_t values,
                             std::vector<ggml_tensor *> args, int64_t rows = 1) {
            const int32_t flags = (w.gate_up != nullptr ? MOE_FUSED : 0) | (w.in_ram ? MOE_VALUES : 0);
            return op(name, type, values, rows, args,
                      {dims.T, dims.n_expert, dims.n_used, int32_t(E), int32_t(dims.FF),
                       int32_t(dims.FF_shared), flags, bits_of_real(std::get<float>(norm.params))});
        };
        ggml_tensor *x = flat(n.in[0]);
        x = ggml_is_contiguous(x) ? x : ggml_cont(ctx, x);
        std::vector<ggml_tensor *> args = {x, norm.w[0], plain.cache.rowmm_scratch(), w.router};
        if (dims.shared()) {
            args.push_back(w.shared_gate);
        }
        const int64_t values = w.in_ram ? T * E * int64_t(sizeof(float)) : 0;
        ggml_tensor *routed = add("moe_route", GGML_TYPE_I8, moe_all_routed_bytes(dims) + values, args);
        ggml_tensor *experts, *sums = nullptr;
        if (w.in_ram) {
            // The shared expert is the device's. It lies between the way to the host and the host's part, which so runs
            // beside it: sources come in a graph's order.
            ggml_tensor *given =
                expand(op("ram_give", GGML_TYPE_I8, 1, 1, {routed}, host_expert_params(w, E, T)));
            sums = host_experts(given, given, w, E, T);
            experts = dims.shared() ? flat(n.in[2]) : sums;
        } else {
            std::vector<ggml_tensor *> up = {routed, w.gate_up != nullptr ? w.gate_up : w.gate};
            std::vector<ggml_tensor *> down = {routed, nullptr, w.down};
            if (w.gate_up == nullptr) {
                up.push_back(w.up);
            }
            if (dims.shared()) {
                up.insert(up.end(), {w.shared.gate, w.shared.up});
                down.push_back(w.shared.down);
            }
            down[1] = add("moe_up", GGML_TYPE_F32, dims.places() * dims.h_row(), up);
            const int32_t shared_type = dims.shared() ? w.shared.down->type : w.down->type;
            if (!plain.prefill() && moe_ends_at_once(dims, w.down->type, shared_type)) {
                down.insert(down.begin() + 3, x);
                // It polls for what up leaves, so no launch comes between (launch.cuh).
                made(y, Form::rows) = add("moe_end", GGML_TYPE_F32, E, down, T); // {E, 1}
                return;
            }
            // Of very few rows this polls too.
            experts = add("moe_down", GGML_TYPE_F32, dims.places() * E, down);
        }
        const int64_t bytes = plain.prefill() ? 0 : rowmm_op_bytes(T, E) / 4;
        std::vector<ggml_tensor *> last = {routed, experts, x, part(n, "N").w[0]};
        if (sums != nullptr) {
            last.push_back(sums);
        }
        ggml_tensor *t = add("moe_sum", GGML_TYPE_F32, E * T + bytes, last);
        made(y, Form::rows) = part_of(t, E, T, 0); // {E, T}
        if (bytes > 0) {
            made({y.graph, y.node, 1}, Form::packed) =
                ggml_view_1d(ctx, t, bytes, size_t(E * T) * sizeof(float));
        }
    }

    void emit_own(const Node &n, Val y) override {
        switch (n.op) {
            case Op::matmul:
            case Op::matmul_add:
            case Op::matmul_first: matmul(n, y); break;
            case Op::add_norm: add_norm(n, y); break;
            case Op::heads: heads(n, y); break;
            case Op::delta_layer: delta_layer(n, y); break;
            case Op::mixture: mixture(n, y); break;
            case Op::route:
            case Op::experts:
            case Op::mix: fail(LUCE_E_UNSUPPORTED, "a GPU has no op of experts but by the rules mixture..");
            default: fail(LUCE_E_INTERNAL, "a GPU has no op %d of a plain graph", int(n.op));
        }
    }

private:
    std::vector<AttentionPlan> plans_;
};

} // namespace

std::unique_ptr<Lowering> gpu_lowering(Plain &plain, const StepInputs &in, ggml_context *ctx,
                                       ggml_cgraph *nodes) {
    return std::make_unique<GpuLowering>(plain, in, ctx, nodes);
}

} // namespace luce

#endif
