#include "step/step.h"

#include "cpu/attention.h"
#include "ops/row.h"
#include "step/faults.h"
#include "step/shapes.h"

#include <ggml-alloc.h>
#include <ggml-backend-impl.h> // it says what an event is
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml-impl.h> // it declares ggml_graph_view

#include <algorithm>
#include <numeric>

namespace luce {

static const StepShape PROMPTS{StepKind::prefill, 0,
                               0}; // graphs for the occasion, one at a time, have this place
static constexpr size_t KEPT_PROMPTS =
    8; // so many graphs of prompts are kept, of 1 or 2 MB of the host's memory each
static constexpr int EVEN_PARTS_PER_THREAD = 4; // a thread has so many parts of an even op

Step::Step(const Model &model, Cache &cache, const EngineParams &params, const StepSizes &sizes)
    : model_(model), cache_(cache), params_(params),
      team_(model.gpu() && model.in_ram() == nullptr ? 1 : int(params.n_threads)), in_(cache, params),
      galloc_(step_allocator(cache)), measures_(step_allocator(cache)),
      prompts_(cache.stages()[0].runs_beside() ? KEPT_PROMPTS : 0) {
    for (Stage &stage : cache.stages()) {
        stage.open(model, int(params.n_threads), !cache.drafters().empty());
    }
    for (ExpertSlots &slots : cache.expert_slots()) {
        slots.fill();
    }
    if (!cache.expert_slots().empty()) {
        synchronize();
        std::for_each(cache.expert_slots().begin(), cache.expert_slots().end(),
                      [](ExpertSlots &each) { each.arrived(); });
    }
    in_.prefill.allocate(cache.stages());
    in_.verify.allocate(cache.stages());
    if (!cache.drafters().empty()) {
        in_.draft.allocate(cache.stages());
    }
    if (cache.lagging() != 0) {
        in_.feed.allocate(cache.stages());
    }
    if (const Moe *moe = model.in_ram(); moe != nullptr && model.gpu()) {
        const uint32_t rows =
            std::max(uint32_t(MAX_ROWS), std::min(params.cache.n_chunk, params.cache.n_ctx));
        ram_.allocate(first().device, int32_t(rows), *moe, model.hparams().n_embd);
    }
    for (size_t i = model.n_ranks(); i < cache.stages().size(); i++) {
        cache.stages()[i].connect(cache.stages()[i - 1], sizes.compute[i].arriving);
    }
    reserve(sizes);
    chunks_.resize(chunks_under_way(cache));
    if (model.gpu()) {
        for (Chunk &chunk : chunks_) {
            chunk.late.event = make_event(cache.last().device);
            chunk.ended.event = make_event(cache.last().device);
        }
        for (Event &event : ended_) {
            event = make_event(cache.last().device);
        }
        try_all();
    }
    build_all();
    time_all();
}

Step::~Step() {
    try {
        int error = 0;
        finish_all(&error); // chunks of prompts may be under way
        make_current(first().device); // this is for what captured graphs give back
    } catch (const Error &) {
        // a device that has failed takes nothing back
    }
}

uint64_t Step::allocated() const {
    const uint64_t inputs = in_.size(cache_) * cache_.stages().size();
    return std::accumulate(compute_sizes_.begin(), compute_sizes_.end(), inputs);
}

// ---- graphs ----

// Places a graph's tensors in the buffers of its stages, which grow where they have no room.
bool Step::reserve(const Graph &g) {
    return ggml_gallocr_reserve_n(galloc_.get(), g.nodes, g.stages_of_nodes().data(),
                                  g.stages_of_leaves(cache_).data());
}

static bool is_of(const Step::Graph *graph, const StepShape &shape) {
    return graph != nullptr && !(shape < graph->shape) && !(graph->shape < shape);
}

// Returns where a step's graph is, or will be built. Prompts have any length, so that their graphs are built for the occasion,
// and so are those of trials: each in the place of the one before. Kept are the last of those that a GPU had to wait for.
std::shared_ptr<Step::Graph> &Step::place_of(const StepShape &shape) {
    if (!shape.prefill() && !shape.brief) {
        return graphs_[shape];
    }
    auto kept = std::find_if(prompts_.begin(), prompts_.end(),
                             [&](const std::shared_ptr<Graph> &each) { return is_of(each.get(), shape); });
    std::shared_ptr<Graph> &occasional = graphs_[PROMPTS];
    if (kept == prompts_.end()) {
        if (shape.brief || prompts_.empty() || chunks_run() || is_of(occasional.get(), shape)) {
            return occasional;
        }
        --kept;
    }
    std::rotate(prompts_.begin(), kept, kept + 1);
    return prompts_.front();
}

// Every step asks for its graph first.
Step::Graph &Step::graph(StepShape shape) {
    make_current(first().device);
    shape.brief = brief_;
    std::shared_ptr<Graph> &slot = place_of(shape);
    if (is_of(slot.get(), shape)) {
        return *slot;
    }
    last_ = slot.get() == last_ ? nullptr : last_;
    slot.reset();
    auto built = Graph::build(model_, cache_, in_.of(shape.kind), shape, &plain_prompts_);
    // a graph that does not fit must not be given to galloc_, which would free the buffer under all others
    std::vector<uint64_t> sizes(cache_.stages().size(), 0);
    if (shape.prefill() || shape.brief) { // every other shape was measured
        sizes = compute_sizes(measures_.get(), cache_, *built);
    }
    bool fits = !fails_here(Fault::size);
    for (size_t stage = 0; stage < sizes.size(); stage++) {
        fits = fits && sizes[stage] <= compute_sizes_[stage];
    }
    if (!fits || !reserve(*built) || !ggml_gallocr_alloc_graph(galloc_.get(), built->nodes)) {
        fail(LUCE_E_INTERNAL, "a step of %u rows over %u cells takes %s, the compute buffer has %s",
             shape.rows, shape.n_kv, human_bytes(sizes[0]).c_str(), human_bytes(compute_sizes_[0]).c_str());
    }
    slot = std::move(built);
    return *slot;
}

// Returns about how many values ggml multiplies or moves for a node.
static int64_t work_of(const ggml_tensor *node) {
    switch (node->op) {
        case GGML_OP_MUL_MAT: return ggml_nelements(node->src[0]) * node->ne[1];
        // A value takes K products.
        case GGML_OP_MUL_MAT_ID: return node->src[0]->ne[0] * ggml_nelements(node);
        case GGML_OP_FLASH_ATTN_EXT:
            return ggml_nelements(node->src[0]) * node->src[1]->ne[1]; // each query meets each key
        default: return is_empty(node) ? 0 : ggml_nelements(node);
    }
}

// Returns whether a segment on the CPU is worth ggml's own threads, which meet after each node and then spin.
// All that one thread does between our ops of a step takes less time than such a meeting.
static bool is_wide(const ggml_cgraph &segment) {
    constexpr int64_t WORTH_MEETING = 1 << 22;
    int64_t work = 0;
    for (int i = 0; i < segment.n_nodes; i++) {
        work += work_of(segment.nodes[i]);
    }
    return work >= WORTH_MEETING;
}

// Runs the graph in its order, one run of a stage's nodes after the other: run_op(op, node, stage) for our ops, ggml for what lies
// between them. On GPUs a stage begins when the rows of the one before have arrived, and the first stage's stream goes on
// when the last stage has ended.
// Chunks of prompts follow each other instead: the host builds and enqueues the next one while a device computes this one, and a
// stage goes on with the next chunk as soon as its rows of this one have been fetched. Nothing else is shared by two chunks: each
// stage has its inputs, caches and scratch, which its stream takes in order, and the host's side of the inputs has a mirror for
// each chunk (prefill_host).
// Ranks begin together, and wait for each other in their kernels (kernels/exchange). Their runs have turns, and no host call comes
// between the exchanges of all of them, so that what the host may wait for, such as room in a stream, waits for nothing that
// has yet to be enqueued.
template <class Ours> void Step::run_segments(Graph &g, const Ours &run_op) {
    const std::deque<Stage> &stages = cache_.stages();
    const std::vector<StepOutputs::Run> &runs = g.outputs.runs;
    const uint32_t n_ranks = model_.n_ranks();
    std::vector<bool> begun(stages.size(), false);
    begun[0] = true;
    for (const StepOutputs::Run &run : runs) { // ahead of all that the first rank does
        if (run.stage < n_ranks && !begun[run.stage]) {
            stages[run.stage].follow(first());
            begun[run.stage] = true;
        }
    }
    for (size_t r = 0; r < runs.size(); r++) {
        const StepOutputs::Run &run = runs[r];
        const Stage &stage = stages[run.stage];
        int begin = run.first;
        const int end = r + 1 < runs.size() ? runs[r + 1].first : ggml_graph_n_nodes(g.nodes);
        if (run.stage >= n_ranks) {
            const Stage &before = stages[run.stage - 1];
            if (stage.device.gpu) {
                stage.receive(before, g.arrivals(run));
                begin += run.n_arrivals;
            } else if (stage.thread) {
                stage.follow(before);
                run_segments(g, stage, begin, begin + run.n_arrivals, run_op);
                begin += run.n_arrivals;
            }
            if (pipelines(g)) {
                before.follow(stage);
            }
        }
        begun[run.stage] = true;
        make_current(stage.device);
        const int late = std::min(late_node(g), end);
        run_segments(g, stage, begin, late, run_op);
        if (late < end) {
            set(chunks_[chunk_].late);
            run_segments(g, stage, late, end, run_op);
        }
    }
    if (stages.size() > 1) {
        for (size_t i = 1; i < stages.size() && !pipelines(g); i++) {
            if (begun[i] && (i < n_ranks || i + 1 == stages.size())) {
                first().follow(stages[i]);
            }
        }
        make_current(first().device);
    }
}

// The node of a lone stage's chunk at which the host goes on to the next one: the last eighth takes 9 ms of the 35b's 2,048 rows on
// an H200, and the host about 3. It is an op of luce's, so that ggml's segments stay as they are.
int Step::late_node(const Graph &g) const {
    const int n = ggml_graph_n_nodes(g.nodes);
    int late = n - n / 8;
    while (late < n && custom_op(ggml_graph_node(g.nodes, late)) == nullptr) {
        late++;
    }
    return pipelines(g) && cache_.stages().size() == 1 ? late : n;
}

bool Step::pipelines(const Graph &g) const {
    return g.shape.prefill() && model_.n_ranks() == 1 && first().runs_beside();
}

// Ahead of a step all that the stages' streams have to do comes first, and behind it the step: what is launched on the first
// one's stream runs on all devices.
void Step::join_stages() const {
    for (size_t i = 1; i < cache_.stages().size(); i++) {
        first().follow(cache_.stages()[i]);
    }
}

void Step::part_stages() const {
    for (size_t i = 1; i < cache_.stages().size(); i++) {
        cache_.stages()[i].follow(first());
    }
}

template <class Ours>
void Step::run_segments(Graph &g, const Stage &stage, int begin, int end, const Ours &run_op) {
    const Device &device = stage.device;
    bool work = false; // it says whether there is work in the segment that began at `first`
    for (int first = begin, i = begin; i <= end; i++) { // at `end` the last segment ends
        ggml_tensor *node = i < end ? ggml_graph_node(g.nodes, i) : nullptr;
        const CustomOp *op = node != nullptr ? custom_op(node) : nullptr;
        if (node != nullptr && op == nullptr) {
            work = work || !is_empty(node);
            continue;
        }
        if (work) {
            ggml_cgraph segment = ggml_graph_view(g.nodes, first, i);
            const bool wide = !device.gpu && is_wide(segment);
            stage.run([this, segment, wide, &stage]() mutable {
                if (!stage.device.gpu) {
                    ggml_backend_cpu_set_n_threads(stage.steps.get(), wide ? team_.n_threads() : 1);
                }
                if (ggml_backend_graph_compute_async(stage.steps.get(), &segment) != GGML_STATUS_SUCCESS) {
                    fail(LUCE_E_DEVICE, "%s: a step failed", stage.device.name.c_str());
                }
            });
        }
        if (op != nullptr) {
            check_current(device);
            if (fails_here(Fault::op)) {
                fail(LUCE_E_DEVICE, "%s: %s failed, since a test asked for it", device.name.c_str(),
                     op->name);
            }
            run_op(*op, node, stage);
        }
        first = i + 1;
        work = false;
    }
}

void Step::run_cpu(Graph &g) {
    for (const Stage &stage : cache_.stages()) {
        stage.run(
            [&stage, on = !g.shape.prefill()] { set_row_invariant(stage.steps.get(), stage.device, on); });
    }
    run_segments(g, [&](const CustomOp &op, ggml_tensor *node, const Stage &stage) {
        if (op.on_team) {
            stage.run([this, node] { ram_.run(node); });
            return;
        }
        if (stage.thread) { // a team has one caller at a time
            stage.run([&op, node] {
                OpCall call; // it points into itself
                op.bind(node, call);
                op.cpu(call, 0, 1);
            });
            return;
        }
        OpCall call;
        op.bind(node, call);
        const int n_parts = is_light(node) ? 1 : team_.n_threads() * (op.even ? EVEN_PARTS_PER_THREAD : 1);
        team_.run(n_parts, [&](int part) { op.cpu(call, part, n_parts); });
    });
}

#ifdef LUCE_USE_CUDA
void Step::check(int error, const char *what) const {
    if (error != 0) {
        fail(LUCE_E_DEVICE, "%s: %s: %s", model_.device_names().c_str(), what, cuda::error_text(error));
    }
}

// Enqueues a step. Where the host is to run an op in its middle, it calls run_on_host(node).
template <class OnHost> void Step::enqueue_cuda(Graph &g, const OnHost &run_on_host) {
    run_segments(g, [&](const CustomOp &op, ggml_tensor *node, const Stage &stage) {
        if (op.on_team) {
            run_on_host(node);
        }
        int error = 0;
        if (op.on_team || op.to_team) {
            error = ram_.enqueue(node, Stage::stream(stage.steps));
        } else {
            OpCall call;
            op.bind(node, call);
            error = op.cuda(call, Stage::stream(stage.steps));
        }
        if (error != 0) {
            fail(LUCE_E_DEVICE, "%s: %s: %s", stage.device.name.c_str(), op.name, cuda::error_text(error));
        }
    });
}

// Captures a step up to each op of the host, and from there on as the next piece.
void Step::capture(Graph &g) {
    void *const stream = Stage::stream(first().steps);
    const std::lock_guard<std::mutex> alone(device_lock());
    const auto begin = [&] { check(cuda::capture_begin(stream), "capturing a step failed"); };
    const auto end = [&] {
        g.captured.push_back(nullptr);
        check(cuda::capture_end(stream, &g.captured.back()), "capturing a step failed");
    };
    try {
        begin();
        enqueue_cuda(g, [&](const ggml_tensor *node) {
            end();
            g.on_host.push_back(node);
            begin();
        });
        end();
    } catch (...) {
        cuda::capture_abandon(stream);
        g.drop_capture();
        throw;
    }
}

// Captures a draft's links one after the other, each over its own place of the inputs.
void Step::capture_chain(Graph &g, uint32_t links) {
    void *const stream = Stage::stream(first().steps);
    const std::lock_guard<std::mutex> alone(device_lock());
    const ptrdiff_t place = ptrdiff_t(in_.draft.place());
    ptrdiff_t moved = 0;
    try {
        check(cuda::capture_begin(stream), "capturing a step failed");
        for (uint32_t link = 0; link < links; link++, moved += place, g.move_inputs(place)) {
            enqueue_cuda(g, [](const ggml_tensor *) {});
        }
        check(cuda::capture_end(stream, &g.chains[links]), "capturing a step failed");
    } catch (...) {
        cuda::capture_abandon(stream);
        g.move_inputs(-moved);
        g.drop_capture();
        throw;
    }
    g.move_inputs(-moved);
}

void Step::run_on_host(const ggml_tensor *node) {
    check(ram_.serve(node, Stage::stream(first().steps)), "a step failed");
    ram_.clear();
}

void Step::launch(void *captured) {
    make_current(first().device);
    if (fails_here(Fault::launch)) {
        fail(LUCE_E_DEVICE, "%s: a step failed, since a test asked for it", model_.device_names().c_str());
    }
    check(cuda::capture_launch(captured, Stage::stream(first().steps)), "a step failed");
}

void Step::run_cuda(Graph &g) {
    ram_.clear();
    if (g.captured.empty()) {
        enqueue_cuda(g, [&](const ggml_tensor *node) { run_on_host(node); });
        return;
    }
    struct Awake { // between two ops of the host the device takes about as long as the host for one
        Team &team;
        ~Awake() { team.stay_awake(false); }
    };
    const Awake awake{team_};
    for (size_t i = 0; i < g.captured.size(); i++) {
        launch(g.captured[i]);
        if (i < g.on_host.size()) {
            team_.stay_awake(true); // they wake while the device runs
            run_on_host(g.on_host[i]);
        }
    }
}
#endif

// Runs a step: on the CPU until it is done, on a GPU until it is enqueued.
void Step::compute(Graph &g, uint32_t links) {
    last_ = nullptr;
    fetched_ = 0;
    steps_ += links;
    if (!model_.gpu()) {
        if (!pipelines(g)) {
            finish_threads();
        }
        try {
            run_cpu(g);
        } catch (...) { // what is enqueued uses the graph and the inputs, so it ends first
            int error = 0;
            finish_all(&error);
            end_chunks();
            throw;
        }
        if (!pipelines(g)) {
            finish_threads();
        }
    }
#ifdef LUCE_USE_CUDA
    if (model_.gpu()) {
        if (capturing_ && g.captured.empty() && !g.shape.prefill()) {
            capture(g);
        }
        if (links > 1 && g.chains.count(links) == 0) {
            capture_chain(g, links);
        }
        if (!launching_) {
            return;
        }
        try {
            const Exchange *exchange = g.shape.reads_trunk() ? cache_.exchange() : nullptr;
            Exchange::Turn turn = exchange == nullptr ? Exchange::Turn() : exchange->begin(cache_.stages());
            if (pipelines(g)) {
                run_cuda(g);
            } else {
                join_stages();
                links > 1 ? launch(g.chains.at(links)) : run_cuda(g);
                part_stages();
            }
            if (exchange != nullptr) {
                exchange->end(cache_.stages(), std::move(turn));
            }
        } catch (...) { // what is enqueued uses the graph and the host's memory, so it ends first
            synchronisations_++;
            int error = 0;
            finish_all(&error);
            mend_exchange();
            end_chunks();
            throw;
        }
    }
#endif
    last_ = g.outputs.logits != nullptr ? &g : nullptr;
}

// ---- steps ----

// Moves accepted rows, in all pools, of the sequences of a step that was just sent, ahead of it. Only paths of trees skip
// rows, so that most steps have none to move.
void Step::move_kv(const Region &sent, uint32_t mirror) {
    const StepCtl &ctl = *sent.host(mirror).ctl;
    if (std::none_of(ctl.seqs, ctl.seqs + ctl.n_seqs, [](const SeqCtl &seq) { return seq.moves != 0; })) {
        return;
    }
    for (uint32_t i = 0; i < cache_.stages().size(); i++) {
        const Stage &stage = cache_.stages()[i];
        make_current(stage.device);
        move_kv(stage, stage.pools, sent.ctl(i), sent.pages(i));
        move_kv(stage, stage.window_pools, sent.ctl(i), sent.window_pages(i));
    }
}

// Moves them in pools of one kind, whose page table this is.
void Step::move_kv([[maybe_unused]] const Stage &stage, const std::vector<KvPool> &pools, const StepCtl *ctl,
                   const int32_t *pages) {
    KvMoveArgs a{};
    a.ctl = ctl;
    a.pages = pages;
    for (size_t first = 0; first < pools.size(); first += MAX_POOLS) {
        a.n_pools = int32_t(std::min(pools.size() - first, size_t(MAX_POOLS)));
        std::copy_n(pools.begin() + ptrdiff_t(first), a.n_pools, a.pools);
#ifdef LUCE_USE_CUDA
        if (stage.device.gpu) {
            check(cuda::kv_move(a, Stage::stream(stage.steps)), "a step failed");
            continue;
        }
#endif
        if (stage.thread) {
            stage.run([a] { cpu_kv_move(a, 0, 1); });
            continue;
        }
        team_.run(team_.n_threads(), [&](int part) { cpu_kv_move(a, part, team_.n_threads()); });
    }
}

void Step::prefill(StepKind kind, const std::vector<PromptRows> &prompts, uint32_t n_pages, bool images) {
    StepShape shape = prompts_shape(kind, prompts);
    shape.images = images;
    Graph &g = graph(shape);
    in_.prefill.send(chunk_, n_pages);
    move_kv(in_.prefill, chunk_);
    compute(g);
    if (kind == StepKind::prefill && !images && pipelines(g)) {
        end_chunk(g);
        return;
    }
    if (kind != StepKind::prefill) {
        enqueue_logits(g);
    }
    synchronize();
    drafting_ = false;
}

// Marks where the chunk ends that was enqueued.
void Step::end_chunk(Graph &g) {
    Chunk &chunk = chunks_[chunk_];
    chunk.graph = g.shared_from_this();
    set(chunk.ended);
    chunk_ = (chunk_ + 1) % uint32_t(chunks_.size());
    if (cache_.stages().size() == 1) {
        wait_for(late_node(g) < ggml_graph_n_nodes(g.nodes) ? chunk.late : chunk.ended);
        chunks_[chunk_].graph.reset(); // the chunk ahead has ended
    }
}

void Step::set(Mark &mark) const {
#ifdef LUCE_USE_CUDA
    if (mark.event) { // ggml would end the process where a chunk has failed meanwhile
        const Stage &last = cache_.last();
        const int error = cuda::record(mark.event->context, Stage::stream(last.steps));
        if (error != 0) {
            fail_device(last.device, "a step failed", error);
        }
        return;
    }
#endif
    mark.given = cache_.last().thread->given();
}

void Step::wait_for(const Mark &mark) {
    if (mark.event) {
        wait(mark.event);
    } else {
        synchronisations_++;
        cache_.last().thread->wait(mark.given);
        fail_wait();
    }
}

// All that was enqueued has ended.
void Step::end_chunks() {
    for (Chunk &chunk : chunks_) {
        chunk.graph.reset();
    }
}

// What is enqueued behind chunks that nobody has waited for meets a device that may have failed, where ggml would end the process.
void Step::check_chunks() const {
#ifdef LUCE_USE_CUDA
    for (const Stage &stage : cache_.stages()) {
        const int error = stage.device.gpu ? cuda::failed(Stage::stream(stage.steps)) : 0;
        if (error != 0) {
            fail_device(stage.device, "a step failed", error);
        }
    }
#endif
}

Region::Host Step::prefill_host() {
    check_chunks();
    Chunk &chunk = chunks_[chunk_];
    if (chunk.graph) {
        wait_for(chunk.ended);
    }
    chunk.graph.reset();
    return in_.prefill.host(chunk_);
}

bool Step::chunks_run() const {
    return std::any_of(chunks_.begin(), chunks_.end(),
                       [](const Chunk &chunk) { return chunk.graph != nullptr; });
}

void Step::finish_chunks() {
    if (chunks_run()) {
        synchronize();
    }
}

// A feed that lies ahead of chunks which are under way may not have read its mirror yet, but where most of a chunk is waited for.
Region::Host Step::feed_host(int32_t slot) {
    if (cache_.stages().size() > 1) {
        finish_chunks();
    }
    return in_.feed.host(uint32_t(slot));
}

uint32_t Step::start_verify(uint32_t width, uint32_t n_rows, uint32_t n_pages) {
    Graph &g = graph({StepKind::verify, width, 0});
    const uint32_t number = turn_;
    for (uint32_t row = 0; row < n_rows; row++) {
        in_.verify.host(number).ctl->rows[row].keep = cache_.choice_entry(number, row);
    }
    if (drafting_ && under_way_ == 0 && model_.gpu()) { // its inputs come while the device drafts
        in_.verify.send_beside(number, n_pages);
    } else {
        in_.verify.send(number, n_pages);
    }
    move_kv(in_.verify, number);
    compute(g);
    enqueue_logits(g);
    turn_ = (number + 1) % MAX_ENQUEUED;
    under_way_++;
    return number;
}

void Step::finish_verify(uint32_t number) {
    const bool others = under_way_ > 1;
    under_way_--; // also where the wait fails
    if (others && ended_[number]) {
        wait(ended_[number]);
    } else {
        synchronize();
    }
    drafting_ = false;
}

void Step::mark_end(uint32_t number) {
    check_works(cache_.last().device);
    if (ended_[number]) {
        ggml_backend_event_record(ended_[number].get(), cache_.last().steps.get());
    }
}

Region::Host Step::draft_host(uint32_t index) {
    if (index == 0) { // an earlier draft may still be read
        wait_for_drafts();
    }
    return in_.draft.host(index);
}

void Step::draft(uint32_t drafter, uint32_t rows, uint32_t index, uint32_t n_pages) {
    Graph &g = graph({StepKind::draft, rows, 0, false, drafter});
    drafting_ = true;
    in_.draft.send(index, n_pages);
    move_kv(in_.draft, index);
    compute(g);
}

void Step::draft_chain(uint32_t drafter, uint32_t links) {
    Graph &g = graph({StepKind::draft, 1, 0, false, drafter});
    drafting_ = true;
    in_.draft.send_chain(links);
    move_kv(in_.draft, 0);
    compute(g, links);
}

void Step::feed(uint32_t width, uint32_t slot, uint32_t n_pages) {
    Graph &g = graph({StepKind::feed, width, 0});
    in_.feed.send(slot, n_pages);
    compute(g);
}

// A CPU has run all of a step when it is enqueued. Returns the stage that failed first, or null.
const Stage *Step::finish_all(int *error) const {
    const Stage *failed = nullptr;
    for (const Stage &stage : cache_.stages()) {
        if (stage.thread) {
            stage.thread->wait(stage.thread->given());
        }
    }
#ifdef LUCE_USE_CUDA
    for (const Stage &stage : cache_.stages()) {
        const int one = stage.device.gpu ? cuda::finish(Stage::stream(stage.steps)) : 0;
        if (one != 0 && failed == nullptr) {
            failed = &stage;
            *error = one;
        }
    }
#else
    (void) error;
#endif
    return failed;
}

void Step::finish_threads() const {
    std::exception_ptr first;
    for (const Stage &stage : cache_.stages()) {
        try {
            if (stage.thread) {
                stage.thread->finish();
            }
        } catch (...) {
            first = first ? first : std::current_exception();
        }
    }
    if (first) {
        std::rethrow_exception(first);
    }
}

void Step::synchronize() {
    synchronisations_++;
    int error = 0;
    if (const Stage *failed = finish_all(&error); failed != nullptr) {
        fail_device(failed->device, "a step failed", error);
    }
    check_exchange();
    finish_threads();
    end_chunks();
    kept_.clear();
    fail_wait();
}

// A device that did not send its part left the others with wrong sums.
void Step::check_exchange() const {
    const int32_t rank = cache_.exchange() == nullptr ? -1 : cache_.exchange()->failed();
    if (rank >= 0) {
        fail(LUCE_E_DEVICE, "%s: a step failed: the others have waited for its part of a sum in vain",
             cache_.stages()[size_t(rank)].device.name.c_str());
    }
}

// A step was enqueued in part, and has ended.
void Step::mend_exchange() const {
    const auto runs = [](const Stage &stage) { return works(stage.device); };
    // Where a rank has not answered, whoever waits for that step has yet to be told.
    if (cache_.exchange() != nullptr && cache_.exchange()->failed() < 0 &&
        std::all_of(cache_.stages().begin(), cache_.stages().end(), runs)) {
        cache_.exchange()->reset();
    }
}

void Step::poison() {
    synchronize();
    last_ = nullptr;
    ggml_backend_buffer_clear(graph({StepKind::verify, verify_width(1), 0}).outputs.choice->buffer, 0xff);
}

void Step::wait([[maybe_unused]] const Event &event) {
    synchronisations_++;
#ifdef LUCE_USE_CUDA
    int error = cuda::finish_event(event->context);
    if (error != 0) { // what failed may be a stage before the last, whose event it is
        const Stage *failed = finish_all(&error);
        fail_device(failed == nullptr ? cache_.last().device : failed->device, "a step failed", error);
    }
#endif
    check_exchange();
    fail_wait();
}

int Step::finish_copy([[maybe_unused]] const Event &event) {
#ifdef LUCE_USE_CUDA
    return cuda::finish_event(event->context);
#else
    return 0;
#endif
}

void Step::fail_wait() const {
    if (fails_here(Fault::wait)) {
        fail(LUCE_E_DEVICE, "%s: a step failed, since a test asked for it", model_.device_names().c_str());
    }
}

} // namespace luce
