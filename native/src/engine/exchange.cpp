#include "engine/exchange.h"

#include "exchange/exchange.h"

#include <algorithm>
#include <map>

namespace luce {

Exchange::Exchange(const Model &model, uint32_t rows, uint32_t logit_rows)
    : tensors_(new_context(ggml_tensor_overhead() * (model.n_ranks() + 2))) {
    ggml_context *ctx = tensors_.get();
    const int64_t n = model.n_ranks();
    const int64_t E = (model.hparams().n_embd + 3) / 4 * 4, V = model.hparams().n_vocab;
    const bool gathers = !model.weights().rank_outputs.empty();
    const int64_t logits = gathers ? logit_rows * most_output_rows(V, n) : 0;
    const int64_t values = std::max(rows * E, (logits + 3) / 4 * 4), step_values = MAX_ROWS * E;
    box_bytes_ = (exchange_box_bytes(n, values, step_values) + 255) / 256 * 256;
    for (int64_t rank = 0; rank < n; rank++) {
        counts.push_back(ggml_new_tensor_1d(ctx, GGML_TYPE_I32, EXCHANGE_COUNTS));
    }
    boxes = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n + 2);
    failure = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, 1);
    for (ggml_tensor *t = ggml_get_first_tensor(ctx); t != nullptr; t = ggml_get_next_tensor(ctx, t)) {
        t->data =
            reinterpret_cast<void *>(uintptr_t(256)); // nothing of it is for the graph allocator to place
    }
    table_.assign(size_t(n), 0);
    table_.push_back(values);
    table_.push_back(step_values);
    boxes->data = table_.data();
}

namespace {

// Of a device, whose step was the last one.
struct Turns {
    std::mutex mutex;
    const Exchange *last = nullptr;
};
Turns &turns_of(const Device *device) {
    static std::mutex mutex;
    static std::map<const Device *, Turns> all;
    const std::lock_guard<std::mutex> lock(mutex);
    return all[device];
}

} // namespace

Exchange::~Exchange() {
    for (const Device *device : devices_) {
        Turns &turns = turns_of(device);
        const std::lock_guard<std::mutex> lock(turns.mutex);
        turns.last = turns.last == this ? nullptr : turns.last;
    }
}

Exchange::Turn Exchange::begin(const std::deque<Stage> &stages) const {
    Turn turn;
    for (const Device *device : devices_) { // in one order, whatever that of the ranks is
        Turns &turns = turns_of(device);
        turn.emplace_back(turns.mutex);
        if (turns.last != nullptr && turns.last != this) {
            ggml_backend_event_wait(stages[0].steps.get(), turns.last->ended_.get());
        }
        turns.last = this;
    }
    return turn;
}

void Exchange::end(const std::deque<Stage> &stages, [[maybe_unused]] Turn turn) const {
    ggml_backend_event_record(ended_.get(), stages[0].steps.get());
}

uint64_t Exchange::bytes() const {
    return uint64_t(box_bytes_) + ggml_nbytes(counts[0]);
}

void Exchange::allocate(const std::deque<Stage> &stages) {
    constexpr const char *WHAT = "what devices pass each other";
    const auto place = [](ggml_tensor *t, const Buffer &buffer) {
        t->data = nullptr;
        ggml_backend_tensor_alloc(buffer.get(), t, ggml_backend_buffer_get_base(buffer.get()));
    };
    bool reach = true;
    for (size_t i = 0; i < counts.size(); i++) {
        for (size_t j = 0; j < i; j++) {
            reach = stages[i].reaches(stages[j]) && reach;
        }
    }
    for (size_t rank = 0; rank < counts.size(); rank++) {
        const Device &device = stages[rank].device;
        devices_.insert(&device);
        box_buffers_.push_back(reach ? luce::allocate(device, size_t(box_bytes_), WHAT)
                                     : pinned(device, size_t(box_bytes_), WHAT));
        table_[rank] = int64_t(uintptr_t(ggml_backend_buffer_get_base(box_buffers_.back().get())));
        buffers_.push_back(luce::allocate(device, ggml_nbytes(counts[rank]), WHAT));
        place(counts[rank], buffers_.back());
    }
    buffers_.push_back(pinned(stages[0].device, 64, WHAT));
    place(failure, buffers_.back());
    ended_ = make_event(stages[0].device);
    reset();
}

void Exchange::reset() const {
    for (const Buffer &box : box_buffers_) {
        ggml_backend_buffer_clear(box.get(), EXCHANGE_NOTHING);
    }
    for (const Buffer &buffer : buffers_) {
        ggml_backend_buffer_clear(buffer.get(), 0);
    }
}

int32_t Exchange::failed() const {
    return *static_cast<const volatile int32_t *>(failure->data) - 1;
}

} // namespace luce
