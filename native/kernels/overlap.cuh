// Launches that overlap (programmatic dependent launch, from sm_90 on, also in a captured graph; elsewhere these do
// nothing): a kernel's blocks may start as soon as all blocks of the one ahead have said let_next_start(), and wait in
// wait_for_previous() until all that is ahead on the stream has ended and can be seen. Before that a kernel reads
// only what no kernel of the step writes ahead of it: weights, the control block, a layer's caches; and writes nothing.
// Each kernel that is launched so waits, so that "the one ahead has ended" means that all ahead of it have.
#pragma once

#include <cuda_runtime.h>

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

// Launches a kernel, where `overlap` is wanted and the device has it with the attribute of a dependent launch.
template <typename... P, typename... A>
cudaError_t launch_kernel(void (*kernel)(P...), dim3 grid, int threads, size_t shared, cudaStream_t stream,
                          bool overlap, const A &...args) {
    int device = 0, capability = 0; // asked on each call, since they hold for the current device only
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, device);
    }
    if (error != cudaSuccess) {
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
    config.numAttrs = overlap && capability >= 9 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, P(args)...);
}

} // namespace luce
