// How cells come into shared memory for the tensor cores: the layout of a block's shared memory, the ring of slots
// that K and V of tiles pass through, and the four warps that fill it. They walk over all of the block's units ahead
// of the warps that compute (attention_mma.cuh), so that memory never waits for the arithmetic.
#pragma once

#include "attention_plan.cuh"
#include "attention_tile.cuh"
#include "kv_types.cuh"

namespace luce {
namespace {

constexpr int WARPS = 8, MATH_THREADS = WARPS * WARP, LOAD_THREADS = 4 * WARP;
constexpr int MMA_THREADS = MATH_THREADS + LOAD_THREADS;

// What a tile of keys is part of, from the warp that loads to those that compute.
struct TileInfo {
    int32_t row, n_rows, head, chunk; // the unit; no rows: there is no more to do
    int32_t begin, end; // keys of the unit
    int32_t past; // the sequence's n_past
    int32_t shared; // 1: a row may not see what another does
};

// BIG: 227 KB of shared memory for a block, else 99 KB.
template <int D, int TYPE, bool BIG> struct MmaLayout {
    static constexpr bool PACKED = TYPE != KV_F16;
    static constexpr int KEYS = BIG ? 64 : 32;
    static constexpr int SLOTS = BIG ? 5 : 4; // of the ring: K and V of a tile by turns
    static constexpr int MAX_M = BIG ? 96 : 48;
    static constexpr int ROW = 2 * D, P_ROW = 2 * KEYS;
    static constexpr int CELL = kv_bytes<TYPE>(D); // bytes of one head of a cell
    static constexpr int COPY = PACKED ? D / 16 : 16; // bytes of a copy: what blocks of 18 and 34 bytes allow
    static constexpr int SLOT = KEYS * CELL;
    static constexpr int UNPACKED = SLOTS * SLOT; // K, then V
    static constexpr int Q = UNPACKED + (PACKED ? 2 * KEYS * ROW : 0);
    static constexpr int P = Q + MAX_M * ROW;
    static constexpr int MAXIMA = P + MAX_M * P_ROW; // [16 * MT][warps that share a row's keys]
    static constexpr int CELLS = MAXIMA + 4 * 96 * 4; // [KEYS] of a tile that is not whole
    static constexpr int UNIT = CELLS + KEYS * 4, INFO = UNIT + int(sizeof(TileInfo)); // [SLOTS]
    static constexpr int FULL = INFO + SLOTS * int(sizeof(TileInfo)),
                         EMPTY = FULL + SLOTS * 8; // barriers of slots
    static constexpr int PLAN = EMPTY + SLOTS * 8;
    static constexpr int BYTES = PLAN + int(sizeof(Plan));
    static_assert(BYTES <= (BIG ? 232448 : 101376), "a block's shared memory");
};

// A place in the ring.
template <int SLOTS> struct Ring {
    int slot = 0;
    uint32_t parity = 0;

    __device__ void next() {
        if (++slot == SLOTS) {
            slot = 0;
            parity ^= 1;
        }
    }
};

template <int D, int TYPE, bool BIG> struct MmaLoader {
    using L = MmaLayout<D, TYPE, BIG>;
    static constexpr int KEYS = L::KEYS, WORDS = L::CELL / L::COPY;
    const AttentionParams &a;
    const Plan &plan;
    uint8_t *shared;
    const uint32_t base = shared_address(shared);
    const int tid = threadIdx.x - MATH_THREADS;
    Ring<L::SLOTS> ring;

    // Calls copy(row, word, place in the slot) for this thread's share of a tile's first n rows.
    template <typename Copy> __device__ void each(int n, Copy copy) const {
        if constexpr (L::PACKED) {
#pragma unroll 4
            for (int u = tid; u < n * WORDS; u += LOAD_THREADS) {
                copy(u / WORDS, u % WORDS, u * L::COPY);
            }
        } else { // rows that are 8 apart have the same order of words
            constexpr int STEP = LOAD_THREADS / WORDS; // rows: 4, 8 or 16
            const int row = tid / WORDS, word = tid % WORDS;
            const int even = swizzle<L::ROW>(row, word),
                      odd = swizzle<L::ROW>(row + STEP, word) - STEP * L::ROW;
#pragma unroll 8
            for (int i = 0; i < KEYS / STEP; i++) {
                if (i * STEP + row < n) {
                    copy(i * STEP + row, word, i * STEP * L::ROW + (i % 2 == 0 ? even : odd));
                }
            }
        }
    }
    // A tile of committed keys in one page.
    __device__ void copy_whole(const uint8_t *first) const {
        const uint32_t to = base + ring.slot * L::SLOT;
        const int64_t stride = a.pool.cell_bytes;
        each(KEYS, [&](int row, int word, int at) {
            copy_async<L::COPY>(to + at, first + row * stride + word * L::COPY, true);
        });
    }
    // The cells of any tile: by ancestors from n_past on, -1 for what no row sees.
    __device__ void find_cells(const Cursor &unit, int32_t key) const {
        int32_t *cells = reinterpret_cast<int32_t *>(shared + L::CELLS);
        load_barrier(); // all have left the cells before
        if (tid < KEYS) {
            const bool valid = key + tid >= unit.low && key + tid < unit.end;
            cells[tid] = valid ? int32_t(unit.cell(key + tid)) : -1;
        }
        load_barrier();
    }
    // Zeros stand for what no row sees, up to a whole step of 16 keys; those beyond are not used.
    __device__ void copy_part(const uint8_t *head, int n) const {
        const int32_t *cells = reinterpret_cast<const int32_t *>(shared + L::CELLS);
        const uint32_t to = base + ring.slot * L::SLOT;
        each((n + 15) / 16 * 16, [&](int row, int word, int at) {
            const int32_t cell = cells[row];
            const int64_t offset = cell >= 0 ? cell * a.pool.cell_bytes + word * L::COPY : 0;
            copy_async<L::COPY>(to + at, head + offset, cell >= 0);
        });
    }
    __device__ static void load_barrier() { asm volatile("bar.sync 2, %0;" ::"n"(LOAD_THREADS) : "memory"); }

    __device__ TileInfo &open() {
        wait_patiently(base + L::EMPTY + ring.slot * 8, ring.parity ^ 1);
        return reinterpret_cast<TileInfo *>(shared + L::INFO)[ring.slot];
    }
    __device__ void send() {
        arrive_after_copies(base + L::FULL + ring.slot * 8);
        if (tid == 0) { // with what it has written of TileInfo
            arrive(base + L::FULL + ring.slot * 8);
        }
        ring.next();
    }
    __device__ void run() {
        for (Cursor unit(a, plan); unit.valid(); unit.next()) {
            const int seq = unit.seq();
            const int32_t past = plan.n_past[seq];
            const int64_t head = unit.head * int64_t(L::CELL);
            int64_t page = -1; // its first cell
            for (int32_t key = unit.begin; key < unit.end; key += KEYS) {
                const bool whole = key >= unit.low && key + KEYS <= min(unit.end, past);
                if (!whole) {
                    find_cells(unit, key);
                } else if (page < 0 || key % PAGE == 0) {
                    page = plan.cell(a.pages, seq, key / PAGE * PAGE);
                }
                for (int which = 0; which < 2; which++) {
                    TileInfo &info = open();
                    if (tid == 0 && key == unit.begin && which == 0) {
                        const int shares = unit.segment().tail && unit.n_rows > 1;
                        info = {unit.row,   unit.n_rows, unit.head, unit.chunk,
                                unit.begin, unit.end,    past,      shares};
                    }
                    const uint8_t *cells = (which == 0 ? a.pool.k : a.pool.v) + head;
                    if (whole) {
                        copy_whole(cells + (page + key % PAGE) * a.pool.cell_bytes);
                    } else {
                        copy_part(cells, min(KEYS, unit.end - key));
                    }
                    send();
                }
            }
        }
        open().n_rows = 0;
        send();
    }
};

// What the computing warps keep in all their units.
template <int D, int TYPE, bool BIG> struct MmaBlock {
    using L = MmaLayout<D, TYPE, BIG>;
    const AttentionParams &a;
    const Plan &plan;
    uint8_t *shared;
    const uint32_t base = shared_address(shared);
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP;
    Ring<L::SLOTS> ring;

    __device__ void wait() const { wait_barrier(base + L::FULL + ring.slot * 8, ring.parity); }
    __device__ const TileInfo &info() const {
        return reinterpret_cast<TileInfo *>(shared + L::INFO)[ring.slot];
    }
    // This warp has left the slot.
    __device__ void leave() {
        __syncwarp();
        if (lane == 0) {
            arrive(base + L::EMPTY + ring.slot * 8);
        }
        ring.next();
    }
    // Packed cells of the slot as rows of F16, in the buffer of K or V; the caller's barrier follows.
    __device__ void unpack(int which) {
        const uint8_t *from = shared + ring.slot * L::SLOT;
        uint8_t *to = shared + L::UNPACKED + which * L::KEYS * L::ROW;
#pragma unroll 2
        for (int u = tid; u < L::KEYS * D / 8; u += MATH_THREADS) {
            const int row = u / (D / 8), word = u % (D / 8);
            float x[8];
            load_values<TYPE>(from + row * L::CELL, word * 8, x);
            *reinterpret_cast<uint4 *>(to + swizzle<L::ROW>(row, word)) = {
                pack_halves(x[0], x[1]), pack_halves(x[2], x[3]), pack_halves(x[4], x[5]),
                pack_halves(x[6], x[7])};
        }
    }
};

} // namespace
} // namespace luce
