// How a block of one rank meets those of the others that have the same values (exchange.h).
#pragma once

#include "exchange/exchange.h"

#include <cuda_runtime.h>

namespace luce {

constexpr unsigned long long EXCHANGE_PATIENCE = 10000000000; // nanoseconds: what answers later has failed

__device__ inline unsigned long long nanoseconds() {
    unsigned long long now = 0;
#ifdef __CUDA_ARCH__
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
#endif
    return now;
}

// Two values' bits on their way through a box, which has NOT_HERE in the place of each until it arrives.
constexpr uint32_t NOT_HERE = ~0u; // bits of a NaN, which is sent as another one
struct SentPair {
    uint32_t x, y;

    __device__ bool here() const { return x != NOT_HERE && y != NOT_HERE; }
};
__device__ __forceinline__ uint32_t sent_bits(float v) {
    const uint32_t bits = __float_as_uint(v);
    return bits == NOT_HERE ? NOT_HERE >> 1 : bits;
}
__device__ __forceinline__ void store_pair(SentPair *to, const SentPair &p) {
#ifdef __CUDA_ARCH__
    asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(p.x), "r"(p.y) : "memory");
#else
    *to = p;
#endif
}
__device__ __forceinline__ SentPair load_pair(const SentPair *from) {
    SentPair p;
#ifdef __CUDA_ARCH__
    asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(p.x), "=r"(p.y) : "l"(from) : "memory");
#else
    p = *from;
#endif
    return p;
}

struct Meeting {
    const ExchangeRanks &a;
    int block; // of those that have a number

    __device__ explicit Meeting(const ExchangeRanks &ranks, int of_block = 0) : a(ranks), block(of_block) {}

    // Which of a box's places of values `owner` has for what `sender` sends.
    __device__ int64_t place(int owner, int sender) const {
        return a.slot * (a.n_ranks - 1) + (sender < owner ? sender : sender - 1);
    }
    // A prompt's values, a step's, and the numbers of blocks lie one behind the other.
    __device__ float4 *values(int owner, int sender) const {
        return static_cast<float4 *>(a.boxes[owner]) + place(owner, sender) * (a.values / 4);
    }
    __device__ SentPair *pairs(int owner, int sender) const {
        return reinterpret_cast<SentPair *>(static_cast<float4 *>(a.boxes[owner]) +
                                            2 * (a.n_ranks - 1) * (a.values / 4)) +
               place(owner, sender) * (a.step_values / 2);
    }
    __device__ volatile uint32_t *number(int owner, int sender) const {
        return reinterpret_cast<volatile uint32_t *>(static_cast<float4 *>(a.boxes[owner]) +
                                                     2 * (a.n_ranks - 1) *
                                                         (a.values / 4 + a.step_values / 4)) +
               sender * EXCHANGE_BLOCKS + block;
    }
    // The number of this exchange. The one ahead has written it.
    __device__ uint32_t next() const {
        return uint32_t(*static_cast<volatile int32_t *>(a.counts + block)) + 1;
    }
    // One thread says so when all of the block have asked.
    __device__ void reached(uint32_t n) const {
        *static_cast<volatile int32_t *>(a.counts + block) = int32_t(n);
    }

    // ---- many values: a number a block ----

    __device__ void send(int64_t i, const float4 &v) const {
        for (int to = 0; to < a.n_ranks; to++) {
            if (to != a.rank) {
                __stcg(values(to, a.rank) + i, v);
            }
        }
    }
    // All threads of the block come here when they have sent their values, and go on when those of the others are here.
    __device__ void meet(uint32_t n) const {
        __syncthreads();
        const int other = threadIdx.x;
        if (other < a.n_ranks && other != a.rank) {
            __threadfence_system();
            *number(other, a.rank) = n;
            await(other, [&] { return int32_t(*number(a.rank, other) - n) >= 0; });
            __threadfence_system();
        }
        __syncthreads();
    }
    // The sum of all ranks' values, of which this one has `own`.
    __device__ float4 sum(int64_t i, const float4 &own) const {
        float4 all = a.rank == 0 ? own : __ldcv(values(a.rank, 0) + i);
        for (int rank = 1; rank < a.n_ranks; rank++) {
            const float4 v = rank == a.rank ? own : __ldcv(values(a.rank, rank) + i);
            all.x += v.x, all.y += v.y, all.z += v.z, all.w += v.w;
        }
        return all;
    }

    // ---- a pair of values a thread ----

    __device__ void send(int64_t i, const float2 &v) const {
        for (int to = 0; to < a.n_ranks; to++) {
            if (to != a.rank) {
                store_pair(pairs(to, a.rank) + i, {sent_bits(v.x), sent_bits(v.y)});
            }
        }
    }
    __device__ float2 sum(int64_t i, const float2 &own) const {
        float2 all = {};
        for (int rank = 0; rank < a.n_ranks; rank++) {
            float2 v = own;
            if (rank != a.rank) {
                SentPair *from = pairs(a.rank, rank) + i, p;
                await(rank, [&] {
                    p = load_pair(from);
                    return p.here();
                });
                store_pair(from, {NOT_HERE, NOT_HERE});
                v = {__uint_as_float(p.x), __uint_as_float(p.y)};
            }
            all = rank == 0 ? v : float2{all.x + v.x, all.y + v.y};
        }
        return all;
    }

private:
    template <class Here> __device__ __forceinline__ void await(int sender, const Here &here) const {
        volatile int32_t *dead = a.counts + EXCHANGE_BLOCKS;
        unsigned long long begun = 0;
        for (uint32_t polls = 1; !here(); polls++) {
            if (polls % 1024 != 0) {
                continue;
            }
            const unsigned long long now = nanoseconds();
            begun = begun == 0 ? now : begun;
            if (*dead != 0 || now - begun > EXCHANGE_PATIENCE) {
                *dead = 1;
                *static_cast<volatile int32_t *>(a.failure) = 1 + sender;
                return;
            }
        }
    }
};

// Says whether ranks are as launches take them.
inline bool can_meet(const ExchangeRanks &a) {
    return a.n_ranks >= 2 && a.n_ranks <= MAX_RANKS && a.rank >= 0 && a.rank < a.n_ranks && a.slot >= 0 &&
           a.slot <= 1 && a.values % 4 == 0 && a.step_values % 4 == 0;
}

} // namespace luce
