// Adds what several devices have of the sums of rows (exchange.h), a prompt's or a step's.
#include "common/overlap.cuh"
#include "common/pointers.h"
#include "exchange/meeting.cuh"

namespace luce {
namespace {

// So many blocks that those which add come beside others which still send.
constexpr int THREADS = 256, BLOCKS = EXCHANGE_BLOCKS, STEP_THREADS = 128;

__global__ void __launch_bounds__(THREADS) exchange_kernel(const __grid_constant__ ExchangeArgs a) {
    let_next_start();
    const int64_t n = a.T * a.E / 4, begin = int64_t(blockIdx.x) * THREADS + threadIdx.x,
                  step = int64_t(gridDim.x) * THREADS;
    const Meeting meeting(a.ranks, int(blockIdx.x));
    wait_for_previous();
    const uint32_t number = meeting.next();
    const float4 *part = reinterpret_cast<const float4 *>(a.part), *x = reinterpret_cast<const float4 *>(a.x);
    for (int64_t i = begin; i < n; i += step) {
        meeting.send(i, __ldcg(part + i));
    }
    meeting.meet(number);
    if (threadIdx.x == 0) {
        meeting.reached(number);
    }
    for (int64_t i = begin; i < n; i += step) {
        const float4 sum = meeting.sum(i, __ldcg(part + i));
        float4 out = sum;
        if (x != nullptr) {
            const float4 y = __ldcg(x + i);
            out = {y.x + sum.x, y.y + sum.y, y.z + sum.z, y.w + sum.w};
        }
        reinterpret_cast<float4 *>(a.out)[i] = out;
    }
}

// A step's: a thread has two values.
__global__ void __launch_bounds__(STEP_THREADS) exchange_step_kernel(const __grid_constant__ ExchangeArgs a) {
    let_next_start();
    const int64_t i = int64_t(blockIdx.x) * STEP_THREADS + threadIdx.x;
    const Meeting meeting(a.ranks);
    wait_for_previous();
    if (i < a.T * a.E / 2) {
        const float2 own = __ldcg(reinterpret_cast<const float2 *>(a.part) + i);
        meeting.send(i, own);
        const float2 y =
            a.x != nullptr ? __ldcg(reinterpret_cast<const float2 *>(a.x) + i) : float2{0.0f, 0.0f};
        const float2 sum = meeting.sum(i, own);
        reinterpret_cast<float2 *>(a.out)[i] = a.x != nullptr ? float2{y.x + sum.x, y.y + sum.y} : sum;
    }
}

} // namespace

int cuda::exchange(const ExchangeArgs &a, void *stream) {
    const int64_t n = a.T * a.E, of_step = (n / 2 + STEP_THREADS - 1) / STEP_THREADS,
                  all = (n / 4 + THREADS - 1) / THREADS;
    const bool step = n <= a.ranks.step_values;
    const int64_t blocks = step ? of_step : all < BLOCKS ? all : BLOCKS;
    if (a.E % 4 != 0 || n < 0 || n > a.ranks.values || !can_meet(a.ranks) || !aligned(a.x) ||
        !given(a.part) || !given(a.out)) {
        return int(cudaErrorInvalidValue);
    }
    if (n == 0) {
        return 0;
    }
    return int(launch_kernel(step ? exchange_step_kernel : exchange_kernel, dim3(unsigned(blocks)),
                             step ? STEP_THREADS : THREADS, 0, static_cast<cudaStream_t>(stream), true, a));
}

} // namespace luce
