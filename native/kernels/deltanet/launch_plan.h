// Plans the launches of a DeltaNet layer, as pure functions of a device's limits and the layer's shape.
#pragma once

#include "common/device_limits.h"
#include "common/launch_plan.h"
#include "deltanet/layout.h"

#include <algorithm>

namespace luce {
namespace {

// ---- the gated delta rule ----

// Has what a block of heads of S values takes.
struct DeltaBlock {
    int threads, blocks, state_bytes; // a head has so many blocks
};
inline DeltaBlock delta_block(int S) {
    return StateSizes::with(S, DeltaBlock{}, [](auto size) {
        using L = Layout<decltype(size)::value>;
        return DeltaBlock{L::THREADS, L::BLOCKS, L::STATE_BYTES};
    });
}

constexpr int DELTA_BLOCKS = 3; // a multiprocessor has registers for so many blocks

// Returns how many states a block saves: as many as leave room for the blocks that a multiprocessor has to have for all to run at
// once, or for three. With 100 KB of shared memory three states would leave room for one, and a step of the 27b would run in two
// to seven waves; none leave room for three, and of a tree more rows are replayed, which the saved states only shorten.
inline int delta_saves(const DeviceLimits &device, const DeltaShape &s) {
    const DeltaBlock block = delta_block(s.S);
    const int64_t items = int64_t(block.blocks) * s.Hv * s.max_seqs();
    const int wanted = std::min(divided(items, device.multiprocessors), DELTA_BLOCKS);
    int saves = most_saves(s);
    while (saves > 0 && (saves * block.state_bytes + own_bytes(s.S) + device.shared_reserved) * wanted >
                            device.shared_sm) {
        saves--;
    }
    return saves;
}

// Returns a block's bytes of shared memory: the states that a tree saves. Of one sequence they are as many as let a multiprocessor
// take no more of its blocks than it has to: the kernel ahead leaves one multiprocessor after the other, and the first of them
// would take three blocks where two are enough, for which the step would wait.
inline int64_t delta_shared(const DeviceLimits &device, const DeltaShape &s) {
    const DeltaBlock block = delta_block(s.S);
    const int bytes = delta_saves(device, s) * block.state_bytes;
    const int most = divided(int64_t(block.blocks) * s.Hv, device.multiprocessors);
    if (most_saves(s) == 0 || s.max_seqs() > 1 || most == 1) {
        return bytes;
    }
    const int too_much = device.shared_sm / (most + 1) + 128 - device.shared_reserved;
    return std::max(bytes, too_much - own_bytes(s.S));
}

// Plans a step's delta rule. A multiprocessor has room for per_sm blocks with as much shared memory, as the driver knows, one or
// more; of one sequence it does not matter. Blocks of several sequences are one fewer than there is room for. A grid that fills an
// H200 exactly is not spread evenly, and then some multiprocessors get three of one sequence's items while others get one.
inline LaunchPlan plan_delta(const DeviceLimits &device, const DeltaShape &s, int per_sm) {
    const DeltaBlock block = delta_block(s.S);
    const int seqs = s.max_seqs(), items = block.blocks * s.Hv * seqs;
    const int most = seqs > 1 ? std::max(device.multiprocessors * per_sm - 1, 1) : items;
    return {std::min(items, most), 1, 1, block.threads, delta_shared(device, s)};
}

// Plans a layer of a step of one row in one launch.
inline LaunchPlan plan_delta_layer(const DeltaShape &s) {
    const DeltaBlock block = delta_block(s.S);
    return {s.Hv * block.blocks, 1, 1, block.threads, 0};
}

// ---- the same in chunks: what does not depend on the state, then the walk through them ----

inline int delta_chunks(const DeltaShape &s) {
    return groups_of(s.T, s.n_prompts, CHUNK_ROWS);
}
inline LaunchPlan plan_prepare(const DeltaShape &s) {
    return {delta_chunks(s), s.Hk, 1, PREPARE_THREADS, 0};
}
inline LaunchPlan plan_walk(const DeltaShape &s) {
    const int stage =
        ChunkedStateSizes::with(s.S, 0, [](auto S) { return ChunkLayout<decltype(S)::value>::STAGE; });
    return {s.Hv * (s.S / SPAN), s.n_prompts, 1, SPAN_WARPS * WARP, 2 * stage};
}

// ---- the conv ----

// Returns how many sequences a block of a verify has at most.
inline int conv_group(const DeltaShape &s) {
    return std::min(int(s.max_seqs()), GROUP);
}

// Plans the conv of a verify. A block has room for its sequences' committed rows.
inline LaunchPlan plan_conv(const DeltaShape &s) {
    return {2 * s.Hk + s.Hv, divided(s.max_seqs(), GROUP), 1, std::min(int(s.T), GROUP) * WARP,
            int64_t(conv_group(s)) * WINDOW * s.S * int64_t(sizeof(float))};
}
// Plans it where it adds up parts too: N are the results of z, beta and alpha, which blocks behind the heads' add up.
inline LaunchPlan plan_conv_parts(const DeltaShape &s, const int32_t (&N)[3]) {
    LaunchPlan plan = plan_conv(s);
    for (const int32_t n : N) {
        plan.x += divided(n, SUM_TILE);
    }
    plan.shared += int64_t(s.T) * s.S * int64_t(sizeof(float));
    return plan;
}
// Plans the conv of a prefill, and what moves the window behind it.
inline LaunchPlan plan_conv_append(const DeltaShape &s) {
    return {2 * s.Hk + s.Hv, groups_of(s.T, s.n_prompts, APPEND_ROWS), 1, APPEND_WARPS * WARP, 0};
}
inline LaunchPlan plan_conv_window(const DeltaShape &s) {
    return {2 * s.Hk + s.Hv, s.n_prompts, 1, WARP, 0};
}

} // namespace
} // namespace luce
