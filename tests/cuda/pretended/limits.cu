// Stands in the place of native/kernels/common/device_limits.cu where luce is built to pretend (tools/build_card.py): it has the
// limits of the card LUCE_CARD, on a device that can do more.
#define device_limits limits_as_read
#include "common/device_limits.cu"
#undef device_limits

#include "cards.h"

#include <algorithm>
#include <cstring>

namespace luce {

namespace cuda { // as common/device_limits.h declares them, whose names were others' here
int device_limits(int device, DeviceLimits &limits);
int device_limits(DeviceLimits &limits);
} // namespace cuda

namespace {

// Takes a card's limits in the place of a device's, of whose multiprocessors it uses no more than there are. It is an error
// where the code was compiled for other instructions than the card has, or where the device can do less.
int pretend(DeviceLimits &limits) {
    const auto card = std::find_if(std::begin(CARDS), std::end(CARDS),
                                   [](const Card &c) { return std::strcmp(c.name, LUCE_CARD) == 0; });
    if (card == std::end(CARDS) || card->limits.wgmma != limits.wgmma ||
        card->limits.bulk_copies != limits.bulk_copies || card->limits.shared_sm > limits.shared_sm ||
        card->limits.shared_block > limits.shared_block || card->limits.registers > limits.registers) {
        return int(cudaErrorInvalidDevice);
    }
    const int multiprocessors = std::min(limits.multiprocessors, card->limits.multiprocessors);
    limits = card->limits;
    limits.multiprocessors = multiprocessors;
    return 0;
}

} // namespace

int cuda::device_limits(int device, DeviceLimits &limits) {
    const int error = limits_as_read(device, limits);
    return error != 0 ? error : pretend(limits);
}

int cuda::device_limits(DeviceLimits &limits) {
    const int error = limits_as_read(limits);
    return error != 0 ? error : pretend(limits);
}

} // namespace luce
