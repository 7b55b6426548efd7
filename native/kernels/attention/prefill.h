// Attention of prompts' rows over the cells of each one's sequence, which lie side by side. A row's bits depend on its position
// and on what the cells up to it hold, so a prompt may be cut anywhere (attention/prefill.cu says how).
#pragma once

#include "attention/chunks.h"
#include "common/device_limits.h"
#include "common/kernels.h"

#include <algorithm>

namespace luce {

constexpr int PREFILL_RANGE = 2048; // sums begin anew at its multiples
// A block has so many rows of one sequence, of one head, and a tile so many cells. Of large heads two warps share a row's
// columns, for want of registers, and tiles are small, for want of shared memory.
constexpr LUCE_HOST_DEVICE int prefill_shares(int D) {
    return D > 256 ? 2 : 1;
}
constexpr LUCE_HOST_DEVICE int prefill_rows(int D) {
    return 64 / prefill_shares(D);
}
constexpr LUCE_HOST_DEVICE int prefill_keys(int D) {
    return 64 / prefill_shares(D);
}
constexpr int64_t PREFILL_RANGES_BYTES = int64_t(256) << 20; // ranges that are apart leave at most so much

// A sequence's rows have positions n_past .. One at p sees cells first <= c <= p, and c > p - window where there is one. With
// row_ends it sees cells ahead of its end, which is p + 1 or more: those of an image whose rows see each other. All of them are
// the call's, and no row's end is ahead of that of the row before it.
struct PrefillAttentionArgs {
    int32_t T, H, Hkv, D; // D is one of HeadSizes
    int32_t n_prompts; // so many sequences have rows
    int64_t n_kv; // there is room for so many cells, of all sequences
    int32_t first, window;
    float scale, softcap;
    int32_t apart; // each range has blocks of its own, which pays where few rows have many cells
    const StepCtl *ctl;
    const int32_t *row_ends; // null, or [T]
    const float *q; // [T][H][D]
    const uint16_t *k, *v; // F16 [n_kv][Hkv][D], as kv_gather leaves them
    float *out; // [T][H][D]
    float *ranges; // room for what each range gives, where they are apart: prefill_range_values()
};

LUCE_HOST_DEVICE inline int64_t prefill_ranges(const PrefillAttentionArgs &a) {
    return (a.n_kv + PREFILL_RANGE - 1) / PREFILL_RANGE;
}
// Returns up to which position a row at p sees, itself not included.
LUCE_HOST_DEVICE inline int32_t prefill_row_end(const PrefillAttentionArgs &a, int32_t row, int32_t p) {
    return a.row_ends == nullptr ? p + 1 : a.row_ends[row];
}
inline int64_t prefill_range_values(const PrefillAttentionArgs &a) {
    return prefill_ranges(a) * a.T * a.H * (a.D + 2);
}
// Returns a block's bytes of shared memory: its queries, and the keys and values of a tile, in F16.
LUCE_HOST_DEVICE constexpr int64_t prefill_block_bytes(int D) {
    return int64_t(prefill_rows(D) + 2 * prefill_keys(D)) * 2 * D;
}

// On Hopper a block has two heads of one KV head, which read the same keys, where there are such and a warpgroup has registers for
// them (attention/sm90/prefill.cuh). The bits are those of blocks of one head, and the time is 0.54 of theirs for 2,048 rows of the
// 27b behind 28,672 positions, 0.63 for 64 rows behind 30,720 (H200): an eighth less for a prompt of 30,000.
constexpr int PREFILL_WGMMA_D = 256, PREFILL_HEADS = 2, PREFILL_SLOTS = 5, PREFILL_WGMMA_THREADS = 384;
constexpr int64_t prefill_wgmma_bytes(int D) {
    return int64_t(PREFILL_HEADS * prefill_rows(D) + PREFILL_SLOTS * prefill_keys(D)) * 2 * D +
           2 * PREFILL_SLOTS * 8;
}
struct PrefillBlocks {
    int heads, threads; // of a block
    int64_t bytes; // of its shared memory
    int at_once; // a multiprocessor has so many
};
inline PrefillBlocks prefill_blocks(const PrefillAttentionArgs &a, const DeviceLimits &device) {
    if (device.wgmma && a.D <= PREFILL_WGMMA_D && a.H / a.Hkv % PREFILL_HEADS == 0) {
        return {PREFILL_HEADS, PREFILL_WGMMA_THREADS, prefill_wgmma_bytes(a.D), 1};
    }
    const int64_t bytes = prefill_block_bytes(a.D);
    return {1, 128, bytes, 2 * (bytes + device.shared_reserved) <= device.shared_sm ? 2 : 1};
}
// Says whether ranges get blocks of their own: where blocks of all of a row's keys come in rounds that few of them fill, they take
// longer than more of them that are shorter.
inline bool prefill_apart(const PrefillAttentionArgs &a, const DeviceLimits &device) {
    const PrefillBlocks each = prefill_blocks(a, device);
    const int64_t blocks = (a.T + prefill_rows(a.D) - 1) / prefill_rows(a.D) * (a.H / each.heads);
    const int64_t at_once = int64_t(each.at_once) * device.multiprocessors;
    const int64_t seen = a.window > 0 ? std::min(a.n_kv, int64_t(a.window) + a.T) : a.n_kv;
    const auto rounds = [&](int64_t n) { return (n + at_once - 1) / at_once; };
    return prefill_ranges(a) > 1 && 4 * prefill_range_values(a) <= PREFILL_RANGES_BYTES &&
           rounds(blocks * prefill_ranges(a)) * PREFILL_RANGE < rounds(blocks) * seen;
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
