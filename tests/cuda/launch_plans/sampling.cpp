#include "sampling/launch_plan.h"

#include "cards.h"

void plan_sampling(const Card &card) {
    for (int T = 1; T <= MAX_ROWS; T++) {
        for (const LaunchPlan &plan : {plan_choose_parts(T), plan_choose_pick(T), plan_topk_parts(T, VOCABULARY), plan_topk_pick(T)}) {
            expect_runs(card, plan, 48 * KiB, "sampling"); // all that a kernel can declare
        }
    }
}
