// Reads what a device can do, once for each.
#include "common/device_limits.h"

#include <cuda_runtime.h>

#include <map>
#include <mutex>

namespace luce {
namespace {

// A kernel's attributes say what all kernels of the build were compiled for, whatever the device has.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int THREADS = 64; // Hopper's own instructions need code for sm_90a
#else
constexpr int THREADS = 32;
#endif
__global__ void __launch_bounds__(THREADS) compiled_kernel() {}

// Reads the limits of the current device.
cudaError_t read(int device, DeviceLimits &limits) {
    cudaError_t error = cudaSuccess;
    const auto get = [&](auto &value, cudaDeviceAttr what) {
        int found = 0;
        if (error == cudaSuccess) {
            error = cudaDeviceGetAttribute(&found, what, device);
        }
        value = found;
    };
    get(limits.multiprocessors, cudaDevAttrMultiProcessorCount);
    get(limits.shared_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    get(limits.shared_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    get(limits.shared_reserved, cudaDevAttrReservedSharedMemoryPerBlock);
    get(limits.registers, cudaDevAttrMaxRegistersPerMultiprocessor);
    get(limits.l2, cudaDevAttrL2CacheSize);
    cudaFuncAttributes compiled = {};
    if (error == cudaSuccess) {
        error = cudaFuncGetAttributes(&compiled, compiled_kernel);
    }
    limits.wgmma = compiled.maxThreadsPerBlock == 64;
    limits.bulk_copies = compiled.ptxVersion >= 90;
    return error;
}

} // namespace

int cuda::device_limits(int device, DeviceLimits &limits) {
    static std::mutex mutex;
    static std::map<int, DeviceLimits> known;
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = known.find(device); found != known.end()) {
        limits = found->second;
        return 0;
    }
    int before = 0;
    cudaError_t error = cudaGetDevice(&before);
    if (error == cudaSuccess && before != device) {
        error = cudaSetDevice(device);
    }
    if (error == cudaSuccess) {
        error = read(device, limits);
    }
    if (before != device) {
        cudaSetDevice(before);
    }
    if (error == cudaSuccess) {
        known[device] = limits;
    }
    return int(error);
}

int cuda::device_limits(DeviceLimits &limits) {
    int device = 0;
    const cudaError_t error = cudaGetDevice(&device);
    return error == cudaSuccess ? device_limits(device, limits) : int(error);
}

int cuda::gpu_facts(int device, GpuFacts &facts) {
    cudaError_t error = cudaDeviceGetPCIBusId(facts.pci, sizeof(facts.pci), device);
    if (error == cudaSuccess) {
        error = cudaDriverGetVersion(&facts.driver_cuda);
    }
    facts.built_cuda = CUDART_VERSION;
    int khz = 0, bits = 0;
    if (cudaDeviceGetAttribute(&khz, cudaDevAttrMemoryClockRate, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device) == cudaSuccess) {
        facts.bandwidth = uint64_t(khz) * 1000 * 2 * uint64_t(bits) / 8; // two transfers a clock
    } else {
        cudaGetLastError(); // who looks for errors of launches finds none of this
    }
    return int(error);
}

} // namespace luce
