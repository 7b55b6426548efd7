#include "step/reserve.h"

#include "cards.h"

// docs/gpus.md says what luce asks for beyond weights, caches and buffers. It follows the card and the model, and is never more
// than the 416 MiB that it once was for all.
void plan_reserve(const Card &card) {
    uint64_t smallest = UINT64_MAX, largest = 0;
    for (const Model &m : MODELS) {
        const uint64_t bytes = device_reserve(card.limits, {{m.E, m.FF}, {m.FF, m.E}, {m.E, 2 * m.heads * m.D}});
        const std::string what = std::string("the reserve of ") + m.name + " on " + card.name;
        expect(bytes >= uint64_t(GEMM_WORKSPACE) + uint64_t(96 * MiB), what + " has room for cuBLAS and code");
        expect(bytes <= uint64_t(card.memory_gb <= 16 ? 224 * MiB : 352 * MiB), what + " is what docs/gpus.md says");
        smallest = std::min(smallest, bytes);
        largest = std::max(largest, bytes);
    }
    expect(smallest < largest, std::string("the reserve follows the model on ") + card.name);
    // An H200 took 128 MiB with the 27b.
    expect(device_reserve(H200, {{5120, 17408}}) >= uint64_t(256 * MiB), "twice what an H200 took");
    expect(device_reserve(H200, {{32768, 1 << 20}}) == uint64_t(416 * MiB), "no more than it was");
}
