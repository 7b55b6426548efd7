// Has what both forms of attention on Hopper's tensor cores share: a warpgroup's instructions, and its way
// through the tiles of a unit. A unit of many pairs is computed with pairs as rows (attention/sm90/wgmma.cuh), and
// one of few pairs with keys as rows (attention/sm90/few.cuh). Both give a pair the same bits.
#pragma once

#include "attention/load.cuh"
#include "matmul/sm90/wgmma.cuh"

namespace luce {
namespace {

constexpr int GROUP_THREADS = 128, GROUP_PAIRS = 64; // a warpgroup has so many
// A pair's weights are exp2(score - origin). The origin is the largest score of a tile that passed the origin before by more
// than this, so that it seldom moves. No weight is above 2^SLACK.
constexpr float SLACK = 8;

// A Matrix lies in shared memory in rows of 128 bytes, swizzled. Eight rows are 1024 bytes. All threads of a warp have the
// same one, and the compiler knows it, so that descriptors are made beside the threads' own arithmetic.
struct Matrix {
    uint32_t low;
    __device__ explicit Matrix(uint32_t address)
        : low(__shfl_sync(~0u, (address & 0x3ffff) >> 4 | EIGHT_ROWS << 16, 0)) {}
    // Returns the descriptor of what lies so many bytes behind.
    __device__ uint64_t at(uint32_t bytes) const {
        uint64_t descriptor;
        asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low + bytes / 16), "r"(EIGHT_ROWS | SWIZZLED));
        return descriptor;
    }
    static constexpr uint32_t EIGHT_ROWS = 1024 / 16, SWIZZLED = 1u << 30;
};

#define LUCE_C4(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define LUCE_C32(c)                                                                                          \
    LUCE_C4(c, 0), LUCE_C4(c, 1), LUCE_C4(c, 2), LUCE_C4(c, 3), LUCE_C4(c, 4), LUCE_C4(c, 5), LUCE_C4(c, 6), \
        LUCE_C4(c, 7)

// Computes c (64 x 64) += or = a (64 x 16, by rows) * b (64 columns x 16, by columns), both in shared memory.
__device__ void wgmma_by_rows(float (&c)[8][4], uint64_t a, uint64_t b, bool add) {
#if ROWMM_WGMMA
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"
        "%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, 0, 0;\n}"
        : LUCE_C32(c)
        : "l"(a), "l"(b), "r"(int(add)));
#endif
}
// Computes c (64 x 64) += a (64 x 16, in registers) * b (16 x 64, by rows, in shared memory).
__device__ void wgmma_by_columns(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b) {
#if ROWMM_WGMMA
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"
        "%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 1;\n}"
        : LUCE_C32(c)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
// Computes c (64 x 8) += or = a (64 x 16) * b (16 x 8, by columns), both in shared memory. A_COLUMNS is 1 where
// a lies by columns.
template <int A_COLUMNS> __device__ void wgmma_few(float (&c)[1][4], uint64_t a, uint64_t b, bool add) {
#if ROWMM_WGMMA
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
                 "{%0,%1,%2,%3}, %4, %5, p, 1, 1, %7, 0;\n}"
                 : LUCE_C4(c, 0)
                 : "l"(a), "l"(b), "r"(int(add)), "n"(A_COLUMNS));
#endif
}
// Computes c (64 x 8) += a (64 x 16, in registers) * b (16 x 8, by columns, in shared memory).
__device__ void wgmma_few(float (&c)[1][4], const uint32_t (&a)[4], uint64_t b) {
#if ROWMM_WGMMA
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1, 0;\n}"
                 : LUCE_C4(c, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
#undef LUCE_C32
#undef LUCE_C4

// That of the first group is also barrier_of(GROUP_THREADS): the same threads meet there.
__device__ void group_barrier(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(3 + group), "n"(GROUP_THREADS) : "memory");
}

// A GroupUnit is a warpgroup's share of a unit, and takes its tiles from the ring.
template <int D, int TYPE, bool AHEAD> struct GroupUnit {
    using L = Layout<D, TYPE, true, AHEAD>;
    using Source = Taker<L, AHEAD>;
    static constexpr int KEYS = L::KEYS, PANELS = D / 64;
    static_assert(KEYS == 64, "a tile of scores is a panel");

    const AttentionParams &a;
    const Plan &plan;
    Source &ring;
    const UnitInfo unit;
    const int group = threadIdx.x / GROUP_THREADS, tid = threadIdx.x % GROUP_THREADS, lane = tid % WARP;
    const int threads; // these compute the unit: of both groups, or of this one alone
    const int alone = threads == GROUP_THREADS ? group : 0; // it says whose barrier and marks are used
    uint8_t *const shared = ring.shared;
    const uint32_t base = shared_address(shared);
    uint32_t turn = 0; // here the group says that the other one may begin with the next unit

    __device__ GroupUnit(const AttentionParams &args, const Plan &p, Source &taker, const UnitInfo &u)
        : a(args), plan(p), ring(taker), unit(u),
          threads(!AHEAD && u.n_rows * args.G > GROUP_PAIRS ? 2 * GROUP_THREADS : GROUP_THREADS) {}

    // Returns the first and the last key that a pair sees.
    __device__ int2 seen(int pair) const {
        const int32_t to = plan.position[min(a.row_of(unit.row, pair), MAX_ROWS - 1)];
        return {lowest_visible(to, a.first, a.window), to};
    }
    // Says whether a row may not see all of a tile.
    __device__ bool hides(int32_t first) const {
        return a.window > 0 || first < a.first || first + KEYS > unit.past;
    }
    __device__ float cap(float score) const { // this is tanh, to 2^-22 absolutely
        const float power = exp2_fast(score * a.score_scale * 2.88539008f);
        return (1.0f - __fdividef(2.0f, power + 1.0f)) * a.score_cap;
    }
    // Returns what brings scores to units of log2.
    __device__ float scale() const { return a.softcap > 0 ? 1.0f : a.score_scale; }
    __device__ static float origin(float most) { return most == -INFINITY ? 0.0f : most; }

    // Returns the next slot's K (0) or V (1) as F16, where it is. A packed slot is left.
    __device__ int take(int which) {
        ring.wait();
        if constexpr (AHEAD) {
            return ring.at();
        } else if constexpr (!L::PACKED) {
            show_to_wgmma();
            return ring.at();
        } else {
            const int at = L::UNPACKED + which * L::TILE;
            barrier(threads); // all have left the tile before
            unpack<TYPE, L>(shared + ring.at(), shared + at, group * GROUP_THREADS + tid, threads);
            show_to_wgmma();
            ring.leave();
            barrier(threads);
            return at;
        }
    }
    __device__ void leave() {
        if (!L::PACKED || AHEAD) {
            ring.leave();
        }
    }
    // Lets the other group begin as soon as the K of the unit's last tile is there: its own first slot comes next but one.
    __device__ void pass_on(int32_t first) const {
        if (turn != 0 && first + KEYS >= unit.end) {
            __syncwarp();
            warp_arrive(turn, lane);
        }
    }
    // Calls see() where V has values that are not finite: it looks who sees their keys.
    template <typename See> __device__ void clean(int values_at, See see) {
        if (L::clean_values(shared, values_at, (threads > GROUP_THREADS ? group * GROUP_THREADS : 0) + tid,
                            threads, alone)) {
            see();
            barrier(threads, alone); // all have read the marks
        }
    }
    template <int N> __device__ static void pin(float (&sum)[1][4], float (&o)[PANELS][N][4]) {
        wgmma_pin(sum);
#pragma unroll
        for (int i = 0; i < PANELS; i++) {
            wgmma_pin(o[i]);
        }
    }
    // Runs either form's unit, whose base this is.
    template <typename Unit> __device__ void run(Unit &form, uint32_t handed_over_at) {
        turn = handed_over_at;
#pragma unroll 1
        for (int32_t first = unit.begin; first < unit.end; first += KEYS) {
            form.run_tile(first);
        }
        if (L::PACKED && threads > GROUP_THREADS) {
            barrier(threads); // the next unit may be one group's, which unpacks where the other still reads
        }
        form.store();
    }
};

} // namespace
} // namespace luce
