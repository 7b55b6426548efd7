#include "engine/expert_slots.h"

#include "step/faults.h"

#include <numeric>

namespace luce {

ExpertSlots::ExpertSlots(Stage &stage, const Moe &mixture, uint32_t n_slots)
    : moe(mixture), slot_of(moe.shape.n_expert, -1), expert_in(n_slots, -1), stage_(stage) {
    uint64_t bytes = 0;
    for (const ggml_tensor *weight : {moe.down, moe.gate_up != nullptr ? moe.gate_up : moe.gate, moe.up}) {
        if (weight != nullptr) {
            parts_.push_back({weight, bytes, expert_bytes(weight)});
            bytes += (parts_.back().bytes * n_slots + 255) / 256 * 256;
        }
    }
    ggml_context *ctx = stage.tensors.get();
    const int64_t n = moe.shape.n_expert;
    offsets = ggml_new_tensor_2d(ctx, GGML_TYPE_I64, n, int64_t(parts_.size()));
    counts = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n);
    stage.state_bytes += ggml_nbytes(offsets) + ggml_nbytes(counts);
    if (n_slots > 0) {
        slots = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, int64_t(bytes));
        stage.expert_bytes += bytes;
    }
}

int64_t ExpertSlots::row_of(const ggml_tensor *weight) const {
    for (size_t i = 0; i < parts_.size(); i++) {
        if (parts_[i].weight == weight) {
            return int64_t(i);
        }
    }
    fail(LUCE_E_INTERNAL, "%s has no slots", weight->name);
}

void ExpertSlots::copy(const Part &part, uint32_t expert, uint32_t slot, uint32_t n) {
    const auto *home = static_cast<const uint8_t *>(part.weight->data) + expert * part.bytes;
    ggml_backend_tensor_set_async(stage_.steps.get(), slots, home, part.first + slot * part.bytes,
                                  n * part.bytes);
}

void ExpertSlots::write_table() {
    const size_t n = slot_of.size();
    std::vector<int64_t> &table = tables_.emplace_back(); // the copy reads it
    table.reserve(n * parts_.size());
    for (const Part &part : parts_) {
        const auto home = reinterpret_cast<intptr_t>(part.weight->data);
        for (size_t e = 0; e < n; e++) {
            const int32_t slot = slot_of[e];
            table.push_back(slot < 0 ? int64_t(e * part.bytes)
                                     : int64_t(reinterpret_cast<intptr_t>(slots->data) +
                                               intptr_t(part.first) + slot * intptr_t(part.bytes) - home));
        }
    }
    ggml_backend_tensor_set_async(stage_.steps.get(), offsets, table.data(), 0,
                                  table.size() * sizeof(int64_t));
}

void ExpertSlots::fill() {
    const auto n = uint32_t(expert_in.size());
    for (const Part &part : parts_) {
        if (n > 0) {
            copy(part, 0, 0, n);
        }
    }
    std::iota(expert_in.begin(), expert_in.end(), 0);
    std::iota(slot_of.begin(), slot_of.begin() + n, 0);
    write_table();
}

void ExpertSlots::poison(bool held) {
    for (const Part &part : parts_) {
        for (size_t slot = 0; slot < expert_in.size(); slot++) {
            if (held || expert_in[slot] < 0) {
                ggml_backend_tensor_memset(slots, 0xff, part.first + slot * part.bytes, part.bytes);
            }
        }
    }
}

void ExpertSlots::read(int32_t *to) const {
    ggml_backend_tensor_get_async(stage_.steps.get(), counts, to, 0, ggml_nbytes(counts));
}

void ExpertSlots::move(const ExpertMove *moves, size_t n) {
    for (size_t i = 0; i < n; i++) { // no step reads a slot that is written
        int32_t &had = expert_in[moves[i].slot];
        if (had >= 0) {
            slot_of[size_t(had)] = -1;
            had = -1;
        }
    }
    write_table();
    for (size_t i = 0; i < n; i++) {
        for (const Part &part : parts_) {
            if (fails_here(Fault::move)) {
                fail(LUCE_E_DEVICE, "copying experts of %s failed, as a test asked", part.weight->name);
            }
            copy(part, moves[i].expert, moves[i].slot);
        }
    }
    for (size_t i = 0; i < n; i++) {
        expert_in[moves[i].slot] = int32_t(moves[i].expert);
        slot_of[moves[i].expert] = int32_t(moves[i].slot);
    }
    write_table();
}

} // namespace luce
