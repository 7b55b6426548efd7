#include "engine/sequence.h"

#include "cpu/sampler.h"
#include "engine/checkpoint.h"
#include "engine/tree.h"

#include <cstring>

namespace luce {

Sequence::Sequence(std::shared_ptr<Engine> engine) : engine_(std::move(engine)), line_(engine_->cache()) {
    failure_.reserve(32); // begin_step() takes no memory
}

luce_sequence_info Sequence::info() const {
    luce_sequence_info out{};
    out.n_past = line_.n_past();
    out.n_verified = line_.n_verified();
    out.n_pages = uint32_t(line_.pages().all.size());
    out.failed = !failure_.empty();
    return out;
}

void Sequence::set_penalties(const luce_penalties *penalties) {
    Penalties checked;
    if (penalties != nullptr) {
        checked = check_penalties(*penalties, engine_->n_vocab());
        engine_->step().have_logits();
    }
    penalties_ = std::move(checked);
    chooses_ = penalties != nullptr;
}

void Sequence::fail_with(const char *why) noexcept {
    try {
        failure_ = why;
    } catch (const std::bad_alloc &) {
        begin_step();
    }
}

void Sequence::check_usable() const {
    if (!failure_.empty()) {
        fail(LUCE_E_STATE, "the sequence has failed (%s): reset, resume or close it", failure_.c_str());
    }
}

void Sequence::end_step(Rows rows, uint32_t n_rows, uint32_t first_row) {
    failure_.clear();
    serial_ = n_rows > 0 ? engine_->step().serial() : 0;
    rows_ = rows;
    n_rows_ = n_rows;
    first_row_ = first_row;
    kept_.clear();
}

void Sequence::keep_logits() {
    if (serial_ == engine_->step().serial()) {
        kept_.resize(engine_->n_vocab());
        engine_->step().read_logits(first_row_, kept_.data());
    }
}

void Sequence::stay_last() {
    serial_ = serial_ == 0 ? 0 : engine_->step().serial();
}

void Sequence::reset() {
    line_.clear();
    lookup_.reset();
    failure_.clear();
    serial_ = 0;
}

int32_t checked(const Choice &choice, uint64_t position) {
    if (choice.not_finite) {
        fail(LUCE_E_NUMERIC,
             "the logits of position %llu are not finite: the weights are damaged, or the model overflows; "
             "the "
             "sequence has failed",
             (unsigned long long) (position - 1));
    }
    return choice.token;
}

void Sequence::check_drafted(uint32_t n) const {
    check_usable();
    if (n < 1 || n > line_.n_drafted()) {
        fail(LUCE_E_ARG, "the last draft has %u tokens, got %u", line_.n_drafted(), n);
    }
}

void Sequence::get_draft(int32_t *tokens, uint32_t n) {
    check_drafted(n);
    const auto entry = [&](uint32_t i) {
        return engine_->step().drafted(engine_->cache().draft_entry(line_.slot(), int32_t(i)));
    };
    for (uint32_t i = 0; i < n; i++) {
        if (entry(i).not_finite) {
            fail(LUCE_E_NUMERIC,
                 "the logits of draft %u are not finite: the weights that drafted it are damaged", i);
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        tokens[i] = entry(i).token;
    }
}

void Sequence::get_lists(const luce_lists &lists) {
    const CacheParams &cache = engine_->params().cache;
    const uint32_t n_top = cache.n_top, depth = lists.depth, k = lists.k;
    check_drafted(depth);
    const Drafter &drafter = *engine_->model().weights().drafters[cache.drafters[line_.drafter()].drafter];
    const bool conditional = drafter.form == Candidates::conditional;
    if (lists.form != int32_t(drafter.form)) {
        fail(LUCE_E_ARG, "the lists have form %d, those of the last draft %d", lists.form, int(drafter.form));
    }
    if (k < 1 || n_top == 0 || (conditional ? k != drafter.n_list : k > n_top)) {
        fail(LUCE_E_ARG, "the engine keeps %u candidates of a draft, got %u",
             conditional && n_top > 0 ? drafter.n_list : n_top, k);
    }
    // They come with the drafts, in one wait.
    const int32_t *kept = engine_->step().listed(engine_->cache().draft_entry(line_.slot(), 0));
    const int64_t entry = engine_->cache().lists()->ne[0];
    std::vector<int32_t> drafts(depth);
    get_draft(drafts.data(), depth);
    for (uint32_t i = 0; i < depth; i++) {
        const int32_t *list = kept + i * entry;
        const uint64_t position = line_.n_past() + i + 1;
        if (conditional) {
            float *scores = lists.scores + size_t(i) * k * k;
            std::copy_n(list, k, lists.ids + size_t(i) * k);
            const uint32_t n_above = i == 0 ? 1 : k; // it has one list behind each candidate above
            memcpy(scores, list + k, size_t(n_above) * k * sizeof(float));
            std::fill(scores + n_above * k, scores + k * k, -INFINITY);
            for (uint32_t above = 0; choice_.scale > 0 && above < n_above; above++) {
                add_noise(choice_, position, list, scores + above * k, k);
            }
            if (drafter.confident) {
                std::vector<float> confidence(n_above);
                memcpy(confidence.data(), list + k * (k + 1), n_above * sizeof(float));
                add_confidence(confidence.data(), scores, k, n_above);
            }
            continue;
        }
        std::vector<int32_t> best(list, list + n_top);
        std::vector<float> score(n_top);
        memcpy(score.data(), list + n_top, n_top * sizeof(float));
        if (choice_.scale > 0) {
            add_noise(choice_, position, drafts[i], best.data(), score.data(), n_top);
        }
        std::copy(best.begin(), best.begin() + k, lists.ids + size_t(i) * k);
        std::copy(score.begin(), score.begin() + k, lists.scores + size_t(i) * k);
    }
}

uint32_t Sequence::lookup(int32_t anchor, int32_t *draft, uint32_t most, uint32_t *matched) {
    check_usable();
    engine_->check_tokens(&anchor, 1);
    if (!lookup_) {
        lookup_ = std::make_unique<Lookup>(engine_->params().cache.n_ctx);
    }
    return lookup_->find(line_.tokens(), anchor, draft, most, matched);
}

void Sequence::commit(const int32_t *path, uint32_t n) {
    check_usable();
    if (line_.n_verified() == 0) {
        fail(LUCE_E_STATE, "there is nothing to commit: verify comes first");
    }
    line_.check_path(path, n);
    line_.commit(path, n);
}

uint32_t Sequence::row_of_step(uint32_t row) const {
    check_usable();
    if (serial_ == 0 || serial_ != engine_->step().serial()) {
        fail(LUCE_E_STATE,
             "the engine has run another step since: read logits and hidden states before the next one");
    }
    if (row >= n_rows_) {
        fail(LUCE_E_ARG, "row %u: the last step had %u of this sequence", row, n_rows_);
    }
    return first_row_ + row;
}

void Sequence::read_logits(uint32_t row, float *out) {
    const uint32_t row_of_all = row_of_step(row);
    if (kept_.empty()) {
        engine_->step().read_logits(row_of_all, out);
    } else {
        std::copy(kept_.begin(), kept_.end(), out);
    }
}

void Sequence::read_hidden(uint32_t row, float *out) {
    engine_->step().read_hidden(row_of_step(row), out);
}

void Sequence::read_scores(uint32_t n_best, float *out, uint32_t n) {
    if (!engine_->params().cache.scores) {
        fail(LUCE_E_ARG, "the engine was opened without scores");
    }
    row_of_step(0);
    if (rows_ != Rows::verified) {
        fail(LUCE_E_STATE, "the engine's last step was no verify: only that gives scores");
    }
    if (n < 1 || n > line_.n_past() + line_.n_verified()) {
        fail(LUCE_E_ARG, "scores of %u positions, of which there are 1 to %u", n,
             line_.n_past() + line_.n_verified());
    }
    engine_->step().read_scores(n_best, out, n);
}

const float *Sequence::logits(uint32_t row) {
    logits_.resize(engine_->n_vocab());
    read_logits(row, logits_.data());
    return logits_.data();
}

int32_t Sequence::choose(uint32_t row, const uint8_t *mask, uint64_t mask_size) {
    logits(row);
    if (rows_ == Rows::drafted || (rows_ == Rows::verified && line_.n_verified() == 0)) {
        fail(LUCE_E_STATE, "there is nothing to choose: its last rows are %s",
             rows_ == Rows::drafted ? "a drafter's" : "committed, or rejected");
    }
    const std::vector<int32_t> before = line_.before(row);
    penalise(logits_.data(), engine_->n_vocab(), penalties_, before);
    if (mask != nullptr) {
        apply_mask(logits_.data(), engine_->n_vocab(), mask, mask_size);
    }
    return luce::choose(logits_.data(), engine_->n_vocab(), choice_, before.size());
}

void Sequence::settle() {
    check_usable();
    line_.reject();
    if (!line_.debts().any()) {
        return;
    }
    engine_->in_step([&] {
        Step &step = engine_->step();
        begin_step();
        engine_->feed_lagging(line_);
        Batch batch(step.verify_host(), engine_->cache());
        batch.add_verify(line_, choice_, 0, nullptr, nullptr);
        const uint32_t width = step.verify_width(0);
        batch.fill_up(width);
        step.verify(width, 0, batch.n_pages());
        line_.settled();
        fail_with("");
    });
}

void Sequence::resume(Checkpoint &checkpoint) {
    const CacheParams &c = engine_->params().cache;
    if (checkpoint.n_past() >= c.n_ctx) {
        fail(LUCE_E_CONTEXT, "a checkpoint of %u tokens leaves no room in a context of %u",
             checkpoint.n_past(), c.n_ctx);
    }
    engine_->need_pages(checkpoint.pages_wanted()); // it may give back pages of this very one, as it leaves
    checkpoint.be_whole();
    checkpoint.check_open();
    engine_->need_pages(checkpoint.pages_wanted());
    engine_->in_step([&] {
        begin_step();
        lookup_.reset();
        checkpoint.restore(line_);
        failure_.clear();
        serial_ = 0;
    });
}

} // namespace luce
