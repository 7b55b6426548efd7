// Has the six cards for which launches are planned, without CUDA: the plans of each chapter are pure functions of what a device
// can do. (tests/cuda/test_launch_plans.py)
#pragma once

#include "common/device_limits.h"
#include "common/launch_plan.h"

#include <cstdio>
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

// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": shared memory of a multiprocessor, of a block
// at most, and 1 KiB that the system takes of each block; registers. Multiprocessors and L2: NVIDIA's white papers on GA102,
// AD102, GB202, GA100 and Hopper, with what each card has of the whole chip. Only code for sm_90a has wgmma, and from 9.0 on
// there are bulk copies.
struct Card {
    const char *name;
    DeviceLimits limits;
};
constexpr int KiB = 1 << 10, MiB = 1 << 20, REGISTERS = 64 * KiB;
inline const Card CARDS[] = {
    {"RTX 3090", {82, 100 * KiB, 99 * KiB, KiB, REGISTERS, 6 * MiB, false, false}}, // 8.6
    {"RTX 4090", {128, 100 * KiB, 99 * KiB, KiB, REGISTERS, 72 * MiB, false, false}}, // 8.9
    {"RTX 5090", {170, 100 * KiB, 99 * KiB, KiB, REGISTERS, 96 * MiB, false, true}}, // 12.0
    {"A100", {108, 164 * KiB, 163 * KiB, KiB, REGISTERS, 40 * MiB, false, false}}, // 8.0
    {"H100", {132, 228 * KiB, 227 * KiB, KiB, REGISTERS, 50 * MiB, true, true}}, // 9.0
    {"H200", {132, 228 * KiB, 227 * KiB, KiB, REGISTERS, 50 * MiB, true, true}}, // 9.0
};
inline const DeviceLimits &H200 = CARDS[5].limits;

// Expects a plan that the device takes, of a kernel that declares so many bytes of shared memory itself.
inline void expect_runs(const Card &card, const LaunchPlan &p, int64_t declared, const std::string &what) {
    const std::string on = what + " on " + card.name;
    expect(p.x >= 1 && p.y >= 1 && p.z >= 1 && p.y <= 65535 && p.z <= 65535, "a grid of " + on);
    expect(p.threads >= 32 && p.threads <= 1024 && p.threads % 32 == 0, "a block's threads of " + on);
    expect(p.shared >= 0 && p.shared + declared <= card.limits.shared_block, "a block's shared memory of " + on);
}

// The dense models and the mixture, by what their products have.
struct Model {
    const char *name;
    int64_t E, FF;
    int heads, kv_heads, D;
    int Hk, Hv, S;
};
inline const Model MODELS[] = {
    {"0.8b", 1024, 3584, 8, 2, 256, 16, 16, 128},
    {"9b", 4096, 12288, 16, 4, 256, 16, 32, 128},
    {"27b", 5120, 17408, 24, 4, 256, 16, 48, 128},
    {"35b-a3b", 2048, 512, 16, 2, 256, 16, 32, 128},
};
inline constexpr int64_t VOCABULARY = 248320;

// Each is in a file of its name.
void plan_matmul(const Card &card);
void plan_moe(const Card &card);
void plan_attention(const Card &card);
void plan_deltanet(const Card &card);
void plan_sampling(const Card &card);
