#include "step/tails.h"

#include "cards.h"

// Where a prompt's tail begins follows the card and the model alone.
void plan_tails(const Card &card) {
    const auto memory = uint64_t(card.memory_gb * 1e9);
    const uint32_t tail = longest_tail(&card.limits, memory, uint64_t(18.5e9), uint64_t(48.7e9)); // the 27b in 4 bits
    const std::string what = std::string("tails of the 27b on ") + card.name;
    expect(tail == (std::string(card.name) == "H200" ? 64 : 127), what);
    expect(longest_tail(&card.limits, memory, 0, 0) == (card.limits.wgmma ? 64 : 127), what + ", of no bytes");
}
