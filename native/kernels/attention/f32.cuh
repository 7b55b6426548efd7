// Computes attention over F32 cells in F32, which tests and goldens compare with. A warp has two of a unit's
// pairs. In a score a lane has a key, and in a sum it has columns. A key that a row does not see is skipped.
#pragma once

#include "attention/units.cuh"
#include "common/lanes.cuh"
#include "common/overlap.cuh"

namespace luce {
namespace {

template <int D> struct F32Layout {
    static constexpr int KEYS = F32_KEYS, ROW = f32_row(D);
    static constexpr int PAIRS = F32_M / (F32_THREADS / WARP); // a warp has so many
    static constexpr int COLUMNS = D / WARP; // a lane has so many: lane, lane + 32 ..
    float q[F32_M][D];
    float k[KEYS][ROW], v[KEYS][ROW];
    Plan plan;
};
static_assert(sizeof(F32Layout<64>) == f32_bytes(64) && sizeof(F32Layout<128>) == f32_bytes(128) &&
              sizeof(F32Layout<256>) == f32_bytes(256));

template <int D> struct F32Unit {
    using L = F32Layout<D>;
    const AttentionParams &a;
    L &sh;
    const Cursor &unit;
    const int tid = threadIdx.x, lane = tid % WARP, pair0 = tid / WARP * L::PAIRS;
    float most[L::PAIRS], sum[L::PAIRS] = {}, o[L::PAIRS][L::COLUMNS] = {};

    __device__ F32Unit(const AttentionParams &args, L &shared, const Cursor &u)
        : a(args), sh(shared), unit(u) {
        for (float &m : most) {
            m = -INFINITY;
        }
    }
    __device__ int64_t row_of(int pair) const { return a.row_of(unit.row, pair); }
    __device__ int64_t head_of(int pair) const { return a.head_of(unit.head, pair); }

    __device__ void load_q() {
        for (int u = tid; u < unit.n_rows * a.G * (D / 4); u += F32_THREADS) {
            const int pair = u / (D / 4), i = u % (D / 4) * 4;
            *reinterpret_cast<float4 *>(&sh.q[pair][i]) =
                *reinterpret_cast<const float4 *>(a.q + (row_of(pair) * a.H + head_of(pair)) * D + i);
        }
    }
    __device__ void load_tile(int32_t first) {
        for (int u = tid; u < L::KEYS * (D / 4); u += F32_THREADS) {
            const int row = u / (D / 4), i = u % (D / 4) * 4;
            const int32_t key = first + row;
            float4 k = {}, v = {};
            if (key >= unit.low && key < unit.end) {
                const int64_t at = (unit.pool_row(key) * D + i) * 4;
                k = *reinterpret_cast<const float4 *>(a.pool.k + at);
                v = *reinterpret_cast<const float4 *>(a.pool.v + at);
            }
            *reinterpret_cast<float4 *>(&sh.k[row][i]) = k;
            *reinterpret_cast<float4 *>(&sh.v[row][i]) = v;
        }
    }

    __device__ float score(int pair) const { // it returns the score of this lane's key
        float4 dot = {};
#pragma unroll 8
        for (int i = 0; i < D; i += 4) {
            const float4 q = *reinterpret_cast<const float4 *>(&sh.q[pair][i]);
            const float4 k = *reinterpret_cast<const float4 *>(&sh.k[lane][i]);
            dot.x = fmaf(q.x, k.x, dot.x);
            dot.y = fmaf(q.y, k.y, dot.y);
            dot.z = fmaf(q.z, k.z, dot.z);
            dot.w = fmaf(q.w, k.w, dot.w);
        }
        const float x = ((dot.x + dot.y) + (dot.z + dot.w)) * a.score_scale;
        return a.softcap > 0 ? tanhf(x) * a.score_cap : x;
    }
    __device__ void add_tile(int i, int32_t first) {
        const int pair = pair0 + i;
        if (pair >= unit.n_rows * a.G) {
            return;
        }
        const int32_t p = sh.plan.position[row_of(pair)], from = lowest_visible(p, a.first, a.window) - first;
        const int32_t to = min(p - first, L::KEYS - 1);
        const bool seen = lane >= from && lane <= to;
        const float s = seen ? score(pair) : -INFINITY;
        const float next = warp_max(fmaxf(most[i], s));
        const float origin = next == -INFINITY ? 0.0f : next;
        const float weight = exp2f(s - origin), shrink = exp2f(most[i] - origin);
        most[i] = next;
        sum[i] = fmaf(sum[i], shrink, warp_sum(weight));
#pragma unroll
        for (int c = 0; c < L::COLUMNS; c++) {
            o[i][c] *= shrink;
        }
        for (int k = max(from, 0); k <= to; k++) {
            const float w = __shfl_sync(~0u, weight, k);
#pragma unroll
            for (int c = 0; c < L::COLUMNS; c++) {
                o[i][c] = fmaf(w, sh.v[k][c * WARP + lane], o[i][c]);
            }
        }
    }
    __device__ void run() {
        for (int32_t first = unit.begin; first < unit.end; first += L::KEYS) {
            __syncthreads(); // all have left the tile before, and Q of the unit before
            if (first == unit.begin) {
                load_q();
            }
            load_tile(first);
            __syncthreads();
#pragma unroll
            for (int i = 0; i < L::PAIRS; i++) {
                add_tile(i, first);
            }
        }
#pragma unroll
        for (int i = 0; i < L::PAIRS; i++) {
            const int pair = pair0 + i;
            if (pair < unit.n_rows * a.G) {
                const int64_t at = a.place(row_of(pair), unit.chunk, head_of(pair));
                float *mean = static_cast<float *>(a.means) + at * D + lane;
                const float scale = sum[i] == 0 ? 0.0f : 1 / sum[i];
#pragma unroll
                for (int c = 0; c < L::COLUMNS; c++) {
                    mean[c * WARP] = o[i][c] * scale;
                }
                if (lane == 0) {
                    a.sums[at] = {most[i], sum[i]};
                }
            }
        }
    }
};

template <int D> __device__ void f32_attention(const AttentionParams &a, uint8_t *shared) {
    F32Layout<D> &sh = *reinterpret_cast<F32Layout<D> *>(shared);
    sh.plan.have(a, F32_M);
    if (!sh.plan.stays()) {
        return;
    }
    wait_for_previous();
    for (Cursor unit(a, sh.plan); unit.next();) {
        F32Unit<D>(a, sh, unit).run();
    }
}

} // namespace
} // namespace luce
