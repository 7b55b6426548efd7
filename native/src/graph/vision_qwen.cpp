#include "graph/vision_qwen.h"

#include <ggml-alloc.h>
#include <ggml-cpu.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace luce {

// ---- hyperparameters and tensors ----

static VisionTower::Shape read_tower_shape(const GgufFile &file) {
    const char *path = file.path().c_str();
    if (file.string("general.architecture") != "clip") {
        fail(LUCE_E_FILE, "%s: key general.architecture is '%s', expected 'clip': this is no vision tower",
             path, file.string("general.architecture").c_str());
    }
    const std::string projector = file.string("clip.projector_type");
    if (projector != "qwen3vl_merger") {
        fail(LUCE_E_UNSUPPORTED, "%s: key clip.projector_type is '%s': luce runs 'qwen3vl_merger'", path,
             projector.c_str());
    }
    const auto u = [&](const char *key, int64_t lo, int64_t hi) {
        return uint32_t(file.integer(std::string("clip.vision.") + key, lo, hi));
    };
    VisionTower::Shape s;
    s.D = u("embedding_length", 8, 1 << 16);
    s.E = u("projection_dim", 1, 1 << 20);
    s.H = u("attention.head_count", 1, 1024);
    s.FF = u("feed_forward_length", 1, 1 << 18);
    s.n_layer = u("block_count", 1, 1024);
    s.patch = u("patch_size", 1, 256);
    s.merge = u("spatial_merge_size", 1, 8);
    const uint32_t image = u("image_size", 1, 1 << 16);
    s.table = image / s.patch;
    s.eps = float(file.number("clip.vision.attention.layer_norm_epsilon"));
    if (s.D % s.H != 0 || s.D / s.H % 4 != 0) {
        fail(LUCE_E_UNSUPPORTED, "%s: %u heads of width %u: luce runs heads of a multiple of 4", path, s.H,
             s.D);
    }
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

VisionTower::VisionTower(std::shared_ptr<GgufFile> file, const Device &cpu)
    : file_(std::move(file)), cpu_(cpu), shape_(read_tower_shape(*file_)) {
    context_ = new_context(ggml_tensor_overhead() * (file_->tensors().size() + 1));
    for (const GgufTensor &t : file_->tensors()) {
        left_.insert(t.name);
    }
    const Shape &s = shape_;
    const int64_t D = s.D, patch = s.patch, merged = D * s.merge * s.merge;
    for (int frame = 0; frame < 2; frame++) {
        patch_[frame] =
            take(frame == 0 ? "v.patch_embd.weight" : "v.patch_embd.weight.1", {patch, patch, 3, D}, false);
    }
    patch_bias_ = take("v.patch_embd.bias", {D}, true);
    positions_ = take("v.position_embd.weight", {D, int64_t(s.table) * s.table}, true);
    for (uint32_t i = 0; i < s.n_layer; i++) {
        const std::string p = "v.blk." + std::to_string(i) + ".";
        blocks_.push_back({norm(p + "ln1"), linear(p + "attn_qkv", D, 3 * D), linear(p + "attn_out", D, D),
                           norm(p + "ln2"), linear(p + "ffn_up", D, s.FF), linear(p + "ffn_down", s.FF, D)});
    }
    post_norm_ = norm("v.post_ln");
    merge_[0] = linear("mm.0", merged, merged);
    merge_[1] = linear("mm.2", merged, s.E);
    if (!left_.empty()) {
        fail(LUCE_E_UNSUPPORTED, "%s: tensor %s is not part of the vision tower that luce runs",
             file_->path().c_str(), left_.begin()->c_str());
    }
}

ggml_tensor *VisionTower::take(const std::string &name, std::vector<int64_t> shape, bool f32) {
    const char *path = file_->path().c_str();
    const GgufTensor *source = file_->tensor(name);
    if (source == nullptr) {
        fail(LUCE_E_FILE, "%s: tensor %s is missing", path, name.c_str());
    }
    shape.resize(GGML_MAX_DIMS, 1);
    if (!std::equal(shape.begin(), shape.end(), source->ne)) {
        const auto text = [](const int64_t *ne) {
            return format("{%lld, %lld, %lld, %lld}", (long long) ne[0], (long long) ne[1], (long long) ne[2],
                          (long long) ne[3]);
        };
        fail(LUCE_E_FILE, "%s: tensor %s is of shape %s, expected %s", path, name.c_str(),
             text(source->ne).c_str(), text(shape.data()).c_str());
    }
    const ggml_type type = source->type;
    const bool known = type == GGML_TYPE_F32 ||
                       (!f32 && (type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 || type == GGML_TYPE_Q8_0));
    if (!known) {
        fail(LUCE_E_UNSUPPORTED, "%s: tensor %s is %s: luce takes %s there", path, name.c_str(),
             type_name(type), f32 ? "F32" : "F32, F16, BF16 or Q8_0");
    }
    left_.erase(name);
    weight_bytes_ += source->size;
    const auto hash = [&](const void *data, size_t n) {
        for (size_t i = 0; i < n; i++) {
            identity_ = (identity_ ^ static_cast<const uint8_t *>(data)[i]) * 0x100000001b3u;
        }
    };
    hash(name.data(), name.size());
    hash(&type, sizeof(type));
    hash(source->ne, sizeof(source->ne));
    hash(source->data, size_t(std::min<uint64_t>(source->size, 4096)));
    ggml_tensor *tensor = ggml_new_tensor_4d(context_.get(), type, shape[0], shape[1], shape[2], shape[3]);
    tensor->data = const_cast<uint8_t *>(source->data);
    return tensor;
}

VisionTower::Linear VisionTower::linear(const std::string &name, int64_t in, int64_t out) {
    return {take(name + ".weight", {in, out}, false), take(name + ".bias", {out}, true)};
}

VisionTower::Linear VisionTower::norm(const std::string &name) {
    return {take(name + ".weight", {int64_t(shape_.D)}, true),
            take(name + ".bias", {int64_t(shape_.D)}, true)};
}

// ---- the graph ----

// ggml's own takes a table in F16.
static void gelu_tanh(ggml_tensor *dst, const ggml_tensor *x, int ith, int nth, void *) {
    const int64_t n = ggml_nelements(x), lo = n * ith / nth, hi = n * (ith + 1) / nth;
    const float *from = static_cast<const float *>(x->data);
    float *to = static_cast<float *>(dst->data);
    for (int64_t i = lo; i < hi; i++) {
        const float v = from[i];
        to[i] = 0.5f * v * (1.0f + std::tanh(0.79788456080286535588f * v * (1.0f + 0.044715f * v * v)));
    }
}

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

struct VisionTower::Graph {
    Context context;
    ggml_cgraph *nodes;
    ggml_tensor *patches; // {patch_values, n}
    ggml_tensor *positions; // {D, n}: the table's, resampled
    ggml_tensor *turns; // {d, n}: cosines, then sines
    ggml_tensor *rows; // {E, n / merge^2}
};

// Patches of the image see all of each other. Attention goes over blocks of keys, so scores take no memory.
VisionTower::Graph VisionTower::build(uint32_t rows, uint32_t columns) const {
    constexpr size_t BLOCK_NODES = 48;
    const size_t n_nodes = BLOCK_NODES * (shape_.n_layer + 2);
    const Shape &s = shape_;
    const int64_t n = int64_t(rows) * columns, D = s.D, d = D / s.H, merged = D * s.merge * s.merge;
    Graph g;
    g.context = new_context(ggml_tensor_overhead() * n_nodes + ggml_graph_overhead_custom(n_nodes, false));
    ggml_context *c = g.context.get();
    const auto matmul = [&](const Linear &w, ggml_tensor *x) {
        return ggml_add_inplace(c, ggml_mul_mat(c, w.weight, x), w.bias);
    };
    const auto layer_norm = [&](const Linear &w, ggml_tensor *x) {
        return ggml_add_inplace(c, ggml_mul_inplace(c, ggml_norm(c, x, s.eps), w.weight), w.bias);
    };
    const auto input = [&](int64_t a) {
        ggml_tensor *t = ggml_new_tensor_2d(c, GGML_TYPE_F32, a, n);
        ggml_set_input(t);
        return t;
    };
    g.patches = input(s.patch_values());
    g.positions = input(D);
    g.turns = input(d);

    ggml_tensor *x = nullptr; // {D, n}
    for (ggml_tensor *frame : patch_) { // an image is in both
        ggml_tensor *part = ggml_mul_mat(c, ggml_reshape_2d(c, frame, s.patch_values(), D), g.patches);
        x = x == nullptr ? part : ggml_add(c, x, part);
    }
    x = ggml_add(c, ggml_add(c, x, patch_bias_), g.positions);
    for (const Block &b : blocks_) {
        ggml_tensor *qkv = matmul(b.qkv, layer_norm(b.ln1, x)); // {3D, n}
        qkv = ggml_map_custom2_inplace(c, qkv, g.turns, rope_patches, GGML_N_TASKS_MAX, nullptr);
        const auto heads = [&](int64_t i) { // {d, n, H}
            return ggml_view_3d(c, qkv, d, n, s.H, qkv->nb[1], size_t(d) * sizeof(float),
                                size_t(i * D) * sizeof(float));
        };
        ggml_tensor *y =
            ggml_flash_attn_ext(c, heads(0), heads(1), heads(2), nullptr, 1.0f / std::sqrt(float(d)), 0, 0);
        x = ggml_add(c, x, matmul(b.out, ggml_reshape_2d(c, y, D, n)));
        ggml_tensor *h = matmul(b.up, layer_norm(b.ln2, x)); // {FF, n}
        h = ggml_map_custom1_inplace(c, h, gelu_tanh, GGML_N_TASKS_MAX, nullptr);
        x = ggml_add(c, x, matmul(b.down, h));
    }
    x = ggml_reshape_2d(c, layer_norm(post_norm_, x), merged, n / (s.merge * s.merge)); // {4D, n / 4}
    g.rows = matmul(merge_[1], ggml_gelu_erf(c, matmul(merge_[0], x))); // {E, n / 4}
    ggml_set_output(g.rows);
    g.nodes = ggml_new_graph_custom(c, n_nodes, false);
    ggml_build_forward_expand(g.nodes, g.rows);
    return g;
}

// The table of positions is resampled to the image's grid: bilinear, corner to corner. RoPE turns the first half of the pairs
// by y and the second by x, each with the same frequencies.
void VisionTower::write_positions(const Graph &g, uint32_t rows, uint32_t columns) const {
    const int64_t D = shape_.D, d = D / shape_.H, half = d / 2, quarter = d / 4;
    const uint32_t m = shape_.merge, side = shape_.table;
    const auto *table = static_cast<const float *>(positions_->data);
    auto *positions = static_cast<float *>(g.positions->data), *turns = static_cast<float *>(g.turns->data);
    struct Place {
        int64_t lo, hi;
        float part; // of hi
    };
    const auto place = [&](uint32_t i, uint32_t n) {
        const float at = n == 1 ? 0.0f : float(i) * float(side - 1) / float(n - 1);
        const int64_t lo = std::min(int64_t(at), int64_t(side) - 1);
        return Place{lo, std::min(lo + 1, int64_t(side) - 1), at - float(lo)};
    };
    for (uint32_t block = 0; block < rows / m * (columns / m); block++) {
        for (uint32_t i = 0; i < m * m; i++, positions += D, turns += d) {
            const uint32_t y = block / (columns / m) * m + i / m, x = block % (columns / m) * m + i % m;
            const Place py = place(y, rows), px = place(x, columns);
            const float *corner[4] = {table + (py.lo * side + px.lo) * D, table + (py.lo * side + px.hi) * D,
                                      table + (py.hi * side + px.lo) * D, table + (py.hi * side + px.hi) * D};
            const float w[4] = {(1 - py.part) * (1 - px.part), (1 - py.part) * px.part,
                                py.part * (1 - px.part), py.part * px.part};
            for (int64_t j = 0; j < D; j++) {
                positions[j] =
                    corner[0][j] * w[0] + corner[1][j] * w[1] + corner[2][j] * w[2] + corner[3][j] * w[3];
            }
            for (int64_t j = 0; j < half; j++) {
                const double angle =
                    (j < quarter ? y : x) * std::pow(1e4, -2.0 * double(j % quarter) / double(half));
                turns[j] = float(std::cos(angle));
                turns[j + half] = float(std::sin(angle));
            }
        }
    }
}

uint64_t VisionTower::encode_bytes(uint32_t rows, uint32_t columns) const {
    const Graph g = build(rows, columns);
    const GraphAllocator allocator = new_graph_allocator({&cpu_});
    size_t size = 0;
    ggml_gallocr_reserve_n_size(allocator.get(), g.nodes, nullptr, nullptr, &size);
    return size;
}

void VisionTower::encode(const float *patches, uint32_t rows, uint32_t columns, int n_threads,
                         const std::function<bool(float)> &go_on, float *out) const {
    check_memory(cpu_, encode_bytes(rows, columns), "encoding an image");
    const Graph g = build(rows, columns);
    const GraphAllocator allocator = new_graph_allocator({&cpu_});
    if (!ggml_gallocr_alloc_graph(allocator.get(), g.nodes)) {
        fail(LUCE_E_MEMORY, "allocating %s for an image failed",
             human_bytes(encode_bytes(rows, columns)).c_str());
    }
    memcpy(g.patches->data, patches, ggml_nbytes(g.patches));
    write_positions(g, rows, columns);
    ggml_cplan plan = ggml_graph_plan(g.nodes, n_threads, nullptr);
    std::vector<uint8_t> work(plan.work_size);
    plan.work_data = work.data();
    struct Asked {
        const std::function<bool(float)> &go_on;
        int nodes = 0, all;
    } asked{go_on, 0, ggml_graph_n_nodes(g.nodes)};
    plan.abort_callback_data = &asked;
    plan.abort_callback = [](void *data) { // of one thread, this one, after each node
        auto &a = *static_cast<Asked *>(data);
        a.nodes++;
        return !a.go_on(std::min(1.0f, float(a.nodes) / float(a.all)));
    };
    const ggml_status status = ggml_graph_compute(g.nodes, &plan);
    if (status == GGML_STATUS_ABORTED) {
        fail(LUCE_E_CANCELLED, "encoding an image was cancelled");
    }
    if (status != GGML_STATUS_SUCCESS) {
        fail(LUCE_E_DEVICE, "cpu: encoding an image failed");
    }
    const auto *found = static_cast<const float *>(g.rows->data);
    const size_t n = size_t(ggml_nelements(g.rows));
    if (!std::all_of(found, found + n, [](float v) { return std::isfinite(v); })) {
        fail(LUCE_E_NUMERIC, "%s: a row of an image is not finite", file_->path().c_str());
    }
    std::copy(found, found + n, out);
}

} // namespace luce
