// Computes attention on Hopper's tensor cores, over F16 cells or cells that are unpacked to F16. Four warps
// of a block send K and V of its units' tiles of 64 keys through a ring in shared memory
// (attention_load.cuh). Two warpgroups compute, each for 64 of the unit's pairs by itself. The second one
// leaves tiles of smaller units untouched, unless all units are so small that both have room for one: then they take units by
// turns.
//
// A tile is computed in these steps: S = Q K^T in registers, P = exp2(S - maximum) as F16 in the same
// registers, O = O * exp2(old maximum - maximum) + P V. Every sum has one order, for any number of rows: over
// D and over keys in steps of 16. Weights are summed first over a thread's keys, then over the four threads
// that share a row. A key that a row does not see has weight 0. A cell that no row of the unit sees is not
// read, and zeros stand for it.
#pragma once

#include "attention_load.cuh"
#include "rowmm_wgmma.cuh"

namespace luce {
namespace {

constexpr int GROUP_THREADS = 128, GROUP_PAIRS = 64; // a warpgroup has so many

// Returns the descriptor of a matrix in shared memory in rows of 128 bytes, swizzled. Eight rows are 1024
// bytes.
__device__ uint64_t wgmma_matrix(uint32_t address) {
    constexpr uint32_t EIGHT_ROWS = 1024 / 16, SWIZZLED = 1u << 30;
    const uint32_t low = (address & 0x3ffff) >> 4 | EIGHT_ROWS << 16;
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(EIGHT_ROWS | SWIZZLED));
    return descriptor;
}

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
#undef LUCE_C32
#undef LUCE_C4

// That of the first group is also barrier_of(GROUP_THREADS): the same threads meet there.
__device__ void group_barrier(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(3 + group), "n"(GROUP_THREADS) : "memory");
}

// A WgmmaUnit is up to 64 pairs of a unit, for one warpgroup. A thread has rows lane / 4 and lane / 4 + 8 of
// its warp's 16.
template <int D, int TYPE, bool AHEAD> struct WgmmaUnit {
    using L = Layout<D, TYPE, true, AHEAD>;
    using Source = Taker<L, AHEAD>;
    static constexpr int KEYS = L::KEYS, PANELS = D / 64, N = KEYS / 8;
    static_assert(KEYS == 64, "a tile of scores is a panel");

    const AttentionParams &a;
    const Plan &plan;
    Source &ring;
    const UnitInfo unit;
    const int group,
        threads; // `threads` counts those that compute the unit: of both groups, or of this one alone
    const int alone = threads == GROUP_THREADS ? group : 0; // it says whose barrier and marks are used
    const int tid = threadIdx.x % GROUP_THREADS, lane = tid % WARP;
    const int q_row; // the group's queries begin at this row
    const int pair; // it is that of the thread's first row
    const bool used = pair - lane / 4 < unit.n_rows * a.G; // it says that this warp has pairs
    uint8_t *const shared = ring.shared;
    const uint32_t base = shared_address(shared);
    int32_t from[2], to[2]; // they bound the keys that the thread's rows see
    float most[2] = {-INFINITY, -INFINITY}, sum[2] = {}; // `sum` adds up the weights of this thread's keys
    float o[PANELS][8][4] = {};

    __device__ WgmmaUnit(const AttentionParams &args, const Plan &p, Source &taker, const UnitInfo &u,
                         int first_row, int first_pair)
        : a(args), plan(p), ring(taker), unit(u), group(threadIdx.x / GROUP_THREADS),
          threads(!AHEAD && u.n_rows * args.G > GROUP_PAIRS ? 2 * GROUP_THREADS : GROUP_THREADS),
          q_row(first_row),
          pair(first_pair + int(threadIdx.x) % GROUP_THREADS / WARP * 16 + int(threadIdx.x) % WARP / 4) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            to[h] = plan.position[min(a.row_of(unit.row, pair + 8 * h), MAX_ROWS - 1)];
            from[h] = lowest_visible(to[h], a.first, a.window);
        }
    }

    __device__ void score(uint32_t keys_at, float (&s)[N][4]) const {
        const uint32_t q = base + L::Q + q_row * 128;
        wgmma_begin();
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            wgmma_by_rows(s, wgmma_matrix(q + d / 4 * L::MAX_M * 128 + d % 4 * 32),
                          wgmma_matrix(keys_at + d / 4 * KEYS * 128 + d % 4 * 32), d > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(s);
    }
    __device__ void cap(float (&s)[N][4]) const {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) { // this is tanh, to 2^-22 absolutely
                const float power = exp2_fast(s[n][e] * a.score_scale * 2.88539008f);
                s[n][e] = (1.0f - __fdividef(2.0f, power + 1.0f)) * a.score_cap;
            }
        }
    }
    __device__ void hide(int32_t first, float (&s)[N][4]) const {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int32_t at = first + n * 8 + lane % 4 * 2 + e % 2;
                s[n][e] = at >= from[e / 2] && at <= to[e / 2] ? s[n][e] : -INFINITY;
            }
        }
    }
    // Leaves weights as the A matrices of steps of 16 keys, and scales what was summed before to the new
    // maximum.
    __device__ void weigh(int32_t first, float (&s)[N][4], uint32_t (&p)[KEYS / 16][4]) {
        const float scale = a.softcap > 0 ? 1.0f : a.score_scale; // it brings scores to units of log2
        if (a.softcap > 0) {
            cap(s);
        }
        if (a.window > 0 || first < a.first || first + KEYS > unit.past) {
            hide(first, s);
        }
        float factor[2], origin[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x[N];
#pragma unroll
            for (int n = 0; n < N; n++) {
                x[n] = fmaxf(s[n][2 * h], s[n][2 * h + 1]);
            }
            float next = fmaxf(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])),
                               fmaxf(fmaxf(x[4], x[5]), fmaxf(x[6], x[7])));
            next = fmaxf(next, __shfl_xor_sync(~0u, next, 1));
            next = fmaxf(next, __shfl_xor_sync(~0u, next, 2));
            next = fmaxf(most[h], next * scale);
            origin[h] = next == -INFINITY ? 0.0f : next;
            factor[h] = exp2_fast(most[h] - origin[h]);
            most[h] = next;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float w[N];
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float x = exp2_fast(fmaf(s[n][2 * h], scale, -origin[h]));
                const float y = exp2_fast(fmaf(s[n][2 * h + 1], scale, -origin[h]));
                w[n] = x + y;
                p[n / 2][n % 2 * 2 + h] = pack_halves(x, y);
            }
            sum[h] =
                fmaf(sum[h], factor[h], ((w[0] + w[1]) + (w[2] + w[3])) + ((w[4] + w[5]) + (w[6] + w[7])));
        }
        if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < PANELS; i++) {
#pragma unroll
                for (int n = 0; n < 8; n++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        o[i][n][e] *= factor[e / 2];
                    }
                }
            }
        }
    }
    __device__ void add_values(uint32_t values_at, const uint32_t (&p)[KEYS / 16][4]) {
#pragma unroll
        for (int i = 0; i < PANELS; i++) {
            wgmma_pin(o[i]);
        }
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
#pragma unroll
            for (int i = 0; i < PANELS; i++) {
                wgmma_by_columns(o[i], p[k], wgmma_matrix(values_at + i * KEYS * 128 + k * 16 * 128));
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < PANELS; i++) {
            wgmma_pin(o[i]);
        }
    }

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
    __device__ void clean(int values_at, int32_t first) {
        if (L::clean_values(shared, values_at, (threads > GROUP_THREADS ? group * GROUP_THREADS : 0) + tid,
                            threads, alone)) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (L::sees_bad(shared, first, from[h], to[h], alone)) {
                    sum[h] = NAN;
                }
            }
            barrier(threads, alone); // all have read the marks
        }
    }
    __device__ void run_tile(int32_t first) {
        float s[N][4];
        uint32_t p[KEYS / 16][4] = {};
        score(base + take(0), s);
        leave();
        if (used) {
            weigh(first, s, p);
        }
        const int values_at = take(1);
        if (unit.mixed(first, KEYS, a.window)) {
            clean(values_at, first);
        }
        add_values(base + values_at, p);
        leave();
    }

    __device__ void store() {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
            sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
            if (pair + 8 * h >= unit.n_rows * a.G) {
                continue;
            }
            const int64_t row = a.row_of(unit.row, pair + 8 * h), head = a.head_of(unit.head, pair + 8 * h);
            const int64_t at = (row * a.H + head) * a.chunks + unit.chunk;
            const float scale = mean_scale(sum[h]);
#pragma unroll
            for (int i = 0; i < PANELS; i++) {
#pragma unroll
                for (int n = 0; n < 8; n += 4) {
                    store_means<4>(a, at, D, i * 8 + n, &o[i][n], h, scale, lane % 4);
                }
            }
            if (lane % 4 == 0) {
                a.sums[at] = {most[h], sum[h]};
            }
        }
    }
    __device__ void run() {
#pragma unroll 1
        for (int32_t first = unit.begin; first < unit.end; first += KEYS) {
            run_tile(first);
        }
        if (L::PACKED && threads > GROUP_THREADS) {
            barrier(threads); // the next unit may be one group's, which unpacks where the other still reads
        }
        store();
    }
};

template <int D, int TYPE, bool AHEAD>
__device__ void wgmma_units(const AttentionParams &a, const Plan &plan, uint8_t *shared) {
    using L = Layout<D, TYPE, true, AHEAD>;
    Taker<L, AHEAD> ring{shared};
    const int group = threadIdx.x / GROUP_THREADS, tid = threadIdx.x % GROUP_THREADS;
    // Where all units are small, the groups take them by turns, so that one begins while the other leaves its results.
    const bool turns = !AHEAD && !L::PACKED && plan.rows_of_unit() * a.G <= L::HALF_M;
    const int q_row = group * (turns ? L::HALF_M : GROUP_PAIRS), first_pair = turns ? 0 : group * GROUP_PAIRS;
    int owner = 1;
    int rows = -1, head = -1; // they say whose queries are in shared memory
    Cursor cursor(a, plan);
    wait_for_previous();
    for (; cursor.valid(); cursor.next()) {
        const UnitInfo unit = cursor.info();
        owner = 1 - owner;
        const int pairs = turns && owner != group ? 0 : min(GROUP_PAIRS, unit.n_rows * a.G - first_pair);
        if (pairs <= 0) {
            for (int32_t first = unit.begin; first < unit.end; first += L::KEYS) {
                ring.wait();
                ring.leave();
                ring.wait();
                ring.leave();
            }
            continue;
        }
        if (rows != unit.row * MAX_ROWS + unit.n_rows || head != unit.head) {
            rows = unit.row * MAX_ROWS + unit.n_rows;
            head = unit.head;
            group_barrier(group); // all have left the queries before
            // Rows of zeros make the warps' rows full, so that what lay there changes no maximum.
            const int room = turns ? L::HALF_M : min(GROUP_PAIRS, L::MAX_M - q_row);
            load_queries<D, L>(a, unit, shared, q_row, first_pair, min((pairs + 15) / 16 * 16, room), tid,
                               GROUP_THREADS);
            show_to_wgmma();
            group_barrier(group);
        }
        WgmmaUnit<D, TYPE, AHEAD>(a, plan, ring, unit, q_row, first_pair).run();
    }
}

} // namespace
} // namespace luce
