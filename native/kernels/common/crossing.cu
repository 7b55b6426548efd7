// Lets the stream of one device wait for that of another, and their kernels reach each other's memory.
#include "common/kernels.h"

#include <cuda_runtime.h>

namespace luce {

// Peer access is one way, and of the process: a device may have it already.
static cudaError_t reach(int device, int other) {
    cudaError_t error = cudaSetDevice(device);
    if (error == cudaSuccess) {
        error = cudaDeviceEnablePeerAccess(other, 0);
    }
    cudaGetLastError(); // the next launch must not report it
    return error == cudaErrorPeerAccessAlreadyEnabled ? cudaSuccess : error;
}

bool cuda::peers(int device, int other) {
    int there = 0, back = 0, before = 0;
    if (device == other) {
        return true;
    }
    const bool can = cudaDeviceCanAccessPeer(&there, device, other) == cudaSuccess &&
                     cudaDeviceCanAccessPeer(&back, other, device) == cudaSuccess && there != 0 && back != 0;
    cudaGetDevice(&before);
    const bool reached = can && reach(device, other) == cudaSuccess && reach(other, device) == cudaSuccess;
    cudaSetDevice(before);
    cudaGetLastError();
    return reached;
}

int cuda::follow(void *ahead, void *event, void *stream) {
    const cudaEvent_t reached = static_cast<cudaEvent_t>(event);
    const cudaError_t error = cudaEventRecord(reached, static_cast<cudaStream_t>(ahead));
    return int(error != cudaSuccess ? error
                                    : cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), reached, 0));
}

} // namespace luce
