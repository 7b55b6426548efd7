// Turns activations of a prefill into F16 rows, with the norm or gate before them. A block has a row, in
// registers from the first read to the last write. A row's values depend on that row alone.
#include "common/activation.cuh"
#include "common/device_limits.h"
#include "common/pointers.h"
#include "matmul/prompt.h"

#include <algorithm>
#include <cuda_fp16.h>

namespace luce {
namespace {

constexpr int WARP = 32;
constexpr int MAX_WARPS = 32;
constexpr int MAX_OWN = 8; // a thread has at most so many vectors of 4 values
constexpr int FEW_WARPS = 28; // blocks of so many have registers for all that a thread reads of two rows
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
// well, else the one that brings it to 512 .. 1023. For products whose sums are F16 it is the one that brings it below 2, or
// below 4 where it is 2^127 and more. A value that is not finite stays what it is.
__device__ int row_exponent(float x, bool f16_sums) {
    const int exponent = int(__float_as_uint(x) >> 23) - 127;
    if (x == 0.0f || exponent == 128 || (!f16_sums && exponent >= -6 && exponent < 15)) {
        return 0;
    }
    return f16_sums ? min(max(exponent, -126), 126)
                    : max(exponent - 9, -126); // both powers of two are normal then
}
__device__ float power_of_two(int exponent) {
    return __uint_as_float(uint32_t(exponent + 127) << 23);
}

// The grid is rows. Vector i of the row belongs to thread i % blockDim.x.
template <int OWN, int INPUT>
__global__ void __launch_bounds__((OWN < MAX_OWN ? FEW_WARPS : MAX_WARPS) * WARP)
    gemm_pack_kernel(RowmmPackArgs a, bool f16_sums) {
    [[maybe_unused]] __shared__ float sums[MAX_WARPS];
    __shared__ float maxima[MAX_WARPS];
    const int64_t row = blockIdx.x;
    const int n = int(a.K / 4);
    const float4 *x = reinterpret_cast<const float4 *>(a.x + row * a.x_row);
    [[maybe_unused]] const float4 *y = reinterpret_cast<const float4 *>(a.y + row * a.y_row);
    [[maybe_unused]] const float4 *w = reinterpret_cast<const float4 *>(a.w);
    constexpr bool TWO = INPUT == ROWMM_GLU || INPUT == ROWMM_GATED || INPUT == ROWMM_HEAD_RMS;
    // All that is read is under way at once, where there are registers for it.
    constexpr bool AHEAD = TWO && OWN < MAX_OWN;
    float4 v[OWN], others[AHEAD ? OWN : 1];
    const auto vector = [](int j) { return int(threadIdx.x + j * blockDim.x); };
    const auto read = [n](const float4 *from, int at, int i) {
        return i < n ? from[at] : float4{0, 0, 0, 0};
    };
    const auto read_other = [&](int i) { // a gate's heads lie between others
        return read(y, INPUT == ROWMM_GATED ? i + i / (a.head / 4) * (a.head / 4) : i, i);
    };
    float sum = 0, largest = 0;
#pragma unroll
    for (int j = 0; j < OWN && (AHEAD || !TWO); j++) {
        v[j] = read(x, vector(j), vector(j));
        if constexpr (AHEAD) {
            others[j] = read_other(vector(j));
        }
    }
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        float4 other = {};
        if constexpr (TWO) {
            if constexpr (!AHEAD) {
                v[j] = read(x, vector(j), vector(j));
                asm volatile("" : "+f"(v[j].x)); // no later vector is read yet
            }
            other = AHEAD ? others[AHEAD ? j : 0] : read_other(vector(j));
        }
        if constexpr (INPUT == ROWMM_RMS) {
            sum += squares(v[j]);
        } else if constexpr (INPUT == ROWMM_GLU) {
            v[j] = product(activate(a.activation, v[j]), other);
        } else if constexpr (INPUT == ROWMM_GATED) {
            v[j] = product(v[j], sigmoid(other));
        } else if constexpr (INPUT == ROWMM_HEAD_RMS) { // here a head is a part of a warp
            const float mean = over_lanes(squares(v[j]), a.head / 4, Sum()) / float(a.head);
            const float4 scaled = product(times(v[j], rsqrtf(mean + a.eps)), w[vector(j) % (a.head / 4)]);
            v[j] = product(scaled, activate(SILU, other));
        }
    }
    if constexpr (INPUT == ROWMM_RMS) {
        const float scale = rsqrtf(over_block(sum, sums, Sum()) / float(a.K) + a.eps);
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            v[j] = product(times(v[j], scale), read(w, vector(j), vector(j)));
        }
    }
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        largest = fmaxf(largest, most(v[j]));
    }
    const int exponent = row_exponent(over_block(largest, maxima, Max()), f16_sums);
    const float down = power_of_two(-exponent);
    __half *out = static_cast<__half *>(a.out) + row * a.K;
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        const int i = vector(j);
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

template <int INPUT> void launch(const RowmmPackArgs &a, bool f16_sums, cudaStream_t stream) {
    const int vectors = int(a.K / 4);
    // A thread then has about 5 vectors.
    const int some = std::max((vectors + 5 * WARP - 1) / (5 * WARP), 4),
              warps = some <= FEW_WARPS ? some : MAX_WARPS;
    const auto run = [&](auto kernel) { kernel<<<a.T, warps * WARP, 0, stream>>>(a, f16_sums); };
    switch (some <= FEW_WARPS ? (vectors + warps * WARP - 1) / (warps * WARP) : MAX_OWN) {
        case 1: return run(gemm_pack_kernel<1, INPUT>);
        case 2: return run(gemm_pack_kernel<2, INPUT>);
        case 3: return run(gemm_pack_kernel<3, INPUT>);
        case 4: return run(gemm_pack_kernel<4, INPUT>);
        case 5: return run(gemm_pack_kernel<5, INPUT>);
        default: return run(gemm_pack_kernel<MAX_OWN, INPUT>);
    }
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
    DeviceLimits device;
    if (const int error = device_limits(device); error != 0) {
        return error;
    }
    const bool f16_sums = device.slow_f32_sums;
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    switch (args.input) {
        case ROWMM_PLAIN: launch<ROWMM_PLAIN>(args, f16_sums, st); break;
        case ROWMM_RMS: launch<ROWMM_RMS>(args, f16_sums, st); break;
        case ROWMM_GLU: launch<ROWMM_GLU>(args, f16_sums, st); break;
        case ROWMM_GATED: launch<ROWMM_GATED>(args, f16_sums, st); break;
        default: launch<ROWMM_HEAD_RMS>(args, f16_sums, st);
    }
    return int(cudaGetLastError());
}

} // namespace luce
