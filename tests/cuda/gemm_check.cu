// Checks a prefill's matmul against double precision: what gemm_pack makes of its input, and the products.
#include "activation_reference.h"
#include "common/activation.h"
#include "harness.h"
#include "matmul/prompt.h"
#include "matmul/sm90/few_rows.cuh"
#include "rowmm_reference.h"

#include <memory>

namespace {

struct PackInput {
    int input, T, head;
    int64_t K;
    Floats x, y, w;
};
constexpr float EPS = 1e-6f;

PackInput random_input(int input, int T, int64_t K, int head) {
    PackInput p{input,
                T,
                head,
                K,
                normals(size_t(T) * K),
                normals(size_t(T) * K * (input == ROWMM_GATED ? 2 : 1), 2.0f),
                normals(size_t(input == ROWMM_HEAD_RMS ? head : K))};
    for (int t = 0; t < T; t++) { // F16 would not hold such rows
        const float size[] = {1.0f, 1e-7f, 3e30f, 100.0f, 1e-30f, 40000.0f, 0.0f};
        for (int64_t k = 0; k < K; k++) {
            p.x[t * K + k] *= input == ROWMM_PLAIN || input == ROWMM_GLU ? size[t % 7] : 1.0f;
        }
    }
    return p;
}

// Returns [T][K].
Doubles computed(const PackInput &p) {
    Doubles out(p.x.begin(), p.x.end());
    const int64_t group = p.head > 0 ? p.head : p.K;
    for (int64_t at = 0; at < int64_t(out.size()); at += group) {
        double sum = 0;
        for (int64_t i = 0; i < group; i++) {
            sum += double(p.x[at + i]) * p.x[at + i];
        }
        const double scale = 1 / std::sqrt(sum / double(group) + EPS);
        for (int64_t i = 0; i < group; i++) {
            double &v = out[at + i];
            const double y = p.y[p.input == ROWMM_GATED ? 2 * at + p.head + i : at + i];
            v = p.input == ROWMM_PLAIN    ? v
                : p.input == ROWMM_GLU    ? (p.T == 3 ? gelu(v) : silu(v)) * y
                : p.input == ROWMM_GATED  ? v / (1 + std::exp(-y))
                : p.input == ROWMM_RMS    ? v * scale * p.w[i]
                                          : v * scale * p.w[i] * silu(y);
        }
    }
    return out;
}

void pack(const PackInput &p, const Device<uint8_t> &out) {
    Device<float> x(p.x), y(p.y), w(p.w);
    RowmmPackArgs a{};
    a.x = x.p;
    a.x_row = a.K = p.K;
    a.T = p.T;
    a.out = out.p;
    a.input = p.input;
    a.activation = p.T == 3 ? GELU : SILU;
    a.head = p.head;
    a.eps = EPS;
    a.w = w.p;
    a.y = p.input == ROWMM_GATED ? y.p + p.head : y.p;
    a.y_row = p.input == ROWMM_GATED ? 2 * p.K : p.K;
    must(cuda::gemm_pack(a, stream));
    must(cudaStreamSynchronize(stream));
}

struct Packed {
    std::vector<__half> values;
    Floats scales;
};
Packed unpacked(const Device<uint8_t> &out, int T, int64_t K) {
    const std::vector<uint8_t> bytes = out.get();
    Packed p{std::vector<__half>(size_t(T) * K), Floats(size_t(T))};
    memcpy(p.values.data(), bytes.data(), p.values.size() * 2);
    memcpy(p.scales.data(), &bytes[p.values.size() * 2], p.scales.size() * 4);
    return p;
}

void check_pack(int input, int T, int64_t K, int head) {
    const std::string what =
        "gemm_pack " + std::to_string(input) + " T " + std::to_string(T) + " K " + std::to_string(K);
    const PackInput p = random_input(input, T, K, head);
    const Doubles expected = computed(p);
    Device<uint8_t> out(size_t(gemm_x_bytes(T, K)));
    pack(p, out);
    const Packed got = unpacked(out, T, K);
    double worst = 0;
    bool powers = true;
    for (int t = 0; t < T; t++) {
        double error = 0, size = 1e-300;
        for (int64_t k = 0; k < K; k++) {
            const double e = expected[t * K + k],
                         g = double(__half2float(got.values[t * K + k])) * got.scales[t];
            error += (g - e) * (g - e);
            size += e * e;
        }
        int exponent;
        powers = powers && std::frexp(got.scales[t], &exponent) == 0.5f;
        worst = std::max(worst, std::isfinite(error) ? std::sqrt(error / size) : INFINITY);
    }
    constexpr double HALF_STEP = 1.0 / 2048; // each value is rounded to F16
    expect(worst < HALF_STEP * 1.01 && powers, what + " is off by " + std::to_string(worst));
}

// Weights are given in F16, so that only the activations are rounded.
void check_gemm(int T, int64_t K, int64_t N) {
    const std::string what =
        "gemm T " + std::to_string(T) + " K " + std::to_string(K) + " N " + std::to_string(N);
    PackInput p = random_input(ROWMM_PLAIN, T, K, 0);
    const int bad = T > 2 ? pick(T) : -1;
    if (bad >= 0) {
        p.x[bad * K + pick(int(K))] = pick(2) == 0 ? NAN : INFINITY;
    }
    std::vector<__half> weights(size_t(N) * K);
    for (__half &w : weights) {
        w = __float2half(normals(1, 0.02f)[0]);
    }
    Device<uint8_t> x(size_t(gemm_x_bytes(T, K)));
    pack(p, x);
    Device<__half> w(weights);
    const bool adds = pick(2) == 0;
    const Floats more = normals(adds ? size_t(T) * N : 0);
    Device<float> out(size_t(T) * N), added(more);
    const float *residual = adds ? added.p : nullptr;
    must(cuda::gemm({T, K, N, x.p, w.p, out.p, residual}, stream));
    must(cudaStreamSynchronize(stream));
    const Floats got = out.get();
    out.poison();
    must(cuda::gemm({T, K, N, x.p, w.p, out.p, residual}, stream));
    must(cudaStreamSynchronize(stream));
    expect(same_bits(got, out.get()), what + " twice");
    double worst = 0;
    bool shows = true;
    for (int i = 0; i < std::min(T, 24); i++) {
        const int t = T <= 24 ? i : i < 4 ? T - 1 - i : pick(T);
        double error = 0, size = 1e-300;
        for (int64_t j = 0; j < std::min<int64_t>(N, 64); j++) {
            const int64_t n = N <= 64 ? j : j < 8 ? N - 1 - j : pick(int(N));
            double sum = 0;
            for (int64_t k = 0; k < K; k++) {
                sum += double(__half2float(weights[n * K + k])) * p.x[t * K + k];
            }
            const double e = adds ? sum + more[t * N + n] : sum;
            error += (got[t * N + n] - e) * (got[t * N + n] - e);
            size += e * e;
            shows = shows && (t != bad || !std::isfinite(got[t * N + n]));
        }
        worst = t == bad ? worst : std::max(worst, std::isfinite(error) ? std::sqrt(error / size) : INFINITY);
    }
    printf("  %-40s error %.2e\n", what.c_str(), worst);
    expect(worst < 1e-3, what + " is off by " + std::to_string(worst));
    expect(shows, what + " shows what is not finite");
}

// Tiles of luce's own give what cuBLAS gives, to the bit, and write nothing else, with one matrix and with several. A stream that is
// opened for no shapes has cuBLAS alone.
void check_few_rows(int T, int64_t K, const Ints &sizes, int form) {
    const PackInput p = random_input(ROWMM_PLAIN, T, K, 0);
    Device<uint8_t> x(size_t(gemm_x_bytes(T, K)));
    pack(p, x);
    const float *scales = reinterpret_cast<const float *>(x.p + T * K * 2);
    std::vector<std::unique_ptr<Device<__half>>> weights;
    std::vector<std::unique_ptr<Device<float>>> expected, got;
    GemmCopiesArgs all = {T, int32_t(sizes.size()), K, x.p, nullptr, {}};
    for (size_t i = 0; i < sizes.size(); i++) {
        std::vector<__half> values(size_t(sizes[i]) * K);
        for (__half &w : values) {
            w = __float2half(normals(1, 0.02f)[0]);
        }
        weights.push_back(std::make_unique<Device<__half>>(values));
        expected.push_back(std::make_unique<Device<float>>(size_t(T + 1) * sizes[i]));
        got.push_back(std::make_unique<Device<float>>(size_t(T + 1) * sizes[i]));
        all.weights[i] = {weights[i]->p, got[i]->p, sizes[i]};
    }
    const Device<float> added(normals(size_t(T) * sizes[0]));
    for (const bool adds : {false, true}) {
        if (adds && sizes.size() > 1) {
            break;
        }
        all.residual = adds ? added.p : nullptr;
        for (size_t i = 0; i < sizes.size(); i++) {
            expected[i]->poison();
            got[i]->poison();
            must(cuda::gemm({T, K, sizes[i], x.p, weights[i]->p, expected[i]->p, all.residual}, stream));
        }
        must(multiply_few(form, all, scales, stream));
        must(cudaStreamSynchronize(stream));
        for (size_t i = 0; i < sizes.size(); i++) {
            expect(same_bits(expected[i]->get(), got[i]->get()),
                   "few rows: T " + std::to_string(T) + " K " + std::to_string(K) + " N " +
                       std::to_string(sizes[i]) + " by form " + std::to_string(form));
        }
    }
}

// Algorithms are chosen when a stream is opened. Rows have the same bits by any of them, alone and with others.
void check_gemm_cuts(const GemmShape &shape) {
    const int T = 2100;
    const std::string what = "gemm K " + std::to_string(shape.K) + " N " + std::to_string(shape.N);
    PackInput p = random_input(ROWMM_PLAIN, T, shape.K, 0);
    std::vector<__half> weights(size_t(shape.N) * shape.K);
    for (__half &w : weights) {
        w = __float2half(normals(1, 0.02f)[0]);
    }
    Device<__half> w(weights);
    Floats whole;
    for (const Ints &rows :
         {Ints{T}, Ints{1, 63, 64, 128, 192, 1000, 652}, Ints{129, 511, 1025, 257, 65, 7, 106}}) {
        Floats got;
        int first = 0;
        for (const int n : rows) {
            PackInput part = p;
            part.T = n;
            part.x.assign(p.x.begin() + first * shape.K, p.x.begin() + (first + n) * shape.K);
            Device<uint8_t> x(size_t(gemm_x_bytes(n, shape.K)));
            pack(part, x);
            Device<float> out(size_t(n) * shape.N);
            must(cuda::gemm({n, shape.K, shape.N, x.p, w.p, out.p, nullptr}, stream));
            must(cudaStreamSynchronize(stream));
            const Floats some = out.get();
            got.insert(got.end(), some.begin(), some.end());
            first += n;
        }
        expect(whole.empty() || same_bits(whole, got), what + ": rows depend on how many there are");
        whole = whole.empty() ? got : whole;
    }
}

// Products of the same rows are the same together as apart, where both were chosen for.
void check_gemm_copies(int T, int64_t K, const Ints &sizes) {
    const PackInput p = random_input(ROWMM_PLAIN, T, K, 0);
    Device<uint8_t> x(size_t(gemm_x_bytes(T, K)));
    pack(p, x);
    int64_t all = 0;
    for (const int N : sizes) {
        all += N;
    }
    std::vector<__half> values(size_t(all) * K);
    for (__half &w : values) {
        w = __float2half(normals(1, 0.02f)[0]);
    }
    const Device<__half> weights(values);
    Device<float> apart(size_t(all) * T), together(size_t(all) * T);
    GemmCopiesArgs a = {T, int32_t(sizes.size()), K, x.p, nullptr, {}};
    int64_t first = 0;
    for (size_t i = 0; i < sizes.size(); i++) {
        a.weights[i] = {weights.p + first * K, together.p + first * T, sizes[i]};
        must(cuda::gemm({T, K, sizes[i], x.p, a.weights[i].weights, apart.p + first * T, nullptr}, stream));
        first += sizes[i];
    }
    must(cuda::gemm_copies(a, stream));
    must(cudaStreamSynchronize(stream));
    expect(same_bits(apart.get(), together.get()), "products of " + std::to_string(T) + " rows together");
}

} // namespace

void check_gemm_kernels(bool all) {
    for (int input : {ROWMM_PLAIN, ROWMM_RMS, ROWMM_GLU, ROWMM_GATED, ROWMM_HEAD_RMS}) {
        for (int64_t K : {int64_t(256), int64_t(5120), int64_t(17408), GEMM_MAX_K}) {
            check_pack(input, all ? 15 : 7, K, input >= ROWMM_HEAD_RMS ? 16 << pick(4) : 0);
        }
        check_pack(input, 1, 128, input >= ROWMM_HEAD_RMS ? 128 : 0);
        check_pack(input, 3, 176, input >= ROWMM_HEAD_RMS ? 16 : 0);
    }
    if (!all) { // the products are cuBLAS's
        return;
    }
    Device<float> nothing(8);
    expect(cuda::gemm({1, 8, 4, nothing.p, nothing.p, nothing.p, nullptr}, stream) != 0,
           "gemm needs gemm_open");
    must(cuda::gemm_open(stream));
    expect(cuda::gemm_open(stream) != 0, "gemm_open twice");
    check_gemm(130, 256, 48);
    check_gemm(1, 8, 4);
    check_gemm(257, 136, 1004);
    check_gemm(128, 5120, 10240);
    check_gemm(515, 17408, 5120);
    DeviceLimits device;
    must(cuda::device_limits(device));
    for (int form = 0; form < N_FEW_FORMS && device.wgmma; form++) {
        const int columns = FEW_FORMS[form].columns;
        check_few_rows(128, 5120, {64 * columns}, form);
        check_few_rows(65, 192, {1004}, form);
        check_few_rows(300, 1024, {48, 4, 20 * columns, columns}, form);
        check_few_rows(1, 2048, {3 * columns}, form);
    }
    cuda::gemm_close(stream);
    cuda::gemm_close(stream); // it closes nothing
    const std::vector<GemmShape> shapes = {{5120, 17408}, {10240, 5120}, {5120, 6144}, {48, 5120},
                                           {2048, 4096},  {1024, 2048},  {1000, 136}};
    Device<__half> scratch(size_t(5120) * 17408);
    must(cuda::gemm_open(stream, shapes, scratch.p));
    for (const GemmShape &shape : shapes) {
        check_gemm_cuts(shape);
    }
    for (const int T : {1, 65, 128, 129}) {
        check_gemm_copies(T, 5120, {10240, 48, 48});
        check_gemm_copies(T, 5120, {10240, 10240});
        check_gemm_copies(T, 2048, {1024, 1000, 1024}); // 1000 rows of weights were not chosen for
    }
    cuda::gemm_close(stream);
}
