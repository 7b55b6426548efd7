// Tells the emulation (tests/cuda/emulated), and whoever plans a launch, which device is pretended.
#include <cuda_runtime.h>

static const emulated::DeviceKind H200 = {"H200", {132, 228 << 10, 227 << 10, 1024, 65536, 50 << 20, true, true}};
static const bool TOLD = [] {
    emulated::kind = &H200;
    return true;
}();

int luce::cuda::device_limits(DeviceLimits &limits) {
    limits = H200.limits;
    return 0;
}
int luce::cuda::device_limits(int, DeviceLimits &limits) {
    return device_limits(limits);
}
