#include "step.h"

#include "custom_op.h"
#include "step_graph.h"

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

// Cells [from, to) visible, the others hidden.
void fill_mask(ggml_fp16_t *row, uint32_t n_kv, uint32_t from, uint32_t to) {
    std::fill(row, row + from, MASK_HIDDEN);
    std::fill(row + from, row + to, MASK_VISIBLE);
    std::fill(row + to, row + n_kv, MASK_HIDDEN);
}

} // namespace

Step::Step(const Model &model, Cache &cache, const SessionParams &params)
    : model_(model), cache_(cache), params_(params),
      backend_(make_backend(model.device(), int(params.n_threads))), in_(cache, params),
      head_in_(cache, params), galloc_(ggml_gallocr_new(model.device().buffer_type()), ggml_gallocr_free) {
    in_.allocate(model.device(), in_.end);
    if (cache.has_head()) {
        head_in_.allocate(model.device(), head_in_.end);
    }
    for (const StepShape &shape : largest_steps(cache, params)) {
        auto g = Graph::build(model, cache, in_, head_in_, shape);
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

Step::~Step() = default;

uint64_t Step::allocated() const {
    return compute_size_ + in_.size() + head_in_.size();
}

Step::Graph &Step::graph(const StepShape &shape) {
    // prompts have any length: their graphs are built for the occasion, in the same slot
    std::unique_ptr<Graph> &slot = graphs_[shape.prompt() ? StepShape{StepKind::prefill, 0, 0, 0} : shape];
    if (!slot || shape < slot->shape || slot->shape < shape) {
        last_ = slot.get() == last_ ? nullptr : last_;
        slot = Graph::build(model_, cache_, in_, head_in_, shape);
        if (!ggml_gallocr_alloc_graph(galloc_.get(), slot->nodes) ||
            ggml_gallocr_get_buffer_size(galloc_.get(), 0) != compute_size_) {
            slot.reset();
            fail(LUCE_E_INTERNAL, "a step of %u rows over %u cells outgrew the compute buffer of %s",
                 shape.rows, shape.n_kv, human_bytes(compute_size_).c_str());
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

void Step::send_inputs(const Graph &g, bool drafted_tokens) {
    if (g.shape.kind == StepKind::draft || g.shape.kind == StepKind::catch_up) {
        head_in_.send(backend_.get(), head_in_.tokens, head_in_.used(g.shape.n_drafts, g.shape.n_kv));
    } else {
        in_.send(backend_.get(), drafted_tokens ? in_.ctl : in_.tokens, in_.used(g.shape.rows, g.shape.n_kv));
    }
}

// Runs a step: on the CPU until it is done, on a GPU until it is enqueued.
void Step::compute(Graph &g, [[maybe_unused]] bool drafted_tokens) {
    const Device &device = model_.device();
    last_ = g.shape.kind == StepKind::kv_move ? last_ : nullptr; // moving cells leaves logits as they are
    if (!device.gpu) {
        set_row_invariant(backend_.get(), device, !g.shape.prompt());
        if (ggml_backend_graph_compute(backend_.get(), g.nodes) != GGML_STATUS_SUCCESS) {
            fail(LUCE_E_DEVICE, "cpu: a step failed");
        }
    }
#ifdef LUCE_USE_CUDA
    if (device.gpu) {
        void *stream = luce_cuda_stream(backend_.get());
        send_inputs(g, drafted_tokens);
        // ggml's pools grow in a graph's first run, which must therefore be eager
        if (g.captured == nullptr && !g.shape.prompt() && g.runs > 0) {
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
    }
#endif
    g.runs++;
    last_ = g.outputs.logits != nullptr ? &g : last_;
}

uint32_t Step::prefill(const int32_t *tokens, uint32_t n, bool last) {
    const uint32_t past = cache_.n_past();
    if (cache_.has_head()) {
        catch_up(); // the chunk's first head row needs one hidden state, and no other is owed
        cache_.place_hidden(1);
        in_.host<int32_t>(in_.hidden_at)[0] = cache_.owed().empty() ? 0 : cache_.owed().back();
        in_.host<int64_t>(in_.hidden_to)[0] = cache_.hidden_base();
    }
    Graph &g = graph(
        {last ? StepKind::prefill_last : StepKind::prefill, n, kv_bucket(past + n, cache_.n_cells()), 0});
    cache_.fill_ctl(in_.host<int32_t>(in_.ctl), nullptr, 0);
    for (uint32_t i = 0; i < n; i++) {
        in_.host<int32_t>(in_.tokens)[i] = tokens[i];
        in_.host<int32_t>(in_.positions)[i] = int32_t(past + i);
        in_.host<int64_t>(in_.cells)[i] = int64_t(past + i);
        fill_mask(in_.host<ggml_fp16_t>(in_.mask) + size_t(i) * g.shape.n_kv, g.shape.n_kv, 0, past + i + 1);
    }
    compute(g);
    if (last) {
        greedy_.resize(1);
        ggml_backend_tensor_get_async(backend_.get(), g.outputs.choice, greedy_.data(), 0, sizeof(Greedy));
    }
    ggml_backend_synchronize(backend_.get()); // the host writes the next chunk's inputs in place
    return cache_.hidden_base();
}

void Step::verify(const int32_t *tokens, const int32_t *parents, uint32_t n) {
    const uint32_t past = cache_.n_past();
    const uint32_t rows = row_bucket(n, params_.n_rows);
    if (cache_.has_head() && !cache_.place_hidden(rows)) {
        catch_up();
        cache_.place_hidden(rows);
    }
    Graph &g = graph({StepKind::verify, rows, kv_bucket(past + rows, cache_.n_cells()), 0});
    int32_t parent_of[LUCE_MAX_ROWS];
    int32_t *positions = in_.host<int32_t>(in_.positions);
    for (uint32_t i = 0; i < rows; i++) {
        // rows that only fill the bucket follow the last one, so that a chain stays a chain
        parent_of[i] = i < n ? parents[i] : int32_t(i) - 1;
        if (tokens != nullptr) {
            in_.host<int32_t>(in_.tokens)[i] = tokens[std::min(i, n - 1)];
        }
        in_.host<int64_t>(in_.cells)[i] = int64_t(past + i);
        in_.host<int64_t>(in_.hidden_to)[i] = int64_t(cache_.hidden_base() + i);
        positions[i] = parent_of[i] < 0 ? int32_t(past) : positions[parent_of[i]] + 1;
        ggml_fp16_t *row = in_.host<ggml_fp16_t>(in_.mask) + size_t(i) * g.shape.n_kv;
        fill_mask(row, g.shape.n_kv, 0, past);
        for (int32_t seen = int32_t(i); seen >= 0; seen = parent_of[seen]) {
            row[past + uint32_t(seen)] = MASK_VISIBLE;
        }
    }
    cache_.fill_ctl(in_.host<int32_t>(in_.ctl), parent_of, rows);
    compute(g, tokens == nullptr);
    greedy_.resize(n);
    ggml_backend_tensor_get_2d_async(backend_.get(), g.outputs.choice, greedy_.data(), 0, sizeof(Greedy), n,
                                     g.outputs.choice->nb[1], sizeof(Greedy));
    if (!drafts_fetched_) {
        drafts();
    }
    ggml_backend_synchronize(backend_.get());
}

// The inputs of head rows: k owed ones with these tokens, then n - 1 chained ones; position p in cell p, which
// sees cells 1 .. p.
void Step::head_rows(const std::vector<int32_t> &row_tokens, uint32_t k, uint32_t n) {
    const uint32_t first = cache_.n_past() - uint32_t(cache_.owed().size()) + 1;
    const uint32_t known = uint32_t(row_tokens.size()), total = n == 0 ? k : k + n - 1;
    for (uint32_t i = 0; i < total; i++) {
        const uint32_t same =
            i < k ? std::min(i, known - 1) : i; // rows that fill the bucket repeat the last one
        if (i < k) {
            head_in_.host<int32_t>(head_in_.tokens)[i] = row_tokens[same];
            head_in_.host<int32_t>(head_in_.hidden_at)[i] = cache_.owed()[same];
        }
        head_in_.host<int32_t>(head_in_.positions)[i] = int32_t(first + same);
        head_in_.host<int64_t>(head_in_.cells)[i] = int64_t(first + same);
    }
}

void Step::catch_up() {
    while (cache_.has_head() && cache_.owed().size() > 1) {
        const uint32_t n = std::min(uint32_t(cache_.owed().size()) - 1, uint32_t(MAX_ROWS));
        const uint32_t first = cache_.n_past() - uint32_t(cache_.owed().size()) + 1;
        Graph &g = graph({StepKind::catch_up, row_bucket(n, MAX_ROWS), cache_.n_cells(), 0});
        const auto begin = cache_.tokens().begin() + first;
        ggml_backend_synchronize(backend_.get()); // a draft may still read the region
        head_rows({begin, begin + n}, g.shape.rows, 0);
        compute(g);
        cache_.paid(n);
    }
}

void Step::draft(int32_t anchor, uint32_t n) {
    if (cache_.owed().size() > params_.n_draft + 1) {
        catch_up();
    }
    const uint32_t past = cache_.n_past(), k = uint32_t(cache_.owed().size());
    Graph &g = graph({StepKind::draft, k, kv_bucket(past + n, cache_.n_cells()), n});
    std::vector<int32_t> tokens(cache_.tokens().end() - (k - 1), cache_.tokens().end());
    tokens.push_back(anchor);
    ggml_backend_synchronize(backend_.get()); // a catch-up may still read the region
    head_rows(tokens, k, n);
    for (uint32_t i = 0; i < n; i++) {
        fill_mask(head_in_.host<ggml_fp16_t>(head_in_.mask) + size_t(i) * g.shape.n_kv, g.shape.n_kv, 1,
                  past + i + 1);
    }
    compute(g);
    cache_.paid(k - 1);
    cache_.drafted(anchor);
    drafts_.resize(n);
    drafts_fetched_ = false;
}

const std::vector<Step::Greedy> &Step::drafts() {
    if (!drafts_fetched_) {
        head_in_.fetch(backend_.get(), head_in_.drafts, drafts_.data(), drafts_.size() * sizeof(Greedy));
        ggml_backend_synchronize(backend_.get());
        drafts_fetched_ = true;
    }
    return drafts_;
}

void Step::kv_move(const int32_t *path, uint32_t n) {
    int32_t *block = in_.host<int32_t>(in_.path);
    block[0] = int32_t(cache_.n_past());
    block[1] = int32_t(n);
    std::copy(path, path + n, block + 2);
    compute(graph({StepKind::kv_move, 0, 0, 0}));
    ggml_backend_synchronize(backend_.get());
}

void Step::flush() {
    if (cache_.has_pending()) {
        cache_.fill_ctl(in_.host<int32_t>(in_.ctl), nullptr, 0);
        compute(graph({StepKind::flush, 0, 0, 0}));
        ggml_backend_synchronize(backend_.get());
        cache_.flushed();
    }
}

void Step::read_logits(uint32_t row, float *out) {
    if (last_ == nullptr || row >= greedy_.size()) {
        fail(LUCE_E_STATE, "row %u has no logits: the last step had %zu rows", row,
             last_ ? greedy_.size() : 0);
    }
    const ggml_tensor *logits = last_->outputs.logits;
    read(logits, out, row * logits->nb[1], logits->nb[1]);
}

void Step::read(const ggml_tensor *tensor, void *data, size_t offset, size_t size) {
    ggml_backend_synchronize(backend_.get());
    ggml_backend_tensor_get(tensor, data, offset, size);
}

void Step::write(ggml_tensor *tensor, const void *data, size_t offset, size_t size) {
    ggml_backend_synchronize(backend_.get());
    ggml_backend_tensor_set(tensor, data, offset, size);
}

void Step::warm_up() {
    for (const StepShape &shape : largest_steps(cache_, params_)) {
        Graph &g = graph(shape);
        memset(in_.host<uint8_t>(0), 0, in_.size());
        int32_t *parents = in_.host<int32_t>(in_.ctl) + CTL_PARENT;
        for (int32_t i = 0; i < MAX_ROWS; i++) {
            parents[i] = i - 1;
        }
        compute(g); // every row writes cell 0
        ggml_backend_synchronize(backend_.get());
    }
    last_ = nullptr;
    cache_.clear();
}

} // namespace luce
