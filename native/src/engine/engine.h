// An engine is the working memory of a model, and counts it. Its steps are begun and end as rounds (engine/round.h). What
// to draft, when to stop and what to do on failure is the caller's to decide.
#pragma once

#include "abi/cancel.h"
#include "engine/round.h"
#include "step/step.h"

#include <mutex>
#include <new>

namespace luce {

class Checkpoint;

class Engine {
public:
    static EngineParams resolve(const Model &model, const luce_engine_params *params);
    static luce_memory plan(const Model &model, const EngineParams &params);
    // Returns how many layers each of the model's devices had best have, for this engine.
    static std::vector<uint32_t> share_layers(const Model &model, const EngineParams &params);

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

    Rounds &rounds() { return rounds_; }

    // What luce.h says of luce_engine_get_experts and luce_engine_move_experts.
    void read_experts(int32_t *counts, int32_t *slots, uint32_t n);
    void move_experts(const ExpertMove *moves, uint32_t n);

    // Rounds, sequences and checkpoints call what follows.
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
    // With images, names below -1 of rows of images pass where the model takes those.
    void check_tokens(const int32_t *tokens, uint32_t n, bool images = false) const;
    void check_cancelled();
    // Makes sure that so many pages can be taken, or a place for a checkpoint, else fails with E_MEMORY. Of checkpoints that
    // are leaving the device it takes what is copied already, and waits for no more of them than is needed.
    void need_pages(uint32_t n);
    void need_checkpoint();
    // Enqueues a step that shows the drafters that lag the rows that they have not seen.
    void feed_lagging(Timeline &line);
    void
    reclaim(); // it waits for all checkpoints that are leaving the device, whose pages and slots are free then

    // Takes note of one whose copy to the host is about to begin.
    void leaving(std::weak_ptr<Checkpoint> checkpoint);

private:
    // Has one of the checkpoints that are leaving give back a portion more: of those that still have their `slot` alone, or of
    // any. Says whether one did.
    bool take_portion(bool slot);

    static luce_memory memory_of(const Model &model, const Cache &cache, const StepSizes &sizes);

    std::shared_ptr<const Model> model_;
    EngineParams params_;
    Cache cache_;
    std::unique_ptr<Step> step_;
    std::vector<std::weak_ptr<Checkpoint>> leaving_;
    Rounds rounds_{*this};
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
