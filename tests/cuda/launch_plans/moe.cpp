#include "moe/launch_plan.h"

#include "digest.h"

// The matrices are not read, and may have any size.
int64_t luce::rowmm_packed_bytes(int32_t, int64_t, int64_t) {
    return 16;
}

namespace {

uint8_t *const NOWHERE = reinterpret_cast<uint8_t *>(uintptr_t(1) << 20); // aligned, and never read
float *const FLOATS = reinterpret_cast<float *>(NOWHERE);

MoeMatmulArgs experts(const MoeDims &dims, int type) {
    const MoeMatrix w = {type, NOWHERE, 16, nullptr};
    MoeMatmulArgs a{};
    a.dims = dims;
    a.first = a.second = a.shared_first = a.shared_second = w;
    return a;
}

MoeDims dims_of(const Mixture &m) {
    MoeDims dims = {1, m.n_expert, m.n_used, m.E, m.FF, m.FF_shared};
    dims.dense = m.dense;
    return dims;
}
int most_rows(const MoeDims &dims) {
    return dims.dense != 0 ? ROWMM_MAX_ROWS : dims.rows_at_once();
}

// Each warp has a ring of its own, of one slot or more. If half of a multiprocessor's slots are on their way at any time, memory that
// answers within a microsecond is kept busy by so many bytes; few rows that make fewer blocks than that are another matter.
bool in_flight(const Card &card, const LaunchPlan &plan, const MatmulParams &p, int64_t declared, int most) {
    const int blocks = blocks_at_once(card, plan, declared, most);
    const double bytes = double(blocks) * ITEM_WARPS * p.slots * p.slot_bytes / 2;
    return p.slots >= 2 || bytes >= card.bandwidth_gbs * 1e3 / card.limits.multiprocessors;
}

void check_products_of_experts(const Card &card, const MoeDims &dims, int type, bool up, const std::string &what) {
    const DeviceLimits &device = card.limits;
    MatmulParams p = {};
    expect(set_params(p, experts(dims, type), up), "matrices of " + what);
    const int log_parts = p.experts.log_parts;
    LaunchPlan plan;
    if (up && dims.T == 1 && plan_up_one(device, p, plan)) {
        expect_runs(card, plan, ONE_OWN, what);
        expect((plan.shared + ONE_OWN + device.shared_reserved) * SMALL_BLOCKS_SM <= device.shared_sm, "three at once of " + what);
        expect(plan.x == p.tasks_of(p.max_items), "a block for each task of " + what);
        expect_waves("up of one row", card, plan.x, blocks_at_once(card, plan, ONE_OWN, SMALL_BLOCKS_SM), false, what);
    } else if (many_rows(dims)) {
        const bool wide = wide_rows(dims);
        const int own = wide ? WideShape<WIDE_ROWS>::OWN : MANY_OWN;
        plan = wide ? plan_wide(device, p) : plan_many(device, p);
        expect_runs(card, plan, own, what);
        expect(p.slots <= MAX_SLOTS, "slots of " + what);
        expect_of("experts of many rows", card, in_flight(card, plan, p, own, wide ? 1 : BLOCKS_SM), "too few bytes in flight", what);
        expect(plan.x == p.tasks_of(p.max_items), "a block for each task of " + what);
    } else {
        const bool fewest = few_rows(dims) && fewest_rows(dims);
        const int most = fewest && device.shared_sm > 100 * KiB ? SMALL_BLOCKS_SM : BLOCKS_SM; // FEWEST_BLOCKS
        plan = plan_experts(device, p);
        expect_runs(card, plan, fewest ? FEWEST_OWN : BLOCK_OWN, what);
        expect(p.slots >= 1 && p.slots <= MAX_SLOTS, "slots of " + what);
        expect_of("experts", card, in_flight(card, plan, p, fewest ? FEWEST_OWN : BLOCK_OWN, most), "too few bytes in flight", what);
        expect_waves("experts", card, plan.x, blocks_at_once(card, plan, fewest ? FEWEST_OWN : BLOCK_OWN, most), false, what);
        expect(p.capacity >= std::min(dims.T, p.item_rows), "room for an item's rows of " + what);
        expect(int64_t(plan.x) * MAX_TASKS >= p.tasks_of(p.max_items), "tasks that a block lists of " + what);
    }
    for (const Group *g : {&p.experts, &p.shared}) {
        // All parts of K, and all outputs, are some warp's.
        expect(g->log_parts == log_parts || g == &p.shared, "parts of " + what);
        expect(g->log_across <= g->log_parts && g->log_fragments >= 0, "parts of " + what);
        expect((g->tasks * std::max(p.steps, 1)) << g->log_fragments >= g->fragments, "outputs of " + what);
    }
}

void check_mixture(const Card &card, const Mixture &m, int type) {
    const DeviceLimits &device = card.limits;
    MoeDims dims = dims_of(m);
    const int unit = fragment_bytes(type);
    const std::string name = std::string(m.name) + " in type " + std::to_string(type);
    dims.most = moe_item_rows(device, dims, unit, unit);
    const bool taken = moe_lacks(device, card.name, dims, unit, unit).empty();
    expect_of("experts", card, taken, "the mixture is refused", name);
    for (int T = 1; taken && T <= most_rows(dims); T += T < 70 ? 1 : 157) {
        dims.T = T;
        dims.wide = moe_wide_rows(device, dims);
        const std::string what = name + " at " + std::to_string(T) + " rows on " + card.name;
        for (const bool values : {false, true}) {
            const RoutePlan route = plan_route(device, dims, values);
            expect_runs(card, route.launch, ROUTE_BESIDES, "route of " + what);
            const bool many = many_rows(dims);
            expect(route.launch.x * (many ? route.passes * ROUTE_MANY_OUTPUTS : ROUTE_OUTPUTS) >= router_outputs(dims), "outputs of " + what);
            expect(route.tile_rows >= 1 && route.tile_rows <= (many ? ROUTE_MANY_ROWS : ROUTE_ROWS) && route.launch.y * route.tile_rows >= T, "tiles of " + what);
            expect(!many || route.launch.shared >= route_list_bytes(dims), "the list of " + what);
            if (few_rows(dims)) {
                const int at_once = blocks_at_once(card, route.launch, ROUTE_BESIDES, 2);
                expect_waves("route", card, route.launch.x * route.launch.y, at_once, false, what);
            }
        }
        for (const bool up : {true, false}) {
            check_products_of_experts(card, dims, type, up, (up ? "up of " : "down of ") + what);
        }
        expect_runs(card, plan_moe_sum(dims), KiB, "sum of " + what);
        if (dims.E <= MOE_POST_E) {
            expect_runs(card, plan_moe_post(dims), KiB, "post of " + what);
        }
        if (moe_ends_at_once(dims, type, type)) {
            expect_runs(card, plan_end(dims, type, type), END_OWN, "end of " + what);
        }
    }
}

Digest digest_of(const DeviceLimits &device) {
    Digest d;
    for (const Mixture &m : MIXTURES) {
        for (const int type : TYPES) {
            MoeDims dims = dims_of(m);
            d.add(moe_lacks(device, "", dims, fragment_bytes(type), fragment_bytes(type)).empty());
            for (int T = 1; T <= most_rows(dims); T += T < 100 ? 1 : 71) {
                dims.T = T;
                dims.wide = moe_wide_rows(device, dims);
                for (const bool values : {false, true}) {
                    const RoutePlan route = plan_route(device, dims, values);
                    d.add_plan(route.launch);
                    d.add(route.tile_rows, route.one_row, route.passes);
                }
                for (const bool up : {true, false}) {
                    const MoeMatrix w = {type, NOWHERE, 16, nullptr};
                    MoeMatmulArgs a{};
                    a.dims = dims;
                    a.first = a.second = a.shared_first = a.shared_second = w;
                    MatmulParams p = {};
                    d.add(set_params(p, a, up));
                    LaunchPlan plan;
                    const bool one = up && T == 1 && plan_up_one(device, p, plan);
                    if (!one) {
                        plan = wide_rows(dims) ? plan_wide(device, p) : many_rows(dims) ? plan_many(device, p) : plan_experts(device, p);
                    }
                    d.add_plan(plan);
                    d.add(one, p.slots, p.slot_bytes, p.row_bytes, p.capacity, p.item_rows, p.steps, p.experts.tasks, p.experts.log_across,
                          p.experts.log_fragments, p.shared.log_across, p.shared.log_fragments);
                }
                d.add_plan(plan_moe_sum(dims));
                if (moe_ends_at_once(dims, type, type)) {
                    d.add_plan(plan_end(dims, type, type));
                }
            }
        }
    }
    return d;
}

} // namespace

void plan_moe(const Card &card) {
    const DeviceLimits &device = card.limits;
    for (const Mixture &m : MIXTURES) {
        for (const int type : TYPES) {
            check_mixture(card, m, type);
        }
    }
    // What fits nowhere is refused, and the reason is named.
    const int64_t unit = fragment_bytes(TYPE_Q8_0);
    const auto lack = [&](const MoeDims &dims) { return moe_lacks(device, card.name, dims, unit, unit); };
    const auto names = [](const std::string &text, const std::string &what) { return text.find(what) != std::string::npos; };
    expect(names(lack({1, 1024, 8, 2048, 512, 512}), "8 of 1024 experts"), "too many experts are named");
    expect(names(lack({1, 256, 8, 2048, 8192, 512}), "experts of 8192 values"), "too long experts are named");
    expect(names(lack({1, 256, 8, 2048, 512, 8192}), "a shared expert of 8192 values"), "a too long shared expert is named");
    expect(names(lack({1, 256, 8, 8192, 512, 512}), "rows of 8192 values"), "too long rows are named");
    expect(names(lack({1, 256, 8, 2046, 512, 512}), "rows of 2046 values: luce's experts take a multiple of 4"), "odd rows are named");
    expect(names(lack({1, 256, 33, 2048, 512, 512}), "33 of 256 experts") && names(lack({1, 4, 5, 2048, 512, 512}), "5 of 4 experts"),
           "too many experts of a row are named");
    const std::string memory = lack({1, 256, 8, 6144, 512, 512}), have = std::to_string(device.shared_block);
    expect(device.shared_block > 100 * KiB ? memory.empty() : names(memory, "shared memory, " + std::string(card.name) + " has " + have),
           "too little shared memory is named");
    // Rows of 4096 values have items of fewer rows where eight find no room.
    const MoeDims wide = {1, 512, 10, 4096, 1024, 1024}, usual = {1, 256, 8, 2048, 512, 512};
    expect(moe_item_rows(device, wide, unit, unit) == (device.shared_block > 150 * KiB ? 8 : 4), "rows of an item of a wide mixture");
    expect(moe_item_rows(device, usual, unit, unit) == 8, "rows of an item of the 35b-a3b");
    // An H200 is what the plans were measured on.
    MoeDims dims = {1, 256, 8, 2048, 512, 512};
    for (dims.T = 1; dims.T <= 8; dims.T++) {
        const RoutePlan plan = plan_route(H200, dims, false);
        expect(plan.launch.x == 73 && plan.tile_rows == (dims.T + 2) / 3, "three tiles of few rows");
    }
    if (card.capability == 90) {
        pin(card, digest_of(device), 0x75efb101d5bb29c7);
    }
}
