// Chooses cuBLAS's algorithms for a product, so that a row has the same bits at any number of rows, and says whether luce's own
// tiles have them too. That is done when an engine opens, and waits for the device; no product does.
//
// An algorithm that does not split K among blocks gives a row the same bits at any number of rows, and nearly all that cuBLAS
// offers give each other's (seen on an H200, cuBLAS 13: 7 products, 1 to 4,096 rows). So each product has one of them as its
// reference, and all others are tried on 128 rows and may be taken where no bit differs.
#pragma once

#include "matmul/cublas_calls.h"
#include "matmul/prompt.h"
#include "matmul/sm90/few_rows.cuh"

#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

namespace luce {
namespace {

// Algorithms are chosen for so many rows and fewer. They are close where few tiles of rows make the last wave of blocks matter: of a
// 27b on an H200 1,152 rows took 138 ms by the algorithms for 2,048 and 128 by those for 1,280.
constexpr int CLASSES[] = {128, 256, 512, 768, 1024, 1280, 1536, 2048, 4096}, N_CLASSES = 9;
// The algorithm for this many rows is what a product's bits are: others are taken where they give the same.
constexpr int REFERENCE_ROWS = 1024;
constexpr int OFFERED = 8; // it is asked for so many
// For few rows or few weights the first algorithm that cuBLAS offers is often slower than a later one, by up to ten times, so they
// are timed. Each has so many turns, and one takes the first's place where the median of its times is below so much of the first's:
// between two that are nearly as fast chance would decide.
constexpr int TURNS = 5;
constexpr float FASTER = 0.9f;

struct Algorithms {
    cublasLtMatmulAlgo_t by_class[N_CLASSES];
    bool tiles = false; // luce's own tiles give the same bits, all of them
};
struct Library {
    cublasLtHandle_t handle = nullptr;
    void *workspace = nullptr;
    std::map<std::pair<int64_t, int64_t>, Algorithms> products = {}; // by N, K
};
int cuda_error(cublasStatus_t status) {
    return status == CUBLAS_STATUS_SUCCESS ? 0 : CUBLAS_ERRORS + int(status);
}

// The product of T rows. cuBLAS counts columns first, so this is out^T {N, T} = (W^T {K, N})^T * x^T {K, T}.
struct Product {
    cublasLtMatmulDesc_t product = nullptr;
    cublasLtMatrixLayout_t weights = nullptr, x = nullptr, out = nullptr;
    int error;

    Product(int T, int64_t N, int64_t K) {
        const cublasOperation_t transposed = CUBLAS_OP_T;
        error = cuda_error(cublasLtMatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
        const auto then = [&](cublasStatus_t status) { error = error != 0 ? error : cuda_error(status); };
        if (error == 0) {
            then(cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                                sizeof(transposed)));
            then(cublasLtMatrixLayoutCreate(&weights, CUDA_R_16F, K, N, K));
            then(cublasLtMatrixLayoutCreate(&x, CUDA_R_16F, K, T, K));
            then(cublasLtMatrixLayoutCreate(&out, CUDA_R_32F, N, T, N));
        }
    }
    Product(const Product &) = delete;
    Product &operator=(const Product &) = delete;
    ~Product() {
        for (cublasLtMatrixLayout_t each : {weights, x, out}) {
            if (each != nullptr) {
                cublasLtMatrixLayoutDestroy(each);
            }
        }
        if (product != nullptr) {
            cublasLtMatmulDescDestroy(product);
        }
    }

    // Returns algorithms, the best first as cuBLAS reckons. None of them splits K among blocks.
    std::vector<cublasLtMatmulAlgo_t> offered(cublasLtHandle_t handle, int n) const {
        std::vector<cublasLtMatmulAlgo_t> algorithms;
        cublasLtMatmulPreference_t preference = nullptr;
        if (error != 0 || cublasLtMatmulPreferenceCreate(&preference) != CUBLAS_STATUS_SUCCESS) {
            return algorithms;
        }
        const size_t workspace = GEMM_WORKSPACE;
        const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE;
        std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(n));
        int found = 0;
        if (cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                 &workspace, sizeof(workspace)) == CUBLAS_STATUS_SUCCESS &&
            cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                 &schemes, sizeof(schemes)) == CUBLAS_STATUS_SUCCESS &&
            cublasLtMatmulAlgoGetHeuristic(handle, product, weights, x, out, out, preference, n,
                                           results.data(), &found) == CUBLAS_STATUS_SUCCESS) {
            for (int i = 0; i < found; i++) {
                if (results[i].state == CUBLAS_STATUS_SUCCESS) {
                    algorithms.push_back(results[i].algo);
                }
            }
        }
        cublasLtMatmulPreferenceDestroy(preference);
        return algorithms;
    }

    int multiply(const Library &library, const cublasLtMatmulAlgo_t &algorithm, const void *w,
                 const void *rows, float *to, cudaStream_t stream) const {
        const float one = 1, zero = 0;
        return error != 0 ? error
                          : cuda_error(cublasLtMatmul(library.handle, product, &one, w, weights, rows, x,
                                                      &zero, to, out, to, out, &algorithm, library.workspace,
                                                      size_t(GEMM_WORKSPACE), stream));
    }
};

// One algorithm for any number of rows.
int reference(const Library &library, int64_t N, int64_t K, Algorithms &found) {
    const Product many(REFERENCE_ROWS, N, K);
    const std::vector<cublasLtMatmulAlgo_t> offered = many.offered(library.handle, 1);
    if (offered.empty()) {
        return many.error != 0 ? many.error : cuda_error(CUBLAS_STATUS_NOT_SUPPORTED);
    }
    std::fill(found.by_class, found.by_class + N_CLASSES, offered[0]);
    return 0;
}

// Room on the device, which may not be there.
template <class T> struct Room {
    T *p = nullptr;
    explicit Room(int64_t n) {
        if (cudaMalloc(&p, size_t(n) * sizeof(T)) != cudaSuccess) {
            cudaGetLastError();
            p = nullptr;
        }
    }
    Room(const Room &) = delete;
    Room &operator=(const Room &) = delete;
    ~Room() { cudaFree(p); }
};

struct Events {
    std::vector<cudaEvent_t> all;
    explicit Events(int n) : all(size_t(n)) {
        for (cudaEvent_t &each : all) {
            cudaEventCreate(&each);
        }
    }
    Events(const Events &) = delete;
    Events &operator=(const Events &) = delete;
    ~Events() {
        for (cudaEvent_t each : all) {
            cudaEventDestroy(each);
        }
    }
};

// Writes F16 between -1 and 1, of which no two neighbours are alike.
__global__ void fill_kernel(__half *out, int64_t n, uint32_t seed) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n;
         i += int64_t(gridDim.x) * blockDim.x) {
        uint32_t hash = uint32_t(i) * 2654435761u ^ seed;
        hash = (hash ^ hash >> 16) * 0x85ebca6b;
        hash = (hash ^ hash >> 13) * 0xc2b2ae35;
        out[i] = __float2half((int(hash >> 16) - 32768) / 32768.0f);
    }
}

// Counts values whose bits differ.
__global__ void differ_kernel(const uint32_t *a, const uint32_t *b, int64_t n, uint32_t *count) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n;
         i += int64_t(gridDim.x) * blockDim.x) {
        if (a[i] != b[i]) {
            atomicAdd(count, 1u);
        }
    }
}

// Compares algorithms for a product on rows and weights that are made up.
struct Trial {
    const Library &library;
    const int64_t N, K;
    __half *weights;
    int64_t values; // of which there is room for so many
    cudaStream_t stream;
    Room<__half> x;
    Room<float> expected, found;
    Room<uint32_t> count;

    Trial(const Library &of, int64_t n, int64_t k, __half *w, int64_t room, cudaStream_t on)
        : library(of), N(n), K(k), weights(w), values(room), stream(on), x(GEMM_TRIAL_ROWS * k),
          expected(GEMM_TRIAL_ROWS * n), found(gemm_trial_results(n)), count(1) {
        if (ready()) {
            fill_kernel<<<1024, 256, 0, stream>>>(w, N * K, 1);
            fill_kernel<<<1024, 256, 0, stream>>>(x.p, GEMM_TRIAL_ROWS * K, 2);
        }
    }
    bool ready() const {
        return x.p != nullptr && expected.p != nullptr && found.p != nullptr && count.p != nullptr;
    }

    // Whether there is room for so many rows. Where they are too many for x, what lies at `weights` stands for them: then only
    // time counts.
    bool has(int64_t rows) const {
        return rows <= GEMM_TRIAL_ROWS || (rows * K <= values && rows * N <= gemm_trial_results(N));
    }
    const __half *rows_of(int rows) const { return rows <= GEMM_TRIAL_ROWS ? x.p : weights; }
    // Products that follow each other have different matrices where there is room for several, since a prompt finds none in L2. The
    // first one's values are made up, and those of others are any.
    int run(const cublasLtMatmulAlgo_t &algorithm, int rows, float *to, int i = 0) const {
        const __half *matrix = weights + i % std::max<int64_t>(values / (N * K), 1) * N * K;
        return Product(rows, N, K).multiply(library, algorithm, matrix, rows_of(rows), to, stream);
    }
    int run(int form, int rows, float *to) const {
        return multiply_few(form, {rows, 1, K, rows_of(rows), nullptr, {{weights, to, N}}}, nullptr, stream);
    }

    // Whether it gives the reference's bits.
    template <typename Way> bool same(const Way &algorithm) const {
        uint32_t differing = 1;
        if (cudaMemsetAsync(found.p, 0xff, size_t(GEMM_TRIAL_ROWS * N) * sizeof(float), stream) !=
                cudaSuccess ||
            cudaMemsetAsync(count.p, 0, sizeof(uint32_t), stream) != cudaSuccess ||
            run(algorithm, GEMM_TRIAL_ROWS, found.p) != 0) {
            cudaGetLastError(); // a trial's is none of the next product's
            return false;
        }
        differ_kernel<<<512, 256, 0, stream>>>(reinterpret_cast<uint32_t *>(expected.p),
                                               reinterpret_cast<uint32_t *>(found.p), GEMM_TRIAL_ROWS * N,
                                               count.p);
        return cudaMemcpyAsync(&differing, count.p, sizeof(uint32_t), cudaMemcpyDeviceToHost, stream) ==
                   cudaSuccess &&
               cudaStreamSynchronize(stream) == cudaSuccess && differing == 0;
    }

    // Returns the algorithms' times for so many rows in ms, and INFINITY for one that does not run. They take turns, so that all meet
    // the same clock, and all are enqueued before the first wait, so that no time is that of a launch.
    std::vector<float> medians(const std::vector<cublasLtMatmulAlgo_t> &all, int rows) const {
        const int n = int(all.size());
        const Events events(TURNS * n + 1);
        std::vector<float> times(all.size(), 0.0f);
        cudaEventRecord(events.all[0], stream);
        for (int i = 0; i < TURNS * n; i++) {
            if (run(all[i % n], rows, found.p, i) != 0) {
                times[i % n] = INFINITY;
                cudaGetLastError();
            }
            cudaEventRecord(events.all[i + 1], stream);
        }
        const bool ended = cudaStreamSynchronize(stream) == cudaSuccess;
        for (int i = 0; i < n; i++) {
            float ms[TURNS] = {};
            for (int turn = 0; turn < TURNS; turn++) {
                cudaEventElapsedTime(&ms[turn], events.all[turn * n + i], events.all[turn * n + i + 1]);
            }
            std::nth_element(ms, ms + TURNS / 2, ms + TURNS);
            times[i] = ended ? std::max(times[i], ms[TURNS / 2]) : INFINITY;
        }
        return times;
    }

    // Chooses for each class of rows the first that is offered for them and gives the reference's bits, or one that is clearly faster,
    // of what is offered for any: the best for few rows are often offered for more alone.
    int choose(Algorithms &chosen, const DeviceLimits &device) const {
        if (const int error = run(chosen.by_class[0], GEMM_TRIAL_ROWS, expected.p); error != 0) {
            return error;
        }
        std::vector<cublasLtMatmulAlgo_t> all = {chosen.by_class[0]};
        size_t firsts[N_CLASSES] = {};
        for (int i = 0; i < N_CLASSES; i++) {
            bool first = true;
            for (const cublasLtMatmulAlgo_t &each :
                 Product(CLASSES[i], N, K).offered(library.handle, OFFERED)) {
                size_t at = 0;
                while (at < all.size() && memcmp(&all[at], &each, sizeof(each)) != 0) {
                    at++;
                }
                if (at == all.size() && same(each)) {
                    all.push_back(each);
                }
                if (first && at < all.size()) {
                    firsts[i] = at;
                    first = false;
                }
            }
        }
        chosen.tiles = few_form(device, 1, K, {N}) >= 0;
        for (int form = 0; form < N_FEW_FORMS && chosen.tiles; form++) {
            chosen.tiles = same(form);
        }
        for (int i = 0; i < N_CLASSES; i++) {
            size_t best = firsts[i];
            if (has(CLASSES[i]) && !(chosen.tiles && few_form(device, CLASSES[i], K, {N}) >= 0)) {
                const std::vector<float> ms = medians(all, CLASSES[i]);
                const size_t least = size_t(std::min_element(ms.begin(), ms.end()) - ms.begin());
                best = ms[least] < FASTER * ms[best] ? least : best;
            }
            chosen.by_class[i] = all[best];
        }
        return 0;
    }
};

} // namespace
} // namespace luce
