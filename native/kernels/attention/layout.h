// Says how attention's blocks are made up: the types of KV cells (ggml's F32, F16, Q4_0 and Q8_0, numbered as there), the
// threads of each kernel, and where things lie in a block's shared memory.
#pragma once

#include "attention/chunks.h"
#include "attention/sizes.h"
#include "common/warp.cuh"

namespace luce {
namespace {

constexpr int KV_F32 = 0, KV_F16 = 1, KV_Q4_0 = 2, KV_Q8_0 = 8;

template <int TYPE> struct KvType;
template <> struct KvType<KV_F32> {
    static constexpr int VALUES = 4, BYTES = 16; // they are a block's, or those that a thread takes at once
};
template <> struct KvType<KV_F16> {
    static constexpr int VALUES = 8, BYTES = 16;
};
template <> struct KvType<KV_Q4_0> {
    static constexpr int VALUES = 32, BYTES = 18; // F16 d, then value i and i + 16 in the halves of byte i
};
template <> struct KvType<KV_Q8_0> {
    static constexpr int VALUES = 32, BYTES = 34; // F16 d, then 32 int8
};

template <int TYPE> LUCE_HOST_DEVICE constexpr int kv_bytes(int values) {
    return values / KvType<TYPE>::VALUES * KvType<TYPE>::BYTES;
}

// ---- plans of steps ----

constexpr int MAX_WORKERS = 256; // a step's work is shared out among so many blocks at most
// These are the bytes of a block's plan (attention/plan.cuh), and of a ring by which warps are told of so many units
// (attention/units.cuh).
constexpr int PLAN_BYTES = 4208, TOLD_BYTES = 160, TOLD_UNITS = 4;

// ---- tensor cores ----

constexpr int LOAD_THREADS = 4 * WARP, MMA_THREADS = 8 * WARP + LOAD_THREADS;
constexpr int AHEAD_PAIRS = 64; // one warpgroup computes so many
constexpr int FEW_PAIRS = 8; // wgmma computes units of up to so many pairs with keys as rows
constexpr int WGMMA_D = 256; // a warpgroup has registers for heads of so many values at most

// On HOPPER it is for 227 KB of shared memory, and otherwise for 99 KB. With WGMMA, of heads that it has registers for, it is
// for Hopper's instructions. Where it is AHEAD, of packed cells and units of few pairs, one warpgroup computes, and another
// unpacks the cells ahead of it. Rows of F16 lie in 16-byte words, whose order is changed by the row so that eight rows of one
// column lie in different banks. For wgmma they lie in panels of 64 columns, one row after the other. Large heads in 99 KB
// have smaller tiles.
template <int D, int TYPE, bool HOPPER, bool AHEAD_> struct BlockLayout {
    static constexpr bool PACKED = TYPE != KV_F16, AHEAD = AHEAD_, WGMMA = HOPPER && D <= WGMMA_D;
    static constexpr bool SMALL = D > WGMMA_D && !HOPPER;
    static_assert(!AHEAD || (WGMMA && PACKED));
    static constexpr int WARPS = AHEAD ? 4 : 8, MATH_THREADS = WARPS * WARP; // they compute
    static constexpr int UNPACK_THREADS = AHEAD ? 4 * WARP : 0;
    static_assert(MATH_THREADS + UNPACK_THREADS + LOAD_THREADS == MMA_THREADS);
    // Other threads leave registers to those that compute: all have 168 at first, or 128.
    static constexpr int MATH_REGISTERS = AHEAD ? 216 : 224, LOAD_REGISTERS = AHEAD ? 72 : 56,
                         UNPACK_REGISTERS = 96;
    static constexpr int KEYS = WGMMA ? 64 : SMALL ? 16 : 32;
    // The ring's slots hold K and V of a tile by turns.
    static constexpr int SLOTS = WGMMA && !AHEAD ? 5 : SMALL ? 3 : 4;
    static constexpr int TILES = AHEAD ? 3 : 2; // unpacked ones are a ring too, or those of K and V
    // A unit has at most as many pairs: of large heads a thread has registers for no more.
    static constexpr int MAX_M = AHEAD ? AHEAD_PAIRS : WGMMA ? 96 : D > WGMMA_D ? 32 : 48;
    static constexpr int HALF_M =
        MAX_M / 2; // the queries of two units of so many pairs have room beside each other
    static constexpr int ROW = 2 * D, P_ROW = SMALL ? 64 : 2 * KEYS; // rows of less are not swizzled
    // Weights pass through shared memory: with wgmma those of units of few pairs, for each warpgroup.
    static constexpr int P_ROWS = WGMMA ? WARPS / 4 * FEW_PAIRS : MAX_M;
    static constexpr int NEXT_ROW = WGMMA ? 128 : ROW; // a row of a tile is so far from the next
    static constexpr int CELL = kv_bytes<TYPE>(D); // one head of a cell has so many bytes
    // A copy of a part of a cell has so many bytes, as blocks of 18 and 34 bytes allow.
    static constexpr int COPY = PACKED && D < 256 ? D / 16 : 16;
    static constexpr int SLOT = KEYS * CELL;
    static constexpr int UNPACKED = (SLOTS * SLOT + 1023) / 1024 * 1024, TILE = KEYS * ROW;
    static constexpr int Q = UNPACKED + (PACKED ? TILES * TILE : 0);
    static constexpr int P = Q + MAX_M * ROW;
    static constexpr int ONES = P + P_ROWS * P_ROW; // a matrix of them, by which wgmma adds up weights
    static constexpr int ONES_BYTES = WGMMA ? 1024 : 0;
    // [16 * MT][warps that share a row's keys], or with wgmma [warpgroup][warp][FEW_PAIRS]
    static constexpr int MAXIMA = ONES + ONES_BYTES;
    static constexpr int ROWS = MAXIMA + 4 * P_ROWS * 4; // [KEYS] of a tile that is not whole
    static constexpr int BAD =
        ROWS + KEYS * 4; // [2][KEYS] bytes by warpgroup, which say that the key's V is not finite
    static constexpr int TOLD = BAD + 2 * KEYS, FULL = TOLD + TOLD_BYTES;
    static constexpr int EMPTY = FULL + SLOTS * 8; // the barriers of emptied slots begin here
    static constexpr int READY = EMPTY + SLOTS * 8, LEFT = READY + TILES * 8; // those of unpacked tiles
    static constexpr int TURN = LEFT + TILES * 8; // [2] of units that warpgroups compute by turns
    static constexpr int NUMBERS =
        TURN + (WGMMA ? 2 * 8 : 0); // [2] numbers of units that the block has taken
    static constexpr int PLAN = (NUMBERS + 2 * 4 + 15) / 16 * 16;
    static constexpr int BYTES = PLAN + PLAN_BYTES;
    static_assert(AHEAD ? SLOTS + TILES < 2 * TOLD_UNITS : SLOTS <= 2 * TOLD_UNITS - 3,
                  "what is told has been read");
    static_assert(BYTES <= (HOPPER ? 232448 : 101376), "a block's shared memory");
};

// ---- F32 cells ----

constexpr int F32_THREADS = 256;
constexpr int F32_KEYS = WARP;
// A unit has as many pairs. Large heads have few, and their keys and values have one room by turns.
constexpr LUCE_HOST_DEVICE int f32_pairs(int D) {
    return D > 256 ? 8 : 16;
}
constexpr LUCE_HOST_DEVICE int f32_rooms(int D) {
    return D > 256 ? 1 : 2;
}
constexpr int GROUP_HEADS = 16; // a group has as many query heads at most
// A row of keys or values takes so many floats, so that eight rows of one column lie in different banks.
constexpr LUCE_HOST_DEVICE int f32_row(int D) {
    return D + 4;
}
// Returns a block's bytes: its queries, keys and values, and its plan.
constexpr int f32_bytes(int D) {
    return (f32_pairs(D) * D + f32_rooms(D) * F32_KEYS * f32_row(D)) * int(sizeof(float)) + PLAN_BYTES;
}

// ---- adding up ----

// A warp has so many neighbouring values of a row. Many chunks are in so many groups.
constexpr int COMBINE_VALUES = 256, COMBINE_GROUPS = 16;

// ---- the heads of a step ----

constexpr int HEADS_WARPS = 4; // a block has at most so many; one of 8 finds no room beside the product ahead

// ---- blocks of a draft ----

constexpr int DRAFT_WARPS = 8;
constexpr int DRAFT_KEYS = WARP; // a tile has so many
constexpr int DRAFT_QUERY_VALUES = 8192; // a block of threads works on so many values of queries at once
// Returns how far keys lie apart, so that lanes read different banks.
constexpr LUCE_HOST_DEVICE int draft_key(int D) {
    return D + 4;
}
constexpr int draft_bytes(int D) {
    return (DRAFT_QUERY_VALUES + DRAFT_KEYS * (draft_key(D) + D)) * int(sizeof(float));
}

} // namespace
} // namespace luce
