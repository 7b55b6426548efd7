#include "moe/launch_plan.h"

#include "cards.h"

// The matrices are not read, and may have any size.
int64_t luce::rowmm_packed_bytes(int32_t, int64_t, int64_t) {
    return 16;
}

namespace {

uint8_t *const NOWHERE = reinterpret_cast<uint8_t *>(uintptr_t(1) << 20); // aligned, and never read
float *const FLOATS = reinterpret_cast<float *>(NOWHERE);

constexpr int TYPES[] = {TYPE_Q4_K, TYPE_Q5_K, TYPE_Q6_K, TYPE_Q8_0, TYPE_Q4_0, TYPE_IQ4_XS, TYPE_F16, TYPE_BF16, TYPE_F32};

MoeMatmulArgs experts(const MoeDims &dims, int type) {
    const MoeMatrix w = {type, NOWHERE, 16};
    MoeMatmulArgs a{};
    a.dims = dims;
    a.first = a.second = a.shared_first = a.shared_second = w;
    return a;
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
        expect(plan.x == (p.n_shared + p.max_items) * p.tasks, "a block for each task of " + what);
    } else if (many_rows(dims)) {
        plan = plan_many(device, p);
        expect_runs(card, plan, MANY_OWN, what);
        expect(p.slots >= 1 && p.slots <= MAX_SLOTS, "slots of " + what);
        expect(plan.x == (p.n_shared + p.max_items) * p.tasks, "a block for each task of " + what);
    } else {
        plan = plan_experts(device, p);
        expect_runs(card, plan, few_rows(dims) && fewest_rows(dims) ? FEWEST_OWN : BLOCK_OWN, what);
        expect(p.slots >= 1 && p.slots <= MAX_SLOTS, "slots of " + what);
        expect(p.capacity >= std::min(dims.T, p.item_rows), "room for an item's rows of " + what);
        expect(int64_t(plan.x) * MAX_TASKS >= int64_t(p.n_shared + p.max_items) * p.tasks, "tasks that a block lists of " + what);
    }
    for (const Group *g : {&p.experts, &p.shared}) {
        // All parts of K, and all outputs, are some warp's.
        expect(g->log_parts == log_parts && g->log_across <= g->log_parts && g->log_fragments >= 0, "parts of " + what);
        expect((p.tasks * std::max(p.steps, 1)) << g->log_fragments >= g->fragments, "outputs of " + what);
    }
}

} // namespace

void plan_moe(const Card &card) {
    const DeviceLimits &device = card.limits;
    for (const int type : TYPES) {
        MoeDims dims = {1, 256, 8, 2048, 512, 512}; // those of the 35b-a3b
        const int unit = fragment_bytes(type);
        expect(moe_lacks(device, card.name, dims, unit, unit).empty(), std::string("the 35b-a3b on ") + card.name);
        for (int T = 1; T <= MOE_MAX_ROWS; T += T < 300 ? 1 : 92) {
            dims.T = T;
            const std::string what = "the 35b-a3b in type " + std::to_string(type) + " at " + std::to_string(T) + " rows on " + card.name;
            for (const bool values : {false, true}) {
                const RoutePlan route = plan_route(device, dims, values);
                expect_runs(card, route.launch, ROUTE_BESIDES, "route of " + what);
                expect((route.launch.x * route.groups) * ROUTE_OUTPUTS >= router_outputs(dims), "outputs of " + what);
                expect(route.tile_rows >= 1 && route.tile_rows <= ROUTE_ROWS && route.launch.y * route.tile_rows >= T, "tiles of " + what);
                // Blocks of few rows all run at once, two on a multiprocessor.
                expect(!few_rows(dims) || route.launch.x * route.launch.y <= 2 * device.multiprocessors, "route at once of " + what);
            }
            for (const bool up : {true, false}) {
                check_products_of_experts(card, dims, type, up, (up ? "up of " : "down of ") + what);
            }
            expect_runs(card, plan_moe_sum(dims), KiB, "sum of " + what);
            if (moe_ends_at_once(dims, type, type)) {
                expect_runs(card, plan_end(dims, type, type), END_OWN, "end of " + what);
            }
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
    expect(device.shared_block > 200 * KiB ? memory.empty() : names(memory, "shared memory, " + std::string(card.name) + " has " + have),
           "too little shared memory is named");
    // An H200 is what the plans were measured on.
    MoeDims dims = {1, 256, 8, 2048, 512, 512};
    for (dims.T = 1; dims.T <= 8; dims.T++) {
        const RoutePlan plan = plan_route(H200, dims, false);
        expect(plan.launch.x == 73 && plan.tile_rows == (dims.T + 2) / 3, "three tiles of few rows");
    }
}
