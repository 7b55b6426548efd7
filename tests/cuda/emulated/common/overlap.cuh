// Stands in for native/kernels/common/overlap.cuh: it runs one launch after the other.
#pragma once

#include "common/launch_plan.h"

#include <cuda_runtime.h>

namespace luce {

inline void let_next_start() {}
inline void wait_for_previous() {}
inline void prefetch_line(const void *) {}

template <typename... P> cudaError_t allow_shared(void (*)(P...), size_t) {
    return cudaSuccess;
}
template <typename... P, typename... A>
cudaError_t launch_kernel(void (*kernel)(P...), dim3 grid, int threads, size_t shared, cudaStream_t, bool,
                          const A &...args) {
    return emulated::launch(reinterpret_cast<const void *>(kernel), grid, threads, shared, [&] { kernel(args...); });
}
template <typename... P, typename... A>
cudaError_t launch_kernel(void (*kernel)(P...), const LaunchPlan &plan, cudaStream_t stream, bool overlap, const A &...args) {
    const dim3 grid(unsigned(plan.x), unsigned(plan.y), unsigned(plan.z));
    return launch_kernel(kernel, grid, plan.threads, size_t(plan.shared), stream, overlap, args...);
}

} // namespace luce
