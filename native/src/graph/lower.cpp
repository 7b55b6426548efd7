#include "graph/lowering.h"

#include "cpu/matmul.h"
#include "ops/row.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace luce {

Lowering::Lowering(Plain &graph_, const StepInputs &inputs, ggml_context *context, ggml_cgraph *nodes)
    : plain(graph_), in(inputs), ctx(context), graph(nodes), gpu(graph_.model.device().gpu) {}

StepOutputs lower(Plain &plain, const StepInputs &in, ggml_context *ctx, ggml_cgraph *nodes) {
#ifdef LUCE_USE_CUDA
    if (plain.model.device().gpu) {
        return gpu_lowering(plain, in, ctx, nodes)->run();
    }
#endif
    return cpu_lowering(plain, in, ctx, nodes)->run();
}

StepOutputs Lowering::run() {
    fuse(plain, {plain, gpu, [this](ggml_type type) { return looks_up(type); }});
    made_.assign(plain.nodes.size() * MAX_OUT * size_t(Form::count), nullptr);
    for (int32_t i = 0; size_t(i) < plain.nodes.size(); i++) {
        switch (plain.nodes[size_t(i)].dead ? Op::any : plain.nodes[size_t(i)].op) {
            case Op::kv_write:
            case Op::heads:
            case Op::norm_rope:
            case Op::keep_hidden:
            case Op::compute:
            case Op::choose:
            case Op::keep_best: emit(i); break;
            default: break; // it comes where a reader asks for it
        }
    }
    StepOutputs out;
    const auto shown = [&](Val v) {
        ggml_tensor *t = v.graph == nullptr ? nullptr : rows(v);
        if (t != nullptr) {
            ggml_set_output(t);
        }
        return t;
    };
    out.logits = shown(plain.logits);
    out.hidden = shown(plain.hidden);
    out.choice = shown(plain.choice);
    return out;
}

// ---- forms ----

ggml_tensor *Lowering::rows(Val v) {
    ggml_tensor *&t = made(v, Form::rows);
    if (t == nullptr) {
        emit(v.node);
    }
    if (NormOf norm; t == nullptr && as_norm(v, norm)) { // of a sum whose op leaves the norm in another form
        t = norm_rows(rows(norm.x), norm.w, norm.eps);
    }
    if (t == nullptr) {
        fail(LUCE_E_INTERNAL, "op %d of a plain graph has no rows", int(plain.at(v).op));
    }
    if (const auto name = plain.names.find(v); name != plain.names.end()) {
        ggml_set_name(t, name->second.c_str());
    }
    return t;
}

ggml_tensor *Lowering::flat(Val v) {
    ggml_tensor *t = rows(v);
    const int64_t n = plain.width(v), T = plain.at(v).T;
    if (t->ne[0] == n && t->ne[2] == 1) {
        return t;
    }
    return ggml_is_contiguous(t) ? ggml_reshape_2d(ctx, t, n, T) : ggml_cont_2d(ctx, t, n, T);
}

bool Lowering::as_norm(Val v, NormOf &norm) const {
    const Node &n = plain.at(v);
    if (n.op == Op::norm) {
        norm = {n.in[0], n.w[0], std::get<float>(n.params)};
        return true;
    }
    if ((n.op == Op::add_norm || n.op == Op::mixture) && v.out == 1) {
        const Node &behind = part(n, "N");
        norm = {{v.graph, v.node, 0}, behind.w[0], std::get<float>(behind.params)};
        return true;
    }
    return false;
}

// ---- ggml's nodes and luce's ----

ggml_tensor *Lowering::op(const char *name, ggml_type type, int64_t ne0, int64_t ne1,
                          std::vector<ggml_tensor *> args, std::vector<int32_t> params) {
    return add_op(ctx, *find_op(name), type, ne0, ne1, args.data(), int(args.size()), params.data(),
                  int(params.size()));
}

ggml_tensor *Lowering::expand(ggml_tensor *t) {
    ggml_build_forward_expand(graph, t);
    return t;
}

ggml_tensor *Lowering::part_of(ggml_tensor *y, int64_t n, int64_t T, int64_t at) {
    return ggml_view_2d(ctx, y, n, T, size_t(n) * sizeof(float), size_t(at) * sizeof(float));
}

void Lowering::split_products(ggml_tensor *y, const std::vector<ggml_tensor *> &w,
                              const std::vector<size_t> &which, Val v) {
    int64_t at = 0;
    for (const size_t i : which) {
        const int64_t N = w[i]->ne[1], T = plain.at(v).T;
        made({v.graph, v.node, int32_t(i)}, Form::rows) = part_of(y, N, T, at); // {N, T}
        at += N * T;
    }
}

ggml_tensor *Lowering::first_rows(ggml_tensor *w, int64_t n) {
    ggml_tensor *part = ggml_view_2d(ctx, w, w->ne[0], n, w->nb[1], 0); // {K, n}
    part->op_params[0] = w->op_params[0]; // is_packed reads it
    return part;
}

// In a step of a GPU each row is a matrix of its own in a batch of products with one row: ggml's kernel for one row
// computes them, and reads the weight once for each. Its kernels for several rows would add in another order.
ggml_tensor *Lowering::mul_mat(ggml_tensor *weight, ggml_tensor *x) {
    const int64_t T = x->ne[1];
    const bool by_row = gpu && !plain.prefill();
    if (by_row) {
        x = ggml_view_3d(ctx, x, x->ne[0], 1, T, x->nb[1], x->nb[1], 0); // {K, 1, T}
    }
    ggml_tensor *y = ggml_mul_mat(ctx, weight, x);
    ggml_prec_set_acc(y, GGML_PREC_F32); // otherwise cuBLAS may sum F16 products in F16
    if (ggml_is_quantized(weight->type)) {
        ggml_prec_set_src(y, GGML_PREC_Q8, 1); // otherwise rows may be rounded to 4 bits for weights of 4
    }
    if (const float *factor = scales_of(weight)) {
        y = ggml_scale(ctx, y, *factor);
    }
    return by_row ? ggml_reshape_2d(ctx, y, weight->ne[1], T) : y;
}

ggml_tensor *Lowering::norm_rows(ggml_tensor *x, ggml_tensor *w, float eps) {
    return ggml_mul(ctx, ggml_rms_norm(ctx, x, eps), w);
}

ggml_tensor *Lowering::embedding(ggml_tensor *table) {
    ggml_tensor *tokens = in.tokens;
    if (!plain.prefill()) { // rows may be drafts that never left the device
        tokens = op("row_tokens", GGML_TYPE_I32, plain.T, 1, {tokens, plain.cache.drafts()},
                    {int32_t(table->ne[1])});
    }
    return ggml_get_rows(ctx, table, tokens); // {E, T}
}

static ggml_tensor *rotated(ggml_context *ctx, ggml_tensor *x, ggml_tensor *positions,
                            const AttentionShape &s) {
    if (s.rope_dim == 0) {
        return x;
    }
    const Yarn &y = s.yarn; // where it blends, ggml scales by 1 + 0.1 ln(factor) itself
    const bool blends = y.factor > 1;
    const float factor = blends ? y.attention / (1.0f + 0.1f * std::log(y.factor)) : 1.0f;
    // It is plain NEOX, since for text the axes of M-RoPE are all equal.
    return ggml_rope_ext(ctx, x, positions, nullptr, int(s.rope_dim), GGML_ROPE_TYPE_NEOX,
                         int(y.n_ctx_trained), s.rope_base, 1.0f / y.factor, blends ? 1.0f : 0.0f, factor,
                         blends ? y.beta_fast : 0.0f, blends ? y.beta_slow : 0.0f);
}

// ---- attention ----

// It is expanded here, since attention reads the cells and not this node.
void Lowering::store(ggml_tensor *k, ggml_tensor *v, const KvLayer &kv) {
    expand(op("kv_store", GGML_TYPE_I32, 1, 1, {k, v, kv.cells.k, kv.cells.v, in.ctl, in.pages},
              {plain.prefill(), kv.owner}));
}

void Lowering::emit_norm_rope(const Node &n, Val y) {
    const Node &k_norm = part(n, "k_norm");
    const AttentionShape &shape = *std::get<const AttentionShape *>(part(n, "Q").params);
    ggml_tensor *k = flat(n.in[0]);
    std::vector<ggml_tensor *> args = {k, k_norm.w[0], in.positions};
    int64_t Q = 0;
    if (n.in.size() > 2) {
        Q = plain.width(n.in[2]) / 2;
        args.insert(args.end(), {flat(n.in[2]), part(n, "q_norm").w[0]});
    }
    const int64_t K = k->ne[0];
    ggml_tensor *both = op("norm_rope", GGML_TYPE_F32, (K + Q) * n.T, 1, args,
                           {int32_t(shape.rope_dim), bits_of_real(shape.rope_base),
                            bits_of_real(std::get<float>(k_norm.params))});
    if (Q > 0) {
        made({y.graph, y.node, 1}, Form::rows) = part_of(both, Q, n.T, K * n.T);
    }
    store(part_of(both, K, n.T, 0), flat(n.in[1]), std::get<KvLayer>(n.params));
}

// Attention's own op reads the gates where they lie beside the queries.
ggml_tensor *Lowering::gate_of(Val gate) {
    const Node &n = plain.at(gate);
    return n.op == Op::split_heads ? flat(n.in[0]) : flat(gate);
}

// Adds an op of attention over what a step's rows see, whose node has `values` of the result, then room for partial ones.
ggml_tensor *Lowering::attention(const char *name, const Node &n, int64_t values, ggml_tensor *plan,
                                 int32_t last_param) {
    const Attends &a = std::get<Attends>(n.params);
    ggml_tensor *q = flat(n.in[0]);
    std::vector<ggml_tensor *> args = {
        q, n.in.size() > 2 ? gate_of(n.in[2]) : q, a.kv.cells.k, a.kv.cells.v, in.ctl, in.pages};
    if (plan != nullptr) {
        args.push_back(plan);
    }
    const int64_t room = attention_room(*a.shape, a.kv.cells, n.T, a.block);
    return op(name, GGML_TYPE_F32, values + room, 1, args,
              {a.kv.owner == KV_HEAD, int32_t(a.shape->window), int32_t(plain.cache.max_pages()),
               bits_of_real(a.scale), bits_of_real(a.shape->softcap), n.in.size() > 2, last_param});
}

// Computes a prompt's attention by ggml's op over the sequence's cells, put side by side.
ggml_tensor *Lowering::attend_prompt(const Node &n) {
    const Attends &a = std::get<Attends>(n.params);
    const AttentionShape &s = *a.shape;
    const int64_t D = s.head_dim, H = s.n_head, Hkv = s.n_head_kv;
    const ggml_type type = a.kv.cells.k->type == GGML_TYPE_F32 ? GGML_TYPE_F32 : GGML_TYPE_F16;
    const auto gathered = [&](ggml_tensor *pool) { // {D, n_kv, Hkv}
        ggml_tensor *t = op("kv_gather", type, D * Hkv, plain.n_kv, {pool, in.ctl, in.pages});
        return ggml_view_3d(ctx, t, D, plain.n_kv, Hkv, t->nb[1], ggml_row_size(type, D), 0);
    };
    ggml_tensor *&mask = masks_[s.window]; // {n_kv, T} F16
    if (mask == nullptr) {
        mask = op("prefill_mask", GGML_TYPE_F16, plain.n_kv, plain.T, {in.ctl}, {0, int32_t(s.window)});
    }
    ggml_tensor *q = ggml_reshape_3d(ctx, flat(n.in[0]), D, H, n.T);
    ggml_tensor *K = gathered(a.kv.cells.k), *V = gathered(a.kv.cells.v);
    ggml_tensor *o =
        ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), K, V, mask, a.scale, 0.0f, s.softcap);
    ggml_prec_set_acc(o, GGML_PREC_F32);
    return ggml_reshape_2d(ctx, o, D * H, n.T); // {D*H, T}
}

// ---- DeltaNet ----

std::vector<int32_t> Lowering::delta_params(const Recurs &r) const {
    const CacheParams &p = plain.cache.params();
    const DeltaNetShape &s = r.w->shape;
    return {int32_t(p.n_rows),    int32_t(p.n_sequences), int32_t(s.n_k_heads),
            int32_t(s.n_v_heads), int32_t(s.state_size),  plain.prefill() ? DELTA_APPEND : DELTA_VERIFY};
}

// ---- experts in host memory ----

std::vector<int32_t> Lowering::host_expert_params(const Moe &w, int64_t E, int64_t T) const {
    const int64_t shared = w.shared_gate == nullptr ? 0 : w.shared.gate->ne[1];
    return {w.gate_up != nullptr,  int32_t(T),      int32_t(w.shape.n_used),  int32_t(E),
            int32_t(w.shape.n_ff), int32_t(shared), int32_t(w.shape.n_expert)};
}

// Computes in host memory each row's weighted sum of its experts' results {E, T}. On a CPU `routed` is the route of the
// values x; on a GPU it is what ram_give gives, twice.
ggml_tensor *Lowering::host_experts(ggml_tensor *routed, ggml_tensor *x, const Moe &w, int64_t E, int64_t T) {
    std::vector<ggml_tensor *> args = {routed, x, w.down};
    if (w.gate_up != nullptr) {
        args.push_back(w.gate_up);
    } else {
        args.insert(args.end(), {w.gate, w.up});
    }
    return op("ram_experts", GGML_TYPE_F32, E, T, args, host_expert_params(w, E, T));
}

void Lowering::keep(Val h) {
    expand(ggml_set_rows(ctx, plain.cache.hidden(), values(h), in.hidden_to));
}

// ---- nodes ----

void Lowering::emit(int32_t node) {
    const Node &n = plain.nodes[size_t(node)];
    const Val y = {&plain, node, 0};
    const auto set = [&](ggml_tensor *t) { made(y, Form::rows) = t; };
    const auto real = [&] { return std::get<float>(n.params); };
    const Cache &cache = plain.cache;
    switch (n.op) {
        case Op::embed: set(embedding(n.w[0])); break;
        case Op::kept_hidden: set(ggml_get_rows(ctx, cache.hidden(), in.hidden_from)); break;
        case Op::previous: {
            ggml_tensor *h = values(n.in[0]);
            ggml_tensor *before = ggml_get_rows(ctx, cache.hidden(), ggml_view_1d(ctx, in.hidden_from, 1, 0));
            set(n.T == 1 ? before
                         : ggml_concat(ctx, before, ggml_view_2d(ctx, h, h->ne[0], n.T - 1, h->nb[1], 0), 1));
            break;
        }
        case Op::norm: set(norm_rows(flat(n.in[0]), n.w[0], real())); break;
        case Op::head_norm: {
            const int64_t D = n.w[0]->ne[0];
            const bool split = plain.at(n.in[0]).op == Op::split_heads;
            ggml_tensor *x = split ? rows(n.in[0]) : ggml_reshape_3d(ctx, flat(n.in[0]), D, n.n[0] / D, n.T);
            set(norm_rows(x, n.w[0], real())); // {D, heads, T}
            break;
        }
        case Op::add: set(ggml_add(ctx, flat(n.in[1]), flat(n.in[0]))); break;
        case Op::mul: set(ggml_mul(ctx, flat(n.in[0]), flat(n.in[1]))); break;
        case Op::silu: set(ggml_silu(ctx, flat(n.in[0]))); break;
        case Op::glu: set(ggml_swiglu_split(ctx, flat(n.in[0]), flat(n.in[1]))); break;
        case Op::gated: {
            ggml_tensor *gate = rows(n.in[1]);
            if (gate->ne[0] != n.n[0] && gate->ne[0] != 1) {
                gate = ggml_cont_2d(ctx, gate, n.n[0], n.T); // {D*H, T}
            }
            set(ggml_mul(ctx, flat(n.in[0]), ggml_sigmoid(ctx, gate)));
            break;
        }
        case Op::concat: set(ggml_concat(ctx, rows(n.in[0]), rows(n.in[1]), 0)); break;
        case Op::split_heads: {
            const AttentionShape &s = *std::get<const AttentionShape *>(n.params);
            const size_t D = s.head_dim, H = s.n_head, f = sizeof(float);
            ggml_tensor *both = flat(n.in[0]);
            for (int32_t half : {0, 1}) { // {D, H, T}
                made({&plain, node, half}, Form::rows) = ggml_view_3d(
                    ctx, both, int64_t(D), int64_t(H), n.T, 2 * D * f, 2 * D * H * f, size_t(half) * D * f);
            }
            break;
        }
        case Op::rope:
            set(rotated(ctx, rows(n.in[0]), in.positions, *std::get<const AttentionShape *>(n.params)));
            break;
        case Op::kv_write: store(flat(n.in[0]), flat(n.in[1]), std::get<KvLayer>(n.params)); break;
        case Op::attend:
        case Op::gated_attend: {
            const bool block = std::get<Attends>(n.params).block;
            const int64_t K = plain.width(y);
            set(plain.prefill()
                    ? attend_prompt(n)
                    : part_of(attention(block ? "block_attention" : "attention", n, K * n.T, nullptr, block),
                              K, n.T, 0));
            break;
        }
        case Op::conv: {
            const Recurs &r = std::get<Recurs>(n.params);
            ggml_tensor *qkv = flat(n.in[0]);
            set(op("deltanet_conv", GGML_TYPE_F32, n.n[0], n.T,
                   {qkv, n.w[0], r.state.window, r.state.log, in.ctl}, delta_params(r)));
            break;
        }
        case Op::delta_rule: { // it has the result, then room for what chunks share
            const Recurs &r = std::get<Recurs>(n.params);
            const int64_t K = n.n[0], room = chunks_room(r.w->shape, n.T);
            ggml_tensor *o = op(room > 0 ? "deltanet_chunks" : "deltanet", GGML_TYPE_F32, K * n.T + room, 1,
                                {flat(n.in[0]), flat(n.in[1]), flat(n.in[2]), n.w[0], n.w[1], r.state.state,
                                 r.state.log, in.ctl},
                                delta_params(r));
            set(part_of(o, K, n.T, 0));
            break;
        }
        case Op::scale: set(ggml_scale(ctx, flat(n.in[0]), real())); break;
        case Op::softcap:
            set(ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, flat(n.in[0]), 1.0f / real())), real()));
            break;
        case Op::first: {
            ggml_tensor *x = flat(n.in[0]);
            set(ggml_cont(ctx, ggml_view_2d(ctx, x, n.n[0], n.T, x->nb[1], 0))); // {n, T}
            break;
        }
        case Op::last: {
            ggml_tensor *x = flat(n.in[0]);
            set(ggml_view_2d(ctx, x, x->ne[0], 1, x->nb[1], size_t(x->ne[1] - 1) * x->nb[1])); // {n, 1}
            break;
        }
        case Op::own_rows: set(flat(n.in[0])); break;
        case Op::spread: { // a token that the drafter does not have gets a logit that nothing chooses
            constexpr float NEVER = -1e30f;
            ggml_tensor *x = flat(n.in[0]), *all = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 1, n.n[0], n.T);
            all = ggml_set_rows(ctx, ggml_fill(ctx, all, NEVER), ggml_reshape_3d(ctx, x, 1, x->ne[0], n.T),
                                n.w[0]);
            set(ggml_reshape_2d(ctx, all, n.n[0], n.T)); // {V, T}
            break;
        }
        case Op::keep_hidden:
            if (plain.prefill()) { // the last row's, at entry 0
                ggml_tensor *h = values(n.in[0]);
                ggml_tensor *row =
                    ggml_view_2d(ctx, h, h->ne[0], 1, h->nb[1], size_t(h->ne[1] - 1) * h->nb[1]);
                expand(ggml_set_rows(ctx, cache.hidden(), row, ggml_view_1d(ctx, in.hidden_to, 1, 0)));
            } else {
                keep(n.in[0]);
            }
            break;
        case Op::compute: expand(rows(n.in[0])); break;
        case Op::choose:
            set(expand(op("choose", GGML_TYPE_I32, CHOICE_WIDTH, n.T,
                          {flat(n.in[0]), in.ctl, cache.drafts(), cache.given()},
                          {int32_t(std::get<int64_t>(n.params))})));
            break;
        case Op::keep_best: {
            const auto k = int32_t(cache.params().n_top);
            expand(
                op("topk", GGML_TYPE_I32, topk_scratch(k), n.T, {flat(n.in[0]), in.ctl, cache.lists()}, {k}));
            break;
        }
        case Op::norm_rope: emit_norm_rope(n, y); break;
        case Op::gated_norm: { // {S, H, T}
            const int64_t S = n.w[0]->ne[0], H = n.n[0] / S;
            ggml_tensor *x = norm_rows(ggml_reshape_3d(ctx, flat(n.in[0]), S, H, n.T), n.w[0], real());
            set(ggml_mul(ctx, x, ggml_silu(ctx, ggml_reshape_3d(ctx, flat(n.in[1]), S, H, n.T))));
            break;
        }
        default: emit_own(n, y);
    }
}

} // namespace luce
