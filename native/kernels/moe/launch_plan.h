// Plans the launches of a mixture of experts, as pure functions of a device's limits and the layer's shape.
#pragma once

#include "common/device_limits.h"
#include "common/launch_plan.h"
#include "moe/params.h"

#include <algorithm>
#include <climits>
#include <string>

namespace luce {

// ---- what a device can do ----

// Returns whether luce has kernels for a layer of this shape, with as many rows at once.
inline bool moe_has(const MoeDims &d) {
    return d.T >= 0 && d.n_used >= 1 && d.T <= d.rows_at_once() && d.n_expert >= 1 &&
           d.n_expert <= MOE_MAX_EXPERTS && d.n_used <= std::min(d.n_expert, MOE_MAX_USED) && d.E >= 4 &&
           d.E % 4 == 0 && d.E <= MOE_MAX_E && d.FF >= 1 && d.FF_shared >= 0 && d.h_row() <= MOE_MAX_FF &&
           (d.dense == 0 || (d.shared() && d.T <= ROWMM_MAX_ROWS));
}

// Returns how many rows an item of a step has at most: 8, or 4 or 2 where a block has no room for more. The units are the largest
// fragments of the matrices of up and of down, in bytes.
inline int moe_item_rows(const DeviceLimits &device, const MoeDims &d, int64_t up_unit, int64_t down_unit) {
    int rows = MAX_ITEM_ROWS;
    while (rows > 2 && least_shared(d, up_unit, down_unit, rows) > device.shared_block) {
        rows /= 2;
    }
    return rows;
}

// Says what luce or a device of this name lacks for a layer, or "" where it lacks nothing. The units are the largest fragments
// of the matrices of up and of down, in bytes.
inline std::string moe_lacks(const DeviceLimits &device, const std::string &name, const MoeDims &d,
                             int64_t up_unit, int64_t down_unit) {
    const auto number = [](int64_t n) { return std::to_string(n); };
    if (d.E > MOE_MAX_E) {
        return "rows of " + number(d.E) + " values are more than luce's experts take on a GPU (" +
               number(MOE_MAX_E) + ")";
    }
    if (d.E % 4 != 0) {
        return "rows of " + number(d.E) + " values: luce's experts take a multiple of 4 on a GPU";
    }
    if (d.FF_shared > MOE_MAX_FF) {
        return "a shared expert of " + number(d.FF_shared) + " values is more than luce has on a GPU (" +
               number(MOE_MAX_FF) + ")";
    }
    if (!moe_has(d)) {
        return number(d.n_used) + " of " + number(d.n_expert) + " experts of " + number(d.FF) +
               " values are more than luce has on a GPU (" + number(MOE_MAX_USED) + " of " +
               number(MOE_MAX_EXPERTS) + " of " + number(MOE_MAX_FF) + ")";
    }
    const int64_t need = least_shared(d, up_unit, down_unit, moe_item_rows(device, d, up_unit, down_unit));
    if (need > device.shared_block) {
        return "experts of " + number(d.E) + " values take " + number(need) +
               " bytes of a GPU's shared memory, " + name + " has " + number(device.shared_block);
    }
    return "";
}

// ---- route ----

// Returns how many tiles few rows make at most, so that their blocks all run at once, two on a multiprocessor. A tile of the
// 35b-a3b has 73 blocks: on an H200 three tiles are 219 blocks, where 264 run at once.
inline int route_few_tiles(const DeviceLimits &device) {
    constexpr int BLOCKS_OF_TILE = 73, AT_ONCE = 2;
    return std::max(AT_ONCE * device.multiprocessors / BLOCKS_OF_TILE, 1);
}

struct RoutePlan {
    LaunchPlan launch;
    int tile_rows; // a block has so many rows at most
    bool one_row; // each block has one, and it is the kernel's that is made for it
    int passes; // a block of many rows has so many ROUTE_MANY_OUTPUTS of the router, one after another
};
// Plans route of many rows, of which a block is alone on its multiprocessor. The blocks of a tile share its passes; each of them
// reads and norms its rows, which takes as long as two passes. So many share them as end first.
inline RoutePlan plan_route_many(const DeviceLimits &device, const MoeDims &d) {
    constexpr int READING = 2;
    const int64_t row = d.E * int64_t(sizeof(float));
    const int room = int(
        std::clamp<int64_t>((device.shared_block - ROUTE_BESIDES) / row, LEAST_ROUTE_ROWS, ROUTE_MANY_ROWS));
    const int all = divided(router_outputs(d), ROUTE_MANY_OUTPUTS), tiles = divided(d.T, room);
    int passes = all, best = INT_MAX;
    for (int each = all; each >= 1; each--) {
        const int waves = divided(divided(all, each) * tiles, device.multiprocessors);
        if (waves * (each + READING) < best) {
            best = waves * (each + READING);
            passes = each;
        }
    }
    const int64_t shared =
        std::max({room * row, route_list_bytes(d), ROUTE_THREADS / WARP * CANDIDATE_BYTES});
    return {{divided(all, passes), tiles, 1, ROUTE_THREADS, shared}, room, false, passes};
}
// `gives_values` says that the rows are wanted in F32 too. There is a row or more.
inline RoutePlan plan_route(const DeviceLimits &device, const MoeDims &d, bool gives_values) {
    if (many_rows(d)) {
        return plan_route_many(device, d);
    }
    const bool few = few_rows(d);
    const int64_t ids = int64_t(d.T) * d.n_used * int64_t(sizeof(uint16_t));
    const int64_t each = std::max<int64_t>(d.E * int64_t(sizeof(float)), CANDIDATE_BYTES);
    const int room =
        int(std::clamp<int64_t>((device.shared_block - ROUTE_BESIDES) / each, LEAST_ROUTE_ROWS, ROUTE_ROWS));
    const int tile_rows = few ? std::min(divided(d.T, route_few_tiles(device)), room) : room;
    const bool one_row = tile_rows == 1 && !gives_values && d.E <= ONE_ROW_MAX_E;
    // Few rows are packed by blocks that do nothing else.
    const int packers = few ? packed_rows(d) * int(chunks_of(d.E)) : 0;
    const int64_t shared = one_row ? 0 : std::max(std::min(d.T, tile_rows) * each, ids);
    const int outputs = divided(router_outputs(d), ROUTE_OUTPUTS), tiles = divided(d.T, tile_rows);
    return {{outputs + packers, tiles, 1, ROUTE_THREADS, shared}, tile_rows, one_row, 0};
}

// ---- up and down ----

constexpr int LEAST_SLOTS = 2, MAX_STEPS = 4;
constexpr int LEAST_TASKS = 16; // a block has so many tasks before each has more steps

// Sets a group to an expert's one or two matrices {K, N}, and returns whether they can be multiplied.
inline bool set_group(Group &out, const MoeMatrix &first, const MoeMatrix &second, int64_t K, int64_t N,
                      bool two, bool one) {
    out.K = int32_t(K);
    out.N = int32_t(N);
    out.chunks = int32_t(chunks_of(K));
    out.fragments = int32_t(fragments_of(N));
    out.record = int32_t(row_record(K));
    out.log_parts = log2_of(k_parts(K));
    return set_matrix(out.matrices[0], first, K, N, one) &&
           (!two || set_matrix(out.matrices[1], second, K, N, one));
}

// Sets what there is to multiply in up or in down, and returns whether the matrices can be.
inline bool set_params(MatmulParams &p, const MoeMatmulArgs &a, bool up) {
    const MoeDims &d = a.dims;
    p.dims = d;
    p.at = RoutedLayout(d);
    p.routed = static_cast<uint8_t *>(a.routed);
    p.h = up ? nullptr : a.h;
    p.out = a.out;
    p.out_row = up ? d.h_row() : d.E;
    p.h_row = d.h_row();
    p.T = d.T;
    p.n_used = d.n_used;
    p.n_expert = d.n_expert;
    p.n_shared = shared_items(d);
    p.max_items = int32_t(max_items(d));
    p.item_rows = item_rows(d);
    p.log_matrices = up ? 1 : 0;
    p.activation = a.activation;
    const int64_t E = d.E, FF = d.FF, FFs = d.FF_shared;
    if (!set_group(p.experts, a.first, a.second, up ? E : FF, up ? FF : E, up, false) ||
        (d.shared() &&
         !set_group(p.shared, a.shared_first, a.shared_second, up ? E : FFs, up ? FFs : E, up, true))) {
        return false;
    }
    if (!d.shared()) {
        p.shared = p.experts;
    }
    for (const Group *g : {&p.experts, &p.shared}) {
        p.row_bytes = std::max(p.row_bytes, shared_row(g->K));
        for (int m = 0; m < 1 << p.log_matrices; m++) {
            p.slot_bytes = std::max(p.slot_bytes, g->matrices[m].unit_bytes);
        }
    }
    return true;
}

// Gives 2^within parts of a group's K to a warp, and its items a task for each `steps` times a block's outputs.
inline void share_out(const MatmulParams &p, Group &g, int within, int steps = 1) {
    g.log_across = std::max(g.log_parts - within, 0);
    g.log_fragments = log2_of(ITEM_WARPS) - p.log_matrices - g.log_across;
    g.tasks = divided(g.fragments, steps << g.log_fragments);
}
// The same of both groups. Returns how many tasks there are at most.
inline int share_out(MatmulParams &p, int within, int steps = 1) {
    share_out(p, p.experts, within, steps);
    share_out(p, p.shared, within, steps);
    return p.tasks_of(p.max_items);
}

// Gives a dense layer so many parts of K to a warp that all tasks are done at once, or where that cannot be, that a task takes no
// longer than one of the experts. Returns how many tasks there are at most.
inline int share_dense(MatmulParams &p, int within, int fit) {
    int most = 0;
    for (; most < within; most++) {
        share_out(p, p.shared, most, p.steps);
        if (p.tasks_of(p.max_items) <= fit) {
            return p.tasks_of(p.max_items);
        }
    }
    share_out(p, p.shared, most, p.steps);
    while (most > 0 && p.tasks_of(p.max_items) > fit &&
           p.shared.chunks >> p.shared.log_across > p.experts.chunks >> p.experts.log_across) {
        share_out(p, p.shared, --most, p.steps);
    }
    return p.tasks_of(p.max_items);
}

// Plans a launch of up or down: how many blocks it has, how many steps a task has, and what is in shared memory. The params
// say what there is to multiply, and get the rest here. In what order sums are added, they say alone.
inline LaunchPlan plan_experts(const DeviceLimits &device, MatmulParams &p) {
    const bool few = few_rows(p.dims), fewest = few && fewest_rows(p.dims);
    const int most = std::min(p.T, p.item_rows);
    const int slot = ITEM_WARPS * p.slot_bytes, all = log2_of(MAX_PARTS);
    const int besides = (fewest ? FEWEST_OWN : BLOCK_OWN) + BARRIER_BYTES + 1024;
    const auto room = [&](int per_sm) { return device.shared_sm / per_sm - besides - most * p.row_bytes; };
    // Code for multiprocessors of 100 KB, or from before 9.0, has registers for two (FEWEST_BLOCKS).
    const bool three = fewest && device.shared_sm > 100 * 1024 && device.bulk_copies;
    int per_sm = three ? SMALL_BLOCKS_SM : BLOCKS_SM;
    // Rows of a dense layer are long: beside many of them two blocks with a unit for a warp each are there, rather than one with two.
    const auto least = [&] { return p.dims.dense != 0 && few && per_sm == BLOCKS_SM ? 1 : LEAST_SLOTS; };
    while (per_sm > 1 && room(per_sm) < least() * slot) {
        per_sm--;
    }
    const int at_once = per_sm * device.multiprocessors;
    p.steps = 1;
    int within = 0, tasks = share_out(p, within);
    if (few) { // nearly all tasks are done at once
        // A few may come second: for example, two rows of the 35b-a3b in Q8_0 have 272 where an H200 has 264
        // blocks. And a few blocks may have none: eight rows have 260 tasks of two steps. Its plans of two to
        // eight rows, which were measured, are the same where 3.1 to 30% may come second and 1.6 to 13% have none.
        const int fit = at_once + at_once / 25;
        // A dense layer is wide, and its tasks are no part of this.
        const auto planned = [&] {
            return p.tasks_of(p.max_items) - (p.dims.dense != 0 ? p.tasks_of(0) : 0);
        };
        tasks = planned();
        while (within < all && tasks > fit) {
            share_out(p, ++within);
            tasks = planned();
        }
        if (tasks > fit) {
            while (p.steps < MAX_STEPS && tasks > fit &&
                   (share_out(p, all, 2 * p.steps), planned()) > at_once - at_once / 10) {
                p.steps *= 2;
                tasks = planned();
            }
            share_out(p, all, p.steps);
        }
        tasks = p.dims.dense != 0 ? share_dense(p, within, fit) : p.tasks_of(p.max_items);
    } else {
        if (share_out(p, all) >= device.multiprocessors << p.log_matrices) {
            within = all;
        }
        tasks = share_out(p, within);
        while (p.steps < MAX_STEPS && tasks >= at_once * LEAST_TASKS * p.steps) {
            p.steps *= 2;
        }
        tasks = share_out(p, within, p.steps);
    }
    // A block lists MAX_TASKS at most. Where those of one wave could not list all, waves are full: 30 blocks on an RTX 3060's 28
    // multiprocessors would leave two of them as much again to do while the others wait.
    const int blocks = std::min(tasks, at_once * divided(tasks, int64_t(at_once) * MAX_TASKS));
    // Where a warp has few units, room for more would only keep other blocks from a multiprocessor.
    p.slots = few || (blocks == tasks && within == 0) ? LEAST_SLOTS : MAX_SLOTS;
    p.slots = std::max(std::min(room(per_sm) / slot, p.slots), 1);
    p.capacity = most;
    if (blocks < tasks && !few) { // then the next task's rows may come ahead
        p.capacity += std::max(std::min((room(per_sm) - p.slots * slot) / p.row_bytes, most), 0);
    }
    return {blocks, 1, 1, ITEM_THREADS, BARRIER_BYTES + p.slots * slot + p.capacity * p.row_bytes};
}

// Plans up or down of many rows: a block has one task, of more steps where its rows have few chunks.
constexpr int MANY_CHUNKS = 8;
inline LaunchPlan plan_many(const DeviceLimits &device, MatmulParams &p) {
    const int slot = ITEM_WARPS * p.slot_bytes;
    const int besides = MANY_OWN + device.shared_reserved + BARRIER_BYTES + MANY_STAGES * MANY_STAGE;
    const auto slots = [&](int per_sm) { return (device.shared_sm / per_sm - besides) / slot; };
    p.steps = std::clamp(MANY_CHUNKS / std::max(p.experts.chunks, p.shared.chunks), 1, MAX_STEPS);
    const int tasks = share_out(p, log2_of(MAX_PARTS), p.steps);
    const int two = device.shared_sm > 100 * 1024 ? slots(BLOCKS_SM) : 0; // MANY_BLOCKS, likewise
    p.slots = std::clamp(two >= LEAST_SLOTS ? two : slots(1), 1, MAX_SLOTS);
    return {tasks, 1, 1, ITEM_THREADS, BARRIER_BYTES + p.slots * slot + MANY_STAGES * MANY_STAGE};
}
// The same by wgmma: a block that is alone on its multiprocessor has more steps, since nothing runs while it begins.
constexpr int WIDE_CHUNKS = 16, WIDE_STEPS = 8;
inline LaunchPlan plan_wide(const DeviceLimits &device, MatmulParams &p) {
    using S = WideShape<WIDE_ROWS>;
    const int slot = ITEM_WARPS * p.slot_bytes;
    const int room =
        device.shared_sm - S::OWN - device.shared_reserved - BARRIER_BYTES - S::STAGES * S::STAGE;
    p.steps = std::clamp(WIDE_CHUNKS / std::max(p.experts.chunks, p.shared.chunks), 1, WIDE_STEPS);
    const int tasks = share_out(p, log2_of(MAX_PARTS), p.steps);
    p.slots = std::clamp(room / slot, 1, MAX_SLOTS);
    return {tasks, 1, 1, ITEM_THREADS, BARRIER_BYTES + p.slots * slot + S::STAGES * S::STAGE};
}
// Returns what MoeDims::wide is on a device.
inline int moe_wide_rows(const DeviceLimits &device, const MoeDims &d) {
    return device.wgmma && int64_t(d.T) * d.n_used >= int64_t(WIDE_FROM) * d.n_expert ? WIDE_ROWS : 0;
}

// Plans up of one row by the kernel that fetches all units of a task at once, and returns whether a multiprocessor has room for
// as many blocks. Where it has not, nothing is set.
inline bool plan_up_one(const DeviceLimits &device, MatmulParams &params, LaunchPlan &plan) {
    MatmulParams p = params;
    const int tasks = share_out(p, 0);
    for (const Group *g : {&p.experts, &p.shared}) {
        for (const Matrix &m : g->matrices) {
            p.slots = std::max(p.slots, divided(g->chunks, 1 << g->log_parts) * m.units);
        }
    }
    const int bytes = ONE_BARRIERS + p.row_bytes + ITEM_WARPS * p.slots * p.slot_bytes;
    if (bytes + ONE_OWN + device.shared_reserved > device.shared_sm / SMALL_BLOCKS_SM) {
        return false;
    }
    params = p;
    plan = {tasks, 1, 1, ITEM_THREADS, bytes};
    return true;
}

// ---- sum, post, and end ----

inline LaunchPlan plan_moe_sum(const MoeDims &d) {
    return {divided(chunks_of(d.E), SUM_WARPS), d.T, 1, SUM_WARPS * WARP, 0};
}

inline LaunchPlan plan_moe_post(const MoeDims &d) { // a block has a whole row
    return {d.T, 1, 1, int(chunks_of(d.E)) * WARP, 0};
}

// A block of end takes no more of shared memory, so that others run beside it, and so many bytes of it are the kernel's own.
// Each device that luce runs on has as much for a block.
constexpr int64_t END_SHARED = 98304, END_OWN = 2048;

// Returns a place's bytes of weights.
constexpr int end_weights(int64_t chunks, int type) {
    return int(chunks) * units_of_chunk(type) * fragment_bytes(type);
}
inline int64_t end_bytes(const MoeDims &d, int type, int shared_type) {
    const int places = d.n_used + (d.shared() ? 1 : 0);
    const int64_t routed = end_weights(chunks_of(d.FF), type);
    const int64_t shared = d.shared() ? end_weights(chunks_of(d.FF_shared), shared_type) : 0;
    return align16(places * END_ACROSS * 8) + places * (std::max(routed, shared) + shared_row(d.h_row()) +
                                                        MAX_PARTS * FRAGMENT * int64_t(sizeof(float)));
}

// Returns whether moe_end does a layer's down and sum, by the types of its matrices.
inline bool moe_ends_at_once(const MoeDims &d, int32_t type, int32_t shared_type) {
    return d.T == 1 && moe_has(d) && end_bytes(d, type, shared_type) <= END_SHARED - END_OWN;
}

inline LaunchPlan plan_end(const MoeDims &d, int32_t type, int32_t shared_type) {
    const int warps = std::min(int(d.places()) * END_ACROSS, END_WARPS);
    return {int(fragments_of(d.E)), 1, 1, warps * WARP, end_bytes(d, type, shared_type)};
}

} // namespace luce
