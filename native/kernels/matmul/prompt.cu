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
    wait_for_previous();
    let_next_start();
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

bool aligned_to_pairs(const float *values) {
    return reinterpret_cast<uintptr_t>(values) % 8 == 0;
}

int scale_results(const GemmCopiesArgs &a, const float *scales, cudaStream_t stream) {
    const GemmWeights &w = a.weights[0];
    const bool wide =
        w.N % 4 == 0 &&
        (reinterpret_cast<uintptr_t>(w.out) | reinterpret_cast<uintptr_t>(a.residual)) % 16 == 0;
    const auto kernel = wide ? scale_results_kernel<4> : scale_results_kernel<1>;
    return int(
        launch_kernel(kernel, dim3(unsigned(a.T)), THREADS, 0, stream, true, w.out, a.residual, scales, w.N));
}

// Finds what was chosen for a product. One that gemm_open was not told of gets one algorithm for any number of rows.
int algorithms(Library &library, int64_t N, int64_t K, const Algorithms *&found) {
    auto known = library.products.find({N, K});
    if (known == library.products.end()) {
        Algorithms one;
        if (const int error = reference(library, N, K, one); error != 0) {
            return error;
        }
        known = library.products.insert({{N, K}, one}).first;
    }
    found = &known->second;
    return 0;
}

int multiply(Library &library, const GemmCopiesArgs &a, cudaStream_t stream) {
    DeviceLimits device;
    int error = cuda::device_limits(device);
    const Algorithms *found = nullptr;
    bool tiles = aligned_to_pairs(a.residual);
    std::vector<int64_t> sizes;
    for (int i = 0; i < a.n_weights && error == 0; i++) {
        error = algorithms(library, a.weights[i].N, a.K, found);
        tiles = tiles && error == 0 && found->tiles && aligned_to_pairs(a.weights[i].out);
        sizes.push_back(a.weights[i].N);
    }
    if (error != 0) {
        return error;
    }
    const float *scales = reinterpret_cast<const float *>(static_cast<const uint8_t *>(a.x) + a.T * a.K * 2);
    if (const int form = tiles ? few_form(device, a.T, a.K, sizes) : -1; form >= 0) {
        return multiply_few(form, a, scales, stream);
    }
    if (a.n_weights > 1) {
        for (int i = 0; i < a.n_weights && error == 0; i++) {
            error = multiply(library, {a.T, 1, a.K, a.x, a.residual, {a.weights[i]}}, stream);
        }
        return error;
    }
    const int of = int(std::lower_bound(CLASSES, CLASSES + N_CLASSES - 1, a.T) - CLASSES);
    const GemmWeights &w = a.weights[0];
    error = Product(a.T, w.N, a.K).multiply(library, found->by_class[of], w.weights, a.x, w.out, stream);
    return error != 0 ? error : scale_results(a, scales, stream);
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
    DeviceLimits device;
    error = error != 0 ? error : cuda::device_limits(device);
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
                error = trial.choose(found, device);
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
    return gemm_copies({a.T, 1, a.K, a.x, a.residual, {{a.weights, a.out, a.N}}}, stream);
}

int cuda::gemm_copies(const GemmCopiesArgs &a, void *stream) {
    if (a.T < 0 || a.n_weights < 1 || a.n_weights > GEMM_MAX_WEIGHTS ||
        (a.residual != nullptr && a.n_weights > 1) ||
        !std::all_of(
            a.weights, a.weights + a.n_weights, [&](const GemmWeights &w) { return gemm_has(a.K, w.N); })) {
        return int(cudaErrorInvalidValue);
    }
    if (a.T == 0) {
        return 0;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    const auto library = libraries.find(stream);
    return library == libraries.end() ? int(cudaErrorInvalidResourceHandle)
                                      : multiply(library->second, a, static_cast<cudaStream_t>(stream));
}

} // namespace luce
