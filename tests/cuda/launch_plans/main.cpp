#include "cards.h"

// What is known to be lacking, by kernel, and so often over all cards and shapes: a number that may only get smaller.
static const std::map<std::string, int> KNOWN = {
    // Of one sequence: registers allow three blocks at once, and each has a quarter of a head (128 to 192 blocks, for 108 or 174).
    {"delta rule: a last wave of less than a quarter", 272},
    // Of eight rows beside units of 3 KB and more: in 100 KB there is no room for two units of each warp, and with items of fewer
    // rows an expert that more rows chose would be read twice.
    {"experts: too few bytes in flight", 767},
    // A block has four of the router's outputs for all rows: 73 blocks of the 35b-a3b, where 72 run at once, and no plan has fewer.
    // Hopper's own, of the 397b-a17b alone, stay as they were measured.
    {"route: a last wave of less than a quarter", 1432},
    // A block fetches all units of its one task at once, so a last wave is short. The kernel whose blocks take several tasks keeps
    // fewer bytes on their way.
    {"up of one row: a last wave of less than a quarter", 20},
};

int main() {
    for (const Card &card : CARDS) {
        plan_matmul(card);
        plan_moe(card);
        plan_attention(card);
        plan_deltanet(card);
        plan_sampling(card);
        plan_reserve(card);
        plan_tails(card);
        plan_pretended(card);
    }
    std::map<std::string, int> found;
    for (const auto &[of, lack] : lacks) {
        found[of.first] += lack.times;
        printf("%s on %s, %d times, first of %s\n", of.first.c_str(), of.second.c_str(), lack.times, lack.first.c_str());
    }
    for (const auto &[lack, times] : found) {
        const auto known = KNOWN.find(lack);
        expect(known != KNOWN.end() && times <= known->second, lack + ", " + std::to_string(times) + " times");
    }
    for (const auto &[lack, times] : KNOWN) {
        expect(found[lack] == times, "is known " + std::to_string(times) + " times, and found " + std::to_string(found[lack]) + ": " + lack);
    }
    printf("%d checks, %d failed\n", n_checks, n_failed);
    return n_failed == 0 ? 0 : 1;
}
