#include "deltanet/launch_plan.h"

#include "digest.h"

namespace {

Digest digest_of(const DeviceLimits &device) {
    Digest d;
    for (const int S : {16, 32, 64, 128}) {
        for (const int Hv : {16, 32, 48, 64}) {
            for (int T = 1; T <= MAX_ROWS; T++) {
                for (const int slots : {1, 2, 8, 16, 64}) {
                    const DeltaShape s = {T, MAX_ROWS, slots, 16, Hv, S, DELTA_VERIFY};
                    for (const int per_sm : {1, 2, 3}) {
                        d.add_plan(plan_delta(device, s, per_sm));
                    }
                    d.add_plan(plan_conv(s));
                    d.add_plan(plan_conv_parts(s, {int32_t(Hv * S), Hv, Hv}));
                    d.add_plan(plan_delta_layer(s));
                }
            }
            const DeltaShape prompt = {2048, MAX_ROWS, 1, 16, Hv, S, DELTA_APPEND, 1};
            d.add_plan(plan_delta(device, prompt, 1));
            d.add_plan(plan_prepare(prompt));
            d.add_plan(plan_walk(prompt));
            d.add_plan(plan_conv_append(prompt));
            d.add_plan(plan_conv_window(prompt));
        }
    }
    return d;
}

} // namespace

void plan_deltanet(const Card &card) {
    const DeviceLimits &device = card.limits;
    for (const Model &m : MODELS) {
        if (m.Hv == 0) {
            continue;
        }
        for (int T = 1; T <= MAX_ROWS; T++) {
            for (const int slots : {1, 2, 8, 16, 64}) {
                const DeltaShape s = {T, MAX_ROWS, slots, m.Hk, m.Hv, m.S, DELTA_VERIFY};
                const std::string what = std::string(m.name) + "'s delta rule of " + std::to_string(T) + " rows in " +
                                         std::to_string(slots) + " slots on " + card.name;
                const int64_t block = delta_shared(device, s) + own_bytes(s.S) + device.shared_reserved;
                const int per_sm = int(std::min<int64_t>(device.shared_sm / block, 3)); // its registers allow three
                expect(per_sm >= 1, "room for a block of " + what);
                const LaunchPlan plan = plan_delta(device, s, per_sm);
                expect_runs(card, plan, own_bytes(s.S), what);
                expect_waves("delta rule", card, plan.x, std::min(blocks_at_once(card, plan, own_bytes(s.S), 3), 3), s.max_seqs() > 1, what);
                expect(s.max_seqs() == 1 || plan.x <= device.multiprocessors * per_sm, "blocks at once of " + what);
                const int most = divided(delta_block(s.S).blocks * s.Hv, device.multiprocessors);
                expect(s.max_seqs() > 1 || most_saves(s) == 0 || most == 1 || block * (most + 1) > device.shared_sm, "spread blocks of " + what);
                expect_runs(card, plan_conv(s), 12 * KiB, "the conv of " + what);
                expect_runs(card, plan_conv_parts(s, {int32_t(m.Hv * m.S), m.Hv, m.Hv}), 12 * KiB, "the conv of parts of " + what);
                expect_runs(card, plan_delta_layer(s), 4 * KiB, "the layer of " + what);
            }
        }
        const DeltaShape prompt = {2048, MAX_ROWS, 1, m.Hk, m.Hv, m.S, DELTA_APPEND, 1};
        expect_runs(card, plan_delta(device, prompt, 1), own_bytes(m.S), "a prompt's delta rule");
        expect_runs(card, plan_walk(prompt), 0, "a prompt's chunks");
        expect_runs(card, plan_conv_append(prompt), 0, "a prompt's conv");
    }
    // With 100 KB a multiprocessor has as many blocks as registers allow where a step needs them, and saves states only beside those.
    const DeltaShape small = {16, MAX_ROWS, 1, 16, 16, 128, DELTA_VERIFY}, large = {16, MAX_ROWS, 1, 16, 48, 128, DELTA_VERIFY};
    const auto saves = [](const DeltaShape &s, int multiprocessors) { return delta_saves(small_card(multiprocessors, 6, false), s); };
    expect(saves(small, 82) == 3 && saves(large, 82) == 0 && saves(large, 128) == 1 && saves(large, 28) == 0, "saved states of small cards");
    // An H200 is what the plans were measured on.
    const DeltaShape tree = {16, MAX_ROWS, 1, 16, 48, 128, DELTA_VERIFY}, many = {16, MAX_ROWS, 16, 16, 48, 128, DELTA_VERIFY};
    expect(plan_delta(H200, tree, 1).x == 192 && plan_delta(H200, many, 3).x == 395, "blocks of the delta rule");
    // What has no plan is refused, and the reason is named.
    for (const int S : {1, 8, 17, 24, 48, 96, 256}) {
        expect(delta_lacks(S, 2, 4) == "ssm.state_size is " + std::to_string(S) + ": luce runs 16, 32, 64 and 128", "states are named");
        expect(delta_block(S).threads == 0, "no block has states of " + std::to_string(S));
    }
    expect(delta_lacks(16, 3, 3).empty() && delta_lacks(128, 16, 48).empty(), "states that there are");
    expect(!delta_lacks(64, 2, 3).empty() && !delta_lacks(64, 0, 2).empty() && !delta_lacks(64, 4, 2).empty(), "groups are named");
    expect(conv_lacks(4).empty() && !conv_lacks(1).empty() && !conv_lacks(9).empty(), "taps are named");
    if (card.capability == 90) {
        pin(card, digest_of(device), 0x1a4635632e8be58a);
    }
}
