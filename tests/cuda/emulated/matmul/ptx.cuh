// Stands in for native/kernels/rowmm_ptx.cuh. It has the tensor core's tile from the PTX manual's layout of
// m16n8k16, barriers in shared memory, and copies of which some are done at once and some when they are waited for, by chance.
#pragma once

#include "common/overlap.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <cuda_fp16.h>

#ifdef WITHOUT_BULK
#define ROWMM_BULK 0
#else
#define ROWMM_BULK 1
#endif

namespace luce {

constexpr int COPY_LANES = ROWMM_BULK ? 1 : 32;

inline void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    emulated::mma_16x8x16<__half2>(c, {a0, a1, a2, a3, b0, b1}, [](__half2 pair) { return __half22float2(pair); });
}

inline void hold(int &) {}
template <typename T> void hold(T *&) {}
inline int block_anew() { return int(blockIdx.x); }

// Addresses count from the beginning of the block's dynamic shared memory.
inline uint32_t shared_address(const void *p) {
    return uint32_t(static_cast<const uint8_t *>(p) - emulated::dynamic_shared);
}

// A phase of a barrier ends when all have arrived and all bytes that were announced have.
struct SharedBarrier {
    uint16_t arrivals, missing;
    int32_t bytes : 31;
    uint32_t phase : 1;
    void end_if_done() {
        if (missing == 0 && bytes == 0) {
            missing = arrivals;
            phase ^= 1;
        }
    }
};
inline SharedBarrier &barrier_at(uint32_t address) {
    static_assert(sizeof(SharedBarrier) == 8);
    if (address % 8 != 0) {
        abort();
    }
    return *reinterpret_cast<SharedBarrier *>(emulated::dynamic_shared + address);
}
// A copy that is on its way. It arrives at a barrier, ahead of the end of its phase.
struct LateCopy {
    uint32_t shared, barrier;
    const uint8_t *global;
    int bytes;
    void arrive() const {
        memcpy(emulated::dynamic_shared + shared, global, size_t(bytes));
        barrier_at(barrier).bytes -= bytes;
        barrier_at(barrier).end_if_done();
    }
};
inline std::vector<LateCopy> late_copies;
inline void barrier_init(uint32_t barrier, int arrivals) {
    barrier_at(barrier) = {uint16_t(arrivals), uint16_t(arrivals), 0, 0};
    if (std::any_of(late_copies.begin(), late_copies.end(), [&](const LateCopy &c) { return c.barrier == barrier; })) {
        abort(); // a block ended ahead of its copies
    }
}
inline void barrier_init_done() {}
inline void barrier_arrive(uint32_t barrier) {
    SharedBarrier &b = barrier_at(barrier);
    if (b.missing == 0) {
        abort(); // more arrive than the barrier was made for
    }
    b.missing--;
    b.end_if_done();
}
// A copy that is on its way arrives when somebody waits for it, and not when somebody asks.
inline bool phase_ended(uint32_t barrier, uint32_t parity) {
    return barrier_at(barrier).phase != parity;
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    for (int turns = 0;; turns++) {
        for (size_t i = 0; i < late_copies.size();) {
            if (late_copies[i].barrier == barrier) {
                late_copies[i].arrive();
                late_copies.erase(late_copies.begin() + int(i));
            } else {
                i++;
            }
        }
        if (phase_ended(barrier, parity)) {
            return;
        }
        if (turns == 1000000) {
            fprintf(stderr, "thread %u of block %u waits for ever\n", threadIdx.x, blockIdx.x);
            abort();
        }
        emulated::yield();
    }
}
inline void found(uint32_t x) {
    if (int32_t(x) < 0) {
        abort();
    }
}
inline uint32_t address_bits(const void *) { return 0; }
inline void check_copy(uint32_t shared, int bytes) {
    if (shared % 16 != 0 || bytes % 16 != 0 || shared + bytes > emulated::dynamic_bytes) {
        abort();
    }
}
#if ROWMM_BULK
inline void copies_begin(uint32_t barrier, int bytes) {
    barrier_at(barrier).bytes += bytes;
    barrier_arrive(barrier);
}
inline void copy_to_shared(uint32_t shared, const uint8_t *global, int bytes, uint32_t barrier, bool, int = 0, int = 0) {
    check_copy(shared, bytes);
    const LateCopy copy = {shared, barrier, global, bytes};
    if (emulated::chance() % 2 == 0) {
        copy.arrive();
    } else {
        late_copies.push_back(copy);
    }
}
inline void copies_end(uint32_t) {}
#else
// A lane's copies are there when it arrives, and others may run ahead of that.
inline void copies_begin(uint32_t, int) {}
inline void copy_to_shared(uint32_t shared, const uint8_t *global, int bytes, uint32_t, bool, int lane, int lanes) {
    check_copy(shared, bytes);
    for (int i = lane * 16; i < bytes; i += lanes * 16) {
        memcpy(emulated::dynamic_shared + shared + i, global + i, 16);
    }
}
inline void copy_to_shared(uint32_t shared, const uint8_t *global, int bytes, uint32_t barrier, bool keep) {
    copy_to_shared(shared, global, bytes, barrier, keep, int(threadIdx.x % 32), 32);
}
inline void copies_end(uint32_t barrier) {
    if (emulated::chance() % 2 == 0) {
        emulated::yield();
    }
    barrier_arrive(barrier);
}
#endif
// What a lane copies is there when it arrives, and others may run ahead of that.
inline std::vector<LateCopy> lane_copied[1024];
template <int BYTES> void lane_copies(uint32_t shared, const uint8_t *global) {
    if (shared % BYTES != 0 || reinterpret_cast<uintptr_t>(global) % BYTES != 0 || shared + BYTES > emulated::dynamic_bytes) {
        abort();
    }
    lane_copied[threadIdx.x].push_back({shared, 0, global, BYTES});
}
inline void lane_arrives(uint32_t barrier) {
    if (emulated::chance() % 2 == 0) {
        emulated::yield();
    }
    for (const LateCopy &copy : lane_copied[threadIdx.x]) {
        memcpy(emulated::dynamic_shared + copy.shared, copy.global, size_t(copy.bytes));
    }
    lane_copied[threadIdx.x].clear();
    barrier_arrive(barrier);
}
inline uint8_t *held_address(uint8_t *shared) { return shared; }

// A line is discarded once, by who alone reads it. What it held is gone.
inline void discard_line(const void *p) {
    constexpr int LINE = 128, GONE = 0xa5;
    uint8_t *line = static_cast<uint8_t *>(const_cast<void *>(p));
    const bool gone = std::all_of(line, line + LINE, [](uint8_t x) { return x == GONE; });
    if (reinterpret_cast<uintptr_t>(p) % LINE != 0 || gone) {
        fprintf(stderr, "a line was discarded %s\n", gone ? "twice" : "that does not begin there");
        abort();
    }
    memset(line, GONE, LINE);
}

inline uint32_t count_arrival(uint32_t *counter) { return (*counter)++; }

} // namespace luce
