// The ABI of engines, sequences and checkpoints. It checks arguments and handles, and has no logic.
#include "abi/abi.h"
#include "abi/test_hooks.h"
#include "cpu/sampler.h"
#include "engine/checkpoint.h"
#include "engine/prompts.h"

#include <algorithm>
#include <array>

using namespace luce;

namespace {

auto &g_engines = Handles<luce_engine, Engine>::table("engine", uintptr_t(3) << 28);
auto &g_sequences = Handles<luce_sequence, Sequence>::table("sequence", uintptr_t(4) << 28);
auto &g_checkpoints = Handles<luce_checkpoint, Checkpoint>::table("checkpoint", uintptr_t(5) << 28);

} // namespace

// ---- engine ----

// Runs f on an engine, while no other call does.
template <typename F> static luce_status on_engine(luce_engine *engine, F &&f) {
    return guarded([&] {
        const auto e = g_engines.get(engine);
        const std::lock_guard<std::recursive_mutex> lock(e->mutex());
        f(e.get());
    });
}

luce_status luce_engine_open(luce_engine **out, luce_model *model, const luce_engine_params *params) {
    return guarded([&] {
        need(out, "out");
        const auto m = model_handles().get(model);
        check_optional(params, "params");
        const auto engine = std::make_shared<Engine>(m, Engine::resolve(*m, params));
        *out = g_engines.add(engine);
        engine->cancel().name(reinterpret_cast<uintptr_t>(*out));
    });
}

luce_status luce_engine_close(luce_engine *engine) {
    return guarded([&] {
        const auto e = g_engines.get(engine);
        e->cancel().name(0); // sequences may keep it alive
        {
            const std::lock_guard<std::recursive_mutex> lock(e->mutex());
            e->rounds().settle(); // a step that is under way keeps its sequences
        }
        g_engines.remove(engine);
    });
}

luce_status luce_engine_get_info(luce_engine *engine, luce_engine_info *out) {
    return on_engine(engine, [&](Engine *e) {
        check_struct(out, "out");
        e->rounds().settle_closed();
        put(out, e->info());
    });
}

luce_status luce_engine_get_drafter(luce_engine *engine, uint32_t index, luce_drafter_info *out) {
    return guarded([&] {
        const auto e = g_engines.get(engine);
        check_struct(out, "out");
        const std::vector<DrafterUse> &uses = e->params().cache.drafters;
        if (index >= uses.size()) {
            fail(LUCE_E_ARG, "drafter %u: the engine was opened with %zu", index, uses.size());
        }
        luce_drafter_info info = drafter_info(e->model(), uses[index].drafter);
        info.n_draft = uses[index].n_draft;
        info.n_part = uses[index].n_part;
        put(out, info);
    });
}

luce_status luce_engine_costs(luce_engine *engine, luce_cost *out, uint32_t *n) {
    return guarded([&] {
        const auto e = g_engines.get(engine);
        need(n, "n");
        const std::vector<luce_cost> &costs = e->step().costs();
        const uint32_t count = out == nullptr ? uint32_t(costs.size()) : std::min(*n, uint32_t(costs.size()));
        std::copy(costs.begin(), costs.begin() + (out == nullptr ? 0 : count), out);
        *n = count;
    });
}

luce_status luce_engine_get_experts(luce_engine *engine, int32_t *counts, int32_t *slots, uint32_t n) {
    return on_engine(engine, [&](Engine *e) {
        need(counts, "counts");
        need(slots, "slots");
        e->read_experts(counts, slots, n);
    });
}

luce_status luce_engine_move_experts(luce_engine *engine, const luce_expert_move *moves, uint32_t n) {
    return on_engine(engine, [&](Engine *e) {
        need(moves, "moves");
        std::vector<ExpertMove> list;
        for (uint32_t i = 0; i < n; i++) {
            list.push_back({moves[i].layer, moves[i].expert, moves[i].slot});
        }
        e->move_experts(list.data(), n);
    });
}

luce_status luce_engine_counts(luce_engine *engine, uint64_t *steps, uint64_t *synchronisations) {
    return on_engine(engine, [&](Engine *e) {
        need(steps, "steps");
        need(synchronisations, "synchronisations");
        *steps = e->step().steps();
        *synchronisations = e->step().synchronisations();
    });
}

luce_status luce_engine_poison(luce_engine *engine) {
    return on_engine(engine, [&](Engine *e) {
        e->rounds().settle();
        e->reclaim();
        e->step().poison();
        e->cache().poison();
    });
}

luce_status luce_engine_poison_experts(luce_engine *engine, uint32_t layer) {
    return on_engine(engine, [&](Engine *e) {
        std::vector<ExpertSlots> &slots = e->cache().expert_slots();
        if (layer >= slots.size()) {
            fail(LUCE_E_ARG, "layer %u: there are %zu", layer, slots.size());
        }
        e->rounds().settle();
        slots[layer].poison(true);
    });
}

luce_status luce_engine_cancel(luce_engine *engine) {
    return CancelFlag::raise(reinterpret_cast<uintptr_t>(engine)) ? LUCE_OK : LUCE_E_ARG;
}

// Returns the sequence of item i of a step, which must be of engine e and not in an item before.
template <typename Item>
static std::shared_ptr<Sequence> sequence_of(luce_sequence *handle, const Engine *e, uint32_t i,
                                             const Item *before) {
    const auto s = g_sequences.get(handle);
    if (s->engine().get() != e) {
        fail(LUCE_E_ARG, "item %u: the sequence is another engine's", i);
    }
    const auto is_it = [&](const Item &item) { return item.sequence == s; };
    if (std::any_of(before, before + i, is_it)) {
        fail(LUCE_E_ARG, "item %u: the sequence is in the step already", i);
    }
    return s;
}

static void check_items(const void *items, uint32_t n) {
    need(items, "items");
    if (n < 1 || n > LUCE_MAX_ROWS) {
        fail(LUCE_E_ARG, "a step has 1 to %d sequences, got %u", LUCE_MAX_ROWS, n);
    }
}

luce_status luce_engine_draft(luce_engine *engine, uint32_t drafter, const luce_draft_item *items,
                              uint32_t n_items) {
    return on_engine(engine, [&](Engine *e) {
        check_items(items, n_items);
        struct {
            std::shared_ptr<Sequence> sequence;
        } kept[LUCE_MAX_ROWS];
        DraftItem list[LUCE_MAX_ROWS];
        for (uint32_t i = 0; i < n_items; i++) {
            kept[i].sequence = sequence_of(items[i].sequence, e, i, kept);
            list[i] = {kept[i].sequence.get(), items[i].anchor, items[i].n};
        }
        e->rounds().draft(drafter, list, n_items);
    });
}

luce_status luce_engine_prefill(luce_engine *engine, const luce_prompt_item *items, uint32_t n_items,
                                int32_t *choices, luce_status *status) {
    return on_engine(engine, [&](Engine *e) {
        check_items(items, n_items);
        need(choices, "choices");
        need(status, "status");
        std::array<PromptItem, LUCE_MAX_ROWS> list;
        for (uint32_t i = 0; i < n_items; i++) {
            const luce_prompt_item &item = items[i];
            need(item.tokens, "tokens");
            if (item.n == 0) {
                fail(LUCE_E_ARG, "item %u: prefill needs at least one token", i);
            }
            if (item.n_images > 0) {
                need(item.images, "images");
            }
            if (item.n_gaps > 0) {
                need(item.gaps, "gaps");
            }
            list[i] = {sequence_of(item.sequence, e, i, list.data()),
                       item.tokens,
                       item.n,
                       item.last != 0,
                       item.images,
                       item.n_images,
                       item.gaps,
                       item.n_gaps};
        }
        e->rounds().settle();
        read_prompts(*e, list.data(), n_items, choices, status);
    });
}

luce_status luce_engine_finish_prompts(luce_engine *engine) {
    return on_engine(engine, [&](Engine *e) { e->step().finish_chunks(); });
}

using RoundItems = std::array<RoundItem, LUCE_MAX_ROWS>;

static void check_round(const luce_round_item *items, uint32_t n_items, const Engine *e, RoundItems &out) {
    check_items(items, n_items);
    for (uint32_t i = 0; i < n_items; i++) {
        const luce_round_item &item = items[i];
        out[i] = {nullptr, item.tokens, item.parents, item.n, item.anchor, item.drafter};
        if (!out[i].chosen()) {
            out[i].sequence = sequence_of(item.sequence, e, i, out.data());
        }
    }
}

luce_status luce_engine_verify(luce_engine *engine, const luce_round_item *items, uint32_t n_items,
                               int32_t *choices, int32_t *tokens, uint32_t n_rows, luce_status *status) {
    return on_engine(engine, [&](Engine *e) {
        RoundItems list;
        check_round(items, n_items, e, list);
        need(choices, "choices");
        need(status, "status");
        uint64_t rows = 0;
        for (uint32_t i = 0; i < n_items; i++) {
            if (list[i].chosen()) {
                fail(LUCE_E_ARG, "item %u: its anchor has to be known", i);
            }
            rows += list[i].n;
        }
        if (rows != n_rows) {
            fail(LUCE_E_ARG, "n_rows is %u, the items have %llu", n_rows, (unsigned long long) rows);
        }
        e->rounds().begin(list.data(), n_items);
        uint32_t left = 0;
        e->rounds().wait(choices, tokens, n_rows, status, n_items, &left);
    });
}

luce_status luce_engine_begin(luce_engine *engine, const luce_round_item *items, uint32_t n_items) {
    return on_engine(engine, [&](Engine *e) {
        RoundItems list;
        check_round(items, n_items, e, list);
        e->rounds().begin(list.data(), n_items);
    });
}

luce_status luce_engine_wait(luce_engine *engine, int32_t *choices, int32_t *tokens, uint32_t n_rows,
                             luce_status *status, uint32_t n_items, uint32_t *left) {
    return on_engine(engine, [&](Engine *e) {
        need(choices, "choices");
        need(status, "status");
        uint32_t unused = 0;
        e->rounds().wait(choices, tokens, n_rows, status, n_items, left == nullptr ? &unused : left);
    });
}

// ---- sequence ----

// Runs f on a sequence or checkpoint, while no other call runs on its engine. read() leaves steps that were started under
// way.
template <typename Object, typename F> static void read(const std::shared_ptr<Object> &object, F &&f) {
    const std::lock_guard<std::recursive_mutex> lock(object->engine()->mutex());
    f(*object);
}
template <typename Object, typename F> static void locked(const std::shared_ptr<Object> &object, F &&f) {
    read(object, [&](Object &one) {
        one.engine()->rounds().settle();
        f(one);
    });
}

luce_status luce_sequence_open(luce_sequence **out, luce_engine *engine) {
    return guarded([&] {
        need(out, "out");
        const auto e = g_engines.get(engine);
        const std::lock_guard<std::recursive_mutex> lock(e->mutex());
        e->rounds().settle_closed();
        *out = g_sequences.add(std::shared_ptr<Sequence>(new Sequence(e), DeleteLocked()));
    });
}

luce_status luce_sequence_close(luce_sequence *sequence) {
    return guarded([&] {
        const auto s = g_sequences.get(sequence);
        read(s, [](Sequence &one) { one.close(); });
        g_sequences.remove(sequence);
    });
}

luce_status luce_sequence_reset(luce_sequence *sequence) {
    return guarded([&] { locked(g_sequences.get(sequence), [](Sequence &s) { s.reset(); }); });
}

luce_status luce_sequence_get_info(luce_sequence *sequence, luce_sequence_info *out) {
    return guarded([&] {
        const auto s = g_sequences.get(sequence);
        check_struct(out, "out");
        read(s, [&](const Sequence &one) { put(out, one.info()); });
    });
}

luce_status luce_sequence_set_sampling(luce_sequence *sequence, const luce_sampling *sampling) {
    return guarded([&] {
        const auto s = g_sequences.get(sequence);
        check_optional(sampling, "sampling");
        const luce_sampling greedy{};
        check_sampling(sampling == nullptr ? greedy : *sampling);
        locked(s, [&](Sequence &one) {
            one.set_sampling(choice_ctl(sampling == nullptr ? greedy : *sampling));
        });
    });
}

luce_status luce_sequence_set_penalties(luce_sequence *sequence, const luce_penalties *penalties) {
    return guarded([&] {
        const auto s = g_sequences.get(sequence);
        check_optional(penalties, "penalties");
        locked(s, [&](Sequence &one) { one.set_penalties(penalties); });
    });
}

luce_status luce_sequence_choose(luce_sequence *sequence, uint32_t row, const uint8_t *mask,
                                 uint64_t mask_size, int32_t *token) {
    return guarded([&] {
        const auto s = g_sequences.get(sequence);
        need(token, "token");
        locked(s, [&](Sequence &one) { *token = one.choose(row, mask, mask_size); });
    });
}

luce_status luce_sequence_prefill(luce_sequence *sequence, const int32_t *tokens, uint32_t n,
                                  int32_t *choice) {
    return guarded([&] {
        const auto s = g_sequences.get(sequence);
        need(tokens, "tokens");
        if (n == 0) {
            fail(LUCE_E_ARG, "prefill needs at least one token");
        }
        locked(s, [&](Sequence &one) {
            const PromptItem item{s, tokens, n, choice != nullptr, nullptr, 0, nullptr, 0};
            int32_t chosen = 0;
            luce_status status = LUCE_OK;
            read_prompts(*one.engine(), &item, 1, &chosen, &status);
            if (choice != nullptr) {
                *choice = chosen;
            }
        });
    });
}

luce_status luce_sequence_get_draft(luce_sequence *sequence, int32_t *tokens, uint32_t n) {
    return guarded([&] {
        const auto s = g_sequences.get(sequence);
        need(tokens, "tokens");
        locked(s, [&](Sequence &one) { one.get_draft(tokens, n); });
    });
}

luce_status luce_sequence_get_lists(luce_sequence *sequence, const luce_lists *lists) {
    return guarded([&] {
        const auto s = g_sequences.get(sequence);
        check_struct(lists, "lists");
        need(lists->ids, "lists->ids");
        need(lists->scores, "lists->scores");
        locked(s, [&](Sequence &one) { one.get_lists(*lists); });
    });
}

luce_status luce_sequence_commit(luce_sequence *sequence, const int32_t *path, uint32_t n) {
    return guarded([&] {
        const auto s = g_sequences.get(sequence);
        need(path, "path");
        locked(s, [&](Sequence &one) { one.commit(path, n); });
    });
}

luce_status luce_sequence_get_logits(luce_sequence *sequence, uint32_t row, float *out, uint32_t n) {
    return guarded([&] {
        const auto s = g_sequences.get(sequence);
        need(out, "out");
        if (n != s->engine()->n_vocab()) {
            fail(LUCE_E_ARG, "n is %u, the vocabulary has %u", n, s->engine()->n_vocab());
        }
        locked(s, [&](Sequence &one) { one.read_logits(row, out); });
    });
}

luce_status luce_sequence_get_hidden(luce_sequence *sequence, uint32_t row, float *out, uint32_t n) {
    return guarded([&] {
        const auto s = g_sequences.get(sequence);
        need(out, "out");
        if (n != s->engine()->n_embd()) {
            fail(LUCE_E_ARG, "n is %u, a hidden state has %u", n, s->engine()->n_embd());
        }
        locked(s, [&](Sequence &one) { one.read_hidden(row, out); });
    });
}

luce_status luce_sequence_get_scores(luce_sequence *sequence, uint32_t n_best, float *out, uint32_t n) {
    return guarded([&] {
        const auto s = g_sequences.get(sequence);
        need(out, "out");
        locked(s, [&](Sequence &one) { one.read_scores(n_best, out, n); });
    });
}

luce_status luce_sequence_dump(luce_sequence *sequence, void *data, uint64_t *size) {
    return guarded([&] {
        const auto s = g_sequences.get(sequence);
        need(size, "size");
        locked(s, [&](Sequence &one) { *size = dump(one, static_cast<uint8_t *>(data), *size); });
    });
}

luce_status luce_sequence_resume(luce_sequence *sequence, luce_checkpoint *checkpoint) {
    return guarded([&] {
        const auto s = g_sequences.get(sequence);
        const auto c = g_checkpoints.get(checkpoint);
        if (s->engine() != c->engine()) {
            fail(LUCE_E_ARG, "the checkpoint is another engine's: save it there and load it here");
        }
        locked(s, [&](Sequence &one) { one.resume(*c); });
    });
}

luce_status luce_sequence_lookup(luce_sequence *sequence, int32_t anchor, int32_t *draft, uint32_t *n,
                                 uint32_t *matched) {
    return guarded([&] {
        const auto s = g_sequences.get(sequence);
        need(draft, "draft");
        need(n, "n");
        need(matched, "matched");
        read(s, [&](Sequence &one) { *n = one.lookup(anchor, draft, *n, matched); });
    });
}

// ---- checkpoint ----

luce_status luce_checkpoint_make(luce_checkpoint **out, luce_sequence *sequence) {
    return guarded([&] {
        need(out, "out");
        locked(g_sequences.get(sequence),
               [&](Sequence &s) { *out = g_checkpoints.add(Checkpoint::make(s)); });
    });
}

luce_status luce_checkpoint_close(luce_checkpoint *checkpoint) {
    return guarded([&] {
        std::vector<HostMemory> memory; // freed behind the engine's lock
        read(g_checkpoints.get(checkpoint), [&](Checkpoint &c) { // others may hold it
            if (c.has_slot() || c.leaving()) { // else no step knows of it, but for memory that is kept for it
                c.engine()->rounds().settle();
            }
            memory = c.close();
        });
        g_checkpoints.remove(checkpoint);
    });
}

luce_status luce_checkpoint_get_info(luce_checkpoint *checkpoint, luce_checkpoint_info *out, int32_t *tokens,
                                     uint32_t n) {
    return guarded([&] {
        const auto c = g_checkpoints.get(checkpoint);
        check_struct(out, "out");
        read(c, [&](const Checkpoint &one) {
            if (tokens != nullptr && n != one.n_past()) {
                fail(LUCE_E_ARG, "n is %u, the checkpoint has %u tokens", n, one.n_past());
            }
            luce_checkpoint_info info{};
            info.size_bytes = one.size();
            info.n_past = one.n_past();
            info.on_device = one.on_device();
            put(out, info);
            if (tokens != nullptr) {
                std::copy(one.tokens().begin(), one.tokens().end(), tokens);
            }
        });
    });
}

luce_status luce_checkpoint_move(luce_checkpoint *checkpoint, int32_t on_device) {
    return guarded([&] {
        const auto c = g_checkpoints.get(checkpoint);
        if (on_device != 0 && on_device != 1) {
            fail(LUCE_E_ARG, "on_device is %d: it is 0 or 1", on_device);
        }
        locked(c, [&](Checkpoint &one) { on_device == 1 ? one.to_device() : one.to_host(); });
    });
}

luce_status luce_checkpoint_save(luce_checkpoint *checkpoint, void *data, uint64_t *size) {
    return guarded([&] {
        const auto c = g_checkpoints.get(checkpoint);
        need(size, "size");
        uint64_t needed = 0;
        read(c, [&](const Checkpoint &one) { needed = one.size(); });
        if (data != nullptr) {
            if (*size < needed) {
                fail(LUCE_E_ARG, "size is %llu, the checkpoint takes %llu bytes", (unsigned long long) *size,
                     (unsigned long long) needed);
            }
            c->save(static_cast<uint8_t *>(data), needed);
        }
        *size = needed;
    });
}

luce_status luce_checkpoint_load(luce_checkpoint **out, luce_engine *engine, const void *data,
                                 uint64_t size) {
    return guarded([&] {
        need(out, "out");
        need(data, "data");
        const auto e = g_engines.get(engine);
        *out = g_checkpoints.add(Checkpoint::load(e, static_cast<const uint8_t *>(data), size));
    });
}
