// Says which heads and cells attention has kernels for.
#pragma once

#include "common/sizes.h"

namespace luce {

using HeadSizes = Sizes<64, 128, 256, 512>; // D
using BlockHeadSizes = Sizes<64, 128, 256>; // of blocks that a drafter drafts, on a GPU
using SummedHeadSizes = Sizes<128, 256, 512>; // of which attention_heads adds a product's partial sums up
using KvTypes = Sizes<0, 1, 2, 8>; // ggml's F32, F16, Q4_0 and Q8_0

// Says in a file's words what attention of H heads of D values over Hkv of KV lacks, or "" where it lacks nothing.
template <class Has = HeadSizes> std::string attention_lacks(int64_t D, int64_t H, int64_t Hkv) {
    if (!Has::has(D)) {
        return "attention.key_length is " + std::to_string(D) + ": luce runs " + Has::text();
    }
    if (Hkv < 1 || H < 1 || H % Hkv != 0) {
        return "attention.head_count is " + std::to_string(H) +
               ", no multiple of attention.head_count_kv, which is " + std::to_string(Hkv);
    }
    return "";
}
// The same of RoPE, which rotates the first values of a head in pairs.
inline std::string rope_lacks(int64_t rope_dim, int64_t D, double base) {
    if (rope_dim < 0 || rope_dim > D || rope_dim % 2 != 0) {
        return "rope.dimension_count is " + std::to_string(rope_dim) +
               ": luce rotates an even number of a head's " + std::to_string(D) + " values";
    }
    return base > 0 ? "" : "rope.freq_base is " + std::to_string(base) + ", expected a positive number";
}

} // namespace luce
