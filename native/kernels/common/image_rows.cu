// Puts rows of images in the places of embeddings. It reads them from pinned memory itself: each is read once.
#include "common/kernels.h"
#include "common/overlap.cuh"
#include "common/pointers.h"

#include <cuda_runtime.h>

namespace luce {
namespace {

constexpr int THREADS = 256;

// A block has one row.
__global__ void __launch_bounds__(THREADS) image_rows_kernel(const __grid_constant__ ImageRowsArgs a) {
    const int64_t row = blockIdx.x, n = a.E / 4;
    wait_for_previous();
    const float4 *image = reinterpret_cast<const float4 *>(uintptr_t(a.rows[row]));
    const float4 *x = reinterpret_cast<const float4 *>(a.x) + row * n;
    float4 *out = reinterpret_cast<float4 *>(a.out) + row * n;
    for (int64_t i = threadIdx.x; i < n; i += THREADS) {
        out[i] = image == nullptr ? x[i] : __ldcv(image + i); // no cache may have it from the time before
    }
}

} // namespace

int cuda::image_rows(const ImageRowsArgs &a, void *stream) {
    if (a.T < 0 || a.E % 4 != 0 || !given(a.x) || !given(a.out)) {
        return int(cudaErrorInvalidValue);
    }
    if (a.T == 0) {
        return 0;
    }
    return int(launch_kernel(image_rows_kernel, dim3(unsigned(a.T)), THREADS, 0,
                             static_cast<cudaStream_t>(stream), true, a));
}

} // namespace luce
