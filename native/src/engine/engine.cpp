#include "engine/engine.h"

#include "engine/checkpoint.h"
#include "engine/sequence.h"
#include "graph/drafter.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <thread>

namespace luce {

namespace {

ggml_type kv_type_of(const char *name) {
    static const struct {
        const char *name;
        ggml_type type;
    } list[] = {
        {"f16", GGML_TYPE_F16}, {"q8_0", GGML_TYPE_Q8_0}, {"q4_0", GGML_TYPE_Q4_0}, {"f32", GGML_TYPE_F32}};
    for (const auto &entry : list) {
        if (name == nullptr || strcmp(name, entry.name) == 0) {
            return entry.type;
        }
    }
    fail(LUCE_E_ARG, "kv_type '%s': luce has f16, q8_0, q4_0 and f32", name);
}

uint32_t in_range(const char *what, uint32_t value, uint32_t fallback, uint32_t hi) {
    const uint32_t v = value == 0 ? fallback : value;
    if (v > hi) {
        fail(LUCE_E_ARG, "%s is %u, expected 1 to %u", what, v, hi);
    }
    return v;
}

// Fails where a model's verifies can keep no scores.
void check_scores(const Model &model, uint32_t n_sequences) {
    const char *path = model.file().path().c_str();
    if (n_sequences != 1) {
        fail(LUCE_E_ARG, "scores are of one sequence, and n_sequences is %u", n_sequences);
    }
    const std::vector<Block> &blocks = model.weights().blocks;
    const bool any = std::any_of(blocks.begin(), blocks.end(), [](const Block &block) {
        const Attention *a = block.attention();
        return a != nullptr && a->has_cells() && a->shape.window == 0;
    });
    if (!any) {
        fail(LUCE_E_UNSUPPORTED, "%s: no layer sees all positions, so that none can score them", path);
    }
}

// Returns the engine's list of drafters as the caller asks for it.
std::vector<DrafterUse> resolve_drafters(const Model &model, const luce_engine_params &params) {
    const std::vector<std::shared_ptr<const Drafter>> &known = model.weights().drafters;
    if (params.n_drafters > 0 && params.drafters == nullptr) {
        fail(LUCE_E_ARG, "drafters is null, and n_drafters %u", params.n_drafters);
    }
    if (params.n_drafters > MAX_DRAFTERS) {
        fail(LUCE_E_ARG, "n_drafters is %u, expected 0 to %u", params.n_drafters, MAX_DRAFTERS);
    }
    std::vector<DrafterUse> uses;
    for (uint32_t i = 0; i < params.n_drafters; i++) {
        const luce_drafter_params &p = params.drafters[i];
        if (p.drafter >= known.size()) {
            fail(LUCE_E_ARG, "drafters[%u] is drafter %u of the model, which has %zu", i, p.drafter,
                 known.size());
        }
        const Drafter &drafter = *known[p.drafter];
        const uint32_t n_draft = p.n_draft == 0 ? drafter.n_draft : p.n_draft,
                       vocab = model.hparams().n_vocab;
        if (n_draft > drafter.n_draft || (drafter.n_block > 0 && n_draft != drafter.n_draft)) {
            fail(LUCE_E_ARG, "n_draft is %u of drafters[%u], %s: expected %s%u", n_draft, i,
                 drafter.kind->title, drafter.n_block > 0 ? "" : "0 to ", drafter.n_draft);
        }
        if (p.n_part > 0 && (p.n_part % 128 != 0 || p.n_part >= vocab || drafter.n_block > 0)) {
            fail(LUCE_E_ARG,
                 "n_part is %u of drafters[%u], %s: expected 0, or where it drafts one by one a multiple of "
                 "128 below %u",
                 p.n_part, i, drafter.kind->title, vocab);
        }
        uses.push_back({p.drafter, n_draft, p.n_part, drafter.n_block, !drafter.kv.empty()});
    }
    return uses;
}

// Most rows of a step of prompts. On several GPUs steps follow each other from one to the next, and shorter ones fill them sooner.
uint32_t usual_chunk(const Model &model) {
    if (!model.gpu()) {
        return 512;
    }
    return model.is_cut() && model.n_ranks() == 1 ? 1024 : 2048;
}

} // namespace

EngineParams Engine::resolve(const Model &model, const luce_engine_params *p) {
    luce_engine_params none{};
    p = p == nullptr ? &none : p;
    const uint32_t trained = model.hparams().n_ctx_train;
    const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
    EngineParams out{};
    CacheParams &c = out.cache;
    c.n_ctx = in_range("n_ctx", p->n_ctx, std::min(trained, 4096u), trained);
    c.n_sequences = in_range("n_sequences", p->n_sequences, 1, MAX_ROWS);
    c.n_checkpoints = p->n_checkpoints;
    c.drafters = resolve_drafters(model, *p);
    c.n_top = p->n_top;
    c.gaps = in_range("gaps", uint32_t(p->gaps), 0, 1) != 0;
    if (p->n_expert_slots > 0 && !model.experts_at_home()) {
        fail(LUCE_E_ARG, "n_expert_slots is %u, and the model was opened with its experts on the device",
             p->n_expert_slots);
    }
    c.n_expert_slots = in_range("n_expert_slots", p->n_expert_slots, 0, model.hparams().moe.n_expert);
    c.scores = in_range("scores", uint32_t(p->scores), 0, 1) != 0;
    if (c.scores) {
        check_scores(model, c.n_sequences);
    }
    c.n_rows = in_range("n_rows", p->n_rows, c.most_drafts() + 1, LUCE_MAX_ROWS);
    c.n_chunk = in_range("n_chunk", p->n_chunk, usual_chunk(model), 4096);
    c.kv_type = kv_type_of(p->kv_type);
    out.n_threads = in_range("n_threads", p->n_threads, std::min(cores, 16u), 512);
    if (c.n_checkpoints > 1024) {
        fail(LUCE_E_ARG, "n_checkpoints is %u, expected 0 to 1024", c.n_checkpoints);
    }
    if (c.n_chunk % LUCE_PAGE != 0) {
        fail(LUCE_E_ARG, "n_chunk is %u, expected a multiple of %d", c.n_chunk, LUCE_PAGE);
    }
    for (const DrafterUse &use : c.drafters) { // of a block fewer drafts may be verified
        if (use.n_block == 0 && c.n_rows <= use.n_draft) {
            fail(LUCE_E_ARG, "n_draft is %u, expected below n_rows, which is %u", use.n_draft, c.n_rows);
        }
    }
    if (c.n_top > TOPK_MAX || (c.n_top > 0 && c.drafters.empty())) {
        fail(LUCE_E_ARG, "n_top is %u, expected 0 to %d, and 0 in an engine without drafts", c.n_top,
             TOPK_MAX);
    }
    if (c.n_top > 0 && model.hparams().n_vocab > TOPK_MAX_N) {
        fail(LUCE_E_UNSUPPORTED, "lists of drafts are made of up to %lld tokens, the vocabulary has %u",
             (long long) TOPK_MAX_N, model.hparams().n_vocab);
    }
    c.n_pages = in_range("n_pages", p->n_pages,
                         c.max_pages() * (c.n_sequences + (c.n_checkpoints > 0 ? 1 : 0)), 1u << 22);
    return out;
}

luce_memory Engine::plan(const Model &model, const EngineParams &params) {
    const Cache cache(model, params.cache);
    return memory_of(model, cache, Step::measure(model, cache, params));
}

// What steps take beside buffers: on each GPU, and of a host's memory once, whose stages all lie there.
static uint64_t other_of(const StepSizes &sizes, const Cache &cache, size_t stage) {
    return cache.stages()[stage].device.gpu || stage == 0 ? sizes.other : 0;
}

luce_memory Engine::memory_of(const Model &model, const Cache &cache, const StepSizes &sizes) {
    luce_memory m{};
    const std::vector<uint64_t> weights = model.placed_bytes();
    for (size_t i = 0; i < cache.stages().size(); i++) {
        const Stage &stage = cache.stages()[i];
        luce_device_memory &d = m.devices[m.n_devices++];
        snprintf(d.name, sizeof(d.name), "%s", stage.device.name.c_str());
        d.n_layers = stage.end - stage.first;
        d.first = d.n_layers > 0 ? model.layer_of(stage.first) : model.hparams().n_layer;
        d.weights = weights[i];
        d.kv = stage.kv_bytes;
        d.experts = stage.expert_bytes;
        d.state = cache.bytes(stage) - stage.kv_bytes - stage.expert_bytes;
        d.compute = sizes.compute[i].bytes + sizes.inputs;
        d.other = other_of(sizes, cache, i);
        d.total =
            d.kv + d.state + d.experts + d.compute + d.other + (stage.device.holds_weights() ? d.weights : 0);
        uint64_t total = 0;
        stage.device.memory(&d.free, &total);
        m.weights += d.weights;
        m.kv += d.kv;
        m.state += d.state;
        m.experts += d.experts;
        m.compute += d.compute;
        m.other += d.other;
        m.total += d.total;
        m.device_free += d.free;
    }
    return m;
}

std::vector<uint32_t> Engine::share_layers(const Model &model, const EngineParams &params) {
    const Cache cache(model, params.cache);
    const luce_memory m = memory_of(model, cache, Step::measure(model, cache, params));
    Shares shares;
    shares.layers = model.layer_bytes();
    shares.joined = model.joined();
    for (uint32_t il = 0; il < model.hparams().n_layer; il++) {
        shares.layers[il] += cache.layer_bytes(il);
    }
    uint64_t of_none[2] = {}; // on the first device, and on the last
    for (uint32_t i = 0; i < model.n_with_layers(); i++) {
        const luce_device_memory &d = m.devices[i];
        const uint64_t own = d.weights + d.kv + d.state;
        uint64_t takes = d.compute + d.other, in_layers = 0;
        for (uint32_t il = d.first; il < d.first + d.n_layers; il++) {
            in_layers += shares.layers[il];
        }
        const uint64_t rest = own - std::min(own, in_layers);
        if (i == 0 || i + 1 == m.n_devices) {
            of_none[i > 0] += rest;
        } else {
            takes += rest;
        }
        shares.free.push_back(d.free > takes ? d.free - takes : 1);
    }
    shares.first = of_none[0];
    shares.last = of_none[1];
    return share_out(shares);
}

Engine::Engine(std::shared_ptr<const Model> model, const EngineParams &params)
    : model_(std::move(model)), params_(params), cache_(*model_, params.cache) {
    const StepSizes sizes = Step::measure(*model_, cache_, params);
    const std::string what =
        format("an engine of %u sequences with %u positions", params.cache.n_sequences, params.cache.n_ctx);
    for (size_t i = 0; i < cache_.stages().size(); i++) {
        const Stage &stage = cache_.stages()[i];
        const uint64_t need = cache_.bytes(stage) + sizes.compute[i].bytes + sizes.inputs;
        check_memory(stage.device, need + other_of(sizes, cache_, i), what.c_str());
    }
    cache_.n_cut = sizes.n_cut;
    cache_.n_tail = sizes.n_tail;
    cache_.allocate();
    step_ = std::make_unique<Step>(*model_, cache_, params_, sizes);
}

luce_engine_info Engine::info() const {
    const CacheParams &c = params_.cache;
    luce_engine_info out{};
    out.memory_bytes = step_->allocated();
    for (const Stage &stage : cache_.stages()) {
        out.memory_bytes += cache_.bytes(stage);
    }
    out.n_ctx = c.n_ctx;
    out.n_sequences = c.n_sequences;
    out.n_checkpoints = c.n_checkpoints;
    out.n_pages = c.n_pages;
    out.n_rows = c.n_rows;
    out.n_drafters = uint32_t(c.drafters.size());
    out.n_top = c.n_top;
    out.n_chunk = c.n_chunk;
    out.n_cut = cache_.n_cut;
    out.whole_images = cache_.images_are_whole();
    out.n_threads = params_.n_threads;
    out.n_expert_layers = uint32_t(cache_.expert_slots().size());
    out.n_experts = out.n_expert_layers > 0 ? model_->hparams().moe.n_expert : 0;
    out.n_expert_slots = c.n_expert_slots;
    out.pages_free = cache_.pages.n_free();
    out.sequences_free = cache_.sequence_slots.n_free();
    out.checkpoints_free = cache_.checkpoint_slots.n_free();
    // For each page, how many checkpoints hold it only until their copies end.
    std::map<int32_t, uint32_t> leaving;
    for (const std::weak_ptr<Checkpoint> &each : leaving_) {
        if (const std::shared_ptr<Checkpoint> checkpoint = each.lock(); checkpoint && checkpoint->leaving()) {
            out.checkpoints_free += checkpoint->has_slot();
            for (const int32_t page : checkpoint->pages().all) {
                leaving[page] += page != GONE;
            }
        }
    }
    for (const auto &[page, users] : leaving) {
        out.pages_free += users > 0 && users == cache_.pages.users(page);
    }
    return out;
}

// ---- experts ----

void Engine::read_experts(int32_t *counts, int32_t *slots, uint32_t n) {
    const std::vector<ExpertSlots> &all = cache_.expert_slots();
    const size_t each = all.empty() ? 0 : all[0].slot_of.size();
    if (n != all.size() * each) {
        fail(LUCE_E_ARG, "n is %u: %zu layers have %zu experts each at home", n, all.size(), each);
    }
    rounds_.settle();
    check_works(cache_.last().device);
    for (const ExpertSlots &of : all) {
        of.read(counts);
        slots = std::copy(of.slot_of.begin(), of.slot_of.end(), slots);
        counts += each;
    }
    step_->synchronize();
}

void Engine::move_experts(const ExpertMove *moves, uint32_t n) {
    std::vector<ExpertSlots> &all = cache_.expert_slots();
    std::vector<std::vector<ExpertMove>> of(all.size());
    std::set<std::pair<uint32_t, uint32_t>> experts, slots;
    for (uint32_t i = 0; i < n; i++) {
        const ExpertMove &move = moves[i];
        if (move.layer >= all.size() || move.expert >= all[move.layer].slot_of.size() ||
            move.slot >= all[move.layer].expert_in.size()) {
            fail(LUCE_E_ARG, "move %u is of expert %u of layer %u to slot %u: there is no such", i,
                 move.expert, move.layer, move.slot);
        }
        if (all[move.layer].slot_of[move.expert] >= 0 || !experts.insert({move.layer, move.expert}).second ||
            !slots.insert({move.layer, move.slot}).second) {
            fail(LUCE_E_ARG, "move %u: expert %u of layer %u has a slot, or slot %u gets two", i, move.expert,
                 move.layer, move.slot);
        }
        of[move.layer].push_back(move);
    }
    rounds_.settle();
    step_->synchronize();
    check_works(cache_.last().device);
    const auto wait = [&] {
        step_->synchronize();
        std::for_each(all.begin(), all.end(), [](ExpertSlots &each) { each.arrived(); });
    };
    try {
        for (size_t layer = 0; layer < all.size(); layer++) {
            if (!of[layer].empty()) {
                all[layer].move(of[layer].data(), of[layer].size());
            }
        }
    } catch (const Error &) {
        wait();
        throw;
    }
    wait();
}

// ---- what steps need ----

void Engine::check_tokens(const int32_t *tokens, uint32_t n, bool images) const {
    for (uint32_t i = 0; i < n; i++) {
        const bool of_image = images && tokens[i] < -1 && cache_.takes_images();
        if (!of_image && (tokens[i] < 0 || uint32_t(tokens[i]) >= n_vocab())) {
            fail(LUCE_E_ARG, "token %u is %d, expected 0 to %u", i, tokens[i], n_vocab() - 1);
        }
    }
}

void Engine::check_cancelled() {
    if (cancel_.take()) {
        fail(LUCE_E_CANCELLED, "cancelled");
    }
}

void Engine::leaving(std::weak_ptr<Checkpoint> checkpoint) {
    const auto has_left = [](const std::weak_ptr<Checkpoint> &each) {
        const std::shared_ptr<Checkpoint> known = each.lock();
        return !known || !known->leaving();
    };
    leaving_.erase(std::remove_if(leaving_.begin(), leaving_.end(), has_left), leaving_.end());
    leaving_.push_back(std::move(checkpoint));
}

void Engine::reclaim() {
    for (const std::weak_ptr<Checkpoint> &each : leaving_) {
        if (const std::shared_ptr<Checkpoint> checkpoint = each.lock()) {
            checkpoint->settle();
        }
    }
    leaving_.clear();
}

bool Engine::take_portion(bool slot) {
    for (const bool waits : {false, true}) { // what is copied comes first, of whichever it is
        for (const std::weak_ptr<Checkpoint> &each : leaving_) {
            const std::shared_ptr<Checkpoint> checkpoint = each.lock();
            if (checkpoint && checkpoint->leaving() && (!slot || checkpoint->has_slot()) &&
                checkpoint->give_back(waits)) {
                return true;
            }
        }
    }
    return false;
}

void Engine::need_checkpoint() {
    while (cache_.checkpoint_slots.n_free() == 0 && take_portion(true)) {
    }
    if (cache_.checkpoint_slots.n_free() == 0) {
        fail(LUCE_E_MEMORY, "all %u checkpoints that the engine has room for are on the device",
             params_.cache.n_checkpoints);
    }
}

void Engine::need_pages(uint32_t n) {
    while (n > cache_.pages.n_free() && take_portion(false)) {
    }
    if (n > cache_.pages.n_free()) {
        fail(LUCE_E_MEMORY, "%u KV pages of %d positions are needed, %u of %u are free", n, PAGE,
             cache_.pages.n_free(), params_.cache.n_pages);
    }
}

void Engine::feed_lagging(Timeline &line) {
    if (line.debts().unseen.n == 0) {
        return;
    }
    Batch batch(step_->feed_host(line.slot()), cache_);
    batch.add_unseen(line);
    const uint32_t width = step_->feed_width(batch.n_rows());
    batch.fill_up(width);
    step_->feed(width, uint32_t(line.slot()), batch.n_pages());
    line.fed();
}

} // namespace luce
