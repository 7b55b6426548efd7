// Measures what steps cost: an engine times the widths of its steps when it is opened (luce_engine_costs). A
// GPU times each. On a CPU there is less time for it, and a step's cost is nearly a line of its width. So
// there powers of two are timed, and the widths between them lie on it. Any number of rows costs what the
// width costs that a step of them gets.
#include "step/step.h"

#include "step/shapes.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>

namespace luce {

static std::atomic<bool> cpu_times_steps{true};

void time_steps(bool on) {
    cpu_times_steps = on;
}

// Runs a step of the shape over sequences that hold nothing; in a verify, which follows a commit as those of
// decoding do, one row is still to be applied to the recurrent states. Its key and its decay are zeros, for no
// trial writes that bank of the log. Slots and pages are not in use yet, and a new timeline counts them as
// empty. Every row has another token, from run to run too. Rows of one token would all choose the same
// experts, and a step over them would read fewer weights than one over a text.
void Step::run_trial(const StepShape &shape) {
    const Region::Host h = shape.kind == StepKind::verify ? verify_host() : in_.of(shape.kind).host(0);
    const bool follows = shape.kind == StepKind::verify, drafts = shape.kind == StepKind::draft;
    const uint32_t n_block = drafts ? params_.cache.drafters[shape.drafter].n_block : 0;
    const bool chains = drafts && n_block == 0;
    const uint32_t per_sequence = shape.kind == StepKind::verify  ? params_.cache.n_rows
                                  : shape.kind == StepKind::draft ? std::max(n_block, 1u)
                                                                  : shape.rows;
    memset(static_cast<void *>(h.ctl), 0, sizeof(StepCtl));
    for (uint32_t row = 0; row < shape.rows; row++) {
        const uint32_t index = row / per_sequence, i = row % per_sequence;
        SeqCtl &seq = h.ctl->seqs[index];
        seq.slot = int32_t(index);
        seq.fresh = !follows;
        seq.n_replay = follows; // pending[0] is 0
        seq.row0 = int32_t(row - i);
        seq.n_rows = int32_t(i + 1);
        seq.n_past = chains || follows ? 1 : 0; // a chain's drafter may have no row 0
        seq.pages = int32_t(index);
        h.pages[index] = int32_t(index % params_.cache.n_pages);
        h.ctl->n_seqs = int32_t(index + 1);
        tried_ += 2654435761u; // this is 2^32 divided by the golden ratio, and so far from those before
        h.tokens[row] = int32_t(uint64_t(tried_) * model_.hparams().n_vocab >> 32);
        h.positions[row] = seq.n_past + int32_t(i);
        if (h.rope_positions != nullptr) {
            h.rope_positions[row] = h.positions[row];
        }
        h.hidden_from[row] = cache_.keeps_hidden() ? cache_.hidden_zero() : 0;
        h.hidden_to[row] = cache_.keeps_hidden() ? cache_.hidden_unused() : 0;
        if (row == 0 || !shape.prefill()) {
            const int32_t draft =
                int32_t(i) - (n_block > 0 ? int32_t(params_.cache.drafters[shape.drafter].first_row()) : 0);
            h.ctl->rows[row] = {int32_t(index), i == 0 ? -1 : int32_t(row) - 1, h.positions[row],
                                drafts && draft >= 0 ? cache_.draft_entry(int32_t(index), draft) : -1};
        }
    }
    h.ctl->n_rows = int32_t(shape.rows);
    switch (shape.kind) {
        case StepKind::verify: verify(shape.rows, shape.rows, h.ctl->n_seqs); break;
        case StepKind::draft:
            draft(shape.drafter, shape.rows, 0, uint32_t(h.ctl->n_seqs));
            synchronize();
            break;
        case StepKind::feed:
            feed(shape.rows, 0, uint32_t(h.ctl->n_seqs));
            synchronize();
            break;
        default: // every position lies in the first page, which is enough to run
            for (uint32_t i = 0; i < cache_.max_pages(); i++) {
                h.pages[i] = 0;
            }
            prefill(shape.kind, {{shape.rows, shape.n_kv}}, cache_.max_pages());
    }
}

// Returns the value at `width` of the line through the timed widths next to it. Beyond the last width it is
// the line through the last two.
static double on_line(const std::map<uint32_t, double> &timed, uint32_t width) {
    auto above = timed.lower_bound(width);
    if (above == timed.end()) {
        --above;
    }
    if (above->first == width || timed.size() == 1) {
        return above->second;
    }
    const auto below = std::prev(above == timed.begin() ? std::next(above) : above);
    const double slope = (above->second - below->second) / double(above->first - below->first);
    const bool beyond = width > above->first; // there, what noise makes fall is taken as level
    return above->second + (beyond ? std::max(slope, 0.0) : slope) * (double(width) - double(above->first));
}

namespace {

struct Kind {
    std::vector<StepShape> shapes; // they rise in width
    std::map<uint32_t, double> timed; // it maps a width to seconds
};

using Clock = std::chrono::steady_clock;

double seconds(Clock::time_point from) {
    return std::chrono::duration<double>(Clock::now() - from).count();
}

// Returns the widths that a CPU times, those first that say most of the others. One row comes first, which
// all else is compared with, and then the line from it to what most rounds have.
std::vector<uint32_t> widths_to_time(uint32_t most) {
    std::vector<uint32_t> widths;
    for (const uint32_t width : {1u, 8u, 2u, 4u, 16u, 32u, 64u}) {
        if (width <= most) {
            widths.push_back(width);
        }
    }
    if (most < 8) { // the line has to reach its end
        widths.insert(widths.begin() + 1, most);
    }
    return widths;
}

} // namespace

// Runs a trial of each shape as it is, so that kernels are loaded and ggml's pools full-grown before steps are
// captured. One layer of each kind is enough for that.
void Step::try_all() {
    brief_ = true;
    run_trial(largest_steps(params_.cache)[0]); // this is a prefill
    const std::vector<StepShape> shapes = step_shapes(cache_);
    for (auto shape = shapes.rbegin(); shape != shapes.rend(); ++shape) { // the widest comes first
        run_trial(*shape);
    }
    brief_ = false;
    last_ = nullptr;
}

void Step::time_all() {
    const bool gpu = model_.gpu();
    const auto rows_of = [&](const StepShape &shape) { // of each sequence of a draft
        return std::max(params_.cache.drafters[shape.drafter].n_block, 1u);
    };
    const auto width_of = [&](const StepShape &shape) {
        return shape.kind == StepKind::draft ? shape.rows / rows_of(shape) : shape.rows;
    };
    const auto step_of = [&](const StepShape &shape) { // it returns luce_cost.step
        const uint32_t n = uint32_t(params_.cache.drafters.size());
        return shape.kind == StepKind::verify ? 0 : shape.kind == StepKind::draft ? 1 + shape.drafter : 1 + n;
    };
    std::map<uint32_t, Kind> kinds; // its key is luce_cost.step
    const std::vector<StepShape> shapes = step_shapes(cache_);
    for (const StepShape &shape : shapes) {
        kinds[step_of(shape)].shapes.push_back(shape);
    }
    const auto time = [&](Kind &kind, const StepShape &shape) {
        double best = 1e30;
        for (int i = 0; i < 2; i++) {
            const auto start = Clock::now();
            run_trial(shape);
            best = std::min(best, seconds(start));
        }
        kind.timed[width_of(shape)] = best;
    };
    if (gpu) { // each is captured, then timed
        capturing_ = true;
        for (const StepShape &shape : shapes) {
            launching_ = false;
            run_trial(shape);
            const bool chains = shape.kind == StepKind::draft && shape.rows == 1 && has_chains();
            const uint32_t longest = chains ? params_.cache.drafters[shape.drafter].n_draft : 0;
            for (uint32_t links = 2; links <= longest; links++) {
                draft_chain(shape.drafter, links);
            }
            launching_ = true;
            time(kinds[step_of(shape)], shape);
        }
    } else if (!cpu_times_steps) {
        // A drafter's row costs a tenth of the target's, and a further row a tenth of the first.
        for (auto &[step, kind] : kinds) {
            const double row = step == 0 ? 1e-3 : 1e-4;
            kind.timed = {{1, row}, {2, 1.1 * row}};
        }
    } else {
        run_trial(shapes[0]); // the weights come from the file
        const auto began = Clock::now();
        for (auto &[step, kind] : kinds) {
            for (const uint32_t width : widths_to_time(width_of(kind.shapes.back()))) {
                // It takes half a second in all, or as long as a dozen steps take, and times two widths of
                // each kind at least.
                const double budget = std::max(0.5, 12 * kinds[0].timed[1]);
                const auto shape = std::find_if(kind.shapes.begin(), kind.shapes.end(),
                                                [&](const StepShape &s) { return width_of(s) == width; });
                if (shape != kind.shapes.end() && (kind.timed.size() < 2 || seconds(began) < budget)) {
                    time(kind, *shape);
                }
            }
        }
    }
    for (const auto &[step, kind] : kinds) {
        uint32_t rows = 1;
        for (const StepShape &shape : kind.shapes) {
            for (; rows <= width_of(shape); rows++) {
                costs_.push_back({rows, step, float(on_line(kind.timed, width_of(shape)))});
            }
        }
    }
    last_ = nullptr;
}

} // namespace luce
