#include "graph/plain.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace luce {
static int traits_of(Op op) {
    switch (op) {
        case Op::kv_write:
        case Op::row_scores:
        case Op::norm_rope:
        case Op::compute:
        case Op::exchange:
        case Op::gather:
        case Op::choose:
        case Op::keep_best:
        case Op::lattice:
        case Op::confidence: return RUNS_IN_ORDER;
        case Op::part:
        case Op::heads: return RUNS_IN_ORDER | ADDS_UP;
        case Op::keep_hidden: return RUNS_IN_ORDER | TAKES_PACKED;
        case Op::matmul:
        case Op::matmul_first:
        case Op::matmul_add:
        case Op::mixture: return TAKES_PACKED;
        case Op::glu:
        case Op::queries:
        case Op::add_norm:
        case Op::add_normed:
        case Op::add_convolved:
        case Op::delta_layer: return ADDS_UP;
        default: return 0;
    }
}

bool has(Op op, Trait trait) {
    return (traits_of(op) & trait) != 0;
}

int32_t Node::part(const char *name) const {
    for (const auto &[known, node] : parts) {
        if (strcmp(known, name) == 0) {
            return node;
        }
    }
    return -1;
}

Val Plain::add(Node node) {
    const int32_t at = int32_t(nodes.size());
    nodes.push_back({});
    nodes.back().stage = stage_;
    set(at, std::move(node));
    return {this, at, 0};
}

void Plain::set(int32_t node, Node by) {
    for (const Val v : by.in) {
        nodes[size_t(v.node)].readers.push_back(node);
    }
    Node &n = nodes[size_t(node)];
    by.readers = std::move(n.readers);
    by.stage = n.stage;
    by.named = n.named;
    n = std::move(by);
}

std::vector<int32_t> Plain::readers(int32_t node) const {
    std::vector<int32_t> found = nodes[size_t(node)].readers;
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    found.erase(std::remove_if(found.begin(), found.end(),
                               [&](int32_t r) {
                                   const Node &n = nodes[size_t(r)];
                                   return n.dead || std::none_of(n.in.begin(), n.in.end(),
                                                                 [&](Val v) { return v.node == node; });
                               }),
                found.end());
    return found;
}

void Plain::replace(Val old, Val by) {
    const std::vector<int32_t> readers = nodes[size_t(old.node)].readers;
    for (const int32_t r : readers) {
        std::vector<Val> &in = nodes[size_t(r)].in;
        if (std::find(in.begin(), in.end(), old) != in.end()) {
            std::replace(in.begin(), in.end(), old, by);
            nodes[size_t(by.node)].readers.push_back(r);
        }
    }
    for (Val *v : {&logits, &hidden, &choice}) {
        *v = *v == old ? by : *v;
    }
    if (const auto name = names.find(old); name != names.end()) {
        names[by] = name->second;
        nodes[size_t(by.node)].named = true;
        names.erase(old);
    }
}

void Plain::resize(int64_t rows, int64_t cells, std::vector<PromptRows> of_prompts) {
    for (Node &n : nodes) {
        n.T = n.T % T == 0 ? n.T / T * rows : int64_t(of_prompts.size());
    }
    T = rows;
    n_kv = cells;
    prompts = std::move(of_prompts);
}

uint64_t Plain::bytes() const {
    constexpr uint64_t HEADER = 16; // of an allocation
    const auto held = [](const auto &all) {
        return all.capacity() == 0 ? 0 : HEADER + all.capacity() * sizeof(all[0]);
    };
    uint64_t bytes = HEADER + sizeof(*this) + held(nodes) + held(prompts);
    for (const Node &n : nodes) {
        bytes += held(n.in) + held(n.w) + held(n.n) + held(n.parts) + held(n.readers);
    }
    return bytes + names.size() * (HEADER + 4 * sizeof(void *) + sizeof(*names.begin()));
}

// Adds a node of one output that has as many values a row as x.
static Val like(Op op, Val x, std::vector<Val> in, std::vector<ggml_tensor *> w = {}, Params params = {}) {
    const Plain &g = *x.graph;
    return x.graph->add({op, std::move(in), std::move(w), {g.width(x)}, g.at(x).T, params});
}

// Rows are looked up where the table lies: drafters have the first stage's too.
static Val looked_up(Op op, Plain &g, ggml_tensor *table) {
    const Val x = g.add({op, {}, {table}, {table->ne[0]}, g.T});
    g.at(x).stage = stage_of(table);
    return x;
}
Val embed(Plain &g, ggml_tensor *table) {
    return looked_up(Op::embed, g, table);
}
Val embed_text(Plain &g, ggml_tensor *table) {
    return looked_up(Op::embed_text, g, table);
}
Val image_rows(Val x) {
    return x.graph->images ? like(Op::image_rows, x, {x}) : x;
}
Val kept_hidden(Plain &g) {
    return g.add({Op::kept_hidden, {}, {}, {g.cache.hidden()->ne[0]}, g.T});
}
Val previous(Val h) {
    return like(Op::previous, h, {h});
}

Val norm(Val x, ggml_tensor *w, float eps) {
    return like(Op::norm, x, {x}, {w}, eps);
}
Val head_norm(Val x, ggml_tensor *w, float eps) {
    return like(Op::head_norm, x, {x}, {w}, eps);
}
Val unit_norm(Val x, int64_t D, float eps) {
    return like(Op::unit_norm, x, {x}, {}, UnitNorm{D, eps});
}
std::vector<Val> matmuls(Val x, const std::vector<ggml_tensor *> &w) {
    Node node = {Op::matmul, {x}, w, {}, x.graph->at(x).T};
    for (const ggml_tensor *weight : w) {
        node.n.push_back(weight->ne[1]);
    }
    Val y = x.graph->add(std::move(node));
    std::vector<Val> out;
    for (; size_t(y.out) < w.size(); y.out++) {
        out.push_back(y);
    }
    return out;
}
Val matmul(Val x, ggml_tensor *w) {
    return matmuls(x, {w})[0];
}
Val add(Val x, Val y) {
    return like(Op::add, x, {x, y});
}
Val part(Val x) {
    return like(Op::part, x, {x});
}
Val exchanged(Val x, const std::vector<Val> &parts) {
    std::vector<Val> in = parts;
    if (x.graph != nullptr) {
        in.push_back(x);
    }
    return like(Op::exchange, parts[0], std::move(in));
}
Val gather(const std::vector<Val> &parts) {
    Plain &g = *parts[0].graph;
    int64_t n = 0;
    for (const Val part : parts) {
        n += g.width(part);
    }
    return g.add({Op::gather, parts, {}, {n}, g.at(parts[0]).T});
}
Val mul(Val x, Val y) {
    return like(Op::mul, x, {x, y});
}
Val silu(Val x) {
    return like(Op::silu, x, {x});
}
Val glu(Val gate, Val up, Activation activation) {
    return like(Op::glu, gate, {gate, up}, {}, activation);
}
Val gated(Val x, Val gate) {
    return like(Op::gated, x, {x, gate});
}
Val concat(Val x, Val y) {
    Plain &g = *x.graph;
    return g.add({Op::concat, {x, y}, {}, {g.width(x) + g.width(y)}, g.at(x).T});
}
Val scale(Val x, float factor) {
    return factor == 1 ? x : like(Op::scale, x, {x}, {}, factor);
}
Val softcap(Val x, float cap) {
    return cap == 0 ? x : like(Op::softcap, x, {x}, {}, cap);
}
Val first(Val x, int64_t n) {
    return n == x.graph->width(x) ? x : x.graph->add({Op::first, {x}, {}, {n}, x.graph->at(x).T});
}
Val slice(Val x, int64_t at, int64_t n) {
    return x.graph->add({Op::slice, {x}, {}, {n}, x.graph->at(x).T, at});
}
Val last(Val x) {
    const int64_t n = int64_t(x.graph->prompts.size());
    return x.graph->at(x).T == n ? x : x.graph->add({Op::last, {x}, {}, {x.graph->width(x)}, n});
}
Val own_rows(Val x) {
    return like(Op::own_rows, x, {x});
}
Val spread(Val x, ggml_tensor *ids, int64_t n) {
    return ids == nullptr ? x : x.graph->add({Op::spread, {x}, {ids}, {n}, x.graph->at(x).T});
}

std::array<Val, 2> split_heads(Val x, const AttentionShape &s) {
    const int64_t n = x.graph->width(x) / 2;
    const Val q = x.graph->add({Op::split_heads, {x}, {}, {n, n}, x.graph->at(x).T, &s});
    return {q, Val{q.graph, q.node, 1}};
}
static std::vector<ggml_tensor *> one_or_none(ggml_tensor *w) {
    return w == nullptr ? std::vector<ggml_tensor *>{} : std::vector{w};
}
Val rope(Val x, const AttentionShape &s, ggml_tensor *factors) {
    return like(Op::rope, x, {x}, one_or_none(factors), &s);
}
Val kv_write(const KvLayer &kv, Val k, Val v) {
    return like(Op::kv_write, k, {k, v}, {}, kv);
}
static float score_scale(const AttentionShape &s) {
    return s.scale > 0 ? s.scale : 1.0f / std::sqrt(float(s.head_dim));
}
Val attend(Val q, Val kv, const AttentionShape &s, bool block, ggml_tensor *sinks) {
    const KvLayer &layer = std::get<KvLayer>(kv.graph->at(kv).params);
    const Attends attends{&s, layer, score_scale(s), block};
    const std::vector<int32_t> readers = kv.graph->readers(kv.node);
    const bool first = std::none_of(readers.begin(), readers.end(), [&](int32_t r) {
        return kv.graph->nodes[size_t(r)].op == Op::row_scores; // of a layer that others share, its own
    });
    if (layer.cells.scores != nullptr && kv.graph->kind == StepKind::verify && first) {
        like(Op::row_scores, q, {q, kv}, {layer.cells.scores}, attends);
    }
    return like(Op::attend, q, {q, kv}, one_or_none(sinks), attends);
}
Val attend_committed(Val q, const KvLayer &kv, const AttentionShape &s) {
    return like(Op::attend_committed, q, {q}, {}, AttendsCommitted{{&s, kv, score_scale(s), false}});
}

Val conv(Val qkv, const DeltaNet &w, const DeltaState &state) {
    return like(Op::conv, qkv, {qkv}, {w.conv}, Recurs{&w, state});
}
Val delta_rule(Val qkv, Val alpha, Val beta, const DeltaNet &w, const DeltaState &state) {
    Plain &g = *qkv.graph;
    const int64_t n = int64_t(w.shape.n_v_heads) * w.shape.state_size;
    return g.add({Op::delta_rule, {qkv, alpha, beta}, {w.dt, w.a}, {n}, g.at(qkv).T, Recurs{&w, state}});
}

Val route(Val logits, const Moe &w) {
    return like(Op::route, logits, {logits}, {}, &w);
}
std::array<Val, 2> experts_up(Val x, Val route, const Moe &w) {
    const std::vector<ggml_tensor *> both = {w.gate, w.up}, fused = {w.gate_up};
    const int64_t n = w.shape.n_ff, pairs = x.graph->at(x).T * w.shape.n_used;
    const Val gate =
        x.graph->add({Op::experts, {x, route}, w.gate_up != nullptr ? fused : both, {n, n}, pairs, &w});
    return {gate, Val{gate.graph, gate.node, 1}};
}
Val experts_down(Val h, Val route, const Moe &w) {
    return h.graph->add({Op::experts, {h, route}, {w.down}, {w.down->ne[1]}, h.graph->at(h).T, &w});
}
Val mix(Val y, Val route, const Moe &w) {
    return y.graph->add({Op::mix, {y, route}, {}, {y.graph->width(y)}, y.graph->at(route).T, &w});
}

void keep_hidden(Val h) {
    like(Op::keep_hidden, h, {h});
}
Val compute(Val x) {
    like(Op::compute, x, {x});
    return x;
}
Val choose(Val logits, bool ahead, int32_t row) {
    return like(Op::choose, logits, {logits}, {}, Chooses{ahead, row});
}
void keep_best(Val logits) {
    if (logits.graph->cache.params().n_top > 0) {
        like(Op::keep_best, logits, {logits});
    }
}

Val block_conv(Val x, Val added, ggml_tensor *base, int64_t side) {
    return like(Op::block_conv, x, {x, added}, {base}, side);
}
Val one_of_block(Val x, int64_t row) {
    Plain &g = *x.graph;
    return g.add({Op::one_of_block, {x}, {}, {g.width(x)}, g.T / g.use().n_block, row});
}
Val prior_tokens(Plain &g, int64_t row) {
    return g.add({Op::prior_tokens, {}, {}, {1}, g.T / g.use().n_block, row});
}
Val candidates(Val logits, ggml_tensor *tokens, int64_t k) {
    const Plain &g = *logits.graph;
    std::vector<ggml_tensor *> map;
    if (tokens != nullptr) {
        map.push_back(tokens);
    }
    return logits.graph->add({Op::candidates, {logits}, map, {3 * k}, g.at(logits).T, k});
}
Val rows_at(Val tokens, ggml_tensor *table) {
    Plain &g = *tokens.graph;
    return g.add({Op::table_rows, {tokens}, {table}, {table->ne[0]}, g.at(tokens).T});
}
Val rows_at(Val candidates, ggml_tensor *table, By by) {
    Plain &g = *candidates.graph;
    const int64_t pairs = g.at(candidates).T * (g.width(candidates) / 3);
    return g.add({Op::table_rows, {candidates}, {table}, {table->ne[0]}, pairs, int64_t(by)});
}
Val cluster_logits(Val h, Val best, ggml_tensor *table, ggml_tensor *order, int64_t size) {
    Plain &g = *h.graph;
    return g.add({Op::cluster_logits, {h, best}, {table, order}, {table->ne[1]}, g.at(h).T, size});
}
void lattice(Val candidates, Val anchors, Val before, Val behind, Val gates, Links links) {
    std::vector<Val> in = {candidates, anchors, before, behind};
    if (gates.graph != nullptr) {
        in.push_back(gates);
    }
    like(Op::lattice, candidates, std::move(in), {}, links);
}
void confidence(Val hidden, Val anchors, Val before, ggml_tensor *head, ggml_tensor *bias) {
    std::vector<ggml_tensor *> weights = {head};
    if (bias != nullptr) {
        weights.push_back(bias);
    }
    like(Op::confidence, hidden, {hidden, anchors, before}, std::move(weights));
}
Val named(Val x, const std::string &name) {
    x.graph->names[x] = name;
    x.graph->at(x).named = true;
    return x;
}

} // namespace luce
