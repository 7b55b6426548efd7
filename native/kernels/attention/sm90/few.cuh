// Computes attention's units of few pairs on Hopper's tensor cores with keys as rows, so that a thread has few
// scores and few values: S^T = K Q^T in registers, P^T = exp2(S^T - origin) as F16 through shared memory,
// O^T = O^T * exp2(old origin - origin) + V^T P^T, and the sums of weights are a matrix of ones times P^T. Each
// sum has the order that it has with pairs as rows (attention/sm90/wgmma.cuh): over D and over keys in steps of 16.
#pragma once

#include "attention/sm90/group.cuh"

namespace luce {
namespace {

// Stores a 16 x 8 matrix of F16, of which a thread has rows lane / 4 (a) and lane / 4 + 8 (b) in columns
// lane % 4 * 2 and the next, by columns: `at` is where column lane % 8 has its rows 0 to 7 (lanes 0 to 7) or 8
// to 15 (lanes 8 to 15).
__device__ void store_by_columns(uint32_t at, uint32_t a, uint32_t b) {
#if ROWMM_WGMMA
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b)
                 : "memory");
#endif
}

// A FewUnit is a unit of up to FEW_PAIRS pairs. A thread has rows lane / 4 and lane / 4 + 8
// of its warp's 16 keys or columns, for the pairs pair(0) and pair(1): elements 0 and 1 are of the first row, and 2 and 3 of
// the second.
template <int D, int TYPE, bool AHEAD> struct FewUnit : GroupUnit<D, TYPE, AHEAD> {
    using Base = GroupUnit<D, TYPE, AHEAD>;
    using L = typename Base::L;
    using Base::a, Base::alone, Base::base, Base::group, Base::lane, Base::plan, Base::shared, Base::tid,
        Base::unit, Base::KEYS, Base::PANELS, Base::origin;
    static_assert(FEW_PAIRS == 8, "a matrix has so many columns");

    const int warp = tid / WARP;
    const uint32_t q_at, p_at = base + L::P + group * FEW_PAIRS * L::P_ROW;
    float most[2] = {-INFINITY, -INFINITY}, sum[1][4] = {}; // all rows of `sum` are the same
    float o[PANELS][1][4] = {};

    __device__ FewUnit(const AttentionParams &args, const Plan &p, typename Base::Source &taker,
                       const UnitInfo &u, int q_row)
        : Base(args, p, taker, u), q_at(base + L::Q + q_row * 128) {}
    __device__ int pair(int e) const { return lane % 4 * 2 + e; }

    __device__ void score(uint32_t keys_at, float (&s)[1][4]) const {
        const Matrix keys(keys_at), q(q_at);
        wgmma_begin();
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            wgmma_few<0>(s, keys.at(d / 4 * KEYS * 128 + d % 4 * 32),
                         q.at(d / 4 * L::MAX_M * 128 + d % 4 * 32), d > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(s);
    }
    __device__ void hide(int32_t first, float (&s)[4]) const {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int2 seen = Base::seen(pair(e));
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int32_t at = first + warp * 16 + h * 8 + lane / 4;
                float &x = s[2 * h + e];
                x = at >= seen.x && at <= seen.y ? x : -INFINITY;
            }
        }
    }
    // Moves the origins that the tile passes by more than SLACK to the tile's maxima, and scales what was
    // summed before.
    __device__ void move(const float (&s)[4]) {
        float *const maxima = reinterpret_cast<float *>(shared + L::MAXIMA) + group * 4 * FEW_PAIRS;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float x = fmaxf(s[e], s[2 + e]);
#pragma unroll
            for (int mask = 4; mask < WARP; mask *= 2) {
                x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
            }
            if (lane < 4) {
                maxima[warp * FEW_PAIRS + pair(e)] = x;
            }
        }
        group_barrier(group);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float tile = -INFINITY;
#pragma unroll
            for (int w = 0; w < 4; w++) {
                tile = fmaxf(tile, maxima[w * FEW_PAIRS + pair(e)]);
            }
            tile *= Base::scale();
            const bool moves = tile > most[e] + SLACK;
            const float factor = moves ? exp2_fast(most[e] - tile) : 1.0f;
            most[e] = moves ? tile : most[e];
            sum[0][e] *= factor;
            sum[0][2 + e] *= factor;
#pragma unroll
            for (int i = 0; i < PANELS; i++) {
                o[i][0][e] *= factor;
                o[i][0][2 + e] *= factor;
            }
        }
    }
    // Leaves the tile's weights in shared memory, by pairs.
    __device__ void weigh(int32_t first, float (&s)[4]) {
        const float scale = Base::scale();
        if (a.softcap > 0) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[e] = Base::cap(s[e]);
            }
        }
        if (Base::hides(first)) {
            hide(first, s);
        }
        bool high = false;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            high = high || s[e] * scale > most[e % 2] + SLACK;
        }
        if (barrier_or(GROUP_THREADS, group, high)) { // all have left the weights before, too
            move(s);
        }
        float w[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            w[e] = exp2_fast(fmaf(s[e], scale, -origin(most[e % 2])));
        }
        const int row = lane % 8, word = warp * 2 + lane / 8 % 2;
        store_by_columns(p_at + row * L::P_ROW + ((word ^ row) & 7) * 16, pack_halves(w[0], w[1]),
                         pack_halves(w[2], w[3]));
        show_to_wgmma();
        group_barrier(group);
    }
    __device__ void add_values(uint32_t values_at) {
        const uint32_t ones[4] = {ONES, ONES, ONES, ONES};
        const Matrix values(values_at), weights(p_at);
        Base::pin(sum, o);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
#pragma unroll
            for (int i = 0; i < PANELS; i++) {
                wgmma_few<1>(o[i], values.at(i * KEYS * 128 + k * 16 * 128), weights.at(k * 32), true);
            }
            wgmma_few(sum, ones, weights.at(k * 32));
        }
        wgmma_commit();
        wgmma_wait<0>();
        Base::pin(sum, o);
    }
    __device__ void clean(int values_at, int32_t first) {
        Base::clean(values_at, [&] {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int2 seen = Base::seen(pair(e));
                if (L::sees_bad(shared, first, seen.x, seen.y, alone)) {
                    sum[0][e] = sum[0][2 + e] = NAN;
                }
            }
        });
    }
    __device__ void run_tile(int32_t first) {
        float s[1][4];
        const int keys_at = Base::take(0);
        Base::pass_on(first);
        score(base + keys_at, s);
        Base::leave();
        weigh(first, s[0]);
        const int values_at = Base::take(1);
        if (unit.mixed(first, KEYS, a.window)) {
            clean(values_at, first);
        }
        add_values(base + values_at);
        Base::leave();
    }
    // Returns the place of a pair's result.
    __device__ int64_t place(int pair) const {
        const int64_t row = a.row_of(unit.row, pair), head = a.head_of(unit.head, pair);
        return a.place(row, unit.chunk, head);
    }
    __device__ bool valid(int pair) const { return pair < unit.n_rows * a.G; }
    // Of lanes that have neighbouring columns, the odd one gets both columns of the second pair, and the other those of the
    // first.
    __device__ void store() const {
        const bool odd = (lane & 4) != 0;
        const int mine = pair(odd ? 1 : 0);
        const int64_t at = place(mine);
        const float scale[2] = {mean_scale(sum[0][0]), mean_scale(sum[0][1])};
#pragma unroll
        for (int i = 0; i < PANELS; i++) {
            const uint32_t x = pack_halves(o[i][0][0] * scale[0], o[i][0][2] * scale[0]);
            const uint32_t y = pack_halves(o[i][0][1] * scale[1], o[i][0][3] * scale[1]);
            const uint32_t other = __shfl_xor_sync(~0u, odd ? x : y, 4);
            const uint32_t low = odd ? other : x, high = odd ? y : other; // of two columns
            if (valid(mine)) {
                store_columns(a, at, D, i * 8 + warp * 2, lane / 8, __byte_perm(low, high, 0x5410),
                              __byte_perm(low, high, 0x7632));
            }
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (tid < 4 && valid(pair(e))) {
                store_kept(a.sums + place(pair(e)), float2{most[e], sum[0][e]});
            }
        }
    }
    __device__ void run(uint32_t turn) { Base::run(*this, turn); }
};

} // namespace
} // namespace luce
