// Pixels are of -1 to 1. x is the patch embedding, and the tables' values at the patch's column and row.
//
//   block   a = x + RMS(attention(RMS(x)*ln1))*attn_post_norm; x = a + RMS(ffn(RMS(a)*ln2))*ffn_post_norm
//           queries and keys are normed by head and turned: the first half of a head by the column, the second by the row, each
//           as a head of its own; values are normed without a weight; scores are not scaled
//   rows    the mean of 3 x 3 patches * sqrt(D), less std_bias, times std_scale, normed without a weight, projected
//
// In the small models products clamp what they read and what they make. Files do not say which GELU: it is that by tanh.
#include "graph/vision_gemma4.h"

#include <ggml-backend.h>

#include <algorithm>
#include <cmath>

namespace luce {
namespace {

class GemmaTower : public VisionTower {
public:
    GemmaTower(std::shared_ptr<GgufFile> file, const Device &device, const Shape &shape);

private:
    struct Range {
        float lo = -INFINITY, hi = INFINITY;
    };
    struct Linear {
        ggml_tensor *weight; // {K, N}
        Range in, out;
    };
    struct Block {
        ggml_tensor *ln1; // {D}
        Linear q, k, v; // {D, D}
        ggml_tensor *q_norm, *k_norm; // {d}
        Linear out; // {D, D}
        ggml_tensor *attn_post_norm, *ln2; // {D}
        Linear gate, up, down; // {D, FF}, {D, FF}, {FF, D}
        ggml_tensor *ffn_post_norm; // {D}
    };

    ggml_tensor *vector(const std::string &name, int64_t n) { return take(name, {n}, true); }
    Linear linear(const std::string &name, int64_t in, int64_t out);
    Range range(const std::string &name);
    Graph build(uint32_t rows, uint32_t columns) const override;
    void write_inputs(const Graph &g, const float *patches, uint32_t rows, uint32_t columns) const override;
    ggml_tensor *clamped(const Graph &g, const Linear &w, ggml_tensor *x) const;
    ggml_tensor *attention(const Graph &g, const Block &b, ggml_tensor *x) const;

    ggml_tensor *patch_; // {patch_values, D}
    const float *positions_; // {D, table, 2} by column and by row, which the host reads
    std::vector<Block> blocks_;
    ggml_tensor *std_bias_ = nullptr, *std_scale_ = nullptr; // {D}, or none
    ggml_tensor *projection_; // {D, E}
};

// ---- hyperparameters and tensors ----

VisionTower::Shape gemma_shape(const GgufFile &file) {
    VisionTower::Shape s = read_tower_shape(file);
    s.merge = uint32_t(file.integer_or("clip.vision.projector.scale_factor", 3, 1, 8));
    s.rope_base = 100;
    s.most_rows = 1120; // of the budgets that it was trained with
    s.usual_rows = 280;
    const GgufTensor *table = file.tensor("v.position_embd.weight");
    s.table = table == nullptr ? 0 : uint32_t(std::clamp(table->ne[1], int64_t(1), int64_t(1) << 24));
    return s;
}

GemmaTower::GemmaTower(std::shared_ptr<GgufFile> file, const Device &device, const Shape &shape)
    : VisionTower(std::move(file), device, shape) {
    const Shape &s = shape;
    const int64_t D = s.D, patch = s.patch, d = D / s.H;
    for (const char *heard : {"a.", "mm.a."}) { // the part that hears
        leave(heard);
    }
    patch_ = take("v.patch_embd.weight", {patch, patch, 3, D}, false);
    positions_ = take_for_host("v.position_embd.weight", {D, int64_t(s.table), 2});
    for (uint32_t i = 0; i < s.n_layer; i++) {
        const std::string p = "v.blk." + std::to_string(i) + ".";
        blocks_.push_back({vector(p + "ln1.weight", D), linear(p + "attn_q", D, D),
                           linear(p + "attn_k", D, D), linear(p + "attn_v", D, D),
                           vector(p + "attn_q_norm.weight", d), vector(p + "attn_k_norm.weight", d),
                           linear(p + "attn_out", D, D), vector(p + "attn_post_norm.weight", D),
                           vector(p + "ln2.weight", D), linear(p + "ffn_gate", D, s.FF),
                           linear(p + "ffn_up", D, s.FF), linear(p + "ffn_down", s.FF, D),
                           vector(p + "ffn_post_norm.weight", D)});
    }
    if (has("v.std_bias") || has("v.std_scale")) {
        std_bias_ = vector("v.std_bias", D);
        std_scale_ = vector("v.std_scale", D);
    }
    projection_ = take("mm.input_projection.weight", {D, int64_t(s.E)}, false);
}

GemmaTower::Linear GemmaTower::linear(const std::string &name, int64_t in, int64_t out) {
    return {take(name + ".weight", {in, out}, false), range(name + ".input"), range(name + ".output")};
}

GemmaTower::Range GemmaTower::range(const std::string &name) {
    Range r;
    if (has(name + "_min")) {
        r.lo = *take_for_host(name + "_min", {1});
    }
    if (has(name + "_max")) {
        r.hi = *take_for_host(name + "_max", {1});
    }
    if (!(r.lo <= r.hi)) {
        fail(LUCE_E_FILE, "%s: tensors %s_min and %s_max are %g and %g, expected a range",
             file().path().c_str(), name.c_str(), name.c_str(), double(r.lo), double(r.hi));
    }
    return r;
}

// ---- the graph ----

// Patches of the image see all of each other.
VisionTower::Graph GemmaTower::build(uint32_t rows, uint32_t columns) const {
    const Shape &s = shape();
    const int64_t n = int64_t(rows) * columns, D = s.D, merged = int64_t(s.merge) * s.merge;
    Graph g = begin(n, /*layer_nodes=*/80);
    ggml_context *c = g.context.get();
    const auto norm = [&](ggml_tensor *x, ggml_tensor *w) {
        return ggml_mul_inplace(c, ggml_rms_norm(c, x, s.eps), w);
    };
    g.turns = input(g, GGML_TYPE_I32, n, 2); // columns, then rows

    ggml_tensor *x = product(g, ggml_reshape_2d(c, patch_, s.patch_values(), D), g.patches); // {D, n}
    x = ggml_add(c, x, g.positions);
    for (const Block &b : blocks_) {
        x = ggml_add(c, x, norm(attention(g, b, norm(x, b.ln1)), b.attn_post_norm));
        ggml_tensor *h = norm(x, b.ln2);
        h = ggml_mul(c, gelu(g, clamped(g, b.gate, h)), clamped(g, b.up, h)); // {FF, n}
        x = ggml_add(c, x, norm(clamped(g, b.down, h), b.ffn_post_norm));
    }
    // The mean of a row's patches, which stand together.
    x = ggml_permute(c, ggml_reshape_3d(c, x, D, merged, n / merged), 1, 0, 2, 3); // {9, D, n / 9}
    x = ggml_reshape_2d(c, ggml_sum_rows(c, ggml_cont(c, x)), D, n / merged); // {D, n / 9}
    x = ggml_scale_inplace(c, x, std::sqrt(float(D)) / float(merged));
    if (std_bias_ != nullptr) {
        x = ggml_mul(c, ggml_sub(c, x, std_bias_), std_scale_);
    }
    g.rows = product(g, projection_, ggml_rms_norm(c, x, s.eps)); // {E, n / 9}
    ggml_set_output(g.rows);
    ggml_build_forward_expand(g.nodes, g.rows);
    return g;
}

// A clamp is in place, so it has to be of a copy where others read the same.
ggml_tensor *GemmaTower::clamped(const Graph &g, const Linear &w, ggml_tensor *x) const {
    ggml_context *c = g.context.get();
    const auto bounds = [](const Range &r) { return std::isfinite(r.lo) || std::isfinite(r.hi); };
    if (bounds(w.in)) {
        x = ggml_clamp(c, ggml_dup(c, x), w.in.lo, w.in.hi);
    }
    ggml_tensor *y = product(g, w.weight, x);
    return bounds(w.out) ? ggml_clamp(c, y, w.out.lo, w.out.hi) : y;
}

// Attention of normed rows x {D, n} -> {D, n}.
ggml_tensor *GemmaTower::attention(const Graph &g, const Block &b, ggml_tensor *x) const {
    ggml_context *c = g.context.get();
    const int64_t n = x->ne[1], H = shape().H, d = int64_t(shape().D) / H, half = d / 2;
    const auto heads = [&](const Linear &w) { // {d, H, n}
        return ggml_rms_norm(c, ggml_reshape_3d(c, clamped(g, w, x), d, H, n), shape().eps);
    };
    const auto turned = [&](const Linear &w, ggml_tensor *norm) { // {d, n, H}
        ggml_tensor *y = ggml_mul_inplace(c, heads(w), norm), *parts[2];
        for (int axis = 0; axis < 2; axis++) {
            ggml_tensor *part =
                ggml_view_3d(c, y, half, H, n, y->nb[1], y->nb[2], size_t(axis * half) * sizeof(float));
            ggml_tensor *places = ggml_view_1d(c, g.turns, n, size_t(axis) * g.turns->nb[1]);
            parts[axis] = ggml_rope_ext(c, part, places, nullptr, int(half), GGML_ROPE_TYPE_NEOX, 0,
                                        shape().rope_base, 1, 0, 1, 0, 0);
        }
        return ggml_permute(c, ggml_concat(c, parts[0], parts[1], 0), 0, 2, 1, 3);
    };
    ggml_tensor *q = turned(b.q, b.q_norm), *k = turned(b.k, b.k_norm);
    return clamped(g, b.out, attend(g, q, k, ggml_permute(c, heads(b.v), 0, 2, 1, 3), 1));
}

void GemmaTower::write_inputs(const Graph &g, const float *patches, uint32_t rows, uint32_t columns) const {
    const size_t n = size_t(rows) * columns, D = shape().D, table = shape().table;
    if (std::max(rows, columns) > table) {
        fail(LUCE_E_ARG, "an image of %u x %u patches: the tower has positions for %zu a side", rows, columns,
             table);
    }
    std::vector<float> positions(D * n);
    std::vector<int32_t> places(2 * n);
    for (size_t patch = 0; patch < n; patch++) {
        const Place at = place_of(uint32_t(patch), columns);
        const float *by_x = positions_ + at.x * D, *by_y = positions_ + (table + at.y) * D;
        for (size_t j = 0; j < D; j++) {
            positions[patch * D + j] = by_x[j] + by_y[j];
        }
        places[patch] = int32_t(at.x);
        places[n + patch] = int32_t(at.y);
    }
    ggml_backend_tensor_set(g.patches, patches, 0, ggml_nbytes(g.patches));
    ggml_backend_tensor_set(g.positions, positions.data(), 0, ggml_nbytes(g.positions));
    ggml_backend_tensor_set(g.turns, places.data(), 0, ggml_nbytes(g.turns));
}

} // namespace

const TowerKind GEMMA_TOWER = {"gemma4v", [](std::shared_ptr<GgufFile> file, const Device &device) {
                                   const VisionTower::Shape shape = gemma_shape(*file);
                                   return std::shared_ptr<VisionTower>(
                                       std::make_shared<GemmaTower>(std::move(file), device, shape));
                               }};

} // namespace luce
