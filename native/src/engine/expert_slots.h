// Where the experts of a mixture lie, of a model whose experts are at home in host memory (Model::experts_at_home): some have a
// slot on the device, and the device reads the others at home, by the same op in the same order of sums. So no bit depends on the
// placement, and it may change between any two steps. A step finds an expert through a table on the device: graphs that were
// built, or captured, stay as they are.
//
// It counts which experts steps read. Who is to have a slot is the caller's to decide (luce_engine_move_experts).
#pragma once

#include "engine/stage.h"

#include <vector>

namespace luce {

struct ExpertMove {
    uint32_t layer, expert, slot; // the layer counts among those that have experts
};

struct ExpertSlots {
    // Describes the tensors in a stage's memory. The first n_slots experts have slots first.
    ExpertSlots(Stage &stage, const Moe &moe, uint32_t n_slots);

    // These are enqueued on the stage's stream of steps, behind those that are under way. What reads or needs them waits for that
    // stream, and then calls arrived().
    void fill(); // it comes before the first step
    void read(int32_t *to) const; // the counts (n_expert)
    int64_t row_of(const ggml_tensor *weight) const; // of the tables

    // Gives slots to experts that have none. Who had them has none then, also where it throws: an expert that was to move is
    // at home then, and each can be read.
    void move(const ExpertMove *moves, size_t n);

    void arrived() { tables_.clear(); }
    void poison(bool held); // for tests: makes NaN of slots that nobody holds, or of all

    const Moe &moe;
    ggml_tensor
        *offsets; // {n_expert, weights} I64: how far an expert lies from the first at home, in each weight
    ggml_tensor *counts; // {n_expert} I32: how often rows of steps have had each, which wraps around
    ggml_tensor *slots = nullptr; // {bytes} I8; each weight has its n_slots one behind the other
    std::vector<int32_t> slot_of, expert_in; // or -1

private:
    struct Part { // the slots of a weight
        const ggml_tensor *weight;
        uint64_t first, bytes; // they begin there in `slots`, and each is so long
    };
    void copy(const Part &part, uint32_t expert, uint32_t slot, uint32_t n = 1);
    void write_table();

    const Stage &stage_;
    std::vector<Part> parts_;
    std::vector<std::vector<int64_t>> tables_; // on their way
};

} // namespace luce
