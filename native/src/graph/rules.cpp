#include "graph/rules.h"

#include "attention/sizes.h"
#include "deltanet/sizes.h"
#include "matmul/layout.h"
#include "matmul/quantised.h"
#include "moe/moe.h"
#include "ops/moe.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace luce {
namespace {

// ---- patterns ----

Pattern any(const char *name) {
    return {Op::any, name};
}
// Output `out` of a node of this name, whatever its inputs are.
Pattern part(Op op, const char *name, int32_t out) {
    return {op, name, {}, out};
}

// A row's keys, or queries: normed by heads and rotated.
Pattern rotated(const char *rope, const char *norm, Pattern x) {
    return {Op::rope, rope, {{Op::head_norm, norm, {std::move(x)}}}};
}
const Pattern QUERIES_OF_M = rotated("Q", "q_norm", {Op::split_heads, "S", {part(Op::matmul, "M", 0)}, 0});
const Pattern KEYS_OF_M = rotated("", "k_norm", part(Op::matmul, "M", 1));
// Queries without a gate.
const Pattern ATTEND_OPEN = {
    Op::attend,
    "",
    {rotated("Q", "q_norm", part(Op::matmul, "M", 0)),
     {Op::kv_write, "W", {rotated("", "k_norm", part(Op::matmul, "M", 1)), part(Op::matmul, "M", 2)}}}};
// The same, and V that is normed: of output `v` of the product.
Pattern attend_plain(int32_t v) {
    return {Op::attend,
            "",
            {rotated("Q", "q_norm", part(Op::matmul, "M", 0)),
             {Op::kv_write,
              "W",
              {rotated("K", "k_norm", part(Op::matmul, "M", 1)),
               {Op::unit_norm, "V", {part(Op::matmul, "M", v)}}}}}};
}

// The experts that the router chose for rows x, which may be normed, and their weighted sum.
const Pattern ROUTE = {Op::route, "R", {part(Op::matmul, "L", 0)}};
const Pattern NORMED = {Op::norm, "P", {any("x")}};
Pattern expert_products(Pattern x, const Pattern &route = ROUTE) {
    const auto up = [&](int32_t out) { return Pattern{Op::experts, "H", {x, route}, out}; };
    return {Op::mix, "mix", {{Op::experts, "", {{Op::glu, "", {up(0), up(1)}}, route}}, route}};
}
// The router reads the same rows, normed by weights of its own.
const Pattern OWN_NORM = {
    Op::route, "R", {{Op::matmul, "L", {{Op::scale, "F", {{Op::norm, "Q", {any("x")}}}}}, 0}}};
Pattern gate_of_shared(Pattern shared) {
    return {Op::gated, "", {std::move(shared), part(Op::matmul, "L", 1)}};
}
const Pattern SHARED = {
    Op::matmul, "D", {{Op::glu, "", {part(Op::matmul, "U", 0), part(Op::matmul, "U", 1)}}}};
Pattern beside_shared(Pattern shared, const char *name = "") {
    return {Op::add, name, {expert_products(NORMED), gate_of_shared(std::move(shared))}};
}
// The residual stream and a product that is normed ahead.
const Pattern NORMED_PRODUCT = {Op::add, "S", {any("x"), {Op::norm, "A", {{Op::matmul, "M"}}}}};
// The residual stream behind a block, and the norm ahead of the next one.
Pattern normed_sum(Pattern y) {
    return {Op::norm, "N", {{Op::add, "S", {any("x"), std::move(y)}}}};
}
// The residual stream, and the sum of a dense layer and a mixture, each of which is normed, and so is their sum.
Pattern normed_mixture(Pattern dense, Pattern experts) {
    Pattern sum = {Op::add, "", {{Op::norm, "B", {std::move(dense)}}, {Op::norm, "C", {std::move(experts)}}}};
    return {Op::add, "S", {any("x"), {Op::norm, "A", {std::move(sum)}}}};
}
const Pattern NORMED_MIXTURE = normed_mixture({Op::matmul, "M"}, {Op::routed_experts, "Y"});
// The same where the dense layer reads the same rows as the experts, normed by weights of its own.
const Pattern NORMED_BESIDE = [] {
    const auto up = [](int32_t out) { return Pattern{Op::matmul, "U", {{Op::norm, "X", {any("x")}}}, out}; };
    return normed_mixture({Op::matmul, "D", {{Op::glu, "G", {up(0), up(1)}}}},
                          {Op::routed_experts, "Y", {any("x")}});
}();
// A convolution over a block's rows.
const Pattern CONVOLVED = {Op::block_conv, "C", {{Op::matmul, "M"}, part(Op::matmul, "A", 0)}};

// ---- conditions ----

const Node &node(const Target &t, const Match &m, const char *name) {
    return t.graph.at(m[name]);
}
const Moe &moe_of(const Target &t, const Match &m) {
    return *std::get<const Moe *>(node(t, m, "H").params);
}

bool always(const Target &, const Match &) {
    return true;
}
bool on_cpu(const Target &t, const Match &) {
    return !t.gpu;
}
bool in_step(const Target &t, const Match &) {
    return t.step();
}
bool experts_on_gpu(const Target &t, const Match &m) {
    return t.gpu && !moe_of(t, m).in_ram;
}
bool experts_of_gpu(const Target &t, const Match &m) {
    return t.gpu && std::get<float>(node(t, m, "P").params) == std::get<float>(node(t, m, "Q").params);
}
// The residual is added behind the parts of all ranks.
bool experts_of_rank(const Target &t, const Match &m) {
    return t.gpu && t.graph.model.n_ranks() > 1 && !moe_of(t, m).in_ram;
}
bool experts_beside_gpu(const Target &t, const Match &m) {
    return t.gpu && moe_of(t, m).in_ram;
}
bool experts_in_ram(const Target &t, const Match &m) {
    return !t.gpu && moe_of(t, m).in_ram;
}
// RoPE's frequencies are powers of the base.
bool plain_rope(const Target &t, const Match &m) {
    const Node &rope = node(t, m, "Q");
    return rope.w.empty() && !(std::get<const AttentionShape *>(rope.params)->yarn.factor > 1);
}
// The ops of both queries and keys have one epsilon.
bool both_normed(const Target &t, const Match &m) {
    return plain_rope(t, m) &&
           std::get<float>(node(t, m, "q_norm").params) == std::get<float>(node(t, m, "k_norm").params);
}
// The product of so many weights, and of no others, is added up where keys are normed and rotated.
bool of_partials(const Target &t, const Match &m, size_t n_weights) {
    const Node &product = node(t, m, "M");
    const int64_t D = node(t, m, "k_norm").w[0]->ne[0];
    return SummedHeadSizes::has(D) && plain_rope(t, m) && product.w.size() == n_weights &&
           t.leaves_partials(product.w);
}
bool heads_of_partials(const Target &t, const Match &m) {
    return both_normed(t, m) && of_partials(t, m, 3);
}
// Queries and keys turn alike, and V is normed with their epsilon.
bool plain_heads(const Target &t, const Match &m) {
    const Node &q = node(t, m, "Q"), &product = node(t, m, "M");
    const auto eps = [&](const char *name) { return std::get<float>(node(t, m, name).params); };
    const UnitNorm &v = std::get<UnitNorm>(node(t, m, "V").params);
    const int64_t D = node(t, m, "k_norm").w[0]->ne[0];
    return SummedHeadSizes::has(D) && v.D == D &&
           !(std::get<const AttentionShape *>(q.params)->yarn.factor > 1) && q.w == node(t, m, "K").w &&
           eps("q_norm") == eps("k_norm") && v.eps == eps("k_norm") &&
           product.w.size() == size_t(node(t, m, "V").in[0].out) + 1 && t.leaves_partials(product.w);
}
bool queries_of_partials(const Target &t, const Match &m) {
    const Node &q = node(t, m, "Q"), &product = node(t, m, "M");
    return SummedHeadSizes::has(node(t, m, "q_norm").w[0]->ne[0]) &&
           !(std::get<const AttentionShape *>(q.params)->yarn.factor > 1) && product.w.size() == 1 &&
           t.leaves_partials(product.w);
}
// Of a drafter's layers with cells of their own nobody has measured it.
bool queries_of_target(const Target &t, const Match &m) {
    return t.graph.kind == StepKind::verify && queries_of_partials(t, m);
}
bool keys_of_partials(const Target &t, const Match &m) {
    return of_partials(t, m, 2);
}
bool delta_of_partials(const Target &t, const Match &m) {
    const Node &delta = node(t, m, "D"), &product = node(t, m, "M");
    return SummedStateSizes::has(std::get<Recurs>(delta.params).w->shape.state_size) &&
           product.w.size() == 4 && t.leaves_partials(product.w);
}
// A mixture reads rows and norms them itself. Of few rows the product ahead has whole sums (matmul_add), so that there is
// nothing to add up.
bool rows_for_mixture(const Target &t, const Match &m) {
    const std::vector<int32_t> readers = t.graph.readers(m["N"].node);
    return t.graph.T <= ROWMM_WHOLE_ROWS && std::any_of(readers.begin(), readers.end(), [&](int32_t r) {
               return t.graph.nodes[size_t(r)].op == Op::mixture;
           });
}
bool one_of_partials(const Target &t, const Match &m) {
    const Node &product = node(t, m, "M");
    return product.w.size() == 1 && t.leaves_partials(product.w);
}
bool packed_behind(const Target &t, const Match &m) {
    const std::vector<int32_t> readers = t.graph.readers(m["N"].node);
    return std::all_of(readers.begin(), readers.end(),
                       [&](int32_t r) { return has(t.graph.nodes[size_t(r)].op, TAKES_PACKED); });
}
bool sum_of_partials(const Target &t, const Match &m) {
    return one_of_partials(t, m) && !rows_for_mixture(t, m) && packed_behind(t, m);
}
bool convolved_partials(const Target &t, const Match &m) {
    return one_of_partials(t, m) && t.convolves(node(t, m, "C"));
}
bool post_of_partials(const Target &t, const Match &m) {
    return one_of_partials(t, m) && node(t, m, "M").n[0] <= ROWMM_POST_K;
}
bool post_and_norm(const Target &t, const Match &m) {
    return post_of_partials(t, m) && sum_of_partials(t, m);
}
bool mixture_of_partials(const Target &t, const Match &m) {
    const auto eps = [&](const char *name) { return std::get<float>(node(t, m, name).params); };
    return one_of_partials(t, m) && node(t, m, "M").n[0] <= MOE_POST_E && eps("A") == eps("B") &&
           eps("A") == eps("C");
}
bool mixture_and_norm(const Target &t, const Match &m) {
    return mixture_of_partials(t, m) && sum_of_partials(t, m);
}
// The dense layer becomes the shared expert of the mixture's launches.
bool dense_in_mixture(const Target &t, const Match &m) {
    const auto eps = [&](const Node &n) { return std::get<float>(n.params); };
    const auto of = [&](const char *name) { return eps(node(t, m, name)); };
    const Node &up = node(t, m, "U"), &down = node(t, m, "D"), &mixture = node(t, m, "Y");
    if (!t.gpu || !t.step() || up.w.size() != 2 || down.w.size() != 1) {
        return false;
    }
    const Moe &moe = *std::get<const Moe *>(t.graph.nodes[size_t(mixture.part("H"))].params);
    const Device &device = t.graph.cache.stages()[mixture.stage].device;
    return mixture.part("Q") >= 0 && takes_dense(device, moe, {up.w[0], up.w[1], down.w[0]}) &&
           std::get<Activation>(node(t, m, "G").params) == moe.activation && rowmm_adds_up(down.n[0]) &&
           down.n[0] <= MOE_POST_E && of("A") == of("B") && of("A") == of("C") &&
           of("X") == eps(t.graph.nodes[size_t(mixture.part("P"))]);
}
bool dense_in_mixture_packed(const Target &t, const Match &m) {
    return dense_in_mixture(t, m) && packed_behind(t, m);
}
bool one_packed(const Target &t, const Match &m) {
    const Node &product = node(t, m, "M");
    return t.gpu && product.w.size() == 1 && is_packed(product.w[0]);
}
bool looked_up([[maybe_unused]] const Target &t, [[maybe_unused]] const Match &m) {
#ifdef LUCE_USE_CUDA
    const std::vector<int32_t> readers = t.graph.readers(m["C"].node);
    const bool packed = std::all_of(readers.begin(), readers.end(), [&](int32_t r) {
        const std::vector<ggml_tensor *> &w = t.graph.nodes[size_t(r)].w;
        return std::all_of(w.begin(), w.end(), is_packed);
    });
    const ggml_tensor *table = node(t, m, "E").w[0];
    return t.gpu && t.step() && packed && table->ne[0] % CHUNK == 0 && nextn_has_table(table->type);
#else
    return false;
#endif
}
// On a GPU packed weights lie in tiles of 128 rows. Where the scales of all rows lie behind the last one (matmul/layout.h), a
// part of them is no matrix.
bool has_first_rows(const Target &t, const Match &m) {
    const ggml_tensor *w = node(t, m, "M").w[0];
    return node(t, m, "M").w.size() == 1 && !(is_packed(w) && has_output_scale(w->type));
}

// ---- the table ----
//
// Rules are tried in this order, each at all nodes. A row says by its lines: name, condition, bits, why, gain on an H200
// where it was measured; the pattern; the fused op, the node whose place it takes, what it reads, what its outputs are. In
// which form a fused op reads and leaves values (partial sums, packed, F16) is the lowering's choice (lower.h).

// clang-format off
std::vector<Rule> table() {
    return {
        // Mixtures of experts, with the residual and the norm around them. A GPU has no other op for them.
        {"mixture", experts_on_gpu, Bits::device,
            "a row's experts are chosen, grouped and multiplied in three or four launches", "",
            normed_sum(expert_products(NORMED)),
            Op::mixture, "S", {{"x"}, {"P"}}, {{"S"}, {"N"}}},
        {"mixture_shared", experts_on_gpu, Bits::device,
            "the same; the shared expert is in its launches", "",
            normed_sum(beside_shared(SHARED)),
            Op::mixture, "S", {{"x"}, {"P"}}, {{"S"}, {"N"}}},
        {"mixture_in_ram", experts_beside_gpu, Bits::device,
            "the host computes the experts", "",
            normed_sum(expert_products(NORMED)),
            Op::mixture, "S", {{"x"}, {"P"}}, {{"S"}, {"N"}}},
        {"mixture_in_ram_shared", experts_beside_gpu, Bits::device,
            "the same; the GPU computes the shared expert beside it", "",
            normed_sum(beside_shared(part(Op::matmul, "D", 0))),
            Op::mixture, "S", {{"x"}, {"P"}, {"D"}}, {{"S"}, {"N"}}},
        {"routed_experts", experts_of_gpu, Bits::device,
            "as the rule mixture; a norm comes ahead of the residual, so that it is not in these launches", "",
            expert_products(NORMED, OWN_NORM),
            Op::routed_experts, "mix", {{"x"}}, {{"mix"}}},
        {"rank_experts_shared", experts_of_rank, Bits::device,
            "as the rule mixture_shared, of a part that is added to those of other devices", "",
            beside_shared(SHARED, "S"),
            Op::routed_experts, "S", {{"x"}}, {{"S"}}},
        {"rank_experts", experts_of_rank, Bits::device,
            "the same without a shared expert", "",
            expert_products(NORMED),
            Op::routed_experts, "mix", {{"x"}}, {{"mix"}}},
        {"host_experts", experts_in_ram, Bits::device,
            "an expert's weights are read once for all of its rows", "",
            expert_products(any("x")),
            Op::host_experts, "mix", {{"x"}, {"R"}}, {{"mix"}}},
        {"experts_glu", on_cpu, Bits::device,
            "gate and up in one pass over the row", "",
            {Op::glu, "G", {part(Op::experts, "H", 0), part(Op::experts, "H", 1)}},
            Op::experts_glu, "H", {}, {{"G"}}},
        {"add_shared", on_cpu, Bits::device,
            "one pass over the rows in place of three", "",
            {Op::add, "S", {any("y"), {Op::gated, "", {any("shared"), part(Op::matmul, "L", 1)}}}},
            Op::add_shared, "S", {{"y"}, {"shared"}, {"L", 1}}, {{"S"}}},

        // Attention.
        {"heads", heads_of_partials, Bits::device,
            "adds the partial sums up once; norms, rotates and stores in one launch", "",
            {Op::attend, "", {QUERIES_OF_M, {Op::kv_write, "W", {KEYS_OF_M, part(Op::matmul, "M", 2)}}}},
            Op::heads, "W", {{"M", 0}, {"M", 1}, {"M", 2}}, {{"W"}, {"Q"}, {"S", 1}}},
        {"heads_open", heads_of_partials, Bits::device,
            "the same of queries without a gate", "",
            ATTEND_OPEN,
            Op::heads, "W", {{"M", 0}, {"M", 1}, {"M", 2}}, {{"W"}, {"Q"}}},
        {"heads_plain", plain_heads, Bits::device,
            "the same of queries without a gate and V that is normed", "",
            attend_plain(2),
            Op::heads, "W", {{"M", 0}, {"M", 1}, {"M", 2}}, {{"W"}, {"Q"}}},
        {"heads_plain_k", plain_heads, Bits::device,
            "the same where V is K ahead of its norm", "",
            attend_plain(1),
            Op::heads, "W", {{"M", 0}, {"M", 1}}, {{"W"}, {"Q"}}},
        {"queries", queries_of_target, Bits::device,
            "the same of a layer that reads the cells of another", "",
            {Op::attend, "", {rotated("Q", "q_norm", part(Op::matmul, "M", 0)), any("kv")}},
            Op::queries, "Q", {{"M", 0}}, {{"Q"}}},
        {"queries_committed", queries_of_partials, Bits::device,
            "the same of a drafter's layer that reads the target's cells", "",
            {Op::attend_committed, "", {rotated("Q", "q_norm", part(Op::matmul, "M", 0))}},
            Op::queries, "Q", {{"M", 0}}, {{"Q"}}},
        {"heads_kv", keys_of_partials, Bits::device,
            "the same, without queries", "",
            {Op::kv_write, "W", {rotated("Q", "k_norm", part(Op::matmul, "M", 0)), part(Op::matmul, "M", 1)}},
            Op::heads, "W", {{"M", 0}, {"M", 1}}, {{"W"}}},
        {"norm_rope", both_normed, Bits::device,
            "norms and rotates keys and queries in one launch", "",
            {Op::attend, "", {rotated("Q", "q_norm", {Op::split_heads, "S", {any("q_gate")}, 0}),
                              {Op::kv_write, "W", {rotated("", "k_norm", any("k")), any("v")}}}},
            Op::norm_rope, "W", {{"k"}, {"v"}, {"q_gate"}}, {{"W"}, {"Q"}}},
        {"norm_rope_kv", plain_rope, Bits::device,
            "the same, without queries", "",
            {Op::kv_write, "W", {rotated("Q", "k_norm", any("k")), any("v")}},
            Op::norm_rope, "W", {{"k"}, {"v"}}, {{"W"}}},
        {"gated_attend", in_step, Bits::device,
            "the kernel that adds up attention's chunks has the gate", "",
            {Op::gated, "G", {{Op::attend, "A", {any("q"), any("kv")}}, any("gate")}},
            Op::gated_attend, "A", {{"q"}, {"kv"}, {"gate"}}, {{"G"}}},

        // DeltaNet.
        {"gated_norm", always, Bits::device,
            "one pass over the rows in place of three", "",
            {Op::mul, "Y", {{Op::head_norm, "H", {any("o")}}, {Op::silu, "", {any("z")}}}},
            Op::gated_norm, "H", {{"o"}, {"z"}}, {{"Y"}}},
        {"delta_layer", delta_of_partials, Bits::same,
            "conv and delta rule add up the partial sums of their projections, of one row in one launch",
            "2% of a step of one row",
            {Op::delta_rule, "D", {{Op::conv, "C", {part(Op::matmul, "M", 0)}},
                                   part(Op::matmul, "M", 3), part(Op::matmul, "M", 2)}},
            Op::delta_layer, "D", {{"M", 0}}, {{"D"}, {"M", 1}}},

        // The NextN head.
        {"draft_input", looked_up, Bits::device,
            "looks both halves up, norms and packs them in one launch", "",
            {Op::concat, "C", {{Op::norm, "e_norm", {{Op::embed, "E"}}},
                               {Op::norm, "h_norm", {{Op::kept_hidden, "K"}}}}},
            Op::draft_input, "C", {}, {{"C"}}},
        {"matmul_first", has_first_rows, Bits::device,
            "the other rows of the weight are not read", "",
            {Op::first, "F", {{Op::matmul, "M", {any("x")}}}},
            Op::matmul_first, "F", {{"x"}}, {{"F"}}},

        // The residual stream.
        {"add_norm", on_cpu, Bits::same,
            "one pass over the rows in place of two", "",
            normed_sum(any("y")),
            Op::add_norm, "S", {{"x"}, {"y"}}, {{"S"}, {"N"}}},
        {"add_convolved", convolved_partials, Bits::device,
            "adds partial sums up, convolves and adds the residual in one launch", "",
            normed_sum(CONVOLVED),
            Op::add_convolved, "S", {{"x"}, {"M"}, {"A"}}, {{"S"}, {"N"}}},
        {"add_norm_partials", sum_of_partials, Bits::same,
            "adds the partial sums up, the residual and the squares in one launch",
            "9.15 to 7.21 ms a step, with the forms of lower.h",
            normed_sum({Op::matmul, "M"}),
            Op::add_norm, "S", {{"x"}, {"M"}}, {{"S"}, {"N"}}},
        {"norm_partials", sum_of_partials, Bits::same,
            "the same, where there is no residual", "",
            {Op::norm, "N", {{Op::matmul, "M"}}},
            Op::add_norm, "N", {{"M"}}, {{"M"}, {"N"}}},
        // Ahead of those that would pack what the dense layer reads behind attention.
        {"mixture_with_dense_packed", dense_in_mixture_packed, Bits::device,
            "a dense layer is the shared expert of a mixture; all norms behind both in one launch", "",
            {Op::norm, "N", {{Op::scale, "F", {NORMED_BESIDE}}}},
            Op::add_normed, "F", {{"x"}}, {{"F"}, {"N"}}},
        {"mixture_with_dense", dense_in_mixture, Bits::device,
            "the same, where the norm that follows is another device's, or what follows is no norm", "",
            NORMED_BESIDE,
            Op::add_normed, "S", {{"x"}}, {{"S"}}},
        {"add_normed_scaled", post_and_norm, Bits::device,
            "adds the partial sums up, norms, adds the residual and packs the norm that follows, in one launch", "",
            {Op::norm, "N", {{Op::scale, "F", {NORMED_PRODUCT}}}},
            Op::add_normed, "F", {{"x"}, {"M"}}, {{"F"}, {"N"}}},
        {"add_normed_packed", post_and_norm, Bits::device,
            "the same, where nothing scales the stream", "",
            {Op::norm, "N", {NORMED_PRODUCT}},
            Op::add_normed, "S", {{"x"}, {"M"}}, {{"S"}, {"N"}}},
        {"add_normed", post_of_partials, Bits::device,
            "the same, where no norm follows", "",
            NORMED_PRODUCT,
            Op::add_normed, "S", {{"x"}, {"M"}}, {{"S"}}},
        {"mixture_normed_packed", mixture_and_norm, Bits::device,
            "adds up a dense layer and its norms with sums of experts that are made elsewhere", "",
            {Op::norm, "N", {{Op::scale, "F", {NORMED_MIXTURE}}}},
            Op::add_normed, "F", {{"x"}, {"M"}, {"Y"}}, {{"F"}, {"N"}}},
        {"mixture_normed", mixture_of_partials, Bits::device,
            "the same, where the norm that follows is another device's, or what follows is no norm", "",
            NORMED_MIXTURE,
            Op::add_normed, "S", {{"x"}, {"M"}, {"Y"}}, {{"S"}}},
        {"matmul_add", one_packed, Bits::same,
            "a block of few rows has all of K, so that no sum comes behind it", "5% of a step of the 35b",
            {Op::add, "S", {any("x"), {Op::matmul, "M", {any("y")}}}},
            Op::matmul_add, "M", {{"y"}, {"x"}}, {{"S"}}},
    };
}
// clang-format on

constexpr size_t MOST_RULES = 64;
std::atomic<uint64_t> off{0}; // a bit for each rule
std::atomic<uint64_t> uses[MOST_RULES];

// ---- matching ----

bool matches(const Plain &g, const Pattern &p, Val v, Match &m) {
    if (p.out >= 0 && v.out != p.out) {
        return false;
    }
    const bool named = *p.name != 0;
    for (const auto &[name, known] : m.found) {
        if (named && strcmp(name, p.name) == 0) {
            return p.op == Op::any ? known == v : known.node == v.node;
        }
    }
    const Node &n = g.at(v);
    if (n.dead || (p.op != Op::any && n.op != p.op)) {
        return false;
    }
    if (named) {
        m.found.push_back({p.name, v});
    }
    if (p.op != Op::any) {
        m.nodes.push_back(v.node);
    }
    for (size_t i = 0; i < p.in.size(); i++) {
        if (i >= n.in.size() || !matches(g, p.in[i], n.in[i], m)) {
            return false;
        }
    }
    return p.in.empty() || p.in.size() == n.in.size();
}

// Drops those nodes of a match that nothing reads any more.
void drop_unread(Plain &g, const Match &m, int32_t fused) {
    for (bool more = true; more;) {
        more = false;
        for (const int32_t i : m.nodes) {
            Node &n = g.nodes[size_t(i)];
            if (i != fused && !n.dead && g.readers(i).empty()) {
                n.dead = more = true;
            }
        }
    }
}

void apply(Plain &g, const Rule &rule, const Match &m) {
    const auto value = [&](const Ref &ref) {
        const Val v = m[ref.name];
        return Val{v.graph, v.node, ref.out < 0 ? v.out : ref.out};
    };
    const int32_t at = m[rule.at].node;
    const Node &old = g.nodes[size_t(at)];
    Node fused = {rule.op, {}, old.w, {}, old.T, old.params};
    for (const auto &[name, v] : m.found) {
        fused.parts.push_back({name, v.node});
    }
    if (rule.in.empty()) {
        fused.in = old.in;
    }
    for (const Ref &ref : rule.in) {
        fused.in.push_back(value(ref));
    }
    for (const Ref &ref : rule.out) {
        fused.n.push_back(g.width(value(ref)));
    }
    const uint32_t stage = old.stage;
    g.nodes[size_t(at)].in.clear();
    std::vector<Val> outs;
    for (const Ref &ref : rule.out) {
        if (g.at(value(ref)).stage == stage) {
            outs.push_back(value(ref));
        }
    }
    // Two passes, since an output of the node itself may become another one of it.
    constexpr int32_t ASIDE = 1 << 16;
    for (size_t i = 0; i < outs.size(); i++) {
        g.replace(outs[i], {&g, at, ASIDE + int32_t(i)});
    }
    for (size_t i = 0; i < outs.size(); i++) {
        g.replace({&g, at, ASIDE + int32_t(i)}, {&g, at, int32_t(i)});
    }
    g.set(at, std::move(fused));
    drop_unread(g, m, at);
}

} // namespace

bool Target::leaves_partials(const std::vector<ggml_tensor *> &weights) const {
    return gpu && step() && std::all_of(weights.begin(), weights.end(), [](const ggml_tensor *w) {
               return is_packed(w) && rowmm_adds_up(w->ne[1]);
           });
}

bool Target::convolves(const Node &conv) const {
    const Node &added = graph.at(conv.in[1]);
    if (added.op != Op::matmul || added.w.size() != 1 || !leaves_partials(added.w)) {
        return false;
    }
    const int64_t groups = added.w[0]->ne[1] / (2 * conv.w[0]->ne[1]);
    return conv.n[0] % (2 * groups) == 0;
}

Val Match::operator[](const char *name) const {
    for (const auto &[known, v] : found) {
        if (strcmp(known, name) == 0) {
            return v;
        }
    }
    fail(LUCE_E_INTERNAL, "a rule's pattern has no %s", name);
}

const std::vector<Rule> &rules() {
    static const std::vector<Rule> all = table();
    return all;
}

// A fused op is a launch, which runs on one device. The norm behind a mixture, for which a GPU has no other op, may be of the
// next stage: then it stays a node of its own.
static bool on_one_stage(const Plain &g, const Rule &rule, const Match &m) {
    const uint32_t stage = g.at(m[rule.at]).stage;
    return std::all_of(m.nodes.begin(), m.nodes.end(), [&](int32_t i) {
        const bool behind = rule.op == Op::mixture && i == m["N"].node;
        return behind || g.nodes[size_t(i)].stage == stage;
    });
}

void fuse(Plain &graph) {
    const Target target = {graph, graph.model.gpu()};
    for (size_t r = 0; r < rules().size(); r++) {
        const Rule &rule = rules()[r];
        if ((off.load() >> r & 1) != 0) {
            continue;
        }
        for (int32_t i = 0; size_t(i) < graph.nodes.size(); i++) {
            Match match;
            if (!graph.nodes[size_t(i)].dead && graph.nodes[size_t(i)].op == rule.pattern.op &&
                matches(graph, rule.pattern, {&graph, i, std::max(rule.pattern.out, 0)}, match) &&
                on_one_stage(graph, rule, match) && rule.when(target, match)) {
                apply(graph, rule, match);
                uses[r]++;
            }
        }
    }
}

void switch_rule(size_t index, bool on) {
    on ? off.fetch_and(~(uint64_t(1) << index)) : off.fetch_or(uint64_t(1) << index);
}

uint64_t rules_off() {
    return off;
}

uint64_t uses_of_rule(size_t index) {
    return uses[index];
}

} // namespace luce
