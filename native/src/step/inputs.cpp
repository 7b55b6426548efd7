#include "step/inputs.h"

#include "step/shapes.h"

#include <algorithm>
#include <cstring>

namespace luce {

static size_t pad(size_t n) {
    return (n + 255) / 256 * 256;
}

Region::Region(uint32_t rows, uint32_t n_pages, uint32_t mirrors, bool windows, Images images)
    : rows_(rows), n_pages_(std::max(n_pages, 1u)), mirrors_(mirrors), windows_(windows), images_(images) {
    hidden_from_ = pad(rows * sizeof(int64_t));
    positions_ = hidden_from_ + pad(rows * sizeof(int32_t));
    tokens_ = positions_ + pad(rows * sizeof(int32_t));
    first_rows_ = tokens_ + pad(rows * sizeof(int32_t));
    last_rows_ = first_rows_ + pad(MAX_PROMPTS * sizeof(int32_t));
    rope_positions_ = last_rows_ + pad(MAX_PROMPTS * sizeof(int32_t));
    axes_ = rope_positions_ + (images == Images::none ? 0 : pad(rows * sizeof(int32_t)));
    image_rows_ = axes_ + (images == Images::rows ? pad(4 * rows * sizeof(int32_t)) : 0);
    row_ends_ = image_rows_ + (images == Images::rows ? pad(rows * sizeof(int64_t)) : 0);
    ctl_ = row_ends_ + (images == Images::rows ? pad(rows * sizeof(int32_t)) : 0);
    window_pages_ =
        ctl_ + pad(sizeof(StepCtl)); // it is sent whole, ahead of the part of the other table that is in use
    pages_ = window_pages_ + (windows ? pad(n_pages_ * sizeof(int32_t)) : 0);
    size_ = pages_ + pad(n_pages_ * sizeof(int32_t));
}

void Region::allocate(const std::deque<Stage> &stages) {
    for (const Stage &stage : stages) {
        places_.push_back({&stage, luce::allocate(stage.device, size(), "a step's inputs")});
        ggml_backend_buffer_clear(places_.back().memory.get(), 0);
    }
    const Place &first = places_[0];
    if (first.stage->runs_beside()) {
        pinned_ = first.stage->device.gpu ? pinned(first.stage->device, size(), "a step's inputs")
                                          : luce::allocate(first.stage->device, size(), "a step's inputs");
        ggml_backend_buffer_clear(pinned_.get(), 0);
    }
    host_ = static_cast<uint8_t *>(ggml_backend_buffer_get_base((pinned_ ? pinned_ : first.memory).get()));
}

Region::Host Region::host(uint32_t mirror) const {
    uint8_t *base = host_ + (pinned_ ? mirror * size_ : 0);
    return {reinterpret_cast<int64_t *>(base),
            reinterpret_cast<int32_t *>(base + hidden_from_),
            reinterpret_cast<int32_t *>(base + positions_),
            reinterpret_cast<int32_t *>(base + tokens_),
            reinterpret_cast<int32_t *>(base + first_rows_),
            reinterpret_cast<int32_t *>(base + last_rows_),
            images_ == Images::none ? nullptr : reinterpret_cast<int32_t *>(base + rope_positions_),
            images_ == Images::rows ? reinterpret_cast<int32_t *>(base + axes_) : nullptr,
            images_ == Images::rows ? reinterpret_cast<int64_t *>(base + image_rows_) : nullptr,
            images_ == Images::rows ? reinterpret_cast<int32_t *>(base + row_ends_) : nullptr,
            reinterpret_cast<StepCtl *>(base + ctl_),
            windows_ ? reinterpret_cast<int32_t *>(base + window_pages_) : nullptr,
            reinterpret_cast<int32_t *>(base + pages_)};
}

void Region::send(uint32_t mirror, uint32_t n_pages) {
    send_bytes(host_ + (pinned_ ? mirror * size_ : 0), pages_ + pad(n_pages * sizeof(int32_t)));
}

void Region::send_beside(uint32_t mirror, uint32_t n_pages) {
    send_bytes(host_ + mirror * size_, pages_ + pad(n_pages * sizeof(int32_t)), true);
    for (const Place &place : places_) {
        const Stage &stage = *place.stage;
        ggml_backend_event_record(stage.beside_ended.get(), stage.beside.get());
        ggml_backend_event_wait(stage.steps.get(), stage.beside_ended.get());
    }
}

void Region::send_bytes(const uint8_t *host, size_t bytes, [[maybe_unused]] bool beside) {
    for (const Place &place : places_) {
        void *to = ggml_backend_buffer_get_base(place.memory.get());
        make_current(place.stage->device); // a kernel may copy them
        if (!place.stage->device.gpu && to != host) {
            place.stage->run([=] { memcpy(to, host, bytes); });
        }
#ifdef LUCE_USE_CUDA
        if (place.stage->device.gpu) {
            void *stream = Stage::stream(beside ? place.stage->beside : place.stage->steps);
            const auto copy = beside ? cuda::bring_beside : cuda::bring;
            if (const int error = copy(host, to, int64_t(bytes), stream); error != 0) {
                fail(LUCE_E_DEVICE, "%s: bringing a step's inputs failed: %s",
                     place.stage->device.name.c_str(), cuda::error_text(error));
            }
        }
#endif
    }
}

void Region::send_chain(uint32_t n) {
    send_bytes(host_, n * size_);
}

StepInputs Region::tensors(ggml_context *ctx, uint32_t rows, uint32_t stage) const {
    const auto place = [&](ggml_type type, int64_t n, size_t offset) {
        ggml_tensor *t = ggml_new_tensor_1d(ctx, type, n);
        if (!places_.empty()) {
            ggml_backend_buffer_t memory = places_[stage].memory.get();
            uint8_t *base = static_cast<uint8_t *>(ggml_backend_buffer_get_base(memory));
            ggml_backend_tensor_alloc(memory, t, base + offset);
        } else {
            // The graph allocator has nothing to place here.
            t->data = reinterpret_cast<void *>(uintptr_t(256));
        }
        return t;
    };
    StepInputs in{};
    in.hidden_to = place(GGML_TYPE_I64, rows, 0);
    in.hidden_from = place(GGML_TYPE_I32, rows, hidden_from_);
    in.positions = place(GGML_TYPE_I32, rows, positions_);
    in.tokens = place(GGML_TYPE_I32, rows, tokens_);
    in.first_rows = place(GGML_TYPE_I32, MAX_PROMPTS, first_rows_);
    in.last_rows = place(GGML_TYPE_I32, MAX_PROMPTS, last_rows_);
    in.rope_positions = images_ == Images::none ? nullptr : place(GGML_TYPE_I32, rows, rope_positions_);
    in.axes = images_ == Images::rows ? place(GGML_TYPE_I32, 4 * int64_t(rows), axes_) : nullptr;
    in.image_rows = images_ == Images::rows ? place(GGML_TYPE_I64, rows, image_rows_) : nullptr;
    in.row_ends = images_ == Images::rows ? place(GGML_TYPE_I32, rows, row_ends_) : nullptr;
    in.ctl = place(GGML_TYPE_I32, sizeof(StepCtl) / sizeof(int32_t), ctl_);
    in.pages = place(GGML_TYPE_I32, n_pages_, pages_);
    in.window_pages = windows_ ? place(GGML_TYPE_I32, n_pages_, window_pages_) : nullptr;
    return in;
}

// ---- putting a step together ----

static uint32_t add_pages(Region::Host h, const Timeline &line, uint32_t at) {
    const PageLists &lists = line.pages();
    std::copy(lists.all.begin(), lists.all.end(), h.pages + at);
    std::copy(lists.window.begin(), lists.window.end(), h.window_pages + at);
    return at + uint32_t(lists.all.size());
}

Batch::Batch(Region::Host host, const Cache &cache) : h_(host), cache_(cache) {
    h_.ctl->n_seqs = 0;
    h_.ctl->n_rows = 0;
}

// All that counts rows goes by the index: pages, masks, noise. RoPE alone goes by less behind an image, and by more behind a
// gap.
void Batch::put_position(int32_t row, int32_t index, const Timeline &line) {
    h_.positions[row] = index;
    if (h_.rope_positions != nullptr) {
        h_.rope_positions[row] = index + line.delta();
    }
}

SeqCtl &Batch::add_sequence(const Timeline &line, const ChoiceCtl &choice, uint32_t n_rows) {
    SeqCtl &seq = h_.ctl->seqs[h_.ctl->n_seqs++];
    line.fill(seq, h_.ctl->n_rows, int32_t(n_rows), int32_t(n_pages_));
    seq.choice = choice;
    n_pages_ = add_pages(h_, line, n_pages_);
    h_.ctl->n_rows += int32_t(n_rows);
    return seq;
}

void Batch::add_verify(const Timeline &line, const ChoiceCtl &choice, uint32_t n, const int32_t *parents,
                       const int32_t *tokens) {
    const int32_t index = h_.ctl->n_seqs;
    const SeqCtl &seq = add_sequence(line, choice, n);
    for (uint32_t i = 0; i < n; i++) {
        const int32_t row = seq.row0 + int32_t(i), parent = parents[i] < 0 ? -1 : seq.row0 + parents[i];
        const int32_t position = parent < 0 ? seq.n_past : h_.positions[parent] + 1;
        h_.ctl->rows[row] = {index, parent, position, -1};
        h_.tokens[row] = tokens[i];
        put_position(row, position, line);
        h_.hidden_to[row] = line.next_hidden(int32_t(i));
        h_.hidden_from[row] = parent < 0 ? line.hidden() : line.next_hidden(parents[i]);
    }
}

void Batch::add_draft(const Timeline &line, const ChoiceCtl &choice, int32_t anchor, const DrafterUse &use,
                      uint32_t i) {
    const int32_t index = h_.ctl->n_seqs, entry = cache_.draft_entry(line.slot(), int32_t(i));
    SeqCtl &seq = add_sequence(line, choice, 1);
    const int32_t chosen_behind = seq.n_past + int32_t(i);
    if (use.has_kv) { // what the chain has written so far counts as committed
        seq.n_past += int32_t(i);
        seq.n_new = int32_t(i);
    }
    seq.moves = i == 0 ? seq.moves : 0; // the first link has paid them
    h_.ctl->rows[seq.row0] = {index, -1, chosen_behind, entry};
    h_.tokens[seq.row0] = i == 0 ? anchor : -1 - (entry - 1);
    put_position(seq.row0, seq.n_past, line);
    h_.hidden_from[seq.row0] = i == 0 ? line.hidden() : cache_.hidden_draft(line.slot());
    h_.hidden_to[seq.row0] = cache_.hidden_draft(line.slot());
}

void Batch::add_block(const Timeline &line, const ChoiceCtl &choice, int32_t anchor, const DrafterUse &use,
                      int32_t mask) {
    const int32_t index = h_.ctl->n_seqs;
    const SeqCtl &seq = add_sequence(line, choice, use.n_block);
    for (int32_t i = 0; i < seq.n_rows; i++) {
        const int32_t draft = i - int32_t(use.first_row());
        const int32_t row = seq.row0 + i, position = seq.n_past + i;
        h_.ctl->rows[row] = {index, i == 0 ? -1 : row - 1, position,
                             draft < 0 ? -1 : cache_.draft_entry(line.slot(), draft)};
        h_.tokens[row] = i == 0 ? anchor : mask;
        put_position(row, position, line);
        h_.hidden_from[row] = h_.hidden_to[row] = 0;
    }
}

void Batch::add_unseen(const Timeline &line) {
    const int32_t index = h_.ctl->n_seqs, n = int32_t(line.debts().unseen.n);
    SeqCtl &seq = add_sequence(line, {}, uint32_t(n));
    seq.n_past -= n;
    for (int32_t i = 0; i < n; i++) {
        const int32_t row = seq.row0 + i, position = seq.n_past + i;
        h_.ctl->rows[row] = {index, i == 0 ? -1 : row - 1, position, -1};
        h_.tokens[row] = line.tokens()[size_t(position)];
        put_position(row, position, line);
        h_.hidden_from[row] = line.unseen_hidden(i);
        h_.hidden_to[row] = cache_.hidden_unused();
    }
}

void Batch::fill_up(uint32_t width) {
    for (uint32_t row = n_rows(); row < width; row++) {
        h_.ctl->rows[row] = {-1, -1, 0, -1};
        h_.tokens[row] = 0;
        h_.positions[row] = 0;
        if (h_.rope_positions != nullptr) {
            h_.rope_positions[row] = 0;
        }
        h_.hidden_from[row] = cache_.keeps_hidden() ? cache_.hidden_zero() : 0;
        h_.hidden_to[row] = cache_.keeps_hidden() ? cache_.hidden_unused() : 0;
    }
}

void Batch::add_prompt(const Timeline &line, const ChoiceCtl &choice, const int32_t *tokens, uint32_t n,
                       const std::vector<PromptPlace> &places) {
    const uint32_t index = uint32_t(h_.ctl->n_seqs);
    SeqCtl &seq = add_sequence(line, choice, n);
    seq.cells = int32_t(n_cells_);
    prompts_.push_back({n, kv_bucket(line.n_past() + n)});
    n_cells_ += prompts_.back().n_kv;
    h_.ctl->rows[index] = {int32_t(index), -1, seq.n_past + int32_t(n) - 1, cache_.choice_entry(0, index)};
    for (uint32_t i = 0; i < n; i++) {
        h_.tokens[seq.row0 + int32_t(i)] = std::max(tokens[i], 0); // the names of rows of images are below -1
        put_position(seq.row0 + int32_t(i), seq.n_past + int32_t(i), line);
        if (h_.rope_positions != nullptr && !places.empty()) {
            h_.rope_positions[seq.row0 + int32_t(i)] = places[i].time;
        }
    }
    for (uint32_t i = 0; i < n && h_.axes != nullptr; i++) {
        const int32_t index = seq.n_past + int32_t(i), at = index + line.delta();
        places_.push_back(places.empty() ? PromptPlace{at, at, at, nullptr, line.delta(), index + 1}
                                         : places[i]);
    }
    const auto of_image = [](const PromptPlace &place) { return place.row != nullptr; };
    images_ = images_ || std::any_of(places.begin(), places.end(), of_image);
    h_.hidden_from[index] = line.hidden();
    h_.hidden_to[index] = cache_.keeps_hidden() ? line.next_hidden(0) : 0;
    h_.first_rows[index] = seq.row0;
    h_.last_rows[index] = seq.row0 + int32_t(n) - 1;
}

bool Batch::place_images(float *room, uint32_t E) {
    const size_t T = places_.size();
    for (size_t row = 0; row < T && images_; row++) {
        const PromptPlace &place = places_[row];
        h_.axes[row] = h_.axes[3 * T + row] = place.time;
        h_.axes[T + row] = place.height;
        h_.axes[2 * T + row] = place.width;
        const float *values = place.row;
        if (room != nullptr && values != nullptr) {
            std::copy_n(values, E, room + row * E);
            values = room + row * E;
        }
        h_.image_rows[row] = int64_t(reinterpret_cast<uintptr_t>(values));
        h_.row_ends[row] = place.end;
    }
    return images_;
}

} // namespace luce
