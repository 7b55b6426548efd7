#include "graph/vision.h"

#include "graph/vision_gemma4.h"
#include "graph/vision_gemma4_unified.h"
#include "graph/vision_qwen.h"

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml-impl.h> // it declares ggml_graph_view

#include <algorithm>
#include <cmath>
#include <cstring>

namespace luce {

// Unless somebody says otherwise, an image takes at most this part: of a GPU's memory, of what a CPU has free.
static constexpr uint64_t MEMORY_PART_GPU = 32, MEMORY_PART_CPU = 4;

// Scores of a block of queries take so much of a GPU's memory.
static uint64_t block_bytes_of(const Device &device) {
    uint64_t free = 0, total = 0;
    device.memory(&free, &total);
    return std::clamp(total / 256, uint64_t(64) << 20, uint64_t(1) << 30);
}

// ---- kinds of towers ----

std::shared_ptr<VisionTower> open_tower(std::shared_ptr<GgufFile> file, const Device &device,
                                        uint32_t max_rows) {
    const char *path = file->path().c_str();
    if (file->string("general.architecture") != "clip") {
        fail(LUCE_E_FILE, "%s: key general.architecture is '%s', expected 'clip': this is no vision tower",
             path, file->string("general.architecture").c_str());
    }
    // Files with parts that hear as well say it of each part.
    const char *own = "clip.vision.projector_type";
    const char *key = file->find(own) != nullptr ? own : "clip.projector_type";
    const std::string projector = file->string(key);
    for (const TowerKind *kind : {&QWEN_TOWER, &GEMMA_TOWER, &GEMMA_UNIFIED_TOWER}) {
        if (projector == kind->projector) {
            const std::shared_ptr<VisionTower> tower = kind->make(std::move(file), device);
            tower->settle(max_rows);
            return tower;
        }
    }
    fail(LUCE_E_UNSUPPORTED, "%s: key %s is '%s': luce runs '%s', '%s' and '%s'", path, key,
         projector.c_str(), QWEN_TOWER.projector, GEMMA_TOWER.projector, GEMMA_UNIFIED_TOWER.projector);
}

VisionTower::Shape read_tower_shape(const GgufFile &file) {
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
    s.eps = float(file.number("clip.vision.attention.layer_norm_epsilon"));
    if (s.D % s.H != 0 || s.D / s.H % 4 != 0) {
        fail(LUCE_E_UNSUPPORTED, "%s: %u heads of width %u: luce runs heads of a multiple of 4",
             file.path().c_str(), s.H, s.D);
    }
    return s;
}

// ---- tensors ----

VisionTower::VisionTower(std::shared_ptr<GgufFile> file, const Device &device, const Shape &shape)
    : file_(std::move(file)), device_(device), shape_(shape),
      block_bytes_(device.gpu ? block_bytes_of(device) : block_bytes_on_cpu.load()) {
    context_ = new_context(ggml_tensor_overhead() * (file_->tensors().size() + 1));
    for (const GgufTensor &t : file_->tensors()) {
        left_.insert(t.name);
    }
}

void VisionTower::settle(uint32_t max_rows) {
    if (!left_.empty()) {
        fail(LUCE_E_UNSUPPORTED, "%s: tensor %s is not part of the vision tower that luce runs",
             file_->path().c_str(), left_.begin()->c_str());
    }
    find_largest(max_rows);
    if (device_.gpu) {
        place();
    }
}

void VisionTower::leave(const std::string &beginning) {
    for (auto it = left_.lower_bound(beginning); it != left_.end() && it->rfind(beginning, 0) == 0;) {
        it = left_.erase(it);
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
    if (!device_.gpu) {
        tensor->data = const_cast<uint8_t *>(source->data);
    }
    taken_.push_back({tensor, source});
    return tensor;
}

// No device has it.
const float *VisionTower::take_for_host(const std::string &name, std::vector<int64_t> shape) {
    take(name, std::move(shape), true);
    const GgufTensor *source = taken_.back().second;
    taken_.pop_back();
    return reinterpret_cast<const float *>(source->data);
}

// ---- memory ----

std::atomic<uint64_t> VisionTower::block_bytes_on_cpu{0};

uint64_t VisionTower::encode_bytes(uint32_t rows, uint32_t columns) const {
    const Graph g = build(rows, columns);
    const GraphAllocator allocator = new_graph_allocator(device_);
    size_t size = 0;
    ggml_gallocr_reserve_n_size(allocator.get(), g.nodes, nullptr, nullptr, &size);
    return size + (device_.gpu ? pool_bytes(uint64_t(rows) * columns) : 0);
}

// Of n patches ggml's products on a GPU take at most so much beside: a weight as F32, or rows in 8 bits, and cuBLAS's own.
uint64_t VisionTower::pool_bytes(uint64_t n) const {
    constexpr uint64_t CUBLAS = uint64_t(96) << 20;
    uint64_t most = 0;
    for (const auto &[tensor, source] : taken_) {
        const uint64_t widest = uint64_t(std::max(tensor->ne[0], int64_t(shape_.D)));
        most = std::max(most, ggml_is_quantized(tensor->type) ? n * widest * 5 / 4
                                                              : uint64_t(ggml_nelements(tensor)) * 4);
    }
    return CUBLAS + most;
}

// What an image takes depends on how many patches it has, and hardly on their grid.
void VisionTower::find_largest(uint32_t max_rows) {
    const uint32_t m = shape_.merge;
    const auto bytes = [&](uint32_t n) { return encode_bytes(m, n * m); };
    uint64_t free = 0, total = 0;
    device_.memory(&free, &total);
    // What was asked for is held to what there is: a GPU's memory is taken at once, and a CPU's when an image comes.
    const uint64_t part = max_rows != 0 ? (device_.gpu ? UINT64_MAX : total)
                          : device_.gpu ? total / MEMORY_PART_GPU
                                        : free / MEMORY_PART_CPU;
    const uint32_t usual = shape_.usual_rows == 0 ? shape_.most_rows : shape_.usual_rows;
    max_rows_ = std::min(max_rows == 0 ? usual : max_rows, shape_.most_rows);
    if (bytes(max_rows_) > part) {
        uint32_t low = FEWEST_IMAGE_ROWS, high = max_rows_; // `high` takes too much
        while (high - low > FEWEST_IMAGE_ROWS) {
            const uint32_t middle = (low + high) / 2;
            (bytes(middle) <= part ? low : high) = middle;
        }
        max_rows_ = low;
    }
    for (const uint32_t n : sizes_to_hold()) {
        scratch_bytes_ = std::max(scratch_bytes_, bytes(n));
    }
}

// Images of so many rows, of which the one that takes most is held. A smaller image can take more than the largest one: blocks
// of queries have a multiple of 64, and those of fewer patches can be nearer to block_bytes_.
std::vector<uint32_t> VisionTower::sizes_to_hold() const {
    std::vector<uint32_t> sizes;
    for (uint32_t part = 16; part > 0; part--) {
        sizes.push_back(std::max(max_rows_ * part / 16, std::min(max_rows_, FEWEST_IMAGE_ROWS)));
    }
    return sizes;
}

// Takes all of a GPU's memory that it will take, and runs once: a handle of cuBLAS is made then, which waits for the device.
void VisionTower::place() {
    const auto type = device_.buffer_type();
    const size_t alignment = ggml_backend_buft_get_alignment(type);
    size_t size = 0;
    std::vector<size_t> offsets;
    for (const auto &[tensor, source] : taken_) {
        offsets.push_back(size);
        size += GGML_PAD(ggml_backend_buft_get_alloc_size(type, tensor), alignment);
    }
    const std::string what = format("the vision tower, with an image of %u tokens,", max_rows_);
    check_works(device_);
    check_memory(device_, size + scratch_bytes_, what.c_str());
    make_current(device_);
    weights_ = allocate(device_, size, "the vision tower");
    ggml_backend_buffer_set_usage(weights_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    auto *base = static_cast<uint8_t *>(ggml_backend_buffer_get_base(weights_.get()));
    std::vector<Upload> items;
    for (size_t i = 0; i < taken_.size(); i++) {
        const auto &[tensor, source] = taken_[i];
        ggml_backend_tensor_alloc(weights_.get(), tensor, base + offsets[i]);
        items.push_back({tensor, source->data, source->size, {tensor->type, tensor->type}});
    }
    upload(device_, items, [](uint64_t) { return true; });
    backend_ = make_backend(device_, 1);
    allocator_ = new_graph_allocator(device_);
    for (const uint32_t n : sizes_to_hold()) {
        const Graph g = build(shape_.merge, n * shape_.merge);
        check_supported(g);
        if (!ggml_gallocr_reserve(allocator_.get(), g.nodes)) {
            fail(LUCE_E_MEMORY, "%s: allocating %s for images failed", device_.name.c_str(),
                 human_bytes(scratch_bytes_).c_str());
        }
    }
    warm_up();
}

// Asks first, since ggml aborts on an op that a device does not have.
void VisionTower::check_supported(const Graph &g) const {
    for (int i = 0; i < ggml_graph_n_nodes(g.nodes); i++) {
        const ggml_tensor *node = ggml_graph_node(g.nodes, i);
        if (!ggml_backend_dev_supports_op(device_.dev, node)) {
            fail(LUCE_E_UNSUPPORTED, "%s has no %s of a vision tower", device_.name.c_str(),
                 ggml_op_desc(node));
        }
    }
}

void VisionTower::warm_up() const {
    const uint32_t rows = 8 * shape_.merge, columns = 8 * shape_.merge;
    const std::vector<float> patches(size_t(rows) * columns * shape_.patch_values(), 0.5f);
    std::vector<float> out(size_t(rows) * columns / (shape_.merge * shape_.merge) * shape_.E);
    const std::lock_guard<std::mutex> alone(device_lock());
    encode(patches.data(), rows, columns, 1, [](float) { return true; }, out.data());
}

// ---- parts of graphs ----

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

ggml_tensor *VisionTower::gelu(const Graph &g, ggml_tensor *x) const {
    ggml_context *c = g.context.get();
    return in_blocks() ? ggml_gelu_inplace(c, x)
                       : ggml_map_custom1_inplace(c, x, gelu_tanh, GGML_N_TASKS_MAX, nullptr);
}

ggml_tensor *VisionTower::input(const Graph &g, ggml_type type, int64_t a, int64_t b) {
    ggml_tensor *t = ggml_new_tensor_2d(g.context.get(), type, a, b);
    ggml_set_input(t);
    return t;
}

ggml_tensor *VisionTower::product(const Graph &g, ggml_tensor *w, ggml_tensor *x) {
    ggml_tensor *y = ggml_mul_mat(g.context.get(), w, x);
    ggml_prec_set_acc(y, GGML_PREC_F32); // a GPU adds up in F32
    return y;
}

// How many queries are multiplied with all keys at once.
int64_t VisionTower::block_rows(int64_t n) const {
    constexpr int64_t FEWEST = 64;
    const int64_t fit = int64_t(block_bytes_ / (sizeof(float) * size_t(n) * shape_.H));
    return std::min(n, std::max(FEWEST, fit / FEWEST * FEWEST));
}

VisionTower::Graph VisionTower::begin(int64_t n, size_t layer_nodes) const {
    constexpr size_t BLOCK_NODES = 8;
    const size_t n_blocks = in_blocks() ? size_t((n + block_rows(n) - 1) / block_rows(n)) : 0;
    const size_t n_nodes = layer_nodes * (shape_.n_layer + 2) + BLOCK_NODES * n_blocks * shape_.n_layer;
    Graph g;
    g.context = new_context(ggml_tensor_overhead() * n_nodes + ggml_graph_overhead_custom(n_nodes, false));
    g.nodes = ggml_new_graph_custom(g.context.get(), n_nodes, false);
    g.patches = input(g, GGML_TYPE_F32, shape_.patch_values(), n);
    g.positions = input(g, GGML_TYPE_F32, shape_.D, n);
    g.attended = n_blocks > 1 ? input(g, GGML_TYPE_F32, shape_.D, n) : nullptr;
    return g;
}

VisionTower::Place VisionTower::place_of(uint32_t patch, uint32_t columns) const {
    const uint32_t m = shape_.merge, block = patch / (m * m), i = patch % (m * m);
    return {block / (columns / m) * m + i / m, block % (columns / m) * m + i % m};
}

// On a CPU one op goes over blocks of keys, so scores take no memory.
ggml_tensor *VisionTower::attend(const Graph &g, ggml_tensor *q, ggml_tensor *k, ggml_tensor *v,
                                 float scale) const {
    if (in_blocks()) {
        return attend_in_blocks(g, q, k, v, scale);
    }
    ggml_tensor *y = ggml_flash_attn_ext(g.context.get(), q, k, v, nullptr, scale, 0, 0);
    return ggml_reshape_2d(g.context.get(), y, shape_.D, q->ne[1]);
}

// On a GPU ggml's FLASH_ATTN_EXT adds up in F16, whose sums over thousands of keys stand still; so blocks of queries are
// multiplied with all keys, and scores are F32.
ggml_tensor *VisionTower::attend_in_blocks(const Graph &g, ggml_tensor *q, ggml_tensor *k, ggml_tensor *v,
                                           float scale) const {
    ggml_context *c = g.context.get();
    const int64_t D = shape_.D, H = shape_.H, d = D / H, n = q->ne[1], block = block_rows(n);
    v = ggml_cont(c, ggml_permute(c, v, 1, 0, 2, 3)); // {n, d, H}
    for (int64_t first = 0; first < n; first += block) {
        const int64_t some = std::min(block, n - first);
        ggml_tensor *queries = ggml_view_3d(c, q, d, some, H, q->nb[1], q->nb[2], size_t(first) * q->nb[1]);
        ggml_tensor *scores = ggml_mul_mat(c, k, queries); // {n, some, H}
        scores = ggml_soft_max_ext_inplace(c, scores, nullptr, scale, 0);
        ggml_tensor *y = ggml_permute(c, ggml_mul_mat(c, v, scores), 0, 2, 1, 3); // {d, H, some}
        if (g.attended == nullptr) {
            return ggml_cont_2d(c, y, D, n);
        }
        ggml_tensor *place =
            ggml_view_2d(c, g.attended, D, some, g.attended->nb[1], size_t(first) * g.attended->nb[1]);
        ggml_build_forward_expand(g.nodes, ggml_cpy(c, y, place)); // what reads `attended` comes later
    }
    return g.attended;
}

// ---- encoding ----

void VisionTower::encode(const float *patches, uint32_t rows, uint32_t columns, int n_threads,
                         const std::function<bool(float)> &go_on, float *out) const {
    const uint32_t n_rows = rows * columns / (shape_.merge * shape_.merge);
    if (n_rows > max_rows_) {
        fail(LUCE_E_ARG,
             "an image of %u tokens: %s has room for images of up to %u (an image of %u needs %s)", n_rows,
             device_.name.c_str(), max_rows_, n_rows, human_bytes(encode_bytes(rows, columns)).c_str());
    }
    const Graph g = build(rows, columns);
    std::unique_lock<std::mutex> alone(encoding_, std::defer_lock);
    GraphAllocator own;
    if (device_.gpu) {
        alone.lock();
        check_works(device_);
    } else {
        check_memory(device_, encode_bytes(rows, columns), "encoding an image");
        own = new_graph_allocator(device_);
    }
    if (!ggml_gallocr_alloc_graph((device_.gpu ? allocator_ : own).get(), g.nodes)) {
        if (device_.gpu) { // what failed to grow has no buffer any more, and would be taken for one that fits
            allocator_ = new_graph_allocator(device_);
        }
        fail(LUCE_E_MEMORY, "%s: allocating %s for an image failed", device_.name.c_str(),
             human_bytes(encode_bytes(rows, columns)).c_str());
    }
    write_inputs(g, patches, rows, columns);
    device_.gpu ? run_on_gpu(g, go_on) : run_on_cpu(g, n_threads, go_on);
    const size_t n = size_t(ggml_nelements(g.rows));
    ggml_backend_tensor_get(g.rows, out, 0, n * sizeof(float));
    if (!std::all_of(out, out + n, [](float v) { return std::isfinite(v); })) {
        fail(LUCE_E_NUMERIC, "%s: a row of an image is not finite", file_->path().c_str());
    }
}

[[noreturn]] static void fail_cancelled() {
    fail(LUCE_E_CANCELLED, "encoding an image was cancelled");
}

void VisionTower::run_on_cpu(const Graph &g, int n_threads, const std::function<bool(float)> &go_on) const {
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
        fail_cancelled();
    }
    if (status != GGML_STATUS_SUCCESS) {
        fail(LUCE_E_DEVICE, "cpu: encoding an image failed");
    }
}

// It is asked between parts of the graph, each of which the host waits for.
void VisionTower::run_on_gpu(const Graph &g, const std::function<bool(float)> &go_on) const {
    constexpr int PARTS = 64;
    const int n = ggml_graph_n_nodes(g.nodes), step = (n + PARTS - 1) / PARTS;
    for (int first = 0; first < n; first += step) {
        if (!go_on(float(first) / float(n))) {
            fail_cancelled();
        }
        ggml_cgraph part = ggml_graph_view(g.nodes, first, std::min(n, first + step));
        if (ggml_backend_graph_compute(backend_.get(), &part) != GGML_STATUS_SUCCESS) {
            fail(LUCE_E_DEVICE, "%s: encoding an image failed", device_.name.c_str());
        }
    }
}

} // namespace luce
