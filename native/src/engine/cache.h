// The caches hold what an engine remembers: KV pages, recurrent slots and their logs, hidden rows. Graphs
// write through these tensors; only this file knows what it means to commit rows. Rows that are not committed need no undo.
//
// A commit does nothing on the device. What it leaves undone is noted as a debt of the sequence (Debts), and the sequence's
// next steps pay it there. Each kernel pays what its own layer owes before it computes; unseen rows alone have a step of
// their own. The debts:
//
//   debt         what it is                                             made by            paid by
//   fresh        slot and window hold another timeline's values and     reset, open        the next verify or prefill
//                count as zeros
//   replay       accepted rows that are in the DeltaNet log of the      commit             the next verify or prefill
//                sequence's slot, and not yet in its state and window
//   moves        KV of the rows of `replay` lies where the verify       commit of a path   the next verify, prefill or
//                wrote it (position n_past + row), and not where it     that skips rows    draft, in all pools at once
//                belongs (n_past + depth)
//   unseen       the last committed rows, whose KV of the drafters      commit of a step   a step of its own, the feed,
//                that lag is not written yet; a bank keeps their        that fed none      ahead of a draft of one of
//                hidden states                                                             them, a prefill, a dump, a
//                                                                                          step of several rows, and of
//                                                                                          any once n_rows are unseen
//
// A step that fails pays nothing: its sequences are failed, and a reset or resume clears their debts. What a cancel, a
// closed neighbour or a round that is dropped keeps from running leaves debts as they are.
//
// Pages are of two kinds. Those of the layers that see all positions are a sequence's as long as it lives. Layers of the trunk
// with a sliding window have pages of their own kind: one goes back to its pool when all of its positions are behind the
// widest of these windows, as the next row sees it. So many window pages are there that they never lack: for each sequence
// those of a window and of the longest step, for each checkpoint on the device those of a window, which it keeps.
//
// A drafter's KV row of position p comes from what the target has of the rows up to p. The step that verifies token p
// writes it beside the trunk's rows; it is moved and rejected with them. What a draft writes lies behind the committed
// positions; the verify after it overwrites it.
// One that reads the target's own cells instead has no KV: it never lags, and its drafts leave nothing behind.
// Drafters that lag (Drafter::lags) read hidden states, which are kept. A step of one row (feeds_lagging) is plain
// decoding, which may want no drafts for long: it leaves the row unseen, and many such rows are fed at once, to all of
// them. While a sequence has unseen rows, it takes part only in steps of one row and in drafts of others. At most n_rows
// rows are unseen: then they are fed before the next step of one row, too.
#pragma once

#include "common/kernels.h"
#include "engine/exchange.h"
#include "engine/expert_slots.h"
#include "engine/stage.h"

#include <algorithm>
#include <deque>
#include <vector>

namespace luce {

// KvCells are the pools of one attention layer.
struct KvCells {
    ggml_tensor *k; // {D, PAGE, Hkv, pages of its kind}
    ggml_tensor *v; // {D, PAGE, Hkv, pages of its kind}
    bool sliding; // its pages are window pages
    // {positions, H} F32: what a verify's rows give each position in this layer (RowScoresArgs). It is null in engines without
    // scores, and in layers that do not see all positions.
    ggml_tensor *scores = nullptr;
};

// The pages of a timeline or checkpoint, by kind: entry i has positions PAGE * i and on. Where layers have no windows there
// are no window pages, else as many entries as pages.
struct PageLists {
    std::vector<int32_t> all, window;
};
constexpr int32_t GONE = -1; // in place of a page that went back

struct DeltaState {
    ggml_tensor *state; // {S (v), S (k), Hv, slots of sequences, then of checkpoints} F32
    ggml_tensor *window; // {C, 3, the same slots} F32; it holds the last three committed attn_qkv rows
    ggml_tensor *log; // {log_size, slots of sequences} F32; DeltaShape says what is in it
};

constexpr uint32_t MAX_ENQUEUED = 2; // so many verifies may be on the stream at once

// One entry of an engine's list of drafters: how it drafts with one of the model's. Several may use the same one, and
// share its KV.
struct DrafterUse {
    // Index of the model's list. (Where calls say `drafter` it is an index of the engine's list, of entries like this.)
    uint32_t drafter;
    uint32_t n_draft; // so many drafts of a round at most
    uint32_t n_part; // it drafts among so many first tokens of the vocabulary; 0 means among all
    uint32_t n_block; // Drafter::n_block
    bool has_kv; // of its own, which drafts write

    // The first row of a block that drafts: 1, or where the anchor's own does 0.
    uint32_t first_row() const { return n_block > n_draft ? 1 : 0; }
    // Positions behind the committed ones that n drafts write.
    uint32_t reach(uint32_t n) const { return has_kv ? std::max(n, n_block) : 0; }
};

struct CacheParams {
    uint32_t n_ctx, n_sequences, n_checkpoints, n_pages, n_rows, n_chunk;
    bool gaps = false; // prompts may leave text out, so that RoPE's positions lie ahead of the index
    uint32_t n_expert_slots = 0; // so many experts of each mixture have a slot on the device
    bool scores = false; // verifies keep what their rows give each position
    uint32_t n_top = 0; // so many candidates are kept of each draft; 0 means the draft alone
    std::vector<DrafterUse> drafters;
    ggml_type kv_type;
    // Returns how many pages one sequence can need. The rows of a step may lie behind n_ctx positions.
    uint32_t max_pages() const;
    uint32_t most_drafts() const; // of a round, by any drafter
};

// A pool is a bag of equal things that are taken and given back. Pages are shared by count.
class Pool {
public:
    explicit Pool(uint32_t n);
    uint32_t n_free() const { return uint32_t(free_.size()); }
    uint32_t users(int32_t id) const { return users_[size_t(id)]; }
    int32_t take(); // it needs n_free() > 0
    void share(int32_t id) { users_[size_t(id)]++; }
    void release(int32_t id);

private:
    std::vector<int32_t> free_;
    std::vector<uint32_t> users_;
};

// The cache is the device memory of an engine, in its stages. It is described first, so that it can be counted, and then
// allocated once.
class Cache {
public:
    Cache(const Model &model, const CacheParams &params);

    void allocate();

    std::deque<Stage> &stages() { return stages_; }
    const std::deque<Stage> &stages() const { return stages_; }
    const Stage &last() const { return stages_.back(); }
    // What a stage's caches take. On a CPU the tables that steps write for the host are of the device's memory too.
    uint64_t bytes(const Stage &stage) const;
    uint64_t layer_bytes(uint32_t layer) const; // what a layer of the trunk has of them
    const CacheParams &params() const { return params_; }
    uint32_t max_pages() const { return max_pages_; } // one sequence has at most so many
    bool has_windows() const { return window_ > 0; }
    bool takes_images() const { return takes_images_; } // Model::takes_images
    bool images_are_whole() const { return images_are_whole_; } // Model::images_are_whole
    // Returns the first page of which a row at this position sees any in some sliding layer.
    uint32_t first_window_page(uint32_t position) const;
    const Exchange *exchange() const { return exchange_.get(); } // of ranks on GPUs, else null
    const KvCells &kv(uint32_t block) const { return kv_[block]; }
    const DeltaState &delta(uint32_t block) const { return delta_[block]; }
    // Of the trunk's mixtures, in the order of layers, where experts are at home; else there are none.
    std::vector<ExpertSlots> &expert_slots() { return expert_slots_; }
    const std::vector<ExpertSlots> &expert_slots() const { return expert_slots_; }
    const ExpertSlots *slots_of(const Moe &moe) const;
    // The model's drafters that the engine uses, each once, in the model's order; and the KV of one, by its layers.
    const std::vector<const Drafter *> &drafters() const { return drafters_; }
    const std::vector<KvCells> &drafter_kv(uint32_t drafter) const { return drafter_kv_[drafter]; }
    uint32_t lagging() const { return lagging_; } // a bit for each of the model's drafters that lags
    bool keeps_hidden() const { return hidden_ != nullptr; }
    // {2, entries} I32 of what rows have chosen; an entry is a token, and a flag which is 1 where a logit was not finite.
    ggml_tensor *drafts() const { return drafts_; }
    // Both are in host memory, where a GPU's kernels write them. given() has the entries of drafts(); lists() has
    // {the largest Drafter::list_size, entries of the slots} I32, and is null where n_top is 0.
    ggml_tensor *given() const { return given_; }
    ggml_tensor *lists() const { return lists_; }
    // {E, rows} F32: the target's after output_norm, or those of drafts. It is null where no drafter reads them.
    ggml_tensor *hidden() const { return hidden_; }

    // hidden_row() counts rows of `hidden`. A slot has two banks of n_rows rows, which verifies write in
    // turn, and one row for its drafts.
    int32_t hidden_row(int32_t slot, int32_t bank, int32_t row) const;
    int32_t hidden_draft(int32_t slot) const { return hidden_row(slot, 2, 0); }
    int32_t hidden_unused() const; // rows that only fill a step's width write here
    // It stands before a timeline's first token, and is never written.
    int32_t hidden_zero() const { return hidden_unused() + 1; }
    // A slot has entries of `drafts` for the longest draft. Behind those of all slots lie the choices of the verifies that
    // may be under way.
    int32_t draft_entry(int32_t slot, int32_t i) const { return slot * int32_t(params_.most_drafts()) + i; }
    int32_t choice_entry(uint32_t verify, uint32_t row) const {
        return draft_entry(int32_t(params_.n_sequences), int32_t(verify * MAX_ROWS + row));
    }

    uint32_t n_cut = PAGE; // prompts are cut at its multiples (StepSizes)
    uint32_t n_tail = 0; // a prompt's tail has at most so many rows (step/tails.h)
    // Checkpoints are made at its multiples, between the pages too where prompts may be cut there.
    uint32_t n_kept() const { return PAGE % n_cut == 0 ? n_cut : uint32_t(PAGE); }
    Pool pages, window_pages;
    Pool sequence_slots, checkpoint_slots; // a checkpoint's slot is numbered after those of sequences

    // Takes pages that lack for positions up to n, and window pages from entry `first` on.
    void take(PageLists &lists, uint32_t n, uint32_t first = 0);
    void share(const PageLists &lists);
    void release(PageLists &lists); // it leaves them empty; those that are GONE are nobody's

    // What the device holds of a timeline of n_past positions, in the order that saved bytes have. First comes what is of no
    // page of `all`, rest_pieces(): of each sliding layer the pages that the next row may see, of the others the state and
    // window, and the hidden row. Then, page by page, K and V of each layer that sees all positions, the drafters' too:
    // kept_pieces() has those of pages first .. end - 1.
    struct Piece {
        const Stage *stage;
        ggml_tensor *tensor;
        size_t offset, size;
    };
    std::vector<Piece> rest_pieces(const PageLists &lists, uint32_t n_past, int32_t slot,
                                   int32_t hidden) const;
    std::vector<Piece> kept_pieces(const PageLists &lists, uint32_t n_past, uint32_t first,
                                   uint32_t end) const;
    // Returns all that lies in page i of the lists: a piece of each pool.
    std::vector<Piece> page_pieces(const PageLists &lists, uint32_t i) const;
    // Returns the part of rest_pieces() that is the recurrent state and the hidden row.
    std::vector<Piece> state_pieces(int32_t slot, int32_t hidden) const;

    // For tests: makes NaN, or what is as bad, of all pages and slots that nobody holds.
    void poison();

private:
    // Calls f(stage, cells, first) for the cells of each layer, those of drafters behind the trunk's: those that slide or the
    // others. The first position that has any is `first`.
    template <typename F> void each_cells(bool sliding, const F &f) const;
    void set_data(void *data); // it sets the data of all tensors
    const Stage *stage_of(size_t layer) const;

    CacheParams params_;
    uint32_t max_pages_;
    uint32_t window_; // the widest of the sliding layers; 0 where there are none
    bool takes_images_, images_are_whole_;
    std::deque<Stage> stages_;
    std::unique_ptr<Exchange> exchange_;
    std::vector<KvCells>
        kv_; // they are in the order of trunk blocks; entries of layers without cells are empty
    std::vector<ExpertSlots> expert_slots_;
    std::vector<DeltaState> delta_; // they are in the order of trunk blocks; entries are empty for attention
    std::vector<const Drafter *> drafters_;
    std::vector<std::vector<KvCells>> drafter_kv_; // by the model's drafters and their layers
    uint32_t lagging_ = 0;
    ggml_tensor *hidden_ = nullptr, *drafts_ = nullptr, *given_ = nullptr, *lists_ = nullptr;
    uint64_t host_bytes_ = 0;
    Context host_context_;
    Buffer host_buffer_;
};

// What a sequence's next steps have to do first; the table above says who makes each debt and who pays it.
struct Debts {
    bool fresh = true;
    struct {
        uint32_t n = 0;
        int32_t rows[MAX_ROWS] =
            {}; // of the last verify, counted from the sequence's first, as they were committed
        int32_t bank =
            0; // of the log: it has their keys and decays, and the next verify writes the other one
    } replay;
    bool moves = false; // the rows of `replay` have to be moved in its pages
    struct {
        uint32_t n = 0;
        int32_t first_hidden =
            0; // the first one is computed from this hidden row, each other from that of the one before
    } unseen;

    bool any() const { return replay.n > 0 || unseen.n > 0; } // moves are of replayed rows
    // A verify or prefill pays these.
    void pay() {
        fresh = false;
        replay.n = 0;
        moves = false;
    }
};

// A timeline is one sequence's bookkeeping: its committed tokens, where they lie, and its debts. It touches
// no device memory.
class Timeline {
public:
    explicit Timeline(Cache &cache); // it takes a slot, and fails with E_MEMORY when all are taken
    ~Timeline();
    Timeline(const Timeline &) = delete;
    Timeline &operator=(const Timeline &) = delete;

    void clear(); // it makes an empty timeline in the same slot
    // Goes to a checkpoint and shares its pages. The caller copies the checkpoint's state to slot() and its
    // hidden row to hidden().
    void resume(const std::vector<int32_t> &tokens, const PageLists &pages, int32_t delta);

    // These are the committed ones. A row of an image has a name below -1 in the place of a token.
    const std::vector<int32_t> &tokens() const { return tokens_; }
    // The position that RoPE turns the next row to is n_past() plus this. Images make it less, since one of h x w rows takes
    // max(h, w) positions; text that was left out makes it more.
    int32_t delta() const { return delta_; }
    uint32_t n_past() const { return uint32_t(tokens_.size()); }
    uint32_t n_verified() const {
        return verified_.n;
    } // rows that were verified, and neither committed nor rejected
    int32_t slot() const { return slot_; }
    int32_t hidden() const { return hidden_; } // it is the row of the last committed position
    const PageLists &pages() const { return pages_; }
    // True while nothing but prefills brought it here that began where a prompt may be cut: at the end of a page too, and ahead of
    // and behind an image whose rows see each other.
    bool prompt_only() const { return prompt_only_; }
    const Debts &debts() const { return debts_; }
    // The KV of unseen row i is computed from this hidden row.
    int32_t unseen_hidden(int32_t i) const {
        return i == 0 ? debts_.unseen.first_hidden : behind_unseen(i - 1);
    }

    // Returns how many pages `n` more positions need beyond those that it has. take_pages() takes them, and
    // as many have to be free.
    uint32_t pages_wanted(uint32_t n) const;
    void take_pages(uint32_t n);

    // Fills in this sequence's part of a step. page_base says where its pages are in the step's table.
    void fill(SeqCtl &seq, int32_t row0, int32_t n_rows, int32_t page_base) const;
    // Where the next verify or prefill writes the hidden state of its row.
    int32_t next_hidden(int32_t row) const;

    // A step that has run is booked with one of these:
    void appended(const int32_t *tokens, uint32_t n, int32_t delta);
    // n rows of a verify are in the log; `seen` says whether they were fed to the drafters that lag. No booking takes
    // memory, so that none is done by half.
    void verified(const int32_t *tokens, const int32_t *parents, uint32_t n, bool seen);
    void fed() { debts_.unseen.n = 0; } // its unseen rows were fed
    void drafted(uint32_t drafter, int32_t anchor, uint32_t n);
    void settled() { debts_.pay(); } // it had no rows of its own
    // Fails with E_ARG unless it is a path from the root.
    void check_path(const int32_t *path, uint32_t n) const;
    void commit(const int32_t *path, uint32_t n);
    // Returns the tokens up to a row of the last verify, itself included. Without a verify it returns the
    // committed ones.
    std::vector<int32_t> before(uint32_t row) const;
    void reject() { verified_.n = 0; } // all verified rows

    int32_t draft_anchor() const { return draft_anchor_; }
    // Counts those of the last draft, until the timeline moves on.
    uint32_t n_drafted() const { return n_drafted_; }
    uint32_t drafter() const { return drafter_; } // of the engine's list, which made it

private:
    void release_behind_window();
    bool may_cut_ahead_of(int32_t token) const; // of the next one
    int32_t behind_unseen(int32_t i) const { return cache_.hidden_row(slot_, hidden_bank_, i); }

    Cache &cache_;
    int32_t slot_;
    std::vector<int32_t> tokens_;
    int32_t delta_ = 0;
    PageLists pages_;
    bool prompt_only_ = true;
    Debts debts_;
    int32_t hidden_ = 0;
    int32_t hidden_bank_ = 0; // hidden_ is in this bank; the other one is written next, but by unseen rows
    struct {
        uint32_t n = 0;
        int32_t tokens[MAX_ROWS], parents[MAX_ROWS];
        bool seen = true; // drafters that lag were fed with them
    } verified_; // the rows of the last verify, until they are committed or rejected
    int32_t draft_anchor_ = 0;
    uint32_t n_drafted_ = 0, drafter_ = 0;
};

} // namespace luce
