// Plans the launches of a step's attention, as pure functions of a device's limits and of T, H and pool's type, Hkv and D.
#pragma once

#include "attention/layout.h"
#include "common/device_limits.h"
#include "common/kernels.h"
#include "common/launch_plan.h"

#include <algorithm>

namespace luce {
namespace {

// ---- partial results ----

// A group has as many query heads as a unit has room for, and all groups are equally large.
struct HeadGroups {
    int size, groups, of_head; // all heads have `groups` groups, a KV head has `of_head`
};
inline HeadGroups head_groups(const AttentionArgs &a) {
    const int H = a.H, Hkv = a.pool.Hkv, most = a.pool.type == KV_F32 ? f32_pairs(a.pool.D) : GROUP_HEADS;
    int size = H / Hkv;
    while (size > most || H / Hkv % size != 0) {
        size--;
    }
    return {size, H / size, H / size / Hkv};
}

// Returns among how many blocks a step's work is shared out: one a multiprocessor. On whose is a unit does not change what
// it computes.
inline int attention_workers(const DeviceLimits &device) {
    return std::min(device.multiprocessors, MAX_WORKERS);
}

// Returns whether a step's packed cells are unpacked ahead.
inline bool unpacks_ahead(const DeviceLimits &device, const AttentionArgs &a) {
    const bool packed = a.pool.type == KV_Q8_0 || a.pool.type == KV_Q4_0;
    return packed && a.T * head_groups(a).size <= AHEAD_PAIRS && device.wgmma && a.pool.D <= WGMMA_D;
}

struct UnitPlan {
    int bytes, pairs; // a block's shared memory, and the most pairs of a unit
};
template <int D, int TYPE> UnitPlan plan_units([[maybe_unused]] bool hopper, [[maybe_unused]] bool ahead) {
    if constexpr (TYPE == KV_F32) {
        return {f32_bytes(D), f32_pairs(D)};
    } else {
        using Small = BlockLayout<D, TYPE, false, false>;
        using Large = BlockLayout<D, TYPE, true, false>;
        if constexpr (TYPE != KV_F16 && D <= WGMMA_D) {
            if (ahead) {
                return {BlockLayout<D, TYPE, true, true>::BYTES, AHEAD_PAIRS};
            }
        }
        return hopper ? UnitPlan{Large::BYTES, Large::MAX_M} : UnitPlan{Small::BYTES, Small::MAX_M};
    }
}
inline UnitPlan plan_units(const DeviceLimits &device, const AttentionArgs &a) {
    const bool ahead = unpacks_ahead(device, a);
    return HeadSizes::with(a.pool.D, UnitPlan{}, [&](auto D) {
        return KvTypes::with(a.pool.type, UnitPlan{}, [&](auto type) {
            return plan_units<decltype(D)::value, decltype(type)::value>(device.wgmma, ahead);
        });
    });
}

// Plans the kernel that leaves partial results.
inline LaunchPlan plan_attention(const DeviceLimits &device, const AttentionArgs &a) {
    return {attention_workers(device), 1, 1, a.pool.type == KV_F32 ? F32_THREADS : MMA_THREADS,
            plan_units(device, a).bytes};
}

// ---- adding up ----

struct CombinePlan {
    LaunchPlan launch;
    int blocks; // a multiprocessor has registers for so many blocks at once, one or two
};
// Where there are few blocks, each has more warps, and a warp more registers. The 24 heads of the 27b have a block a
// multiprocessor of an H200, or two, at up to 5 or 11 rows.
inline CombinePlan plan_combine(const DeviceLimits &device, const AttentionArgs &a) {
    constexpr int HEADS = 24;
    const int few = device.multiprocessors / HEADS, some = 2 * device.multiprocessors / HEADS;
    const bool f32 = a.pool.type == KV_F32;
    const int warps = f32 || a.T <= some ? COMBINE_GROUPS : COMBINE_GROUPS / 4;
    return {{divided(int64_t(a.H) * a.pool.D, COMBINE_VALUES), a.T, 1, warps * WARP, 0},
            f32 || a.T <= few ? 1 : 2};
}

// ---- the heads of a step, and blocks of a draft ----

inline LaunchPlan plan_heads(const AttentionHeadsArgs &a) {
    const int warps = std::min(a.T, HEADS_WARPS);
    const int heads = a.H * (a.gated != 0 ? 2 : 1) + 2 * a.pool.Hkv;
    return {heads, divided(a.T, warps), 1, warps * WARP, 0};
}

inline LaunchPlan plan_draft_attention(const AttentionArgs &a) {
    return {a.pool.Hkv * BLOCK_ATTENTION_SPLITS, divided(a.T, a.block), 1, DRAFT_WARPS * WARP,
            draft_bytes(a.pool.D)};
}
inline LaunchPlan plan_draft_combine(const AttentionArgs &a) {
    return {divided(int64_t(a.H) * a.pool.D, COMBINE_VALUES), a.T, 1, COMBINE_VALUES / 2, 0};
}

} // namespace
} // namespace luce
