// Computes attention on Hopper's tensor cores, over F16 cells or cells that are unpacked to F16. Four warps
// of a block send K and V of its units' tiles of 64 keys through a ring in shared memory
// (attention/load.cuh). Two warpgroups compute, each for 64 of the unit's pairs by itself. The second one
// leaves tiles of smaller units untouched, unless all units are so small that both have room for one: then they take units by
// turns.
//
// A tile of many pairs is computed in these steps, here, and one of few pairs by attention/sm90/few.cuh, with the same
// bits: S = Q K^T in registers, P = exp2(S - origin) as F16 in the same registers, O = O * exp2(old origin -
// origin) + P V, and the sums of weights are P times a matrix of ones. The origin is a score that no score
// passes by more than SLACK. Every sum has one order, for any number of rows: over D and over keys in steps of
// 16. A key that a row does not see has weight 0. A cell that no row of the unit sees is not read, and zeros
// stand for it.
#pragma once

#include "attention/sm90/few.cuh"

namespace luce {
namespace {

// A WgmmaUnit is up to 64 pairs of a unit, for one warpgroup. A thread has rows lane / 4 and lane / 4 + 8 of
// its warp's 16.
template <int D, int TYPE, bool AHEAD> struct WgmmaUnit : GroupUnit<D, TYPE, AHEAD> {
    using Base = GroupUnit<D, TYPE, AHEAD>;
    using L = typename Base::L;
    using Base::a, Base::alone, Base::base, Base::lane, Base::plan, Base::shared, Base::tid, Base::unit,
        Base::KEYS, Base::PANELS, Base::origin;
    static constexpr int N = KEYS / 8;

    const int q_row; // the group's queries begin at this row
    const int pair; // it is that of the thread's first row
    const bool used = pair - lane / 4 < unit.n_rows * a.G; // it says that this warp has pairs
    int2 seen[2]; // the thread's rows see keys from .x to .y
    float most[2] = {-INFINITY, -INFINITY}, sum[1][4] = {}; // a row's columns of `sum` are the same
    float o[PANELS][8][4] = {};

    __device__ WgmmaUnit(const AttentionParams &args, const Plan &p, typename Base::Source &taker,
                         const UnitInfo &u, int first_row, int first_pair)
        : Base(args, p, taker, u), q_row(first_row), pair(first_pair + tid / WARP * 16 + lane / 4) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            seen[h] = Base::seen(pair + 8 * h);
        }
    }

    __device__ void score(uint32_t keys_at, float (&s)[N][4]) const {
        const Matrix keys(keys_at), q(base + L::Q + q_row * 128);
        wgmma_begin();
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            wgmma_by_rows(s, q.at(d / 4 * L::MAX_M * 128 + d % 4 * 32),
                          keys.at(d / 4 * KEYS * 128 + d % 4 * 32), d > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(s);
    }
    __device__ void hide(int32_t first, float (&s)[N][4]) const {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int32_t at = first + n * 8 + lane % 4 * 2 + e % 2;
                s[n][e] = at >= seen[e / 2].x && at <= seen[e / 2].y ? s[n][e] : -INFINITY;
            }
        }
    }
    // Leaves weights as the A matrices of steps of 16 keys. Where the tile passes a row's origin by more than SLACK, the
    // origin moves to the tile's maximum, and what was summed before is scaled.
    __device__ void weigh(int32_t first, float (&s)[N][4], uint32_t (&p)[KEYS / 16][4]) {
        const float scale = Base::scale();
        if (a.softcap > 0) {
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    s[n][e] = Base::cap(s[n][e]);
                }
            }
        }
        if (Base::hides(first)) {
            hide(first, s);
        }
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x[N];
#pragma unroll
            for (int n = 0; n < N; n++) {
                x[n] = fmaxf(s[n][2 * h], s[n][2 * h + 1]);
            }
            float tile = fmaxf(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])),
                               fmaxf(fmaxf(x[4], x[5]), fmaxf(x[6], x[7])));
            tile = fmaxf(tile, __shfl_xor_sync(~0u, tile, 1));
            tile = fmaxf(tile, __shfl_xor_sync(~0u, tile, 2)) * scale;
            const bool moves = tile > most[h] + SLACK;
            factor[h] = moves ? exp2_fast(most[h] - tile) : 1.0f;
            most[h] = moves ? tile : most[h];
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float below = -origin(most[h]);
#pragma unroll
            for (int n = 0; n < N; n++) {
                p[n / 2][n % 2 * 2 + h] = pack_halves(exp2_fast(fmaf(s[n][2 * h], scale, below)),
                                                      exp2_fast(fmaf(s[n][2 * h + 1], scale, below)));
            }
        }
        if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                sum[0][e] *= factor[e / 2];
            }
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
        const Matrix values(values_at), ones(base + L::ONES);
        Base::pin(sum, o);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
#pragma unroll
            for (int i = 0; i < PANELS; i++) {
                wgmma_by_columns(o[i], p[k], values.at(i * KEYS * 128 + k * 16 * 128));
            }
            wgmma_few(sum, p[k], ones.at(0));
        }
        wgmma_commit();
        wgmma_wait<0>();
        Base::pin(sum, o);
    }
    __device__ void clean(int values_at, int32_t first) {
        Base::clean(values_at, [&] {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (L::sees_bad(shared, first, seen[h].x, seen[h].y, alone)) {
                    sum[0][2 * h] = sum[0][2 * h + 1] = NAN;
                }
            }
        });
    }
    __device__ void run_tile(int32_t first) {
        float s[N][4];
        uint32_t p[KEYS / 16][4] = {};
        const int keys_at = Base::take(0);
        Base::pass_on(first);
        score(base + keys_at, s);
        Base::leave();
        if (used) {
            weigh(first, s, p);
        }
        const int values_at = Base::take(1);
        if (unit.mixed(first, KEYS, a.window)) {
            clean(values_at, first);
        }
        add_values(base + values_at, p);
        Base::leave();
    }

    __device__ void store() {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (pair + 8 * h >= unit.n_rows * a.G) {
                continue;
            }
            const int64_t row = a.row_of(unit.row, pair + 8 * h), head = a.head_of(unit.head, pair + 8 * h);
            const int64_t at = a.place(row, unit.chunk, head);
            const float scale = mean_scale(sum[0][2 * h]);
#pragma unroll
            for (int i = 0; i < PANELS; i++) {
#pragma unroll
                for (int n = 0; n < 8; n += 4) {
                    store_means<4>(a, at, D, i * 8 + n, &o[i][n], h, scale, lane % 4);
                }
            }
            if (lane % 4 == 0) {
                store_kept(a.sums + at, float2{most[h], sum[0][2 * h]});
            }
        }
    }
    __device__ void run(uint32_t turn) { Base::run(*this, turn); }
};

// Says whether the two warpgroups take a block's units by turns: there is room for the queries of two.
template <typename L> __device__ bool by_turns(const AttentionParams &a, const Plan &plan) {
    return !L::PACKED && plan.rows_of_unit() * a.G <= L::HALF_M;
}

// Lays down the matrix of ones by which wgmma adds up weights. A __syncthreads() follows before the block's mbarriers are
// initialised: racecheck takes their addresses for 1 KiB less, which are the matrix's.
template <typename L> __device__ void lay_ones(uint8_t *shared) {
    if (threadIdx.x < L::ONES_BYTES / 4) {
        reinterpret_cast<uint32_t *>(shared + L::ONES)[threadIdx.x] = ONES;
        show_to_wgmma();
    }
}

// Prepares the barriers of wgmma_units, and returns how many warps leave each of the ring's slots. The caller's
// barrier follows.
template <typename L>
__device__ int prepare_wgmma(const AttentionParams &a, const Plan &plan, uint8_t *shared) {
    if (threadIdx.x < 2) {
        barrier_init_warps(shared_address(shared) + L::TURN + threadIdx.x * 8, L::WARPS / 2);
    }
    return L::AHEAD ? L::UNPACK_THREADS / WARP : by_turns<L>(a, plan) ? L::WARPS / 2 : L::WARPS;
}

template <int D, int TYPE, bool AHEAD>
__device__ void wgmma_units(const AttentionParams &a, const Plan &plan, uint8_t *shared) {
    using L = Layout<D, TYPE, true, AHEAD>;
    Taker<L, AHEAD> ring{shared};
    const int group = threadIdx.x / GROUP_THREADS, tid = threadIdx.x % GROUP_THREADS;
    // Where all units are small, the groups take them by turns, so that one begins while the other leaves its results.
    // The other's queries are brought meanwhile, and it neither waits for tiles nor leaves them.
    const bool turns = by_turns<L>(a, plan);
    const int q_row = group * (turns ? L::HALF_M : GROUP_PAIRS), first_pair = turns ? 0 : group * GROUP_PAIRS;
    const uint32_t turn = shared_address(shared) + L::TURN;
    int units = 0, parity = 0; // `units` are those before this one
    int rows = -1, head = -1; // they say whose queries are in shared memory
    Told told{L::told(shared)};
    wait_for_previous();
    for (UnitInfo unit = told.next(); unit.n_rows > 0; unit = told.next(), units++) {
        const int slots = 2 * ((unit.end - unit.begin + L::KEYS - 1) / L::KEYS);
        if (turns && units % 2 != group) {
            ring.pass(slots);
            continue;
        }
        const int pairs = min(GROUP_PAIRS, unit.n_rows * a.G - first_pair);
        if (pairs <= 0) {
            for (int i = 0; i < slots; i++) {
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
            const int full = pairs <= FEW_PAIRS ? FEW_PAIRS : min((pairs + 15) / 16 * 16, room);
            load_queries<D, L>(a, unit, shared, q_row, first_pair, full, tid, GROUP_THREADS);
            show_to_wgmma();
            group_barrier(group);
        }
        if (turns && units > 0) {
            barrier_wait(turn + (1 - group) * 8, parity);
            parity ^= 1;
        }
        const uint32_t mine = turns ? turn + group * 8 : 0;
        if (first_pair > 0 || unit.n_rows * a.G > FEW_PAIRS) {
            WgmmaUnit<D, TYPE, AHEAD>(a, plan, ring, unit, q_row, first_pair).run(mine);
        } else {
            FewUnit<D, TYPE, AHEAD>(a, plan, ring, unit, q_row).run(mine);
        }
    }
}

} // namespace
} // namespace luce
