#include "step/reserve.h"

#include "cards.h"

static std::set<std::pair<int64_t, int64_t>> matrices_of(const Model &m) {
    const int64_t q = int64_t(m.heads) * m.D, inner = int64_t(m.Hv) * m.S;
    std::set<std::pair<int64_t, int64_t>> all = {{m.E, m.FF}, {m.FF, m.E}, {q, m.E}};
    if (m.Hv > 0) {
        all.insert({{m.E, 2 * q}, {m.E, 2 * int64_t(m.Hk) * m.S + inner}, {inner, m.E}, {2 * m.E, m.E}});
    } else {
        all.insert({m.E, q});
    }
    return all;
}

// docs/gpus.md says what luce asks for beyond weights, caches and buffers. It follows the card and the model, and is never more
// than the 416 MiB that it once was for all.
void plan_reserve(const Card &card) {
    uint64_t smallest = UINT64_MAX, largest = 0;
    std::map<std::string, uint64_t> mib;
    for (const Model &m : MODELS) {
        const uint64_t bytes = device_reserve(card.limits, matrices_of(m));
        mib[m.name] = (bytes + MiB - 1) / MiB;
        const std::string what = std::string("the reserve of ") + m.name + " on " + card.name;
        expect(bytes >= uint64_t(GEMM_WORKSPACE) + uint64_t(96 * MiB), what + " has room for cuBLAS and code");
        expect(bytes <= uint64_t(card.memory_gb <= 16 ? 224 * MiB : 352 * MiB), what + " is small beside the card");
        smallest = std::min(smallest, bytes);
        largest = std::max(largest, bytes);
    }
    expect(smallest < largest, std::string("the reserve follows the model on ") + card.name);
    printf("| %s |", card.name); // a row of the page's table: tests/cuda/test_launch_plans.py looks it up
    for (const char *name : {"0.8b", "9b", "35b-a3b", "27b", "gemma4 31B"}) {
        printf(" %d |", int(mib.at(name)));
    }
    printf("\n");
    // An H200 took 128 MiB with the 27b.
    expect(device_reserve(H200, {{5120, 17408}}) >= uint64_t(256 * MiB), "twice what an H200 took");
    expect(device_reserve(H200, {{32768, 1 << 20}}) == uint64_t(416 * MiB), "no more than it was");
}
