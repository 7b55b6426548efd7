// The greedy choice of each row, in two kernels: ARGMAX_PARTS blocks a row leave their best in `out`, then
// one warp a row picks from those. A maximum with ties to the lowest id is the same in any order, and nothing
// has to be reset between runs.
#include "kernels.h"

#include <climits>
#include <cmath>
#include <cuda_runtime.h>

namespace luce {
namespace {

constexpr int WARP = 32;
constexpr int THREADS = 256;
constexpr int UNROLL = 4; // 16-byte loads in flight

struct Best {
    float value = -INFINITY;
    int32_t id = INT_MAX;
    bool bad = false; // a value was not finite

    __device__ void see(float x, int32_t i) {
        bad = bad || !isfinite(x);
        if (x > value || (x == value && i < id)) {
            value = x;
            id = i;
        }
    }
    __device__ void reduce_warp() {
#pragma unroll
        for (int mask = WARP / 2; mask > 0; mask /= 2) {
            const float x = __shfl_xor_sync(~0u, value, mask);
            const int32_t i = __shfl_xor_sync(~0u, id, mask);
            if (x > value || (x == value && i < id)) {
                value = x;
                id = i;
            }
        }
        bad = __any_sync(~0u, bad);
    }
};

// grid: parts, rows. A partial result is two words: the id, complemented if a value was not finite; the
// value.
template <bool VECTOR>
__global__ void __launch_bounds__(THREADS) argmax_parts_kernel(ArgmaxArgs a, int32_t part) {
    __shared__ Best shared[THREADS / WARP];
    const float *x = a.logits + blockIdx.y * a.n;
    const int32_t begin = blockIdx.x * part, end = min(int64_t(begin) + part, a.n);
    Best best;
    if (VECTOR) {
        const float4 *x4 = reinterpret_cast<const float4 *>(x);
        for (int32_t i = begin / 4 + threadIdx.x; i < end / 4; i += THREADS * UNROLL) {
            float4 v[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                const int32_t at = i + u * THREADS;
                v[u] = x4[at < end / 4 ? at : i]; // a value seen twice changes nothing
            }
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                const int32_t at = i + u * THREADS, id = 4 * (at < end / 4 ? at : i);
                best.see(v[u].x, id);
                best.see(v[u].y, id + 1);
                best.see(v[u].z, id + 2);
                best.see(v[u].w, id + 3);
            }
        }
    } else {
        for (int32_t i = begin + int32_t(threadIdx.x); i < end; i += THREADS) {
            best.see(x[i], i);
        }
    }
    best.reduce_warp();
    if (threadIdx.x % WARP == 0) {
        shared[threadIdx.x / WARP] = best;
    }
    __syncthreads();
    if (threadIdx.x < WARP) {
        best = threadIdx.x < THREADS / WARP ? shared[threadIdx.x] : Best();
        best.reduce_warp();
        if (threadIdx.x == 0) {
            int32_t *out = a.out + int64_t(blockIdx.y) * ARGMAX_WIDTH + 2 + 2 * blockIdx.x;
            out[0] = best.bad ? ~best.id : best.id;
            out[1] = __float_as_int(best.value);
        }
    }
}

// grid: rows, one warp each.
__global__ void argmax_pick_kernel(ArgmaxArgs a) {
    int32_t *out = a.out + int64_t(blockIdx.x) * ARGMAX_WIDTH;
    Best best;
    for (int p = threadIdx.x; p < ARGMAX_PARTS; p += WARP) {
        const int32_t id = out[2 + 2 * p];
        best.bad = best.bad || id < 0;
        const float value = __int_as_float(out[3 + 2 * p]);
        const int32_t i = id < 0 ? ~id : id;
        if (value > best.value || (value == best.value && i < best.id)) {
            best.value = value;
            best.id = i;
        }
    }
    best.reduce_warp();
    if (threadIdx.x == 0) {
        out[0] = best.id == INT_MAX ? 0 : best.id; // nothing but NaN
        out[1] = best.bad ? 1 : 0;
    }
}

} // namespace

int cuda::argmax(const ArgmaxArgs &args, void *stream) {
    if (args.T < 0 || args.n <= 0 || args.n >= INT_MAX / 2) {
        return int(cudaErrorInvalidValue);
    }
    if (args.T == 0) {
        return 0;
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    const int32_t part = int32_t((args.n + ARGMAX_PARTS - 1) / ARGMAX_PARTS + 3) / 4 * 4;
    const dim3 grid(ARGMAX_PARTS, args.T);
    if (args.n % 4 == 0 && reinterpret_cast<uintptr_t>(args.logits) % sizeof(float4) == 0) {
        argmax_parts_kernel<true><<<grid, THREADS, 0, st>>>(args, part);
    } else {
        argmax_parts_kernel<false><<<grid, THREADS, 0, st>>>(args, part);
    }
    argmax_pick_kernel<<<args.T, WARP, 0, st>>>(args);
    return int(cudaGetLastError());
}

} // namespace luce
