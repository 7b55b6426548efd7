#include "cache.h"

#include <algorithm>

namespace luce {

Cache::Cache(const HParams &hp, ggml_type kv_type, uint32_t n_ctx, uint32_t n_rows)
    : n_ctx_(n_ctx), n_rows_(n_rows) {
    // verified rows lie after the committed ones; attention wants a multiple of 256 cells (ggml, CUDA)
    n_cells_ = (n_ctx + LUCE_MAX_ROWS + 255) / 256 * 256;
    const ggml_init_params params = {ggml_tensor_overhead() * (3 * hp.n_layer + 1), nullptr,
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
    n_past_ = 0;
    parents_.clear();
    pending_.clear();
    bank_ = 0;
}

void Cache::fill_ctl(int32_t *ctl, const int32_t *parents, uint32_t n) const {
    std::fill(ctl, ctl + CTL_SIZE, 0);
    ctl[CTL_BANK] = bank_;
    ctl[CTL_N_PENDING] = int32_t(pending_.size());
    std::copy(pending_.begin(), pending_.end(), ctl + CTL_PENDING);
    std::copy(parents, parents + n, ctl + CTL_PARENT);
}

void Cache::appended(uint32_t n) {
    pending_.clear();
    parents_.clear();
    n_past_ += n;
}

void Cache::verified(const int32_t *parents, uint32_t n) {
    pending_.clear();
    parents_.assign(parents, parents + n);
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
    pending_.assign(path, path + n);
    parents_.clear();
    n_past_ += n;
}

} // namespace luce
