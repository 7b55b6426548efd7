// A Hopper with another card's limits (tools/build_card.py).
#include "cards.h"

void plan_pretended(const Card &card) {
    DeviceLimits older = H200,
                 newer = H200; // as they read where the kernels are code for 8.0 to 8.9, and for 9.0
    older.wgmma = older.bulk_copies = newer.wgmma = false;
    const bool ampere = !card.limits.bulk_copies, hopper = card.limits.wgmma;
    DeviceLimits limits = ampere ? older : hopper ? H200 : newer;
    expect(pretend(card.name, limits), std::string("an H200 pretends to be ") + card.name);
    expect(limits.multiprocessors == std::min(132, card.limits.multiprocessors),
           std::string("multiprocessors of ") + card.name);
    expect(limits.shared_block == card.limits.shared_block && limits.l2 == card.limits.l2,
           std::string("limits of ") + card.name);
    DeviceLimits other = ampere ? newer : older;
    expect(!pretend(card.name, other), std::string("code for another generation refuses ") + card.name);
    DeviceLimits small = CARDS[0].limits;
    small.wgmma = card.limits.wgmma, small.bulk_copies = card.limits.bulk_copies;
    expect(pretend(card.name, small) == (card.limits.shared_block <= 99 * KiB),
           std::string("99 KB refuse ") + card.name);
    DeviceLimits none = older;
    expect(!pretend("RTX 2080", none) && none.multiprocessors == 132, "a card that is not in the table");
}
