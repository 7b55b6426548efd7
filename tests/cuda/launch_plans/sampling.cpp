#include "sampling/launch_plan.h"

#include "cards.h"

void plan_sampling(const Card &card) {
    for (int T = 1; T <= MAX_ROWS; T++) {
        for (const LaunchPlan &plan :
             {plan_choose_parts(T), plan_choose_pick(T), plan_topk_parts(T, VOCABULARY), plan_topk_pick(T),
              plan_block_conv(T, 5120), plan_prior_tokens(), plan_lattice_scores(T, 16),
              plan_confidence(T, 16), plan_lattice_walk(T), plan_cluster_fill(T, VOCABULARY),
              plan_cluster_scores(T, 4096)}) {
            expect_runs(card, plan, 48 * KiB, "sampling"); // all that a kernel can declare
        }
    }
}
