// Stands in for native/kernels/attention/tile.cuh. Copies are done at once or when they are waited for, by chance.
#pragma once

#include "common/overlap.cuh"
#include "common/ring.cuh"

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
    int bytes;
    std::array<uint8_t, 16> words;
    void arrive() const { memcpy(emulated::dynamic_shared + to, words.data(), size_t(bytes)); }
};
struct LateGroups {
    uint64_t block = 0;
    std::vector<std::vector<LateWords>> groups;
};
inline std::vector<LateGroups> late_groups(1024);
inline std::vector<std::vector<LateWords>> &own_copies() {
    LateGroups &own = late_groups[size_t(emulated::current)];
    if (own.block != emulated::n_begun) {
        own.block = emulated::n_begun;
        own.groups.assign(1, {});
    }
    return own.groups;
}
template <int BYTES> void copy_async(uint32_t to, const void *from, bool valid) {
    if (to % BYTES != 0 || reinterpret_cast<uintptr_t>(from) % BYTES != 0 || to + BYTES > emulated::dynamic_bytes) {
        abort();
    }
    LateWords copy = {to, BYTES, {}};
    if (valid) {
        memcpy(copy.words.data(), from, BYTES);
    }
    if (emulated::chance() % 2 == 0) {
        copy.arrive();
    } else {
        own_copies().back().push_back(copy);
    }
}
template <int BYTES> void copy_async(uint32_t to, const void *from) {
    copy_async<BYTES>(to, from, true);
}
inline void copies_commit() {
    own_copies().emplace_back();
}
template <int GROUPS> void copies_wait() {
    auto &own = own_copies();
    while (own.size() > GROUPS + 1) {
        for (const LateWords &copy : own.front()) {
            copy.arrive();
        }
        own.erase(own.begin());
    }
}

// ---- barriers in shared memory ----

// The copies of a thread so far arrive ahead of it, and others may run meanwhile.
inline void arrive_after_copies(uint32_t at) {
    if (emulated::chance() % 2 == 0) {
        emulated::yield();
    }
    copies_commit();
    copies_wait<0>();
    barrier_arrive(at);
}
inline void wait_patiently(uint32_t at, uint32_t parity) {
    barrier_wait(at, parity);
}

inline emulated::Barrier named_barriers[16]; // by number, as the device has them
inline int barrier_of(int threads, int group) {
    return threads == 256 ? 1 : 3 + group;
}
inline void barrier(int threads, int group = 0) {
    named_barriers[barrier_of(threads, group)].wait(threads);
}
template <int THREADS> void loaders_barrier() {
    named_barriers[2].wait(THREADS);
}
inline bool barrier_or(int threads, int group, bool value) {
    static bool any[16];
    bool &seen = any[barrier_of(threads, group)];
    seen |= value;
    barrier(threads, group);
    const bool result = seen;
    barrier(threads, group);
    seen = false;
    barrier(threads, group);
    return result;
}
inline void show_to_wgmma() {}

// ---- values that are not finite ----

inline bool finite(uint32_t halves) {
    return (halves & 0x7c00) != 0x7c00 && (halves & 0x7c000000) != 0x7c000000;
}
inline bool finite(const uint4 &words) {
    return finite(words.x) && finite(words.y) && finite(words.z) && finite(words.w);
}
inline uint32_t finite_or_zero(uint32_t halves) {
    return halves & ((halves & 0x7c00) == 0x7c00 ? 0xffff0000 : ~0u) &
           ((halves & 0x7c000000) == 0x7c000000 ? 0xffff : ~0u);
}

// ---- the tensor cores ----

constexpr uint32_t ONES = 0x3c003c00; // it holds two F16

inline int here(int x) {
    return x;
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
