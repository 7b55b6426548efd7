// Attention on the tensor cores, over F16 cells or cells that are unpacked to F16. Four warps of a block send K and V
// of its units' tiles of KEYS keys through a ring in shared memory (attention_load.cuh); the other eight compute.
//
// A tile: S = Q K^T, each warp some keys; the rows' maxima over warps through shared memory; P = exp2(S - maximum)
// as F16 into shared memory; O = O * exp2(old maximum - maximum) + P V, each warp some columns. Every sum has one
// order, for any number of rows: over D in two chains (even and odd steps of 16), over keys in steps of 16 by
// position. A key that a row does not see has weight 0, and a cell that no row of the unit sees is not read: zeros
// stand for it.
#pragma once

#include "attention_load.cuh"

namespace luce {
namespace {

constexpr uint32_t ONES = 0x3c003c00; // two F16

// One unit, of up to 16 * MT pairs. Warps share the work on scores and on values differently: of scores a warp has SM
// tiles of 16 rows by N tiles of 8 keys, of values M tiles of rows by C tiles of 8 columns.
template <int D, int TYPE, bool BIG, int MT> struct MmaUnit {
    using L = MmaLayout<D, TYPE, BIG>;
    static constexpr int KEYS = L::KEYS;
    static constexpr int M = MT > 3 ? MT / 2 : MT;
    static constexpr int SHARE = WARPS / (MT / M); // warps that share rows of values
    static constexpr int C = D / 8 / SHARE;
    static constexpr int SM = MT == 6 ? 3 : 1;
    static constexpr int S_SHARE = MT == 1              ? 8
                                   : MT == 2 || MT == 6 ? 4
                                                        : 2; // warps that share rows of scores
    static constexpr int N = KEYS / 8 / S_SHARE > 0 ? KEYS / 8 / S_SHARE : 1;
    static constexpr int N_WARPS = KEYS / 8 / N; // of them, those that have keys
    static constexpr bool SAME_ROWS = SM == M;
    static constexpr bool KEEP_Q = MT <= 2; // in registers
    static_assert(C > 0 && (!SAME_ROWS || S_SHARE == SHARE), "all warps have columns");

    MmaBlock<D, TYPE, BIG> &b;
    const AttentionParams &a = b.a;
    const int lane = b.lane;
    const int part = b.warp % SHARE, m0 = b.warp / SHARE * M * 16; // of values: columns, first row
    const int s_part = b.warp % S_SHARE, s0 = b.warp / S_SHARE * SM * 16; // of scores: keys, first row
    const bool scores = s_part < N_WARPS && s0 < MT * 16; // this warp has some
    uint32_t kept_q[KEEP_Q ? D / 16 : 1][4];
    // maximum so far of rows lane / 4 and lane / 4 + 8 of each tile: of values, and of scores where these are others
    float most[M][2], s_most[SAME_ROWS ? 1 : SM][2];
    float o[M][C][4] = {}, sum[M][4] = {};

    __device__ explicit MmaUnit(MmaBlock<D, TYPE, BIG> &block) : b(block) {
#pragma unroll
        for (int i = 0; i < M; i++) {
            most[i][0] = most[i][1] = -INFINITY;
        }
#pragma unroll
        for (int i = 0; i < (SAME_ROWS ? 1 : SM); i++) {
            s_most[i][0] = s_most[i][1] = -INFINITY;
        }
    }
    // Read from shared memory where it is needed, for want of registers.
    __device__ const TileInfo &unit() const {
        return *reinterpret_cast<const TileInfo *>(b.shared + L::UNIT);
    }
    __device__ int row_in(int first, int i, int half) const { return first + i * 16 + half * 8 + lane / 4; }
    __device__ int row_here(int first, int i, int half) const {
        return i * 16 + half * 8 + here(first + lane / 4);
    }

    __device__ void load_q() {
        const TileInfo &u = unit();
#pragma unroll 2
        for (int x = b.tid; x < MT * 16 * (D / 8); x += MATH_THREADS) {
            const int pair = x / (D / 8), word = x % (D / 8);
            uint4 halves = {};
            if (pair < u.n_rows * a.G) {
                const int64_t row = a.row_of(u.row, pair), head = a.head_of(u.head, pair);
                const float4 *q = reinterpret_cast<const float4 *>(a.q + (row * a.H + head) * D + word * 8);
                const float4 x = q[0], y = q[1];
                halves = {pack_halves(x.x, x.y), pack_halves(x.z, x.w), pack_halves(y.x, y.y),
                          pack_halves(y.z, y.w)};
            }
            *reinterpret_cast<uint4 *>(b.shared + L::Q + swizzle<L::ROW>(pair, word)) = halves;
        }
        barrier<MATH_THREADS>();
        if (KEEP_Q && scores) {
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
                load_matrices(kept_q[KEEP_Q ? d : 0], at_word(q_at(), d * 2));
            }
        }
    }
    __device__ uint32_t q_at() const { return b.base + L::Q + swizzle<L::ROW>(s0 + lane % 16, lane / 16); }

    // Scores of this warp's rows and keys, in units of log2; -inf where a row does not see the key.
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
                if (!KEEP_Q) {
                    load_matrices(q[0], at_word(q0, d * 2) + i * 16 * L::ROW);
                    load_matrices(q[1], at_word(q0, d * 2 + 2) + i * 16 * L::ROW);
                }
#pragma unroll
                for (int n = 0; n < N; n++) {
                    multiply(s[i][n], KEEP_Q ? kept_q[KEEP_Q ? d : 0] : q[0], k[n][0], k[n][1]);
                    multiply(odd[i][n], KEEP_Q ? kept_q[KEEP_Q ? d + 1 : 0] : q[1], k[n][2], k[n][3]);
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
                    // tanh, to 2^-22 absolutely
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

    // Weights into shared memory.
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
    // What was summed before to the new maximum.
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
    // O += P V and sum += P 1, of n keys in whole steps of 16
    __device__ void add_values(int values_at, int n) {
        const uint32_t p0 = weights_at();
        const uint32_t v0 =
            b.base + values_at + swizzle<L::ROW>(lane % 16, part * C + (C > 1 ? lane / 16 : 0));
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            if (k * 16 >= n) {
                break;
            }
            uint32_t p[M][4];
#pragma unroll
            for (int i = 0; i < M; i++) {
                load_matrices(p[i], at_word(p0, k * 2) + i * 16 * L::P_ROW);
            }
#pragma unroll
            for (int c = 0; c < C; c += 2) {
                uint32_t v[4]; // of one column tile the second half is not used
                load_transposed(v, at_word(v0, c) + k * 16 * L::ROW);
#pragma unroll
                for (int i = 0; i < M; i++) {
                    multiply(o[i][c], p[i], v[0], v[1]);
                    if (C > 1) {
                        multiply(o[i][c + (C > 1)], p[i], v[2], v[3]);
                    }
                }
            }
            if (part == 0) {
#pragma unroll
                for (int i = 0; i < M; i++) {
                    multiply(sum[i], p[i], ONES, ONES);
                }
            }
        }
    }

    // ---- values that are not finite ----
    // A weight of 0 hides a value from a row unless the value is Inf or NaN. Of the keys of a tile only a path's own
    // rows are hidden from some of its rows; where such a value is not finite, the tile is added row by row.
    __device__ bool finite(int values_at, int32_t first) const {
        const int from = max(unit().past - first, 0), to = min(KEYS, unit().end - first);
        bool good = true;
        for (int u = here(b.tid) + from * (D / 8); u < to * (D / 8); u += MATH_THREADS) {
            const uint4 words = *reinterpret_cast<const uint4 *>(b.shared + values_at +
                                                                 swizzle<L::ROW>(u / (D / 8), u % (D / 8)));
            for (const uint32_t w : {words.x, words.y, words.z, words.w}) {
                good = good && (w & 0x7c00) != 0x7c00 && (w & 0x7c000000) != 0x7c000000;
            }
        }
        return good;
    }
    __device__ void add_by_row(int values_at, int32_t first) {
#pragma unroll 1
        for (int r = unit().n_rows - 1; r >= 0; r--) { // more and more keys are hidden
            const int32_t hidden = max(b.plan.position[unit().row + r] + 1 - first, 0);
            barrier<MATH_THREADS>();
            for (int u = here(b.tid) + hidden * (D / 8); u < KEYS * (D / 8); u += MATH_THREADS) {
                *reinterpret_cast<uint4 *>(b.shared + values_at +
                                           swizzle<L::ROW>(u / (D / 8), u % (D / 8))) = {};
            }
            barrier<MATH_THREADS>();
#pragma unroll
            for (int c = 0; c < C; c++) {
#pragma unroll
                for (int i = 0; i < M; i++) {
                    float x[4] = {o[i][c][0], o[i][c][1], o[i][c][2], o[i][c][3]};
#pragma unroll 1
                    for (int k = 0; k < KEYS / 16; k++) {
                        uint32_t w[4], v[4];
                        load_matrices(w, at_word(here(weights_at()), k * 2) + i * 16 * L::P_ROW);
                        load_transposed(v, b.base + values_at +
                                               swizzle<L::ROW>(k * 16 + here(lane) % 16, part * C + c));
                        multiply(x, w, v[0], v[1]);
                    }
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        o[i][c][e] = a.row_of(0, row_here(m0, i, e / 2)) == r ? x[e] : o[i][c][e];
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < M && part == 0; i++) {
#pragma unroll 1
            for (int k = 0; k < KEYS / 16; k++) {
                uint32_t w[4];
                load_matrices(w, at_word(weights_at(), k * 2) + i * 16 * L::P_ROW);
                multiply(sum[i], w, ONES, ONES);
            }
        }
    }

    __device__ void store() const {
        const TileInfo u = unit();
#pragma unroll
        for (int i = 0; i < M; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int pair = row_in(m0, i, h);
                if (pair >= u.n_rows * a.G) {
                    continue;
                }
                const int64_t row = a.row_of(u.row, pair), head = a.head_of(u.head, pair);
                const int64_t at = (row * a.H + head) * a.chunks + u.chunk;
                float *out = a.partial + at * D + part * C * 8 + lane % 4 * 2;
#pragma unroll
                for (int c = 0; c < C; c++) {
                    *reinterpret_cast<float2 *>(out + c * 8) = {o[i][c][2 * h], o[i][c][2 * h + 1]};
                }
                if (part == 0 && lane % 4 == 0) {
                    a.sums[at] = {most[i][h], sum[i][2 * h]};
                }
            }
        }
    }

    __device__ void leave_keys() {
        if (!L::PACKED) {
            b.leave();
        }
        barrier<MATH_THREADS>(); // all have left the weights and the values of the tile before
    }
    __device__ void run_tile(int32_t first) {
        b.wait();
        int keys_at = b.ring.slot * L::SLOT;
        if (L::PACKED) {
            b.unpack(0);
            b.leave();
            barrier<MATH_THREADS>();
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
        int values_at = b.ring.slot * L::SLOT;
        if (L::PACKED) {
            b.unpack(1);
            b.leave();
            values_at = L::UNPACKED + KEYS * L::ROW;
        }
        barrier<MATH_THREADS>();
        if (unit().shared == 0 || barrier_and<MATH_THREADS>(finite(values_at, first))) {
            add_values(values_at, unit().end - first);
        } else {
            add_by_row(values_at, first);
        }
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

template <int D, int TYPE, bool BIG>
__device__ void compute_units(const AttentionParams &a, const Plan &plan, uint8_t *shared) {
    using L = MmaLayout<D, TYPE, BIG>;
    MmaBlock<D, TYPE, BIG> block{a, plan, shared};
    for (;;) {
        block.wait();
        const int tiles = (block.info().n_rows * a.G + 15) / 16;
        if (tiles == 0) {
            return;
        }
        barrier<MATH_THREADS>(); // all have left the unit before
        if (block.tid == 0) {
            *reinterpret_cast<TileInfo *>(shared + L::UNIT) = block.info();
        }
        barrier<MATH_THREADS>();
        if (tiles == 1) {
            MmaUnit<D, TYPE, BIG, 1>(block).run();
        } else if (tiles == 2) {
            MmaUnit<D, TYPE, BIG, 2>(block).run();
        } else if (tiles == 3) {
            MmaUnit<D, TYPE, BIG, 3>(block).run();
        } else if constexpr (BIG) {
            if (tiles == 4) {
                MmaUnit<D, TYPE, BIG, 4>(block).run();
            } else {
                MmaUnit<D, TYPE, BIG, 6>(block).run();
            }
        }
    }
}

template <int D, int TYPE, bool BIG>
__device__ void mma_attention(const AttentionParams &a, uint8_t *shared) {
    using L = MmaLayout<D, TYPE, BIG>;
    Plan &plan = *reinterpret_cast<Plan *>(shared + L::PLAN);
    if (threadIdx.x < L::SLOTS) {
        init_barrier(shared_address(shared) + L::FULL + threadIdx.x * 8, LOAD_THREADS + 1);
        init_barrier(shared_address(shared) + L::EMPTY + threadIdx.x * 8, WARPS);
    }
    plan.make(a);
    if (threadIdx.x < MATH_THREADS) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
#endif
        compute_units<D, TYPE, BIG>(a, plan, shared);
    } else {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
#endif
        MmaLoader<D, TYPE, BIG>{a, plan, shared}.run();
    }
}

} // namespace
} // namespace luce
