// Stands between the kernels' launchers and what they call, where the linker has its functions wrapped. Kernels can be
// told of fewer multiprocessors than there are, and which kernels were launched is known: a tool that watches launches
// has seen nothing of the others.
#include "common/device_limits.h"
#include "harness.h"

#include <map>
#include <set>

namespace {

std::map<const void *, std::string> &kernels() { // all that this program has, by the host's function
    static std::map<const void *, std::string> all;
    return all;
}
std::set<const void *> launched;

} // namespace

extern "C" {
#define WEAK __attribute__((weak)) // a program that is linked without --wrap calls none of these
WEAK int __real__ZN4luce4cuda13device_limitsERNS_12DeviceLimitsE(luce::DeviceLimits &);
WEAK cudaError_t __real___cudaGetKernel(cudaKernel_t *, const void *);
WEAK cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *, void **);
WEAK void __real___cudaRegisterFunction(void **, const char *, char *, const char *, int, uint3 *, uint3 *, dim3 *, dim3 *, int *);

// It is luce::cuda::device_limits, which launchers ask of the current device.
int __wrap__ZN4luce4cuda13device_limitsERNS_12DeviceLimitsE(luce::DeviceLimits &limits) {
    const int error = __real__ZN4luce4cuda13device_limitsERNS_12DeviceLimitsE(limits);
    if (multiprocessors_told > 0) {
        limits.multiprocessors = std::min(limits.multiprocessors, multiprocessors_told);
    }
    return error;
}
// Code of <<<>>> asks for its kernel ahead of its first launch.
cudaError_t __wrap___cudaGetKernel(cudaKernel_t *found, const void *kernel) {
    launched.insert(kernel);
    return __real___cudaGetKernel(found, kernel);
}
cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **args) {
    launched.insert(kernel);
    return __real_cudaLaunchKernelExC(config, kernel, args);
}
void __wrap___cudaRegisterFunction(void **binary, const char *host, char *device, const char *name, int limit, uint3 *tid,
                                   uint3 *bid, dim3 *block, dim3 *grid, int *warp) {
    kernels()[host] = name;
    __real___cudaRegisterFunction(binary, host, device, name, limit, tid, bid, block, grid, warp);
}
}

void print_kernels(bool all) {
    for (const auto &[host, name] : kernels()) {
        if (all || launched.count(host) != 0) {
            printf("kernel %s\n", name.c_str());
        }
    }
}
