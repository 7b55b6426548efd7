// Has the cards for which launches are planned, without CUDA: the plans of each chapter are pure functions of what a device
// can do. (tests/cuda/test_launch_plans.py)
#pragma once

#include "common/device_limits.h"
#include "common/launch_plan.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

using namespace luce;

inline int n_checks = 0, n_failed = 0;
inline void expect(bool ok, const std::string &what) {
    n_checks++;
    if (!ok && ++n_failed <= 20) {
        printf("FAILED %s\n", what.c_str());
    }
}

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
inline const DeviceLimits &H200 = HOPPER_LIMITS;

// Expects a plan that the device takes, of a kernel that declares so many bytes of shared memory itself.
inline void expect_runs(const Card &card, const LaunchPlan &p, int64_t declared, const std::string &what) {
    const std::string on = what + " on " + card.name;
    expect(p.x >= 1 && p.y >= 1 && p.z >= 1 && p.y <= 65535 && p.z <= 65535, "a grid of " + on);
    expect(p.threads >= 32 && p.threads <= 1024 && p.threads % 32 == 0, "a block's threads of " + on);
    expect(p.shared >= 0 && p.shared + declared <= card.limits.shared_block, "a block's shared memory of " + on);
}

// Returns how many blocks of a plan a multiprocessor has at once, by shared memory and threads, where a block declares so many
// bytes itself and registers allow `most`.
inline int blocks_at_once(const Card &card, const LaunchPlan &p, int64_t declared, int most) {
    const int64_t bytes = p.shared + declared + card.limits.shared_reserved;
    return int(std::min<int64_t>({most, card.limits.shared_sm / bytes, card.threads_sm / p.threads, card.blocks_sm}));
}

// What a card's plans lack, by kernel and card, with how often and the first shape of which it is true.
struct Lack {
    int times = 0;
    std::string first;
};
inline std::map<std::pair<std::string, std::string>, Lack> lacks;
inline void expect_of(const std::string &kernel, const Card &card, bool ok, const std::string &lack, const std::string &what) {
    n_checks++;
    if (!ok) {
        Lack &l = lacks[{kernel + ": " + lack, card.name}];
        l.first = l.times++ == 0 ? what : l.first;
    }
}

// Expects that blocks of which a multiprocessor has `at_once` run in one wave, or that the last of several is not nearly empty.
inline void expect_waves(const std::string &kernel, const Card &card, int64_t blocks, int at_once, bool one, const std::string &what) {
    const int64_t room = int64_t(at_once) * card.limits.multiprocessors, last = room > 0 ? blocks % room : 0;
    expect_of(kernel, card, at_once >= 1, "a multiprocessor has no room for a block", what);
    if (one) {
        expect_of(kernel, card, blocks <= room, "the grid runs in more than one wave", what);
    } else if (blocks > room && blocks <= 4 * room) {
        expect_of(kernel, card, last == 0 || last >= room / 4, "a last wave of less than a quarter", what);
    }
}

// The models, by what their products and heads have. FF is an expert's of a mixture.
struct Model {
    const char *name;
    int64_t E, FF;
    int heads, kv_heads, D;
    int Hk, Hv, S; // of DeltaNet; Hv is 0 where there is none
};
inline const Model MODELS[] = {
    {"0.8b", 1024, 3584, 8, 2, 256, 16, 16, 128},
    {"2b", 2048, 6144, 8, 2, 256, 16, 16, 128},
    {"4b", 2560, 9216, 16, 4, 256, 16, 32, 128},
    {"9b", 4096, 12288, 16, 4, 256, 16, 32, 128},
    {"27b", 5120, 17408, 24, 4, 256, 16, 48, 128},
    {"35b-a3b", 2048, 512, 16, 2, 256, 16, 32, 128},
    // Gemma 4's layers with a window. The others have heads of 512, which are not on a GPU.
    {"gemma4 31B", 5376, 21504, 32, 16, 256, 0, 0, 0},
    {"gemma4 26B-A4B", 2816, 704, 16, 8, 256, 0, 0, 0},
    {"dflash of 27b", 5120, 17408, 32, 8, 128, 0, 0, 0},
    {"dflash of 31B", 5376, 10752, 64, 8, 128, 0, 0, 0},
};
struct Mixture {
    const char *name;
    int n_expert, n_used;
    int64_t E, FF, FF_shared;
};
inline const Mixture MIXTURES[] = {
    {"35b-a3b", 256, 8, 2048, 512, 512},
    {"gemma4 26B-A4B", 128, 8, 2816, 704, 0},
    {"122b-a10b", 256, 8, 3072, 1024, 1024},
    {"397b-a17b", 512, 10, 4096, 1024, 1024},
};
inline constexpr int64_t VOCABULARY = 248320;

// All types of weights that luce packs, by ggml's numbers (matmul/layout.h): F32, F16, Q4_0 to Q8_0, the K types, IQ4 and BF16.
inline constexpr int TYPES[] = {0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 30};

// Rows of a step: all that a kernel of its own has, and both sides of what other kernels begin with.
inline constexpr int SOME_ROWS[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33, 48, 63, 64};

// Each is in a file of its name.
void plan_matmul(const Card &card);
void plan_moe(const Card &card);
void plan_attention(const Card &card);
void plan_deltanet(const Card &card);
void plan_sampling(const Card &card);
void plan_reserve(const Card &card);
