// Adds what several devices have of a sum (exchange.h).
#include "exchange/exchange.h"

#include "common/overlap.cuh"
#include "common/pointers.h"

#include <cuda_runtime.h>

namespace luce {
namespace {

constexpr int THREADS = 128;
constexpr unsigned long long PATIENCE = 10000000000; // nanoseconds: what answers later has failed

__device__ unsigned long long nanoseconds() {
    unsigned long long now = 0;
#ifdef __CUDA_ARCH__
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
#endif
    return now;
}

// Where the parts are that a rank gets from the others, and their numbers.
struct Box {
    float4 *values;
    volatile uint32_t *numbers; // [n_ranks][EXCHANGE_BLOCKS]
    int64_t slot_of_rank; // in float4
    int owner, n_ranks;

    __device__ Box(const ExchangeArgs &a, int rank) : owner(rank), n_ranks(a.n_ranks) {
        const int64_t numbers_bytes = n_ranks * EXCHANGE_BLOCKS * int64_t(sizeof(uint32_t));
        values = static_cast<float4 *>(a.boxes[rank]);
        numbers = reinterpret_cast<volatile uint32_t *>(static_cast<uint8_t *>(a.boxes[rank]) + a.box_bytes -
                                                        numbers_bytes);
        slot_of_rank = (a.box_bytes - numbers_bytes) / (2 * (n_ranks - 1) * int64_t(sizeof(float4)));
    }
    __device__ float4 *from(int sender, uint32_t number) const {
        const int place = sender < owner ? sender : sender - 1;
        return values + (int64_t(number & 1) * (n_ranks - 1) + place) * slot_of_rank;
    }
    __device__ volatile uint32_t *number(int sender) const {
        return numbers + sender * EXCHANGE_BLOCKS + blockIdx.x;
    }
};

// Waits until a rank has come to this number.
__device__ void await(const ExchangeArgs &a, const Box &own, int sender, uint32_t number) {
    const volatile int32_t *dead = a.counts + EXCHANGE_BLOCKS;
    unsigned long long begun = 0;
    for (uint32_t polls = 1; int32_t(*own.number(sender) - number) < 0; polls++) {
        if (polls % 1024 != 0) {
            continue;
        }
        const unsigned long long now = nanoseconds();
        begun = begun == 0 ? now : begun;
        if (*dead != 0 || now - begun > PATIENCE) {
            *const_cast<volatile int32_t *>(dead) = 1;
            *static_cast<volatile int32_t *>(a.failure) = 1 + sender;
            return;
        }
    }
}

__device__ __forceinline__ void add(float4 &sum, const float4 &v) {
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
}

__global__ void __launch_bounds__(THREADS) exchange_kernel(const __grid_constant__ ExchangeArgs a) {
    let_next_start();
    const int64_t n = a.T * a.E / 4, begin = int64_t(blockIdx.x) * THREADS + threadIdx.x,
                  step = int64_t(gridDim.x) * THREADS;
    const Box own(a, a.rank);
    wait_for_previous();
    const uint32_t number = uint32_t(*static_cast<volatile int32_t *>(a.counts + blockIdx.x)) + 1;
    const float4 *part = reinterpret_cast<const float4 *>(a.part), *x = reinterpret_cast<const float4 *>(a.x);
    for (int to = 0; to < a.n_ranks; to++) {
        if (to == a.rank) {
            continue;
        }
        float4 *there = Box(a, to).from(a.rank, number);
        for (int64_t i = begin; i < n; i += step) {
            __stcg(there + i, __ldcg(part + i));
        }
    }
    __syncthreads();
    if (threadIdx.x < a.n_ranks && threadIdx.x != a.rank) {
        const int other = threadIdx.x;
        __threadfence_system();
        *Box(a, other).number(a.rank) = number;
        await(a, own, other, number);
        __threadfence_system();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        *static_cast<volatile int32_t *>(a.counts + blockIdx.x) = int32_t(number);
    }
    for (int64_t i = begin; i < n; i += step) {
        float4 sum = a.rank == 0 ? __ldcg(part + i) : __ldcv(own.from(0, number) + i);
        for (int rank = 1; rank < a.n_ranks; rank++) {
            add(sum, rank == a.rank ? __ldcg(part + i) : __ldcv(own.from(rank, number) + i));
        }
        const float4 before = __ldcg(x + i);
        reinterpret_cast<float4 *>(a.out)[i] = {before.x + sum.x, before.y + sum.y, before.z + sum.z,
                                                before.w + sum.w};
    }
}

} // namespace

int cuda::exchange(const ExchangeArgs &a, void *stream) {
    const int64_t n = a.T * a.E;
    if (a.n_ranks < 2 || a.n_ranks > MAX_RANKS || a.rank < 0 || a.rank >= a.n_ranks || a.E % 4 != 0 || n < 0 ||
        exchange_box_bytes(a.n_ranks, n) > a.box_bytes || !given(a.x) || !given(a.part) || !given(a.out)) {
        return int(cudaErrorInvalidValue);
    }
    if (n == 0) {
        return 0;
    }
    const int64_t all = (n / 4 + THREADS - 1) / THREADS,
                  blocks = all < EXCHANGE_BLOCKS ? all : EXCHANGE_BLOCKS;
    return int(launch_kernel(exchange_kernel, dim3(unsigned(blocks)), THREADS, 0,
                             static_cast<cudaStream_t>(stream), true, a));
}

} // namespace luce
