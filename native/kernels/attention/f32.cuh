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
    static constexpr int M = f32_pairs(D), ROOMS = f32_rooms(D);
    static constexpr int PAIRS = M / (F32_THREADS / WARP); // a warp has so many
    static constexpr int COLUMNS = D / WARP; // a lane has so many: lane, lane + 32 ..
    float q[M][D];
    float cells[ROOMS][KEYS][ROW]; // keys in the first, values in the last
    Plan plan;
};
static_assert(sizeof(F32Layout<256>) == f32_bytes(256) && sizeof(F32Layout<512>) == f32_bytes(512));

template <int D> struct F32Unit {
    using L = F32Layout<D>;
    const AttentionParams &a;
    L &sh;
    const Cursor &unit;
    const int tid = threadIdx.x, lane = tid % WARP, pair0 = tid / WARP * L::PAIRS;
    float most[L::PAIRS], sum[L::PAIRS] = {}, o[L::PAIRS][L::COLUMNS] = {};
    float weight[L::PAIRS]; // of this lane's key

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
    __device__ void load_tile(int32_t first, const uint8_t *pool, float (*to)[L::ROW]) {
        for (int u = tid; u < L::KEYS * (D / 4); u += F32_THREADS) {
            const int row = u / (D / 4), i = u % (D / 4) * 4;
            const int32_t key = first + row;
            float4 x = {};
            if (key >= unit.low && key < unit.end) {
                x = *reinterpret_cast<const float4 *>(pool + (unit.pool_row(key) * D + i) * 4);
            }
            *reinterpret_cast<float4 *>(&to[row][i]) = x;
        }
    }

    __device__ float score(int pair) const { // it returns the score of this lane's key
        float4 dot = {};
#pragma unroll 8
        for (int i = 0; i < D; i += 4) {
            const float4 q = *reinterpret_cast<const float4 *>(&sh.q[pair][i]);
            const float4 k = *reinterpret_cast<const float4 *>(&sh.cells[0][lane][i]);
            dot.x = fmaf(q.x, k.x, dot.x);
            dot.y = fmaf(q.y, k.y, dot.y);
            dot.z = fmaf(q.z, k.z, dot.z);
            dot.w = fmaf(q.w, k.w, dot.w);
        }
        const float x = ((dot.x + dot.y) + (dot.z + dot.w)) * a.score_scale;
        return a.softcap > 0 ? tanhf(x) * a.score_cap : x;
    }
    // Returns the first and the last key of a tile that a pair sees, counted in the tile.
    __device__ int2 seen(int pair, int32_t first) const {
        const int32_t p = sh.plan.position[row_of(pair)];
        return {lowest_visible(p, a.first, a.window) - first, min(p - first, L::KEYS - 1)};
    }
    __device__ bool has(int i) const { return pair0 + i < unit.n_rows * a.G; } // the same in a warp
    __device__ void weigh(int i, int32_t first) {
        const int2 keys = seen(pair0 + i, first);
        const float s = lane >= keys.x && lane <= keys.y ? score(pair0 + i) : -INFINITY;
        const float next = warp_max(fmaxf(most[i], s));
        const float origin = next == -INFINITY ? 0.0f : next;
        const float shrink = exp2f(most[i] - origin);
        weight[i] = exp2f(s - origin);
        most[i] = next;
        sum[i] = fmaf(sum[i], shrink, warp_sum(weight[i]));
#pragma unroll
        for (int c = 0; c < L::COLUMNS; c++) {
            o[i][c] *= shrink;
        }
    }
    __device__ void add_values(int i, int32_t first) {
        const int2 keys = seen(pair0 + i, first);
        for (int k = max(keys.x, 0); k <= keys.y; k++) {
            const float w = __shfl_sync(~0u, weight[i], k);
#pragma unroll
            for (int c = 0; c < L::COLUMNS; c++) {
                o[i][c] = fmaf(w, sh.cells[L::ROOMS - 1][k][c * WARP + lane], o[i][c]);
            }
        }
    }
    __device__ void run() {
        for (int32_t first = unit.begin; first < unit.end; first += L::KEYS) {
            __syncthreads(); // all have left the tile before, and Q of the unit before
            if (first == unit.begin) {
                load_q();
            }
            load_tile(first, a.pool.k, sh.cells[0]);
            if (L::ROOMS == 2) {
                load_tile(first, a.pool.v, sh.cells[1 % L::ROOMS]);
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < L::PAIRS; i++) {
                if (has(i)) {
                    weigh(i, first);
                }
            }
            if (L::ROOMS == 1) {
                __syncthreads(); // all have left the keys
                load_tile(first, a.pool.v, sh.cells[0]);
                __syncthreads();
            }
#pragma unroll
            for (int i = 0; i < L::PAIRS; i++) {
                if (has(i)) {
                    add_values(i, first);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < L::PAIRS; i++) {
            const int pair = pair0 + i;
            if (has(i)) {
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
    sh.plan.have(a, F32Layout<D>::M);
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
