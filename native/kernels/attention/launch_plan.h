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
inline HeadGroups head_groups(int H, int Hkv) {
    int size = H / Hkv;
    while (size > F32_M || H / Hkv % size != 0) {
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
    return packed && a.T * head_groups(a.H, a.pool.Hkv).size <= AHEAD_PAIRS && device.wgmma;
}

template <int D, int TYPE> int block_bytes([[maybe_unused]] bool wgmma, [[maybe_unused]] bool ahead) {
    if constexpr (TYPE == KV_F32) {
        return f32_bytes(D);
    } else {
        if constexpr (TYPE != KV_F16) {
            if (ahead) {
                return BlockLayout<D, TYPE, true, true>::BYTES;
            }
        }
        return wgmma ? BlockLayout<D, TYPE, true, false>::BYTES : BlockLayout<D, TYPE, false, false>::BYTES;
    }
}

// Plans the kernel that leaves partial results.
inline LaunchPlan plan_attention(const DeviceLimits &device, const AttentionArgs &a) {
    const bool ahead = unpacks_ahead(device, a);
    const int bytes = HeadSizes::with(a.pool.D, 0, [&](auto D) {
        return KvTypes::with(a.pool.type, 0, [&](auto type) {
            return block_bytes<decltype(D)::value, decltype(type)::value>(device.wgmma, ahead);
        });
    });
    return {attention_workers(device), 1, 1, a.pool.type == KV_F32 ? F32_THREADS : MMA_THREADS, bytes};
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
    return {2 * (a.H + a.pool.Hkv), divided(a.T, warps), 1, warps * WARP, 0};
}

// There are no more sequences than rows.
inline LaunchPlan plan_draft_attention(const AttentionArgs &a) {
    return {a.pool.Hkv * BLOCK_ATTENTION_SPLITS, a.T, 1, DRAFT_WARPS * WARP, draft_bytes(a.pool.D)};
}
inline LaunchPlan plan_draft_combine(const AttentionArgs &a) {
    return {a.T, a.H, 1, a.pool.D, 0};
}

} // namespace
} // namespace luce
