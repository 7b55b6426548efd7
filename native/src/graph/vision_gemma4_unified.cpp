// A patch of 48 x 48 pixels of 0 to 1 is a row, which sees no other: the model's own layers do that.
//
//   x = LayerNorm2(patch_embd.LayerNorm1(pixels) + bias), and the tables' values at the patch's column and row
//   row = mm.input_projection.RMS(LayerNorm3(x))
#include "graph/vision_gemma4_unified.h"

#include <ggml-backend.h>

#include <algorithm>

namespace luce {
namespace {

constexpr float LAYER_NORM_EPS = 1e-5f; // torch's own; the file's is of the RMS

class GemmaUnifiedTower : public VisionTower {
public:
    GemmaUnifiedTower(std::shared_ptr<GgufFile> file, const Device &device, const Shape &shape);

private:
    struct LayerNorm {
        ggml_tensor *weight, *bias;
    };

    LayerNorm layer_norm(int number, int64_t n);
    Graph build(uint32_t rows, uint32_t columns) const override;
    void write_inputs(const Graph &g, const float *patches, uint32_t rows, uint32_t columns) const override;

    LayerNorm norms_[3]; // {patch_values}, {D}, {D}
    ggml_tensor *patch_, *bias_; // {patch_values, D}, {D}
    const float *positions_; // {D, table, 2} by column and by row, which the host reads
    ggml_tensor *projection_; // {D, E}
};

VisionTower::Shape unified_shape(const GgufFile &file) {
    const auto u = [&](const char *key, int64_t lo, int64_t hi) {
        return uint32_t(file.integer(std::string("clip.vision.") + key, lo, hi));
    };
    VisionTower::Shape s;
    s.D = u("embedding_length", 8, 1 << 16);
    s.E = u("projection_dim", 1, 1 << 20);
    s.H = 1;
    s.patch =
        u("patch_size", 1, 64) * uint32_t(file.integer_or("clip.vision.projector.scale_factor", 3, 1, 8));
    s.merge = 1;
    s.eps = float(file.number("clip.vision.attention.layer_norm_epsilon"));
    s.most_rows = 1120; // of the budgets that it was trained with
    s.usual_rows = 280;
    const GgufTensor *table = file.tensor("v.position_embd.weight");
    s.table = table == nullptr ? 0 : uint32_t(std::clamp(table->ne[1], int64_t(1), int64_t(1) << 24));
    return s;
}

GemmaUnifiedTower::GemmaUnifiedTower(std::shared_ptr<GgufFile> file, const Device &device, const Shape &shape)
    : VisionTower(std::move(file), device, shape) {
    const int64_t D = shape.D, values = shape.patch_values();
    for (const char *heard : {"a.", "mm.a."}) { // the part that hears
        leave(heard);
    }
    norms_[0] = layer_norm(1, values);
    patch_ = take("v.patch_embd.weight", {values, D}, false);
    bias_ = take("v.patch_embd.bias", {D}, true);
    norms_[1] = layer_norm(2, D);
    positions_ = take_for_host("v.position_embd.weight", {D, int64_t(shape.table), 2});
    norms_[2] = layer_norm(3, D);
    projection_ = take("mm.input_projection.weight", {D, int64_t(shape.E)}, false);
}

GemmaUnifiedTower::LayerNorm GemmaUnifiedTower::layer_norm(int number, int64_t n) {
    const std::string name = "v.patch_norm." + std::to_string(number);
    return {take(name + ".weight", {n}, true), take(name + ".bias", {n}, true)};
}

VisionTower::Graph GemmaUnifiedTower::build(uint32_t rows, uint32_t columns) const {
    Graph g = begin(int64_t(rows) * columns, /*layer_nodes=*/16);
    ggml_context *c = g.context.get();
    const auto norm = [&](ggml_tensor *x, const LayerNorm &w) {
        return ggml_add(c, ggml_mul(c, ggml_norm(c, x, LAYER_NORM_EPS), w.weight), w.bias);
    };
    ggml_tensor *x = product(g, patch_, norm(g.patches, norms_[0])); // {D, n}
    x = norm(ggml_add(c, x, bias_), norms_[1]);
    x = norm(ggml_add(c, x, g.positions), norms_[2]);
    g.rows = product(g, projection_, ggml_rms_norm(c, x, shape().eps)); // {E, n}
    ggml_set_output(g.rows);
    ggml_build_forward_expand(g.nodes, g.rows);
    return g;
}

void GemmaUnifiedTower::write_inputs(const Graph &g, const float *patches, uint32_t rows,
                                     uint32_t columns) const {
    const size_t n = size_t(rows) * columns, D = shape().D, table = shape().table;
    if (std::max(rows, columns) > table) {
        fail(LUCE_E_ARG, "an image of %u x %u patches: the tower has positions for %zu a side", rows, columns,
             table);
    }
    std::vector<float> positions(D * n);
    for (size_t patch = 0; patch < n; patch++) {
        const float *by_x = positions_ + patch % columns * D,
                    *by_y = positions_ + (table + patch / columns) * D;
        for (size_t j = 0; j < D; j++) {
            positions[patch * D + j] = by_x[j] + by_y[j];
        }
    }
    ggml_backend_tensor_set(g.patches, patches, 0, ggml_nbytes(g.patches));
    ggml_backend_tensor_set(g.positions, positions.data(), 0, ggml_nbytes(g.positions));
}

} // namespace

const TowerKind GEMMA_UNIFIED_TOWER = {
    "gemma4uv", [](std::shared_ptr<GgufFile> file, const Device &device) {
        const VisionTower::Shape shape = unified_shape(*file);
        return std::shared_ptr<VisionTower>(
            std::make_shared<GemmaUnifiedTower>(std::move(file), device, shape));
    }};

} // namespace luce
