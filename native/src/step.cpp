#include "step.h"

#include "custom_op.h"

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-impl.h> // ggml_graph_view

#include <algorithm>
#include <cstring>

#ifdef LUCE_USE_CUDA
extern "C" void *luce_cuda_stream(ggml_backend_t backend); // cuda_stream.cu
#endif

namespace luce {
namespace {

constexpr ggml_fp16_t MASK_VISIBLE = 0x0000, MASK_HIDDEN = 0xfc00; // 0, -inf

size_t pad(size_t n) {
    return (n + 255) / 256 * 256;
}

ggml_tensor *placed(ggml_context *ctx, ggml_type type, int64_t ne0, int64_t ne1, ggml_backend_buffer_t buffer,
                    size_t offset) {
    ggml_tensor *t = ggml_new_tensor_2d(ctx, type, ne0, ne1);
    if (buffer == nullptr) {
        t->data = reinterpret_cast<void *>(uintptr_t(256)); // measuring: not the allocator's business
    } else {
        ggml_backend_tensor_alloc(buffer, t,
                                  static_cast<uint8_t *>(ggml_backend_buffer_get_base(buffer)) + offset);
    }
    return t;
}

} // namespace

uint32_t row_bucket(uint32_t rows, uint32_t n_rows) {
    static const uint32_t list[] = {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64};
    return std::min(*std::lower_bound(std::begin(list), std::end(list), rows), n_rows);
}

// Multiples of 256, from 1024 on of a quarter of the power of two below: at most 25% more than needed.
uint32_t kv_bucket(uint32_t n, uint32_t n_cells) {
    uint32_t unit = 256;
    while (unit * 8 <= n) {
        unit *= 2;
    }
    return std::min((n + unit - 1) / unit * unit, n_cells);
}

// The inputs of all steps share one region: fixed places for what is small, the mask at the end, so that a
// step's inputs are one copy to the device.
struct Step::Inputs {
    uint32_t max_rows;
    size_t ctl = 0, path, tokens, positions, cells, mask, size;
    Buffer device;  // the region the graphs read
    Buffer pinned;  // its host mirror on a GPU; on the CPU the region itself is written
    uint8_t *host = nullptr;
    Context context; // of the tensor that stands for the whole region in copies
    ggml_tensor *whole = nullptr;

    Inputs(const Cache &cache, const SessionParams &p) : max_rows(std::max(p.n_chunk, p.n_rows)) {
        path = pad(CTL_SIZE * sizeof(int32_t));
        tokens = path + pad((2 + MAX_ROWS) * sizeof(int32_t));
        positions = tokens + pad(max_rows * sizeof(int32_t));
        cells = positions + pad(max_rows * sizeof(int32_t));
        mask = cells + pad(max_rows * sizeof(int64_t));
        size = mask + pad(size_t(max_rows) * cache.n_cells() * sizeof(ggml_fp16_t));
    }

    void allocate(const Device &dev) {
        device = luce::allocate(dev, size, "a step's inputs");
        ggml_backend_buffer_clear(device.get(), 0);
        host = static_cast<uint8_t *>(ggml_backend_buffer_get_base(device.get()));
        if (dev.gpu) {
            ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(dev.dev);
            pinned.reset(ggml_backend_buft_alloc_buffer(type ? type : ggml_backend_cpu_buffer_type(), size));
            if (!pinned) {
                fail(LUCE_E_MEMORY, "allocating %s of pinned host memory failed", human_bytes(size).c_str());
            }
            host = static_cast<uint8_t *>(ggml_backend_buffer_get_base(pinned.get()));
            memset(host, 0, size);
        }
        const ggml_init_params params = {ggml_tensor_overhead() * 2, nullptr, /*no_alloc=*/true};
        context.reset(ggml_init(params));
        whole = placed(context.get(), GGML_TYPE_I8, int64_t(size), 1, device.get(), 0);
    }

    template <typename T> T *at(size_t offset) { return reinterpret_cast<T *>(host + offset); }

    StepInputs tensors(ggml_context *ctx, uint32_t rows, uint32_t n_kv) const {
        ggml_backend_buffer_t b = device.get();
        return {
            placed(ctx, GGML_TYPE_I32, rows, 1, b, tokens), placed(ctx, GGML_TYPE_I32, rows, 1, b, positions),
            placed(ctx, GGML_TYPE_I64, rows, 1, b, cells), placed(ctx, GGML_TYPE_F16, n_kv, rows, b, mask),
            placed(ctx, GGML_TYPE_I32, CTL_SIZE, 1, b, ctl)};
    }
};

// A built step. `outputs` and the nodes point into `context`; their data into the shared compute buffer.
struct Step::Graph {
    Context context;
    ggml_cgraph *nodes = nullptr;
    StepOutputs outputs;
    StepKind kind;
    uint32_t rows, n_kv;
    uint32_t runs = 0;
    void *captured = nullptr;

    ~Graph() {
#ifdef LUCE_USE_CUDA
        cuda::capture_free(captured);
#endif
    }

    static std::unique_ptr<Graph> build(const Model &model, const Cache &cache, const Inputs &inputs,
                                        StepKind kind, uint32_t rows, uint32_t n_kv) {
        auto g = std::make_unique<Graph>();
        g->kind = kind;
        g->rows = rows;
        g->n_kv = n_kv;
        const size_t n_nodes = 48 * model.hparams().n_layer + 64;
        const ggml_init_params params = {ggml_tensor_overhead() * n_nodes +
                                             ggml_graph_overhead_custom(n_nodes, false),
                                         nullptr, /*no_alloc=*/true};
        g->context.reset(ggml_init(params));
        ggml_context *ctx = g->context.get();
        g->nodes = ggml_new_graph_custom(ctx, n_nodes, false);
        if (kind == StepKind::kv_move) {
            ggml_tensor *path = placed(ctx, GGML_TYPE_I32, 2 + MAX_ROWS, 1, inputs.device.get(), inputs.path);
            for (uint32_t il = 0; il < model.hparams().n_layer; il++) {
                if (!model.hparams().recurrent[il]) {
                    const KvCells &kv = cache.kv(il);
                    ggml_build_forward_expand(
                        g->nodes, add_op(ctx, "kv_move", GGML_TYPE_I32, 1, 1, {kv.k, kv.v, path}));
                }
            }
            return g;
        }
        const Logits logits = kind == StepKind::verify         ? Logits::all
                              : kind == StepKind::prefill_last ? Logits::last
                                                               : Logits::none;
        g->outputs = build_qwen35(ctx, g->nodes, model, cache, inputs.tensors(ctx, rows, n_kv),
                                  kind == StepKind::verify ? DELTA_VERIFY : DELTA_APPEND, logits);
        return g;
    }
};

namespace {

// The steps that bound every buffer: the largest chunk and the widest verify over a full cache.
std::vector<std::pair<StepKind, uint32_t>> largest_steps(const SessionParams &p) {
    return {{StepKind::prefill_last, p.n_chunk}, {StepKind::verify, p.n_rows}};
}

// ggml aborts on an op that a device does not have: ask first.
void check_supported(const Device &device, ggml_cgraph *graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor *node = ggml_graph_node(graph, i);
        if (custom_op(node) == nullptr && !ggml_backend_dev_supports_op(device.dev, node)) {
            const ggml_tensor *a = node->src[0], *b = node->src[1];
            fail(LUCE_E_UNSUPPORTED, "%s has no %s of %s and %s", device.name.c_str(), ggml_op_desc(node),
                 a == nullptr ? "nothing" : type_name(a->type),
                 b == nullptr ? "nothing" : type_name(b->type));
        }
    }
}

} // namespace

StepSizes Step::measure(const Model &model, const Cache &cache, const SessionParams &params) {
    const Inputs inputs(cache, params);
    StepSizes sizes;
    sizes.inputs = inputs.size;
    ggml_gallocr_t galloc = ggml_gallocr_new(model.device().buffer_type());
    for (const auto &[kind, rows] : largest_steps(params)) {
        auto g = Graph::build(model, cache, inputs, kind, rows, cache.n_cells());
        check_supported(model.device(), g->nodes);
        size_t size = 0;
        ggml_gallocr_reserve_n_size(galloc, g->nodes, nullptr, nullptr, &size);
        sizes.compute = std::max<uint64_t>(sizes.compute, size);
    }
    ggml_gallocr_free(galloc);
    return sizes;
}

Step::Step(const Model &model, Cache &cache, const SessionParams &params)
    : model_(model), cache_(cache), params_(params),
      backend_(make_backend(model.device(), int(params.n_threads))),
      inputs_(std::make_unique<Inputs>(cache, params)),
      galloc_(ggml_gallocr_new(model.device().buffer_type()), ggml_gallocr_free) {
    inputs_->allocate(model.device());
    for (const auto &[kind, rows] : largest_steps(params)) {
        auto g = Graph::build(model, cache, *inputs_, kind, rows, cache.n_cells());
        if (!ggml_gallocr_reserve(galloc_.get(), g->nodes)) {
            fail(LUCE_E_MEMORY, "%s: allocating the compute buffer failed", model.device().name.c_str());
        }
    }
    compute_size_ = ggml_gallocr_get_buffer_size(galloc_.get(), 0);
    greedy_.reserve(LUCE_MAX_ROWS);
    if (model.device().gpu) {
        warm_up();
    }
}

Step::~Step() {
    graphs_.clear();
}

uint64_t Step::allocated() const {
    return compute_size_ + inputs_->size;
}

Step::Graph &Step::graph(StepKind kind, uint32_t rows, uint32_t n_kv) {
    // prompts have any length: their graphs are built for the occasion, in the same slot
    const bool prompt = kind == StepKind::prefill || kind == StepKind::prefill_last;
    const Key key = prompt ? Key(StepKind::prefill, 0, 0) : Key(kind, rows, n_kv);
    std::unique_ptr<Graph> &slot = graphs_[key];
    if (!slot || slot->kind != kind || slot->rows != rows || slot->n_kv != n_kv) {
        last_ = nullptr;
        slot = Graph::build(model_, cache_, *inputs_, kind, rows, n_kv);
        if (!ggml_gallocr_alloc_graph(galloc_.get(), slot->nodes) ||
            ggml_gallocr_get_buffer_size(galloc_.get(), 0) != compute_size_) {
            slot.reset();
            fail(LUCE_E_INTERNAL, "a step of %u rows over %u cells outgrew the compute buffer of %s", rows,
                 n_kv, human_bytes(compute_size_).c_str());
        }
    }
    return *slot;
}

void Step::enqueue_cuda(Graph &g, void *stream) {
    const int n = ggml_graph_n_nodes(g.nodes);
    for (int first = 0, i = 0; i <= n; i++) {
        const CustomOp *op = i < n ? custom_op(ggml_graph_node(g.nodes, i)) : nullptr;
        if (i < n && op == nullptr) {
            continue;
        }
        if (i > first) {
            ggml_cgraph segment = ggml_graph_view(g.nodes, first, i);
            if (ggml_backend_graph_compute_async(backend_.get(), &segment) != GGML_STATUS_SUCCESS) {
                fail(LUCE_E_DEVICE, "%s: a step failed", model_.device().name.c_str());
            }
        }
#ifdef LUCE_USE_CUDA
        if (op != nullptr) {
            const int error = op->cuda(ggml_graph_node(g.nodes, i), stream);
            if (error != 0) {
                fail(LUCE_E_DEVICE, "%s: %s: %s", model_.device().name.c_str(), op->name,
                     cuda::error_text(error));
            }
        }
#else
        (void) stream;
#endif
        first = i + 1;
    }
}

void Step::enqueue(Graph &g) {
    const Device &device = model_.device();
    if (!device.gpu) {
        set_row_invariant(backend_.get(), device, g.kind == StepKind::verify);
        if (ggml_backend_graph_compute(backend_.get(), g.nodes) != GGML_STATUS_SUCCESS) {
            fail(LUCE_E_DEVICE, "cpu: a step failed");
        }
        return;
    }
#ifdef LUCE_USE_CUDA
    void *stream = luce_cuda_stream(backend_.get());
    const size_t used = inputs_->mask + size_t(g.rows) * g.n_kv * sizeof(ggml_fp16_t);
    ggml_backend_tensor_set_async(backend_.get(), inputs_->whole, inputs_->host, 0, used);
    // ggml's pools grow in a graph's first run, which must therefore be eager
    if (g.captured == nullptr && g.kind == StepKind::verify && g.runs > 0) {
        int error = cuda::capture_begin(stream);
        if (error == 0) {
            enqueue_cuda(g, stream);
            error = cuda::capture_end(stream, &g.captured);
        }
        if (error != 0) {
            fail(LUCE_E_DEVICE, "%s: capturing a step failed: %s", device.name.c_str(),
                 cuda::error_text(error));
        }
    }
    if (g.captured == nullptr) {
        enqueue_cuda(g, stream);
    } else if (const int error = cuda::capture_launch(g.captured, stream); error != 0) {
        fail(LUCE_E_DEVICE, "%s: a step failed: %s", device.name.c_str(), cuda::error_text(error));
    }
#endif
}

void Step::compute(Graph &g) {
    last_ = nullptr;
    enqueue(g);
    g.runs++;
    last_ = &g;
}

void Step::read_greedy(Graph &g, uint32_t n) {
    greedy_.resize(n);
    ggml_backend_tensor_get_2d_async(backend_.get(), g.outputs.choice, greedy_.data(), 0, sizeof(Greedy), n,
                                     g.outputs.choice->nb[1], sizeof(Greedy));
    ggml_backend_synchronize(backend_.get());
}

void Step::prefill(const int32_t *tokens, uint32_t n, bool last) {
    const uint32_t past = cache_.n_past();
    Graph &g =
        graph(last ? StepKind::prefill_last : StepKind::prefill, n, kv_bucket(past + n, cache_.n_cells()));
    cache_.fill_ctl(inputs_->at<int32_t>(inputs_->ctl), nullptr, 0);
    for (uint32_t i = 0; i < n; i++) {
        inputs_->at<int32_t>(inputs_->tokens)[i] = tokens[i];
        inputs_->at<int32_t>(inputs_->positions)[i] = int32_t(past + i);
        inputs_->at<int64_t>(inputs_->cells)[i] = int64_t(past + i);
        ggml_fp16_t *row = inputs_->at<ggml_fp16_t>(inputs_->mask) + size_t(i) * g.n_kv;
        std::fill(row, row + past + i + 1, MASK_VISIBLE);
        std::fill(row + past + i + 1, row + g.n_kv, MASK_HIDDEN);
    }
    compute(g);
    if (last) {
        read_greedy(g, 1);
    } else {
        ggml_backend_synchronize(backend_.get()); // the host writes the next chunk's inputs in place
    }
}

void Step::verify(const int32_t *tokens, const int32_t *parents, uint32_t n) {
    const uint32_t past = cache_.n_past();
    const uint32_t rows = row_bucket(n, params_.n_rows);
    Graph &g = graph(StepKind::verify, rows, kv_bucket(past + rows, cache_.n_cells()));
    int32_t parent_of[LUCE_MAX_ROWS];
    int32_t *positions = inputs_->at<int32_t>(inputs_->positions);
    for (uint32_t i = 0; i < rows; i++) {
        const uint32_t same = std::min(i, n - 1); // rows that only fill the bucket repeat the last one
        parent_of[i] = parents[same];
        inputs_->at<int32_t>(inputs_->tokens)[i] = tokens[same];
        inputs_->at<int64_t>(inputs_->cells)[i] = int64_t(past + i);
        positions[i] = parents[same] < 0 ? int32_t(past) : positions[parents[same]] + 1;
        ggml_fp16_t *row = inputs_->at<ggml_fp16_t>(inputs_->mask) + size_t(i) * g.n_kv;
        std::fill(row, row + past, MASK_VISIBLE);
        std::fill(row + past, row + g.n_kv, MASK_HIDDEN);
        for (int32_t seen = int32_t(i); seen >= 0; seen = parent_of[seen]) {
            row[past + uint32_t(seen)] = MASK_VISIBLE;
        }
    }
    cache_.fill_ctl(inputs_->at<int32_t>(inputs_->ctl), parent_of, rows);
    compute(g);
    read_greedy(g, n);
}

void Step::kv_move(const int32_t *path, uint32_t n) {
    int32_t *block = inputs_->at<int32_t>(inputs_->path);
    block[0] = int32_t(cache_.n_past());
    block[1] = int32_t(n);
    std::copy(path, path + n, block + 2);
    Graph *results = last_; // moving cells leaves the logits of the last verify readable
    compute(graph(StepKind::kv_move, 0, 0));
    ggml_backend_synchronize(backend_.get());
    last_ = results;
}

void Step::read_logits(uint32_t row, float *out) {
    if (last_ == nullptr || last_->outputs.logits == nullptr || row >= greedy_.size()) {
        fail(LUCE_E_STATE, "row %u has no logits: the last step had %zu rows", row,
             last_ ? greedy_.size() : 0);
    }
    const ggml_tensor *logits = last_->outputs.logits;
    ggml_backend_tensor_get(logits, out, row * logits->nb[1], logits->nb[1]);
}

void Step::warm_up() {
    const std::vector<int32_t> tokens(params_.n_chunk, 0);
    for (const auto &[kind, rows] : largest_steps(params_)) {
        Graph &g = graph(kind, rows, cache_.n_cells());
        memset(inputs_->host, 0, inputs_->mask + size_t(rows) * g.n_kv * sizeof(ggml_fp16_t));
        int32_t *parents = inputs_->at<int32_t>(inputs_->ctl) + CTL_PARENT;
        for (uint32_t i = 0; i < rows; i++) {
            inputs_->at<int64_t>(inputs_->cells)[i] = int64_t(i);
            if (kind == StepKind::verify) {
                parents[i] = int32_t(i) - 1;
            }
        }
        compute(g);
        ggml_backend_synchronize(backend_.get());
    }
    last_ = nullptr;
    cache_.clear();
}

} // namespace luce
