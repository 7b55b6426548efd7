#include "attention/launch_plan.h"
#include "attention/prefill.h"

#include "digest.h"

namespace {

Digest digest_of(const DeviceLimits &device) {
    Digest d;
    for (const int type : {KV_F32, KV_F16, KV_Q4_0, KV_Q8_0}) {
        for (const int D : {64, 128, 256}) {
            for (const auto &[H, Hkv] : {std::pair<int, int>{8, 2}, {16, 2}, {16, 4}, {24, 4}, {32, 8}, {32, 16}, {64, 8}, {64, 1}}) {
                for (int T = 1; T <= MAX_ROWS; T++) {
                    AttentionArgs a{};
                    a.T = T;
                    a.block = 8;
                    a.H = H;
                    a.pool = {nullptr, nullptr, type, Hkv, D};
                    d.add_plan(plan_attention(device, a));
                    const CombinePlan combine = plan_combine(device, a);
                    d.add_plan(combine.launch);
                    d.add(combine.blocks);
                    d.add_plan(plan_draft_attention(a));
                    d.add_plan(plan_draft_combine(a));
                    AttentionHeadsArgs heads{};
                    heads.T = T;
                    heads.H = H;
                    heads.pool = a.pool;
                    heads.gated = 1;
                    d.add_plan(plan_heads(heads));
                }
            }
        }
    }
    return d;
}

} // namespace

void plan_attention(const Card &card) {
    const DeviceLimits &device = card.limits;
    for (const int type : {KV_F32, KV_F16, KV_Q4_0, KV_Q8_0}) {
        for (const int D : {64, 128, 256, 512}) {
            for (const auto &[H, Hkv] : {std::pair<int, int>{8, 2}, {16, 2}, {16, 4}, {24, 4}, {32, 8}, {64, 1}, {32, 4}, {8, 1}, {32, 16}, {16, 8}, {64, 8}, {16, 1}}) {
                for (int T = 1; T <= MAX_ROWS; T++) {
                    const std::string what = "attention of " + std::to_string(T) + " rows of " + std::to_string(D) + " in type " + std::to_string(type);
                    AttentionArgs a{};
                    a.T = T;
                    a.block = 8;
                    a.H = H;
                    a.pool = {nullptr, nullptr, type, Hkv, D};
                    const LaunchPlan plan = plan_attention(device, a);
                    expect_runs(card, plan, 0, what);
                    expect(plan.x <= device.multiprocessors && plan.x <= MAX_WORKERS, "one block a multiprocessor of " + what);
                    expect_runs(card, plan_combine(device, a).launch, 20 * KiB, what + ", added up");
                    if (BlockHeadSizes::has(D)) {
                        expect_runs(card, plan_draft_attention(a), 0, what + " of a draft");
                    }
                    const HeadGroups heads = head_groups(a);
                    expect(heads.size * heads.groups == H && heads.of_head * Hkv == heads.groups && heads.size <= GROUP_HEADS, "groups of " + what);
                    expect(heads.size <= plan_units(device, a).pairs, "a unit has a row of a group, of " + what);
                    AttentionHeadsArgs of_heads{};
                    of_heads.T = T;
                    of_heads.H = H;
                    of_heads.gated = 1;
                    of_heads.pool = a.pool;
                    expect_runs(card, plan_heads(of_heads), 16 * KiB, "heads of " + what);
                }
            }
        }
    }
    // Prompts: a block fits, and ranges have blocks of their own by how many run at once.
    for (const int D : {64, 128, 256}) {
        expect(prefill_block_bytes(D) <= device.shared_block, std::string("a prompt's block on ") + card.name);
        expect(!device.wgmma || prefill_wgmma_bytes(D) <= device.shared_block, std::string("a prompt's block of two heads on ") + card.name);
    }
    PrefillAttentionArgs prompt{};
    prompt.H = 24;
    prompt.Hkv = 4;
    prompt.D = 256;
    prompt.n_prompts = 1;
    DeviceLimits older = device;
    older.wgmma = false;
    expect(prefill_blocks(prompt, device).heads == (device.wgmma ? 2 : 1) && prefill_blocks(prompt, older).heads == 1, "blocks of two heads are Hopper's");
    prompt.Hkv = 8;
    expect(prefill_blocks(prompt, device).heads == 1, "three heads of a KV head have blocks each");
    prompt.Hkv = 4;
    for (prompt.n_kv = 4096; prompt.n_kv <= 262144; prompt.n_kv *= 2) {
        for (prompt.T = 1; prompt.T <= 2048; prompt.T *= 2) {
            DeviceLimits half = older;
            half.multiprocessors = 2 * device.multiprocessors;
            half.shared_sm = 100 * KiB;
            const bool two = 2 * (prefill_block_bytes(256) + device.shared_reserved) <= device.shared_sm;
            expect(!two || prefill_apart(prompt, older) == prefill_apart(prompt, half), "ranges of a prompt, by blocks at once");
            expect(!prefill_apart(prompt, device) || 4 * prefill_range_values(prompt) <= PREFILL_RANGES_BYTES, "what ranges leave");
        }
    }
    // docs/gpus.md says what partial results of a step take at most: 64 rows of the 27b at 262144 positions.
    expect(int64_t(MAX_ROWS) * 24 * (chunk_at(262143) + 1) * (256 / 2 + 2) * 4 <= int64_t(190 * MiB), "partial results of attention");
    // What has no plan is refused, and the reason is named.
    for (const int D : {1, 16, 32, 33, 63, 65, 96, 192, 255, 257, 511, 1024}) {
        expect(attention_lacks(D, 8, 2) == "attention.key_length is " + std::to_string(D) + ": luce runs 64, 128, 256 and 512", "heads are named");
        expect(!SummedHeadSizes::has(D), "partial sums of heads of " + std::to_string(D));
    }
    expect(attention_lacks<BlockHeadSizes>(512, 8, 2) == "attention.key_length is 512: luce runs 64, 128 and 256", "heads of blocks are named");
    expect(attention_lacks(512, 32, 4).empty() && attention_lacks(64, 8, 2).empty() && attention_lacks(128, 7, 7).empty() && attention_lacks(256, 17, 1).empty(), "heads that there are");
    for (const auto &[H, Hkv] : {std::pair<int, int>{5, 2}, {2, 4}, {0, 1}, {4, 0}}) {
        expect(attention_lacks(64, H, Hkv).find("head_count is " + std::to_string(H) + ", no multiple of") != std::string::npos, "groups are named");
    }
    expect(rope_lacks(0, 64, 1e4).empty() && rope_lacks(64, 64, 1e4).empty(), "rotations that there are");
    expect(!rope_lacks(7, 64, 1e4).empty() && !rope_lacks(66, 64, 1e4).empty() && !rope_lacks(8, 64, 0).empty(), "rotations are named");
    // An H200 is what the plans were measured on.
    AttentionArgs a{};
    a.H = 24;
    a.pool = {nullptr, nullptr, KV_F16, 4, 256};
    for (a.T = 1; a.T <= MAX_ROWS; a.T++) {
        const CombinePlan plan = plan_combine(H200, a);
        expect((plan.blocks == 1) == (a.T <= 5) && (plan.launch.threads == 512) == (a.T <= 11), "what adds up attention");
    }
    if (card.capability == 90) {
        pin(card, digest_of(device), 0x61f537e554fcd42d);
    }
}
