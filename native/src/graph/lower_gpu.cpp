// The lowering on a GPU with luce's own matmul. Where a value is packed, who adds partial sums up and what norms a row itself
// is decided here. What is fused and in which form values pass, as launches of a layer of a step (the op's name in the third
// column); a launch ends where each value needs all of the launch before, or another grid, and all are dependent launches
// (common/overlap.cuh), so that a matmul fills its rings with weights while the small kernel ahead of it runs:
//   DeltaNet (9 or 10)   qkv z beta alpha    rowmm_parts           one pass over x; its results stay partial sums
//                        conv, delta rule    deltanet_parts        adds them up; SiLU, l2 norms, window and log; decay and
//                                                                  beta from alpha and b. Of 2 rows and more it is two kernels
//                        gated norm          rowmm_pack_gated      RMS of a head * SiLU(z), packed to F16
//                        out                 rowmm_parts
//                        residual, norm      rowmm_parts_rms       adds the parts up; x, squares of x, packed x * w
//   and the FFN          gate up             rowmm_parts           applies the norm's scale to its sums
//                        SwiGLU or GEGLU     rowmm_parts_glu       adds the parts up, packs
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
//                        norms, RoPE, cells  attention_heads       adds the parts up; so does attention_queries, where a
//                                                                  layer reads another's cells
//                        attention           attention_packed      in two kernels: chunks, then their sum, gated and packed
//                        out, residual ..    as above, and the FFN
//   where products are normed ahead of the residual
//                        residual, norms     rowmm_parts_post      adds the parts up, norms; x, squares of x, packed x * w
//   with a part of each matrix on several GPUs, in the place of what adds the residual
//                        parts, sum, norm    exchange_norm         as rowmm_parts_rms, between all GPUs (kernels/exchange)
//                        or rows, sum        exchange              ahead of a mixture and behind it, and of prompts; a mixture
//                                                                  is moe_route, moe_up, moe_down, moe_sum_prompt
//                        logits              gather                each rank sends those of its rows to the last one
//   and its mixture (4), with the FFN beside it
//                        norms, router       moe_route             the router's norm is another, and so is the FFN's
//                        experts, FFN        moe_up, moe_down
//                        sums, norms         moe_post              residual, scale and packed, as rowmm_parts_post
//   of experts that the host computes, the FFN has its own three launches, and moe_post_sums adds its parts up
//   once a step          plan                attention_plan        which block of attention does what, for all layers
//   a draft has besides  its input           nextn_pack            looks embeddings up, norms both halves, packs
//                        eh_proj, norm       rowmm_parts, rowmm_parts_rms
//                        kept rows, choice   keep_hidden, rowmm, choose
//   an assistant's has   its input           row_tokens, GET_ROWS, SCALE, CONCAT, rowmm_pack, rowmm_parts
//                        queries             attention_queries
//                        attention           attention_packed      over the target's cells, up to the last committed one
//                        kept rows           rowmm, SET_ROWS       which are not normed
//                        choice              rowmm, choose
//   of an ordered vocabulary, whose          RMS_NORM, MUL         rows that rows of the head are multiplied by
//   centroids are in the rowmm above         candidates, cluster_logits, choose
//   a block (DFlash) of DFlash2 has, around attention (8) and FFN (6)
//                        convolution         rowmm_parts           what rows add to its kernels
//                                            block_conv_pack       adds that up; convolves the norm of x, packed
//                        q k v               rowmm_parts, attention_heads
//                        attention           block_attention_packed   in two kernels, or attention_packed where it is causal
//                        convolution, residual, norm   block_conv_rms   adds the parts of out or down up too
//                        and at its end      candidates, lattice   of which it drafts
//   and of DSpark for each draft             prior_tokens, GET_ROWS, CONT, rowmm_add, choose
//   with a confidence head where lists are kept   RMS_NORM, MUL, confidence
//   and the links of one sequence's chain are one graph, whose launches overlap too
// What a step keeps of ggml-cuda, each op giving a row the same bits at any T. In a step of the model
// they run a few times, not once a layer, and so cost what a few launches do:
//   GET_ROWS, SET_ROWS, CONCAT, CONT, FILL   embeddings, hidden rows and reduced logits move, unchanged
//   RMS_NORM, MUL, SILU          the norm of what a DFlash drafter is fed, and its queries; of what an ordered vocabulary's
//                                rows are multiplied by; what few shapes need. One
//                                block sums a row, in an order that its length decides
//   ROPE, SCALE, TANH            queries of a DFlash drafter, its keys under YaRN, an embedding's scale, a softcap:
//                                each value is computed from one or two others
//   MUL_MAT, SWIGLU, SIGMOID, ADD   products with weights of types that rowmm lacks (IQ1, IQ2, IQ3), a row at a time,
//                                and what their input and residual need, as does the residual behind a convolution
// tests/core/graph/test_launches.py holds the graphs of steps to both lists.
#include "graph/lowering.h"

#ifdef LUCE_USE_CUDA

#include "common/device_limits.h"
#include "graph/rules.h"
#include "matmul/few_rows_plan.h"
#include "matmul/layout.h"
#include "moe/launch_plan.h"
#include "ops/moe.h"
#include "ops/sampling.h"

#include <algorithm>

namespace luce {
namespace {

bool all_packed(const std::vector<ggml_tensor *> &weights) {
    return std::all_of(weights.begin(), weights.end(), is_packed);
}

RowmmPackArgs of_glu(const Node &n) {
    RowmmPackArgs a{};
    a.activation = std::get<Activation>(n.params);
    return a;
}

class GpuLowering : public Lowering {
public:
    using Lowering::Lowering;

protected:
    // ---- forms ----

    // How a value is packed, as the ops rowmm.. take it: T, whether a norm's scale is yet to come, epsilon.
    RowmmArgs how_packed(Val v, bool as_node) const {
        NormOf norm;
        const Node &n = plain.at(v);
        RowmmArgs a{};
        a.T = int32_t(n.T);
        a.normed = as_node && as_norm(v, norm);
        a.eps = a.normed ? norm.eps : as_node && n.op == Op::gated_norm ? std::get<float>(n.params) : 0.0f;
        return a;
    }

    ggml_tensor *pack(const OpRow<RowmmPackArgs> &op, const std::vector<ggml_tensor *> &args, float eps = 0) {
        RowmmPackArgs a{};
        a.eps = eps;
        return op(ctx, args, a);
    }

    ggml_tensor *packed_rows(Val v) {
        ggml_tensor *&t = made(v, Form::packed_rows);
        t = t == nullptr ? pack(ops::rowmm_pack, {flat(v)}) : t;
        return t;
    }

    // Packed as the node can leave it best.
    ggml_tensor *packed(Val v) {
        const Node &n = plain.at(v);
        ggml_tensor *&t = made(v, Form::packed);
        NormOf norm;
        if (as_norm(v, norm)) {
            ggml_tensor *x = flat(norm.x); // a sum's op may have packed the norm with it
            t = t == nullptr ? pack(ops::rowmm_pack_rms, {x, norm.w}, norm.eps) : t;
        } else if (t != nullptr) {
            return t;
        } else if (n.op == Op::glu && reads_partials(n)) {
            t = ops::rowmm_parts_glu(ctx, {partials(n.in[0])}, of_glu(n));
        } else if (n.op == Op::glu) {
            ggml_tensor *gate = flat(n.in[0]), *up = flat(n.in[1]);
            t = ops::rowmm_pack_glu(ctx, {gate, up}, of_glu(n));
        } else if (n.op == Op::gated_norm) {
            ggml_tensor *o = flat(n.in[0]), *z = flat(n.in[1]);
            t = pack(ops::rowmm_pack_gated, {o, n.w[0], z}, std::get<float>(n.params));
        } else if (n.op == Op::draft_input) {
            const Node &e_norm = part(n, "e_norm"), &h_norm = part(n, "h_norm");
            NextnPackArgs a{};
            a.eps = std::get<float>(e_norm.params);
            t = ops::nextn_pack(ctx,
                                {in->tokens, plain.cache.drafts(), part(n, "E").w[0], plain.cache.hidden(),
                                 in->hidden_from, e_norm.w[0], h_norm.w[0]},
                                a);
        } else if (n.op == Op::block_conv && as_norm(n.in[0], norm) && Target{plain, gpu}.convolves(n)) {
            ggml_tensor *x = flat(norm.x), *normed = packed(n.in[0]), *added = partials(n.in[1]);
            BlockConvPackArgs a{};
            a.eps = norm.eps;
            t = ops::block_conv_pack(ctx, {x, norm.w, normed, added, n.w[0], in->ctl}, a);
        } else if (const auto *op = packs_attention(n)) {
            const auto [plan, layer] = plan_of(n);
            t = attention(*op, n, plan, layer).node;
        } else {
            t = packed_rows(v);
        }
        return t;
    }

    // The op that leaves a node's attention packed: a prompt's has none.
    const OpRow<AttentionArgs> *packs_attention(const Node &n) const {
        const auto *attends = std::get_if<Attends>(&n.params);
        if (plain.prefill() || (attends == nullptr && !std::holds_alternative<AttendsCommitted>(n.params))) {
            return nullptr;
        }
        return attends != nullptr && attends->block ? &ops::block_attention_packed : &ops::attention_packed;
    }

    // A glu adds partial sums up where the product behind it leaves such sums too. A shared expert's does not, beside experts
    // of the host: nothing waits for it.
    bool reads_partials(const Node &glu) const {
        const Target target = {plain, gpu};
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
            return n.op == Op::matmul && target.leaves_partials(n.w) &&
                   all_read_by(down, [&](int32_t sum) { return has(plain.nodes[size_t(sum)].op, ADDS_UP); });
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
                   return rowmm_norms_row(limits_of(stage().device), plain.width(x), weight->type);
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
        t = (norms ? ops::rowmm_parts_norm : ops::rowmm_parts)(ctx, args, how_packed(x, true));
        return t;
    }

    // A prompt's input as cuBLAS reads it. What a row's norm or gate gives is packed without being stored.
    ggml_tensor *f16(Val v) {
        ggml_tensor *&t = made(v, Form::f16);
        if (t != nullptr) {
            return t;
        }
        const Node &n = plain.at(v);
        NormOf norm;
        if (as_norm(v, norm)) {
            if (ggml_tensor *x = flat(norm.x); ggml_is_contiguous(x)) {
                return t = pack(ops::gemm_pack_norm, {x, norm.w}, norm.eps);
            }
        } else if (n.op == Op::glu) {
            ggml_tensor *gate = flat(n.in[0]), *up = flat(n.in[1]);
            if (ggml_is_contiguous(gate) && ggml_is_contiguous(up)) {
                return t = ops::gemm_pack_glu(ctx, {gate, up}, of_glu(n));
            }
        } else if (n.op == Op::gated && plain.at(n.in[1]).op == Op::split_heads) {
            if (ggml_tensor *x = flat(n.in[0]); ggml_is_contiguous(x)) {
                return t = pack(ops::gemm_pack_gated, {x, rows(n.in[1])});
            }
        } else if (n.op == Op::gated_norm) {
            ggml_tensor *o = flat(n.in[0]), *z = flat(n.in[1]);
            const int64_t S = n.w[0]->ne[0];
            if (ggml_is_contiguous(o) && ggml_is_contiguous(z) &&
                (S == 16 || S == 32 || S == 64 || S == 128)) {
                return t = pack(ops::gemm_pack_heads, {o, z, n.w[0]}, std::get<float>(n.params));
            }
        }
        ggml_tensor *x = flat(v);
        return t = pack(ops::gemm_pack, {ggml_is_contiguous(x) ? x : ggml_cont(ctx, x)});
    }

    // ---- products ----

    // Whether a prompt multiplies by cuBLAS with this weight, written out as F16. Steps have the matmul of luce's own; since
    // weights lie in its order, a prompt's tail has it too, the row that gives logits, and a K that cuBLAS does not take. Rows
    // do not depend on each other in either. ggml multiplies with what is not packed.
    bool by_gemm(const ggml_tensor *w, Val y) const {
        return plain.writes_out() && !gives_logits(y) && is_packed(w) && gemm_has(w->ne[0], w->ne[1]) &&
               size_t(w->ne[0] * w->ne[1] * 2) <= ggml_nbytes(stage().gemm_scratch);
    }

    void matmul(const Node &n, Val y) {
        const std::vector<ggml_tensor *> w = weights_of(n);
        const Val x = n.in[0];
        ggml_tensor *residual = n.op == Op::matmul_add ? flat(n.in[1]) : nullptr;
        const auto product = [&](size_t i) -> ggml_tensor *& {
            return made({y.graph, y.node, int32_t(i)}, Form::rows);
        };
        std::vector<size_t> packed_ones; // which cuBLAS does not take: of few or odd rows
        std::vector<size_t> copied; // as F16
        std::vector<int64_t> sizes; // of these
        for (size_t i = 0; i < w.size(); i++) {
            if (plain.model.copy_of(w[i]) != nullptr && by_gemm(w[i], y)) {
                copied.push_back(i);
                sizes.push_back(w[i]->ne[1]);
            } else if (by_gemm(w[i], y)) {
                PromptMatmulArgs a{};
                a.product.T = int32_t(n.T);
                product(i) = ops::gemm(ctx, {f16(x), w[i], stage().gemm_scratch, residual}, a);
            } else if (is_packed(w[i])) {
                packed_ones.push_back(i);
            }
        }
        // All results of an op are in memory at once, so products are one op only where they are one launch.
        const bool one_launch = few_form(limits_of(stage().device), n.T, plain.width(x), sizes) >= 0;
        const size_t together = one_launch ? copied.size() : 1;
        for (size_t i = 0; i < copied.size(); i += together) {
            GemmCopiesArgs a{};
            a.T = int32_t(n.T);
            std::vector<ggml_tensor *> args = {f16(x), residual};
            for (size_t j = i; j < i + together; j++) {
                args.push_back(plain.model.copy_of(w[copied[j]]));
            }
            const OpNode products = ops::gemm_copies(ctx, args, a);
            for (size_t j = i; j < i + together; j++) {
                product(copied[j]) = products[int(j - i)];
            }
        }
        if (!packed_ones.empty()) {
            rowmm(w, packed_ones, x, residual, y);
        }
        for (size_t i = 0; i < w.size(); i++) {
            if (product(i) == nullptr) {
                product(i) = mul_mat(w[i], flat(x), gives_logits(y));
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
        args.push_back(stage().rowmm_scratch);
        if (residual != nullptr) {
            args.push_back(residual);
        }
        for (const size_t i : which) {
            args.push_back(w[i]);
        }
        const OpRow<RowmmArgs> &op = norms                 ? ops::rowmm_norm
                                     : residual != nullptr ? ops::rowmm_add
                                                           : ops::rowmm;
        split_products(op(ctx, args, how_packed(x, all)), which, y);
    }

    // ---- fused ops ----

    void add_norm(const Node &n, Val y) {
        const Val normed = {y.graph, y.node, 1}, product = n.in.back();
        NormOf norm;
        as_norm(normed, norm);
        ggml_tensor *parts = partials(product), *residual = n.in.size() > 1 ? flat(n.in[0]) : nullptr;
        const OpNode t = ops::rowmm_parts_rms(ctx, {norm.w, parts, residual});
        made(y, Form::rows) = t[0];
        made(normed, Form::packed) = t[1];
    }

    void add_convolved(const Node &n, Val y) {
        const Val normed = {y.graph, y.node, 1};
        NormOf norm;
        as_norm(normed, norm);
        ggml_tensor *x = flat(n.in[0]), *parts = partials(n.in[1]), *added = partials(n.in[2]);
        const OpNode t = ops::block_conv_rms(ctx, {x, norm.w, parts, added, part(n, "C").w[0], in->ctl}, {});
        made(y, Form::rows) = t[0];
        made(normed, Form::packed) = t[1];
    }

    // Its params and weights are of the node whose place it took: a number that scales the stream, or none.
    void add_normed(const Node &n, Val y) {
        const Val normed = {y.graph, y.node, 1};
        NormOf norm{};
        const bool packs = n.n.size() > 1 && as_norm(normed, norm);
        const Node &post = part(n, "A");
        const float eps = std::get<float>(post.params),
                    by = n.part("F") >= 0 ? std::get<float>(n.params) : 1.0f;
        const auto leave = [&](const OpNode &t) {
            made(y, Form::rows) = t[0];
            if (packs) {
                made(normed, Form::packed) = t[1];
            }
        };
        ggml_tensor *weight = packs ? norm.w : nullptr;
        if (n.part("Y") < 0) {
            RowmmPackArgs a{};
            a.eps = eps;
            a.post_scale = by;
            leave(ops::rowmm_parts_post(ctx, {post.w[0], partials(n.in[1]), flat(n.in[0]), weight}, a));
            return;
        }
        const Node &mixture = part(n, "Y");
        const Moe &w = *std::get<const Moe *>(part(mixture, "H").params);
        ggml_tensor *x = dense(n.in[0]), *of_dense = part(n, "B").w[0], *of_experts = part(n, "C").w[0];
        MoePostArgs a{};
        a.eps = eps;
        a.post_scale = by;
        if (n.part("U") < 0) { // their sums are apart
            a.dims = dims_of(stage().device, w, n.T);
            ggml_tensor *parts = partials(n.in[1]), *sums = flat(n.in[2]);
            leave(ops::moe_post_sums(ctx, {parts, sums, x, of_dense, of_experts, post.w[0], weight}, a));
            return;
        }
        const Node &products = part(n, "U");
        const Ffn beside = {products.w[0], products.w[1], part(n, "D").w[0]};
        a.dims = dims_of(stage().device, w, n.T, &beside);
        ggml_tensor *routed = route(mixture, w, a.dims, x, part(n, "X").w[0]);
        ggml_tensor *of_places = down(w, a.dims, beside, routed);
        leave(ops::moe_post(
            ctx, {routed, of_places, x, of_dense, of_experts, post.w[0], weight, w.down_scale, counts(w)},
            a));
    }

    // ---- ranks ----

    // The norm of an exchange's sum that the exchange itself can pack, or null. All ranks' kernels of an exchange are of one kind,
    // so each has to have one.
    const Node *packs_behind(const Node &part) const {
        const Target target = {plain, gpu};
        const Node &product = plain.at(part.in[0]), *own = nullptr;
        if (product.op != Op::matmul || !target.leaves_partials(product.w)) {
            return nullptr;
        }
        for (const int32_t sum : plain.readers(index_of(part))) {
            const Node *norm = nullptr;
            if (plain.nodes[size_t(sum)].in.size() == plain.model.n_ranks()) { // no residual, or no sum
                return nullptr;
            }
            for (const int32_t r : plain.readers(sum)) {
                const Node &reader = plain.nodes[size_t(r)];
                const std::vector<int32_t> behind = plain.readers(r);
                const bool packed = std::all_of(behind.begin(), behind.end(), [&](int32_t b) {
                    return has(plain.nodes[size_t(b)].op, TAKES_PACKED);
                });
                if (reader.op == Op::norm && packed && reader.stage == plain.nodes[size_t(sum)].stage) {
                    norm = &reader;
                }
            }
            if (norm == nullptr) {
                return nullptr;
            }
            own = norm->stage == part.stage ? norm : own;
        }
        return own;
    }

    void rank_part(const Node &n, Val y) {
        if (packs_behind(n) != nullptr) {
            expand(partials(n.in[0]));
        } else {
            made(y, Form::rows) = expand(dense(n.in[0]));
        }
    }

    // Where this rank meets the others next.
    ExchangeRanks next_meeting() {
        const uint32_t rank = stage_index();
        ExchangeRanks ranks{};
        ranks.rank = int32_t(rank);
        exchanges_.resize(std::max<size_t>(exchanges_.size(), rank + 1), 0);
        ranks.slot = exchanges_[rank]++ % 2;
        return ranks;
    }

    // It sends this rank's part to the others, and waits for theirs.
    void exchange(const Node &n, Val y) {
        const Exchange &through = *plain.cache.exchange();
        const uint32_t rank = stage_index();
        const Val part = n.in[rank];
        const size_t n_ranks = plain.model.n_ranks();
        ggml_tensor *x = n.in.size() > n_ranks ? dense(n.in[n_ranks]) : nullptr;
        const ExchangeRanks ranks = next_meeting();
        std::vector<ggml_tensor *> args;
        if (const Node *norm = packs_behind(plain.at(part))) {
            args = {norm->w[0], partials(plain.at(part).in[0]), x};
            args.insert(args.end(), {through.counts[rank], through.failure, through.boxes});
            ExchangeNormArgs a{};
            a.ranks = ranks;
            const OpNode t = ops::exchange_norm(ctx, args, a);
            expand(t.node);
            made(y, Form::rows) = t[0];
            made({&plain, index_of(*norm), 0}, Form::packed) = t[1];
            return;
        }
        args = {x, rows(part), through.counts[rank], through.failure, through.boxes};
        ExchangeArgs a{};
        a.ranks = ranks;
        made(y, Form::rows) = expand(ops::exchange(ctx, args, a));
    }
    void gather(const Node &n, Val y) {
        const Exchange &through = *plain.cache.exchange();
        const uint32_t rank = stage_index();
        GatherArgs a{};
        a.V = n.n[0];
        a.ranks = next_meeting();
        made(y, Form::rows) = expand(
            ops::gather(ctx, {rows(n.in[rank]), through.counts[rank], through.failure, through.boxes}, a));
    }
    ggml_tensor *dense(Val v) {
        ggml_tensor *t = flat(v);
        return ggml_is_contiguous(t) ? t : ggml_cont(ctx, t);
    }

    void heads(const Node &n, Val y) {
        const Node &k_norm = part(n, "k_norm");
        const KvLayer &kv = std::get<KvLayer>(n.params);
        const AttentionShape &shape = *std::get<const AttentionShape *>(part(n, "Q").params);
        const bool queries = n.part("q_norm") >= 0;
        const std::vector<ggml_tensor *> &factors = part(n, "Q").w;
        AttentionHeadsArgs a{};
        a.rope_dim = int32_t(shape.rope_dim);
        a.base = shape.rope_base;
        a.eps = std::get<float>(k_norm.params);
        a.gated = n.part("S") >= 0;
        a.unit_v = n.part("V") >= 0;
        const OpNode t =
            ops::attention_heads(ctx,
                                 {partials(n.in[0]), k_norm.w[0], positions_of(shape), kv.cells.k, kv.cells.v,
                                  in->ctl, pages_of(kv.cells), queries ? part(n, "q_norm").w[0] : nullptr,
                                  factors.empty() ? nullptr : factors[0]},
                                 a);
        expand(t.node); // attention reads the cells and not this node
        for (int32_t half = 0; queries && half < (a.gated != 0 ? 2 : 1); half++) {
            made({y.graph, y.node, 1 + half}, Form::rows) = t[half];
        }
    }

    ggml_tensor *queries(const Node &n) {
        const Node &norm = part(n, "q_norm");
        const AttentionShape &shape = *std::get<const AttentionShape *>(n.params);
        AttentionHeadsArgs a{};
        a.rope_dim = int32_t(shape.rope_dim);
        a.base = shape.rope_base;
        a.eps = std::get<float>(norm.params);
        ggml_tensor *parts = partials(n.in[0]);
        return ops::attention_queries(
            ctx, {parts, norm.w[0], positions_of(shape), n.w.empty() ? nullptr : n.w[0]}, a);
    }

    void delta_layer(const Node &n, Val y) {
        const Recurs &r = std::get<Recurs>(n.params);
        DeltaLayerArgs a{};
        a.conv.shape = delta_shape(n);
        const OpNode t =
            ops::deltanet_parts(ctx,
                                {partials(n.in[0]), part(n, "C").w[0], r.state.window, r.state.log, in->ctl,
                                 n.w[0], n.w[1], r.state.state, stage().rowmm_scratch},
                                a);
        for (int32_t half : {0, 1}) { // the delta rule's results, then z
            made({y.graph, y.node, half}, Form::rows) = t[half];
        }
    }

    void keep(Val h) override {
        NormOf norm;
        if (!as_norm(h, norm)) {
            Lowering::keep(h);
            return;
        }
        KeepHiddenArgs a{};
        a.eps = norm.eps;
        expand(ops::keep_hidden(ctx, {flat(norm.x), norm.w, plain.cache.hidden(), in->hidden_to}, a));
    }

    // ---- attention ----

    // The plan of a trunk layer's attention is made once for all layers like it, ahead of them. A drafter's few layers
    // have none: their blocks make it in less time than another kernel takes.
    struct AttentionPlan {
        ggml_tensor *node;
        int32_t layers; // so many have taken it so far
        uint32_t stage; // of these layers
    };
    std::pair<ggml_tensor *, int32_t> plan_of(const Node &n) {
        if (plain.kind == StepKind::draft) {
            return {nullptr, 0};
        }
        const Attends &a = std::get<Attends>(n.params);
        AttentionArgs shape{};
        shape.T = int32_t(n.T);
        shape.H = int32_t(a.shape->n_head);
        shape.window = int32_t(a.shape->window);
        shape.pool.type = a.kv.cells.k->type;
        shape.pool.Hkv = int32_t(a.shape->n_head_kv);
        shape.pool.D = int32_t(a.shape->head_dim);
        for (AttentionPlan &known : plans_) {
            if (known.stage == stage_index() && ops::attention_plan.same(known.node, shape) &&
                known.layers < PLAN_LAYERS) {
                return {known.node, known.layers++};
            }
        }
        ggml_tensor *plan = ops::attention_plan(ctx, {in->ctl}, shape);
        plans_.push_back({expand(plan), 1, stage_index()}); // it does not stand between a layer's kernels
        return {plan, 0};
    }

    const OpRow<DeltaArgs> &delta_op(const DeltaShape &shape) override {
        return plain.writes_out() && deltanet_chunks_scratch(shape) > 0 ? ops::deltanet_chunks
                                                                        : ops::deltanet;
    }

    ggml_tensor *attend_prompt(const Node &n) override {
        const Attends &of = std::get<Attends>(n.params);
        const AttentionShape &s = *of.shape;
        PrefillAttentionArgs a{};
        a.T = int32_t(n.T);
        a.H = int32_t(s.n_head);
        a.Hkv = int32_t(s.n_head_kv);
        a.D = int32_t(s.head_dim);
        a.n_prompts = int32_t(plain.prompts.size());
        a.n_kv = plain.n_kv;
        a.first = of.kv.first;
        a.window = int32_t(s.window);
        a.scale = of.scale;
        a.softcap = s.softcap;
        a.apart = prefill_apart(a, limits_of(stage().device));
        const auto cells = [&](ggml_tensor *pool) {
            return ggml_reshape_3d(ctx, gathered(of.kv.cells, pool, GGML_TYPE_F16, s.window), s.head_dim,
                                   s.n_head_kv, plain.n_kv);
        };
        ggml_tensor *k = cells(of.kv.cells.k), *v = cells(of.kv.cells.v);
        ggml_tensor *q = ggml_reshape_3d(ctx, flat(n.in[0]), s.head_dim, s.n_head, n.T);
        return ops::prefill_attention(ctx, {q, k, v, in->ctl, row_ends_of(s)}, a);
    }

    // ---- mixtures ----

    // Which experts the rows x {E, T} of a mixture have, and what these read, for the launches behind. The router may have a norm
    // of its own.
    ggml_tensor *route(const Node &n, const Moe &w, const MoeDims &dims, ggml_tensor *x,
                       ggml_tensor *dense_norm = nullptr) {
        const Node &norm = part(n, "P");
        MoeRouteArgs a{};
        a.dims = dims;
        a.eps = std::get<float>(norm.params);
        const bool own_norm = n.part("Q") >= 0;
        a.router_scale = own_norm ? std::get<float>(part(n, "F").params) : 0.0f;
        return (w.in_ram ? ops::moe_route_values
                         : ops::moe_route)(ctx,
                                           {x, norm.w[0], stage().rowmm_scratch, w.router, w.shared_gate,
                                            own_norm ? part(n, "Q").w[0] : nullptr, dense_norm},
                                           a)
            .node;
    }
    // What experts in host memory make of it.
    ggml_tensor *experts_of_host(const Moe &w, ggml_tensor *routed, int64_t T) {
        RamGiveArgs give{};
        give.dims = dims_of(stage().device, w, T);
        return host_experts(expand(ops::ram_give(ctx, {routed}, give)), nullptr, w, T);
    }
    ggml_tensor *up(const Moe &w, const MoeDims &dims, const Ffn &shared, ggml_tensor *routed) {
        MoeMatmulArgs a{};
        a.dims = dims;
        a.activation = w.activation;
        ggml_tensor *gate = w.gate_up != nullptr ? w.gate_up : w.gate;
        const ExpertSlots *slots = plain.cache.slots_of(w);
        ggml_tensor *of_gate = offsets(slots, gate),
                    *of_up = w.up == nullptr ? of_gate : offsets(slots, w.up);
        return ops::moe_up(ctx, {routed, gate, w.up, shared.gate, shared.up, of_gate, of_up}, a);
    }
    ggml_tensor *rows_of_mixture(const Node &n) {
        ggml_tensor *x = flat(n.in[0]);
        return ggml_is_contiguous(x) ? x : ggml_cont(ctx, x);
    }

    ggml_tensor *down(const Moe &w, const MoeDims &dims, const Ffn &shared, ggml_tensor *routed) {
        MoeMatmulArgs a{};
        a.dims = dims;
        ggml_tensor *of_down = offsets(plain.cache.slots_of(w), w.down);
        return ops::moe_down(ctx, {routed, up(w, dims, shared, routed), w.down, shared.down, of_down}, a);
    }

    // The mixture of experts of x {E, T}, without a residual.
    ggml_tensor *routed_experts(const Node &n) {
        const Moe &w = *std::get<const Moe *>(part(n, "H").params);
        MoeSumArgs sum{};
        sum.dims = dims_of(stage().device, w, n.T);
        ggml_tensor *routed = route(n, w, sum.dims, rows_of_mixture(n));
        if (w.in_ram) {
            return experts_of_host(w, routed, n.T);
        }
        ggml_tensor *y = down(w, sum.dims, w.shared, routed);
        return ops::moe_sum_prompt(ctx, {routed, y, nullptr, nullptr, nullptr, w.down_scale, counts(w)}, sum);
    }

    // x {E, T} + the mixture of experts of its norm, and of a step, packed, the norm that follows.
    void mixture(const Node &n, Val y) {
        const Moe &w = *std::get<const Moe *>(part(n, "H").params);
        const MoeDims dims = dims_of(stage().device, w, n.T);
        ggml_tensor *x = rows_of_mixture(n), *routed = route(n, w, dims, x);
        ggml_tensor *experts, *sums = nullptr;
        if (w.in_ram) {
            // The shared expert is the device's. It lies between the way to the host and the host's part, which so runs
            // beside it: sources come in a graph's order.
            sums = experts_of_host(w, routed, n.T);
            experts = dims.shared() ? flat(n.in[2]) : sums;
        } else {
            MoeMatmulArgs of_dims{};
            of_dims.dims = dims;
            ggml_tensor *h = up(w, dims, w.shared, routed),
                        *of_down = offsets(plain.cache.slots_of(w), w.down);
            const int32_t shared_type = dims.shared() ? w.shared.down->type : w.down->type;
            if (!plain.prefill() && moe_ends_at_once(dims, w.down->type, shared_type)) {
                // It polls for what up leaves, so no launch comes between (common/overlap.cuh).
                MoeEndArgs end{};
                end.dims = dims;
                made(y, Form::rows) = ops::moe_end(
                    ctx, {routed, h, w.down, x, w.shared.down, of_down, counts(w)}, end); // {E, 1}
                return;
            }
            // Of very few rows this polls too.
            experts = ops::moe_down(ctx, {routed, h, w.down, w.shared.down, of_down}, of_dims);
        }
        MoeSumArgs sum{};
        sum.dims = dims;
        const bool packs =
            part(n, "N").stage == n.stage; // else a weight of this stage stands in for the norm's
        const OpNode t = (plain.prefill() ? ops::moe_sum_prompt : ops::moe_sum)(
            ctx, {routed, experts, x, part(n, packs ? "N" : "P").w[0], sums, nullptr, counts(w)}, sum);
        made(y, Form::rows) = t[0]; // {E, T}
        if (!plain.prefill() && packs) {
            made({y.graph, y.node, 1}, Form::packed) = t[1];
        }
    }

    void emit_own(const Node &n, Val y) override {
        switch (n.op) {
            case Op::matmul:
            case Op::matmul_add:
            case Op::matmul_first: matmul(n, y); break;
            case Op::add_norm: add_norm(n, y); break;
            case Op::glu: {
                ggml_tensor *gate = flat(n.in[0]), *up = flat(n.in[1]);
                made(y, Form::rows) = std::get<Activation>(n.params) == SILU
                                          ? ggml_swiglu_split(ctx, gate, up)
                                          : ggml_geglu_split(ctx, gate, up);
                break;
            }
            case Op::add_normed: add_normed(n, y); break;
            case Op::add_convolved: add_convolved(n, y); break;
            case Op::part: rank_part(n, y); break;
            case Op::exchange: exchange(n, y); break;
            case Op::gather: gather(n, y); break;
            case Op::heads: heads(n, y); break;
            case Op::queries: made(y, Form::rows) = queries(n); break;
            case Op::delta_layer: delta_layer(n, y); break;
            case Op::mixture: mixture(n, y); break;
            case Op::routed_experts: made(y, Form::rows) = routed_experts(n); break;
            case Op::route:
            case Op::experts:
            case Op::mix:
                fail(LUCE_E_UNSUPPORTED,
                     "a GPU has no op of experts but by the rules mixture.. and routed_experts");
            default: fail(LUCE_E_INTERNAL, "a GPU has no op %d of a plain graph", int(n.op));
        }
    }

private:
    std::vector<AttentionPlan> plans_;
    std::vector<int32_t> exchanges_; // of each rank so far
};

} // namespace

std::unique_ptr<Lowering> gpu_lowering(Plain &plain, const std::vector<StepInputs> &in, ggml_context *ctx,
                                       ggml_cgraph *nodes) {
    return std::make_unique<GpuLowering>(plain, in, ctx, nodes);
}

} // namespace luce

#endif
