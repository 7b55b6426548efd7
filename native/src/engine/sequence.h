// A sequence is one timeline in an engine, as its caller sees it: it checks arguments, makes choices and
// keeps failures. What it remembers is its Timeline's.
#pragma once

#include "engine/engine.h"
#include "engine/lookup.h"
#include "engine/penalties.h"

namespace luce {

class Sequence {
public:
    explicit Sequence(std::shared_ptr<Engine> engine); // it fails with E_MEMORY when all slots are taken

    const std::shared_ptr<Engine> &engine() const { return engine_; }
    luce_sequence_info info() const;
    void set_sampling(const ChoiceCtl &choice) { choice_ = choice; }
    // luce_sequence_set_penalties; without any the caller does not choose itself.
    void set_penalties(const luce_penalties *penalties);

    void reset();
    void close() { closed_ = true; } // a step that is under way may hold it a while
    bool closed() const { return closed_; }
    void get_draft(int32_t *tokens, uint32_t n);
    void get_lists(const luce_lists &lists);
    uint32_t lookup(int32_t anchor, int32_t *draft, uint32_t most, uint32_t *matched);
    void commit(const int32_t *path, uint32_t n);
    void read_logits(uint32_t row, float *out);
    void read_hidden(uint32_t row, float *out);
    void read_scores(uint32_t n_best, float *out, uint32_t n); // luce_sequence_get_scores
    // Returns the logits in memory of the sequence's own, which the next call overwrites.
    const float *logits(uint32_t row);
    // does what luce.h says of luce_sequence_choose
    int32_t choose(uint32_t row, const uint8_t *mask, uint64_t mask_size);
    void resume(Checkpoint &checkpoint);
    void settle(); // it pays debts and rejects verified rows: the caches then hold what is committed

    // The engine's steps call what follows.
    Timeline &line() { return line_; }
    const Timeline &line() const { return line_; }
    const ChoiceCtl &choice_ctl() const { return choice_; }
    bool chooses() const { return chooses_; }
    void check_usable() const;
    // Marks it as failed. end_step() clears that, and so does fail_with("") where a step was only enqueued.
    void begin_step() { failure_ = "a step did not end"; }
    // Rows says what the rows of a step are, whose logits may be read after it.
    enum class Rows { prompt, verified, drafted };
    // They are n_rows of the engine's rows, from first_row on.
    void end_step(Rows rows, uint32_t n_rows, uint32_t first_row);
    // Another step of the same call follows, after which the logits that the last one gave it may still be read: they are
    // kept ahead of it, and stay_last() ends the call.
    void keep_logits();
    void stay_last();
    void
    fail_with(const char *why) noexcept; // "" clears it; without memory for the text it keeps a shorter one

private:
    uint32_t
    row_of_step(uint32_t row) const; // it fails with E_STATE where the engine has run another step since
    void check_drafted(uint32_t n) const; // it fails with E_ARG unless the last draft has so many tokens

    std::shared_ptr<Engine> engine_;
    Timeline line_;
    ChoiceCtl choice_{}; // it says how its tokens are chosen
    Penalties penalties_;
    bool closed_ = false;
    bool chooses_ = false; // its rows' logits come to the host with each step
    std::vector<float> logits_; // they are those of one row
    std::vector<float>
        kept_; // of its last step where others have followed in the same call; else there are none
    std::unique_ptr<Lookup> lookup_; // it is over line_'s tokens, and made on its first use
    std::string failure_; // it says why it is failed; empty while it is not
    uint64_t serial_ = 0; // it names the step that has its logits
    Rows rows_ = Rows::prompt; // they are n_rows_ rows of that step, from first_row_ on
    uint32_t n_rows_ = 0, first_row_ = 0;
};

// Returns the token of a target's choice for this position. It fails with E_NUMERIC where the logits were not finite.
int32_t checked(const Choice &choice, uint64_t position);

} // namespace luce
