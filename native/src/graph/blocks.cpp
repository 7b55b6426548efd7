#include "graph/blocks.h"

namespace luce {

Attention read_attention(WeightReader &r, const std::string &p, const AttentionShape &shape, int64_t E,
                         bool gated) {
    const int64_t D = shape.head_dim, H = shape.n_head, Hkv = shape.n_head_kv;
    Attention a{};
    a.shape = shape;
    a.gated = gated;
    a.q = r.matrix(p + "attn_q.weight", E, (gated ? 2 : 1) * D * H, ROWS);
    const Cut of_kv = {ROWS.axis, 1, shape.kv_copies};
    a.k = r.matrix(p + "attn_k.weight", E, D * Hkv, of_kv);
    a.v = r.matrix(p + "attn_v.weight", E, D * Hkv, of_kv);
    a.out = r.matrix(p + "attn_output.weight", D * H, E, COLUMNS);
    a.q_norm = r.f32(p + "attn_q_norm.weight", {D});
    a.k_norm = r.f32(p + "attn_k_norm.weight", {D});
    return a;
}

Ffn read_ffn(WeightReader &r, const std::string &p, int64_t E, int64_t FF, const char *suffix) {
    const auto named = [&](const char *part) { return p + "ffn_" + part + suffix + ".weight"; };
    Ffn f{};
    f.gate = r.matrix(named("gate"), E, FF, ROWS);
    f.up = r.matrix(named("up"), E, FF, ROWS);
    f.down = r.matrix(named("down"), FF, E, COLUMNS);
    return f;
}

Moe read_mixture(WeightReader &r, const std::string &p, const MoeShape &shape, int64_t E, bool in_ram,
                 bool scaled) {
    const int64_t FF = shape.n_ff, n = shape.n_expert;
    Moe m{};
    m.shape = shape;
    m.in_ram = in_ram;
    m.router = r.router(p + "ffn_gate_inp.weight", E, n);
    if (r.has(p + "ffn_gate_up_exps.weight")) {
        const Cut both = {ROWS.axis, 2};
        m.gate_up = r.experts(p + "ffn_gate_up_exps.weight", E, 2 * FF, n, in_ram, both, 2);
    } else {
        m.gate = r.experts(p + "ffn_gate_exps.weight", E, FF, n, in_ram, ROWS);
        m.up = r.experts(p + "ffn_up_exps.weight", E, FF, n, in_ram, ROWS);
    }
    const std::string down = p + "ffn_down_exps.weight";
    m.down = scaled ? r.scaled_experts(down, FF, E, n, in_ram, COLUMNS)
                    : r.experts(down, FF, E, n, in_ram, COLUMNS);
    m.down_scale = scaled ? r.f32(p + "ffn_down_exps.scale", {n}) : nullptr;
    return m;
}

// ---- graphs ----

Val write_kv(Val x, const Attention &w, const KvLayer &kv, float eps) {
    const auto [k, v] = matmul(x, {w.k, w.v});
    return kv_write(kv, rope(head_norm(k, w.k_norm, eps), w.shape), v);
}

Val attention(Val x, const Attention &w, const KvLayer &kv, float eps, bool block) {
    const auto [q_gate, k, v] = matmul(x, {w.q, w.k, w.v});
    const auto turned = [&](Val heads, ggml_tensor *norm) {
        return rope(head_norm(heads, norm, eps), w.shape);
    };
    const Val cells = kv_write(kv, turned(k, w.k_norm), v);
    if (!w.gated) {
        return matmul(attend(turned(q_gate, w.q_norm), cells, w.shape, block, w.sinks), w.out); // {E, T}
    }
    const auto [q, gate] = split_heads(q_gate, w.shape); // {D*H, T} each
    const Val o = attend(turned(q, w.q_norm), cells, w.shape, block);
    return matmul(gated(o, gate), w.out); // {E, T}
}

Val ffn(Val x, const Ffn &w, Activation activation) {
    const auto [gate, up] = matmul(x, {w.gate, w.up}); // {FF, T} each
    return matmul(glu(gate, up, activation), w.down); // {E, T}
}

Val mixture(Val x, Val logits, const Moe &w) {
    const Val chosen = route(logits, w);
    const auto [gate, up] = experts_up(x, chosen, w);
    return mix(experts_down(glu(gate, up, w.activation), chosen, w), chosen, w); // {E, T}
}

// Each row has the experts that the router chose for it, and the shared expert, scaled by a gate of its own.
static Val moe(Val x, const Moe &w) {
    if (w.shared_gate == nullptr) {
        return mixture(x, matmul(x, w.router), w);
    }
    const auto [logits, open] = matmul(x, {w.router, w.shared_gate}); // {n, T}, {1, T}
    const Val y = mixture(x, logits, w);
    return add(y, gated(ffn(x, w.shared), open));
}

Val feed_forward(Val x, const Block &block) {
    return block.moe() != nullptr ? moe(x, *block.moe()) : ffn(x, *block.dense());
}

Stream embed_stream(Plain &g) {
    const Weights &w = g.model.weights();
    Stream x;
    for (uint32_t rank = 0; rank < g.model.n_ranks(); rank++) {
        x.push_back(embed(g, w.rank_embd.empty() ? w.token_embd : w.rank_embd[rank]));
    }
    return x;
}

static std::vector<Val> parts_of(const Stream &x, uint32_t layer, const Part &make) {
    Plain &g = *x[0].graph;
    std::vector<Val> parts;
    for (uint32_t rank = 0; rank < x.size(); rank++) {
        g.enter(layer, rank);
        const Val y = make(x[rank], g.model.block_of(layer, rank));
        parts.push_back(
            x.size() == 1 ? y : part(y)); // all ranks' come ahead of the first sum, which waits for them
    }
    return parts;
}

void add_part(Stream &x, uint32_t layer, const Part &make) {
    const std::vector<Val> parts = parts_of(x, layer, make);
    for (uint32_t rank = 0; rank < x.size(); rank++) {
        x[0].graph->enter(layer, rank);
        x[rank] = x.size() == 1 ? add(x[0], parts[0]) : exchanged(x[rank], parts);
    }
}

Stream sum_of_parts(const Stream &x, uint32_t layer, const Part &make) {
    const std::vector<Val> parts = parts_of(x, layer, make);
    Stream sums;
    for (uint32_t rank = 0; rank < x.size(); rank++) {
        x[0].graph->enter(layer, rank);
        sums.push_back(x.size() == 1 ? parts[0] : exchanged({}, parts));
    }
    return sums;
}

// Logits of a stream's rows, or of the last ones of prompts {V, T or prompts}: each rank makes some. On the last rank the rows
// are normed already: h.
static Val gathered_logits(const Stream &x, Val h, bool of_last_rows) {
    Plain &g = *h.graph;
    const std::vector<RankOutput> &outputs = g.model.weights().rank_outputs;
    std::vector<Val> parts;
    for (uint32_t rank = 0; rank < x.size(); rank++) {
        g.enter(0, rank);
        const RankOutput &of = outputs[rank];
        const auto normed = [&] {
            return norm(of_last_rows ? last(x[rank]) : x[rank], of.norm, g.model.hparams().rms_eps);
        };
        const Val rows = rank + 1 == x.size() ? h : normed();
        parts.push_back(part(first(matmul(rows, of.output), of.n_rows))); // {n_rows, T or prompts}
    }
    Val z;
    for (uint32_t rank = 0; rank < x.size(); rank++) {
        g.enter(0, rank);
        z = gather(parts);
    }
    g.leave_trunk();
    return z;
}

void end_step(const Stream &x, const std::vector<Val> &outputs) {
    Plain &g = *x[0].graph;
    const Weights &w = g.model.weights();
    const float eps = g.model.hparams().rms_eps;
    g.leave_trunk();
    const Val all = norm(x.back(), w.output_norm, eps);
    feed_drafters(outputs, all);
    if (g.kind == StepKind::prefill) {
        compute(x.back());
        return;
    }
    const bool some = g.prefill() && g.T > int64_t(g.prompts.size());
    const Val h = some ? norm(last(x.back()), w.output_norm, eps) : all;
    const Val z = w.rank_outputs.empty() ? matmul(h, w.output) : gathered_logits(x, h, some); // {V, ..}
    g.logits = softcap(z, g.model.hparams().logit_softcap);
    if (g.kind == StepKind::verify) {
        g.hidden = compute(x.back());
    }
    g.choice = choose(g.logits, /*ahead=*/true);
}

} // namespace luce
