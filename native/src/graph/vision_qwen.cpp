#include "graph/vision_qwen.h"

#include <ggml-backend.h>

#include <cmath>

namespace luce {
namespace {

class QwenTower : public VisionTower {
public:
    QwenTower(std::shared_ptr<GgufFile> file, const Device &device, const Shape &shape);

private:
    struct Linear {
        ggml_tensor *weight; // {K, N}, or of a norm {K}
        ggml_tensor *bias; // {N}
    };
    struct Block {
        Linear ln1, qkv, out, ln2, up, down; // qkv {D, 3D}, up {D, FF}
    };

    Linear linear(const std::string &name, int64_t in, int64_t out);
    Linear norm(const std::string &name);
    Graph build(uint32_t rows, uint32_t columns) const override;
    void write_inputs(const Graph &g, const float *patches, uint32_t rows, uint32_t columns) const override;
    ggml_tensor *attention(const Graph &g, ggml_tensor *qkv) const;

    ggml_tensor *patch_[2]; // {patch_values, D} of the frames
    ggml_tensor *patch_bias_; // {D}
    const float *positions_; // {D, table * table}, which the host reads
    std::vector<Block> blocks_;
    Linear post_norm_; // {D}
    Linear merge_[2]; // {4D, 4D} and {4D, E}
};

// ---- hyperparameters and tensors ----

VisionTower::Shape qwen_shape(const GgufFile &file) {
    const char *path = file.path().c_str();
    VisionTower::Shape s = read_tower_shape(file);
    s.merge = uint32_t(file.integer("clip.vision.spatial_merge_size", 1, 8));
    const uint32_t image = uint32_t(file.integer("clip.vision.image_size", 1, 1 << 16));
    s.table = image / s.patch;
    s.rope_base = 1e4f;
    if (image % s.patch != 0) {
        fail(LUCE_E_FILE, "%s: key clip.vision.image_size is %u, expected a multiple of the patch size, %u",
             path, image, s.patch);
    }
    if (file.find("clip.vision.is_deepstack_layers") != nullptr) {
        for (const int64_t layer : file.integers("clip.vision.is_deepstack_layers")) {
            if (layer != 0) {
                fail(LUCE_E_UNSUPPORTED,
                     "%s: key clip.vision.is_deepstack_layers names a layer: luce runs towers without", path);
            }
        }
    }
    return s;
}

QwenTower::QwenTower(std::shared_ptr<GgufFile> file, const Device &device, const Shape &shape)
    : VisionTower(std::move(file), device, shape) {
    const Shape &s = shape;
    const int64_t D = s.D, patch = s.patch, merged = D * s.merge * s.merge;
    for (int frame = 0; frame < 2; frame++) {
        patch_[frame] =
            take(frame == 0 ? "v.patch_embd.weight" : "v.patch_embd.weight.1", {patch, patch, 3, D}, false);
    }
    patch_bias_ = take("v.patch_embd.bias", {D}, true);
    positions_ = take_for_host("v.position_embd.weight", {D, int64_t(s.table) * s.table});
    for (uint32_t i = 0; i < s.n_layer; i++) {
        const std::string p = "v.blk." + std::to_string(i) + ".";
        blocks_.push_back({norm(p + "ln1"), linear(p + "attn_qkv", D, 3 * D), linear(p + "attn_out", D, D),
                           norm(p + "ln2"), linear(p + "ffn_up", D, s.FF), linear(p + "ffn_down", s.FF, D)});
    }
    post_norm_ = norm("v.post_ln");
    merge_[0] = linear("mm.0", merged, merged);
    merge_[1] = linear("mm.2", merged, s.E);
}

QwenTower::Linear QwenTower::linear(const std::string &name, int64_t in, int64_t out) {
    return {take(name + ".weight", {in, out}, false), take(name + ".bias", {out}, true)};
}

QwenTower::Linear QwenTower::norm(const std::string &name) {
    return {take(name + ".weight", {int64_t(shape().D)}, true),
            take(name + ".bias", {int64_t(shape().D)}, true)};
}

// ---- the graph ----

// Turns queries and keys of qkv {3D, n} to their patch's place, whose cosines and sines are in `table` {d, n}: pair (i, i + d/2)
// of each head by entries i and i + d/2.
static void rope_patches(ggml_tensor *dst, const ggml_tensor *qkv, const ggml_tensor *table, int ith, int nth,
                         void *) {
    const int64_t D = qkv->ne[0] / 3, d = table->ne[0], half = d / 2, n = qkv->ne[1];
    for (int64_t row = n * ith / nth; row < n * (ith + 1) / nth; row++) {
        const float *cosines = static_cast<const float *>(table->data) + row * d, *sines = cosines + half;
        float *x = static_cast<float *>(dst->data) + row * 3 * D;
        for (float *head = x; head < x + 2 * D; head += d) {
            for (int64_t i = 0; i < half; i++) {
                const float a = head[i], b = head[i + half];
                head[i] = a * cosines[i] - b * sines[i];
                head[i + half] = b * cosines[i] + a * sines[i];
            }
        }
    }
}

// Patches of the image see all of each other.
VisionTower::Graph QwenTower::build(uint32_t rows, uint32_t columns) const {
    const Shape &s = shape();
    const int64_t n = int64_t(rows) * columns, D = s.D, merged = D * s.merge * s.merge;
    Graph g = begin(n, /*layer_nodes=*/48);
    ggml_context *c = g.context.get();
    const auto matmul = [&](const Linear &w, ggml_tensor *x) {
        return ggml_add_inplace(c, product(g, w.weight, x), w.bias);
    };
    const auto layer_norm = [&](const Linear &w, ggml_tensor *x) {
        return ggml_add_inplace(c, ggml_mul_inplace(c, ggml_norm(c, x, s.eps), w.weight), w.bias);
    };
    // {d, n}: cosines, then sines; where attention goes by blocks {4n} of y, x, y, x
    g.turns = in_blocks() ? input(g, GGML_TYPE_I32, 4 * n, 1) : input(g, GGML_TYPE_F32, D / s.H, n);

    ggml_tensor *x = nullptr; // {D, n}
    for (ggml_tensor *frame : patch_) { // an image is in both
        ggml_tensor *part = product(g, ggml_reshape_2d(c, frame, s.patch_values(), D), g.patches);
        x = x == nullptr ? part : ggml_add(c, x, part);
    }
    x = ggml_add(c, ggml_add(c, x, patch_bias_), g.positions);
    for (const Block &b : blocks_) {
        ggml_tensor *y = attention(g, matmul(b.qkv, layer_norm(b.ln1, x))); // {3D, n} -> {D, n}
        x = ggml_add(c, x, matmul(b.out, y));
        x = ggml_add(c, x, matmul(b.down, gelu(g, matmul(b.up, layer_norm(b.ln2, x))))); // {FF, n} -> {D, n}
    }
    x = ggml_reshape_2d(c, layer_norm(post_norm_, x), merged, n / (s.merge * s.merge)); // {4D, n / 4}
    g.rows = matmul(merge_[1], ggml_gelu_erf(c, matmul(merge_[0], x))); // {E, n / 4}
    ggml_set_output(g.rows);
    ggml_build_forward_expand(g.nodes, g.rows);
    return g;
}

ggml_tensor *QwenTower::attention(const Graph &g, ggml_tensor *qkv) const {
    ggml_context *c = g.context.get();
    const int64_t D = shape().D, H = shape().H, d = D / H, n = qkv->ne[1];
    const float scale = 1.0f / std::sqrt(float(d));
    if (!in_blocks()) {
        qkv = ggml_map_custom2_inplace(c, qkv, g.turns, rope_patches, GGML_N_TASKS_MAX, nullptr);
    }
    const auto heads = [&](int64_t i) { // {d, H, n}
        return ggml_view_3d(c, qkv, d, H, n, size_t(d) * sizeof(float), qkv->nb[1],
                            size_t(i * D) * sizeof(float));
    };
    const auto turned = [&](int64_t i) { // {d, n, H}
        ggml_tensor *x = heads(i);
        if (in_blocks()) {
            int sections[GGML_MROPE_SECTIONS] = {int(d / 4), int(d / 4), int(d / 4), int(d / 4)};
            x = ggml_rope_multi(c, x, ggml_reshape_1d(c, g.turns, 4 * n), nullptr, int(d / 2), sections,
                                GGML_ROPE_TYPE_VISION, 0, shape().rope_base, 1, 0, 1, 0, 0);
        }
        return ggml_permute(c, x, 0, 2, 1, 3);
    };
    return attend(g, turned(0), turned(1), ggml_permute(c, heads(2), 0, 2, 1, 3), scale);
}

// The table of positions is resampled to the image's grid: bilinear, corner to corner. RoPE turns the first half of the pairs
// by y and the second by x, each with the same frequencies.
void QwenTower::write_inputs(const Graph &g, const float *patches, uint32_t rows, uint32_t columns) const {
    const int64_t D = shape().D, d = D / shape().H, half = d / 2, quarter = d / 4;
    const int64_t n = int64_t(rows) * columns;
    const uint32_t side = shape().table;
    ggml_backend_tensor_set(g.patches, patches, 0, ggml_nbytes(g.patches));
    std::vector<float> from_table(device().gpu ? size_t(D * n) : 0);
    auto *positions = device().gpu ? from_table.data() : static_cast<float *>(g.positions->data);
    auto *turns = static_cast<float *>(g.turns->data);
    std::vector<int32_t> places(in_blocks() ? size_t(4 * n) : 0);
    struct Between {
        int64_t lo, hi;
        float part; // of hi
    };
    const auto place = [&](uint32_t i, uint32_t of) {
        const float at = of == 1 ? 0.0f : float(i) * float(side - 1) / float(of - 1);
        const int64_t lo = std::min(int64_t(at), int64_t(side) - 1);
        return Between{lo, std::min(lo + 1, int64_t(side) - 1), at - float(lo)};
    };
    for (int64_t patch = 0; patch < n; patch++, positions += D) {
        const auto [y, x] = place_of(uint32_t(patch), columns);
        const Between py = place(y, rows), px = place(x, columns);
        const float *corner[4] = {
            positions_ + (py.lo * side + px.lo) * D, positions_ + (py.lo * side + px.hi) * D,
            positions_ + (py.hi * side + px.lo) * D, positions_ + (py.hi * side + px.hi) * D};
        const float w[4] = {(1 - py.part) * (1 - px.part), (1 - py.part) * px.part, py.part * (1 - px.part),
                            py.part * px.part};
        for (int64_t j = 0; j < D; j++) {
            positions[j] =
                corner[0][j] * w[0] + corner[1][j] * w[1] + corner[2][j] * w[2] + corner[3][j] * w[3];
        }
        if (in_blocks()) {
            places[size_t(patch)] = places[size_t(2 * n + patch)] = int32_t(y);
            places[size_t(n + patch)] = places[size_t(3 * n + patch)] = int32_t(x);
            continue;
        }
        for (int64_t j = 0; j < half; j++, turns++) {
            const double angle = (j < quarter ? y : x) * std::pow(double(shape().rope_base),
                                                                  -2.0 * double(j % quarter) / double(half));
            turns[0] = float(std::cos(angle));
            turns[half] = float(std::sin(angle));
        }
        turns += half;
    }
    if (device().gpu) {
        ggml_backend_tensor_set(g.positions, from_table.data(), 0, ggml_nbytes(g.positions));
    }
    if (in_blocks()) {
        ggml_backend_tensor_set(g.turns, places.data(), 0, ggml_nbytes(g.turns));
    }
}

} // namespace

const TowerKind QWEN_TOWER = {"qwen3vl_merger", [](std::shared_ptr<GgufFile> file, const Device &device) {
                                  const VisionTower::Shape shape = qwen_shape(*file);
                                  return std::shared_ptr<VisionTower>(
                                      std::make_shared<QwenTower>(std::move(file), device, shape));
                              }};

} // namespace luce
