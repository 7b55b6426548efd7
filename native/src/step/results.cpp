// What the host reads of steps beside their choices: drafts, their lists, and logits.
#include "step/step.h"

#include "step/shapes.h"

#include <ggml-backend.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

namespace luce {

void Step::wait_for_drafts() {
    if (drafting_) {
        synchronize();
        drafting_ = false;
    }
}

const Choice &Step::drafted(int32_t entry) {
    wait_for_drafts();
    return chosen(entry);
}

const int32_t *Step::listed(int32_t entry) {
    wait_for_drafts();
    return static_cast<const int32_t *>(cache_.lists()->data) + entry * cache_.lists()->ne[0];
}

void Step::have_logits() {
    if (logits_buffer_) {
        return;
    }
    const size_t size = size_t(verify_width(MAX_ROWS)) * model_.hparams().n_vocab * sizeof(float);
    logits_buffer_ = pinned(cache_.last().device, size, "steps' logits");
}

void Step::have_image_room() {
    if (model_.gpu() && !image_buffer_) {
        const size_t rows = std::min(params_.cache.n_chunk, params_.cache.n_ctx);
        image_buffer_ =
            pinned(first().device, rows * model_.hparams().n_embd * sizeof(float), "rows of images");
    }
}

float *Step::image_room() const {
    return image_buffer_ ? static_cast<float *>(ggml_backend_buffer_get_base(image_buffer_.get())) : nullptr;
}

float *Step::host_logits(uint32_t row) const {
    return static_cast<float *>(ggml_backend_buffer_get_base(logits_buffer_.get())) +
           size_t(row) * model_.hparams().n_vocab;
}

// Copies the rows that were asked for, with runs of them at once.
void Step::enqueue_logits(const Graph &g) {
    const ggml_tensor *logits = g.outputs.logits;
    fetched_ = fetched_next_;
    fetched_next_ = 0;
    for (uint32_t row = 0; row < uint32_t(logits->ne[1]);) {
        uint32_t end = row;
        while (end < uint32_t(logits->ne[1]) && (fetched_ >> end & 1) != 0) {
            end++;
        }
        if (end > row) {
            ggml_backend_tensor_get_async(cache_.last().steps.get(), logits, host_logits(row),
                                          row * logits->nb[1], (end - row) * logits->nb[1]);
        }
        row = end + 1;
    }
}

void Step::read_logits(uint32_t row, float *out) {
    if (last_ == nullptr || row >= uint32_t(last_->outputs.logits->ne[1])) {
        fail(LUCE_E_STATE, "there are no logits of row %u: the engine has run another step since", row);
    }
    const ggml_tensor *logits = last_->outputs.logits;
    if ((fetched_ >> row & 1) != 0) {
        memcpy(out, host_logits(row), logits->nb[1]);
        return;
    }
    check_works(cache_.last().device);
    ggml_backend_tensor_get_async(cache_.last().steps.get(), logits, out, row * logits->nb[1], logits->nb[1]);
    synchronize();
}

// The norm is done here: on a GPU a step does it while it packs the input of the matmul, and keeps no rows of it.
void Step::read_hidden(uint32_t row, float *out) {
    if (last_ == nullptr || last_->outputs.hidden == nullptr ||
        row >= uint32_t(last_->outputs.hidden->ne[1])) {
        fail(LUCE_E_STATE, "there is no hidden state of row %u: the engine's last step was no verify of it",
             row);
    }
    const ggml_tensor *hidden = last_->outputs.hidden, *norm = model_.weights().output_norm;
    const size_t n = size_t(hidden->ne[0]);
    std::vector<float> weight(n);
    ggml_backend_tensor_get_async(cache_.last().steps.get(), hidden, out, row * hidden->nb[1],
                                  n * sizeof(float));
    ggml_backend_tensor_get_async(cache_.last().steps.get(), norm, weight.data(), 0, n * sizeof(float));
    synchronize();
    double squares = 0;
    for (size_t i = 0; i < n; i++) {
        squares += double(out[i]) * out[i];
    }
    const float scale = float(1 / std::sqrt(squares / double(n) + model_.hparams().rms_eps));
    for (size_t i = 0; i < n; i++) {
        out[i] *= scale * weight[i];
    }
}

void Step::read_scores(uint32_t n_best, float *out, uint32_t n) {
    std::vector<std::vector<float>> heads; // of all layers, each of n positions
    for (const Stage &stage : cache_.stages()) {
        for (uint32_t il = stage.first; il < stage.end; il++) {
            const ggml_tensor *scores = cache_.kv(il).scores;
            for (int64_t h = 0; scores != nullptr && h < scores->ne[1]; h++) {
                heads.emplace_back(n);
                ggml_backend_tensor_get_async(stage.steps.get(), scores, heads.back().data(),
                                              size_t(h) * scores->nb[1], n * sizeof(float));
            }
        }
    }
    synchronize();
    const size_t best = n_best == 0 ? heads.size() : std::min<size_t>(n_best, heads.size());
    std::vector<float> at(heads.size());
    for (uint32_t p = 0; p < n; p++) {
        std::transform(heads.begin(), heads.end(), at.begin(), [&](const auto &head) { return head[p]; });
        std::partial_sort(at.begin(), at.begin() + long(best), at.end(), std::greater<float>());
        double sum = 0;
        for (size_t i = 0; i < best; i++) {
            sum += at[i];
        }
        out[p] = float(sum / double(best));
    }
}

} // namespace luce
