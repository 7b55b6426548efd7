// A drafter proposes what may follow the anchor, on the device. A model has a list of them, and an engine a list of uses of
// these: both loop over their lists, and know of a drafter what is said here. A new drafter is a row of the table in
// drafter.cpp and has a file of its own.
#pragma once

#include "graph/plain.h"
#include "model/weights.h"

namespace luce {

// What the candidates of a draft are (luce_form): a chain, each from those before it; a list for each depth, whatever was
// chosen above; or for each depth a list behind each candidate of the depth above.
enum class Candidates { chain, independent, conditional };

// What a drafter reads of the target's rows, in bits.
enum Reads : uint8_t {
    READS_HIDDEN = 1, // hidden rows after the output norm, which the cache keeps
    READS_TAPS = 2, // outputs of blocks of the trunk, in the target's step alone
    READS_CELLS = 4, // K and V of committed positions, in the target's own cells, in its drafts alone
};

// What the step of a target's rows, or a feed of rows that were committed, shows drafters.
struct Seen {
    Val before; // {E, T}: of each row the hidden row of the position before; of READS_HIDDEN
    const std::vector<Val> *outputs; // {E, T}: embeddings, and of each trunk block; of READS_TAPS
};

struct DrafterKind;

struct Drafter {
    // The row of the table that read it, and its place in the model's list.
    const DrafterKind *kind = nullptr;
    uint32_t index = 0;

    Candidates form = Candidates::chain;
    uint8_t reads = 0;
    uint32_t n_draft = 0; // so many drafts of a round at most
    // Rows of the step that drafts all at once: the anchor's, which may make the first draft itself, and one for each other
    // draft. 0: each draft is a step of one row.
    uint32_t n_block = 0;
    uint32_t n_list = 0; // conditional: each depth has so many candidates
    bool confident = false; // its lists say, too, how likely drafts behind each candidate are right
    int32_t mask_token = 0; // of the rows of such a step but the anchor's
    // Of each layer that has KV of its own. Where none has, a draft writes nothing that later ones read: all of a chain are at
    // the anchor's position, and see what is committed.
    std::vector<AttentionShape> kv;
    uint32_t first = 0; // its KV has no positions below
    ggml_tensor *output = nullptr; // {E, ..}: its product over the vocabulary

    virtual ~Drafter() = default;
    virtual const Moe *moe() const { return nullptr; } // its experts, where it has any
    virtual size_t n_layer() const { return kv.size(); } // of its step

    // Writes its KV of the rows, in the target's step or a feed, where it has any.
    virtual void feed(Plain &, const Seen &) const {}
    // Its step: one row of each sequence, whose choice and hidden state are kept for the next draft, or a block of each.
    virtual void draft(Plain &g) const = 0;

    // Values of a draft's entry in Cache::lists(), in an engine that keeps n_top candidates: 2 * n_top as TopkArgs says, or
    // as LatticeArgs.
    uint32_t list_size(uint32_t n_top) const {
        return form == Candidates::conditional ? n_list * (n_list + 1 + confident) : 2 * n_top;
    }
    // It has KV which a verify of one row leaves to a feed: hidden rows are kept for that, taps are not.
    bool lags() const { return (reads & READS_HIDDEN) != 0 && !kv.empty(); }
    KvLayer kv_of(const Plain &g, size_t layer) const {
        return {g.cache.drafter_kv(index)[layer], int32_t(first)};
    }
};

struct DrafterKind {
    const char *name; // "nextn", as luce.h names kinds
    const char *title; // "a NextN head", in messages
    bool (*holds)(const GgufFile &file); // whether a file of which nothing else is said holds such a drafter
    // E_UNSUPPORTED names what luce does not implement. E_FILE names a key or tensor that is missing, or both values where
    // the drafter does not fit the trunk.
    std::shared_ptr<Drafter> (*read)(Model &model, const GgufFile &file, const HParams &trunk,
                                     const Weights &weights);
    // Of READS_CELLS: the first of the trunk's layers whose cells it reads, before it is read itself; n_layer where the trunk
    // has none such. Null: it reads none.
    uint32_t (*reads_from)(const GgufFile &file, const HParams &trunk);
};

// Returns the kind of this name (E_ARG: there is none), or with null the kind that the file holds.
const DrafterKind &drafter_kind(const char *name, const GgufFile &file);
// Says whether a file holds a drafter and no more, by its architecture, and which one: else null.
const DrafterKind *drafter_alone(const GgufFile &file);

// What a step of the target does for the engine's drafters: their KV of its rows is written, and hidden rows are kept.
// `outputs` are as Seen has them, h {E, T} is the output norm of the last, as norm() returns it. A verify of one row
// leaves drafters that lag to a feed (engine/cache.h).
void feed_drafters(const std::vector<Val> &outputs, Val h);
// A feed of all drafters that lag.
void feed_lagging(Plain &g);

} // namespace luce
