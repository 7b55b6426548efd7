// Brings a step's inputs to the device; and the rows of a layer whose experts are in host memory to the host, which polls
// `given`, and the results back. The kernels read and write pinned memory themselves, since a copy by the device's copy engines,
// and an event, take longer than all of this. A verify's inputs alone are such a copy, on a stream beside the steps' while the
// device drafts: there it delays nothing, and a kernel would take multiprocessors from the draft.
#include "common/kernels.h"
#include "common/overlap.cuh"
#include "common/pointers.h"

#include <cuda_runtime.h>

namespace luce {
namespace {

constexpr int THREADS = 256;

// A block brings one row. Everything that it writes is there before the host sees `given`.
__global__ void __launch_bounds__(THREADS) give_rows_kernel(const __grid_constant__ GiveRowsArgs a) {
    const int64_t row = blockIdx.x, n = a.E / 4;
    wait_for_previous();
    const float4 *from = reinterpret_cast<const float4 *>(a.values) + row * n;
    float4 *to = reinterpret_cast<float4 *>(a.x) + row * n;
    for (int64_t i = threadIdx.x; i < n; i += THREADS) {
        to[i] = from[i];
    }
    for (int i = threadIdx.x; i < a.n_used; i += THREADS) {
        a.route[row * 2 * a.n_used + i] = a.ids[row * a.n_used + i];
        reinterpret_cast<float *>(a.route)[(row * 2 + 1) * a.n_used + i] = a.weights[row * a.n_used + i];
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        *static_cast<volatile uint32_t *>(a.given + row) = 1;
    }
}

__global__ void __launch_bounds__(THREADS) bring_kernel(const float4 *from, float4 *to, int64_t n) {
    const int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    wait_for_previous();
    if (i < n) {
        to[i] = __ldcv(from + i); // no cache may have it from the time before
    }
}

} // namespace

int cuda::give_rows(const GiveRowsArgs &a, void *stream) {
    if (a.T < 0 || a.E % 4 != 0 || !given(a.values) || !given(a.x)) {
        return int(cudaErrorInvalidValue);
    }
    if (a.T == 0) {
        return 0;
    }
    return int(launch_kernel(give_rows_kernel, dim3(unsigned(a.T)), THREADS, 0,
                             static_cast<cudaStream_t>(stream), true, a));
}

// It begins when all that is ahead has ended, on which the delta rule relies (overlap.cuh).
int cuda::bring(const void *from, void *to, int64_t bytes, void *stream) {
    const int64_t n = bytes / int64_t(sizeof(float4));
    if (bytes < 0 || bytes % 16 != 0 || !given(from) || !given(to)) {
        return int(cudaErrorInvalidValue);
    }
    if (n == 0) {
        return 0;
    }
    const dim3 grid(unsigned((n + THREADS - 1) / THREADS));
    return int(launch_kernel(bring_kernel, grid, THREADS, 0, static_cast<cudaStream_t>(stream), false,
                             static_cast<const float4 *>(from), static_cast<float4 *>(to), n));
}

int cuda::bring_beside(const void *pinned, void *device, int64_t bytes, void *stream) {
    return int(cudaMemcpyAsync(device, pinned, size_t(bytes), cudaMemcpyHostToDevice,
                               static_cast<cudaStream_t>(stream)));
}

} // namespace luce
