#include "cpu/host_experts.h"

#include "cpu/exponential.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace luce {
namespace {

constexpr int64_t UP_UNIT = 32; // a unit has so many rows of gate and up, as many as a block has values
// A unit has so many rows of down. It is small, since there are no others to share out.
constexpr int64_t DOWN_UNIT = ROWS_GROUP;
static_assert(UP_UNIT % ROWS_GROUP == 0, "a unit must be whole groups");

int64_t units_of(int64_t N, int64_t unit) {
    return (N + unit - 1) / unit;
}

bool packs(ggml_type type) {
    return rows_input(type) == RowsInput::packed;
}

template <typename T> void grow(std::vector<T> &room, size_t n) {
    room.resize(std::max(room.size(), n));
}

// Multiplies rows n0 .. n0 + N - 1 of an expert's matrix with n inputs, out [n][N].
void multiply(const RowsWeight &all, int32_t expert, size_t expert_bytes, int64_t n0, int64_t N,
              const void *x, int64_t K, int32_t n, float *out) {
    RowsMatmulArgs args{};
    args.K = K;
    args.T = n;
    args.x = x;
    const uint8_t *data = static_cast<const uint8_t *>(all.data) + size_t(expert) * expert_bytes;
    const float *scale = all.scale == nullptr ? nullptr : all.scale + expert;
    const RowsWeight rows = {data + size_t(n0) * all.row_bytes, all.type, N, all.row_bytes, out, scale};
    multiply_rows(args, rows, 0, N);
}

void fetch_first(RowsWeight expert, size_t expert_offset, int64_t n0, int64_t N) {
    expert.data = static_cast<const uint8_t *>(expert.data) + expert_offset;
    fetch_rows(expert, n0, n0 + N);
}

} // namespace

bool ram_experts_have(ggml_type gate, ggml_type up, ggml_type down) {
    return rows_input(gate) != RowsInput::none && rows_input(gate) == rows_input(up) &&
           rows_input(down) != RowsInput::none;
}

void RamExperts::reserve(int32_t T, int32_t n_used, int32_t n_expert, int64_t E, int64_t FF) {
    const size_t pairs = size_t(T) * size_t(n_used);
    grow(packed_, size_t(T) * size_t(E / 32));
    grow(packed_h_, pairs * size_t(FF / 32));
    grow(h_, pairs * size_t(FF));
    grow(chosen_, std::min(size_t(n_expert), pairs));
    grow(first_, size_t(n_expert) + 1);
    grow(pairs_, pairs);
    grow(places_, pairs);
}

// Groups pairs by expert.
void RamExperts::group(const RamExpertsArgs &a) {
    const int32_t n_pairs = a.T * a.n_used;
    const auto expert = [&](int32_t pair) {
        return size_t(a.route[pair / a.n_used * 2 * a.n_used + pair % a.n_used]);
    };
    first_.assign(size_t(a.n_expert) + 1, 0);
    for (int32_t p = 0; p < n_pairs; p++) {
        first_[expert(p)]++;
    }
    chosen_.clear();
    int32_t before = 0;
    for (int32_t e = 0; e < a.n_expert; e++) {
        const int32_t n = first_[size_t(e)];
        if (n > 0) {
            chosen_.push_back({e, before, n});
        }
        first_[size_t(e)] = before;
        before += n;
    }
    for (int32_t p = 0; p < n_pairs; p++) {
        const int32_t place = first_[expert(p)]++;
        pairs_[size_t(place)] = p;
        places_[size_t(p)] = place;
    }
}

// Returns the inputs of an expert's rows side by side, by the calling thread.
const void *RamExperts::input(const RamExpertsArgs &a, const Chosen &chosen) const {
    const bool packed = packs(a.gate.type);
    if (chosen.n == a.T) { // they are all rows in their order
        return packed ? static_cast<const void *>(packed_.data()) : a.x;
    }
    const auto row = [&](int32_t c) { return pairs_[size_t(chosen.first + c)] / a.n_used; };
    static thread_local std::vector<PackedBlock> blocks;
    static thread_local std::vector<float> values;
    if (packed) {
        grow(blocks, size_t(a.E / 32 * chosen.n));
        PackedBlock *to = blocks.data();
        for (int64_t b = 0; b < a.E / 32; b++) {
            for (int32_t c = 0; c < chosen.n; c++) {
                *to++ = packed_[size_t(b * a.T + row(c))];
            }
        }
        return blocks.data();
    }
    grow(values, size_t(a.E * chosen.n));
    for (int32_t c = 0; c < chosen.n; c++) {
        std::copy_n(a.x + row(c) * a.E, a.E, values.begin() + c * a.E);
    }
    return values.data();
}

void *RamExperts::hidden(const RamExpertsArgs &a, const Chosen &chosen) {
    if (packs(a.down.type)) {
        return packed_h_.data() + chosen.first * (a.FF / 32);
    }
    return h_.data() + chosen.first * a.FF;
}

// A unit is rows of gate and up of one expert.
void RamExperts::up(const RamExpertsArgs &a, int64_t begin, int64_t end) {
    static thread_local std::vector<float> scratch;
    const int64_t units = units_of(a.FF, UP_UNIT);
    const void *x = nullptr;
    for (int64_t u = begin; u < end; u++) {
        const Chosen &chosen = chosen_[size_t(u / units)];
        const int64_t n0 = u % units * UP_UNIT, N = std::min(UP_UNIT, a.FF - n0);
        if (u == begin || n0 == 0) {
            x = input(a, chosen);
        }
        grow(scratch, size_t(2 * chosen.n * UP_UNIT));
        float *gate = scratch.data(), *up = gate + chosen.n * N;
        fetch_first(a.up, size_t(chosen.expert) * a.up_bytes, n0, N);
        multiply(a.gate, chosen.expert, a.gate_bytes, n0, N, x, a.E, chosen.n, gate);
        multiply(a.up, chosen.expert, a.up_bytes, n0, N, x, a.E, chosen.n, up);
        activate(a.activation, gate, up, chosen.n * N, gate);
        if (packs(a.down.type)) { // FF is whole blocks, and so this is one
            auto *blocks = static_cast<PackedBlock *>(hidden(a, chosen)) + u % units * chosen.n;
            cpu_pack_rows({gate, N, chosen.n, blocks}, 0, 1);
        } else {
            for (int32_t c = 0; c < chosen.n; c++) {
                std::copy_n(gate + c * N, N, static_cast<float *>(hidden(a, chosen)) + c * a.FF + n0);
            }
        }
    }
}

// A unit is rows of down of all experts, so that the sums of these rows are done here too.
void RamExperts::down(const RamExpertsArgs &a, int64_t begin, int64_t end) {
    static thread_local std::vector<float> scratch; // [T*n_used][N]; it is in the order of experts
    grow(scratch, size_t(a.T * a.n_used * DOWN_UNIT));
    for (int64_t u = begin; u < end; u++) {
        const int64_t n0 = u * DOWN_UNIT, N = std::min<int64_t>(DOWN_UNIT, a.E - n0);
        for (size_t i = 0; i < chosen_.size(); i++) {
            if (i + 1 < chosen_.size()) {
                fetch_first(a.down, size_t(chosen_[i + 1].expert) * a.down_bytes, n0, N);
            }
            const Chosen &chosen = chosen_[i];
            multiply(a.down, chosen.expert, a.down_bytes, n0, N, hidden(a, chosen), a.FF, chosen.n,
                     scratch.data() + chosen.first * N);
        }
        for (int32_t t = 0; t < a.T; t++) {
            float weights[MAX_USED], sums[DOWN_UNIT] = {};
            memcpy(weights, a.route + t * 2 * a.n_used + a.n_used, size_t(a.n_used) * sizeof(float));
            for (int32_t r = 0; r < a.n_used; r++) {
                const float *y = scratch.data() + places_[size_t(t * a.n_used + r)] * N;
                for (int64_t i = 0; i < N; i++) {
                    sums[i] = std::fma(weights[r], y[i], sums[i]);
                }
            }
            std::copy_n(sums, N, a.out + t * a.E + n0);
        }
    }
}

void RamExperts::run(const RamExpertsArgs &a, const RunUnits &run) {
    reserve(a.T, a.n_used, a.n_expert, a.E, a.FF);
    group(a);
    if (packs(a.gate.type)) {
        constexpr int64_t ALONE = 256; // fewer blocks take less than a meeting of threads
        const int64_t blocks = a.E / 32 * a.T;
        const PackArgs pack = {a.x, a.E, a.T, packed_.data()};
        const int64_t n = blocks <= ALONE ? 1 : (blocks + ALONE - 1) / ALONE;
        const auto share = [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) {
                cpu_pack_rows(pack, int(i), int(n));
            }
        };
        run(n, share);
    }
    run(int64_t(chosen_.size()) * units_of(a.FF, UP_UNIT),
        [&](int64_t begin, int64_t end) { up(a, begin, end); });
    run(units_of(a.E, DOWN_UNIT), [&](int64_t begin, int64_t end) { down(a, begin, end); });
}

} // namespace luce
