// Where a step's inputs lie: one region for the trunk's steps and one for the head's, so that the host can fill
// the next step's while the device still reads the last one's. Small things have fixed places, the mask is at the
// end: a step's inputs are one copy to the device.
#pragma once

#include "ops.h"

namespace luce {

struct SessionParams {
    uint32_t n_ctx, n_rows, n_chunk, n_threads, n_draft;
    ggml_type kv_type;
};

// Device memory and its host mirror (pinned on a GPU; on the CPU they are the same bytes).
class Region {
public:
    void allocate(const Device &device, size_t size);
    size_t size() const { return size_; }
    template <typename T> T *host(size_t offset) { return reinterpret_cast<T *>(host_ + offset); }
    // GPU: enqueues the copy of bytes [from, to) to the device, or of n back to the host.
    void send(ggml_backend_t backend, size_t from, size_t to);
    void fetch(ggml_backend_t backend, size_t offset, void *data, size_t n);
    // A tensor at `offset`. Before allocate(), for measuring, one without memory.
    ggml_tensor *place(ggml_context *ctx, ggml_type type, int64_t ne0, int64_t ne1, size_t offset) const;

private:
    size_t size_ = 0;
    Buffer device_, pinned_;
    uint8_t *host_ = nullptr;
    Context context_;
    ggml_tensor *whole_ = nullptr; // stands for the region in copies
};

struct TrunkRegion : Region {
    // tokens come first: where drafts are verified, the head has written them and the rest is sent
    size_t tokens = 0, ctl, path, positions, cells, hidden_to, hidden_at, mask, end;
    TrunkRegion(const Cache &cache, const SessionParams &params);
    StepInputs tensors(ggml_context *ctx, uint32_t rows, uint32_t n_kv) const;
    size_t used(uint32_t rows, uint32_t n_kv) const {
        return mask + size_t(rows) * n_kv * sizeof(ggml_fp16_t);
    }
};

struct HeadRegion : Region {
    size_t drafts = 0, tokens, hidden_at, positions, cells, mask, end;
    HeadRegion(const Cache &cache, const SessionParams &params);
    DraftInputs tensors(ggml_context *ctx, const TrunkRegion &trunk, uint32_t k, uint32_t n,
                        uint32_t n_kv) const;
    size_t used(uint32_t n, uint32_t n_kv) const { return mask + size_t(n) * n_kv * sizeof(ggml_fp16_t); }
};

} // namespace luce
