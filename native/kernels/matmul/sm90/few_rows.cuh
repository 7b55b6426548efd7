// Computes a prompt's products by wgmma where there are few rows, or few rows of weights, for Hopper:
// out[t][n] = sum_k W[n][k] * x[t][k], times the row's power of two, and its residual. One launch multiplies by several matrices.
// All tiles run at once, and nearly fill the device where matrices are large. (cuBLAS's tiles are often too many or too few, and what
// it leaves to do with a row takes a launch of its own.) Each sum goes over all of K in steps of 16,
// as with those of cuBLAS's algorithms that do not split K, so that its bits are the same.
// bench/results/2026-11-30-short-prompts-h200.txt has what this takes, and what else was tried.
//
// A warpgroup multiplies 64 rows. Two warps bring rows and weights as bulk copies of tiles to a ring in shared memory, where
// they lie as wgmma reads them (rows of 128 bytes, swizzled).
#pragma once

#include "common/device_limits.h"
#include "common/ring.cuh"
#include "matmul/few_rows_plan.h"
#include "matmul/prompt.h"
#include "matmul/sm90/wgmma.cuh"

#include <cuda.h>

#include <algorithm>
#include <utility>

namespace luce {
namespace {

struct FewMaps {
    CUtensorMap x, weights[GEMM_MAX_WEIGHTS];
};
struct FewArgs {
    const float *residual, *scales; // either may be null
    int T, steps, n; // there are so many matrices
    int rows; // that are copied for a tile
    struct {
        float *out;
        int64_t N;
        int first; // tile
    } matrices[GEMM_MAX_WEIGHTS];
};

// A step is panels of 64 k. There are several, so that fewer barriers are passed, and longer lines are read.
template <int ROWS, int COLUMNS> struct FewShape {
    static constexpr int PANELS = COLUMNS < 40 ? 4 : 2, PANEL_K = 64;
    static constexpr int K = PANELS * PANEL_K, PRODUCERS = 2, MULTIPLIERS = ROWS / 16; // warps
    static constexpr int THREADS = (MULTIPLIERS + PRODUCERS) * 32;
    static constexpr int X = ROWS * 128, W = COLUMNS * 128, STAGE = PANELS * (X + W);
    static constexpr int ROOM = 227 * 1024, ALIGNMENT = 1024; // of shared memory, and of a tile in it
    static constexpr int STAGES = (ROOM - ALIGNMENT) / (STAGE + 16); // each has two barriers
    static constexpr int SHARED = ALIGNMENT + STAGES * (STAGE + 16);
};

// Computes c (64 x N) += or = a (64 x 16) * b (N columns x 16), both in shared memory.
#define LUCE_FOUR(t, a, b, c, d) "%" #t #a ",%" #t #b ",%" #t #c ",%" #t #d
#define LUCE_EIGHT(t) LUCE_FOUR(t, 0, 1, 2, 3) "," LUCE_FOUR(t, 4, 5, 6, 7)
#define LUCE_TEN(t) LUCE_EIGHT(t) ",%" #t "8,%" #t "9,"
#define LUCE_C(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define LUCE_C2(i) LUCE_C(i), LUCE_C(i + 1)
#if ROWMM_WGMMA
#define LUCE_FEW(N, REGISTERS, A, B, ADD, ...)                                                               \
    __device__ __forceinline__ void few_wgmma(float (&c)[N / 8][4], uint64_t a, uint64_t b, bool add) {      \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD ", 0;\n"                                      \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" REGISTERS "}, %" #A ", %" #B \
                     ", p, 1, 1, 0, 0;\n}"                                                                   \
                     : __VA_ARGS__                                                                           \
                     : "l"(a), "l"(b), "r"(int(add)));                                                       \
    }
#else
#define LUCE_FEW(N, ...)                                                                                     \
    __device__ __forceinline__ void few_wgmma(float (&)[N / 8][4], uint64_t, uint64_t, bool) {}
#endif
// clang-format off
LUCE_FEW(8, LUCE_FOUR(, 0, 1, 2, 3), 4, 5, 6, LUCE_C(0))
LUCE_FEW(16, LUCE_EIGHT(), 8, 9, 10, LUCE_C2(0))
LUCE_FEW(40, LUCE_TEN() LUCE_EIGHT(1) ",%18,%19", 20, 21, 22, LUCE_C2(0), LUCE_C2(2), LUCE_C(4))
LUCE_FEW(48, LUCE_TEN() LUCE_TEN(1) LUCE_FOUR(2, 0, 1, 2, 3), 24, 25, 26, LUCE_C2(0), LUCE_C2(2), LUCE_C2(4))
LUCE_FEW(80, LUCE_TEN() LUCE_TEN(1) LUCE_TEN(2) LUCE_EIGHT(3) ",%38,%39", 40, 41, 42, LUCE_C2(0), LUCE_C2(2), LUCE_C2(4),
         LUCE_C2(6), LUCE_C2(8))
LUCE_FEW(96, LUCE_TEN() LUCE_TEN(1) LUCE_TEN(2) LUCE_TEN(3) LUCE_EIGHT(4), 48, 49, 50, LUCE_C2(0), LUCE_C2(2), LUCE_C2(4),
         LUCE_C2(6), LUCE_C2(8), LUCE_C2(10))
LUCE_FEW(112, LUCE_TEN() LUCE_TEN(1) LUCE_TEN(2) LUCE_TEN(3) LUCE_TEN(4) LUCE_FOUR(5, 0, 1, 2, 3) ",%54,%55", 56, 57, 58, LUCE_C2(0),
         LUCE_C2(2), LUCE_C2(4), LUCE_C2(6), LUCE_C2(8), LUCE_C2(10), LUCE_C2(12))
LUCE_FEW(136, LUCE_TEN() LUCE_TEN(1) LUCE_TEN(2) LUCE_TEN(3) LUCE_TEN(4) LUCE_TEN(5) LUCE_EIGHT(6), 68, 69, 70, LUCE_C2(0),
         LUCE_C2(2), LUCE_C2(4), LUCE_C2(6), LUCE_C2(8), LUCE_C2(10), LUCE_C2(12), LUCE_C2(14), LUCE_C(16))
// clang-format on
#undef LUCE_FEW
#undef LUCE_C2
#undef LUCE_C
#undef LUCE_TEN
#undef LUCE_EIGHT
#undef LUCE_FOUR

// Describes a tile in shared memory in rows of 128 bytes, swizzled, of which eight are 1024 bytes.
__device__ __forceinline__ uint64_t few_tile(uint32_t address) {
    constexpr uint32_t EIGHT_ROWS = 1024 / 16, SWIZZLED = 1u << 30;
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};"
        : "=l"(descriptor)
        : "r"((address & 0x3ffff) >> 4 | EIGHT_ROWS << 16), "r"(EIGHT_ROWS | SWIZZLED));
    return descriptor;
}

// Copies a tile of a matrix that begins at this k and row. What lies outside of the matrix is 0.
__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap &matrix, int k, int row,
                                          uint32_t barrier, bool keep) {
#if ROWMM_WGMMA
    uint64_t policy;
    if (keep) {
        asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    } else {
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    }
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(&matrix), "r"(k), "r"(row), "r"(barrier), "l"(policy)
                 : "memory");
#endif
}

// The grid is tiles of weights of all matrices, and tiles of rows.
template <int ROWS, int COLUMNS>
__global__ void __launch_bounds__(FewShape<ROWS, COLUMNS>::THREADS, 1)
    few_rows_kernel(const __grid_constant__ FewMaps maps, const __grid_constant__ FewArgs a) {
#if ROWMM_WGMMA
    using S = FewShape<ROWS, COLUMNS>;
    extern __shared__ uint8_t shared[];
    const uint32_t stages = (shared_address(shared) + S::ALIGNMENT - 1) & ~uint32_t(S::ALIGNMENT - 1);
    const uint32_t full = stages + S::STAGES * S::STAGE, empty = full + 8 * S::STAGES;
    const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
    int which = 0;
    while (which + 1 < a.n && int(blockIdx.x) >= a.matrices[which + 1].first) {
        which++;
    }
    const int first = (int(blockIdx.x) - a.matrices[which].first) * COLUMNS,
              first_row = int(blockIdx.y) * ROWS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; i++) {
            barrier_init(full + 8 * i, S::PRODUCERS);
            barrier_init(empty + 8 * i, S::MULTIPLIERS);
        }
        barrier_init_done();
    }
    __syncthreads();
    Place at;
    if (warp >= S::MULTIPLIERS) {
        if (lane == 0) {
            const bool rows = warp == S::MULTIPLIERS;
            const CUtensorMap &matrix = rows ? maps.x : maps.weights[which];
            const int tile = rows ? S::X : S::W, bytes = rows ? a.rows * 128 : S::W,
                      behind = rows ? 0 : S::PANELS * S::X, row = rows ? first_row : first;
            wait_for_previous();
            for (int i = 0; i < a.steps; i++, at.next(S::STAGES)) {
                barrier_wait(empty + 8 * at.i, at.parity ^ 1); // the phase before the first has ended
                copies_begin(full + 8 * at.i, S::PANELS * bytes);
#pragma unroll
                for (int p = 0; p < S::PANELS; p++) {
                    copy_tile(stages + at.i * S::STAGE + behind + p * tile, matrix, i * S::K + p * S::PANEL_K,
                              row, full + 8 * at.i, rows);
                }
            }
        }
        return;
    }
    wait_for_previous();
    let_next_start(); // behind the wait: a launch that reads ahead of its own wait finds what all ahead of this one have left
    float sums[COLUMNS / 8][4] = {};
    Place before;
    for (int i = 0; i < a.steps; i++, at.next(S::STAGES)) {
        barrier_wait(full + 8 * at.i, at.parity);
        const uint32_t stage = stages + at.i * S::STAGE, own = stage + warp / 4 * 64 * 128;
        wgmma_begin();
#pragma unroll
        for (int p = 0; p < S::PANELS; p++) {
#pragma unroll
            for (int k = 0; k < S::PANEL_K / 16; k++) {
                few_wgmma(sums, few_tile(own + p * S::X + k * 32),
                          few_tile(stage + S::PANELS * S::X + p * S::W + k * 32), i + p + k > 0);
            }
        }
        wgmma_commit();
        if (i > 0) { // the step before has been multiplied
            wgmma_wait<1>();
            if (lane == 0) {
                barrier_arrive(empty + 8 * before.i);
            }
            before.next(S::STAGES);
        }
    }
    wgmma_wait<0>();
    wgmma_pin(sums);
    const int64_t N = a.matrices[which].N;
    float *const out = a.matrices[which].out;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int t = first_row + warp * 16 + lane / 4 + h * 8, n = first + lane % 4 * 2;
        if (t >= a.T) {
            continue;
        }
        const int64_t begin = t * N + n;
        const float scale = a.scales == nullptr ? 1.0f : a.scales[t];
        float2 more[COLUMNS / 8] = {};
        if (a.residual != nullptr) {
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; j++) {
                if (n + j * 8 < N) {
                    more[j] = *reinterpret_cast<const float2 *>(a.residual + begin + j * 8);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++) {
            float2 v = {sums[j][2 * h], sums[j][2 * h + 1]};
            if (scale != 1.0f || a.residual != nullptr) { // as it is done behind cuBLAS, to the bit
                v = {v.x * scale + more[j].x, v.y * scale + more[j].y};
            }
            if (n + j * 8 < N) {
                *reinterpret_cast<float2 *>(out + begin + j * 8) = v;
            }
        }
    }
#endif
}

// ---- the host's part ----

// Describes a matrix of F16 [rows][K] for copies of 64 k of so many rows.
inline int describe(CUtensorMap &map, const void *matrix, int64_t rows, int64_t K, int tile_rows) {
    static const auto encode = [] {
        void *found = nullptr;
        cudaDriverEntryPointQueryResult result;
        const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                                   cudaEnableDefault, &result);
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(error == cudaSuccess ? found : nullptr);
    }();
    const cuuint64_t sizes[] = {cuuint64_t(K), cuuint64_t(rows)}, row_bytes[] = {cuuint64_t(K) * 2};
    const cuuint32_t tile[] = {64, cuuint32_t(tile_rows)}, steps[] = {1, 1};
    return encode != nullptr && encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<void *>(matrix),
                                       sizes, row_bytes, tile, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                       CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
               ? 0
               : int(cudaErrorNotSupported);
}

template <int ROWS, int COLUMNS>
int multiply_few(const GemmCopiesArgs &g, const float *scales, cudaStream_t stream) {
    using S = FewShape<ROWS, COLUMNS>;
    FewMaps maps;
    // Rows behind the last are not copied where all are in one tile. Nobody reads their sums.
    FewArgs args = {g.residual, scales, g.T, divided(g.K, S::K), g.n_weights, std::min(g.T, ROWS), {}};
    int error = describe(maps.x, g.x, g.T, g.K, args.rows), tiles = 0;
    for (int i = 0; i < g.n_weights && error == 0; i++) {
        const auto &w = g.weights[i];
        args.matrices[i] = {w.out, w.N, tiles};
        tiles += divided(w.N, COLUMNS);
        error = describe(maps.weights[i], w.weights, w.N, g.K, COLUMNS);
    }
    const dim3 grid(unsigned(tiles), unsigned(divided(g.T, ROWS)));
    return error != 0 ? error
                      : int(launch_kernel(few_rows_kernel<ROWS, COLUMNS>, grid, S::THREADS, size_t(S::SHARED),
                                          stream, true, maps, args));
}

template <int... FORMS>
int multiply_few(int form, const GemmCopiesArgs &g, const float *scales, cudaStream_t stream,
                 std::integer_sequence<int, FORMS...>) {
    int error = int(cudaErrorInvalidValue);
    const auto run = [&](auto of) {
        constexpr FewForm FORM = FEW_FORMS[of.value];
        error = of.value == form ? multiply_few<FORM.rows, FORM.columns>(g, scales, stream) : error;
    };
    (run(std::integral_constant<int, FORMS>()), ...);
    return error;
}
// Multiplies by tiles of a form. `scales` are the rows' powers of two, or null.
inline int multiply_few(int form, const GemmCopiesArgs &g, const float *scales, cudaStream_t stream) {
    return multiply_few(form, g, scales, stream, std::make_integer_sequence<int, N_FEW_FORMS>());
}

} // namespace
} // namespace luce
