// An engine is the working memory of a model, with the verbs of the round over it. It runs steps for its
// sequences. What to draft, when to stop and what to do on failure is the caller's to decide.
#pragma once

#include "abi/cancel.h"
#include "step/step.h"

#include <mutex>
#include <new>
#include <optional>

namespace luce {

class Checkpoint;
class Sequence;

// Who drafts (luce_source).
enum class Source { nextn, dflash, part }; // its values are those of luce_source

struct DraftItem {
    Sequence *sequence;
    int32_t anchor;
    uint32_t n;
};

struct VerifyItem {
    std::shared_ptr<Sequence> sequence;
    const int32_t *tokens, *parents; // luce_verify_item says what they hold
    uint32_t n;
};

// A flight is a verify that was started, until its results are asked for.
struct Flight {
    struct Item {
        std::weak_ptr<Sequence> sequence;
        std::shared_ptr<Sequence> held; // until the step has ended
        std::vector<int32_t> tokens,
            parents; // a token on the device is written as -1 - its entry of the drafts
        luce_status status;
    };
    std::vector<Item> items;
    std::vector<uint32_t> positions; // by row, those of the tokens to be chosen
    std::vector<int32_t> choices; // by row, once it has ended
    std::vector<int32_t>
        tokens; // by row, once it has ended: those it had, and -1 for a draft whose logits were not finite
    uint32_t number = 0; // the step's
    bool fed = false; // its rows were fed to the head
    bool followed = false; // its rows are committed, since a step follows it
    bool ended = false;
    std::optional<Error> error; // all of it failed
    std::optional<Error> not_finite; // the first of its items that failed alone did so
};

// What follows a flight once the host knows its choices: so many drafts of each of its sequences, and their verify.
struct Next {
    std::vector<uint32_t> n_drafts;
    Source source;
};

class Engine {
public:
    static EngineParams resolve(const Model &model, const luce_engine_params *params);
    static luce_memory plan(const Model &model, const EngineParams &params);

    Engine(std::shared_ptr<const Model> model, const EngineParams &params);

    luce_engine_info info() const;
    const EngineParams &params() const { return params_; }
    const Model &model() const { return *model_; }
    uint32_t n_vocab() const { return model_->hparams().n_vocab; }
    uint32_t n_embd() const { return model_->hparams().n_embd; }
    Cache &cache() { return cache_; }
    const Cache &cache() const { return cache_; }
    Step &step() { return *step_; }
    std::recursive_mutex &mutex() { return mutex_; } // calls on an engine wait for each other
    CancelFlag &cancel() { return cancel_; }

    void draft(Source source, const DraftItem *items, uint32_t n);
    // Begins a verify; follow() begins one of the choices after the only rows of the last one. wait() ends the oldest of
    // them: E_NUMERIC means that it was done, and each status says for which item. tokens may be null. wait() then begins
    // what follow_with() has asked for, and returns whether it has.
    void start(const std::vector<VerifyItem> &items);
    void follow();
    void follow_with(Next next);
    bool wait(int32_t *choices, int32_t *tokens, uint32_t n_rows, luce_status *status, uint32_t n_items);
    void settle(); // it waits for them all, whose results wait() still gives
    void let_go(); // it waits for those that hold a sequence which was closed

    // Sequences and checkpoints call what follows.
    // in_step() runs one step, begins it or ends it: its sequences count as failed until that has worked. Where it finds
    // no host memory the error is E_DEVICE. Other codes of which callers know that nothing was done become E_INTERNAL.
    template <typename F> void in_step(const F &step) {
        static const Error no_memory(LUCE_E_DEVICE, "a step found no host memory");
        try {
            step();
        } catch (const std::bad_alloc &) {
            throw no_memory;
        } catch (const Error &e) {
            if (e.code() != LUCE_E_DEVICE && e.code() != LUCE_E_INTERNAL) {
                fail(LUCE_E_INTERNAL, "a step failed: %s", e.what());
            }
            throw;
        }
    }
    void check_tokens(const int32_t *tokens, uint32_t n) const;
    void check_cancelled();
    // Makes sure that so many pages can be taken, else fails with E_MEMORY. It waits for checkpoints that are
    // leaving the device where that helps.
    void need_pages(uint32_t n);
    void feed_head(Timeline &line); // it pays what the sequence owes the NextN head, without waiting
    void reclaim(); // it waits for all such checkpoints, whose pages and slots are free then

    // Checkpoints travel on this stream, beside the steps. It is null on the CPU, where copies are done at
    // once.
    ggml_backend_t copies() const { return copies_.get(); }
    // Takes note of one whose copy to the host is about to begin.
    void leaving(std::weak_ptr<Checkpoint> checkpoint);

private:
    static luce_memory memory_of(const Model &model, const Cache &cache, const StepSizes &sizes);
    uint32_t most_drafts(Source source) const; // of a sequence; E_STATE where the engine has none of it
    void begin_draft(Source source, const DraftItem *items, uint32_t n);
    void begin_verify(const std::vector<VerifyItem> &items);
    struct Accepted {
        std::shared_ptr<Sequence> sequence;
        std::vector<int32_t> path;
        int32_t anchor; // it follows the path
    };
    std::vector<Accepted> accepted(const Flight &flight, const Next &next) const;
    bool go_on(const Flight &flight, const Next &next);
    void draft_chains(const DraftItem *items, uint32_t n, bool part);
    void draft_chain(const DraftItem &item, bool part);
    void draft_link(const DraftItem *items, uint32_t n, uint32_t link, bool part);
    void draft_blocks(const DraftItem *items, uint32_t n);
    void draft_some_blocks(const DraftItem *items, uint32_t n, uint32_t index);
    std::vector<int32_t> check_item(const VerifyItem &item, uint32_t *depth) const;
    void take_off(Flight &flight);
    void land(Flight &flight, Flight *next);
    void end(Flight &flight);

    std::shared_ptr<const Model> model_;
    EngineParams params_;
    Cache cache_;
    std::unique_ptr<Step> step_;
    Backend copies_;
    std::vector<std::weak_ptr<Checkpoint>> leaving_;
    std::vector<Flight> flights_; // the oldest comes first
    std::optional<Next> next_; // it follows the only flight
    std::recursive_mutex mutex_;
    CancelFlag cancel_;
};

// Ends a sequence or checkpoint while no call runs on its engine, whichever thread holds it last.
struct DeleteLocked {
    template <typename Object> void operator()(Object *object) const {
        const std::shared_ptr<Engine> engine = object->engine(); // the engine has to outlive the lock on it
        const std::lock_guard<std::recursive_mutex> lock(engine->mutex());
        delete object;
    }
};

} // namespace luce
