// Adds what several devices have of the sums of many rows (exchange.h).
#include "common/overlap.cuh"
#include "common/pointers.h"
#include "exchange/meeting.cuh"

namespace luce {
namespace {

constexpr int THREADS = 256, BLOCKS = 128; // these at most

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
    for (int64_t i = begin; i < n; i += step) {
        const float4 sum = meeting.sum(i, __ldcg(part + i), [](float4 &all, const float4 &v) {
            all.x += v.x, all.y += v.y, all.z += v.z, all.w += v.w;
        });
        float4 out = sum;
        if (x != nullptr) {
            const float4 y = __ldcg(x + i);
            out = {y.x + sum.x, y.y + sum.y, y.z + sum.z, y.w + sum.w};
        }
        reinterpret_cast<float4 *>(a.out)[i] = out;
    }
}

} // namespace

int cuda::exchange(const ExchangeArgs &a, void *stream) {
    const int64_t n = a.T * a.E, all = (n / 4 + THREADS - 1) / THREADS, blocks = all < BLOCKS ? all : BLOCKS;
    if (a.E % 4 != 0 || n < 0 || !can_meet(a.ranks, n, blocks) || !aligned(a.x) || !given(a.part) ||
        !given(a.out)) {
        return int(cudaErrorInvalidValue);
    }
    if (n == 0) {
        return 0;
    }
    return int(launch_kernel(exchange_kernel, dim3(unsigned(blocks)), THREADS, 0,
                             static_cast<cudaStream_t>(stream), true, a));
}

} // namespace luce
