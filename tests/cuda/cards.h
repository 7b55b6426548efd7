// Has what cards can do, as DeviceLimits, with what they are sold as.
#pragma once

#include "common/device_limits.h"

#include <algorithm>
#include <cstring>
#include <iterator>

using namespace luce;

// Sources. By compute capability, from the CUDA C++ Programming Guide ("Technical Specifications per Compute Capability") and
// the tuning guides of Ampere and Ada: shared memory of a multiprocessor, of a block at most, and 1 KiB that the system takes
// of each block; 64 Ki registers; threads and blocks at once. Multiprocessors, L2, memory and bandwidth: NVIDIA's white papers
// (GA102, AD102, GB202, GA100, Hopper) and data sheets. Only code for sm_90a has wgmma, and from 9.0 on there are bulk copies.
//
// Read off a card, by luce: H200 alone. Of the others these come from public tables of specifications, as the papers at hand do
// not name them: L2 of the RTX 3060, 4070 and 5060 Ti, the A10 and the L4 (of whose multiprocessors, 7424 / 128 = 58, some
// tables say 60). Not confirmed: blocks at once of 12.0, for which the table of 8.9 stands; no plan comes near them.
struct Card {
    const char *name;
    int capability; // 86 is 8.6
    int threads_sm, blocks_sm; // a multiprocessor has so many at once
    DeviceLimits limits;
    double memory_gb, bandwidth_gbs; // as sold: GB (GiB for GeForce) and GB/s
};
constexpr int KiB = 1 << 10, MiB = 1 << 20, REGISTERS = 64 * KiB;
constexpr DeviceLimits small_card(int multiprocessors, int l2_mib, bool bulk_copies) { // 8.6, 8.9 and 12.0
    return {multiprocessors, 100 * KiB, 99 * KiB, KiB, REGISTERS, int64_t(l2_mib) * MiB, false, bulk_copies};
}
constexpr DeviceLimits A100_LIMITS = {108, 164 * KiB, 163 * KiB, KiB, REGISTERS, 40 * MiB, false, false};
constexpr DeviceLimits HOPPER_LIMITS = {132, 228 * KiB, 227 * KiB, KiB, REGISTERS, 50 * MiB, true, true};
inline const Card CARDS[] = {
    {"RTX 3060 12 GB", 86, 1536, 16, small_card(28, 3, false), 12, 360},
    {"RTX 3090", 86, 1536, 16, small_card(82, 6, false), 24, 936},
    {"A10", 86, 1536, 16, small_card(72, 6, false), 24, 600},
    {"L4", 89, 1536, 24, small_card(58, 48, false), 24, 300},
    {"RTX 4070", 89, 1536, 24, small_card(46, 36, false), 12, 504},
    {"RTX 4090", 89, 1536, 24, small_card(128, 72, false), 24, 1008},
    {"RTX 5060 Ti 16 GB", 120, 1536, 24, small_card(36, 32, true), 16, 448},
    {"RTX 5090", 120, 1536, 24, small_card(170, 96, true), 32, 1792},
    {"RTX Pro 6000 Blackwell", 120, 1536, 24, small_card(188, 128, true), 96, 1792},
    {"A100 40 GB", 80, 2048, 32, A100_LIMITS, 40, 1555},
    {"A100 80 GB", 80, 2048, 32, A100_LIMITS, 80, 2039},
    {"H100", 90, 2048, 32, HOPPER_LIMITS, 80, 3350},
    {"H200", 90, 2048, 32, HOPPER_LIMITS, 141, 4800},
};

// Takes a card's limits in the place of a device's, of whose multiprocessors it uses no more than there are. Returns false
// where there is no such card, where the code was compiled for other instructions than the card has, or where the device can do less.
inline bool pretend(const char *name, DeviceLimits &device) {
    const auto card = std::find_if(std::begin(CARDS), std::end(CARDS),
                                   [&](const Card &c) { return std::strcmp(c.name, name) == 0; });
    if (card == std::end(CARDS) || card->limits.wgmma != device.wgmma || card->limits.bulk_copies != device.bulk_copies ||
        card->limits.shared_sm > device.shared_sm || card->limits.shared_block > device.shared_block ||
        card->limits.registers > device.registers) {
        return false;
    }
    const int multiprocessors = std::min(device.multiprocessors, card->limits.multiprocessors);
    device = card->limits;
    device.multiprocessors = multiprocessors;
    return true;
}
