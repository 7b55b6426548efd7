// Brings cells into shared memory for the tensor cores. Here are the layout of a block's shared memory, the
// ring of slots that K and V of tiles pass through, and the four warps that fill it. They walk over all of
// the block's units ahead of the warps that compute (attention/sm90/wgmma.cuh on Hopper, else attention/mma.cuh),
// whom they tell of each, so that memory never waits for the arithmetic. Packed cells of steps with few rows are unpacked
// by another four warps, between these.
#pragma once

#include "attention/kv_types.cuh"
#include "attention/layout.h"
#include "attention/means.cuh"
#include "attention/tile.cuh"
#include "attention/units.cuh"
#include "attention/unpack.cuh"

namespace luce {
namespace {

// What threads do in the shared memory of a block.
template <int D, int TYPE, bool HOPPER, bool AHEAD_> struct Layout : BlockLayout<D, TYPE, HOPPER, AHEAD_> {
    using Block = BlockLayout<D, TYPE, HOPPER, AHEAD_>;
    using Block::BAD, Block::KEYS, Block::ROW, Block::TOLD, Block::WGMMA;

    __device__ static Told::Ring *told(uint8_t *shared) {
        return reinterpret_cast<Told::Ring *>(shared + TOLD);
    }
    // Returns the byte offset of a word of a row in a tile of `rows` rows.
    __device__ static int place(int row, int word, int rows) {
        return WGMMA ? word / 8 * rows * 128 + row * 128 + ((word ^ row) & 7) * 16 : swizzle<ROW>(row, word);
    }
    // Replaces values of V that are not finite by 0, and marks their keys in BAD. It returns false where
    // there are none. A weight of 0 hides from a row what it does not see, unless that is Inf or NaN.
    __device__ static bool clean_values(uint8_t *shared, int values_at, int tid, int threads, int group = 0) {
        uint8_t *marks = shared + BAD + group * KEYS;
        // What is not finite gives NaN times 0, which stays.
        __half2 zeros = twice(0);
        const int word = tid % (D / 8), step = threads / (D / 8);
#pragma unroll 8
        for (int row = tid / (D / 8); row < KEYS; row += step) {
            const uint4 x = *reinterpret_cast<const uint4 *>(shared + values_at + place(row, word, KEYS));
            zeros = __hfma2(halves(x.x), twice(0), zeros);
            zeros = __hfma2(halves(x.y), twice(0), zeros);
            zeros = __hfma2(halves(x.z), twice(0), zeros);
            zeros = __hfma2(halves(x.w), twice(0), zeros);
        }
        const bool bad = (bits_of(zeros) & 0x7fff7fff) != 0;
        if (tid < KEYS) {
            marks[tid] = 0;
        }
        if (!barrier_or(threads, group, bad)) {
            return false;
        }
#pragma unroll 1
        for (int u = tid; u < KEYS * D / 8; u += threads) {
            uint4 &x = *reinterpret_cast<uint4 *>(shared + values_at + place(u / (D / 8), u % (D / 8), KEYS));
            if (!finite(x)) {
                x = {finite_or_zero(x.x), finite_or_zero(x.y), finite_or_zero(x.z), finite_or_zero(x.w)};
                marks[u / (D / 8)] = 1;
            }
        }
        show_to_wgmma();
        barrier(threads, group);
        return true;
    }
    // Says whether one of the marked keys lies in first + [0, KEYS) and in [from, to].
    __device__ static bool sees_bad(const uint8_t *shared, int32_t first, int32_t from, int32_t to,
                                    int group = 0) {
        bool sees = false;
#pragma unroll 1
        for (int i = max(from - first, 0); i <= min(to - first, KEYS - 1); i++) {
            sees = sees || shared[BAD + group * KEYS + i] != 0;
        }
        return sees;
    }
};

template <typename L> struct Loader {
    static constexpr int KEYS = L::KEYS, WORDS = L::CELL / L::COPY;
    // Of F16 all threads copy so many rows at once. Rows that are 8 apart have the same order of words, and so have those that
    // are so many turns apart.
    static constexpr int STEP = LOAD_THREADS / WORDS, TURNS = STEP < 4 ? 8 / STEP : 2;
    const AttentionParams &a;
    const Plan &plan;
    uint8_t *shared;
    const uint32_t base = shared_address(shared);
    const int tid = threadIdx.x - (MMA_THREADS - LOAD_THREADS);
    Place ring;
    int32_t next_at = -1, next_page; // next_page is entry next_at of the page table
    int32_t held = 0; // the first thread has this number for the next unit
    int turn = 0;

    // Finds where a thread's word of its row at a turn is, less what lies between the turns.
    __device__ __forceinline__ void find_turns(int (&first)[TURNS]) const {
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            first[i] = L::place(tid / WORDS + i * STEP, tid % WORDS, KEYS) - i * STEP * L::NEXT_ROW;
        }
    }
    // Calls copy(row, word, place in the slot) for this thread's share of a tile's first n rows.
    template <typename Copy> __device__ void each(int n, Copy copy) const {
        if constexpr (L::PACKED) {
#pragma unroll 4
            for (int u = tid; u < n * WORDS; u += LOAD_THREADS) {
                copy(u / WORDS, u % WORDS, u * L::COPY);
            }
        } else {
            const int row = tid / WORDS, word = tid % WORDS;
            int first[TURNS];
            find_turns(first);
#pragma unroll 8
            for (int i = 0; i < KEYS / STEP; i++) {
                if (i * STEP + row < n) {
                    copy(i * STEP + row, word, i * STEP * L::NEXT_ROW + first[i % TURNS]);
                }
            }
        }
    }
    // Copies a tile of committed keys that lie in one page, one behind the other. This is what most of the loading warps'
    // time goes to, so it has few instructions.
    __device__ __forceinline__ void copy_whole(const uint8_t *first) const {
        const uint32_t to = base + ring.i * L::SLOT;
        if constexpr (L::PACKED) {
            static_assert(L::SLOT % 16 == 0, "a tile is whole words");
#pragma unroll
            for (int u = 0; u < L::SLOT / 16; u += LOAD_THREADS) {
                if (u + LOAD_THREADS <= L::SLOT / 16 || u + tid < L::SLOT / 16) {
                    copy_async<16>(to + (u + tid) * 16, first + (u + tid) * 16);
                }
            }
        } else {
            int turns[TURNS];
            find_turns(turns);
            const uint8_t *from = first + tid * 16;
#pragma unroll
            for (int i = 0; i < KEYS / STEP; i++) {
                copy_async<16>(to + turns[i % TURNS] + i * STEP * L::NEXT_ROW, from + i * STEP * L::CELL);
            }
        }
    }
    // Finds the pool's rows of any tile. From n_past on cells are found by ancestors, and -1 stands for what no row sees.
    __device__ void find_rows(const Cursor &unit, int32_t key) const {
        int32_t *rows = reinterpret_cast<int32_t *>(shared + L::ROWS);
        load_barrier(); // all have left the rows before
        if (tid < KEYS) {
            const bool valid = key + tid >= unit.low && key + tid < unit.end;
            rows[tid] = valid ? int32_t(unit.pool_row(key + tid)) : -1;
        }
        load_barrier();
    }
    // Copies a part of a tile. Zeros stand for what no row sees.
    __device__ void copy_part(const uint8_t *pool) const {
        const int32_t *rows = reinterpret_cast<const int32_t *>(shared + L::ROWS);
        const uint32_t to = base + ring.i * L::SLOT;
        each(KEYS, [&](int row, int word, int at) {
            const int64_t from = rows[row];
            copy_async<L::COPY>(to + at, pool + (from >= 0 ? from * L::CELL + word * L::COPY : 0), from >= 0);
        });
    }
    __device__ static void load_barrier() { loaders_barrier<LOAD_THREADS>(); }

    // Returns a committed page. The next one is asked for at once, since behind all the copies that are on their way an
    // answer takes as long as they do.
    __device__ int32_t page_of(int seq, int32_t index) {
        const int32_t at = plan.pages[seq] + index;
        const int32_t page = at == next_at ? next_page : a.pages[at];
        if (index < plan.n_past[seq] / PAGE) {
            next_at = at + 1;
            next_page = a.pages[next_at];
        }
        return page;
    }
    // Goes to the next unit: the block's own, or where blocks take units one by one, the one whose number the first thread has
    // taken. It asks for the next one a unit ahead, since an answer takes long. Both numbers have a place by turns, so that
    // one barrier a unit is enough.
    __device__ bool next(Cursor &unit) {
        if (!plan.ticketed) {
            return unit.next();
        }
        do {
            int32_t *number = reinterpret_cast<int32_t *>(shared + L::NUMBERS) + turn;
            turn ^= 1;
            if (tid == 0) {
                *number = held;
                held = atomicAdd(a.taken, 1);
            }
            load_barrier();
            if (!unit.go_to(*number)) {
                return false;
            }
        } while (unit.begin == unit.end);
        return true;
    }
    // Runs the ring. It begins beside the kernels ahead, and waits for them at tiles whose cells the step may
    // write. (Where a slot has to become free first, the warps that compute have waited.)
    __device__ void run() {
        Cursor unit(a, plan);
        Told told{L::told(shared)};
        if (plan.ticketed && tid == 0) {
            held = atomicAdd(a.taken, 1);
        }
        while (next(unit)) {
            if (tid == 0) {
                told.tell(unit.info());
            }
            const int seq = unit.seq();
            if (next_at < 0) {
                next_at = plan.pages[seq] + unit.begin / PAGE;
                next_page = a.pages[next_at];
            }
            load(unit, seq);
        }
        if (tid == 0) {
            told.tell(UnitInfo{});
        }
    }
    // Loads a unit's tiles.
    __device__ __forceinline__ void load(const Cursor &unit, int seq) {
        const int32_t past = plan.n_past[seq];
        int64_t first = -1; // it is where the page has the head's first row, in bytes
        for (int32_t key = unit.begin; key < unit.end; key += KEYS) {
            const bool whole = key >= unit.low && key + KEYS <= min(unit.end, past);
            if (!whole) {
                find_rows(unit, key);
            } else if (first < 0 || key % PAGE == 0) {
                first = a.pool.row(page_of(seq, key / PAGE), 0, a.kv_head(unit.head)) * L::CELL;
            }
            if (!whole || key + KEYS > past - plan.written[seq]) {
                wait_for_previous(); // from the second time on it is there
            }
            for (int which = 0; which < 2; which++) {
                const uint8_t *pool = which == 0 ? a.pool.k : a.pool.v;
                wait_patiently(base + L::EMPTY + ring.i * 8, ring.parity ^ 1);
                if (whole) {
                    copy_whole(pool + first + key % PAGE * L::CELL);
                } else {
                    copy_part(pool);
                }
                arrive_after_copies(base + L::FULL + ring.i * 8);
                ring.next(L::SLOTS);
            }
        }
    }
};

// A Taker is the side of a ring that takes, for one warp: from slots, or from unpacked tiles.
template <typename L, bool UNPACKED> struct Taker {
    static constexpr int FULL = UNPACKED ? L::READY : L::FULL, EMPTY = UNPACKED ? L::LEFT : L::EMPTY;
    uint8_t *shared;
    Place ring;

    // Returns where the slot or tile is in the block's shared memory.
    __device__ int at() const { return UNPACKED ? L::UNPACKED + ring.i * L::TILE : ring.i * L::SLOT; }
    __device__ void wait() const { barrier_wait(shared_address(shared) + FULL + ring.i * 8, ring.parity); }
    // Says that this warp has left it.
    __device__ void leave() {
        __syncwarp();
        warp_arrive(shared_address(shared) + EMPTY + ring.i * 8, threadIdx.x % WARP);
        ring.next(UNPACKED ? L::TILES : L::SLOTS);
    }
    // Goes past so many, which are another warpgroup's.
    __device__ void pass(int n) { ring.go(n, UNPACKED ? L::TILES : L::SLOTS); }
};

// Unpacks all tiles of a block's units with the warps that do nothing else.
template <int TYPE, typename L> __device__ void unpack_units(uint8_t *shared) {
    const int tid = threadIdx.x - L::MATH_THREADS;
    const uint32_t base = shared_address(shared);
    Taker<L, false> from{shared};
    Place to;
    Told told{L::told(shared)};
    for (UnitInfo unit = told.next(); unit.n_rows > 0; unit = told.next()) {
        for (int32_t key = unit.begin; key < unit.end; key += L::KEYS) {
            for (int which = 0; which < 2; which++) {
                from.wait();
                barrier_wait(base + L::LEFT + to.i * 8, to.parity ^ 1);
                unpack<TYPE, L>(shared + from.at(), shared + L::UNPACKED + to.i * L::TILE, tid,
                                L::UNPACK_THREADS);
                show_to_wgmma();
                from.leave();
                warp_arrive(base + L::READY + to.i * 8, tid % WARP);
                to.next(L::TILES);
            }
        }
    }
}

// Loads Q of a unit's pairs [pair0, pair0 + n) as rows of F16 from row0 on, with zeros where there is no pair. Reads are
// on their way together.
template <int D, typename L>
__device__ void load_queries(const AttentionParams &a, const UnitInfo &unit, uint8_t *shared, int row0,
                             int pair0, int n, int tid, int threads) {
    constexpr int WORDS = 6; // a thread has so many at once
    for (int x0 = tid; x0 < n * (D / 8); x0 += WORDS * threads) {
        float4 q[WORDS][2];
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
            const int x = x0 + j * threads, pair = pair0 + x / (D / 8);
            q[j][0] = q[j][1] = {};
            if (x < n * (D / 8) && pair < unit.n_rows * a.G) {
                const int64_t row = a.row_of(unit.row, pair), head = a.head_of(unit.head, pair);
                const float4 *from =
                    reinterpret_cast<const float4 *>(a.q + (row * a.H + head) * D + x % (D / 8) * 8);
                q[j][0] = from[0];
                q[j][1] = from[1];
            }
        }
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
            const int x = x0 + j * threads, row = row0 + x / (D / 8);
            if (x < n * (D / 8)) {
                *reinterpret_cast<uint4 *>(shared + L::Q + L::place(row, x % (D / 8), L::MAX_M)) = {
                    pack_halves(q[j][0].x, q[j][0].y), pack_halves(q[j][0].z, q[j][0].w),
                    pack_halves(q[j][1].x, q[j][1].y), pack_halves(q[j][1].z, q[j][1].w)};
            }
        }
    }
}

} // namespace
} // namespace luce
