// This is luce's matmul for steps of 1..64 rows on quantised weights: out[t][n] = sum_k W[n][k] * x[t][k].
//
// A row's bits are the same at every width, position and company: a row is one column of the tensor cores' tile, and
// the order in which its products are added depends on the weights' shapes and the device alone.
//
// One arithmetic serves all widths. Activations are rounded once to F16, each block of 256 by its own power
// of two. So any finite F32 is in range, and what is not finite shows in its own row alone. Weights enter as
// they are in the file. Q4_K, Q5_K, Q3_K and F16 enter exactly, and BF16 and F32 to 2^-22 or better. Q6_K and
// IQ4_XS enter exactly but for odd products of quant and integer scale beyond 2048. The others (a quant times
// an F16 scale) are rounded to F16. Sums are F32. Against exact activations a product of 5120 terms is off by
// 2e-4 to 4e-4 of the result's rms.
//
// Weights are permuted once at load from ggml's layout into the order of the tensor cores' fragments, and
// keep their size. A launch calls rowmm_pack once for an input, then rowmm once for all weights that share
// it. Nothing here knows ggml. Launchers enqueue on `stream` and return a cudaError_t as int. Nothing
// synchronises, and everything can be captured. It needs sm_80 or later.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define ROWMM_BOTH __host__ __device__
#else
#define ROWMM_BOTH
#endif

namespace luce {

struct DeviceLimits;

constexpr int ROWMM_MAX_ROWS = 64;
constexpr int ROWMM_MAX_WEIGHTS = 8; // one launch takes no more
// Of so many rows, a launch of one weight that is not normed needs no kernel behind it to add up parts.
constexpr int ROWMM_WHOLE_ROWS = 8;

// ---- weights ----

// Returns whether ggml's `type` (its number) has a kernel here: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1,
// Q2_K .. Q6_K, IQ4_NL, IQ4_XS.
bool rowmm_has_type(int32_t type);

// Returns the bytes of the packed weights [N][K], which are aligned to 128. N is padded to 16, and K to 256, and to the
// type's block in ggml's file. For the usual shapes the packed weights are as large as ggml's tensor. The size is 0 where
// the type is not known or K is no multiple of its block.
int64_t rowmm_packed_bytes(int32_t type, int64_t K, int64_t N);

// Describes one permutation. It goes from ggml's layout [N][K / block] to the packed one, or from the packed
// one to F16 [N][K] (for cuBLAS in a prefill). Each value of the latter is ggml's dequantised F32, rounded to
// F16.
struct RowmmPermuteArgs {
    int32_t type;
    int64_t K, N;
    // To pack, src holds ggml blocks, aligned to 2 bytes (F32: 4), and dst receives the packed weights.
    // From packed weights in src, dst receives F16 [N][K], aligned to 16 if K % 8 == 0.
    const void *src;
    void *dst;
};

// ---- activations ----

// Says what rowmm_pack computes of its input before it packs it.
enum RowmmInput : int32_t {
    ROWMM_PLAIN = 0, // it packs x
    // It packs x * w[k]. The product applies rsqrt(mean(x^2) + eps), with the mean over
    // the row (RowmmArgs.normed).
    ROWMM_RMS = 1,
    ROWMM_GLU = 2, // it packs f(x) * y, where f is `activation`
    // It packs x * rsqrt(mean(x^2) + eps) * w[k % head] * silu(y), with the mean over each head
    // (DeltaNet's output).
    ROWMM_HEAD_RMS = 3,
    // It packs x * sigmoid(y), where y's heads of `head` values lie 2 * head apart. Only gemm_pack
    // (matmul/prompt.h) does so.
    ROWMM_GATED = 4,
};

struct RowmmArgs;
struct RowmmPackArgs {
    const float *x; // [T] rows of K values
    int64_t x_row; // the next row of x lies so many values further
    int32_t T;
    int64_t K;
    void *out; // [rowmm_x_bytes(T, K)], aligned to 16
    int32_t input; // it is a RowmmInput
    int32_t activation; // of ROWMM_GLU (common/activation.h)
    int32_t head; // ROWMM_HEAD_RMS takes 16, 32, 64, 128 or 256, and ROWMM_GATED a multiple of 4
    float eps; // ROWMM_HEAD_RMS uses it, and so does ROWMM_RMS of gemm_pack
    const float *w; // it is [K] for ROWMM_RMS and [head] for ROWMM_HEAD_RMS
    // It is [T] rows of K values for ROWMM_GLU and ROWMM_HEAD_RMS. For ROWMM_GATED a row has 2 K
    // values, less the first head's.
    const float *y;
    int64_t y_row;
    // Null, or the launch that left parts (RowmmArgs.parts), of which this one makes the sums. With ROWMM_RMS
    // it packs x, if there is one, plus the results of that launch's one weight. With ROWMM_GLU the results of its two
    // weights stand for x and y. K is what rowmm_adds_up takes.
    const RowmmArgs *parts;
    // Null, or [T][K]. ROWMM_RMS writes x here, summed; the others write the values that are packed. With ROWMM_HEAD_RMS, and
    // with parts, rowmm_pack needs x, y, w and this aligned to 16, and x_row and y_row to be multiples of 4.
    float *copy;
    int32_t overlap; // it means what it does in RowmmArgs
    // Null, or [K] aligned to 16, with parts and ROWMM_RMS: the sum of parts is normed by these weights and eps before x is
    // added, and then multiplied by post_scale. `w` and `out` may be null then. K is ROWMM_POST_K or less.
    const float *post;
    float post_scale;
};
constexpr int64_t ROWMM_POST_K = 8192; // a block of 32 warps has a row

// Returns the bytes of packed activations, which grow with T. The last [T][K / 256] F32, of ROWMM_RMS, are
// sums of squares of x.
int64_t rowmm_x_bytes(int32_t T, int64_t K);

// Returns whether parts of products with weights of so many rows can be added up, here and by other chapters' kernels: lanes
// have 8 neighbouring results.
constexpr bool rowmm_adds_up(int64_t N) {
    return N % 8 == 0;
}

// ---- the product ----

struct RowmmWeights {
    int32_t type;
    int64_t N;
    const void *packed; // [N][K]
    float *out; // [T] rows of N values
    int64_t out_row; // the next row of out lies so many values further
    const float *residual; // it is null, or [T] rows of N values that are added (it may be `out` itself)
    int64_t residual_row;
};

struct RowmmArgs {
    int32_t T; // 1 .. ROWMM_MAX_ROWS
    int64_t K; // all weights share it
    const void *x; // rowmm_pack left it, for the same T and K
    int32_t normed; // 1 says that x was packed as ROWMM_RMS
    float eps; // that norm adds it to the mean of squares
    // They are null, or a row [K] and that norm's weights [K]: then the launch norms and packs the row itself, x is not used,
    // and T is 1.
    const float *row, *norm;
    int32_t n_weights;
    // The weights that share a launch are part of the arithmetic, so their set must stay the same.
    RowmmWeights weights[ROWMM_MAX_WEIGHTS];
    // This is [cuda::rowmm_scratch_bytes()], aligned to 16. Launches that may run at once need one each.
    void *scratch;
    // Null, or [rowmm_parts_bytes()], aligned to 16. The results are left here as partial sums for the next
    // kernel to add (matmul/partials.cuh), which spares one kernel. `out`, `residual` and `scratch` are not used
    // then. At most 4 weights can leave parts.
    float *parts;
    // With 1 the launch may begin before the kernel ahead of it on the stream has ended (overlap.cuh). It
    // reads weights while it waits, and touches nothing else before.
    int32_t overlap;
};

// Returns whether a block of the device has room for a launch which norms its row itself (RowmmArgs.row), where `type` has the
// largest of its weights' units. Elsewhere the row has to be packed.
bool rowmm_norms_row(const DeviceLimits &device, int64_t K, int32_t type);

// Returns the bytes of the parts of these weights' results, which are the same on any device.
int64_t rowmm_parts_bytes(const RowmmArgs &args);

namespace cuda {
// Returns the bytes of scratch on the current device, which serve any T and shape.
int64_t rowmm_scratch_bytes();

int rowmm_permute(const RowmmPermuteArgs &args, void *stream);
int rowmm_unpack(const RowmmPermuteArgs &args, void *stream);
int rowmm_pack(const RowmmPackArgs &args, void *stream);
int rowmm(const RowmmArgs &args, void *stream);
} // namespace cuda

} // namespace luce
