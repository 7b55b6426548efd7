#include "session.h"

#include "sampler.h"

#include <algorithm>
#include <cstring>
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

} // namespace

SessionParams Session::resolve(const Model &model, const luce_session_params *p) {
    luce_session_params none{};
    p = p == nullptr ? &none : p;
    const uint32_t trained = model.hparams().n_ctx_train;
    const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
    SessionParams out{};
    out.n_ctx = in_range("n_ctx", p->n_ctx, std::min(trained, 4096u), trained);
    out.n_rows = in_range("n_rows", p->n_rows, 1, LUCE_MAX_ROWS);
    out.n_chunk = std::min(in_range("n_chunk", p->n_chunk, 512, 4096), out.n_ctx);
    out.n_threads = in_range("n_threads", p->n_threads, std::min(cores, 16u), 512);
    out.kv_type = kv_type_of(p->kv_type);
    out.n_draft = p->n_draft;
    if (out.n_draft > LUCE_MAX_DRAFT || (out.n_draft > 0 && out.n_rows <= out.n_draft)) {
        fail(LUCE_E_ARG, "n_draft is %u, expected 0 to %d, and below n_rows, which is %u", out.n_draft,
             LUCE_MAX_DRAFT, out.n_rows);
    }
    if (out.n_draft > 0 && !model.weights().head) {
        fail(LUCE_E_ARG, "n_draft is %u, but the model was opened without a NextN head", out.n_draft);
    }
    return out;
}

static const NextN *head_of(const Model &model, const SessionParams &params) {
    return params.n_draft > 0 ? model.weights().head.get() : nullptr;
}

luce_memory Session::plan(const Model &model, const SessionParams &params) {
    const Cache cache(model.hparams(), head_of(model, params), params.kv_type, params.n_ctx, params.n_rows);
    const StepSizes sizes = Step::measure(model, cache, params);
    luce_memory m{};
    m.weights = model.weight_bytes();
    m.kv = cache.kv_bytes();
    m.state = cache.state_bytes();
    m.compute = sizes.compute + sizes.inputs;
    m.total = m.kv + m.state + m.compute + (model.device().gpu ? m.weights : 0);
    uint64_t total = 0;
    model.device().memory(&m.device_free, &total);
    return m;
}

Session::Session(std::shared_ptr<const Model> model, const SessionParams &params)
    : model_(std::move(model)), params_(params),
      cache_(model_->hparams(), head_of(*model_, params), params.kv_type, params.n_ctx, params.n_rows) {
    const luce_memory need = plan(*model_, params);
    check_memory(model_->device(), need.kv + need.state + need.compute,
                 format("a session of %u positions", params.n_ctx).c_str());
    cache_.allocate(model_->device());
    step_ = std::make_unique<Step>(*model_, cache_, params_);
    logits_.resize(model_->hparams().n_vocab);
}

void Session::reset() {
    cache_.clear();
    n_drafted_ = 0;
    failed_ = false;
}

luce_session_info Session::info() const {
    luce_session_info out{};
    out.memory_bytes = cache_.kv_bytes() + cache_.state_bytes() + step_->allocated();
    out.n_ctx = params_.n_ctx;
    out.n_rows = params_.n_rows;
    out.n_chunk = params_.n_chunk;
    out.n_threads = params_.n_threads;
    out.n_draft = params_.n_draft;
    out.n_past = cache_.n_past();
    out.n_verified = cache_.n_verified();
    out.failed = failed_;
    return out;
}

void Session::check_usable() const {
    if (failed_) {
        fail(LUCE_E_STATE, "the session has failed: reset or close it");
    }
}

void Session::check_tokens(const int32_t *tokens, uint32_t n) const {
    for (uint32_t i = 0; i < n; i++) {
        if (tokens[i] < 0 || uint32_t(tokens[i]) >= n_vocab()) {
            fail(LUCE_E_ARG, "token %u is %d, expected 0 to %u", i, tokens[i], n_vocab() - 1);
        }
    }
}

// The target's choice after a row of the last step. position: of the token to be chosen.
int32_t Session::choose(uint32_t row, uint64_t position) {
    const Step::Greedy &greedy = step_->greedy()[row];
    if (greedy.not_finite) {
        fail(LUCE_E_NUMERIC,
             "the logits of position %llu are not finite: the weights are damaged, or the model "
             "overflows; the session has failed",
             (unsigned long long) (position - 1));
    }
    if (sampling_.temperature == 0) {
        return greedy.token;
    }
    step_->read_logits(row, logits_.data());
    return sample(logits_.data(), n_vocab(), sampling_, position);
}

int32_t Session::prefill(const int32_t *tokens, uint32_t n) {
    check_usable();
    check_tokens(tokens, n);
    const uint32_t past = cache_.n_past();
    if (n > params_.n_ctx - past) {
        fail(LUCE_E_CONTEXT, "%u tokens after %u do not fit into a context of %u", n, past, params_.n_ctx);
    }
    failed_ = true; // until all of it has worked
    n_drafted_ = 0;
    for (uint32_t at = 0; at < n;) {
        const uint32_t room = params_.n_chunk - (past + at) % params_.n_chunk;
        const uint32_t rows = std::min(n - at, room);
        const uint32_t hidden = step_->prefill(tokens + at, rows, at + rows == n);
        cache_.appended(tokens + at, rows, hidden);
        at += rows;
    }
    const int32_t choice = choose(0, past + n);
    failed_ = false;
    return choice;
}

void Session::draft(int32_t anchor, uint32_t n) {
    check_usable();
    if (params_.n_draft == 0) {
        fail(LUCE_E_STATE, "the session was opened without drafts (n_draft 0)");
    }
    if (n < 1 || n > params_.n_draft) {
        fail(LUCE_E_ARG, "a draft has 1 to %u tokens, got %u", params_.n_draft, n);
    }
    check_tokens(&anchor, 1);
    if (cache_.n_past() == 0) {
        fail(LUCE_E_STATE, "a draft needs a committed token: prefill comes first");
    }
    if (cache_.n_past() + n >= params_.n_ctx) {
        fail(LUCE_E_CONTEXT, "%u drafts would reach position %u of a context of %u", n, cache_.n_past() + n,
             params_.n_ctx);
    }
    failed_ = true; // until all of it has worked
    step_->draft(anchor, n);
    draft_anchor_ = anchor;
    n_drafted_ = n;
    failed_ = false;
}

void Session::get_draft(int32_t *tokens, uint32_t n) {
    check_usable();
    if (n < 1 || n > step_->drafts().size()) {
        fail(LUCE_E_ARG, "the last draft has %zu tokens, got %u", step_->drafts().size(), n);
    }
    for (uint32_t i = 0; i < n; i++) {
        if (step_->drafts()[i].not_finite) {
            fail(LUCE_E_NUMERIC, "the logits of draft %u are not finite: the NextN head is damaged", i);
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        tokens[i] = step_->drafts()[i].token;
    }
}

void Session::verify(const int32_t *tokens, const int32_t *parents, uint32_t n, int32_t *choices) {
    check_usable();
    if (n < 1 || n > params_.n_rows) {
        fail(LUCE_E_ARG, "a verify step has 1 to %u rows, got %u", params_.n_rows, n);
    }
    if (tokens != nullptr) {
        check_tokens(tokens, n);
    } else if (n > n_drafted_ + 1 || n_drafted_ == 0) {
        fail(LUCE_E_STATE, "%u rows without tokens: %u drafts are there to verify", n, n_drafted_);
    }
    int32_t parent_of[LUCE_MAX_ROWS];
    uint32_t depth[LUCE_MAX_ROWS];
    for (uint32_t i = 0; i < n; i++) {
        const int32_t parent = parents == nullptr ? int32_t(i) - 1 : parents[i];
        if (i == 0 ? parent != -1 : (parent < 0 || parent >= int32_t(i))) {
            fail(LUCE_E_ARG, "row %u has parent %d, expected %s", i, parent,
                 i == 0 ? "-1" : "an earlier row");
        }
        // depth-first: a row follows the one before it, or one of that row's ancestors
        int32_t up = int32_t(i) - 1;
        while (up >= 0 && up != parent) {
            up = parent_of[up];
        }
        if (i > 0 && up < 0) {
            fail(LUCE_E_ARG, "row %u with parent %d is not in depth-first order", i, parent);
        }
        parent_of[i] = parent;
        depth[i] = parent < 0 ? 0 : depth[parent] + 1;
        if (cache_.n_past() + depth[i] >= params_.n_ctx) {
            fail(LUCE_E_CONTEXT, "row %u would be at position %u of a context of %u", i,
                 cache_.n_past() + depth[i], params_.n_ctx);
        }
    }
    failed_ = true; // until all of it has worked
    step_->verify(tokens, parent_of, n);
    int32_t drafted[LUCE_MAX_ROWS] = {draft_anchor_};
    for (uint32_t i = 1; tokens == nullptr && i < n; i++) {
        drafted[i] = step_->drafts()[i - 1].token;
    }
    cache_.verified(tokens == nullptr ? drafted : tokens, parent_of, n);
    for (uint32_t i = 0; i < n; i++) {
        choices[i] = choose(i, cache_.n_past() + depth[i] + 1);
    }
    failed_ = false;
}

void Session::commit(const int32_t *path, uint32_t n) {
    check_usable();
    if (cache_.n_verified() == 0) {
        fail(LUCE_E_STATE, "there is nothing to commit: verify comes first");
    }
    cache_.check_path(path, n);
    failed_ = true; // until all of it has worked
    if (path[n - 1] != int32_t(n) - 1) { // not a prefix
        step_->kv_move(path, n);
    }
    cache_.committed(path, n);
    n_drafted_ = 0;
    failed_ = false;
}

void Session::read_logits(uint32_t row, float *out) {
    check_usable();
    step_->read_logits(row, out);
}

} // namespace luce
