#include "engine/round.h"

#include "engine/accept.h"
#include "engine/engine.h"
#include "engine/sequence.h"
#include "graph/drafter.h"

#include <algorithm>

namespace luce {

// ---- begin ----

void Rounds::begin(const RoundItem *items, uint32_t n) {
    const bool chosen = items[0].chosen();
    const RoundItem *first = nullptr; // of those that draft
    for (uint32_t i = 0; i < n; i++) {
        if (items[i].chosen() != chosen) {
            fail(LUCE_E_ARG,
                 "item %u: a round's anchors are what the round ahead chooses in all items or in none", i);
        }
        first = first == nullptr && items[i].drafts() ? &items[i] : first;
        if (items[i].drafts() && items[i].drafter != first->drafter) {
            fail(LUCE_E_ARG, "item %u: the drafts of a round come from one drafter", i);
        }
    }
    chosen ? begin_chosen(items, n) : begin_known(items, n);
}

void Rounds::begin_known(const RoundItem *items, uint32_t n) {
    settle();
    n_ = 0; // nobody has asked for their results
    engine_.check_cancelled();
    uint32_t pages = 0, rows = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (rows + items[i].n > uint32_t(MAX_ROWS)) {
            fail(LUCE_E_ARG, "a step has %d rows at most, got %u and more", MAX_ROWS, rows + items[i].n);
        }
        rows += items[i].n;
        check_known(items[i]);
    }
    Round &round = at(0);
    fill(round, items, n);
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t reach = items[i].drafts() ? use(items[i].drafter).reach(items[i].n) : 0;
        pages += items[i].sequence->line().pages_wanted(std::max(items[i].n, reach));
    }
    engine_.need_pages(pages);
    hold(round, items);
    enqueue(round, [&] {
        enqueue_drafts(items, n);
        enqueue_verify(round);
    });
    n_ = 1;
}

void Rounds::begin_chosen(const RoundItem *items, uint32_t n) {
    engine_.check_cancelled();
    if (n_ != 1 || at(0).state == Round::State::failed) {
        fail(LUCE_E_STATE, n_ > 1 ? "a round follows already: wait for the one ahead of it"
                                  : "there is no round ahead: begin one of known anchors");
    }
    const CacheParams &c = engine_.params().cache;
    const Round &ahead = at(0);
    if (n != ahead.n_items) {
        fail(LUCE_E_ARG, "%u items, but the round ahead has %u", n, ahead.n_items);
    }
    uint32_t rows = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (items[i].n < 1) {
            fail(LUCE_E_ARG, "a sequence has 1 to %u rows in a step, got 0", c.n_rows);
        }
        const uint32_t most = items[i].n > 1 ? std::min(use(items[i].drafter).n_draft, c.n_rows - 1) : 0;
        if (items[i].n > most + 1) {
            fail(LUCE_E_ARG, "a sequence has at most %u drafts in a step, got %u", most, items[i].n - 1);
        }
        rows += items[i].n;
    }
    if (rows > uint32_t(MAX_ROWS)) {
        fail(LUCE_E_ARG, "a step has %d rows at most, got %u", MAX_ROWS, rows);
    }
    if (ahead.n_rows == n && rows == n) {
        follow();
    } else {
        ask(items, n);
    }
}

// Takes note of a round that the wait for the one ahead begins.
void Rounds::ask(const RoundItem *items, uint32_t n) {
    Round &round = at(1);
    round.state = Round::State::asked;
    round.n_items = n;
    round.n_rows = 0;
    round.drafter = 0;
    for (uint32_t i = 0; i < n; i++) {
        round.items[i].first = round.n_rows;
        round.items[i].n = items[i].n;
        round.items[i].status = LUCE_OK;
        round.n_rows += items[i].n;
        round.drafter = items[i].n > 1 ? items[i].drafter : round.drafter;
    }
    round.error.reset();
    n_ = 2;
}

// Enqueues a row of each sequence behind that of the round ahead, whose choices the device has.
void Rounds::follow() {
    Round &ahead = at(0), &round = at(1);
    const bool landed = ahead.state == Round::State::landed;
    const CacheParams &c = engine_.params().cache;
    uint32_t pages = 0;
    for (uint32_t i = 0; i < ahead.n_items; i++) {
        const std::shared_ptr<Sequence> sequence = ahead.items[i].sequence.lock();
        if (!sequence || sequence->closed() || (landed && sequence->line().n_verified() != 1)) {
            fail(LUCE_E_STATE, "item %u of the round ahead was closed, or its row rejected", i);
        }
        sequence->check_usable();
        const Timeline &line = sequence->line();
        if (line.n_past() + 1 >= c.n_ctx) {
            fail(LUCE_E_CONTEXT, "a row would be at position %u of a context of %u", line.n_past() + 1,
                 c.n_ctx);
        }
        pages += line.pages_wanted(2);
    }
    engine_.need_pages(pages);
    round.n_items = round.n_rows = ahead.n_items;
    round.error.reset();
    for (uint32_t i = 0; i < ahead.n_items; i++) {
        const std::shared_ptr<Sequence> sequence = ahead.items[i].sequence.lock();
        round.items[i] = {sequence, sequence, i, 1, LUCE_OK};
        round.tokens[i] = landed ? ahead.choices[i] : -1 - engine_.cache().choice_entry(ahead.number, i);
        round.parents[i] = -1;
        round.positions[i] = sequence->line().n_past() + 2;
    }
    enqueue(round, [&] {
        ahead.booked = true; // from here on its landing books nothing, and clears no failure
        if (!landed) {
            engine_.step().mark_end(ahead.number);
        }
        const int32_t path = 0;
        for (uint32_t i = 0; i < round.n_items; i++) {
            Timeline &line = round.items[i].held->line();
            if (!landed) {
                line.verified(&ahead.tokens[i], &ahead.parents[i], 1, ahead.seen);
            }
            line.commit(&path, 1);
        }
        enqueue_verify(round);
    });
    n_ = 2;
}

// Checks an item whose anchor is known. (fill() checks its tree, and that it fits the context.)
void Rounds::check_known(const RoundItem &item) const {
    const CacheParams &c = engine_.params().cache;
    const Timeline &line = item.sequence->line();
    item.sequence->check_usable();
    if (item.n < 1 || item.n > c.n_rows) {
        fail(LUCE_E_ARG, "a sequence has 1 to %u rows in a step, got %u", c.n_rows, item.n);
    }
    if (item.tokens != nullptr) {
        engine_.check_tokens(item.tokens, item.n);
    } else if (item.parents != nullptr) {
        fail(LUCE_E_ARG, "drafts on the device are a chain: parents must be null");
    } else if (item.anchor != LUCE_DRAFTED) {
        engine_.check_tokens(&item.anchor, 1);
        if (item.drafts()) {
            check_draft({item.sequence.get(), item.anchor, item.n - 1}, use(item.drafter).n_draft);
        }
    } else if (line.n_drafted() == 0 || item.n > line.n_drafted() + 1) {
        fail(LUCE_E_STATE, "%u rows without tokens: %u drafts are there to verify", item.n, line.n_drafted());
    }
}

// Writes an item's parents, which have to be in depth-first order: each row follows the one before it, or one of that
// row's ancestors.
static void fill_parents(const RoundItem &item, int32_t *parents) {
    for (uint32_t i = 0; i < item.n; i++) {
        parents[i] = item.parents == nullptr ? int32_t(i) - 1 : item.parents[i];
    }
    check_parents(parents, item.n);
    for (uint32_t i = 1; i < item.n; i++) {
        int32_t up = int32_t(i) - 1;
        while (up >= 0 && up != parents[i]) {
            up = parents[up];
        }
        if (up < 0) {
            fail(LUCE_E_ARG, "row %u with parent %d is not in depth-first order", i, parents[i]);
        }
    }
}

// Writes down the rows of items whose anchors are known. Those that are to be drafted have their entries already.
void Rounds::fill(Round &round, const RoundItem *items, uint32_t n) const {
    const uint32_t n_ctx = engine_.params().cache.n_ctx;
    const Cache &cache = engine_.cache();
    uint32_t first = 0;
    for (uint32_t i = 0; i < n; first += items[i].n, i++) {
        const RoundItem &item = items[i];
        const Timeline &line = item.sequence->line();
        const bool drafted = item.tokens == nullptr && item.anchor == LUCE_DRAFTED;
        int32_t *tokens = round.tokens + first, *parents = round.parents + first;
        fill_parents(item, parents);
        for (uint32_t row = 0; row < item.n; row++) {
            uint32_t *positions = round.positions + first;
            positions[row] = row == 0 ? line.n_past() + 1 : positions[parents[row]] + 1;
            if (positions[row] > n_ctx) {
                fail(LUCE_E_CONTEXT, "row %u would be at position %u of a context of %u", row,
                     positions[row] - 1, n_ctx);
            }
            const int32_t draft = int32_t(row) - 1;
            tokens[row] = item.tokens != nullptr ? item.tokens[row]
                          : row == 0             ? (drafted ? line.draft_anchor() : item.anchor)
                                                 : -1 - cache.draft_entry(line.slot(), draft);
        }
        round.items[i].first = first;
        round.items[i].n = item.n;
        round.items[i].status = LUCE_OK;
    }
    round.n_items = n;
    round.n_rows = first;
    round.error.reset();
}

void Rounds::hold(Round &round, const RoundItem *items) {
    for (uint32_t i = 0; i < round.n_items; i++) {
        round.items[i].sequence = round.items[i].held = items[i].sequence;
    }
}

void Rounds::release(Round &round) {
    for (uint32_t i = 0; i < round.n_items; i++) {
        round.items[i].held.reset();
    }
}

// Says of all sequences of a round, which holds them, that it failed.
void Rounds::fail_all(Round &round, const Error &error) {
    round.error = error;
    round.state = Round::State::failed;
    for (uint32_t i = 0; i < round.n_items; i++) {
        round.items[i].held->fail_with(error.what());
    }
}

// Runs what enqueues a round that holds its sequences. All of them fail with it.
template <typename F> void Rounds::enqueue(Round &round, const F &steps) {
    try {
        engine_.in_step(steps);
    } catch (const Error &e) {
        fail_all(round, e);
        release(round);
        throw;
    }
}

// Begins the drafts that a round's items ask for.
void Rounds::enqueue_drafts(const RoundItem *items, uint32_t n) {
    DraftItem drafts[MAX_ROWS];
    uint32_t n_drafts = 0;
    uint32_t drafter = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (items[i].drafts()) {
            drafts[n_drafts++] = {items[i].sequence.get(), items[i].anchor, items[i].n - 1};
            drafter = items[i].drafter;
        }
    }
    if (n_drafts > 0) {
        begin_draft(drafter, drafts, n_drafts);
    }
}

// Begins the step of a round whose rows are filled in and whose sequences it holds, in an in_step().
void Rounds::enqueue_verify(Round &round) {
    Step &step = engine_.step();
    Cache &cache = engine_.cache();
    for (uint32_t i = 0; i < round.n_items; i++) {
        round.items[i].held->begin_step(); // all of them fail with it, also those that it has not come to
    }
    const uint32_t width = step.verify_width(round.n_rows);
    round.seen = cache.lagging() == 0 || feeds_lagging(width);
    Batch batch(step.verify_host(), cache);
    for (uint32_t i = 0; i < round.n_items; i++) {
        const Round::Item &item = round.items[i];
        Sequence &sequence = *item.held;
        sequence.line().take_pages(item.n);
        if (round.seen || sequence.line().debts().unseen.n == engine_.params().cache.n_rows) {
            engine_.feed_lagging(sequence.line());
        }
        batch.add_verify(sequence.line(), sequence.choice_ctl(), item.n, round.parents + item.first,
                         round.tokens + item.first);
        if (sequence.chooses()) {
            step.fetch_logits(batch.n_rows() - item.n, item.n);
        }
    }
    batch.fill_up(width);
    round.number = step.start_verify(width, round.n_rows, batch.n_pages());
    round.booked = false;
    round.state = Round::State::enqueued;
    for (uint32_t i = 0; i < round.n_items; i++) {
        round.items[i].held->fail_with(""); // it waits for its step, and has not failed
    }
}

// ---- land ----

// Waits for the step of a round, and books it. Where that fails, so has the round that is enqueued behind it.
void Rounds::land(Round &round) {
    if (round.state != Round::State::enqueued) {
        return;
    }
    Round *behind = n_ == 2 && &round == &at(0) && at(1).state == Round::State::enqueued ? &at(1) : nullptr;
    try {
        engine_.in_step([&] { book(round, behind); });
        round.state = Round::State::landed;
    } catch (const Error &e) {
        fail_all(round, e);
        if (behind != nullptr) {
            land(*behind); // the device is done with it too
            behind->state = Round::State::failed;
            behind->error = e;
            fail_all(round, e); // once more: its landing has cleared the failure of these same sequences
        }
    }
    release(round);
}

void Rounds::book(Round &round, Round *behind) {
    Step &step = engine_.step();
    step.finish_verify(round.number);
    const uint32_t vocab = engine_.n_vocab();
    for (uint32_t i = 0; i < round.n_items; i++) {
        Round::Item &item = round.items[i];
        Sequence &sequence = *item.held;
        if (item.status != LUCE_OK) { // the round ahead failed of it
            continue;
        }
        const uint32_t end = item.first + item.n;
        for (uint32_t row = item.first; row < end; row++) {
            int32_t &token = round.tokens[row];
            bool finite = true;
            if (token < 0) { // the kernel did the same to the draft (TokensArgs)
                const Choice &draft = step.drafted(-1 - token);
                token = uint32_t(draft.token) < vocab ? draft.token : 0;
                finite = !draft.not_finite;
            }
            round.told[row] = finite ? token : -1;
        }
        if (!round.booked) {
            sequence.line().verified(round.tokens + item.first, round.parents + item.first, item.n,
                                     round.seen);
            sequence.end_step(Sequence::Rows::verified, item.n, item.first);
        }
        try {
            for (uint32_t row = item.first; row < end; row++) {
                round.choices[row] = checked(step.choices(round.number)[row], round.positions[row]);
            }
            if (behind != nullptr) {
                behind->tokens[i] = round.choices[item.first];
            }
        } catch (const Error &e) {
            item.status = e.code();
            sequence.fail_with(e.what());
            round.error = round.error ? round.error : e;
            if (behind != nullptr) {
                behind->items[i].status = e.code();
                behind->error = round.error;
            }
        }
    }
}

void Rounds::settle() {
    for (uint32_t i = 0; i < n_; i++) {
        land(at(i));
    }
}

void Rounds::settle_closed() {
    for (uint32_t i = 0; i < n_; i++) {
        for (uint32_t j = 0; j < at(i).n_items; j++) {
            const std::shared_ptr<Sequence> &held = at(i).items[j].held;
            if (held && held->closed()) {
                return settle();
            }
        }
    }
}

// ---- wait ----

void Rounds::wait(int32_t *choices, int32_t *tokens, uint32_t n_rows, luce_status *status, uint32_t n_items,
                  uint32_t *left) {
    if (n_ == 0) {
        fail(LUCE_E_STATE, "there is nothing to wait for: begin a round");
    }
    Round &round = at(0);
    if (round.n_rows != n_rows || round.n_items != n_items) {
        fail(LUCE_E_ARG, "%u rows of %u sequences, but the round was begun with %u of %u", n_rows, n_items,
             round.n_rows, round.n_items);
    }
    land(round);
    Round *asked = n_ == 2 && at(1).state == Round::State::asked ? &at(1) : nullptr;
    n_ = n_ == 2 && asked == nullptr ? 1 : 0;
    oldest_ = (oldest_ + 1) % MAX_ENQUEUED;
    *left = n_;
    if (round.state == Round::State::failed) {
        throw Error(*round.error);
    }
    for (uint32_t i = 0; i < n_items; i++) {
        const Round::Item &item = round.items[i];
        status[i] = item.status;
        if (item.status == LUCE_OK) {
            std::copy_n(round.choices + item.first, item.n, choices + item.first);
            if (tokens != nullptr) {
                std::copy_n(round.told + item.first, item.n, tokens + item.first);
            }
        }
    }
    if (round.error) {
        throw Error(*round.error);
    }
    Accepted accepted;
    if (asked != nullptr && accepts(round, *asked, accepted)) {
        go_on(round, *asked, accepted);
        *left = n_ = 1;
    }
}

// Finds what a round's choices accept of each sequence. Returns false where something stands in the way of the round
// that was asked for behind it.
bool Rounds::accepts(const Round &round, const Round &asked, Accepted &out) const {
    const CacheParams &c = engine_.params().cache;
    uint32_t pages = 0;
    for (uint32_t i = 0; i < round.n_items; i++) {
        const Round::Item &item = round.items[i];
        const int32_t *told = round.told + item.first;
        const std::shared_ptr<Sequence> sequence = item.sequence.lock();
        const bool finite = std::all_of(told, told + item.n, [](int32_t token) { return token >= 0; });
        if (!sequence || sequence->closed() || sequence->chooses() ||
            sequence->line().n_verified() != item.n || !finite) {
            return false;
        }
        const Timeline &line = sequence->line();
        const uint32_t kept = accept(told, round.parents + item.first, round.choices + item.first, item.n,
                                     out.path + item.first, &out.anchor[i]);
        const uint32_t n = asked.items[i].n; // its anchor and its drafts
        if (line.n_past() + kept + n - 1 >= c.n_ctx) {
            return false;
        }
        pages += line.pages_wanted(kept + std::max(n, n > 1 ? use(asked.drafter).reach(n) : 0));
        out.n[i] = kept;
    }
    return pages <= engine_.cache().pages.n_free() && !engine_.cancel().is_raised();
}

// Commits what a round accepts, and enqueues the one that was asked for behind it. What fails is that one's error.
void Rounds::go_on(const Round &round, Round &asked, const Accepted &accepted) {
    RoundItem items[MAX_ROWS];
    for (uint32_t i = 0; i < asked.n_items; i++) {
        items[i] = {round.items[i].sequence.lock(),
                    nullptr,
                    nullptr,
                    asked.items[i].n,
                    accepted.anchor[i],
                    asked.drafter};
    }
    hold(asked, items);
    try {
        enqueue(asked, [&] {
            for (uint32_t i = 0; i < asked.n_items; i++) {
                asked.items[i].held->line().commit(accepted.path + round.items[i].first, accepted.n[i]);
            }
            fill(asked, items, asked.n_items);
            enqueue_drafts(items, asked.n_items);
            enqueue_verify(asked);
        });
    } catch (const Error &) {
        // its own wait says so
    }
}

// ---- draft ----

const DrafterUse &Rounds::use(uint32_t drafter) const {
    const std::vector<DrafterUse> &uses = engine_.params().cache.drafters;
    if (drafter >= uses.size()) {
        fail(LUCE_E_ARG, "drafter %u: the engine was opened with %zu", drafter, uses.size());
    }
    return uses[drafter];
}

void Rounds::check_draft(const DraftItem &item, uint32_t most) const {
    const uint32_t n_ctx = engine_.params().cache.n_ctx, n_past = item.sequence->line().n_past();
    item.sequence->check_usable();
    if (item.n < 1 || item.n > most) {
        fail(LUCE_E_ARG, "a draft has 1 to %u tokens, got %u", most, item.n);
    }
    engine_.check_tokens(&item.anchor, 1);
    if (n_past == 0) {
        fail(LUCE_E_STATE, "a draft needs a committed token: prefill comes first");
    }
    if (n_past + item.n >= n_ctx) {
        fail(LUCE_E_CONTEXT, "%u drafts would reach position %u of a context of %u", item.n, n_past + item.n,
             n_ctx);
    }
}

void Rounds::draft(uint32_t drafter, const DraftItem *items, uint32_t n_items) {
    settle();
    engine_.check_cancelled();
    begin_draft(drafter, items, n_items);
}

void Rounds::begin_draft(uint32_t drafter, const DraftItem *items, uint32_t n_items) {
    const DrafterUse &by = use(drafter);
    uint32_t pages = 0;
    for (uint32_t i = 0; i < n_items; i++) {
        check_draft(items[i], by.n_draft);
        pages += items[i].sequence->line().pages_wanted(by.reach(items[i].n));
    }
    engine_.need_pages(pages);
    by.n_block > 0 ? draft_blocks(drafter, items, n_items) : draft_chains(drafter, items, n_items);
}

// Takes the pages that an item's drafts write, and pays what its drafter has not seen.
void Rounds::prepare(uint32_t drafter, const DraftItem &item) {
    const DrafterUse &by = use(drafter);
    item.sequence->line().take_pages(by.reach(item.n));
    if ((engine_.cache().lagging() >> by.drafter & 1) != 0) {
        engine_.feed_lagging(item.sequence->line());
    }
}

// A step for each link, of those whose chains are so long: one that fails takes these sequences along alone.
void Rounds::draft_chains(uint32_t drafter, const DraftItem *items, uint32_t n_items) {
    uint32_t longest = 0;
    for (uint32_t i = 0; i < n_items; i++) {
        longest = std::max(longest, items[i].n);
    }
    if (n_items == 1 && longest > 1 && engine_.step().has_chains()) {
        engine_.in_step([&] { draft_chain(drafter, items[0]); });
        return;
    }
    for (uint32_t link = 0; link < longest; link++) {
        engine_.in_step([&] { draft_link(drafter, items, n_items, link); });
    }
}

// A step of all links of one sequence's chain.
void Rounds::draft_chain(uint32_t drafter, const DraftItem &item) {
    Sequence &sequence = *item.sequence;
    sequence.begin_step();
    for (uint32_t link = 0; link < item.n; link++) {
        Batch batch(engine_.step().draft_host(link), engine_.cache());
        if (link == 0) {
            prepare(drafter, item);
        }
        batch.add_draft(sequence.line(), sequence.choice_ctl(), item.anchor, use(drafter), link);
    }
    engine_.step().draft_chain(drafter, item.n);
    sequence.line().drafted(drafter, item.anchor, item.n);
    sequence.fail_with("");
}

void Rounds::draft_link(uint32_t drafter, const DraftItem *items, uint32_t n_items, uint32_t link) {
    for (uint32_t i = 0; link == 0 && i < n_items; i++) {
        items[i].sequence->begin_step(); // all of them fail with it, also those that it has not come to
    }
    Batch batch(engine_.step().draft_host(link), engine_.cache());
    for (uint32_t i = 0; i < n_items; i++) {
        if (items[i].n > link) {
            Sequence &sequence = *items[i].sequence;
            if (link == 0) {
                prepare(drafter, items[i]);
            }
            batch.add_draft(sequence.line(), sequence.choice_ctl(), items[i].anchor, use(drafter), link);
        }
    }
    const uint32_t width = engine_.step().draft_width(batch.n_rows());
    batch.fill_up(width);
    engine_.step().draft(drafter, width, link, batch.n_pages());
    for (uint32_t i = 0; i < n_items; i++) {
        if (items[i].n == link + 1) {
            items[i].sequence->line().drafted(drafter, items[i].anchor, items[i].n);
            items[i].sequence->fail_with("");
        }
    }
}

// A step for as many blocks as it has room for.
void Rounds::draft_blocks(uint32_t drafter, const DraftItem *items, uint32_t n_items) {
    const uint32_t at_once = drafted_at_once(engine_.params().cache, use(drafter));
    for (uint32_t first = 0; first < n_items; first += at_once) {
        engine_.in_step([&] {
            draft_some_blocks(drafter, items + first, std::min(at_once, n_items - first), first / at_once);
        });
    }
}

void Rounds::draft_some_blocks(uint32_t drafter, const DraftItem *items, uint32_t n_items, uint32_t index) {
    const DrafterUse &by = use(drafter);
    const int32_t mask = engine_.model().weights().drafters[by.drafter]->mask_token;
    for (uint32_t i = 0; i < n_items; i++) {
        items[i].sequence->begin_step();
    }
    Batch batch(engine_.step().draft_host(index), engine_.cache());
    for (uint32_t i = 0; i < n_items; i++) {
        Sequence &sequence = *items[i].sequence;
        prepare(drafter, items[i]);
        batch.add_block(sequence.line(), sequence.choice_ctl(), items[i].anchor, by, mask);
    }
    engine_.step().draft(drafter, n_items * by.n_block, index, batch.n_pages());
    for (uint32_t i = 0; i < n_items; i++) {
        items[i].sequence->line().drafted(drafter, items[i].anchor, items[i].n);
        items[i].sequence->end_step(Sequence::Rows::drafted, items[i].n + by.first_row(), i * by.n_block);
    }
}

} // namespace luce
