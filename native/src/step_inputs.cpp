#include "step_inputs.h"

#include <algorithm>
#include <cstring>

namespace luce {

static size_t pad(size_t n) {
    return (n + 255) / 256 * 256;
}

void Region::allocate(const Device &device, size_t size) {
    size_ = size;
    device_ = luce::allocate(device, size, "a step's inputs");
    ggml_backend_buffer_clear(device_.get(), 0);
    host_ = static_cast<uint8_t *>(ggml_backend_buffer_get_base(device_.get()));
    if (device.gpu) {
        ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(device.dev);
        pinned_.reset(ggml_backend_buft_alloc_buffer(type ? type : ggml_backend_cpu_buffer_type(), size));
        if (!pinned_) {
            fail(LUCE_E_MEMORY, "allocating %s of pinned host memory failed", human_bytes(size).c_str());
        }
        host_ = static_cast<uint8_t *>(ggml_backend_buffer_get_base(pinned_.get()));
        memset(host_, 0, size);
    }
    const ggml_init_params params = {ggml_tensor_overhead() * 2, nullptr, /*no_alloc=*/true};
    context_.reset(ggml_init(params));
    whole_ = place(context_.get(), GGML_TYPE_I8, int64_t(size), 1, 0);
}

void Region::send(ggml_backend_t backend, size_t from, size_t to) {
    if (pinned_) {
        ggml_backend_tensor_set_async(backend, whole_, host_ + from, from, to - from);
    }
}

void Region::fetch(ggml_backend_t backend, size_t offset, void *data, size_t n) {
    ggml_backend_tensor_get_async(backend, whole_, data, offset, n);
}

ggml_tensor *Region::place(ggml_context *ctx, ggml_type type, int64_t ne0, int64_t ne1, size_t offset) const {
    ggml_tensor *t = ggml_new_tensor_2d(ctx, type, ne0, ne1);
    if (device_) {
        uint8_t *base = static_cast<uint8_t *>(ggml_backend_buffer_get_base(device_.get()));
        ggml_backend_tensor_alloc(device_.get(), t, base + offset);
    } else {
        t->data = reinterpret_cast<void *>(uintptr_t(256)); // not the graph allocator's business
    }
    return t;
}

TrunkRegion::TrunkRegion(const Cache &cache, const SessionParams &p) {
    const size_t rows = std::max(p.n_chunk, p.n_rows);
    ctl = tokens + pad(rows * sizeof(int32_t));
    path = ctl + pad(CTL_SIZE * sizeof(int32_t));
    positions = path + pad((2 + MAX_ROWS) * sizeof(int32_t));
    cells = positions + pad(rows * sizeof(int32_t));
    hidden_to = cells + pad(rows * sizeof(int64_t));
    hidden_at = hidden_to + pad(rows * sizeof(int64_t));
    mask = hidden_at + pad(sizeof(int32_t));
    end = mask + pad(rows * cache.n_cells() * sizeof(ggml_fp16_t));
}

StepInputs TrunkRegion::tensors(ggml_context *ctx, uint32_t rows, uint32_t n_kv) const {
    return {place(ctx, GGML_TYPE_I32, rows, 1, tokens),  place(ctx, GGML_TYPE_I32, rows, 1, positions),
            place(ctx, GGML_TYPE_I64, rows, 1, cells),   place(ctx, GGML_TYPE_F16, n_kv, rows, mask),
            place(ctx, GGML_TYPE_I32, CTL_SIZE, 1, ctl), place(ctx, GGML_TYPE_I64, rows, 1, hidden_to),
            place(ctx, GGML_TYPE_I32, 1, 1, hidden_at)};
}

HeadRegion::HeadRegion(const Cache &cache, const SessionParams &) {
    constexpr size_t rows = MAX_ROWS + LUCE_MAX_DRAFT;
    tokens = drafts + pad(2 * LUCE_MAX_DRAFT * sizeof(int32_t));
    hidden_at = tokens + pad(rows * sizeof(int32_t));
    positions = hidden_at + pad(rows * sizeof(int32_t));
    cells = positions + pad(rows * sizeof(int32_t));
    mask = cells + pad(rows * sizeof(int64_t));
    end = mask + pad(size_t(LUCE_MAX_DRAFT) * cache.n_cells() * sizeof(ggml_fp16_t));
}

DraftInputs HeadRegion::tensors(ggml_context *ctx, const TrunkRegion &trunk, uint32_t k, uint32_t n,
                                uint32_t n_kv) const {
    const int64_t rows = n == 0 ? k : k + n - 1;
    return {place(ctx, GGML_TYPE_I32, k, 1, tokens),
            place(ctx, GGML_TYPE_I32, k, 1, hidden_at),
            place(ctx, GGML_TYPE_I32, rows, 1, positions),
            place(ctx, GGML_TYPE_I64, rows, 1, cells),
            place(ctx, GGML_TYPE_F16, n_kv, std::max(n, 1u), mask),
            trunk.place(ctx, GGML_TYPE_I32, n + 1, 1, trunk.tokens),
            place(ctx, GGML_TYPE_I32, 2 * LUCE_MAX_DRAFT, 1, drafts)};
}

} // namespace luce
