// Asks the current device what a launch is laid out by.
#pragma once

#include <cuda_runtime.h>

namespace luce {

struct DeviceLimits {
    int multiprocessors = 0;
    // These are bytes of shared memory: those of a multiprocessor, those of a block at most, and those that
    // each block loses.
    int shared_sm = 0, shared_block = 0, shared_reserved = 0;

    cudaError_t read() {
        int device = 0;
        cudaError_t error = cudaGetDevice(&device);
        const auto get = [&](int &value, cudaDeviceAttr what) {
            if (error == cudaSuccess) {
                error = cudaDeviceGetAttribute(&value, what, device);
            }
        };
        get(multiprocessors, cudaDevAttrMultiProcessorCount);
        get(shared_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
        get(shared_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
        get(shared_reserved, cudaDevAttrReservedSharedMemoryPerBlock);
        return error;
    }
};

} // namespace luce
