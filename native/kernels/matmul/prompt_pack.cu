// Turns activations of a prefill into F16 rows, with the norm or gate before them. A block has a row, in
// registers from the first read to the last write. A row's values depend on that row alone.
#include "common/activation.cuh"
#include "common/overlap.cuh"
#include "common/pointers.h"
#include "matmul/prompt.h"

#include <algorithm>
#include <cuda_fp16.h>

namespace luce {
namespace {

constexpr int WARP = 32;
constexpr int MAX_WARPS = 32;
constexpr int MAX_OWN = 8; // a thread has at most so many vectors of 4 values
static_assert(GEMM_MAX_K == MAX_WARPS * WARP * MAX_OWN * 4, "the largest block holds the longest row");

struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};
struct Max {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <typename Op> __device__ float over_lanes(float x, int lanes, Op op) {
    for (int mask = lanes / 2; mask > 0; mask /= 2) {
        x = op(x, __shfl_xor_sync(~0u, x, mask));
    }
    return x;
}
// Combines values over the block, in one order: lanes, then warps. `shared` is free again when the next
// call's is another.
template <typename Op> __device__ float over_block(float x, float (&shared)[MAX_WARPS], Op op) {
    const int lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    x = over_lanes(x, WARP, op);
    if (lane == 0) {
        shared[threadIdx.x / WARP] = x;
    }
    __syncthreads();
    return over_lanes(lane < warps ? shared[lane] : 0.0f, WARP, op);
}

// Computes it by the fast functions, right to some 1e-6 of x, since the result is rounded to F16.
__device__ float activate(int32_t activation, float x) {
    return __fdividef(x, 1 + __expf(-opening(activation, x)));
}
__device__ float squares(const float4 &v) {
    return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, v.x * v.x)));
}
__device__ float4 product(const float4 &a, const float4 &b) {
    return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
}
__device__ float4 times(const float4 &a, float b) {
    return {a.x * b, a.y * b, a.z * b, a.w * b};
}
__device__ float4 activate(int32_t f, const float4 &a) {
    return {activate(f, a.x), activate(f, a.y), activate(f, a.z), activate(f, a.w)};
}
__device__ float sigmoid(float x) {
    return __fdividef(1, 1 + __expf(-x));
}
__device__ float4 sigmoid(const float4 &a) {
    return {sigmoid(a.x), sigmoid(a.y), sigmoid(a.z), sigmoid(a.w)};
}
__device__ float most(const float4 &v) {
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

// Returns the exponent by which a row whose largest value is `x` is divided. It is 0 where F16 holds the row
// well, else the one that brings it to 512 .. 1023. A value that is not finite stays what it is.
__device__ int row_exponent(float x) {
    const int exponent = int(__float_as_uint(x) >> 23) - 127;
    if (x == 0.0f || exponent == 128 || (exponent >= -6 && exponent < 15)) {
        return 0;
    }
    return max(exponent - 9, -126); // both powers of two are normal then
}
__device__ float power_of_two(int exponent) {
    return __uint_as_float(uint32_t(exponent + 127) << 23);
}

// The grid is rows. Vector i of the row belongs to thread i % blockDim.x.
template <int OWN> __global__ void __launch_bounds__(MAX_WARPS *WARP) gemm_pack_kernel(RowmmPackArgs a) {
    __shared__ float sums[MAX_WARPS], maxima[MAX_WARPS];
    wait_for_previous();
    let_next_start();
    const int64_t row = blockIdx.x, n = a.K / 4;
    const float4 *x = reinterpret_cast<const float4 *>(a.x + row * a.x_row);
    const float4 *y = reinterpret_cast<const float4 *>(a.y + row * a.y_row);
    const float4 *w = reinterpret_cast<const float4 *>(a.w);
    float4 v[OWN];
    float sum = 0, largest = 0;
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        const int64_t i = threadIdx.x + j * int64_t(blockDim.x);
        v[j] = i < n ? x[i] : float4{0, 0, 0, 0};
        if (a.input == ROWMM_RMS) {
            sum += squares(v[j]);
        } else if (a.input == ROWMM_GLU) {
            v[j] = product(activate(a.activation, v[j]), i < n ? y[i] : float4{0, 0, 0, 0});
        } else if (a.input == ROWMM_GATED) {
            v[j] =
                product(v[j], i < n ? sigmoid(y[i + i / (a.head / 4) * (a.head / 4)]) : float4{0, 0, 0, 0});
        } else if (a.input == ROWMM_HEAD_RMS) { // here a head is a part of a warp
            const float mean = over_lanes(squares(v[j]), a.head / 4, Sum()) / float(a.head);
            const float4 scaled = product(times(v[j], rsqrtf(mean + a.eps)), w[i % (a.head / 4)]);
            v[j] = product(scaled, i < n ? activate(SILU, y[i]) : float4{0, 0, 0, 0});
        }
    }
    if (a.input == ROWMM_RMS) {
        const float scale = rsqrtf(over_block(sum, sums, Sum()) / float(a.K) + a.eps);
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            const int64_t i = threadIdx.x + j * int64_t(blockDim.x);
            v[j] = product(times(v[j], scale), i < n ? w[i] : float4{0, 0, 0, 0});
        }
    }
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        largest = fmaxf(largest, most(v[j]));
    }
    const int exponent = row_exponent(over_block(largest, maxima, Max()));
    const float down = power_of_two(-exponent);
    __half *out = static_cast<__half *>(a.out) + row * a.K;
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        const int64_t i = threadIdx.x + j * int64_t(blockDim.x);
        if (i < n) {
            __half2 packed[2] = {__floats2half2_rn(v[j].x * down, v[j].y * down),
                                 __floats2half2_rn(v[j].z * down, v[j].w * down)};
            reinterpret_cast<uint2 *>(out)[i] = *reinterpret_cast<uint2 *>(packed);
        }
    }
    if (threadIdx.x == 0) {
        float *scales = reinterpret_cast<float *>(static_cast<__half *>(a.out) + a.T * a.K);
        scales[row] = power_of_two(exponent);
    }
}

template <int OWN> int launch(const RowmmPackArgs &a, int warps, cudaStream_t stream) {
    return int(launch_kernel(gemm_pack_kernel<OWN>, dim3(unsigned(a.T)), warps * WARP, 0, stream, true, a));
}

bool valid(const RowmmPackArgs &a) {
    if (a.T < 0 || !gemm_packs(a.K) || !aligned(a.x) || a.x_row % 4 != 0 || !aligned(a.out) ||
        a.copy != nullptr) {
        return false;
    }
    const bool w = a.w != nullptr && aligned(a.w), y = a.y != nullptr && aligned(a.y) && a.y_row % 4 == 0;
    switch (a.input) {
        case ROWMM_PLAIN: return true;
        case ROWMM_RMS: return w;
        case ROWMM_GLU: return y;
        case ROWMM_GATED: return y && a.head > 0 && a.head % 4 == 0 && a.K % a.head == 0;
        case ROWMM_HEAD_RMS:
            return w && y && (a.head == 16 || a.head == 32 || a.head == 64 || a.head == 128) &&
                   a.K % a.head == 0;
        default: return false;
    }
}

} // namespace

int cuda::gemm_pack(const RowmmPackArgs &args, void *stream) {
    if (!valid(args)) {
        return int(cudaErrorInvalidValue);
    }
    if (args.T == 0) {
        return 0;
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    const int vectors = int(args.K / 4);
    // A thread then has about 5 vectors.
    const int warps = std::clamp((vectors + 5 * WARP - 1) / (5 * WARP), 4, MAX_WARPS);
    switch ((vectors + warps * WARP - 1) / (warps * WARP)) {
        case 1: return launch<1>(args, warps, st);
        case 2: return launch<2>(args, warps, st);
        case 3: return launch<3>(args, warps, st);
        case 4: return launch<4>(args, warps, st);
        case 5: return launch<5>(args, warps, st);
        default: return launch<MAX_OWN>(args, warps, st);
    }
}

} // namespace luce
