#include "engine/exchange.h"

#include "exchange/exchange.h"

namespace luce {

Exchange::Exchange(const Model &model, uint32_t rows)
    : tensors_(new_context(ggml_tensor_overhead() * (2 * model.n_ranks() + 1))) {
    ggml_context *ctx = tensors_.get();
    const int64_t n = model.n_ranks(),
                  bytes = exchange_box_bytes(n, int64_t(rows) * model.hparams().n_embd);
    for (int64_t rank = 0; rank < n; rank++) {
        boxes.push_back(ggml_new_tensor_1d(ctx, GGML_TYPE_I8, (bytes + 15) / 16 * 16));
        counts.push_back(ggml_new_tensor_1d(ctx, GGML_TYPE_I32, EXCHANGE_COUNTS));
    }
    failure = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, 1);
    for (ggml_tensor *t = ggml_get_first_tensor(ctx); t != nullptr; t = ggml_get_next_tensor(ctx, t)) {
        t->data = reinterpret_cast<void *>(uintptr_t(256)); // nothing of it is for the graph allocator to place
    }
}

uint64_t Exchange::bytes() const {
    return ggml_nbytes(boxes[0]) + ggml_nbytes(counts[0]);
}

void Exchange::allocate(const std::deque<Stage> &stages) {
    const auto place = [&](ggml_tensor *t, Buffer buffer) {
        ggml_backend_buffer_clear(buffer.get(), 0);
        t->data = nullptr;
        ggml_backend_tensor_alloc(buffer.get(), t, ggml_backend_buffer_get_base(buffer.get()));
        buffers_.push_back(std::move(buffer));
    };
    bool reach = true;
    for (size_t i = 0; i < boxes.size(); i++) {
        for (size_t j = 0; j < i; j++) {
            reach = stages[i].reaches(stages[j]) && reach;
        }
    }
    for (size_t rank = 0; rank < boxes.size(); rank++) {
        const Device &device = stages[rank].device;
        const size_t bytes = ggml_nbytes(boxes[rank]);
        place(boxes[rank], reach ? luce::allocate(device, bytes, "what devices pass each other")
                                 : pinned(device, bytes, "what devices pass each other"));
        place(counts[rank],
              luce::allocate(device, ggml_nbytes(counts[rank]), "what devices pass each other"));
    }
    place(failure, pinned(stages[0].device, 64, "what devices pass each other"));
}

void Exchange::reset() const {
    for (const Buffer &buffer : buffers_) {
        ggml_backend_buffer_clear(buffer.get(), 0);
    }
}

int32_t Exchange::failed() const {
    return *static_cast<const volatile int32_t *>(failure->data) - 1;
}

} // namespace luce
