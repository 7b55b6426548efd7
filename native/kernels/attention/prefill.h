// Attention of a prompt's rows over the cells of their sequence, which lie side by side. A row's bits depend on its position
// and on what the cells up to it hold, so a prompt may be cut anywhere (attention/prefill.cu says how).
#pragma once

#include "attention/chunks.h"
#include "common/kernels.h"

namespace luce {

constexpr int PREFILL_KEYS = 64; // a tile has so many cells
constexpr int PREFILL_RANGE = 4096; // sums begin anew at its multiples

// The T rows of seqs[0] have positions n_past .. Row t at p sees cells first <= c <= p, and c > p - window where there is one.
struct PrefillAttentionArgs {
    int32_t T, H, Hkv, D; // D is one of HeadSizes
    int64_t n_kv; // there is room for so many cells
    int32_t first, window;
    float scale, softcap;
    int32_t apart; // each range has blocks of its own, which pays where few rows have many cells
    const StepCtl *ctl;
    const float *q; // [T][H][D]
    const uint16_t *k, *v; // F16 [n_kv][Hkv][D]
    float *out; // [T][H][D]
    float *ranges; // room for what each range gives, where they are apart: prefill_range_values()
};

LUCE_HOST_DEVICE inline int64_t prefill_ranges(const PrefillAttentionArgs &a) {
    return (a.n_kv + PREFILL_RANGE - 1) / PREFILL_RANGE;
}
inline int64_t prefill_range_values(const PrefillAttentionArgs &a) {
    return prefill_ranges(a) * a.T * a.H * (a.D + 2);
}
// Returns where a range leaves what it gives a row: the largest score, the sum of weights, D sums of values.
LUCE_HOST_DEVICE inline float *prefill_range(const PrefillAttentionArgs &a, int64_t range, int64_t row,
                                             int64_t head) {
    return a.ranges + ((range * a.T + row) * a.H + head) * (a.D + 2);
}

namespace cuda {
// Enqueues on `stream` and returns a cudaError_t as int. ranges is not read where `apart` is 0.
int prefill_attention(const PrefillAttentionArgs &args, void *stream);
} // namespace cuda

} // namespace luce
