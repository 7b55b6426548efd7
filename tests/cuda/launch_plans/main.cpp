#include "cards.h"

int main() {
    for (const Card &card : CARDS) {
        plan_matmul(card);
        plan_moe(card);
        plan_attention(card);
        plan_deltanet(card);
        plan_sampling(card);
    }
    printf("%d checks, %d failed\n", n_checks, n_failed);
    return n_failed == 0 ? 0 : 1;
}
