// Builds the graphs of a model's steps for a GPU that is not there (pretended.h), and writes what each would launch:
// luce's own ops with all that their launchers get, ggml's ops with their params and sources.
//
//   steps OUT MODEL [name=value ..]      OUT.launches and OUT.nodes are written (recorder.py says what is in them)
#include "pretended.h"

#include "graph/architecture.h"
#include "graph/drafter.h"
#include "ops/matmul.h"
#include "ops/moe.h"
#include "step/host_experts.h"
#include "step/shapes.h"

#include <ggml-alloc.h>
#include <ggml-impl.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>

void show(const luce::RamExpertsArgs &args); // launchers.cpp

namespace {

using namespace luce;
using pretended::named;
using pretended::place;

std::map<std::string, std::string> options;
int64_t option(const std::string &name) {
    return options.count(name) ? atoll(options[name].c_str()) : 0;
}

void put(ggml_tensor *t, const std::string &name) {
    if (t != nullptr) {
        t->data = place(name, ggml_nbytes(t));
    }
}

void place_cache(const Cache &cache, const Model &model) {
    const auto cells = [](const KvCells &kv, const std::string &name) {
        put(kv.k, name + ".k");
        put(kv.v, name + ".v");
    };
    for (uint32_t il = 0; il < model.hparams().n_layer; il++) {
        const std::string layer = std::to_string(il);
        cells(cache.kv(il), "kv." + layer);
        put(cache.delta(il).state, "state." + layer);
        put(cache.delta(il).window, "window." + layer);
        put(cache.delta(il).log, "log." + layer);
        const Moe *moe = model.weights().blocks[il].moe();
        if (const ExpertSlots *slots = moe == nullptr ? nullptr : cache.slots_of(*moe)) {
            put(slots->offsets, "expert_offsets." + layer);
            put(slots->counts, "expert_counts." + layer);
            put(slots->slots, "expert_slots." + layer);
        }
    }
    for (const Drafter *drafter : cache.drafters()) {
        for (size_t il = 0; il < drafter->kv.size(); il++) {
            const std::string name = drafter->n_block == 0 ? "head_kv" : "drafter_kv." + std::to_string(il);
            cells(cache.drafter_kv(drafter->index)[il], name);
        }
    }
    put(cache.last().rowmm_scratch, "rowmm_scratch");
    put(cache.last().gemm_scratch, "gemm_scratch");
    put(cache.drafts(), "drafts");
    put(cache.given(), "given");
    put(cache.lists(), "lists");
    put(cache.hidden(), "hidden");
}

void place_inputs(const StepInputs &in) {
    put(in.tokens, "tokens");
    put(in.positions, "positions");
    put(in.ctl, "ctl");
    put(in.pages, "pages");
    put(in.window_pages, "window_pages");
    put(in.hidden_from, "hidden_from");
    put(in.hidden_to, "hidden_to");
    put(in.first_rows, "first_rows");
    put(in.last_rows, "last_rows");
    put(in.rope_positions, "rope_positions");
    put(in.axes, "axes");
    put(in.image_rows, "image_rows");
}

// Gives a tensor that a graph makes its place, behind that of what it is a view of.
void place_node(ggml_tensor *t, const std::string &name) {
    if (t->view_src != nullptr) {
        if (t->view_src->data == nullptr) {
            place_node(t->view_src, "made for " + name);
        }
        t->data = static_cast<uint8_t *>(t->view_src->data) + t->view_offs;
    } else if (t->data == nullptr) {
        put(t, name);
    }
}

std::string shape_of(const ggml_tensor *t) {
    std::string text = std::string(ggml_type_name(t->type)) + "{";
    for (int d = 0; d < ggml_n_dims(t); d++) {
        text += (d == 0 ? "" : ",") + std::to_string(t->ne[d]);
    }
    text += "}";
    if (!ggml_is_contiguous(t)) {
        for (int d = 0; d < GGML_MAX_DIMS; d++) {
            text += (d == 0 ? "/" : ",") + std::to_string(t->nb[d]);
        }
    }
    return text;
}

std::string sources_of(const ggml_tensor *node) {
    std::string text;
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (const ggml_tensor *s = node->src[i]) {
            text += (text.empty() ? "" : ", ") + named(s->data) + ":" + shape_of(s);
        }
    }
    return text;
}

// Params from the first-th on, up to the last that is not 0.
std::string params_of(const ggml_tensor *node, int first) {
    int n = int(GGML_MAX_OP_PARAMS / sizeof(int32_t));
    while (n > first && node->op_params[n - 1] == 0) {
        n--;
    }
    std::string text;
    for (int i = first; i < n; i++) {
        text += " " + std::to_string(node->op_params[i]);
    }
    return text;
}

const char *const KINDS[] = {"prefill", "prefill_last", "prefill_tail", "verify", "draft", "feed"};

std::string kind_of(const StepShape &shape, const Cache &cache) {
    if (shape.kind != StepKind::draft) {
        return KINDS[int(shape.kind)];
    }
    const DrafterUse &use = cache.params().drafters[shape.drafter];
    return use.n_block > 0 ? "block" : use.n_part > 0 ? "draft_part" : "draft";
}

struct Lists {
    std::ofstream launches, nodes;
};

// `kept` has plain graphs of other rows, as an engine has them.
void write_step(const Model &model, const Cache &cache, Regions &regions, RamRunner &ram,
                const StepShape &shape, Step::PlainPrompts &kept, Lists &to) {
    const void *const ram_memory = ram.pinned_ ? ggml_backend_buffer_get_base(ram.pinned_.get()) : nullptr;
    const auto graph = Step::Graph::build(model, cache, regions.of(shape.kind), shape, &kept);
    const uint64_t size = compute_sizes(step_allocator(cache).get(), cache, *graph)[0];

    const size_t before = pretended::n_places();
    place_inputs(graph->inputs[0]);
    int number = 0;
    std::map<const ggml_tensor *, std::string> names;
    for (int i = 0; i < ggml_graph_n_nodes(graph->nodes); i++) {
        ggml_tensor *node = ggml_graph_node(graph->nodes, i);
        for (ggml_tensor *source : node->src) {
            if (source != nullptr) {
                place_node(source, "a leaf");
            }
        }
        const std::string name = is_empty(node) ? "a view" : "#" + std::to_string(number++);
        names[node] = name;
        place_node(node, name);
    }

    std::string title = "== " + kind_of(shape, cache) + " of " + std::to_string(shape.rows) + " rows";
    title += shape.prefill() ? " over " + std::to_string(shape.n_kv) + " cells" : "";
    title += shape.prompts.empty() ? "" : " of " + std::to_string(shape.prompts.size()) + " prompts";
    title += shape.brief ? ", brief" : "";
    title += shape.images ? ", with images" : "";
    to.launches << title << "\n";
    to.nodes << title << ": " << size << " bytes\n";
    for (int i = 0; i < ggml_graph_n_nodes(graph->nodes); i++) {
        const ggml_tensor *node = ggml_graph_node(graph->nodes, i);
        if (is_empty(node)) {
            continue;
        }
        const CustomOp *op = custom_op(node);
        const std::string place = named(node->data) == names[node] ? "" : " in " + named(node->data);
        const std::string made = names[node] + " " + (op != nullptr ? op->name : ggml_op_desc(node)) + place;
        const std::string flags = node->flags & GGML_TENSOR_FLAG_OUTPUT ? ", an output" : "";
        to.nodes << made << " " << shape_of(node) << flags << " <- " << sources_of(node) << ";"
                 << params_of(node, op == nullptr ? 0 : 8) << "\n";
        if (op == nullptr) {
            to.launches << made << " of ggml " << shape_of(node) << " <- " << sources_of(node) << ";"
                        << params_of(node, 0) << "\n";
            continue;
        }
        to.launches << made << " " << ggml_nbytes(node) << " bytes\n";
        std::vector<const void *> allowed = {node->data, ram_memory};
        for (ggml_tensor *const source : node->src) {
            if (source != nullptr) {
                allowed.push_back(source->data);
            }
        }
        pretended::allow(allowed);
        OpCall call;
        op->bind(node, call);
        if (const int error =
                op->on_team || op->to_team ? ram.enqueue(node, nullptr) : op->cuda(call, nullptr);
            error != 0) {
            fail(LUCE_E_DEVICE, "%s: %d", op->name, error);
        }
        if (op->on_team) {
            pretended::launch("on the host:");
            show(ops::ram_experts.args(node));
        }
        to.launches << pretended::take_launches() << "\n";
    }
    pretended::forget_after(before);
}

std::vector<StepShape> shapes_of(const Cache &cache) {
    std::vector<StepShape> shapes;
    const CacheParams &p = cache.params();
    for (const uint32_t rows : {16u, 128u, 512u, 2048u}) {
        shapes.push_back({StepKind::prefill, rows, kv_bucket(rows)});
    }
    for (const uint32_t rows : {1u, 100u}) {
        shapes.push_back({StepKind::prefill_tail, rows, kv_bucket(rows + 4096)});
    }
    for (const uint32_t rows : {1u, 16u, 512u}) {
        shapes.push_back({StepKind::prefill_last, rows, kv_bucket(rows + 4096)});
    }
    const std::vector<PromptRows> wholes = {{128, 256}, {256, 512}, {128, 4096}, {1, 256}},
                                  tails = {{1, 256}, {100, 512}};
    shapes.push_back(prompts_shape(StepKind::prefill, wholes));
    shapes.push_back(prompts_shape(StepKind::prefill_last, wholes));
    shapes.push_back(prompts_shape(StepKind::prefill_tail, tails));
    for (size_t i = 0, n = shapes.size(); option("images") && cache.takes_images() && i < n; i++) {
        shapes.push_back(shapes[i]);
        shapes.back().images = true;
    }
    for (const uint32_t rows : {1u, 2u, 4u, 5u, 8u, 16u, 32u, 64u}) {
        shapes.push_back({StepKind::verify, rows, 0});
    }
    shapes.push_back({StepKind::verify, 1, 0, true});
    for (uint32_t i = 0; i < p.drafters.size(); i++) {
        const DrafterUse &use = p.drafters[i];
        for (uint32_t n = 1; n <= drafted_at_once(p, use); n++) {
            if (use.n_block > 0 || n == 1 || n == 4 || (n == 2 && use.n_part == 0)) {
                shapes.push_back({StepKind::draft, n * std::max(use.n_block, 1u), 0, false, i});
            }
        }
    }
    for (const uint32_t rows : {1u, 8u}) {
        if (cache.lagging() != 0) {
            shapes.push_back({StepKind::feed, rows, 0});
        }
    }
    return shapes;
}

// Fails where a prompt's step takes more memory than what an engine measures when it opens.
void check_fits(const Model &model, const Cache &cache, const EngineParams &params, Regions &regions) {
    const uint64_t measured = Step::measure(model, cache, params).compute[0].bytes;
    const CacheParams &c = cache.params();
    std::vector<std::pair<uint32_t, StepKind>> ways;
    for (const uint32_t prompts : {1u, 2u, 3u, uint32_t(MAX_PROMPTS)}) {
        ways.push_back({prompts, StepKind::prefill_last});
        ways.push_back({prompts, StepKind::prefill_tail});
    }
    for (uint32_t rows = 64; rows <= std::min(c.n_chunk, c.n_ctx);
         rows += rows < TAIL ? 63 : 160) { // a tail of 127 rows is one of them
        for (uint32_t n_kv = kv_bucket(rows); n_kv <= kv_bucket(c.n_ctx); n_kv = kv_bucket(n_kv + 1)) {
            for (const auto &[prompts, kind] : ways) {
                if (kind == StepKind::prefill_tail && rows >= TAIL) {
                    continue;
                }
                std::vector<PromptRows> alike(prompts,
                                              {rows / prompts, std::max(n_kv / prompts / PAGE, 1u) * PAGE});
                alike[0].rows += rows % prompts;
                alike[0].n_kv = prompts == 1 ? n_kv : alike[0].n_kv;
                const StepShape shape = prompts_shape(kind, alike);
                const auto graph = Step::Graph::build(model, cache, regions.of(shape.kind), shape);
                const uint64_t bytes = compute_sizes(step_allocator(cache).get(), cache, *graph)[0];
                if (bytes > measured) {
                    fail(LUCE_E_INTERNAL,
                         "%u rows of %u prompts over %u cells take %llu bytes, %llu were measured", rows,
                         prompts, n_kv, (unsigned long long) bytes, (unsigned long long) measured);
                }
            }
        }
    }
}

// Fails where ranks pass each other more logits than a box holds.
void check_boxes(const Step::Graph &graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph.nodes); i++) {
        const ggml_tensor *node = ggml_graph_node(graph.nodes, i);
        if (custom_op(node) != &ops::gather) {
            continue;
        }
        const GatherArgs a = ops::gather.args(node);
        const int64_t values = a.T * most_output_rows(a.V, a.ranks.n_ranks);
        if (values > a.ranks.values) {
            fail(LUCE_E_INTERNAL, "%lld rows have %lld logits of a rank, a box holds %lld", (long long) a.T,
                 (long long) values, (long long) a.ranks.values);
        }
    }
}

void run(const std::string &out, const std::string &path) {
    const Device &device = find_device("cuda:0");
    const auto file = GgufFile::open(path);
    std::vector<DrafterFile> drafters;
    std::vector<DrafterUse> uses;
    if (option("head")) {
        drafters.push_back({file, "nextn"});
        uses = {{0, 3, 0, 0}, {0, 3, 256, 0}};
    }
    if (options.count("drafter")) {
        drafters.push_back({GgufFile::open(options["drafter"]), "dflash"});
    }
    if (options.count("assistant")) {
        drafters.push_back({GgufFile::open(options["assistant"]), "assistant"});
        uses = {{0, 3, 0, 0, false}, {0, 3, 256, 0, false}};
    }
    const uint32_t stages = std::max(uint32_t(option("stages")), 1u), layers = uint32_t(option("layers"));
    Split split = device;
    if (stages > 1) { // all on the one device that is pretended
        split.devices.assign(stages, &device);
        split.layers.assign(layers > 0 ? stages : 0, layers / stages); // without `layers` they are shared out
    }
    if (const uint32_t ranks = uint32_t(option("ranks")); ranks > 0) {
        split.devices.assign(ranks, &device);
        split.tensors = true;
    }
    split.drafts_on = option("drafts_apart") ? &device : nullptr;
    const auto model = Model::describe(file, drafters, split, uint32_t(option("cpu_experts")),
                                       uint64_t(option("copy_bytes")), options.count("expert_slots") > 0);
    if (options.count("drafter")) {
        const Drafter &drafter = *model->weights().drafters.back();
        uses.push_back({drafter.index, drafter.n_draft, 0, drafter.n_block});
    }
    for (auto &[tensor, source, slice] : model->tensors_) {
        put(tensor, tensor->name);
        put(model->copy_of(tensor), std::string(tensor->name) + ".f16");
    }

    EngineParams params{};
    CacheParams &c = params.cache;
    const bool fits = options.count("fits") > 0; // the context of an engine whose prompts have to fit
    c.n_ctx = fits ? uint32_t(option("fits")) : 8192;
    c.n_sequences = fits ? MAX_PROMPTS : 4;
    c.n_rows = 16;
    c.n_chunk = 2048;
    c.drafters = uses;
    c.n_top = uint32_t(option("top"));
    c.n_expert_slots = uint32_t(option("expert_slots"));
    c.kv_type = ggml_type(option("kv_type"));
    c.n_pages = c.max_pages() * c.n_sequences;
    params.n_threads = 1;
    const Cache cache(*model, c);
    place_cache(cache, *model);
    Regions regions(cache, params);
    if (stages > 1 || (split.drafts_on != nullptr && !split.tensors)) { // the step's own checks say whether each stage reads what is its own
        Step::measure(*model, cache, params);
        return;
    }
    if (split.tensors) {
        Step::measure(*model, cache, params);
        set_log([](int32_t, const char *text, void *) { puts(text); }, nullptr);
        for (const StepShape &shape : shapes_of(cache)) {
            const auto graph = Step::Graph::build(*model, cache, regions.of(shape.kind), shape);
            graph->log_ops(c);
            check_boxes(*graph);
        }
        return;
    }
    if (fits) {
        return check_fits(*model, cache, params, regions);
    }
    Team team(1);
    RamRunner ram(team);
    if (const Moe *moe = model->in_ram()) {
        ram.allocate(device, int32_t(c.n_chunk), *moe, model->hparams().n_embd);
    }
    Step::PlainPrompts kept;
    Lists lists = {std::ofstream(out + ".launches"), std::ofstream(out + ".nodes")};
    for (const StepShape &shape : shapes_of(cache)) {
        write_step(*model, cache, regions, ram, shape, kept, lists);
    }
}

} // namespace

int main(int n, char **args) {
    for (int i = 3; i < n; i++) {
        const std::string text = args[i];
        options[text.substr(0, text.find('='))] = text.substr(text.find('=') + 1);
    }
    try {
        run(args[1], args[2]);
    } catch (const luce::Error &e) {
        fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}
