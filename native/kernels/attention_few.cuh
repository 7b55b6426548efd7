// Computes attention's units of few pairs on Hopper's tensor cores with keys as rows, so that a thread has few
// scores and few values: S^T = K Q^T in registers, P^T = exp2(S^T - origin) as F16 through shared memory,
// O^T = O^T * exp2(old origin - origin) + V^T P^T, and the sums of weights are a matrix of ones times P^T. Each
// sum has the order that it has with pairs as rows (attention_wgmma.cuh): over D and over keys in steps of 16.
#pragma once

#include "attention_group.cuh"

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
template <int D, int TYPE, Form FORM> struct FewUnit : GroupUnit<D, TYPE, FORM> {
    using Base = GroupUnit<D, TYPE, FORM>;
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
    __device__ int64_t place(int pair, int32_t chunk) const {
        const int64_t row = a.row_of(unit.row, pair), head = a.head_of(unit.head, pair);
        return a.place(row, chunk, head);
    }
    __device__ bool valid(int pair) const { return pair < unit.n_rows * a.G; }
    // Of lanes that have neighbouring columns, the odd one gets both columns of the second pair, and the other those of the
    // first.
    const bool odd = (lane & 4) != 0;
    const int mine = pair(odd ? 1 : 0);
    const int tile = warp * 2; // of a panel
    // Calls put(panel, two columns of `tile`, two of the next one) for the thread's part of the means.
    template <typename Put> __device__ void each_mean(Put put) const {
        const float scale[2] = {mean_scale(sum[0][0]), mean_scale(sum[0][1])};
#pragma unroll
        for (int i = 0; i < PANELS; i++) {
            const uint32_t x = pack_halves(o[i][0][0] * scale[0], o[i][0][2] * scale[0]);
            const uint32_t y = pack_halves(o[i][0][1] * scale[1], o[i][0][3] * scale[1]);
            const uint32_t other = __shfl_xor_sync(~0u, odd ? x : y, 4);
            const uint32_t low = odd ? other : x, high = odd ? y : other; // of two columns
            put(i, __byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
        }
    }
    __device__ void store() {
        if constexpr (L::STRANDED) {
            if (__builtin_expect(unit.piece() > 0, false)) {
                keep((unit.piece() - 1) % BATCH);
                if (unit.piece() % BATCH == 0) {
                    add_batch();
                }
                return;
            }
        }
        const int64_t at = place(mine, unit.chunk);
        each_mean([&](int i, uint32_t x, uint32_t y) {
            if (valid(mine)) {
                store_columns(a, at, D, i * 8 + tile, lane / 8, x, y);
            }
        });
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (tid < 4 && valid(pair(e))) {
                store_kept(a.sums + place(pair(e), unit.chunk), float2{most[e], sum[0][e]});
            }
        }
    }

    // A chunk of a strand is kept until those of its batch are added up: each thread's part of its mean beside the queries,
    // which have few rows here, and behind them, as those of one more chunk, {maximum, sum of weights} of what was added.
    __device__ uint2 *kept_mean(int i, int panel) const {
        static_assert(BATCH * GROUP_THREADS * 8 <= (L::HALF_M - FEW_PAIRS) * 128, "there is room");
        return reinterpret_cast<uint2 *>(shared + (q_at - base) + FEW_PAIRS * 128 + panel * L::MAX_M * 128) +
               i * GROUP_THREADS + tid;
    }
    __device__ float2 *kept_sums(int i) const {
        return reinterpret_cast<float2 *>(shared + L::KEPT) + (group * (BATCH + 1) + i) * FEW_PAIRS;
    }
    __device__ void keep(int i) const {
        each_mean([&](int panel, uint32_t x, uint32_t y) { *kept_mean(i, panel) = uint2{x, y}; });
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (tid < 4) {
                kept_sums(i)[pair(e)] = {most[e], sum[0][e]};
            }
        }
    }
    // Adds a batch to those before it, as the second kernel does (Sum::add_chunks), and leaves the strand's sum as
    // attention_parts.h says.
    __device__ void add_batch() const {
        const bool first = unit.piece() == BATCH;
        group_barrier(group);
        const float2 had = first ? float2{-INFINITY, 0} : kept_sums(BATCH)[mine];
        float largest = had.x, w[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            largest = fmaxf(largest, kept_sums(i)[mine].x);
        }
        const float zero = Base::origin(largest), factor = exp2f(had.x - zero);
        float weight = had.y * factor;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float2 s = kept_sums(i)[mine];
            w[i] = s.y * exp2f(s.x - zero);
            weight += w[i];
        }
        const int32_t chunk = unit.chunk - (unit.piece() - 1) * STRANDS;
        const int64_t at = place(mine, chunk + warp % 2 * STRANDS);
        float4 *const to = reinterpret_cast<float4 *>(a.means) + at * (D / 8) + tile / 4 * 4 + lane / 8;
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++) {
            float4 v = {0, 0, 0, 0};
            if (!first && valid(mine)) { // the same thread has left them
                v = to[panel * 8];
                v = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const uint2 mean = *kept_mean(i, panel);
                const float2 x = __half22float2(halves(mean.x)), y = __half22float2(halves(mean.y));
                v = {fmaf(x.x, w[i], v.x), fmaf(x.y, w[i], v.y), fmaf(y.x, w[i], v.z), fmaf(y.y, w[i], v.w)};
            }
            if (valid(mine)) {
                store_kept(to + panel * 8, v);
            }
        }
        if (tid < FEW_PAIRS && first) {
            kept_sums(BATCH)[mine] = {largest, weight};
        } else if (tid < FEW_PAIRS && valid(mine)) {
            store_kept(a.sums + place(mine, chunk), float2{largest, weight});
        }
    }
    __device__ void run(uint32_t turn) { Base::run(*this, turn); }
};

} // namespace
} // namespace luce
