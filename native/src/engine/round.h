// A round drafts, verifies and books rows of several sequences of one engine. Rounds has those that were begun and not
// waited for: two at most, in their order. There is one way in, begin(), and one way out, wait().
//
//   state      means                                           next                                  where it fails
//   asked      its anchors are what the round ahead chooses,   enqueued by the wait for that round,  nothing was done:
//              and the host has to know them first, since that or dropped by it, or by a begin() of  begin() throws
//              one has candidates or this one drafts           known anchors
//   enqueued   its step is on the stream and holds its         landed, in order: by its wait, or by  failed, and with it
//              sequences, so that one that is closed ends      a call that has to know what it did   the one behind it
//              with it
//   landed     its choices are on the host, and its rows are   gone by its wait, or by a begin() of  an item whose logits
//              booked                                          known anchors                         are not finite fails
//                                                                                                    alone, also behind it
//   failed     its step failed, and so have its sequences;     the same                              -
//              its own wait says why
//
// - A round of known anchors lets all others land and forgets their results. One whose anchors are what the round ahead
//   chooses is enqueued by begin() where that and this have one row of each sequence, since the device then finds its
//   tokens by itself; else it is asked. On the stream it comes behind the mark_end() of the round ahead, whose wait is
//   for that mark alone.
// - The rows of a round are booked once (Timeline::verified, and commit where a round goes on): as it lands, or before
//   that by the round that is enqueued behind it.
// - begin() marks all sequences as failed until their step is enqueued, so what fails in between fails all of them,
//   also those that it had not come to. A failed begin() leaves no round. The one ahead keeps its results, and rows of it that
//   begin() had committed by then stay booked. Sequences stay failed until a reset or resume, which let all rounds land
//   first.
// - A cancel that is due stops begin() and draft() before they do anything, and drops a round that was asked.
// - What a round that goes on needs is checked before it commits anything: pages, room in the context, finite logits,
//   rows that nobody rejected, sequences that are open and do not choose for themselves. Else it is dropped.
// - No transition takes memory. What a step does to the debts of its sequences is in engine/cache.h.
#pragma once

#include "engine/cache.h"

#include <memory>
#include <optional>

namespace luce {

class Engine;
class Sequence;

struct DraftItem {
    Sequence *sequence;
    int32_t anchor;
    uint32_t n;
};

// What a round is begun with of one sequence (luce_round_item).
struct RoundItem {
    std::shared_ptr<Sequence>
        sequence; // null where the anchor is what the round ahead chooses: its items tell
    const int32_t *tokens, *parents; // (n); tokens may be null, and parents for a chain
    uint32_t n;
    int32_t anchor; // where tokens is null: a token, LUCE_CHOSEN or LUCE_DRAFTED
    uint32_t drafter; // of the engine's, which drafts after such an anchor

    bool chosen() const { return tokens == nullptr && anchor == LUCE_CHOSEN; }
    bool drafts() const { return tokens == nullptr && anchor != LUCE_DRAFTED && n > 1; } // the device is to
};

struct Round {
    enum class State { asked, enqueued, landed, failed };
    struct Item {
        std::weak_ptr<Sequence> sequence;
        std::shared_ptr<Sequence> held; // while it is enqueued
        uint32_t first, n; // its rows are first .. first + n - 1
        luce_status status;
    };

    State state;
    uint32_t n_items, n_rows;
    Item items[MAX_ROWS];
    // By row. A token that the device has is written as -1 - its entry of the drafts until the round lands.
    int32_t tokens[MAX_ROWS], parents[MAX_ROWS]; // parents count from the item's first row
    uint32_t positions[MAX_ROWS]; // of the tokens that are chosen
    // By row, once it has landed. `told` are the tokens, or -1 for a draft whose logits were not finite.
    int32_t choices[MAX_ROWS], told[MAX_ROWS];

    uint32_t drafter; // of its drafts, while it is asked
    uint32_t number; // of its step: the pinned table of its choices
    bool seen; // its rows are fed to the drafters that lag
    bool booked; // the round behind it has committed its rows
    std::optional<Error> error; // failed: of all of it; landed: of the first item that was not finite
};

class Rounds {
public:
    explicit Rounds(Engine &engine) : engine_(engine) {}

    // What luce.h says of luce_engine_draft, luce_engine_begin and luce_engine_wait. wait() says in *left how many rounds
    // can be waited for after it, also where it throws what the round failed with.
    void draft(uint32_t drafter, const DraftItem *items, uint32_t n);
    void begin(const RoundItem *items, uint32_t n);
    void wait(int32_t *choices, int32_t *tokens, uint32_t n_rows, luce_status *status, uint32_t n_items,
              uint32_t *left);

    void settle(); // all that are enqueued land
    void settle_closed(); // the same, but only where one of them holds a sequence that was closed meanwhile

private:
    // What a round accepts of each item: n rows of its path (from the item's first), and the anchor that follows them.
    struct Accepted {
        int32_t path[MAX_ROWS];
        uint32_t n[MAX_ROWS];
        int32_t anchor[MAX_ROWS];
    };

    Round &at(uint32_t i) { return all_[(oldest_ + i) % MAX_ENQUEUED]; }
    const DrafterUse &use(uint32_t drafter) const; // E_ARG: there is none
    void check_draft(const DraftItem &item, uint32_t most) const;
    void check_known(const RoundItem &item) const;
    void begin_known(const RoundItem *items, uint32_t n);
    void begin_chosen(const RoundItem *items, uint32_t n);
    void ask(const RoundItem *items, uint32_t n);
    void follow();

    void fill(Round &round, const RoundItem *items, uint32_t n) const;
    template <typename F> void enqueue(Round &round, const F &steps);
    void enqueue_drafts(const RoundItem *items, uint32_t n);
    void enqueue_verify(Round &round);
    void land(Round &round);
    void book(Round &round, Round *behind);
    bool accepts(const Round &round, const Round &asked, Accepted &out) const;
    void go_on(const Round &round, Round &asked, const Accepted &accepted);
    static void hold(Round &round, const RoundItem *items);
    static void release(Round &round);
    static void fail_all(Round &round, const Error &error);

    void begin_draft(uint32_t drafter, const DraftItem *items, uint32_t n);
    void prepare(uint32_t drafter, const DraftItem &item);
    void draft_chains(uint32_t drafter, const DraftItem *items, uint32_t n);
    void draft_chain(uint32_t drafter, const DraftItem &item);
    void draft_link(uint32_t drafter, const DraftItem *items, uint32_t n, uint32_t link);
    void draft_blocks(uint32_t drafter, const DraftItem *items, uint32_t n);
    void draft_some_blocks(uint32_t drafter, const DraftItem *items, uint32_t n, uint32_t index);

    Engine &engine_;
    Round all_[MAX_ENQUEUED];
    uint32_t oldest_ = 0, n_ = 0;
};

} // namespace luce
