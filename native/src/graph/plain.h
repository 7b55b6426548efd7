// The plain graph of a step says what is computed, as a paper says it: norm, matmul, rope, attend. An architecture's
// builder writes it with the functions below. The rules (rules.cpp) put fused ops in the place of
// patterns, and the lowering (lower.h) makes ggml nodes and luce's own ops of it. Nothing here knows a device.
//
// A value has T rows of n floats, {n, T} in ggml's order. Nodes lie in the order in which they were written, and those
// that write to caches run in that order.
#pragma once

#include "engine/cache.h"

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

namespace luce {

// prefill: rows of a prompt, without a choice. prefill_last: its last rows, and those ahead of them in the chunk. prefill_tail: its
// last rows, where they are a tail (step/tails.h). verify: anchors and drafts. draft: a step of one of the engine's drafters. feed:
// KV of committed rows, of the drafters that lag.
enum class StepKind { prefill, prefill_last, prefill_tail, verify, draft, feed };

// What one sequence has in a prefill, whose sequences lie side by side: its rows, and room for the cells that they read.
struct PromptRows {
    uint32_t rows, n_kv;

    bool operator<(const PromptRows &o) const { return std::tie(rows, n_kv) < std::tie(o.rows, o.n_kv); }
};

// Says whether a verify of so many rows writes their KV of the drafters that lag.
inline bool feeds_lagging(int64_t rows) {
    return rows > 1;
}

// A KvLayer says which layer's KV is meant: a trunk block's, or a drafter's, which may have no positions below `first`.
struct KvLayer {
    KvCells cells;
    int32_t first = 0;
};

enum class Op : uint8_t {
    // ---- what builders write ----
    embed, // {E, T}: rows of the table for the step's tokens, and rows of images in the places of theirs
    embed_text, // the same without rows of images
    image_rows, // x, with rows of images in their places
    kept_hidden, // {E, T}: for each row the kept hidden row of the position before it
    previous, // {E, T}: of prompts' hidden rows, for each row that of the position before; those of first rows were kept
    norm, // RMS(x) * w over a row
    head_norm, // RMS(x) * w over each head of a row
    unit_norm, // the same without w
    matmul, // up to 4 products of one x, an output each
    add, // x + y
    part, // x, a rank's part of a sum, which lies there
    exchange, // x + (p0 + p1 ..), or without an x: of each rank a part
    gather, // {V, T}: logits of which each rank has some, on the last one
    mul, // x * y
    silu, // x * sigmoid(x)
    glu, // f(x) * y, where f is SiLU or GELU
    gated, // x * sigmoid(y), where y has a row's width or is one number a row
    concat, // [x ; y] in each row
    split_heads, // of heads [q ; gate] an output each
    rope, // of each head the first rope_dim values are rotated to the row's position, i with i + rope_dim / 2 (NEOX);
    // with a weight frequency i is divided by its value i
    kv_write, // k and v go into their cells. Its value stands for the cells, so that attention comes after it
    attend, // softmax(q K) V over what a row sees; with a weight its value h is one score more of head h, without a V
    row_scores, // what each position has of its attention goes into the layer's scores
    attend_committed, // the same over committed positions alone, in cells that the step does not write
    conv, // DeltaNet's short convolution with SiLU, and its l2 norms
    delta_rule, // the gated delta rule over (qkv, alpha, beta)
    route, // a row's experts and their weights, of the router's logits
    experts, // products of each row with its experts, an output for gate and up each, or one of down
    mix, // the weighted sum over a row's experts
    scale, // x times a number
    softcap, // c * tanh(x / c)
    first, // the first n values of a row
    slice, // n values of a row from some place on
    last, // the last row of each prompt
    own_rows, // x written out once for many readers: no rule fuses what made it with a product
    spread, // a drafter's logits at the target's tokens; those that it lacks get one that is never chosen
    keep_hidden, // the rows (of each prompt the last one) are kept for drafters
    compute, // x is computed, whether or not anything reads it
    choose, // a token for each row
    keep_best, // the best candidates of each row go into the cache's lists
    block_conv, // x convolved over the rows of its block, by a kernel to which (y) each row adds
    one_of_block, // of each block of rows one, the same in all
    prior_tokens, // for one row of each block the token before the one that it drafts
    candidates, // K of each row: indexes of the best logits, then their tokens, then the logits
    table_rows, // rows of a table: of what prior_tokens gives, or of candidates by index or token
    cluster_logits, // logits of the tokens of clusters, which candidates name; others get one that is never chosen
    lattice, // candidates are scored behind those of the row above, listed, and may be chosen
    confidence, // how likely a draft is right, behind each candidate of the row above, goes into the lists
    // ---- what rules put in the place of several (rules.cpp) ----
    add_norm,
    matmul_add,
    matmul_first,
    heads,
    queries,
    norm_rope,
    gated_attend,
    gated_norm,
    delta_layer,
    draft_input,
    experts_glu,
    add_shared,
    host_experts,
    mixture,
    routed_experts,
    add_normed,
    add_convolved,
    any, // of a pattern: every op fits
};

// What passes go by of an op, in bits: plain.cpp alone says which ops have it.
enum Trait : uint8_t {
    RUNS_IN_ORDER =
        1, // it writes to caches, so it runs where the builder wrote it; others come where a reader asks for them
    TAKES_PACKED = 2, // a norm may reach it packed, or as rows that it norms itself
    ADDS_UP = 4, // on a GPU it adds the partial sums of a product up
};
bool has(Op op, Trait trait);

class Plain;

// A Val is one output of a node.
struct Val {
    Plain *graph = nullptr;
    int32_t node = -1, out = 0;

    bool operator==(const Val &o) const { return node == o.node && out == o.out; }
    bool operator<(const Val &o) const { return std::tie(node, out) < std::tie(o.node, o.out); }
};

struct Attends {
    const AttentionShape *shape;
    KvLayer kv;
    float scale; // of scores
    bool block; // the rows of a sequence all see each other
};
// Of attend_committed: it is a type of its own, so that no pass takes it for attention over a step's own rows.
struct AttendsCommitted {
    Attends of;
};
struct UnitNorm {
    int64_t D; // of a head
    float eps;
};
struct Recurs {
    const DeltaNet *w;
    DeltaState state;
};

// Which row of each block is meant; -1: all rows of the step.
constexpr int32_t ALL_ROWS = -1;
struct Chooses {
    bool ahead; // it is for the position behind a row's own
    int32_t row; // of each block, or ALL_ROWS
};
// What makes the scores of candidates behind each other a lattice (LatticeArgs).
struct Links {
    bool ahead, chooses;
};

// What a node has besides its inputs and weights: an epsilon or a factor, a count, a shape, a state.
using Params = std::variant<std::monostate, float, int64_t, Activation, UnitNorm, const AttentionShape *,
                            KvLayer, Attends, AttendsCommitted, Recurs, const Moe *, Chooses, Links>;

struct Node {
    Op op = Op::any;
    std::vector<Val> in = {};
    std::vector<ggml_tensor *> w = {};
    std::vector<int64_t> n = {}; // of each output, the values of a row
    int64_t T = 0;
    Params params = {};
    std::vector<std::pair<const char *, int32_t>> parts = {}; // a fused node stands for these nodes
    bool dead = false; // another node stands for it
    std::vector<int32_t> readers = {}; // nodes that read it, and some that did once: Plain::readers() knows
    uint32_t stage = 0; // it runs there (engine/stage.h)
    bool named = false; // one of its outputs has a name, or had one

    // Returns the node of a fused one that its rule calls `name`, or -1.
    int32_t part(const char *name) const;
};

class Plain {
public:
    Plain(const Model &model, const Cache &cache, StepKind kind, int64_t rows, int64_t n_kv, bool brief,
          uint32_t drafter, std::vector<PromptRows> prompts = {}, bool images = false)
        : model(model), cache(cache), kind(kind), T(rows), n_kv(n_kv), brief(brief), drafter(drafter),
          prompts(std::move(prompts)), images(images),
          stage_(kind == StepKind::draft || kind == StepKind::feed ? last_stage() : 0) {}
    Plain(const Plain &) = delete;
    Plain &operator=(const Plain &) = delete;

    const Model &model;
    const Cache &cache;
    const StepKind kind;
    int64_t T; // it counts the step's rows
    int64_t n_kv; // it counts the cells that a prefill's attention reads
    const bool brief; // a trial of kernels: of the layers of one kind it has the first alone
    const uint32_t drafter; // of a draft: which of the engine's it is
    std::vector<PromptRows> prompts; // of a prefill, which has one or more
    const bool images; // of a prefill: some of its rows are of images

    bool prefill() const { return writes_out() || kind == StepKind::prefill_tail; }
    // Whether weights are written out for products of many rows (on a GPU).
    bool writes_out() const { return kind == StepKind::prefill || kind == StepKind::prefill_last; }
    const DrafterUse &use() const { return cache.params().drafters[drafter]; }
    uint32_t last_stage() const { return uint32_t(cache.stages().size()) - 1; }
    // Goes to a layer of the trunk, or to a rank's part of it: what is written from here on runs on its stage. Returns whether
    // the step has the layer.
    bool enter(uint32_t layer, uint32_t rank = 0) {
        stage_ = model.stage_of(model.block_of(layer, rank));
        return !brief || model.first_of_kind(layer);
    }

    // Goes behind the trunk: to the stage of what is of no layer.
    void leave_trunk() { stage_ = last_stage(); }

    // What stays readable after the step: logits {V, n}, the rows before the output norm {E, T} (the cache keeps those
    // after it), and a ChoiceRow of each row of logits. Each may be absent.
    Val logits, hidden, choice;

    // ---- for the functions below, the rules and the lowering ----
    std::vector<Node> nodes;
    std::map<Val, std::string> names; // values that tests and tools find by name

    Node &at(Val v) { return nodes[size_t(v.node)]; }
    const Node &at(Val v) const { return nodes[size_t(v.node)]; }
    int64_t width(Val v) const { return at(v).n[size_t(v.out)]; }
    Val add(Node node);
    void set(int32_t node, Node by); // puts another node into its place
    std::vector<int32_t> readers(int32_t node) const; // the nodes that read any of its outputs
    void replace(Val old, Val by); // whatever reads `old` reads `by` from now on
    // Makes it the graph of a prefill of other rows: nodes have so many times as many, or one of each prompt. Both have more rows
    // than prompts, since end_step() writes another graph where each prompt has one.
    void resize(int64_t rows, int64_t cells, std::vector<PromptRows> of_prompts);
    uint64_t bytes() const; // of host memory that it holds, about

private:
    uint32_t stage_; // of the nodes that are added
};

// ---- the vocabulary: weights and shapes are kept by address, so they are the model's ----

Val embed(Plain &g, ggml_tensor *table); // {E, V} -> {E, T}
Val embed_text(Plain &g, ggml_tensor *table); // {E, V} -> {E, T}
Val image_rows(Val x); // x itself where a step has no images
Val kept_hidden(Plain &g);
Val previous(Val h);

Val norm(Val x, ggml_tensor *w, float eps);
Val head_norm(Val x, ggml_tensor *w, float eps); // w {D} or {S}
Val unit_norm(Val x, int64_t D, float eps);
Val matmul(Val x, ggml_tensor *w); // w {K, N}: {K, T} -> {N, T}
std::vector<Val> matmuls(Val x, const std::vector<ggml_tensor *> &w);
template <size_t N> std::array<Val, N> matmul(Val x, ggml_tensor *const (&w)[N]) {
    const std::vector<Val> y = matmuls(x, {w, w + N});
    std::array<Val, N> out;
    std::copy(y.begin(), y.end(), out.begin());
    return out;
}
Val add(Val x, Val y);
Val part(Val x);
Val exchanged(
    Val x,
    const std::vector<Val> &parts); // x lies on the rank that the node is of; a Val without a graph: none
Val gather(const std::vector<Val> &parts); // of each rank {n, T} -> {V, T} on the last one
Val mul(Val x, Val y);
Val silu(Val x);
Val glu(Val gate, Val up, Activation activation = SILU);
Val gated(Val x, Val gate);
Val concat(Val x, Val y);
Val scale(Val x, float factor);
Val softcap(Val x, float cap);
Val first(Val x, int64_t n);
Val slice(Val x, int64_t at, int64_t n); // {n, T}
Val last(Val x);
Val own_rows(Val x);
Val spread(Val x, ggml_tensor *ids, int64_t n);

std::array<Val, 2> split_heads(Val x, const AttentionShape &s); // {2*D*H, T} -> {D*H, T} twice
Val rope(Val x, const AttentionShape &s, ggml_tensor *factors = nullptr);
Val kv_write(const KvLayer &kv, Val k, Val v);
Val attend(Val q, Val kv, const AttentionShape &s, bool block = false,
           ggml_tensor *sinks = nullptr); // {D*H, T} -> {D*H, T}
Val attend_committed(Val q, const KvLayer &kv, const AttentionShape &s);

Val conv(Val qkv, const DeltaNet &w, const DeltaState &state);
Val delta_rule(Val qkv, Val alpha, Val beta, const DeltaNet &w, const DeltaState &state); // -> {Hv*S, T}

Val route(Val logits, const Moe &w);
std::array<Val, 2> experts_up(Val x, Val route, const Moe &w); // gate and up {FF, n_used*T} each
Val experts_down(Val h, Val route, const Moe &w); // {FF, n_used*T} -> {E, n_used*T}
Val mix(Val y, Val route, const Moe &w); // -> {E, T}

void keep_hidden(Val h);
Val compute(Val x);
Val choose(Val logits, bool ahead, int32_t row = ALL_ROWS); // Chooses says what these are
void keep_best(Val logits);

// ---- of steps that draft blocks ----

Val block_conv(Val x, Val added, ggml_tensor *base, int64_t side); // {E, T}
Val one_of_block(Val x, int64_t row); // {n, T} -> {n, blocks}
Val prior_tokens(Plain &g, int64_t row); // {1, blocks}
Val candidates(Val logits, ggml_tensor *tokens, int64_t k); // {3 * k, T}; `tokens` are of d2t, or null
Val rows_at(Val tokens, ggml_tensor *table); // of prior_tokens: table {R, V} -> {R, blocks}
enum class By : uint8_t { index, token }; // what candidates are looked up by
Val rows_at(Val candidates, ggml_tensor *table, By by); // {R, k * T}
// The clusters of `best` have `order`'s tokens, in parts of one size; h {E, T}, table {E, V}, order {V} -> {V, T}
Val cluster_logits(Val h, Val best, ggml_tensor *table, ggml_tensor *order, int64_t size);
// anchors {R, T}, before and behind {R, k * T}, gates {R, T} or none: a Val without a graph
void lattice(Val candidates, Val anchors, Val before, Val behind, Val gates, Links links);
// hidden {E, T}, anchors {R, T}, before {R, k * T}, head {E or E + R}, bias {1} or null
void confidence(Val hidden, Val anchors, Val before, ggml_tensor *head, ggml_tensor *bias);
Val named(Val x, const std::string &name);

} // namespace luce
