// Stands in the place of native/kernels/common/device_limits.cu where luce is built to pretend (tools/build_card.py): it has the
// limits of the card LUCE_CARD, on a device that can do more.
#define device_limits limits_as_read
#include "common/device_limits.cu"
#undef device_limits

#include "cards.h"

namespace luce {

namespace cuda { // as common/device_limits.h declares them, whose names were others here
int device_limits(int device, DeviceLimits &limits);
int device_limits(DeviceLimits &limits);
} // namespace cuda

int cuda::device_limits(int device, DeviceLimits &limits) {
    const int error = limits_as_read(device, limits);
    return error != 0 || pretend(LUCE_CARD, limits) ? error : int(cudaErrorInvalidDevice);
}

int cuda::device_limits(DeviceLimits &limits) {
    const int error = limits_as_read(limits);
    return error != 0 || pretend(LUCE_CARD, limits) ? error : int(cudaErrorInvalidDevice);
}

} // namespace luce
