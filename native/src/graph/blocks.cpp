#include "graph/blocks.h"

#include "ops/matmul.h"
#include "ops/prompt_matmul.h"
#include "ops/row.h"

#include <cmath>
#include <cstring>

namespace luce {

ggml_tensor *embed(const StepBuild &b, ggml_tensor *table) {
    ggml_tensor *tokens = b.in.tokens;
    if (!b.prefill()) { // rows may be drafts that never left the device
        tokens = add_op(b.ctx, "row_tokens", GGML_TYPE_I32, tokens->ne[0], 1, {tokens, b.cache.drafts()},
                        {int32_t(table->ne[1])});
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
    const int64_t K = k->ne[0], Q = q_gate == nullptr ? 0 : q_gate->ne[0] / 2, T = k->ne[1];
    ggml_tensor *args[] = {k, w.k_norm, b.in.positions, q_gate, w.q_norm};
    const int32_t params[] = {int32_t(w.shape.rope_dim), bits_of_real(w.shape.rope_base), bits_of_real(eps)};
    ggml_tensor *y = add_op(b.ctx, *find_op("norm_rope"), GGML_TYPE_F32, (K + Q) * T, 1, args,
                            q_gate == nullptr ? 3 : 5, params, 3);
    const size_t f = sizeof(float);
    return {ggml_view_2d(b.ctx, y, K, T, size_t(K) * f, 0),
            Q == 0 ? nullptr : ggml_view_2d(b.ctx, y, Q, T, size_t(Q) * f, size_t(K * T) * f)};
}

static void store_kv(const StepBuild &b, ggml_tensor *k, ggml_tensor *v, const KvLayer &kv) {
    // It is expanded here, since attention reads the cells and not this node.
    ggml_build_forward_expand(b.graph, add_op(b.ctx, "kv_store", GGML_TYPE_I32, 1, 1,
                                              {k, v, kv.cells.k, kv.cells.v, b.in.ctl, b.in.pages},
                                              {b.prefill(), kv.owner}));
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
    return add_op(b.ctx, "prefill_mask", GGML_TYPE_F16, b.n_kv, b.in.tokens->ne[0], {b.in.ctl}, {0, window});
}

// Computes a prefill's attention by ggml's op over the sequence's cells, put side by side. q {D, H, T} ->
// {D*H, T}
static ggml_tensor *attend_prefill(const StepBuild &b, ggml_tensor *q, const AttentionShape &s,
                                   const KvLayer &kv, ggml_tensor *mask) {
    const int64_t D = s.head_dim, H = s.n_head, Hkv = s.n_head_kv, T = q->ne[2];
    const ggml_type type = kv.cells.k->type == GGML_TYPE_F32 ? GGML_TYPE_F32 : GGML_TYPE_F16;
    const auto gathered = [&](ggml_tensor *pool) { // {D, n_kv, Hkv}
        ggml_tensor *t = add_op(b.ctx, "kv_gather", type, D * Hkv, b.n_kv, {pool, b.in.ctl, b.in.pages}, {});
        return ggml_view_3d(b.ctx, t, D, b.n_kv, Hkv, t->nb[1], ggml_row_size(type, D), 0);
    };
    ggml_tensor *K = gathered(kv.cells.k), *V = gathered(kv.cells.v);
    ggml_tensor *o = ggml_flash_attn_ext(b.ctx, ggml_permute(b.ctx, q, 0, 2, 1, 3), K, V, mask,
                                         1.0f / std::sqrt(float(D)), 0.0f, s.softcap);
    ggml_prec_set_acc(o, GGML_PREC_F32);
    return ggml_reshape_2d(b.ctx, o, D * H, T); // {D*H, T}
}

// Returns how many values the attention op needs beside its result. The CPU's needs none.
static int64_t attention_room(const StepBuild &b, const AttentionShape &s, const KvCells &cells, int64_t T,
                              bool block) {
#ifdef LUCE_USE_CUDA
    if (b.model.device().gpu) {
        if (block) {
            return block_attention_scratch(T, s.n_head, s.head_dim);
        }
        AttentionArgs shape{};
        shape.pool = {nullptr, nullptr, cells.k->type, int32_t(s.n_head_kv), int32_t(s.head_dim)};
        shape.T = int32_t(T);
        shape.H = int32_t(s.n_head);
        shape.max_pages = int32_t(b.cache.max_pages());
        return attention_scratch(shape);
    }
#else
    (void) b, (void) s, (void) cells, (void) T, (void) block;
#endif
    return 0;
}

// Returns the lowest position that attention sees.
static int32_t first_position(const KvLayer &kv) {
    return kv.owner == KV_HEAD ? 1 : 0;
}

// Adds an op of attention, whose node has `values` of the result, then room for partial ones. `plan` may be null.
static ggml_tensor *attention_op(const StepBuild &b, const char *name, int64_t values, ggml_tensor *q,
                                 ggml_tensor *gate, const AttentionShape &s, const KvLayer &kv, bool block,
                                 const AttentionPlan *plan) {
    const int64_t D = s.head_dim, T = q->ne[2];
    q = ggml_reshape_2d(b.ctx, q, D * s.n_head, T);
    ggml_tensor *args[] = {q,
                           gate == nullptr ? q : gate,
                           kv.cells.k,
                           kv.cells.v,
                           b.in.ctl,
                           b.in.pages,
                           plan == nullptr ? nullptr : plan->node};
    const int32_t params[] = {first_position(kv),
                              int32_t(s.window),
                              int32_t(b.cache.max_pages()),
                              bits_of_real(1.0f / std::sqrt(float(D))),
                              bits_of_real(s.softcap),
                              gate != nullptr,
                              plan == nullptr ? int32_t(block) : plan->layers - 1}; // a block has no plan
    return add_op(b.ctx, *find_op(name), GGML_TYPE_F32, values + attention_room(b, s, kv.cells, T, block), 1,
                  args, plan == nullptr ? 6 : 7, params, 7);
}

ggml_tensor *attend_pages(const StepBuild &b, ggml_tensor *q, ggml_tensor *gate, const AttentionShape &s,
                          const KvLayer &kv, bool block) {
    const int64_t K = int64_t(s.head_dim) * s.n_head, T = q->ne[2];
    ggml_tensor *o =
        attention_op(b, block ? "block_attention" : "attention", K * T, q, gate, s, kv, block, nullptr);
    return ggml_view_2d(b.ctx, o, K, T, size_t(K) * sizeof(float), 0);
}

#ifdef LUCE_USE_CUDA
// Returns the plan of a trunk layer's attention, which is made once for all layers like it, ahead of them. A head's one layer
// has none: its blocks make it in less time than another kernel takes.
static const AttentionPlan *attention_plan(const StepBuild &b, int64_t T, const AttentionShape &s,
                                           const KvLayer &kv) {
    if (kv.owner != KV_TRUNK) {
        return nullptr;
    }
    const std::vector<int32_t> params = {int32_t(T),         int32_t(s.n_head),         first_position(kv),
                                         int32_t(s.window),  int32_t(kv.cells.k->type), int32_t(s.n_head_kv),
                                         int32_t(s.head_dim)};
    for (AttentionPlan &known : b.plans) {
        if (known.params == params && known.layers < PLAN_LAYERS) {
            known.layers++;
            return &known;
        }
    }
    ggml_tensor *args[] = {b.in.ctl};
    ggml_tensor *plan = add_op(b.ctx, *find_op("attention_plan"), GGML_TYPE_I32,
                               attention_plan_bytes() / int64_t(sizeof(int32_t)), 1, args, 1, params.data(),
                               int(params.size()));
    ggml_build_forward_expand(b.graph, plan); // it does not stand between a layer's kernels
    b.plans.push_back({params, plan, 1});
    return &b.plans.back();
}
#endif

// Adds attention over what a step's rows see, as the product with `out` takes it.
static MatmulInput attended(const StepBuild &b, ggml_tensor *q, ggml_tensor *q_gate, const Attention &w,
                            const KvLayer &kv) {
#ifdef LUCE_USE_CUDA
    if (is_packed(w.out)) {
        const int64_t K = int64_t(w.shape.head_dim) * w.shape.n_head, T = q->ne[2];
        const int64_t packed = rowmm_op_bytes(T, K) / int64_t(sizeof(float));
        ggml_tensor *o = attention_op(b, "attention_packed", packed, q, q_gate, w.shape, kv, false,
                                      attention_plan(b, T, w.shape, kv));
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

// Returns how many values the delta rule needs beside its result where a long prefill on a GPU is done by
// chunks, and 0 elsewhere.
static int64_t chunks_room(const StepBuild &b, const DeltaNetShape &s, int64_t T) {
#ifdef LUCE_USE_CUDA
    if (uses_gemm(b, T)) {
        DeltaShape shape{};
        shape.T = int32_t(T);
        shape.Hk = int32_t(s.n_k_heads);
        shape.Hv = int32_t(s.n_v_heads);
        shape.S = int32_t(s.state_size);
        return (deltanet_chunks_scratch(shape) + 3) / 4;
    }
#else
    (void) b, (void) s, (void) T;
#endif
    return 0;
}

Stream deltanet(const StepBuild &b, const Stream &s, const DeltaNet &w, const DeltaState &state,
                const Norm &next) {
    const int64_t S = w.shape.state_size, Hv = w.shape.n_v_heads, T = s.normed.T;
    const CacheParams &p = b.cache.params();
    const int32_t mode = b.prefill() ? DELTA_APPEND : DELTA_VERIFY;
    const std::vector<int32_t> params = {
        int32_t(p.n_rows), int32_t(p.n_sequences), int32_t(w.shape.n_k_heads), int32_t(Hv), int32_t(S), mode};
    if (const DeltaOutputs of = delta_of_parts(b, s.normed, w, state, params); of.o != nullptr) {
        return matmul_add(b, w.out, gated_heads(of.o, w.norm, of.z, next.eps), s.x, next);
    }
    const DeltaInputs in = delta_inputs(b, s.normed, w, state, params);
    ggml_tensor *args[] = {in.qkv, in.alpha, in.beta, w.dt, w.a, state.state, state.log, b.in.ctl};
    const int64_t room = chunks_room(b, w.shape, T);
    ggml_tensor *o = // this has the result, then room for what chunks share
        add_op(b.ctx, *find_op(room > 0 ? "deltanet_chunks" : "deltanet"), GGML_TYPE_F32, Hv * S * T + room,
               1, args, 8, params.data(), int(params.size()));
    o = ggml_view_2d(b.ctx, o, Hv * S, T, size_t(Hv * S) * sizeof(float), 0);
    return matmul_add(b, w.out, gated_heads(o, w.norm, in.z, next.eps), s.x, next);
}

void keep_lists(const StepBuild &b, ggml_tensor *logits) {
    if (const uint32_t k = b.cache.params().n_top; k > 0) {
        ggml_build_forward_expand(b.graph,
                                  add_op(b.ctx, "topk", GGML_TYPE_I32, topk_scratch(int32_t(k)),
                                         logits->ne[1], {logits, b.in.ctl, b.cache.lists()}, {int32_t(k)}));
    }
}

} // namespace luce
