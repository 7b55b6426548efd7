// Verifies in two parts: a step is started, and its results are asked for later. A step may follow another one before the
// host knows what that chose.
#include "engine/accept.h"
#include "engine/engine.h"
#include "engine/sequence.h"

#include <algorithm>
#include <utility>

namespace luce {

// Returns the parents of an item's rows, and writes their depths.
std::vector<int32_t> Engine::check_item(const VerifyItem &item, uint32_t *depth) const {
    const CacheParams &c = params_.cache;
    const Timeline &line = item.sequence->line();
    item.sequence->check_usable();
    if (item.n < 1 || item.n > c.n_rows) {
        fail(LUCE_E_ARG, "a sequence has 1 to %u rows in a step, got %u", c.n_rows, item.n);
    }
    if (item.tokens != nullptr) {
        check_tokens(item.tokens, item.n);
    } else if (line.n_drafted() == 0 || item.n > line.n_drafted() + 1) {
        fail(LUCE_E_STATE, "%u rows without tokens: %u drafts are there to verify", item.n, line.n_drafted());
    } else if (item.parents != nullptr) {
        fail(LUCE_E_ARG, "drafts on the device are a chain: parents must be null");
    }
    std::vector<int32_t> parents(item.n);
    for (uint32_t i = 0; i < item.n; i++) {
        parents[i] = item.parents == nullptr ? int32_t(i) - 1 : item.parents[i];
    }
    check_parents(parents.data(), item.n);
    for (uint32_t i = 0; i < item.n; i++) {
        const int32_t parent = parents[i];
        // Rows are in depth-first order: each follows the one before it, or one of that row's ancestors.
        int32_t up = int32_t(i) - 1;
        while (up >= 0 && up != parent) {
            up = parents[size_t(up)];
        }
        if (i > 0 && up < 0) {
            fail(LUCE_E_ARG, "row %u with parent %d is not in depth-first order", i, parent);
        }
        depth[i] = parent < 0 ? 0 : depth[parent] + 1;
        if (line.n_past() + depth[i] >= c.n_ctx) {
            fail(LUCE_E_CONTEXT, "row %u would be at position %u of a context of %u", i,
                 line.n_past() + depth[i], c.n_ctx);
        }
    }
    return parents;
}

// Fills in and begins the step of a flight whose items are set, in an in_step().
void Engine::take_off(Flight &flight) {
    uint32_t wide = 0;
    bool moves = false;
    for (const Flight::Item &item : flight.items) {
        item.held->begin_step(); // all of them fail with it, also those that it has not come to
        wide += uint32_t(item.tokens.size());
        moves = moves || item.held->line().moves_head();
    }
    wide = moves ? std::max(wide, 2u) : wide; // a step of one row moves nothing of the head
    flight.fed = !cache_.has_head() || feeds_head(wide);
    Batch batch(step_->verify_host(), cache_);
    for (const Flight::Item &item : flight.items) {
        Sequence &sequence = *item.held;
        const uint32_t n = uint32_t(item.tokens.size());
        sequence.line().take_pages(n);
        if (flight.fed || sequence.line().n_owed() == params_.cache.n_rows) {
            feed_head(sequence.line());
        }
        batch.add_verify(sequence.line(), sequence.choice_ctl(), n, item.parents.data(), item.tokens.data());
        if (sequence.chooses()) {
            step_->fetch_logits(batch.n_rows() - n, n);
        }
    }
    const uint32_t rows = batch.n_rows(), width = step_->verify_width(wide);
    batch.fill_up(width);
    flight.number = step_->start_verify(width, rows, batch.n_pages());
    for (const Flight::Item &item : flight.items) {
        item.held->fail_with(""); // it waits for its step, and has not failed
    }
}

void Engine::start(const std::vector<VerifyItem> &items) {
    settle();
    flights_.clear(); // nobody has asked for their results
    next_.reset();
    check_cancelled();
    begin_verify(items);
}

void Engine::begin_verify(const std::vector<VerifyItem> &items) {
    uint32_t pages = 0, rows = 0;
    uint32_t depth[MAX_ROWS];
    Flight flight;
    for (const VerifyItem &item : items) {
        if (rows + item.n > MAX_ROWS) {
            fail(LUCE_E_ARG, "a step has %d rows at most, got %u and more", MAX_ROWS, rows + item.n);
        }
        const Timeline &line = item.sequence->line();
        Flight::Item one{item.sequence, item.sequence, {}, check_item(item, depth + rows), LUCE_OK};
        for (uint32_t i = 0; i < item.n; i++) {
            flight.positions.push_back(line.n_past() + depth[rows + i] + 1);
            one.tokens.push_back(item.tokens != nullptr ? item.tokens[i]
                                 : i == 0               ? line.draft_anchor()
                                                        : -1 - line.draft_entry(int32_t(i) - 1));
        }
        rows += item.n;
        pages += line.pages_wanted(item.n);
        flight.items.push_back(std::move(one));
    }
    flight.choices.resize(rows);
    flight.tokens.resize(rows);
    need_pages(pages);
    in_step([&] { take_off(flight); });
    flights_.push_back(std::move(flight));
}

void Engine::follow() {
    check_cancelled();
    if (flights_.empty() || flights_.size() == STARTED || next_) {
        fail(LUCE_E_STATE, flights_.empty() ? "there is no step to follow: start one"
                                            : "a step follows already: wait for the one before it");
    }
    const CacheParams &c = params_.cache;
    Flight &before = flights_.back();
    Flight flight;
    uint32_t pages = 0;
    for (size_t i = 0; i < before.items.size(); i++) {
        const Flight::Item &item = before.items[i];
        const std::shared_ptr<Sequence> sequence = item.sequence.lock();
        if (!sequence || sequence->closed() || item.tokens.size() != 1 ||
            (before.ended && sequence->line().n_verified() != 1)) {
            fail(LUCE_E_STATE, "item %zu of the last step %s", i,
                 item.tokens.size() != 1 ? "had more rows than one" : "was closed, or its row dropped");
        }
        sequence->check_usable();
        const Timeline &line = sequence->line();
        if (line.n_past() + 1 >= c.n_ctx) {
            fail(LUCE_E_CONTEXT, "a row would be at position %u of a context of %u", line.n_past() + 1,
                 c.n_ctx);
        }
        const int32_t token =
            before.ended ? before.choices[i] : -1 - cache_.choice_entry(before.number, uint32_t(i));
        flight.items.push_back({sequence, sequence, {token}, {-1}, LUCE_OK});
        flight.positions.push_back(line.n_past() + 2);
        pages += line.pages_wanted(2);
    }
    flight.choices.resize(flight.items.size());
    flight.tokens.resize(flight.items.size());
    need_pages(pages);
    in_step([&] {
        for (const Flight::Item &item : flight.items) {
            item.held->begin_step();
        }
        if (!before.ended) {
            step_->mark_end(before.number);
        }
        before.followed = true; // its rows are booked here, and not once more as it lands
        for (size_t i = 0; i < flight.items.size(); i++) {
            Timeline &line = flight.items[i].held->line();
            const Flight::Item &item = before.items[i];
            const int32_t path = 0;
            if (!before.ended) {
                line.verified(item.tokens, item.parents, before.fed);
            }
            line.commit(&path, 1);
        }
        take_off(flight);
    });
    flights_.push_back(std::move(flight));
}

void Engine::follow_with(Next next) {
    check_cancelled();
    if (flights_.size() != 1 || next_) {
        fail(LUCE_E_STATE, flights_.empty() ? "there is no step to follow: start one"
                                            : "a step follows already: wait for the one before it");
    }
    const CacheParams &c = params_.cache;
    const size_t n_items = flights_.front().items.size();
    if (next.n_drafts.size() != n_items) {
        fail(LUCE_E_ARG, "drafts of %zu sequences, but the step was started with %zu", next.n_drafts.size(),
             n_items);
    }
    uint32_t rows = 0;
    for (const uint32_t n : next.n_drafts) {
        const uint32_t most = n > 0 ? std::min(most_drafts(next.source), c.n_rows - 1) : 0;
        if (n > most) {
            fail(LUCE_E_ARG, "a sequence has at most %u drafts in a step, got %u", most, n);
        }
        rows += std::min(n, uint32_t(MAX_ROWS)) + 1;
    }
    if (rows > MAX_ROWS) {
        fail(LUCE_E_ARG, "a step has %d rows at most, got %u", MAX_ROWS, rows);
    }
    next_ = std::move(next);
}

// Returns what the choices of a flight accept of each sequence, or nothing where something stands in the way of what
// comes next.
std::vector<Engine::Accepted> Engine::accepted(const Flight &flight, const Next &next) const {
    const CacheParams &c = params_.cache;
    std::vector<Accepted> all;
    uint32_t pages = 0;
    for (size_t i = 0, row = 0; i < flight.items.size(); row += flight.items[i].tokens.size(), i++) {
        const Flight::Item &item = flight.items[i];
        const size_t n = item.tokens.size();
        const std::shared_ptr<Sequence> sequence = item.sequence.lock();
        const bool finite = std::all_of(&flight.tokens[row], &flight.tokens[row] + n,
                                        [](int32_t token) { return token >= 0; });
        if (!sequence || sequence->closed() || sequence->chooses() || sequence->line().n_verified() != n ||
            !finite) {
            return {};
        }
        const Timeline &line = sequence->line();
        Accepted one{sequence, {}, 0};
        one.path =
            accept(&flight.tokens[row], item.parents.data(), &flight.choices[row], uint32_t(n), &one.anchor);
        const uint32_t drafts = next.n_drafts[i], kept = uint32_t(one.path.size());
        if (line.n_past() + kept + drafts >= c.n_ctx) {
            return {};
        }
        const bool block = drafts > 0 && next.source == Source::dflash;
        pages += line.pages_wanted(kept + std::max(drafts + 1, block ? c.n_block : 0));
        all.push_back(std::move(one));
    }
    return pages > cache_.pages.n_free() || cancel_.is_raised() ? std::vector<Accepted>() : all;
}

// Commits what a flight's choices accept, and begins the drafts and the verify that come next. Returns false where
// something stands in the way, and then nothing was done. What fails after that is the error of the round that was begun.
bool Engine::go_on(const Flight &flight, const Next &next) {
    std::vector<Accepted> all;
    std::vector<DraftItem> drafts;
    std::vector<VerifyItem> rows;
    Flight lost; // it is the round where it fails, and made before, as there may be no memory then
    try {
        all = accepted(flight, next);
        uint32_t n_rows = 0;
        for (size_t i = 0; i < all.size(); i++) {
            const uint32_t n = next.n_drafts[i];
            if (n > 0) {
                drafts.push_back({all[i].sequence.get(), all[i].anchor, n});
            }
            rows.push_back({all[i].sequence, n > 0 ? nullptr : &all[i].anchor, nullptr, n + 1});
            lost.items.push_back({all[i].sequence, nullptr, {}, {}, LUCE_OK});
            n_rows += n + 1;
        }
        lost.choices.resize(n_rows);
    } catch (const std::bad_alloc &) {
        return false;
    }
    if (all.empty()) {
        return false;
    }
    try {
        in_step([&] {
            for (const Accepted &one : all) {
                one.sequence->line().commit(one.path.data(), uint32_t(one.path.size()));
            }
            if (!drafts.empty()) {
                begin_draft(next.source, drafts.data(), uint32_t(drafts.size()));
            }
            begin_verify(rows);
        });
    } catch (const Error &e) {
        for (const Accepted &one : all) {
            one.sequence->fail_with(e.what());
        }
        lost.error = e;
        lost.ended = true;
        flights_.push_back(std::move(lost));
    }
    return true;
}

// Books a step that has ended.
void Engine::land(Flight &flight, Flight *next) {
    step_->finish_verify(flight.number);
    const uint32_t vocab = n_vocab();
    for (size_t i = 0, row0 = 0; i < flight.items.size(); row0 += flight.items[i].tokens.size(), i++) {
        Flight::Item &item = flight.items[i];
        Sequence &sequence = *item.held;
        const size_t n = item.tokens.size();
        if (item.status != LUCE_OK) { // the step before it failed
            continue;
        }
        for (int32_t &token : item.tokens) {
            int32_t given = token;
            if (token < 0) { // the kernel did the same to the draft (TokensArgs)
                const Choice &draft = step_->drafted(-1 - token);
                token = uint32_t(draft.token) < vocab ? draft.token : 0;
                given = draft.not_finite ? -1 : token;
            }
            flight.tokens[row0 + size_t(&token - item.tokens.data())] = given;
        }
        if (!flight.followed) {
            sequence.line().verified(item.tokens, item.parents, flight.fed);
            sequence.end_step(Sequence::Rows::verified, uint32_t(n), uint32_t(row0));
        }
        try {
            for (size_t row = row0; row < row0 + n; row++) {
                flight.choices[row] = checked(step_->choices(flight.number)[row], flight.positions[row]);
            }
            if (next != nullptr) {
                next->items[i].tokens[0] = flight.choices[row0];
            }
        } catch (const Error &e) {
            item.status = e.code();
            sequence.fail_with(e.what());
            flight.not_finite = flight.not_finite ? flight.not_finite : e;
            if (next != nullptr) {
                next->items[i].status = e.code();
                next->not_finite = flight.not_finite;
            }
        }
    }
}

void Engine::end(Flight &flight) {
    if (flight.ended) {
        return;
    }
    Flight *next = &flight != &flights_.back() ? &flights_.back() : nullptr;
    try {
        in_step([&] { land(flight, next); });
    } catch (const Error &e) {
        flight.error = e;
        for (Flight::Item &item : flight.items) {
            item.held->fail_with(e.what());
        }
        if (next != nullptr) {
            end(*next);
            next->error = flight.error;
            for (const Flight::Item &item : flight.items) {
                item.held->fail_with(e.what());
            }
        }
    }
    flight.ended = true;
    for (Flight::Item &item : flight.items) {
        item.held.reset();
    }
}

void Engine::let_go() {
    for (const Flight &flight : flights_) {
        for (const Flight::Item &item : flight.items) {
            if (item.held && item.held->closed()) {
                return settle();
            }
        }
    }
}

void Engine::settle() {
    for (Flight &flight : flights_) {
        end(flight);
    }
}

bool Engine::wait(int32_t *choices, int32_t *tokens, uint32_t n_rows, luce_status *status, uint32_t n_items) {
    if (flights_.empty()) {
        fail(LUCE_E_STATE, "there is nothing to wait for: start a step");
    }
    if (flights_.front().choices.size() != n_rows || flights_.front().items.size() != n_items) {
        fail(LUCE_E_ARG, "%u rows of %u sequences, but the step was started with %zu of %zu", n_rows, n_items,
             flights_.front().choices.size(), flights_.front().items.size());
    }
    end(flights_.front());
    const Flight flight = std::move(flights_.front());
    flights_.erase(flights_.begin());
    const std::optional<Next> next = std::exchange(next_, std::nullopt);
    if (flight.error) {
        throw Error(*flight.error);
    }
    bool failed = false;
    for (size_t i = 0, row = 0; i < n_items; row += flight.items[i].tokens.size(), i++) {
        status[i] = flight.items[i].status;
        failed = failed || status[i] != LUCE_OK;
        if (status[i] == LUCE_OK) {
            const size_t n = flight.items[i].tokens.size();
            std::copy_n(flight.choices.begin() + long(row), n, choices + row);
            if (tokens != nullptr) {
                std::copy_n(flight.tokens.begin() + long(row), n, tokens + row);
            }
        }
    }
    if (failed) {
        throw Error(*flight.not_finite);
    }
    return next && go_on(flight, *next);
}

} // namespace luce
