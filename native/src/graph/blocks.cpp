#include "graph/blocks.h"

#include "ops/attention.h"
#include "ops/deltanet.h"
#include "ops/sampling.h"

#include <cmath>

namespace luce {

ggml_tensor *embed(const StepBuild &b, ggml_tensor *table) {
    ggml_tensor *tokens = b.in.tokens;
    if (!b.prefill()) { // rows may be drafts that never left the device
        TokensArgs a{};
        a.n_vocab = int32_t(table->ne[1]);
        tokens = ops::row_tokens(b.ctx, {tokens, b.cache.drafts()}, a);
    }
    return ggml_get_rows(b.ctx, table, tokens); // {E, T}
}

ggml_tensor *rope(const StepBuild &b, ggml_tensor *x, const AttentionShape &s) {
    if (s.rope_dim == 0) {
        return x;
    }
    const Yarn &y = s.yarn; // where it blends, ggml scales by 1 + 0.1 ln(factor) itself
    const bool blends = y.factor > 1;
    const float scale = blends ? y.attention / (1.0f + 0.1f * std::log(y.factor)) : 1.0f;
    return ggml_rope_ext(b.ctx, x, b.in.positions, nullptr, int(s.rope_dim), GGML_ROPE_TYPE_NEOX,
                         int(y.n_ctx_trained), s.rope_base, 1.0f / y.factor, blends ? 1.0f : 0.0f, scale,
                         blends ? y.beta_fast : 0.0f, blends ? y.beta_slow : 0.0f);
}

// Rotated holds heads of rows, normed and rotated.
struct Rotated {
    ggml_tensor *k; // {D*Hkv, T}
    ggml_tensor *q; // {D*H, T}; it is null where no q was given
};

// Norms and rotates k {D*Hkv, T} and q_gate {2*D*H, T}, as the weights give them.
static Rotated norm_rope(const StepBuild &b, const Attention &w, float eps, ggml_tensor *k,
                         ggml_tensor *q_gate) {
    NormRopeArgs a{};
    a.rope_dim = int32_t(w.shape.rope_dim);
    a.base = w.shape.rope_base;
    a.eps = eps;
    const OpNode y = ops::norm_rope(
        b.ctx, {k, w.k_norm, b.in.positions, q_gate, q_gate == nullptr ? nullptr : w.q_norm}, a);
    return {y[0], q_gate == nullptr ? nullptr : y[1]};
}

static void store_kv(const StepBuild &b, ggml_tensor *k, ggml_tensor *v, const KvLayer &kv) {
    // It is expanded here, since attention reads the cells and not this node.
    KvStoreArgs a{};
    a.append = b.prefill();
    a.owner = kv.owner;
    ggml_build_forward_expand(b.graph,
                              ops::kv_store(b.ctx, {k, v, kv.cells.k, kv.cells.v, b.in.ctl, b.in.pages}, a));
}

void write_kv(const StepBuild &b, const MatmulInput &x, const Attention &w, const KvLayer &kv, float eps) {
    if (heads_of_parts(b, x, w, kv, eps, false).stored) {
        return;
    }
    const auto y = matmuls(b, {w.k, w.v}, x);
    ggml_tensor *k = y[0]; // {D*Hkv, T}
    if (w.shape.yarn.factor > 1) { // luce's op does not blend frequencies
        const int64_t D = w.shape.head_dim, Hkv = w.shape.n_head_kv, T = k->ne[1];
        k = rope(b, rms_norm(b.ctx, ggml_reshape_3d(b.ctx, k, D, Hkv, T), w.k_norm, eps), w.shape);
        k = ggml_reshape_2d(b.ctx, k, D * Hkv, T);
    } else {
        k = norm_rope(b, w, eps, k, nullptr).k;
    }
    store_kv(b, k, y[1], kv);
}

ggml_tensor *prefill_mask(const StepBuild &b, int32_t window) {
    MaskArgs a{};
    a.T = int32_t(b.in.tokens->ne[0]);
    a.n_kv = b.n_kv;
    a.window = window;
    return ops::prefill_mask(b.ctx, {b.in.ctl}, a);
}

// Computes a prefill's attention by ggml's op over the sequence's cells, put side by side. q {D, H, T} ->
// {D*H, T}
static ggml_tensor *attend_prefill(const StepBuild &b, ggml_tensor *q, const AttentionShape &s,
                                   const KvLayer &kv, ggml_tensor *mask) {
    const int64_t D = s.head_dim, H = s.n_head, Hkv = s.n_head_kv, T = q->ne[2];
    KvGatherArgs a{};
    a.n_kv = b.n_kv;
    a.out_type = kv.cells.k->type == GGML_TYPE_F32 ? GGML_TYPE_F32 : GGML_TYPE_F16;
    const auto gathered = [&](ggml_tensor *pool) { // {D, n_kv, Hkv}
        ggml_tensor *t = ops::kv_gather(b.ctx, {pool, b.in.ctl, b.in.pages}, a); // {D*Hkv, n_kv}
        return ggml_view_3d(b.ctx, t, D, b.n_kv, Hkv, t->nb[1], ggml_row_size(t->type, D), 0);
    };
    ggml_tensor *K = gathered(kv.cells.k), *V = gathered(kv.cells.v);
    ggml_tensor *o = ggml_flash_attn_ext(b.ctx, ggml_permute(b.ctx, q, 0, 2, 1, 3), K, V, mask,
                                         1.0f / std::sqrt(float(D)), 0.0f, s.softcap);
    ggml_prec_set_acc(o, GGML_PREC_F32);
    return ggml_reshape_2d(b.ctx, o, D * H, T); // {D*H, T}
}

// Returns the lowest position that attention sees.
static int32_t first_position(const KvLayer &kv) {
    return kv.owner == KV_HEAD ? 1 : 0;
}

// Adds an op of attention, whose plan may be null.
static OpNode attention_op(const StepBuild &b, const OpRow<AttentionArgs> &op, ggml_tensor *q,
                           ggml_tensor *gate, const AttentionShape &s, const KvLayer &kv,
                           const AttentionPlan *plan) {
    const int64_t D = s.head_dim, T = q->ne[2];
    AttentionArgs a{};
    a.first = first_position(kv);
    a.window = int32_t(s.window);
    a.max_pages = b.model.device().gpu ? int32_t(b.cache.max_pages()) : 0;
    a.scale = 1.0f / std::sqrt(float(D));
    a.softcap = s.softcap;
    std::vector<ggml_tensor *> args = {
        ggml_reshape_2d(b.ctx, q, D * s.n_head, T), gate, kv.cells.k, kv.cells.v, b.in.ctl, b.in.pages};
    if (plan != nullptr) {
        args.push_back(plan->node);
        a.layer = plan->layers - 1;
    }
    return op(b.ctx, args, a);
}

ggml_tensor *attend_pages(const StepBuild &b, ggml_tensor *q, ggml_tensor *gate, const AttentionShape &s,
                          const KvLayer &kv, bool block) {
    return attention_op(b, block ? ops::block_attention : ops::attention, q, gate, s, kv,
                        nullptr); // {D*H, T}
}

#ifdef LUCE_USE_CUDA
// Returns the plan of a trunk layer's attention, which is made once for all layers like it, ahead of them. A head's one layer
// has none: its blocks make it in less time than another kernel takes.
static const AttentionPlan *attention_plan(const StepBuild &b, int64_t T, const AttentionShape &s,
                                           const KvLayer &kv) {
    if (kv.owner != KV_TRUNK) {
        return nullptr;
    }
    AttentionArgs a{};
    a.T = int32_t(T);
    a.H = int32_t(s.n_head);
    a.first = first_position(kv);
    a.window = int32_t(s.window);
    a.pool.type = kv.cells.k->type;
    a.pool.Hkv = int32_t(s.n_head_kv);
    a.pool.D = int32_t(s.head_dim);
    for (AttentionPlan &known : b.plans) {
        if (ops::attention_plan.same(known.node, a) && known.layers < PLAN_LAYERS) {
            known.layers++;
            return &known;
        }
    }
    ggml_tensor *plan = ops::attention_plan(b.ctx, {b.in.ctl}, a);
    ggml_build_forward_expand(b.graph, plan); // it does not stand between a layer's kernels
    b.plans.push_back({plan, 1});
    return &b.plans.back();
}
#endif

// Adds attention over what a step's rows see, as the product with `out` takes it.
static MatmulInput attended(const StepBuild &b, ggml_tensor *q, ggml_tensor *q_gate, const Attention &w,
                            const KvLayer &kv) {
#ifdef LUCE_USE_CUDA
    if (is_packed(w.out)) {
        const int64_t K = int64_t(w.shape.head_dim) * w.shape.n_head, T = q->ne[2];
        ggml_tensor *o =
            attention_op(b, ops::attention_packed, q, q_gate, w.shape, kv, attention_plan(b, T, w.shape, kv))
                .node;
        const MatmulInput in = {ROWMM_PLAIN, o, nullptr, nullptr, 0, K, T};
        made_input(b, in, true, [&] { return o; });
        return in;
    }
#endif
    return plain(attend_pages(b, q, q_gate, w.shape, kv, false));
}

// Makes the queries of the rows x {E, T}, and writes their K and V into their cells.
static Heads attention_heads(const StepBuild &b, const MatmulInput &x, const Attention &w, const KvLayer &kv,
                             float eps) {
    if (const Heads heads = heads_of_parts(b, x, w, kv, eps, true); heads.stored) {
        return heads;
    }
    const auto y = matmuls(b, {w.q, w.k, w.v}, x);
    const Rotated heads = norm_rope(b, w, eps, y[1], y[0]);
    store_kv(b, heads.k, y[2], kv);
    return {heads.q, y[0], true};
}

Stream attend(const StepBuild &b, const Stream &s, const Attention &w, const KvLayer &kv, ggml_tensor *mask,
              const Norm &next) {
    const Heads heads = attention_heads(b, s.normed, w, kv, next.eps);
    const AttentionShape &shape = w.shape;
    const size_t D = shape.head_dim, H = shape.n_head, f = sizeof(float);
    ggml_tensor *q = ggml_reshape_3d(b.ctx, heads.q, int64_t(D), int64_t(H), heads.q->ne[1]); // {D, H, T}
    if (!b.prefill()) {
        return matmul_add(b, w.out, attended(b, q, heads.gate, w, kv), s.x, next);
    }
    ggml_tensor *gate = ggml_view_3d(b.ctx, heads.gate, shape.head_dim, shape.n_head, q->ne[2], 2 * D * f,
                                     2 * D * H * f, D * f);
    return matmul_add(b, w.out, gated(attend_prefill(b, q, shape, kv, mask), gate), s.x, next);
}

Stream deltanet(const StepBuild &b, const Stream &s, const DeltaNet &w, const DeltaState &state,
                const Norm &next) {
    const CacheParams &p = b.cache.params();
    DeltaShape shape{};
    shape.T = int32_t(s.normed.T);
    shape.R = int32_t(p.n_rows);
    shape.n_slots = int32_t(p.n_sequences);
    shape.Hk = int32_t(w.shape.n_k_heads);
    shape.Hv = int32_t(w.shape.n_v_heads);
    shape.S = int32_t(w.shape.state_size);
    shape.mode = b.prefill() ? DELTA_APPEND : DELTA_VERIFY;
    if (const DeltaOutputs of = delta_of_parts(b, s.normed, w, state, shape); of.o != nullptr) {
        return matmul_add(b, w.out, gated_heads(of.o, w.norm, of.z, next.eps), s.x, next);
    }
    const DeltaInputs in = delta_inputs(b, s.normed, w, state, shape);
    DeltaArgs a{};
    a.shape = shape;
    const OpRow<DeltaArgs> *op = &ops::deltanet;
#ifdef LUCE_USE_CUDA
    if (uses_gemm(b, s.normed.T) && deltanet_chunks_scratch(shape) > 0) {
        op = &ops::deltanet_chunks;
    }
#endif
    ggml_tensor *o = (*op)(b.ctx, {in.qkv, in.alpha, in.beta, w.dt, w.a, state.state, state.log, b.in.ctl},
                           a); // {Hv*S, T}
    return matmul_add(b, w.out, gated_heads(o, w.norm, in.z, next.eps), s.x, next);
}

void keep_lists(const StepBuild &b, ggml_tensor *logits) {
    if (const uint32_t k = b.cache.params().n_top; k > 0) {
        TopkArgs a{};
        a.k = int32_t(k);
        ggml_build_forward_expand(b.graph, ops::topk(b.ctx, {logits, b.in.ctl, b.cache.lists()}, a));
    }
}

} // namespace luce
