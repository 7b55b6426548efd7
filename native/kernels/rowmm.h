// luce's matmul for steps of 1..64 rows on quantised weights: out[t][n] = sum_k W[n][k] * x[t][k].
//
// A row's bits are the same at every width, position and company: a row is one column of the tensor cores' tile, and
// the order in which its products are added depends on the weights' shapes and the device alone.
//
// One arithmetic for all widths. Activations are rounded once to F16, each block of 256 by its own power of two
// (so any finite F32 is in range, and what is not finite shows in its own row alone). Weights enter as they are in
// the file: Q4_K, Q5_K, Q3_K and F16 exactly, BF16 and F32 to 2^-22 or better, Q6_K and IQ4_XS exactly but for odd
// products of quant and integer scale beyond 2048, the others (a quant times an F16 scale) rounded to F16.
// Sums are F32. Against exact activations a product of 5120 terms is off by 2e-4 to 4e-4 of the result's rms.
//
// Weights are permuted once at load from ggml's layout into the order of the tensor cores' fragments, same size.
// Call order of a launch: rowmm_pack once an input, then rowmm once for all weights that share it.
// No ggml here. Launchers enqueue on `stream` and return a cudaError_t as int; nothing synchronises, everything can be
// captured. Needs sm_80 or later.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define ROWMM_BOTH __host__ __device__
#else
#define ROWMM_BOTH
#endif

namespace luce {

constexpr int ROWMM_MAX_ROWS = 64;
constexpr int ROWMM_MAX_WEIGHTS = 8; // of one launch

// ---- weights ----

// Whether ggml's `type` (its number) has a kernel here: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K .. Q6_K,
// IQ4_NL, IQ4_XS.
bool rowmm_has_type(int32_t type);

// Bytes of the packed weights [N][K] and the alignment that they need (a multiple of 128 is always enough).
// N is padded to 16, K to 256 (to the type's block in ggml's file): for the usual shapes as large as ggml's tensor.
// 0 where the type is not known or K is no multiple of its block.
int64_t rowmm_packed_bytes(int32_t type, int64_t K, int64_t N);
constexpr int64_t ROWMM_ALIGN = 128;

// From ggml's layout [N][K / block] to the packed one, or from the packed one to F16 [N][K] (for cuBLAS in a prefill;
// each value is ggml's dequantised F32, rounded to F16).
struct RowmmPermuteArgs {
    int32_t type;
    int64_t K, N;
    const void *src; // ggml blocks, aligned to 2 bytes (F32: 4) | packed
    void *dst; // packed                                   | F16 [N][K], aligned to 16 if K % 8 == 0
};

// ---- activations ----

// What rowmm_pack computes of its input before it packs it.
enum RowmmInput : int32_t {
    ROWMM_PLAIN = 0, // x
    ROWMM_RMS =
        1, // x * w[k]; the product applies rsqrt(mean(x^2) + eps), mean over the row (RowmmArgs.normed)
    ROWMM_SWIGLU = 2, // silu(x) * y
    ROWMM_HEAD_RMS =
        3, // x * rsqrt(mean(x^2) + eps) * w[k % head] * silu(y), mean over each head (DeltaNet's output)
    ROWMM_GATED =
        4, // x * sigmoid(y), where y's heads of `head` values lie 2 * head apart; gemm_pack (gemm.h) alone
};

struct RowmmArgs;
struct RowmmPackArgs {
    const float *x; // [T] rows of K values
    int64_t x_row; // values from one row of x to the next
    int32_t T;
    int64_t K;
    void *out; // [rowmm_x_bytes(T, K)], aligned to 16
    int32_t input; // RowmmInput
    int32_t head; // ROWMM_HEAD_RMS: 16, 32, 64, 128 or 256; ROWMM_GATED: a multiple of 4
    float eps; // ROWMM_HEAD_RMS; ROWMM_RMS of gemm_pack
    const float *w; // ROWMM_RMS: [K]; ROWMM_HEAD_RMS: [head]
    const float
        *y; // ROWMM_SWIGLU, ROWMM_HEAD_RMS: [T] rows of K values; ROWMM_GATED: of 2 K, less the first head
    int64_t y_row;
    // Null, or the launch that left parts (RowmmArgs.parts), of which this one makes the sums. ROWMM_RMS: x plus its
    // one weight's results is what is packed; ROWMM_SWIGLU: its two weights' results stand for x and y. K % 8 == 0.
    const RowmmArgs *parts;
    float *copy; // null, or [T][K]: ROWMM_RMS: x, summed; else the values that are packed
    int32_t overlap; // as in RowmmArgs
};

// Bytes of packed activations; grows with T. The last [T][K / 256] F32, of ROWMM_RMS, are sums of squares of x.
int64_t rowmm_x_bytes(int32_t T, int64_t K);

// ---- the product ----

struct RowmmWeights {
    int32_t type;
    int64_t N;
    const void *packed; // [N][K]
    float *out; // [T] rows of N values
    int64_t out_row; // values from one row of out to the next
    const float *residual; // null, or [T] rows of N values that are added (may be `out` itself)
    int64_t residual_row;
};

struct RowmmArgs {
    int32_t T; // 1 .. ROWMM_MAX_ROWS
    int64_t K; // of all weights
    const void *x; // what rowmm_pack left, for the same T and K
    int32_t normed; // 1: x was packed as ROWMM_RMS
    float eps; // of that norm
    int32_t n_weights;
    RowmmWeights
        weights[ROWMM_MAX_WEIGHTS]; // which ones share a launch is part of the arithmetic: keep it fixed
    void
        *scratch; // [cuda::rowmm_scratch_bytes()], aligned to 16; launches that may run at once need one each
    // Null, or [rowmm_parts_bytes()], aligned to 16: here the results are left as partial sums for the next
    // kernel to add (rowmm_parts.cuh), which spares one; `out`, `residual` and `scratch` are not used. At most 4 weights.
    float *parts;
    // 1: the launch may begin before the kernel ahead of it on the stream has ended (overlap.cuh): it reads weights
    // while it waits, and touches nothing else before.
    int32_t overlap;
};

// Bytes of the parts of these weights' results, on any device.
int64_t rowmm_parts_bytes(const RowmmArgs &args);

namespace cuda {
// Of the current device, for any T and shape.
int64_t rowmm_scratch_bytes();

int rowmm_permute(const RowmmPermuteArgs &args, void *stream);
int rowmm_unpack(const RowmmPermuteArgs &args, void *stream);
int rowmm_pack(const RowmmPackArgs &args, void *stream);
int rowmm(const RowmmArgs &args, void *stream);
} // namespace cuda

} // namespace luce
