// Has the cards for which launches are planned, without CUDA: the plans of each chapter are pure functions of what a device
// can do. (tests/cuda/test_launch_plans.py)
#pragma once

#include "../cards.h"
#include "common/launch_plan.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

inline int n_checks = 0, n_failed = 0;
inline void expect(bool ok, const std::string &what) {
    n_checks++;
    if (!ok && ++n_failed <= 20) {
        printf("FAILED %s\n", what.c_str());
    }
}

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
    // Gemma 4's layers with a window, and those without one, whose heads have 512.
    {"gemma4 31B", 5376, 21504, 32, 16, 256, 0, 0, 0},
    {"gemma4 31B, 512", 5376, 21504, 32, 4, 512, 0, 0, 0},
    {"gemma4 26B-A4B", 2816, 2112, 16, 8, 256, 0, 0, 0},
    {"gemma4 26B-A4B, 512", 2816, 2112, 16, 2, 512, 0, 0, 0},
    {"gemma4 12B", 3840, 15360, 16, 8, 256, 0, 0, 0},
    {"gemma4 E4B", 2560, 10240, 8, 2, 256, 0, 0, 0},
    {"gemma4 E2B", 1536, 6144, 8, 1, 256, 0, 0, 0},
    {"assistant of 31B", 1024, 8192, 32, 16, 256, 0, 0, 0},
    {"dflash of 27b", 5120, 17408, 32, 8, 128, 0, 0, 0},
    {"dflash of 31B", 5376, 10752, 64, 8, 128, 0, 0, 0},
};
struct Mixture {
    const char *name;
    int n_expert, n_used;
    int64_t E, FF, FF_shared;
    bool dense = false; // the shared expert is a dense layer, in a step
};
inline const Mixture MIXTURES[] = {
    {"35b-a3b", 256, 8, 2048, 512, 512},
    {"gemma4 26B-A4B", 128, 8, 2816, 704, 0},
    {"122b-a10b", 256, 8, 3072, 1024, 1024},
    {"397b-a17b", 512, 10, 4096, 1024, 1024},
    {"step of gemma4 26B-A4B", 128, 8, 2816, 704, 2112, true},
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
void plan_tails(const Card &card);
void plan_pretended(const Card &card);
