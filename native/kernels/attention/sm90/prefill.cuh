// Computes attention of prompts' rows on Hopper's tensor cores. A block has the rows of a group for two heads of one KV head, each
// of which a warpgroup computes by itself. Four warps send K and V of tiles of 64 keys through a ring in shared memory ahead of
// them, so that one warpgroup weighs scores while the other multiplies.
#pragma once

#include "attention/prefill_rows.cuh"
#include "attention/sm90/instructions.cuh"
#include "common/ring.cuh"

namespace luce {
namespace {

// Rows of queries, keys and values lie in panels of 64 columns, one row after the other, with the order of 16-byte words changed
// by the row.
template <int D> struct WgmmaPrefillLayout {
    static constexpr int HEADS = PREFILL_HEADS, ROWS = prefill_rows(D), KEYS = prefill_keys(D);
    static_assert(ROWS == GROUP_PAIRS && KEYS == 64, "a warpgroup's rows, and a panel of scores");
    static constexpr int SLOTS = PREFILL_SLOTS; // they hold K and V of a tile by turns
    static constexpr int LOADERS = 4 * WARP, THREADS = HEADS * GROUP_THREADS + LOADERS;
    static_assert(THREADS == PREFILL_WGMMA_THREADS);
    // Those who load leave registers to those who compute: all have 168 at first.
    static constexpr int MATH_REGISTERS = 224, LOAD_REGISTERS = 56;
    static constexpr int TILE = KEYS * 2 * D, QUERIES = ROWS * 2 * D;
    static constexpr int Q = 0, RING = HEADS * QUERIES, FULL = RING + SLOTS * TILE, EMPTY = FULL + SLOTS * 8;
    static constexpr int BYTES = EMPTY + SLOTS * 8;
    __device__ static int place(int row, int word, int rows) {
        return word / 8 * rows * 128 + row * 128 + ((word ^ row) & 7) * 16;
    }
};

template <int D>
struct WgmmaPrefillBlock : PrefillRows<D, WgmmaPrefillLayout<D>::ROWS, WgmmaPrefillLayout<D>::KEYS, 1> {
    using L = WgmmaPrefillLayout<D>;
    using Rows = PrefillRows<D, L::ROWS, L::KEYS, 1>;
    using Rows::a, Rows::end, Rows::lane, Rows::N, Rows::o, Rows::seq;
    static constexpr int KEYS = L::KEYS, PANELS = D / 64;
    uint8_t *const shared;
    const uint32_t base = shared_address(shared);
    // Those who load are of the first head.
    const int member = int(threadIdx.x / GROUP_THREADS) % L::HEADS, tid = threadIdx.x % GROUP_THREADS;
    Place ring;

    __device__ WgmmaPrefillBlock(const PrefillAttentionArgs &args, uint8_t *block)
        : Rows(args, int(blockIdx.y) * L::HEADS + int(threadIdx.x / GROUP_THREADS) % L::HEADS,
               threadIdx.x / WARP % (GROUP_THREADS / WARP), 0),
          shared(block) {}

    __device__ uint32_t full() const { return base + L::FULL + ring.i * 8; }
    __device__ uint32_t empty() const { return base + L::EMPTY + ring.i * 8; }
    __device__ uint32_t slot() const { return base + L::RING + ring.i * L::TILE; }

    // ---- those who load ----

    // Copies a tile of keys or values, and zeros for cells that no row of the block sees.
    __device__ void load(const uint16_t *cells, int32_t first) {
        constexpr int WORDS = D / 8, STEP = L::LOADERS / WORDS;
        barrier_wait(empty(), ring.parity ^ 1);
        const int word = tid % WORDS;
        const int64_t width = int64_t(a.Hkv) * D;
        const uint16_t *from = cells + seq.cells * width + Rows::kv_head() * D + word * 8;
#pragma unroll 8
        for (int key = tid / WORDS; key < KEYS; key += STEP) {
            copy_async<16>(slot() + L::place(key, word, KEYS), from + min(first + key, end - 1) * width,
                           first + key < end);
        }
        arrive_after_copies(full());
        ring.next(L::SLOTS);
    }
    __device__ void load_all() {
        const int2 keys = Rows::keys();
        for (int32_t first = keys.x; first < keys.y; first += KEYS) {
            load(a.k, first);
            load(a.v, first);
        }
        copies_commit();
        copies_wait<0>();
    }

    // ---- those who compute ----

    __device__ void take() const {
        barrier_wait(full(), ring.parity);
        show_to_wgmma();
    }
    __device__ void leave_slot() {
        __syncwarp();
        warp_arrive(empty(), lane);
        ring.next(L::SLOTS);
    }
    __device__ float (&panel(int i))[8][4] { return *reinterpret_cast<float (*)[8][4]>(&o[8 * i]); }
    __device__ void pin() {
#pragma unroll
        for (int i = 0; i < PANELS; i++) {
            wgmma_pin(panel(i));
        }
    }

    __device__ void score(float (&s)[N][4]) const {
        const Matrix keys(slot()), q(base + L::Q + member * L::QUERIES);
        wgmma_begin();
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            wgmma_by_rows(s, q.at(d / 4 * L::ROWS * 128 + d % 4 * 32),
                          keys.at(d / 4 * KEYS * 128 + d % 4 * 32), d > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(s);
    }
    __device__ void add_values(const uint32_t (&weights)[N][2]) {
        const Matrix values(slot());
        pin();
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            const uint32_t rows[4] = {weights[2 * k][0], weights[2 * k][1], weights[2 * k + 1][0],
                                      weights[2 * k + 1][1]};
#pragma unroll
            for (int i = 0; i < PANELS; i++) {
                wgmma_by_columns(panel(i), rows, values.at(i * KEYS * 128 + k * 16 * 128));
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin();
    }
    // Adds the keys from `first`, a multiple of KEYS, to `stop`.
    __device__ void add_keys(int32_t first, int32_t stop) {
#pragma unroll 1
        for (; first < stop; first += KEYS) {
            float s[N][4];
            take();
            score(s);
            leave_slot();
            uint32_t weights[N][2];
            Rows::weigh(s, first, weights);
            take();
            add_values(weights);
            leave_slot();
        }
    }

    __device__ void run() {
        if (threadIdx.x < L::SLOTS) {
            barrier_init(base + L::FULL + threadIdx.x * 8, L::LOADERS);
            barrier_init_warps(base + L::EMPTY + threadIdx.x * 8, L::HEADS * GROUP_THREADS / WARP);
        }
        __syncthreads();
        if (threadIdx.x >= L::HEADS * GROUP_THREADS) {
            registers_down<L::LOAD_REGISTERS>();
            load_all();
            return;
        }
        registers_up<L::MATH_REGISTERS>();
        Rows::each_query(tid, GROUP_THREADS, [&](int row, int word, const uint4 &words) {
            *reinterpret_cast<uint4 *>(shared + L::Q + member * L::QUERIES + L::place(row, word, L::ROWS)) =
                words;
        });
        show_to_wgmma();
        barrier(GROUP_THREADS, member);
        Rows::run([&](int32_t first, int32_t stop) { add_keys(first, stop); });
    }
};

} // namespace
} // namespace luce
