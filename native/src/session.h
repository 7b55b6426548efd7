// One timeline: the verbs of the round over a cache and a step executor. The state machine above it
// (what to draft, when to stop) is the caller's.
#pragma once

#include "step.h"

namespace luce {

class Session {
public:
    static SessionParams resolve(const Model &model, const luce_session_params *params);
    static luce_memory plan(const Model &model, const SessionParams &params);

    Session(std::shared_ptr<const Model> model, const SessionParams &params);

    void reset();
    luce_session_info info() const;
    void set_sampling(const luce_sampling &sampling) { sampling_ = sampling; }

    int32_t prefill(const int32_t *tokens, uint32_t n);
    void draft(int32_t anchor, uint32_t n);
    void get_draft(int32_t *tokens, uint32_t n);
    void verify(const int32_t *tokens, const int32_t *parents, uint32_t n, int32_t *choices);
    void commit(const int32_t *path, uint32_t n);
    void read_logits(uint32_t row, float *out);
    // snapshot.cpp
    uint64_t save_size() const;
    void save(uint8_t *data);
    void restore(const uint8_t *data, uint64_t size);
    uint32_t n_vocab() const { return model_->hparams().n_vocab; }

private:
    void check_usable() const;
    void check_tokens(const int32_t *tokens, uint32_t n) const;
    int32_t choose(uint32_t row, uint64_t position);

    std::shared_ptr<const Model> model_;
    SessionParams params_;
    Cache cache_;
    std::unique_ptr<Step> step_;
    luce_sampling sampling_{};
    std::vector<float> logits_; // of one row, for sampling
    int32_t draft_anchor_ = 0;
    uint32_t n_drafted_ = 0; // of the last draft, until the timeline moves on
    bool failed_ = false;
};

} // namespace luce
