#include "cache.h"

#include <algorithm>

namespace luce {

// Rows that may be committed without a draft before the head has to catch up, at one row a step.
constexpr uint32_t HIDDEN_CELLS = 512;

Cache::Cache(const HParams &hp, const NextN *head, ggml_type kv_type, uint32_t n_ctx, uint32_t n_rows)
    : n_ctx_(n_ctx), n_rows_(n_rows) {
    // verified rows lie after the committed ones; attention wants a multiple of 256 cells (ggml, CUDA)
    n_cells_ = (n_ctx + LUCE_MAX_ROWS + 255) / 256 * 256;
    const ggml_init_params params = {ggml_tensor_overhead() * (3 * hp.n_layer + 4), nullptr,
                                     /*no_alloc=*/true};
    context_.reset(ggml_init(params));
    ggml_context *ctx = context_.get();
    kv_.resize(hp.n_layer);
    delta_.resize(hp.n_layer);
    DeltaShape shape{};
    shape.R = int32_t(n_rows);
    shape.Hk = int32_t(hp.n_k_heads);
    shape.Hv = int32_t(hp.n_v_heads);
    shape.S = int32_t(hp.state_size);
    for (uint32_t il = 0; il < hp.n_layer; il++) {
        if (hp.recurrent[il]) {
            DeltaState &d = delta_[il];
            d.state = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, hp.state_size, hp.state_size, hp.n_v_heads);
            d.window = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, hp.conv_dim, CONV_TAPS - 1);
            d.log = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, shape.log_size());
            state_bytes_ += ggml_nbytes(d.state) + ggml_nbytes(d.window) + ggml_nbytes(d.log);
        } else {
            const int64_t width = int64_t(hp.head_dim) * hp.n_head_kv;
            kv_[il].k = ggml_new_tensor_2d(ctx, kv_type, width, n_cells_);
            kv_[il].v = ggml_new_tensor_2d(ctx, kv_type, width, n_cells_);
            kv_bytes_ += ggml_nbytes(kv_[il].k) + ggml_nbytes(kv_[il].v);
        }
    }
    if (head != nullptr) {
        const int64_t width = int64_t(head->hp.head_dim) * head->hp.n_head_kv;
        head_kv_.k = ggml_new_tensor_2d(ctx, kv_type, width, n_cells_);
        head_kv_.v = ggml_new_tensor_2d(ctx, kv_type, width, n_cells_);
        kv_bytes_ += ggml_nbytes(head_kv_.k) + ggml_nbytes(head_kv_.v);
        hidden_ = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, hp.n_embd, HIDDEN_CELLS);
        state_bytes_ += ggml_nbytes(hidden_);
    }
    tokens_.reserve(n_ctx);
}

void Cache::allocate(const Device &device) {
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), device.buffer_type()));
    if (!buffer_) {
        fail(LUCE_E_MEMORY, "%s: allocating %s for the session's caches failed", device.name.c_str(),
             human_bytes(kv_bytes_ + state_bytes_).c_str());
    }
    clear();
}

void Cache::clear() {
    // zeros, so that masked cells hold finite values (0 * NaN would reach the output)
    ggml_backend_buffer_clear(buffer_.get(), 0);
    restored({});
}

void Cache::restored(std::vector<int32_t> tokens) {
    tokens_ = std::move(tokens);
    tokens_.reserve(n_ctx_);
    parents_.clear();
    pending_.clear();
    owed_.clear();
    if (!tokens_.empty()) {
        owed_.push_back(0);
    }
    drafted_anchor_ = -1;
    hidden_base_ = 0;
    hidden_rows_ = 1;
    bank_ = 0;
}

void Cache::fill_ctl(int32_t *ctl, const int32_t *parents, uint32_t n) const {
    std::fill(ctl, ctl + CTL_SIZE, 0);
    ctl[CTL_BANK] = bank_;
    ctl[CTL_N_PENDING] = int32_t(pending_.size());
    std::copy(pending_.begin(), pending_.end(), ctl + CTL_PENDING);
    std::copy(parents, parents + n, ctl + CTL_PARENT);
}

void Cache::appended(const int32_t *tokens, uint32_t n, uint32_t hidden_cell) {
    tokens_.insert(tokens_.end(), tokens, tokens + n);
    pending_.clear();
    parents_.clear();
    owed_.assign(1, int32_t(hidden_cell));
    drafted_anchor_ = -1;
}

void Cache::verified(const int32_t *tokens, const int32_t *parents, uint32_t n) {
    verified_tokens_.assign(tokens, tokens + n);
    parents_.assign(parents, parents + n);
    pending_.clear();
    bank_ ^= 1;
}

void Cache::check_path(const int32_t *path, uint32_t n) const {
    if (n < 1 || n > parents_.size()) {
        fail(LUCE_E_ARG, "a path has 1 to %zu rows (the verified ones), got %u", parents_.size(), n);
    }
    for (uint32_t i = 0; i < n; i++) {
        const int32_t row = path[i];
        if (row < 0 || size_t(row) >= parents_.size() ||
            parents_[size_t(row)] != (i == 0 ? -1 : path[i - 1])) {
            fail(LUCE_E_ARG, "path entry %u is row %d, which does not follow %s", i, row,
                 i == 0 ? "the committed tokens" : format("row %d", path[i - 1]).c_str());
        }
    }
}

void Cache::committed(const int32_t *path, uint32_t n) {
    if (drafted_anchor_ == verified_tokens_[0]) {
        owed_.clear(); // the draft has written the anchor's row, and all before it
    }
    drafted_anchor_ = -1;
    for (uint32_t i = 0; i < n; i++) {
        tokens_.push_back(verified_tokens_[size_t(path[i])]);
        owed_.push_back(int32_t(hidden_base_) + path[i]);
    }
    pending_.assign(path, path + n);
    parents_.clear();
}

bool Cache::place_hidden(uint32_t rows) {
    uint32_t base = hidden_base_ + hidden_rows_; // behind the rows of the last step
    for (int tries = 0; tries < 2; tries++) {
        base = base + rows > HIDDEN_CELLS ? 0 : base;
        uint32_t free_from = base;
        for (const int32_t cell : owed_) {
            if (uint32_t(cell) >= base && uint32_t(cell) < base + rows) {
                free_from = std::max(free_from, uint32_t(cell) + 1);
            }
        }
        if (free_from == base) {
            hidden_base_ = base;
            hidden_rows_ = rows;
            return true;
        }
        base = free_from;
    }
    return false;
}

} // namespace luce
