// Prompts' products with sums in F16, and which devices have them (matmul/prompt_plan.h).
#include "matmul/prompt_plan.h"

#include "cards.h"

// Which devices do is known by their names, as drivers give them.
static void name_lines() {
    for (const char *name : {"NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4070 Ti SUPER", "NVIDIA GeForce RTX 4090 Laptop GPU",
                             "NVIDIA GeForce RTX 5090", "GeForce RTX 3080"}) {
        expect(has_slow_f32_sums(name), std::string(name) + " sums in F32 at half the rate");
    }
    for (const char *name : {"NVIDIA RTX A6000", "NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "NVIDIA A10",
                             "NVIDIA L4", "NVIDIA L40S", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 PCIe", "NVIDIA H200", "NVIDIA GB10", ""}) {
        expect(!has_slow_f32_sums(name), std::string(name) + " sums in F32 at the rate of F16");
    }
}

void plan_prompts(const Card &card) {
    name_lines();
    const DeviceLimits &d = card.limits;
    for (const Model &m : MODELS) {
        for (const int64_t N : {m.E, m.FF, int64_t(2 * m.heads * m.D), int64_t(m.kv_heads * m.D)}) {
            for (const int64_t T : {1, 64, 128, 129, 256, 512, 1000, 1024, 2048, 4096}) {
                const std::string what = std::string(m.name) + ": " + std::to_string(T) + " rows, N " + std::to_string(N);
                const F16Plan plan = plan_f16_sums(d, T, N);
                expect(plan.tile >= 0 && plan.tile < int(std::size(F16_TILES)), "a tile for " + what + " on " + card.name);
                expect_runs(card, plan.launch, 0, "gemm_f16 of " + what);
                const F16Tile &tile = F16_TILES[plan.tile];
                const auto work = [&](const LaunchPlan &p, const F16Tile &t) {
                    return int64_t(divided(p.x, d.multiprocessors)) * t.rows * t.outputs;
                };
                expect(int64_t(plan.launch.x) * tile.rows * tile.outputs >= T * N, "gemm_f16 has all of " + what);
                // A multiprocessor has no more than a third more to do than with the best of the other tiles.
                for (const F16Tile &other : F16_TILES) {
                    expect(work(plan.launch, tile) * 3 <= work(plan_f16_tile(other, T, N), other) * 4,
                           "gemm_f16 shares out " + what + " on " + card.name);
                }
            }
        }
    }
    if (d.slow_f32_sums) { // the 27b: large matrices have the largest tile, few results small ones
        expect(plan_f16_sums(d, 4096, 17408).tile == 0, std::string("4,096 rows of the 27b on ") + card.name);
        expect(plan_f16_sums(d, 128, 1024).tile != 0, std::string("128 rows of few outputs on ") + card.name);
    }
}
