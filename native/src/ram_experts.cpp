#include "ram_experts.h"

#include <algorithm>

namespace luce {

bool ram_experts_have(ggml_type gate, ggml_type up, ggml_type down) {
    return rows_input(gate) != RowsInput::none && rows_input(gate) == rows_input(up) &&
           rows_input(down) != RowsInput::none;
}

void RamExperts::reserve(int32_t T, int32_t n_used, int64_t E, int64_t FF) {
    const size_t pairs = size_t(T) * size_t(n_used);
    const auto grow = [](auto &room, size_t n) { room.resize(std::max(room.size(), n)); };
    grow(h_, pairs * size_t(FF));
    grow(y_, pairs * size_t(E));
    grow(packed_, std::max(size_t(T) * size_t(E), pairs * size_t(FF)) / 32);
}

void RamExperts::run(const RamExpertsArgs &a, const RunParts &run) {
    reserve(a.T, a.n_used, a.E, a.FF);
    // Returns x [T][K] as weights of this type take it.
    const auto input = [&](const float *x, int64_t K, int32_t T, ggml_type type) -> const void * {
        if (rows_input(type) != RowsInput::packed) {
            return x;
        }
        const PackArgs pack = {x, K, T, packed_.data()};
        run([&](int ith, int nth) { cpu_pack_rows(pack, ith, nth); });
        return packed_.data();
    };
    ExpertsArgs e{};
    e.route = a.route;
    e.n_expert = a.n_expert;
    e.n_used = a.n_used;
    e.T = a.T;
    e.n_weights = 2;
    e.weights[0] = a.gate;
    e.weights[1] = a.up;
    e.expert_bytes[0] = a.gate_bytes;
    e.expert_bytes[1] = a.up_bytes;
    e.K = a.E;
    e.x = input(a.x, a.E, a.T, a.gate.type);
    e.out = h_.data();
    run([&](int ith, int nth) { cpu_experts(e, ith, nth); });

    e.n_weights = 1;
    e.weights[0] = a.down;
    e.expert_bytes[0] = a.down_bytes;
    e.K = a.FF;
    e.own_input = true;
    e.x = input(h_.data(), a.FF, a.T * a.n_used, a.down.type);
    e.out = y_.data();
    run([&](int ith, int nth) { cpu_experts(e, ith, nth); });

    const ExpertsSumArgs sum = {a.route, y_.data(), a.n_used, a.T, a.E, a.out};
    run([&](int ith, int nth) { cpu_experts_sum(sum, ith, nth); });
}

} // namespace luce
