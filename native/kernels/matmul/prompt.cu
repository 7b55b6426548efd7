// Computes cuBLAS's product of F16 rows and F16 weights, and applies the rows' powers of two after it.
#include "matmul/prompt.h"

#include "matmul/cublas_calls.h"

#include <map>
#include <mutex>

namespace luce {
namespace {

struct Library {
    cublasHandle_t handle = nullptr;
    void *workspace = nullptr;
};
std::mutex mutex; // several engines may open at once, each with a stream of its own
std::map<void *, Library> libraries; // they are by stream

int cuda_error(cublasStatus_t status) {
    return status == CUBLAS_STATUS_SUCCESS ? 0 : CUBLAS_ERRORS + int(status);
}

void close(const Library &library) {
    if (library.handle != nullptr) {
        cublasDestroy(library.handle);
    }
    cudaFree(library.workspace);
}

// Does what cuBLAS leaves to do with a row: its power of two, which few rows have, and its residual. The grid
// is rows. N is a multiple of WIDTH.
constexpr int THREADS = 256;
template <int WIDTH> struct alignas(4 * WIDTH) Values {
    float x[WIDTH];
};
template <int WIDTH>
__global__ void __launch_bounds__(THREADS)
    scale_results_kernel(float *out, const float *residual, const float *scales, int64_t N) {
    const float scale = scales[blockIdx.x];
    if (scale == 1.0f && residual == nullptr) {
        return;
    }
    auto *row = reinterpret_cast<Values<WIDTH> *>(out + blockIdx.x * N);
    const auto *more = reinterpret_cast<const Values<WIDTH> *>(residual + blockIdx.x * N);
    for (int64_t n = threadIdx.x; n < N / WIDTH; n += THREADS) {
        Values<WIDTH> v = row[n], r = {};
        if (residual != nullptr) {
            r = more[n];
        }
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            v.x[i] = v.x[i] * scale + r.x[i];
        }
        row[n] = v;
    }
}

void scale_results(const GemmArgs &a, const float *scales, cudaStream_t stream) {
    const bool wide =
        a.N % 4 == 0 &&
        (reinterpret_cast<uintptr_t>(a.out) | reinterpret_cast<uintptr_t>(a.residual)) % 16 == 0;
    const auto kernel = wide ? scale_results_kernel<4> : scale_results_kernel<1>;
    kernel<<<a.T, THREADS, 0, stream>>>(a.out, a.residual, scales, a.N);
}

} // namespace

int cuda::cublas_version() {
    int major = 0, minor = 0, patch = 0;
    cublasGetProperty(MAJOR_VERSION, &major);
    cublasGetProperty(MINOR_VERSION, &minor);
    cublasGetProperty(PATCH_LEVEL, &patch);
    return 10000 * major + 100 * minor + patch;
}

int cuda::gemm_open(void *stream) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (libraries.count(stream) > 0) {
        return int(cudaErrorInvalidValue);
    }
    Library library;
    int error = cuda_error(cublasCreate(&library.handle));
    if (error == 0) {
        error = int(cudaMalloc(&library.workspace, size_t(GEMM_WORKSPACE)));
    }
    if (error == 0) {
        error = cuda_error(cublasSetStream(library.handle, static_cast<cudaStream_t>(stream)));
    }
    if (error == 0) { // it comes after the stream, which resets it
        error = cuda_error(cublasSetWorkspace(library.handle, library.workspace, size_t(GEMM_WORKSPACE)));
    }
    if (error != 0) {
        close(library);
        return error;
    }
    libraries[stream] = library;
    return 0;
}

void cuda::gemm_close(void *stream) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = libraries.find(stream);
    if (found != libraries.end()) {
        close(found->second);
        libraries.erase(found);
    }
}

int cuda::gemm(const GemmArgs &a, void *stream) {
    if (a.T < 0 || a.N < 1 || a.N > INT32_MAX || !gemm_has(a.K)) {
        return int(cudaErrorInvalidValue);
    }
    if (a.T == 0) {
        return 0;
    }
    cublasHandle_t handle = nullptr;
    {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto found = libraries.find(stream);
        if (found == libraries.end()) {
            return int(cudaErrorInvalidResourceHandle);
        }
        handle = found->second.handle;
    }
    const float one = 1, zero = 0;
    const float *scales = reinterpret_cast<const float *>(static_cast<const uint8_t *>(a.x) + a.T * a.K * 2);
    // cuBLAS counts columns first, so this is out^T {N, T} = (W^T {K, N})^T * x^T {K, T}.
    const int error = cuda_error(cublasGemmEx(
        handle, CUBLAS_OP_T, CUBLAS_OP_N, int(a.N), a.T, int(a.K), &one, a.weights, CUDA_R_16F, int(a.K), a.x,
        CUDA_R_16F, int(a.K), &zero, a.out, CUDA_R_32F, int(a.N), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    if (error != 0) {
        return error;
    }
    scale_results(a, scales, static_cast<cudaStream_t>(stream));
    return int(cudaGetLastError());
}

} // namespace luce
