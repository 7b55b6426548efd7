#include "step/shapes.h"

#include "graph/architecture.h"
#include "graph/drafter.h"
#include "ops/attention.h"
#include "ops/matmul.h"
#include "ops/row.h"
#include "step/faults.h"
#include "step/reserve.h"

#include <ggml-alloc.h>
#include <ggml-cpu.h>
#include <ggml-impl.h> // it says what a graph is

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

namespace luce {

static const uint32_t WIDTHS[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 20, 24, 32, 40, 48, 64};

uint32_t row_bucket(uint32_t rows, uint32_t max_rows) {
    return std::min(*std::lower_bound(std::begin(WIDTHS), std::end(WIDTHS), rows), max_rows);
}

// Rounds up to a multiple of 256, and from 1024 on to one of a quarter of the power of two below. So at most
// 25% more than needed is taken.
uint32_t kv_bucket(uint32_t n) {
    uint32_t unit = 256;
    while (unit * 8 <= n) {
        unit *= 2;
    }
    return (n + unit - 1) / unit * unit;
}

// Feeds are short and seldom, so powers of two are enough.
static uint32_t feed_bucket(uint32_t rows, uint32_t most) {
    uint32_t width = 1;
    while (width < rows) {
        width *= 2;
    }
    return std::min(width, most);
}

static uint32_t most_rows(const CacheParams &p) {
    return std::min(uint32_t(MAX_ROWS), p.n_rows * p.n_sequences);
}

StepShape prompts_shape(StepKind kind, const std::vector<PromptRows> &prompts) {
    StepShape shape{kind, 0, 0};
    for (const PromptRows &prompt : prompts) {
        shape.rows += prompt.rows;
        shape.n_kv += prompt.n_kv;
    }
    shape.prompts = prompts.size() > 1 ? prompts : std::vector<PromptRows>();
    return shape;
}

// There is room for as many short prompts as there may be, however short the context.
PromptLimits prompt_limits(const CacheParams &p, StepKind kind) {
    const uint32_t prompts = std::min(uint32_t(MAX_PROMPTS), p.n_sequences),
                   rows = std::min(p.n_chunk, p.n_ctx);
    return {prompts, kind == StepKind::prefill_tail ? std::min(rows, TAIL - 1) : rows,
            std::max(kv_bucket(p.n_ctx), prompts * PAGE)};
}

uint32_t drafted_at_once(const CacheParams &p, const DrafterUse &use) {
    return std::min(uint32_t(MAX_ROWS) / std::max(use.n_block, 1u), p.n_sequences);
}

// The most rows of one step of a drafter, and the most steps that a draft of all sequences takes.
static uint32_t rows_of_draft(const CacheParams &p, const DrafterUse &use) {
    return drafted_at_once(p, use) * std::max(use.n_block, 1u);
}

static uint32_t steps_of_draft(const CacheParams &p, const DrafterUse &use) {
    return use.n_block == 0 ? use.n_draft : (p.n_sequences - 1) / drafted_at_once(p, use) + 1;
}

static uint32_t most_of_draft(const CacheParams &p, uint32_t (*of)(const CacheParams &, const DrafterUse &)) {
    uint32_t most = 1;
    for (const DrafterUse &use : p.drafters) {
        most = std::max(most, of(p, use));
    }
    return most;
}

std::vector<StepShape> step_shapes(const Cache &cache) {
    const CacheParams &p = cache.params();
    std::vector<StepShape> shapes;
    const auto add = [&](StepKind kind, uint32_t most, uint32_t drafter) {
        for (uint32_t rows = 1; rows <= most; rows++) {
            if (row_bucket(rows, most) == rows) {
                shapes.push_back({kind, rows, 0, false, drafter});
            }
        }
    };
    add(StepKind::verify, most_rows(p), 0);
    for (uint32_t i = 0; i < p.drafters.size(); i++) {
        const uint32_t n_block = p.drafters[i].n_block;
        if (n_block == 0) {
            add(StepKind::draft, p.n_sequences, i);
        }
        for (uint32_t n = 1; n_block > 0 && n <= drafted_at_once(p, p.drafters[i]); n++) {
            shapes.push_back({StepKind::draft, n * n_block, 0, false, i});
        }
    }
    for (uint32_t rows = 1; cache.lagging() != 0 && rows <= p.n_rows; rows++) {
        if (feed_bucket(rows, p.n_rows) == rows) {
            shapes.push_back({StepKind::feed, rows, 0});
        }
    }
    return shapes;
}

std::vector<StepShape> largest_steps(const CacheParams &p) {
    std::vector<StepShape> shapes = {
        {StepKind::prefill_last, std::min(p.n_chunk, p.n_ctx), kv_bucket(p.n_ctx)},
        {StepKind::verify, most_rows(p), 0}};
    for (uint32_t i = 0; i < p.drafters.size(); i++) {
        shapes.push_back({StepKind::draft, rows_of_draft(p, p.drafters[i]), 0, false, i});
    }
    return shapes;
}

// Returns n prompts that have so many rows in all, over about so many cells.
static std::vector<PromptRows> alike(uint32_t n, uint32_t rows, uint32_t n_kv) {
    std::vector<PromptRows> prompts(n, {rows / n, std::max(n_kv / n / PAGE, 1u) * PAGE});
    prompts[0].rows += rows % n;
    return prompts;
}

// What the allocator takes does not grow evenly with a prefill's rows and cells: a mixture's of 484 rows over 1792 cells
// took 11% more than one of 560 rows over 2304. So every bucket of cells is sized.
std::vector<StepShape> sizing_steps(const CacheParams &p) {
    std::vector<StepShape> shapes = largest_steps(p);
    const StepShape largest = shapes[0];
    const uint32_t n = largest.rows;
    shapes[0].rows += n / 8 + 16;
    shapes[0].n_kv += PAGE;
    shapes.push_back({StepKind::prefill, shapes[0].rows, shapes[0].n_kv}); // its outputs are others
    const uint32_t tail = std::min(n, TAIL - 1);
    shapes.push_back({StepKind::prefill_tail, tail, kv_bucket(tail)});
    for (uint32_t n_kv = kv_bucket(n); n_kv <= largest.n_kv; n_kv = kv_bucket(n_kv + 1)) {
        shapes.push_back({StepKind::prefill, shapes[0].rows, n_kv});
        shapes.push_back({StepKind::prefill_last, n, n_kv});
        shapes.push_back({StepKind::prefill_tail, tail, n_kv});
    }
    const PromptLimits most = prompt_limits(p, StepKind::prefill);
    for (const uint32_t n_kv : {kv_bucket(n), most.n_kv}) {
        for (const uint32_t prompts : {2u, most.prompts}) {
            for (const StepKind kind : {StepKind::prefill, StepKind::prefill_last, StepKind::prefill_tail}) {
                const uint32_t rows = kind == StepKind::prefill_tail ? tail : shapes[0].rows;
                if (prompts <= std::min(most.prompts, rows)) {
                    shapes.push_back(prompts_shape(kind, alike(prompts, rows, n_kv)));
                }
            }
        }
    }
    return shapes;
}

uint32_t Step::verify_width(uint32_t rows) const {
    return row_bucket(std::max(rows, 1u), most_rows(params_.cache));
}

uint32_t Step::draft_width(uint32_t sequences) const {
    return row_bucket(sequences, params_.cache.n_sequences);
}

uint32_t Step::feed_width(uint32_t rows) const {
    return feed_bucket(rows, params_.cache.n_rows);
}

// Steps behind images or gaps want positions of RoPE, and prompts with images all axes.
static Images images_of(const Cache &cache, bool prompts) {
    const Images steps = cache.takes_images() || cache.params().gaps ? Images::positions : Images::none;
    return prompts && cache.takes_images() ? Images::rows : steps;
}

uint32_t chunks_under_way(const Cache &cache) {
    const uint32_t n = uint32_t(cache.stages().size());
    return n > 1 || cache.stages()[0].runs_beside() ? n + 1 : 1;
}

Regions::Regions(const Cache &cache, const EngineParams &p)
    : prefill(std::min(p.cache.n_chunk, p.cache.n_ctx),
              prompt_limits(p.cache, StepKind::prefill).prompts * cache.max_pages(), chunks_under_way(cache),
              cache.has_windows(), images_of(cache, true)),
      verify(most_rows(p.cache), p.cache.n_sequences * cache.max_pages(), MAX_ENQUEUED, cache.has_windows(),
             images_of(cache, false)),
      draft(most_of_draft(p.cache, rows_of_draft), p.cache.n_sequences * cache.max_pages(),
            most_of_draft(p.cache, steps_of_draft), cache.has_windows(), images_of(cache, false)),
      feed(p.cache.n_rows, cache.max_pages(), p.cache.n_sequences, cache.has_windows(),
           images_of(cache, false)) {}

uint64_t Regions::size(const Cache &cache) const {
    return prefill.size() + verify.size() + (cache.drafters().empty() ? 0 : draft.size()) +
           (cache.lagging() != 0 ? feed.size() : 0);
}

void Step::Graph::drop_capture() {
#ifdef LUCE_USE_CUDA
    for (void *piece : captured) {
        cuda::capture_free(piece);
    }
    captured.clear();
    on_host.clear();
    for (const auto &[links, chain] : chains) {
        cuda::capture_free(chain);
    }
    chains.clear();
#endif
}

void Step::Graph::move_inputs(ptrdiff_t bytes) {
    for (const StepInputs &in : inputs) {
        for (ggml_tensor *t : {in.tokens, in.positions, in.rope_positions, in.ctl, in.pages, in.window_pages,
                               in.hidden_from, in.hidden_to}) {
            if (t != nullptr) {
                t->data = static_cast<uint8_t *>(t->data) + bytes;
            }
        }
    }
}

std::vector<const ggml_tensor *> Step::Graph::arrivals(const StepOutputs::Run &run) const {
    std::vector<const ggml_tensor *> rows;
    for (int i = 0; i < run.n_arrivals; i++) {
        rows.push_back(ggml_graph_node(nodes, run.first + i));
    }
    return rows;
}

std::vector<int> Step::Graph::stages_of_nodes() const {
    std::vector<int> stages(size_t(ggml_graph_n_nodes(nodes)), 0);
    for (const StepOutputs::Run &run : outputs.runs) {
        std::fill(stages.begin() + run.first, stages.end(), int(run.stage));
    }
    return stages;
}

std::vector<int> Step::Graph::stages_of_leaves(const Cache &cache) const {
    return std::vector<int>(size_t(nodes->n_leafs), int(cache.stages().size()) - 1);
}

GraphAllocator step_allocator(const Cache &cache) {
    std::vector<const Device *> devices;
    std::vector<ggml_backend_buffer_type *> types;
    for (const Stage &stage : cache.stages()) {
        devices.push_back(&stage.device);
        types.push_back(stage.compute_type());
    }
    return new_graph_allocator(devices, std::move(types));
}

std::vector<uint64_t> compute_sizes(ggml_gallocr *galloc, const Cache &cache, const Step::Graph &graph) {
    std::vector<size_t> sizes(cache.stages().size(), 0);
    ggml_gallocr_reserve_n_size(galloc, graph.nodes, graph.stages_of_nodes().data(),
                                graph.stages_of_leaves(cache).data(), sizes.data());
    // Stages on one device share a buffer, which counts to the first of them.
    for (size_t i = 1; i < sizes.size(); i++) {
        const auto here = [&, i](const Stage &stage) {
            return stage.compute_type() == cache.stages()[i].compute_type();
        };
        const auto begin = cache.stages().begin();
        sizes[i] = std::any_of(begin, begin + long(i), here) ? 0 : sizes[i];
    }
    return {sizes.begin(), sizes.end()};
}

// Several prompts' attention takes so many nodes of each in a layer, where ggml computes it.
static size_t most_nodes(const Model &model, const Cache &cache, size_t n_prompts) {
    constexpr size_t PROMPT_NODES = 16;
    size_t n_layer = model.hparams().n_layer * model.n_ranks();
    const size_t more = n_prompts > 1 ? n_layer * n_prompts * PROMPT_NODES : 0;
    for (const Drafter *drafter : cache.drafters()) {
        n_layer += drafter->n_layer() + 1 + drafter->n_block / 4; // a draft of its own can take 16 nodes
    }
    return model.architecture().layer_nodes * (n_layer + 1) + 64 + more;
}

// A graph's nodes take so much of the host's memory.
static size_t node_bytes(size_t n_nodes) {
    return ggml_tensor_overhead() * n_nodes + ggml_graph_overhead_custom(n_nodes, false);
}

// Writes a step's plain graph and puts fused ops into it.
static std::unique_ptr<Plain> written(const Model &model, const Cache &cache, const StepShape &shape,
                                      const std::vector<PromptRows> &prompts) {
    auto plain = std::make_unique<Plain>(model, cache, shape.kind, shape.rows, shape.n_kv, shape.brief,
                                         shape.drafter, prompts, shape.images);
    if (shape.kind == StepKind::draft) {
        model.weights().drafters[plain->use().drafter]->draft(*plain);
    } else if (shape.kind == StepKind::feed) {
        feed_lagging(*plain);
    } else {
        model.architecture().build_step(*plain);
    }
    fuse(*plain);
    return plain;
}

std::unique_ptr<Step::Graph> Step::Graph::build(const Model &model, const Cache &cache, const Region &in,
                                                const StepShape &shape, PlainPrompts *kept) {
    if (fails_here(Fault::graph)) {
        throw std::bad_alloc();
    }
    auto g = std::make_unique<Graph>();
    g->shape = shape;
    const size_t n_nodes = most_nodes(model, cache, shape.prompts.size());
    g->context = new_context(node_bytes(n_nodes));
    ggml_context *ctx = g->context.get();
    g->nodes = ggml_new_graph_custom(ctx, n_nodes, false);
    for (uint32_t stage = 0; stage < cache.stages().size(); stage++) {
        g->inputs.push_back(in.tensors(ctx, shape.rows, stage));
    }
    std::vector<PromptRows> prompts = shape.prompts;
    if (shape.prefill() && prompts.empty()) {
        prompts = {{shape.rows, shape.n_kv}};
    }
    std::unique_ptr<Plain> occasional;
    const bool keeps = kept != nullptr && shape.prefill() && !shape.brief && shape.rows > prompts.size();
    std::unique_ptr<Plain> &plain = keeps ? (*kept)[{shape.kind, shape.images, rules_off()}] : occasional;
    if (plain == nullptr) {
        plain = written(model, cache, shape, prompts);
    } else {
        plain->resize(shape.rows, shape.n_kv, prompts);
    }
    g->outputs = lower(*plain, g->inputs, ctx, g->nodes);
    return g;
}

bool is_empty(const ggml_tensor *node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE ||
           node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

bool is_light(const ggml_tensor *node) {
    constexpr int64_t WORTH_SHARING = 1 << 13;
    int64_t values = 0;
    for (const ggml_tensor *source : node->src) {
        values += source == nullptr ? 0 : ggml_nelements(source);
    }
    return values < WORTH_SHARING;
}

void Step::Graph::log_ops(const CacheParams &params) const {
    static const char *const KINDS[] = {"prefill", "prefill", "prefill", "verify", "draft", "feed"};
    const char *kind = KINDS[int(shape.kind)];
    if (shape.kind == StepKind::draft) {
        const DrafterUse &use = params.drafters[shape.drafter];
        kind = use.n_block > 0 ? "block" : use.n_part > 0 ? "draft of a part" : kind;
    }
    std::map<std::string, int> ours, ggmls;
    for (int i = 0; i < ggml_graph_n_nodes(nodes); i++) {
        const ggml_tensor *node = ggml_graph_node(nodes, i);
        if (const CustomOp *op = custom_op(node); op != nullptr) {
            ours[op->name]++;
        } else if (!is_empty(node)) {
            ggmls[ggml_op_desc(node)]++;
        }
    }
    const auto listed = [](const std::map<std::string, int> &counts) {
        std::string text;
        for (const auto &[name, n] : counts) {
            text += (text.empty() ? "" : ", ") + name + " " + std::to_string(n);
        }
        return text;
    };
    log(0, "a %s of %u rows: %s, of ggml: %s", kind, shape.rows, listed(ours).c_str(), listed(ggmls).c_str());
}

// Asks first, since ggml aborts on an op that a device does not have.
static void check_supported(const Cache &cache, const Step::Graph &graph) {
    const std::vector<int> stages = graph.stages_of_nodes();
    for (int i = 0; i < ggml_graph_n_nodes(graph.nodes); i++) {
        const ggml_tensor *node = ggml_graph_node(graph.nodes, i);
        const Device &device = cache.stages()[size_t(stages[size_t(i)])].device;
        if (custom_op(node) == nullptr && !ggml_backend_dev_supports_op(device.dev, node)) {
            const ggml_tensor *a = node->src[0], *b = node->src[1];
            fail(LUCE_E_UNSUPPORTED, "%s has no %s of %s and %s", device.name.c_str(), ggml_op_desc(node),
                 a == nullptr ? "nothing" : type_name(a->type),
                 b == nullptr ? "nothing" : type_name(b->type));
        }
    }
}

// The stage where a leaf of a graph lies, or -1: memory of the host's, which all reach.
static int stage_of_leaf(const Model &model, const Cache &cache, const Step::Graph &graph,
                         const ggml_tensor *leaf) {
    for (size_t stage = 0; stage < cache.stages().size(); stage++) {
        const StepInputs &in = graph.inputs[stage];
        for (const ggml_tensor *input :
             {in.tokens, in.positions, in.rope_positions, in.axes, in.image_rows, in.row_ends, in.ctl,
              in.pages, in.window_pages, in.hidden_from, in.hidden_to, in.first_rows, in.last_rows}) {
            if (leaf == input) {
                return int(stage);
            }
        }
        if (cache.stages()[stage].has(leaf)) {
            return int(stage);
        }
    }
    return leaf == cache.given() || leaf == cache.lists() ? -1
           : model.has(leaf)                              ? int(stage_of(leaf))
                                                          : int(cache.stages().size()) - 1;
}

// Ranks' parts are read by each, on a GPU through their boxes.
static bool exchanges(const ggml_tensor *node) {
    const CustomOp *op = custom_op(node);
#ifdef LUCE_USE_CUDA
    return op == &ops::add_parts || op == &ops::gather_parts || op == &ops::exchange ||
           op == &ops::exchange_norm || op == &ops::gather;
#else
    return op == &ops::add_parts || op == &ops::gather_parts;
#endif
}

// What a node reads lies on its own stage's device, but for rows that arrive there, and on a CPU for cells. (Where GPUs would
// read each other's, the model was refused: check_joined in model/weights.cpp.)
static void check_stages(const Model &model, const Cache &cache, const Step::Graph &graph) {
    if (cache.stages().size() == 1) {
        return;
    }
    std::map<const ggml_tensor *, int> made; // by which stage
    const std::vector<int> stages = graph.stages_of_nodes();
    std::set<const ggml_tensor *> arrived;
    for (const StepOutputs::Run &run : graph.outputs.runs) {
        const std::vector<const ggml_tensor *> rows = graph.arrivals(run);
        arrived.insert(rows.begin(), rows.end());
    }
    for (int i = 0; i < ggml_graph_n_nodes(graph.nodes); i++) {
        const ggml_tensor *node = ggml_graph_node(graph.nodes, i);
        const int stage = stages[size_t(i)];
        made[node] = stage;
        if (arrived.count(node) != 0 || exchanges(node)) {
            continue;
        }
        for (const ggml_tensor *source : node->src) {
            const ggml_tensor *whole =
                source == nullptr || source->view_src == nullptr ? source : source->view_src;
            if (whole == nullptr) {
                continue;
            }
            const auto found = made.find(whole);
            const int lies = found != made.end() ? found->second : stage_of_leaf(model, cache, graph, whole);
            const bool cells = found == made.end() && !model.has(whole);
            if (lies >= 0 && lies != stage && (!cells || cache.stages()[0].device.gpu)) {
                fail(LUCE_E_INTERNAL, "%s of stage %d reads %s of stage %d", ggml_op_desc(node), stage,
                     whole->name, lies);
            }
        }
    }
}

// Each buffer grows to what the largest step of its stage takes.
void Step::reserve(const StepSizes &sizes) {
    for (const StepSizes::Compute &stage : sizes.compute) {
        const auto g = Graph::build(model_, cache_, in_.of(stage.largest.kind), stage.largest);
        if (!reserve(*g)) {
            fail(LUCE_E_MEMORY, "%s: allocating the compute buffer failed", model_.device_names().c_str());
        }
    }
    for (size_t stage = 0; stage < cache_.stages().size(); stage++) {
        compute_sizes_.push_back(ggml_gallocr_get_buffer_size(galloc_.get(), int(stage)));
    }
}

void Step::build_all() {
    for (const StepShape &shape : step_shapes(cache_)) {
        const Graph &step = graph(shape);
        if (is_logged()) {
            step.log_ops(params_.cache);
        }
    }
}

// Says whether ggml computes several rows in it, in an order that depends on how many they are. (On a CPU its attention has one
// order for ATTEND_ROWS and more.)
static bool depends_on_rows(const ggml_tensor *node) {
    return (node->op == GGML_OP_MUL_MAT && node->ne[1] > 1) || node->op == GGML_OP_MUL_MAT_ID;
}

static uint32_t cut_of(const Model &model, const CacheParams &params, const Step::Graph &prefill) {
    for (int i = 0; i < ggml_graph_n_nodes(prefill.nodes); i++) {
        if (depends_on_rows(ggml_graph_node(prefill.nodes, i))) {
            return params.n_chunk;
        }
    }
    return model.gpu() ? TAIL : ATTEND_ROWS;
}

// Returns prompts' steps whose attention takes its ranges apart (attention/prefill.h), of each bucket of cells and kind of layers
// those with most rows: they need memory that steps of more rows do without.
static std::vector<StepShape> steps_apart([[maybe_unused]] const Model &model,
                                          [[maybe_unused]] const Cache &cache) {
    std::vector<StepShape> shapes;
#ifdef LUCE_USE_CUDA
    std::map<std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, const Device *>, PrefillAttentionArgs> kinds;
    for (const Stage &stage : cache.stages()) {
        for (uint32_t il = stage.first; model.gpu() && il < stage.end; il++) {
            if (const Attention *attention = model.weights().blocks[il].attention(); attention != nullptr) {
                const AttentionShape &s = attention->shape;
                PrefillAttentionArgs &a = kinds[{s.n_head, s.n_head_kv, s.head_dim, s.window, &stage.device}];
                a.H = int32_t(s.n_head);
                a.Hkv = int32_t(s.n_head_kv);
                a.D = int32_t(s.head_dim);
                a.window = int32_t(s.window);
            }
        }
    }
    const CacheParams &p = cache.params();
    const uint32_t n = std::min(p.n_chunk, p.n_ctx);
    // Several prompts may have more cells than one, where the context is short.
    const uint32_t most_kv = kv_bucket(prompt_limits(p, StepKind::prefill).n_kv);
    for (uint32_t n_kv = kv_bucket(PREFILL_RANGE + 1); n_kv <= most_kv; n_kv = kv_bucket(n_kv + 1)) {
        for (const StepKind kind : {StepKind::prefill, StepKind::prefill_last, StepKind::prefill_tail}) {
            std::set<uint32_t> most; // rows, of each kind of layers
            for (auto &[of, a] : kinds) {
                const DeviceLimits limits = limits_of(*std::get<const Device *>(of));
                a.n_kv = n_kv;
                a.T = int32_t(kind == StepKind::prefill_tail ? std::min(n, TAIL - 1) : n);
                while (a.T > 0 && !prefill_apart(a, limits)) {
                    a.T--;
                }
                // Results of 512 rows may be of one size, and follow each other in memory where those of 511 do not.
                most.insert({uint32_t(a.T), uint32_t(std::max(a.T - 1, 0))});
            }
            for (const uint32_t rows : most) {
                if (rows > 0) {
                    shapes.push_back({kind, rows, n_kv});
                }
            }
        }
    }
#endif
    return shapes;
}

// Returns how many rows a tail has at most. Several devices have one answer, the longest of theirs.
static uint32_t most_of_tail([[maybe_unused]] const Model &model, [[maybe_unused]] const Cache &cache) {
    uint32_t tail = longest_tail(nullptr, 0, 0, 0);
#ifdef LUCE_USE_CUDA
    for (const Stage &stage : cache.stages()) {
        uint64_t free = 0, total = 0;
        stage.device.memory(&free, &total);
        if (model.gpu()) {
            const DeviceLimits limits = limits_of(stage.device);
            tail =
                std::max(tail, longest_tail(&limits, total, model.bytes_of_layers(), model.bytes_to_copy()));
        }
    }
#endif
    return tail;
}

StepSizes Step::measure(const Model &model, const Cache &cache, const EngineParams &params) {
    Regions in(cache, params);
    StepSizes sizes;
    sizes.inputs = in.size(cache);
    sizes.n_tail = most_of_tail(model, cache);
    sizes.compute.resize(cache.stages().size());
    const GraphAllocator galloc = step_allocator(cache);
    uint64_t n_nodes = 0, work = 0;
    std::vector<StepShape> shapes = sizing_steps(params.cache);
    for (size_t i = 0, n = shapes.size(); cache.takes_images() && i < n;
         i++) { // a prompt with images can take more
        if (shapes[i].prefill()) {
            shapes.push_back(shapes[i]);
            shapes.back().images = true;
        }
    }
    for (size_t i = 0, n = shapes.size(); model.images_are_whole() && i < n; i++) {
        if (shapes[i].prompts.size() == 2) { // a short prompt's mask has more rows (Lowering::attend_prompt)
            shapes.push_back(shapes[i]);
            std::vector<PromptRows> &prompts = shapes.back().prompts;
            prompts[0].rows += prompts[1].rows - 1;
            prompts[1].rows = 1;
        }
    }
    for (const StepShape &shape : step_shapes(cache)) { // a step of fewer rows can take more
        shapes.push_back(shape);
    }
    if (model.gpu()) { // a trial of a few layers can take more, too
        for (size_t i = 0, n = shapes.size(); i < n; i++) {
            if (shapes[i].prompts.empty()) {
                shapes.push_back(shapes[i]);
                shapes.back().brief = true;
            }
        }
    }
    for (const StepShape &shape : steps_apart(model, cache)) {
        shapes.push_back(shape);
    }
    PlainPrompts plain;
    for (const StepShape &shape : shapes) {
        auto g = Graph::build(model, cache, in.of(shape.kind), shape, &plain);
        check_supported(cache, *g);
        check_stages(model, cache, *g);
        if (shape.kind == StepKind::prefill_last && !shape.brief) {
            sizes.n_cut = std::max(sizes.n_cut, cut_of(model, params.cache, *g));
        }
        const std::vector<uint64_t> taken = compute_sizes(galloc.get(), cache, *g);
        for (size_t stage = 0; stage < taken.size(); stage++) {
            StepSizes::Compute &most = sizes.compute[stage];
            if (taken[stage] >= most.bytes) {
                most.bytes = taken[stage];
                most.largest = shape;
            }
        }
        for (const StepOutputs::Run &run : g->outputs.runs) {
            uint64_t arriving = 0, &most = sizes.compute[run.stage].arriving;
            for (const ggml_tensor *rows : g->arrivals(run)) {
                arriving += Stage::passage_bytes(rows);
            }
            most = std::max(most, arriving);
        }
        n_nodes = std::max<uint64_t>(n_nodes, uint64_t(ggml_graph_n_nodes(g->nodes)));
        if (!model.gpu()) {
            work =
                std::max<uint64_t>(work, ggml_graph_plan(g->nodes, int(params.n_threads), nullptr).work_size);
        }
    }
    if (model.gpu()) {
        constexpr uint64_t BYTES_PER_NODE = 2048; // of a captured graph
        // A link of a chain has a few nodes.
        constexpr uint64_t LINK_NODES = 64;
        uint64_t links = 0;
        for (const DrafterUse &use : params.cache.drafters) {
            links += use.n_block > 0 ? 0 : use.n_draft * uint64_t(use.n_draft + 1) / 2;
        }
        sizes.other = (step_shapes(cache).size() * n_nodes + links * LINK_NODES) * BYTES_PER_NODE;
#ifdef LUCE_USE_CUDA
        uint64_t reserve = 0;
        for (const Stage &stage : cache.stages()) {
            reserve = std::max(reserve, device_reserve(limits_of(stage.device), model.layer_matrices()));
        }
        sizes.other += reserve;
#endif
    } else { // its memory holds the graphs too, one of a prefill, what places and measures them, and what ggml works in
        const uint32_t n_prompts = prompt_limits(params.cache, StepKind::prefill).prompts;
        sizes.other = (step_shapes(cache).size() + 2) * node_bytes(most_nodes(model, cache, 1)) +
                      node_bytes(most_nodes(model, cache, n_prompts)) + work;
        for (const auto &[kind, prompts] : plain) {
            sizes.other += prompts->bytes();
        }
    }
    return sizes;
}

} // namespace luce
