// What a session remembers: attention KV, recurrent state, the draft log; and the timeline's bookkeeping.
// Graphs write through these tensors; only this file knows what commit and undo mean.
//
// KV: a verify step writes its rows to the cells after the committed ones; a commit moves the accepted rows
// down (nothing to move when they are a prefix) and advances n_past; other cells are simply overwritten.
// Recurrent state: a verify step writes one log row for each of its rows and leaves the state alone. A commit
// only notes the accepted rows as pending; the next step replays them onto the state before it does anything
// else, in the same pass that reads the state anyway, so a commit costs nothing (kernels.h: DeltaMode).
// NextN head: its KV row of position p comes from the target's hidden state at p - 1 and token p, so it can only
// be written once token p is known. The hidden states of the last committed rows are kept until their head rows
// are written: they are *owed*. The last one waits for the next anchor; there is no row 0.
#pragma once

#include "../kernels/kernels.h"
#include "model.h"

#include <vector>

namespace luce {

struct KvCells {
    ggml_tensor *k; // {D*Hkv, n_cells}
    ggml_tensor *v; // {D*Hkv, n_cells}
};

struct DeltaState {
    ggml_tensor *state; // {S (v), S (k), Hv} F32
    ggml_tensor *window; // {C, 3} F32: the last three committed attn_qkv rows
    ggml_tensor *log; // {log_size} F32: DeltaShape
};

class Cache {
public:
    // Describes the tensors; nothing is allocated until allocate(). n_ctx positions, n_rows rows of a verify;
    // head: null where the session does not draft.
    Cache(const HParams &hp, const NextN *head, ggml_type kv_type, uint32_t n_ctx, uint32_t n_rows);

    void allocate(const Device &device);
    void clear(); // an empty timeline

    uint64_t kv_bytes() const { return kv_bytes_; }
    uint64_t state_bytes() const { return state_bytes_; }
    uint32_t n_ctx() const { return n_ctx_; }
    uint32_t n_rows() const { return n_rows_; }
    uint32_t n_cells() const { return n_cells_; }
    const KvCells &kv(uint32_t block) const { return kv_[block]; }
    const DeltaState &delta(uint32_t block) const { return delta_[block]; }
    bool has_head() const { return hidden_ != nullptr; }
    const KvCells &head_kv() const { return head_kv_; }
    ggml_tensor *hidden() const { return hidden_; } // {E, n_hidden} F32: the target's, after output_norm

    uint32_t n_past() const { return uint32_t(tokens_.size()); }
    uint32_t n_verified() const { return uint32_t(parents_.size()); }

    // The control block of the next step (kernels.h): pending rows, and the parents of a verify.
    void fill_ctl(int32_t *ctl, const int32_t *parents, uint32_t n) const;

    // After a step has run:
    void appended(const int32_t *tokens, uint32_t n, uint32_t hidden_cell); // n rows were committed at once
    void verified(const int32_t *tokens, const int32_t *parents, uint32_t n); // n rows are in the log
    void flushed() { pending_.clear(); }
    void discard() { parents_.clear(); } // the verified rows are not wanted any more
    void check_path(const int32_t *path, uint32_t n) const; // E_ARG unless a path from the root
    void committed(const int32_t *path, uint32_t n); // these verified rows are now the timeline's
    void restored(std::vector<int32_t> tokens); // the tensors hold this timeline

    const std::vector<int32_t> &tokens() const { return tokens_; } // committed
    bool has_pending() const { return !pending_.empty(); }

    // The head. owed(): hidden cells of positions n_past - size .. n_past - 1, oldest first.
    const std::vector<int32_t> &owed() const { return owed_; }
    void paid(uint32_t n) { owed_.erase(owed_.begin(), owed_.begin() + n); } // head rows of known tokens
    void drafted(int32_t anchor) {
        drafted_anchor_ = anchor;
    } // all rows are written, the last for this anchor
    // Hidden cells for the rows of the next step, none of them owed; false when the head must catch up first.
    bool place_hidden(uint32_t rows);
    uint32_t hidden_base() const { return hidden_base_; }

private:
    uint32_t n_ctx_, n_rows_, n_cells_;
    std::vector<KvCells> kv_; // by trunk block; empty entries for DeltaNet
    std::vector<DeltaState> delta_; // by trunk block; empty entries for attention
    KvCells head_kv_{};
    ggml_tensor *hidden_ = nullptr;
    uint64_t kv_bytes_ = 0, state_bytes_ = 0;
    Context context_;
    Buffer buffer_;

    std::vector<int32_t> tokens_; // committed
    std::vector<int32_t> parents_; // of the last verify, until it is committed or discarded
    std::vector<int32_t> verified_tokens_;
    std::vector<int32_t> owed_;
    int32_t drafted_anchor_ = -1;
    uint32_t hidden_base_ = 0, hidden_rows_ = 1; // hidden cells of the last step's rows
    std::vector<int32_t> pending_; // accepted log rows that the state does not hold yet
    int32_t bank_ = 0; // of the log that holds the last verify's keys
};

} // namespace luce
