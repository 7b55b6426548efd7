// Stands in for native/kernels/attention/tile.cuh: what attention of prompts takes of it. Copies are done at once or when they
// are waited for, by chance.
#pragma once

#include "common/overlap.cuh"
#include "matmul/ptx.cuh"

#include <array>
#include <map>

#include <cuda_fp16.h>

namespace luce {

template <int BYTES> int swizzle(int row, int word) {
    return row * BYTES + 16 * (BYTES == 64 ? word ^ (row >> 1 & 3) : word ^ (row & 7));
}
inline uint32_t at_word(uint32_t address, int x) {
    return (address ^ x % 8 * 16) + x / 8 * 128;
}

// The groups of copies that a thread has under way, the last of which it has not committed yet. Those of a block that has ended
// are nobody's.
struct LateWords {
    uint32_t to;
    std::array<uint8_t, 16> words;
};
struct LateGroups {
    uint64_t block = 0;
    std::vector<std::vector<LateWords>> groups;
};
inline std::map<int, LateGroups> late_groups;
inline std::vector<std::vector<LateWords>> &own_copies() {
    LateGroups &own = late_groups[emulated::current];
    if (own.block != emulated::n_begun) {
        own.block = emulated::n_begun;
        own.groups.assign(1, {});
    }
    return own.groups;
}
template <int BYTES> void copy_async(uint32_t to, const void *from, bool valid) {
    static_assert(BYTES == 16);
    if (to % 16 != 0 || to + BYTES > emulated::dynamic_bytes) {
        abort();
    }
    LateWords copy = {to, {}};
    if (valid) {
        memcpy(copy.words.data(), from, BYTES);
    }
    if (emulated::chance() % 2 == 0) {
        memcpy(emulated::dynamic_shared + to, copy.words.data(), BYTES);
    } else {
        own_copies().back().push_back(copy);
    }
}
inline void copies_commit() {
    own_copies().emplace_back();
}
template <int GROUPS> void copies_wait() {
    auto &own = own_copies();
    while (own.size() > GROUPS + 1) {
        for (const LateWords &copy : own.front()) {
            memcpy(emulated::dynamic_shared + copy.to, copy.words.data(), 16);
        }
        own.erase(own.begin());
    }
}

inline void load_matrices(uint32_t (&m)[4], uint32_t at) {
    emulated::load_matrices(m, emulated::dynamic_shared + at);
}
inline void load_transposed(uint32_t (&m)[4], uint32_t at) {
    emulated::load_transposed(m, emulated::dynamic_shared + at);
}
inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma(c, a[0], a[1], a[2], a[3], b0, b1);
}
inline float exp2_fast(float x) {
    return std::exp2(x);
}
inline uint32_t pack_halves(float x, float y) {
    const __half2 h = __floats2half2_rn(x, y);
    uint32_t words;
    memcpy(&words, static_cast<const void *>(&h), sizeof(words));
    return words;
}

} // namespace luce
