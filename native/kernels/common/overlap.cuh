// Launches that overlap (programmatic dependent launch, in code for sm_90 and later, also in a captured graph;
// elsewhere these do nothing): a kernel's blocks may start as soon as all blocks of the one ahead have said
// let_next_start(), and wait in wait_for_previous() until all that is ahead on the stream has ended and can be seen.
// Before that a kernel reads only what no kernel of the step writes ahead of it: weights, the step's inputs, a layer's
// caches. (Attention reads its plan too. The kernel that makes it lets none start before it has ended.) It writes nothing but the
// committed state of a layer, in the delta rule: no other launch of a step reads or writes it, and a step's first launch
// (common/h2d.cu) begins when all of the step before has ended.
// Each kernel that is launched so waits, in one block at least, so that "the one ahead has ended" means that all ahead of
// it have.
// Where the launch ahead says let_next_start() only behind its own wait, a kernel may also read early what the one before that
// has left, and poll for what the one ahead leaves, whose blocks all run by then. Mixtures of experts do both (moe/end.cu,
// moe/few.cuh). No launch may come between.
#pragma once

#include "common/launch_plan.h"

#include <cuda_runtime.h>

#include <mutex>

namespace luce {

__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Brings the line at p to L2, ahead of a wait for what is not there yet.
__device__ __forceinline__ void prefetch_line(const void *p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Lets a kernel have so many bytes of dynamic shared memory on the current device. What was allowed is never lowered,
// since another thread may be about to launch the kernel with more.
template <typename... P> cudaError_t allow_shared(void (*kernel)(P...), size_t bytes) {
    if (bytes == 0) {
        return cudaSuccess;
    }
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    cudaFuncAttributes compiled = {};
    const cudaError_t error = cudaFuncGetAttributes(&compiled, kernel);
    if (error != cudaSuccess || bytes <= size_t(compiled.maxDynamicSharedSizeBytes)) {
        return error;
    }
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
}

// Launches a kernel, where `overlap` is wanted with the attribute of a dependent launch. What was compiled for an older
// architecture does not wait, whatever device it runs on, so the kernel's own code is asked and not the device.
template <typename... P, typename... A>
cudaError_t launch_kernel(void (*kernel)(P...), dim3 grid, int threads, size_t shared, cudaStream_t stream,
                          bool overlap, const A &...args) {
    cudaFuncAttributes compiled = {};
    if (const cudaError_t error = cudaFuncGetAttributes(&compiled, kernel); error != cudaSuccess) {
        return error;
    }
    if (const cudaError_t error = allow_shared(kernel, shared); error != cudaSuccess) {
        return error;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = overlap && compiled.ptxVersion >= 90 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, P(args)...);
}

// Launches it as it was planned.
template <typename... P, typename... A>
cudaError_t launch_kernel(void (*kernel)(P...), const LaunchPlan &plan, cudaStream_t stream, bool overlap,
                          const A &...args) {
    const dim3 grid(unsigned(plan.x), unsigned(plan.y), unsigned(plan.z));
    return launch_kernel(kernel, grid, plan.threads, size_t(plan.shared), stream, overlap, args...);
}

} // namespace luce
