// Pins the plans of Hopper, which were measured there: what is planned for other cards must not change them. A digest of each
// chapter's plans is compared with that of the plans that were measured; where one is changed on purpose, its number is.
#pragma once

#include "cards.h"

#include <cinttypes>

struct Digest { // FNV-1a
    uint64_t hash = 0xcbf29ce484222325;
    template <class... Of> void add(Of... values) {
        for (const uint64_t v : {uint64_t(int64_t(values))...}) {
            for (int i = 0; i < 8; i++) {
                hash = (hash ^ (v >> 8 * i & 255)) * 0x100000001b3;
            }
        }
    }
    void add_plan(const LaunchPlan &p) { add(p.x, p.y, p.z, p.threads, p.shared); }
};

inline void pin(const Card &card, const Digest &found, uint64_t expected) {
    char text[160];
    snprintf(text, sizeof text, "%s's plans have the digest 0x%" PRIx64, card.name, found.hash);
    expect(found.hash == expected, text);
}
