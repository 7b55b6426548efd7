// Computes attention on the tensor cores before and after Hopper, and there of heads that are too large for its warpgroups
// (WGMMA_D), over F16 cells or cells that are unpacked to F16. Four warps of a block send K and V of its units' tiles of KEYS keys
// through a ring in shared memory (attention/load.cuh). The other eight compute.
//
// A tile is computed in these steps. For S = Q K^T, each warp has some keys. The rows' maxima over warps pass
// through shared memory. P = exp2(S - maximum) goes as F16 into shared memory. For O = O * exp2(old maximum -
// maximum) + P V, each warp has some columns. Every sum has one order, for any number of rows: over D in two
// chains (even and odd steps of 16), over keys in steps of 16 by position. A key that a row does not see has
// weight 0. A cell that no row of the unit sees is not read, and zeros stand for it.
#pragma once

#include "attention/load.cuh"

namespace luce {
namespace {

constexpr int WARPS = 8, MATH_THREADS = WARPS * WARP; // so many compute, as Layout has it too

// This is what the computing warps keep in all their units.
template <int D, int TYPE, bool HOPPER> struct MmaBlock : Taker<Layout<D, TYPE, HOPPER, false>, false> {
    using L = Layout<D, TYPE, HOPPER, false>;
    const AttentionParams &a;
    const Plan &plan;
    const uint32_t base = shared_address(this->shared);
    int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP;
    const UnitInfo *unit = nullptr;

    __device__ MmaBlock(const AttentionParams &args, const Plan &p, uint8_t *block)
        : Taker<L, false>{block, {}}, a(args), plan(p) {}
    // Unpacks the slot's packed cells to rows of F16, in the buffer of K or V. The caller's barrier follows.
    __device__ void unpack_slot(int which) {
        uint8_t *slot = this->shared + this->ring.i * L::SLOT;
        if constexpr (L::PACKED) {
            unpack<TYPE, L>(slot, this->shared + L::UNPACKED + which * L::TILE, tid, MATH_THREADS);
        }
    }
};

// An MmaUnit is one unit, of up to 16 * MT pairs. Warps share the work on scores and on values differently:
// of scores a warp has SM tiles of 16 rows by N tiles of 8 keys, and of values M tiles of rows by C tiles of
// 8 columns.
template <int D, int TYPE, bool HOPPER, int MT> struct MmaUnit {
    using L = Layout<D, TYPE, HOPPER, false>;
    static constexpr int KEYS = L::KEYS;
    static constexpr int M = MT, SM = 1;
    static constexpr int SHARE = WARPS; // as many warps share rows of values
    static constexpr int C = D / 8 / SHARE;
    static constexpr int S_SHARE = MT == 1 ? 8 : MT == 2 ? 4 : 2; // as many warps share rows of scores
    static constexpr int N = KEYS / 8 / S_SHARE > 0 ? KEYS / 8 / S_SHARE : 1;
    static constexpr int N_WARPS = KEYS / 8 / N; // as many of them have keys
    static constexpr bool SAME_ROWS = SM == M;
    // So many of Q's D / 16 steps stay in registers, which hold no more.
    static constexpr int KEPT = MT == 1 && D == 256 ? 8 : MT <= 2 && D < 256 ? D / 16 : 0;
    static_assert(C > 0 && (!SAME_ROWS || S_SHARE == SHARE), "all warps have columns");

    MmaBlock<D, TYPE, HOPPER> &b;
    const AttentionParams &a = b.a;
    const int lane = b.lane;
    // Of values, a warp has this part of the columns, in rows from m0 on.
    const int part = b.warp % SHARE, m0 = b.warp / SHARE * M * 16;
    // Of scores, a warp has this part of the keys, in rows from s0 on.
    const int s_part = b.warp % S_SHARE, s0 = b.warp / S_SHARE * SM * 16;
    const bool scores = s_part < N_WARPS && s0 < MT * 16; // it says that this warp has scores
    uint32_t kept_q[KEPT > 0 ? KEPT : 1][4];
    // These are the maxima so far of rows lane / 4 and lane / 4 + 8 of each tile: of values, and of scores
    // where these are others.
    float most[M][2], s_most[SAME_ROWS ? 1 : SM][2];
    float o[M][C][4] = {}, sum[M][4] = {};

    __device__ explicit MmaUnit(MmaBlock<D, TYPE, HOPPER> &block) : b(block) {
#pragma unroll
        for (int i = 0; i < M; i++) {
            most[i][0] = most[i][1] = -INFINITY;
        }
#pragma unroll
        for (int i = 0; i < (SAME_ROWS ? 1 : SM); i++) {
            s_most[i][0] = s_most[i][1] = -INFINITY;
        }
    }
    // Reads it from shared memory where it is needed, for want of registers.
    __device__ const UnitInfo &unit() const { return *b.unit; }
    __device__ int row_in(int first, int i, int half) const { return first + i * 16 + half * 8 + lane / 4; }
    __device__ int row_here(int first, int i, int half) const {
        return i * 16 + half * 8 + here(first + lane / 4);
    }

    __device__ void load_q() {
        load_queries<D, L>(a, unit(), b.shared, 0, 0, MT * 16, b.tid, MATH_THREADS);
        barrier(MATH_THREADS);
        if (KEPT > 0 && scores) {
#pragma unroll
            for (int d = 0; d < KEPT; d++) {
                load_matrices(kept_q[d], at_word(q_at(), d * 2));
            }
        }
    }
    __device__ uint32_t q_at() const { return b.base + L::Q + swizzle<L::ROW>(s0 + lane % 16, lane / 16); }

    // Computes the scores of this warp's rows and keys, in units of log2, which are -inf where a row does not
    // see the key.
    __device__ void score(int keys_at, int32_t first, float (&s)[SM][N][4]) {
        float odd[SM][N][4];
#pragma unroll
        for (int i = 0; i < SM; i++) {
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    s[i][n][e] = odd[i][n][e] = 0;
                }
            }
        }
        const uint32_t k0 = b.base + keys_at + swizzle<L::ROW>(s_part * N * 8 + lane % 8, lane / 8);
        const uint32_t q0 = q_at();
#pragma unroll
        for (int d = 0; d < D / 16; d += 2) {
            uint32_t k[N][4];
#pragma unroll
            for (int n = 0; n < N; n++) {
                load_matrices(k[n], at_word(k0, d * 2) + n * 8 * L::ROW);
            }
#pragma unroll
            for (int i = 0; i < SM; i++) {
                uint32_t q[2][4];
                if (d >= KEPT) {
                    load_matrices(q[0], at_word(q0, d * 2) + i * 16 * L::ROW);
                    load_matrices(q[1], at_word(q0, d * 2 + 2) + i * 16 * L::ROW);
                }
#pragma unroll
                for (int n = 0; n < N; n++) {
                    multiply(s[i][n], d < KEPT ? kept_q[d < KEPT ? d : 0] : q[0], k[n][0], k[n][1]);
                    multiply(odd[i][n], d < KEPT ? kept_q[d < KEPT ? d + 1 : 0] : q[1], k[n][2], k[n][3]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < SM; i++) {
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    s[i][n][e] = (s[i][n][e] + odd[i][n][e]) * a.score_scale;
                }
            }
        }
        if (a.softcap > 0) {
            cap(s);
        }
        if (a.window > 0 || first < a.first || first + KEYS > unit().past) {
            hide(first, s);
        }
    }
    __device__ void cap(float (&s)[SM][N][4]) const {
#pragma unroll
        for (int i = 0; i < SM; i++) {
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    // This is tanh, to 2^-22 absolutely.
                    const float power = exp2_fast(s[i][n][e] * 2.88539008f);
                    s[i][n][e] = (1.0f - __fdividef(2.0f, power + 1.0f)) * a.score_cap;
                }
            }
        }
    }
    __device__ void hide(int32_t first, float (&s)[SM][N][4]) const {
#pragma unroll
        for (int i = 0; i < SM; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = min(a.row_of(unit().row, row_here(s0, i, h)), MAX_ROWS - 1);
                const int32_t to = b.plan.position[row], from = lowest_visible(to, a.first, a.window);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const int32_t at = first + here(s_part * N * 8 + lane % 4 * 2) + n * 8;
                    s[i][n][2 * h] = at >= from && at <= to ? s[i][n][2 * h] : -INFINITY;
                    s[i][n][2 * h + 1] = at + 1 >= from && at + 1 <= to ? s[i][n][2 * h + 1] : -INFINITY;
                }
            }
        }
    }
    __device__ float *maxima(int row) const {
        return reinterpret_cast<float *>(b.shared + L::MAXIMA) + row * N_WARPS;
    }
    __device__ void share_maxima(const float (&s)[SM][N][4]) const {
#pragma unroll
        for (int i = 0; i < SM; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float x = -INFINITY;
#pragma unroll
                for (int n = 0; n < N; n++) {
                    x = fmaxf(x, fmaxf(s[i][n][2 * h], s[i][n][2 * h + 1]));
                }
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
                if (lane % 4 == 0) {
                    maxima(row_in(s0, i, h))[s_part] = x;
                }
            }
        }
    }
    __device__ float new_most(float x, int row) const {
        struct alignas(4 * N_WARPS < 16 ? 4 * N_WARPS : 16) Maxima {
            float x[N_WARPS];
        };
        const Maxima all = *reinterpret_cast<const Maxima *>(maxima(row));
#pragma unroll
        for (int w = 0; w < N_WARPS; w++) {
            x = fmaxf(x, all.x[w]);
        }
        return x;
    }

    // Writes weights into shared memory.
    __device__ void weigh(const float (&s)[SM][N][4]) {
        uint8_t *out = b.shared + L::P + swizzle<L::P_ROW>(s0 + lane / 4, s_part * N) + lane % 4 * 4;
#pragma unroll
        for (int i = 0; i < SM; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float next = new_most(
                    SAME_ROWS ? most[SAME_ROWS ? i : 0][h] : s_most[SAME_ROWS ? 0 : i][h], row_in(s0, i, h));
                const float origin = next == -INFINITY ? 0.0f : next;
                if (!SAME_ROWS) {
                    s_most[SAME_ROWS ? 0 : i][h] = next;
                }
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const int at = swizzle<L::P_ROW>(s0 + lane / 4, s_part * N + n) -
                                   swizzle<L::P_ROW>(s0 + lane / 4, s_part * N);
                    *reinterpret_cast<uint32_t *>(out + at + (i * 16 + h * 8) * L::P_ROW) = pack_halves(
                        exp2_fast(s[i][n][2 * h] - origin), exp2_fast(s[i][n][2 * h + 1] - origin));
                }
            }
        }
    }
    // Scales what was summed before to the new maximum.
    __device__ void shrink() {
#pragma unroll
        for (int i = 0; i < M; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float next = new_most(most[i][h], row_in(m0, i, h));
                const float factor = exp2_fast(most[i][h] - (next == -INFINITY ? 0.0f : next));
                most[i][h] = next;
#pragma unroll
                for (int c = 0; c < C; c++) {
                    o[i][c][2 * h] *= factor;
                    o[i][c][2 * h + 1] *= factor;
                }
                sum[i][2 * h] *= factor;
                sum[i][2 * h + 1] *= factor;
            }
        }
    }

    __device__ uint32_t weights_at() const {
        return b.base + L::P + swizzle<L::P_ROW>(m0 + lane % 16, lane / 16);
    }
    // Computes O += P V and sum += P 1.
    __device__ void add_values(int values_at) {
        const uint32_t p0 = weights_at();
        const uint32_t v0 =
            b.base + values_at + swizzle<L::ROW>(lane % 16, part * C + (C > 1 ? lane / 16 : 0));
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            uint32_t p[M][4];
#pragma unroll
            for (int i = 0; i < M; i++) {
                load_matrices(p[i], at_word(p0, k * 2) + i * 16 * L::P_ROW);
            }
#pragma unroll
            for (int c = 0; c < C; c += 2) {
                uint32_t v[4]; // where there is one column tile, the second half is not used
                load_transposed(v, at_word(v0, c) + k * 16 * L::ROW);
#pragma unroll
                for (int i = 0; i < M; i++) {
                    multiply(o[i][c], p[i], v[0], v[1]);
                    if (C > 1) {
                        multiply(o[i][c + (C > 1)], p[i], v[2], v[3]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < M; i++) { // each warp divides its columns by the sum
                multiply(sum[i], p[i], ONES, ONES);
            }
        }
    }

    // Leaves rows that see a value which is not finite without a sum.
    __device__ void clean(int values_at, int32_t first) {
        if (!L::clean_values(b.shared, values_at, b.tid, MATH_THREADS)) {
            return;
        }
#pragma unroll
        for (int i = 0; i < M; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = min(a.row_of(unit().row, row_here(m0, i, h)), MAX_ROWS - 1);
                const int32_t to = b.plan.position[row];
                if (L::sees_bad(b.shared, first, lowest_visible(to, a.first, a.window), to)) {
                    sum[i][2 * h] = NAN;
                }
            }
        }
        barrier(MATH_THREADS); // all have read the marks
    }

    __device__ void store() const {
        constexpr int TILES = C < 4 ? C : 4;
        const UnitInfo u = unit();
#pragma unroll
        for (int i = 0; i < M; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int pair = row_in(m0, i, h);
                if (pair >= u.n_rows * a.G) {
                    continue;
                }
                const int64_t row = a.row_of(u.row, pair), head = a.head_of(u.head, pair);
                const int64_t at = a.place(row, u.chunk, head);
                const float scale = mean_scale(sum[i][2 * h]);
#pragma unroll
                for (int c = 0; c < C; c += TILES) {
                    store_means<TILES>(a, at, D, part * C + c, &o[i][c], h, scale, lane % 4);
                }
                if (part == 0 && lane % 4 == 0) {
                    store_kept(a.sums + at, float2{most[i][h], sum[i][2 * h]});
                }
            }
        }
    }

    __device__ void leave_keys() {
        if (!L::PACKED) {
            b.leave();
        }
        barrier(MATH_THREADS); // all have left the weights and the values of the tile before
    }
    __device__ void run_tile(int32_t first) {
        b.wait();
        int keys_at = b.ring.i * L::SLOT;
        if (L::PACKED) {
            b.unpack_slot(0);
            b.leave();
            barrier(MATH_THREADS);
            keys_at = L::UNPACKED;
        }
        if (scores) {
            float s[SM][N][4];
            score(keys_at, first, s);
            share_maxima(s);
            leave_keys();
            weigh(s);
        } else {
            leave_keys();
        }
        shrink();
        b.wait();
        int values_at = b.ring.i * L::SLOT;
        if (L::PACKED) {
            b.unpack_slot(1);
            b.leave();
            values_at = L::UNPACKED + KEYS * L::ROW;
        }
        barrier(MATH_THREADS);
        if (unit().mixed(first, KEYS, a.window)) {
            clean(values_at, first);
        }
        add_values(values_at);
        if (!L::PACKED) {
            b.leave();
        }
    }
    __device__ void run() {
        load_q();
#pragma unroll 1
        for (int32_t first = unit().begin; first < unit().end; first += KEYS) {
            run_tile(first);
        }
        store();
    }
};

template <int D, int TYPE, bool HOPPER>
__device__ void mma_units(const AttentionParams &a, const Plan &plan, uint8_t *shared) {
    using L = Layout<D, TYPE, HOPPER, false>;
    MmaBlock<D, TYPE, HOPPER> block{a, plan, shared};
    Told told{L::told(shared)};
    wait_for_previous();
    for (;;) {
        const UnitInfo &unit = told.next();
        if (unit.n_rows == 0) {
            return;
        }
        barrier(MATH_THREADS); // all have left the queries before
        block.unit = &unit;
        // Else what units of all sizes find of these is kept from unit to unit, in memory. Smaller heads have room for it.
        if constexpr (!HOPPER && D == 256) {
            hold(block.tid);
            block.lane = block.tid % WARP;
            block.warp = block.tid / WARP;
        }
        const int tiles = (unit.n_rows * a.G + 15) / 16;
        if (tiles == 1) {
            MmaUnit<D, TYPE, HOPPER, 1>(block).run();
        } else if (tiles == 2) {
            MmaUnit<D, TYPE, HOPPER, 2>(block).run();
        } else if constexpr (L::MAX_M > 32) {
            MmaUnit<D, TYPE, HOPPER, 3>(block).run();
        }
    }
}

} // namespace
} // namespace luce
