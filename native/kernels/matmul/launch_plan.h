// Plans launches of rowmm and of what packs its rows, as pure functions of a device's limits and the shapes. What units,
// tiles and fragments are is said in matmul/layout.h, what ranges and parts are in matmul/plan.h.
#pragma once

#include "common/device_limits.h"
#include "common/kernels.h"
#include "common/launch_plan.h"
#include "common/pointers.h"
#include "matmul/shape.h"

#include <algorithm>
#include <tuple>

namespace luce {

// ---- ranges ----

// Returns how many blocks a multiprocessor has at once at any number of rows, where a slot has so many bytes: BLOCKS_PER_SM, or one
// where two slots of each and the activations of 16 or 32 rows find no room twice. With 100 KB of shared memory that is so for all
// types, with 164 KB for those of more than 176 bytes. A grid of more blocks would then run in two waves, each of which begins
// with empty rings. It does not depend on the rows, since it cuts K.
inline int blocks_per_sm(const DeviceLimits &device, int slot_bytes) {
    constexpr int OWN = 512, ROWS = std::max(Shape<2, false>::row_bytes(16), Shape<4, false>::row_bytes(SET));
    const int block = ROWS + 2 * slot_bytes + OWN + device.shared_reserved;
    return BLOCKS_PER_SM * block <= device.shared_sm ? BLOCKS_PER_SM : 1;
}

inline int most_ranges(const DeviceLimits &device) {
    return std::min(BLOCKS_PER_SM * device.multiprocessors, ROWMM_MAX_RANGES);
}
inline int ranges_of(const DeviceLimits &device, int slot_bytes) {
    return std::min(blocks_per_sm(device, slot_bytes) * device.multiprocessors, ROWMM_MAX_RANGES);
}

// Units of one size, one behind the other: those of the whole tiles of a matrix, or of its last tile.
struct UnitSpan {
    int units;
    int64_t cost;
};

// Says where each range begins. The units' bytes, and a little for each unit, are divided evenly.
inline void cut_ranges(RowmmParams &p, const UnitSpan *spans, int n_spans) {
    int64_t total = 0;
    for (int i = 0; i < n_spans; i++) {
        total += spans[i].units * spans[i].cost;
    }
    int64_t before = 0; // the spans ahead of span i cost so much
    int units = 0, i = 0;
    for (int r = 0; r < p.ranges; r++) {
        const int64_t target = total * r / p.ranges;
        while (i + 1 < n_spans && before + spans[i].units * spans[i].cost <= target) {
            before += spans[i].units * spans[i].cost;
            units += spans[i++].units;
        }
        p.first[r] = units + int((target - before + spans[i].cost / 2) / spans[i].cost);
    }
    for (; i < n_spans; i++) {
        units += spans[i].units;
    }
    p.first[p.ranges] = units;
    for (int r = 1; r < p.ranges; r++) { // no range is empty
        p.first[r] = std::min(std::max(p.first[r], p.first[r - 1] + 1), units - (p.ranges - r));
    }
}

// Says at which chunk of K a range begins, and whether all its units are whole chunks.
struct Beginning {
    int chunk, range;
    bool whole;
    bool operator<(const Beginning &o) const {
        return std::make_tuple(!whole, chunk, range) < std::make_tuple(!o.whole, o.chunk, o.range);
    }
};

// Pairs ranges that begin at neighbouring chunks, for blocks of two teams (matmul/schedule.cuh). It changes no sum.
inline void pair_ranges(RowmmParams &p) {
    // It counts stages. The first team waits for the second with so many in hand.
    constexpr int MOST_APART = 2;
    Beginning all[ROWMM_MAX_RANGES];
    for (int r = 0, segment = 0; r < p.ranges; r++) {
        while (segment + 1 < p.n_segments && p.segments[segment + 1].first_unit <= p.first[r]) {
            segment++;
        }
        const RowmmSegment &s = p.segments[segment];
        const int units = units_of_chunk(s.type);
        all[r] = {(p.first[r] - s.first_unit) % s.units_k / units, r, units == 1};
        for (int i = segment + 1; i < p.n_segments && p.segments[i].first_unit < p.first[r + 1]; i++) {
            all[r].whole = all[r].whole && units_of_chunk(p.segments[i].type) == 1;
        }
    }
    std::sort(all, all + p.ranges);
    for (int r = 0; r < p.ranges; r += 2) {
        const Beginning &a = all[r], &b = all[std::min(r + 1, p.ranges - 1)];
        const int apart = b.chunk - a.chunk, length = p.first[a.range + 1] - p.first[a.range];
        const bool shares = a.whole && b.whole && apart <= std::min(MOST_APART, length);
        p.pairs[r / 2] = {{uint16_t(a.range), uint16_t(r + 1 < p.ranges ? b.range : p.ranges)},
                          int16_t(shares ? apart : -1)};
    }
}

// Cuts a launch into ranges. The cut is one for all numbers of rows: the shapes of the weights and the device decide it.
inline void plan_ranges(RowmmParams &p, const RowmmArgs &a, const DeviceLimits &device) {
    // This cost is in bytes. It is large since a unit takes nearly as long whatever its type is.
    constexpr int64_t UNIT_COST = 49152;
    UnitSpan spans[2 * ROWMM_MAX_WEIGHTS];
    int n_spans = 0, units = 0, tiles = 0;
    p.n_segments = a.n_weights;
    for (int i = 0; i < a.n_weights; i++) {
        const RowmmWeights &w = a.weights[i];
        RowmmSegment &s = p.segments[i];
        s.packed = static_cast<const uint8_t *>(w.packed);
        s.output_scale = nullptr;
        if (has_output_scale(w.type)) {
            s.output_scale =
                reinterpret_cast<const float *>(s.packed + output_scale_offset(w.type, a.K, w.N));
        }
        s.out = w.out;
        s.out_row = w.out_row;
        s.residual = w.residual;
        s.residual_row = w.residual_row;
        s.N = int32_t(w.N);
        s.type = w.type;
        s.units_k = int32_t(chunks_of(a.K) * units_of_chunk(w.type));
        s.n_units = int32_t(tiles_of(w.N) * s.units_k);
        s.whole_units = int32_t(fragments_of(w.N) / FRAGMENTS * s.units_k);
        s.last_fragments = int32_t(fragments_of(w.N) % FRAGMENTS);
        s.fragment_bytes = fragment_bytes(w.type);
        s.vectors = w.N % 4 == 0 && w.out_row % 4 == 0 && aligned(w.out) && w.residual_row % 4 == 0 &&
                    aligned(w.residual);
        s.first_unit = units;
        units += s.n_units;
        s.first_tile = tiles;
        tiles += int(tiles_of(w.N));
        if (s.whole_units > 0) {
            spans[n_spans++] = {s.whole_units, int64_t(FRAGMENTS) * s.fragment_bytes + UNIT_COST};
        }
        if (s.n_units > s.whole_units) {
            spans[n_spans++] = {s.n_units - s.whole_units,
                                int64_t(s.last_fragments) * s.fragment_bytes + UNIT_COST};
        }
        // A warpgroup reads four fragments where one of them is there.
        const int largest = s.whole_units > 0 ? FRAGMENTS : (s.last_fragments + 3) / 4 * 4;
        p.slot_bytes = std::max(p.slot_bytes, largest * s.fragment_bytes);
    }
    p.ranges = std::min(ranges_of(device, p.slot_bytes), units);
    cut_ranges(p, spans, n_spans);
    pair_ranges(p);
}

// ---- blocks ----

// Most launches have a ring of weights. Two kinds of them spare a launch: the one that norms and packs its row, where no other
// has packed it, and of few rows the one whose blocks have all of K.
enum class RowmmWay { RING, NORM_FIRST, WHOLE_K };

struct RowmmPlan {
    RowmmParams params; // of the first set of rows
    RowsLayout rows;
    RowmmWay way;
    LaunchPlan product; // of a set of rows
    bool fits; // a block of the device has room for as many slots as the kernel needs
};

// What a plan has to know of the Shape of a kernel of rings.
struct RowmmBlock {
    int threads, teams, stages;
    int (*row_bytes)(int columns, int stages);
};
inline RowmmBlock rowmm_block(int columns, bool wide, bool bulk_copies) {
    const auto of = [&](auto shape) {
        return RowmmBlock{shape.threads(bulk_copies), shape.TEAMS, shape.STAGES, shape.row_bytes};
    };
    if (columns <= 8) {
        return of(Shape<1, false>());
    }
    if (columns <= 16) {
        return of(Shape<2, false>());
    }
    if (columns <= 32) {
        return wide ? of(Shape<4, true>()) : of(Shape<4, false>());
    }
    return of(Shape<8, true>());
}

// Plans how many slots of weights a ring has, and how many stages of activations. A block leaves half of a multiprocessor's shared
// memory to the second one there. Where there is no second, that half is for blocks of the launch behind, which begin beside it
// where there are bulk copies (from 9.0 on); elsewhere none do, and the block has all. Where a share has no room for two slots, a
// block takes more than its share: two slots if a second block runs there, else as many as fit. If not even two fit, there are
// fewer stages, since activations come from L2 and weights from memory: so it is for 9 to 32 rows beside Q8_0 with 100 KB.
inline void plan_ring(RowmmPlan &plan, const DeviceLimits &device) {
    RowmmParams &p = plan.params;
    const RowmmBlock block = rowmm_block(p.columns, plan.rows.wide, device.bulk_copies);
    // The kernel has at most 512 besides, and some is for blocks of the launches behind, which wait beside it.
    const int besides = block.teams == 1 ? 2560 : 512;
    const bool only = blocks_per_sm(device, p.slot_bytes) == 1;
    const int shares = only && !device.bulk_copies ? 1 : BLOCKS_PER_SM / block.teams;
    const int share = device.shared_sm / shares - device.shared_reserved - besides;
    p.stages = block.stages;
    const auto slots_in = [&](int bytes) {
        return (bytes - block.row_bytes(p.columns, p.stages)) / p.slot_bytes;
    };
    p.slots = std::min(slots_in(share), ROWMM_MAX_SLOTS);
    if (p.slots < 2) {
        const int most = only ? ROWMM_MAX_SLOTS : 2, all = device.shared_block - besides;
        while (only && p.stages > 1 && slots_in(all) < 2) {
            p.stages--;
        }
        p.slots = std::min(slots_in(all), most);
    }
    plan.fits = p.slots >= block.teams;
    plan.product = {divided(p.ranges, block.teams), 1, 1, block.threads,
                    block.row_bytes(p.columns, p.stages) + p.slots * p.slot_bytes};
}

// What the kernel that norms its row has of shared memory besides its row and its slots takes less than this.
constexpr int NORM_BESIDES = 512;

// Returns the bytes that a block of it needs, where `type` has the largest of the weights' units.
inline int64_t norm_first_shared(int64_t K, int32_t type) {
    return NORM_BESIDES + NormShape::row_bytes_of(int(chunks_of(K))) + FRAGMENTS * fragment_bytes(type);
}

// A range's units have a slot each where there is room for the blocks of a multiprocessor.
inline void plan_norm_first(RowmmPlan &plan, const DeviceLimits &device, int64_t K) {
    RowmmParams &p = plan.params;
    const int row_bytes = NormShape::row_bytes_of(int(chunks_of(K)));
    int units = 0;
    for (int r = 0; r < p.ranges; r++) {
        units = std::max(units, p.first[r + 1] - p.first[r]);
    }
    const int share = device.shared_sm / BLOCKS_PER_SM - device.shared_reserved - NORM_BESIDES;
    p.slots = std::min({(share - row_bytes) / p.slot_bytes, ROWMM_MAX_SLOTS, units});
    if (p.slots < 2) {
        p.slots = std::min((device.shared_block - NORM_BESIDES - row_bytes) / p.slot_bytes, 2);
    }
    plan.fits = p.slots >= 1;
    plan.product = {p.ranges, 1, 1, NormShape::THREADS, row_bytes + p.slots * p.slot_bytes};
}

// Plans blocks that have all of K, and returns whether the device has room for all of them at once, one on a multiprocessor (its
// registers allow no second), beside those of the launches ahead and behind.
inline bool plan_whole_k(RowmmPlan &plan, const DeviceLimits &device) {
    const RowmmParams &p = plan.params;
    const RowmmSegment &s = p.segments[0];
    const int rows = s.units_k / units_of_chunk(s.type) * chunk_bytes(p.columns);
    const int bytes = WHOLE_BARRIERS + s.units_k * s.fragment_bytes + rows +
                      s.units_k * p.rows * FRAGMENT * int(sizeof(float));
    if (bytes > device.shared_sm / 2 - device.shared_reserved || fragments_of(s.N) > device.multiprocessors) {
        return false;
    }
    plan.product = {int(fragments_of(s.N)), 1, 1, WHOLE_WARPS * WARP, bytes};
    return true;
}

// Plans a launch of valid arguments, of a row or more.
inline RowmmPlan plan_rowmm(const DeviceLimits &device, const RowmmArgs &args) {
    RowmmPlan plan = {{}, RowsLayout(args.T, device.wgmma), RowmmWay::RING, {}, true};
    RowmmParams &p = plan.params;
    plan_ranges(p, args, device);
    p.partial = static_cast<float *>(args.scratch);
    p.parts = args.parts;
    p.columns = plan.rows.columns;
    p.part_rows = p.rows = std::min(args.T, plan.rows.set);
    if (args.normed != 0) {
        p.n_squares = int32_t(chunks_of(args.K));
        p.K = float(args.K);
        p.eps = args.eps;
    }
    if (args.row != nullptr) {
        p.row = args.row;
        p.norm = args.norm;
        plan.way = RowmmWay::NORM_FIRST;
        plan_norm_first(plan, device, args.K);
        return plan;
    }
    p.x = static_cast<const uint8_t *>(args.x);
    if (args.normed != 0) {
        p.squares = reinterpret_cast<const float *>(p.x + squares_offset(args.T, args.K));
    }
    const bool few = args.T <= ROWMM_WHOLE_ROWS && p.n_segments == 1;
    if (few && p.parts == nullptr && args.normed == 0 && plan_whole_k(plan, device)) {
        plan.way = RowmmWay::WHOLE_K;
    } else {
        plan_ring(plan, device);
    }
    return plan;
}

// Plans the kernel that adds up the parts of tiles that no range has whole. A thread has 4 outputs.
inline LaunchPlan plan_sum(const RowmmParams &p) {
    const int threads = std::min(p.rows * (TILE / 4), SUM_THREADS);
    return {p.ranges, divided(p.rows * (TILE / 4), threads), 1, threads, 0};
}

// ---- what packs rows ----

// Returns up to how many rows a block that gates parts has one row. In longer steps it has two, where the blocks of rows of
// 17408 values would not all begin beside the product ahead: the last would wait for its end. Beside one block of that a
// multiprocessor of 64 Ki registers has room for seven: 924 on an H200, where 16 rows would have 1,088.
inline int rows_gated_singly(const DeviceLimits &device) {
    const int64_t beside = int64_t(7) * device.registers / 65536 * device.multiprocessors;
    int rows = 1;
    while (2 * rows * chunks_of(17408) <= beside) {
        rows *= 2;
    }
    return rows;
}

struct PackPlan {
    LaunchPlan launch;
    int rows; // a block has so many
};
inline PackPlan plan_pack(const DeviceLimits &device, const RowmmPackArgs &a) {
    if (a.post != nullptr) { // a block has a whole row
        return {{a.T, 1, 1, int(chunks_of(a.K)) * WARP, 0}, 1};
    }
    const bool parts = a.parts != nullptr, pairs = parts || a.input == ROWMM_HEAD_RMS;
    const int rows = parts && a.input == ROWMM_GLU && a.T > rows_gated_singly(device) ? 2 : 1;
    return {{divided(chunks_of(a.K), pairs ? 1 : PACK_WARPS), divided(a.T, rows), 1,
             pairs ? PAIR_THREADS : PACK_WARPS * WARP, 0},
            rows};
}
inline LaunchPlan plan_pack_conv(const BlockConvPackArgs &a) {
    return {int(chunks_of(a.K)), a.T, 1, PAIR_THREADS, 0};
}

} // namespace luce
