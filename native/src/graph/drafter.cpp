#include "graph/drafter.h"

#include "graph/dflash.h"
#include "graph/gemma4_assistant.h"
#include "graph/nextn.h"

namespace luce {

// This is the table. A file of which nothing is said is of the first kind that holds it; any file may hold the last.
static const DrafterKind *const KINDS[] = {&DFLASH, &ASSISTANT, &NEXTN};

const DrafterKind &drafter_kind(const char *name, const GgufFile &file) {
    std::string known;
    for (const DrafterKind *kind : KINDS) {
        if (name == nullptr ? kind->holds(file) : std::string(name) == kind->name) {
            return *kind;
        }
        known += (known.empty() ? "" : ", ") + std::string(kind->name);
    }
    fail(LUCE_E_ARG, "drafter '%s': luce has %s", name, known.c_str());
}

const DrafterKind *drafter_alone(const GgufFile &file) {
    const DrafterKind &kind = drafter_kind(nullptr, file);
    return &kind == *std::rbegin(KINDS) ? nullptr : &kind;
}

void feed_drafters(const std::vector<Val> &outputs, Val h) {
    Plain &g = *h.graph;
    for (const Drafter *drafter : g.cache.drafters()) {
        if (!drafter->lags()) {
            drafter->feed(g, {{}, &outputs});
        }
    }
    if (!g.cache.keeps_hidden()) {
        return;
    }
    const auto feed = [&](Val before) {
        for (const Drafter *drafter : g.cache.drafters()) {
            if (drafter->lags()) {
                drafter->feed(g, {before, &outputs});
            }
        }
    };
    if (g.prefill()) { // here each row follows the one above it
        feed(previous(h));
        keep_hidden(h);
        return;
    }
    keep_hidden(h);
    if (feeds_lagging(g.T)) { // here each row follows its parent, which may be a row of this step
        feed(kept_hidden(g));
    }
}

void feed_lagging(Plain &g) {
    const Val before = kept_hidden(g);
    for (const Drafter *drafter : g.cache.drafters()) {
        if (drafter->lags()) {
            drafter->feed(g, {before, nullptr});
        }
    }
}

} // namespace luce
