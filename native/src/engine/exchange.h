// Memory through which an engine's ranks on GPUs pass each other their parts of sums (kernels/exchange/exchange.h).
#pragma once

#include "engine/stage.h"

#include <deque>
#include <vector>

namespace luce {

struct Exchange {
    // Describes it without taking any: for steps of so many rows of the model's width.
    Exchange(const Model &model, uint32_t rows);

    uint64_t bytes() const; // on each rank's device, at most
    void allocate(const std::deque<Stage> &stages);
    // All begin to count anew. No rank is in a step.
    void reset() const;
    // The rank that did not answer another one, or -1.
    int32_t failed() const;

    std::vector<ggml_tensor *> counts; // (ranks) {EXCHANGE_COUNTS} I32 on the rank's device
    ggml_tensor
        *boxes; // {ranks + 1} I64: where each rank's box is, and how long all are; graphs are built of it
    ggml_tensor *failure; // {1} I32 in the host's memory

private:
    Context tensors_;
    int64_t box_bytes_;
    std::vector<int64_t> table_; // what `boxes` points to
    std::vector<Buffer> buffers_;
};

} // namespace luce
