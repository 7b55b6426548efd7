// Computes cuBLAS's product of F16 rows and F16 weights, and applies the rows' powers of two after it. Its algorithms are
// chosen when an engine opens (matmul/prompt_algorithms.cuh).
#include "matmul/prompt_algorithms.cuh"

#include <mutex>

namespace luce {
namespace {

std::mutex mutex; // several engines may open at once, each with a stream of its own
std::map<void *, Library> libraries; // they are by stream

void close(const Library &library) {
    if (library.handle != nullptr) {
        cublasLtDestroy(library.handle);
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
    cublasLtGetProperty(MAJOR_VERSION, &major);
    cublasLtGetProperty(MINOR_VERSION, &minor);
    cublasLtGetProperty(PATCH_LEVEL, &patch);
    return 10000 * major + 100 * minor + patch;
}

int cuda::gemm_open(void *stream, const std::vector<GemmShape> &shapes, void *scratch) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (libraries.count(stream) > 0) {
        return int(cudaErrorInvalidValue);
    }
    Library library;
    int error = cuda_error(cublasLtCreate(&library.handle));
    if (error == 0) {
        error = int(cudaMalloc(&library.workspace, size_t(GEMM_WORKSPACE)));
    }
    int64_t room = 0;
    for (const GemmShape &shape : shapes) {
        room = std::max(room, shape.N * shape.K);
    }
    for (const GemmShape &shape : shapes) {
        if (error == 0) {
            Algorithms &found = library.products[{shape.N, shape.K}];
            error = reference(library, shape.N, shape.K, found);
            const Trial trial(library, shape.N, shape.K, static_cast<__half *>(scratch), room,
                              static_cast<cudaStream_t>(stream));
            if (error == 0 && trial.ready()) {
                error = trial.choose(found);
            }
        }
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
    if (a.T < 0 || !gemm_has(a.K, a.N)) {
        return int(cudaErrorInvalidValue);
    }
    if (a.T == 0) {
        return 0;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    const auto library = libraries.find(stream);
    if (library == libraries.end()) {
        return int(cudaErrorInvalidResourceHandle);
    }
    auto &products = library->second.products;
    auto known = products.find({a.N, a.K});
    if (known == products.end()) {
        Algorithms one;
        if (const int error = reference(library->second, a.N, a.K, one); error != 0) {
            return error;
        }
        known = products.insert({{a.N, a.K}, one}).first;
    }
    const int of = int(std::lower_bound(CLASSES, CLASSES + N_CLASSES - 1, a.T) - CLASSES);
    const float *scales = reinterpret_cast<const float *>(static_cast<const uint8_t *>(a.x) + a.T * a.K * 2);
    const cudaStream_t on = static_cast<cudaStream_t>(stream);
    const int columns = known->second.few_columns[of];
    const bool pairs =
        (reinterpret_cast<uintptr_t>(a.out) | reinterpret_cast<uintptr_t>(a.residual)) % 8 == 0;
    if (columns > 0 && pairs) {
        return multiply_few(columns, a, scales, on);
    }
    const int error = Product(a.T, a.N, a.K)
                          .multiply(library->second, known->second.by_class[of], a.weights, a.x, a.out, on);
    if (error != 0) {
        return error;
    }
    scale_results(a, scales, on);
    return int(cudaGetLastError());
}

} // namespace luce
