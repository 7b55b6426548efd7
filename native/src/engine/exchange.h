// Memory through which an engine's ranks on GPUs pass each other their parts of sums (kernels/exchange/exchange.h).
#pragma once

#include "engine/stage.h"

#include <deque>
#include <mutex>
#include <set>
#include <vector>

namespace luce {

struct Exchange {
    // Describes it without taking any: for steps of so many rows of the model's width, of which so many have logits.
    Exchange(const Model &model, uint32_t rows, uint32_t logit_rows);
    ~Exchange();
    Exchange(const Exchange &) = delete;
    Exchange &operator=(const Exchange &) = delete;

    uint64_t bytes() const; // on each rank's device, at most
    void allocate(const std::deque<Stage> &stages);
    // Kernels that wait for each other hold room on their devices: those of two engines could wait for each other's. So the steps
    // of engines that share devices come one after the other: what `first`, the first rank's stream, does between these two calls.
    using Turn = std::vector<std::unique_lock<std::mutex>>;
    Turn begin(const std::deque<Stage> &stages) const;
    void end(const std::deque<Stage> &stages, Turn turn) const;
    // All begin to count anew. No rank is in a step.
    void reset() const;
    // The rank that did not answer another one, or -1.
    int32_t failed() const;

    std::vector<ggml_tensor *> counts; // (ranks) {EXCHANGE_COUNTS} I32 on the rank's device
    // {ranks + 2} I64: where each rank's box is, and for how many values (ExchangeRanks); graphs are built of it.
    ggml_tensor *boxes;
    ggml_tensor *failure; // {1} I32 in the host's memory

private:
    Context tensors_;
    int64_t box_bytes_;
    std::vector<int64_t> table_; // what `boxes` points to
    std::vector<Buffer> box_buffers_, buffers_; // boxes, and all else
    std::set<const Device *> devices_;
    Event ended_; // where the first rank's stream was behind the last step
};

} // namespace luce
