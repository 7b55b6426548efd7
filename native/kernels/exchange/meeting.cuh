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

struct Meeting {
    const ExchangeRanks &a;
    int block;
    int64_t numbers_at, slot_bytes; // of a box: where its numbers begin, and what a sender has of a slot

    __device__ Meeting(const ExchangeRanks &ranks, int of_block)
        : a(ranks), block(of_block),
          numbers_at(a.box_bytes - a.n_ranks * EXCHANGE_BLOCKS * int64_t(sizeof(uint32_t))),
          slot_bytes(numbers_at / (2 * (a.n_ranks - 1)) / 16 * 16) {}

    // Where `owner` finds what `sender` has sent.
    template <class V> __device__ V *values(int owner, int sender) const {
        const int place = a.slot * (a.n_ranks - 1) + (sender < owner ? sender : sender - 1);
        return reinterpret_cast<V *>(static_cast<uint8_t *>(a.boxes[owner]) + place * slot_bytes);
    }
    __device__ volatile uint32_t *number(int owner, int sender) const {
        return reinterpret_cast<volatile uint32_t *>(static_cast<uint8_t *>(a.boxes[owner]) + numbers_at) +
               sender * EXCHANGE_BLOCKS + block;
    }
    // It is written by the exchange ahead.
    __device__ uint32_t next() const {
        return uint32_t(*static_cast<volatile int32_t *>(a.counts + block)) + 1;
    }

    template <class V> __device__ void send(int64_t i, const V &v) const {
        for (int to = 0; to < a.n_ranks; to++) {
            if (to != a.rank) {
                __stcg(values<V>(to, a.rank) + i, v);
            }
        }
    }
    // All threads of the block come here when they have sent their values, and go on when those of the others are here.
    __device__ void meet(uint32_t number_of_it) const {
        __syncthreads();
        const int other = threadIdx.x;
        if (other < a.n_ranks && other != a.rank) {
            __threadfence_system();
            *number(other, a.rank) = number_of_it;
            await(other, number_of_it);
            __threadfence_system();
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            *static_cast<volatile int32_t *>(a.counts + block) = int32_t(number_of_it);
        }
    }
    // The sum of all ranks' values, of which this one has `own`.
    template <class V, class Add> __device__ V sum(int64_t i, const V &own, const Add &add) const {
        V all = a.rank == 0 ? own : __ldcv(values<V>(a.rank, 0) + i);
        for (int rank = 1; rank < a.n_ranks; rank++) {
            add(all, rank == a.rank ? own : __ldcv(values<V>(a.rank, rank) + i));
        }
        return all;
    }

private:
    __device__ void await(int sender, uint32_t number_of_it) const {
        volatile int32_t *dead = a.counts + EXCHANGE_BLOCKS;
        unsigned long long begun = 0;
        for (uint32_t polls = 1; int32_t(*number(a.rank, sender) - number_of_it) < 0; polls++) {
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

// Says whether ranks are as a launch of so many values and blocks takes them.
inline bool can_meet(const ExchangeRanks &a, int64_t values, int64_t blocks) {
    return a.n_ranks >= 2 && a.n_ranks <= MAX_RANKS && a.rank >= 0 && a.rank < a.n_ranks && a.slot >= 0 &&
           a.slot <= 1 && blocks <= EXCHANGE_BLOCKS && exchange_box_bytes(a.n_ranks, values) <= a.box_bytes;
}

} // namespace luce
