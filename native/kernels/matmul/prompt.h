// Computes a prefill's matmul on cuBLAS, for many rows at once: out[t][n] = sum_k W[n][k] * x[t][k].
//
// Weights are written out as F16 (rowmm_unpack), one matrix at a time, and activations are rounded to F16.
// Products are summed in F32. A row whose values F16 would not hold well (its largest below 2^-6 or from 2^15
// on) is brought into range by a power of two, and its results back, so that any finite F32 is in range. What
// is not finite shows in its own row alone. Weights lose what F16 does not hold: F32 and BF16 weights of
// 65520 and more are not finite here. Against exact weights and activations a product of 5120 terms is off by
// 4e-4 of the result's rms or less.
//
// It is F16 on every GPU. GPUs for games multiply int8 faster than F16 with sums in F32, but activations of int8 are off
// by 8e-3 of a result's rms, and none of those GPUs was there to measure what it would gain.
//
// A row's bits do not depend on how many others there are: cuBLAS is held to algorithms that do not split K, and of these to
// such as give the same bits (matmul/prompt_algorithms.cuh), and so are kernels of luce's own, which multiply few rows on Hopper
// (matmul/sm90/few_rows.cuh). No ggml is used here. Launchers enqueue on `stream` and return a cudaError_t
// as int, and nothing but gemm_open synchronises.
#pragma once

#include "common/kernels.h"
#include "matmul/quantised.h"

#include <vector>

namespace luce {

constexpr int64_t GEMM_MAX_K = 32768;
// Bytes that cuBLAS has for each stream, as NVIDIA advises.
constexpr int64_t GEMM_WORKSPACE = int64_t(32) << 20;

// Algorithms are tried on so many rows: the activations in F16, and two times the results in F32. They are timed on more where
// results take no more than 4 MiB.
constexpr int GEMM_TRIAL_ROWS = 128;
constexpr int64_t gemm_trial_results(int64_t N) {
    return GEMM_TRIAL_ROWS * N > 1 << 20 ? GEMM_TRIAL_ROWS * N : 1 << 20;
}
constexpr int64_t gemm_trial_bytes(int64_t K, int64_t N) {
    return GEMM_TRIAL_ROWS * (2 * K + 4 * N) + 4 * gemm_trial_results(N);
}

// Says whether rows of K values are packed here, and whether products of them with N rows of weights are done.
constexpr bool gemm_packs(int64_t K) {
    return K > 0 && K % 8 == 0 && K <= GEMM_MAX_K;
}
constexpr bool gemm_has(int64_t K, int64_t N) {
    return gemm_packs(K) && N > 0 && N % 4 == 0 && N <= INT32_MAX;
}

// Returns the bytes of the activations of T rows: F16 [T][K], then one F32 power of two for each row, by
// which its results are multiplied.
constexpr int64_t gemm_x_bytes(int64_t T, int64_t K) {
    return T * K * 2 + T * 4;
}

struct GemmShape {
    int64_t N, K;
};
struct GemmArgs {
    int32_t T;
    int64_t K, N;
    const void *x; // gemm_pack left it, for the same T and K
    const void *weights; // F16 [N][K], aligned to 16
    float *out; // [T][N], which is not residual itself
    const float *residual; // null, or [T][N] that is added
};
// Products of the same rows with several matrices.
constexpr int GEMM_MAX_WEIGHTS = 4;
struct GemmWeights {
    const void *weights; // F16 [N][K], aligned to 16
    float *out; // [T][N]
    int64_t N;
};
struct GemmCopiesArgs {
    int32_t T, n_weights;
    int64_t K;
    const void *x; // as for one
    const float *residual; // null, or that of the only one
    GemmWeights weights[GEMM_MAX_WEIGHTS];
};

namespace cuda {
int cublas_version(); // it returns 130002 for 13.0.2
// Opens cuBLAS for the products on a stream, before the first one, and chooses its algorithms for products of these shapes.
// Their weights are made up in `scratch`, where those of the largest have room. gemm_close is called after the last. It needs
// GEMM_WORKSPACE, and more while it chooses; where that is not there, or for another shape, a product has one algorithm for
// any number of rows.
int gemm_open(void *stream, const std::vector<GemmShape> &shapes = {}, void *scratch = nullptr);
void gemm_close(void *stream);

// Packs as rowmm_pack does, for any T, where x_row and y_row are multiples of 4 and all rows are aligned to
// 16. ROWMM_HEAD_RMS takes heads of 16, 32, 64 or 128. `copy` must be null.
int gemm_pack(const RowmmPackArgs &args, void *stream);
int gemm(const GemmArgs &args, void *stream);
// Gives the bits of one product after the other, in one launch where all tiles run at once (matmul/few_rows_plan.h).
int gemm_copies(const GemmCopiesArgs &args, void *stream);
} // namespace cuda

} // namespace luce
