// Checks of rowmm: every type and odd shapes against double precision, and that a row's bits depend on that row alone.
#include "harness.h"
#include "rowmm_reference.h"

#include <memory>
#include <numeric>

using namespace rowmm_test;

namespace {

// One weight matrix, permuted on the device.
struct Matrix {
    int type;
    int64_t K, N;
    Bytes blocks;
    Device<uint8_t> packed;

    Matrix(int type, int64_t K, int64_t N, uint32_t seed)
        : type(type), K(K), N(N), blocks(random_weights(type, K, N, seed)),
          packed(size_t(rowmm_packed_bytes(type, K, N))) {
        Device<uint8_t> src(blocks);
        must(cuda::rowmm_permute({type, K, N, src.p, packed.p}, stream));
        must(cudaStreamSynchronize(stream));
    }
    RowmmWeights weights(float *out) const { return {type, N, packed.p, out, N, nullptr, 0}; }
};

// Scratch as an engine has it: counters at zero, the rest junk.
struct Scratch {
    Device<uint8_t> memory;
    Scratch() : memory(size_t(cuda::rowmm_scratch_bytes())) { clear(); }
    void clear() {
        memory.poison();
        must(cudaMemset(memory.p, 0, size_t(cuda::rowmm_counter_bytes())));
    }
};

RowmmPackArgs plain(const Device<float> &x, int T, int64_t K, const Device<uint8_t> &out) {
    RowmmPackArgs a = {};
    a.x = x.p;
    a.x_row = K;
    a.T = T;
    a.K = K;
    a.out = out.p;
    return a;
}

// All outputs of one launch, matrix after matrix: [T][N] each. `replays` > 1: from a captured graph.
std::vector<Floats> run(const std::vector<const Matrix *> &matrices, const Floats &x, int T, bool overlap = false,
                        int replays = 1) {
    const int64_t K = matrices[0]->K;
    Scratch scratch;
    Device<float> dx(x);
    Device<uint8_t> packed(size_t(rowmm_x_bytes(T, K)));
    std::vector<std::unique_ptr<Device<float>>> out;
    RowmmArgs a = {};
    a.T = T;
    a.K = K;
    a.x = packed.p;
    a.scratch = scratch.memory.p;
    a.overlap = overlap;
    for (const Matrix *m : matrices) {
        out.emplace_back(new Device<float>(size_t(T) * m->N));
        a.weights[a.n_weights++] = m->weights(out.back()->p);
    }
    const auto enqueue = [&] {
        RowmmPackArgs pack = plain(dx, T, K, packed);
        pack.overlap = overlap;
        must(cuda::rowmm_pack(pack, stream));
        must(cuda::rowmm(a, stream));
    };
    run_times(replays, enqueue);
    std::vector<Floats> result;
    for (const auto &o : out) {
        result.push_back(o->get());
    }
    const std::vector<uint8_t> after = scratch.memory.get();
    expect(std::all_of(after.begin(), after.begin() + cuda::rowmm_counter_bytes(), [](uint8_t b) { return b == 0; }),
           "rowmm leaves its counters at zero");
    return result;
}

// 1% of the values are 8 times larger, as activations' outliers are.
Floats random_rows(int T, int64_t K) {
    Floats x = normals(size_t(T) * K);
    for (float &v : x) {
        v *= pick(100) == 0 ? 8.0f : 1.0f;
    }
    return x;
}

std::vector<int> some_outputs(int64_t N, int most) {
    std::vector<int> outputs;
    for (int64_t i = 0; i < std::min<int64_t>(N, most); i++) {
        outputs.push_back(int(N <= most ? i : i < 8 ? i : i < 16 ? N - 1 - (i - 8) : pick(int(N))));
    }
    return outputs;
}

// rms of (got - expected) over rms of expected
double relative_error(const Floats &got, const Doubles &expected, int T, int64_t N, const std::vector<int> &outputs) {
    double error = 0, size = 0;
    for (int t = 0; t < T; t++) {
        for (size_t i = 0; i < outputs.size(); i++) {
            const double e = expected[t * outputs.size() + i], g = got[size_t(t) * N + outputs[i]];
            error += (g - e) * (g - e);
            size += e * e;
        }
    }
    return std::sqrt(error / size);
}

std::string name(const Matrix &m) {
    return std::string(type_of(m.type).name) + " " + std::to_string(m.K) + " -> " + std::to_string(m.N);
}

// Rows of `base` (what 64 rows gave together) again, few or many at once, among junk, NaN and inf.
void check_rows(const std::vector<const Matrix *> &matrices, const Floats &x, const std::vector<Floats> &base,
                const Ints &widths, const std::string &what) {
    const int64_t K = matrices[0]->K;
    for (int T : widths) {
        Floats in(size_t(T) * K);
        Ints from(T, -1);
        const int sure = pick(T);
        for (int t = 0; t < T; t++) {
            const int junk = t == sure ? 9 : pick(6); // about half are rows of the base
            from[t] = junk < 3 ? -1 : pick(ROWMM_MAX_ROWS);
            for (int64_t k = 0; k < K; k++) {
                float &v = in[t * K + k];
                v = junk == 0 ? NAN : junk == 1 ? (k % 7 == 0 ? INFINITY : 3e38f) : float(pick(1000)) * 1e30f;
                v = from[t] >= 0 ? x[from[t] * K + k] : v;
            }
        }
        const std::vector<Floats> got = run(matrices, in, T, T % 2 == 1, T % 3 == 0 ? 2 : 1);
        bool same = true, shows = true;
        for (size_t m = 0; m < matrices.size(); m++) {
            const int64_t N = matrices[m]->N;
            for (int t = 0; t < T; t++) {
                const float *row = &got[m][t * N];
                if (from[t] >= 0) {
                    same = same && same_bits(row, &base[m][from[t] * N], size_t(N));
                } else if (std::isnan(in[t * K])) {
                    shows = shows && std::none_of(row, row + N, [](float v) { return std::isfinite(v); });
                }
            }
        }
        expect(same, "rowmm bits of " + what + " at " + std::to_string(T) + " rows");
        expect(shows, "rowmm shows NaN of " + what + " at " + std::to_string(T) + " rows");
    }
}

void check_matrices(const std::vector<const Matrix *> &matrices, const Ints &widths, const std::string &what,
                    double bound) {
    const int64_t K = matrices[0]->K;
    const Floats x = random_rows(ROWMM_MAX_ROWS, K);
    const std::vector<Floats> base = run(matrices, x, ROWMM_MAX_ROWS);
    double worst = 0;
    for (size_t m = 0; m < matrices.size(); m++) {
        const std::vector<int> outputs = some_outputs(matrices[m]->N, 200);
        Bytes rows; // of those outputs alone
        const size_t bytes = matrices[m]->blocks.size() / size_t(matrices[m]->N);
        std::vector<int> order(outputs.size());
        std::iota(order.begin(), order.end(), 0);
        for (int n : outputs) {
            rows.insert(rows.end(), &matrices[m]->blocks[n * bytes], &matrices[m]->blocks[n * bytes] + bytes);
        }
        const Doubles expected = product(dequantised(matrices[m]->type, rows), x, K, ROWMM_MAX_ROWS, order);
        const double error = relative_error(base[m], expected, ROWMM_MAX_ROWS, matrices[m]->N, outputs);
        worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
    }
    printf("  rowmm %-40s error %.2e\n", what.c_str(), worst);
    expect(worst < bound, "rowmm " + what + " is off by " + std::to_string(worst));
    expect(same_bits(run(matrices, x, ROWMM_MAX_ROWS, true, 3)[0], base[0]), "rowmm " + what + " twice");
    check_rows(matrices, x, base, widths, what);
}

// Every value back, as ggml's F32 rounded to F16. Of F32 weights the last bit may differ: they are held to 2^-22.
void check_unpack(const Matrix &m) {
    Device<__half> out(size_t(m.N) * m.K);
    must(cuda::rowmm_unpack({m.type, m.K, m.N, m.packed.p, out.p}, stream));
    must(cudaStreamSynchronize(stream));
    const std::vector<__half> got = out.get();
    const Floats expected = dequantised(m.type, m.blocks);
    size_t wrong = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const float g = __half2float(got[i]), e = __half2float(__float2half_rn(expected[i]));
        wrong += !(g == e || (m.type == 0 && std::fabs(g - e) <= std::fabs(e) / 1000));
    }
    expect(wrong == 0, "rowmm unpack " + name(m) + ": " + std::to_string(wrong) + " values differ");
}

// ---- what rowmm_pack computes ----

void check_pack(int input, int T, int64_t K, int head) {
    const int64_t x_row = K + 12, y_row = K + 4;
    const Floats x = normals(size_t(T) * x_row, 3.0f), y = normals(size_t(T) * y_row, 2.0f), w = normals(size_t(K));
    Device<float> dx(x), dy(y), dw(w), copy(size_t(T) * K);
    Device<uint8_t> out(size_t(rowmm_x_bytes(T, K)));
    RowmmPackArgs a = plain(dx, T, K, out);
    a.x_row = x_row;
    a.input = input;
    a.head = head;
    a.eps = 1e-6f;
    a.w = dw.p;
    a.y = dy.p;
    a.y_row = y_row;
    a.copy = copy.p;
    must(cuda::rowmm_pack(a, stream));
    must(cudaStreamSynchronize(stream));
    const Floats got = copy.get();
    const int64_t mean = input == ROWMM_RMS ? K : head;
    double worst = 0;
    for (int t = 0; t < T; t++) {
        for (int64_t k = 0; k < K; k++) {
            double squares = 0, e = x[t * x_row + k];
            if (input == ROWMM_RMS || input == ROWMM_HEAD_RMS) {
                for (int64_t i = k / mean * mean; i < k / mean * mean + mean; i++) {
                    squares += double(x[t * x_row + i]) * x[t * x_row + i];
                }
                e *= w[k % mean] / std::sqrt(squares / double(mean) + 1e-6);
            }
            if (input == ROWMM_SWIGLU) {
                e = e / (1 + std::exp(-e)) * y[t * y_row + k];
            } else if (input == ROWMM_HEAD_RMS) {
                const double z = y[t * y_row + k];
                e *= z / (1 + std::exp(-z));
            }
            worst = std::max(worst, std::fabs(got[t * K + k] - e) / (std::fabs(e) + 1e-3));
        }
    }
    expect(worst < 1e-5, "rowmm_pack " + std::to_string(input) + " is off by " + std::to_string(worst));
}

void check_residual() {
    const Matrix m(12, 512, 200, 5);
    const int T = 9;
    const Floats x = random_rows(T, m.K), r = normals(size_t(T) * m.N);
    const Floats product = run({&m}, x, T)[0];
    Scratch scratch;
    Device<float> dx(x), out(r);
    Device<uint8_t> packed(size_t(rowmm_x_bytes(T, m.K)));
    RowmmArgs a = {};
    a.T = T;
    a.K = m.K;
    a.x = packed.p;
    a.scratch = scratch.memory.p;
    a.n_weights = 1;
    a.weights[0] = m.weights(out.p);
    a.weights[0].residual = out.p;
    a.weights[0].residual_row = m.N;
    must(cuda::rowmm_pack(plain(dx, T, m.K, packed), stream));
    must(cuda::rowmm(a, stream));
    must(cudaStreamSynchronize(stream));
    const Floats got = out.get();
    bool good = true;
    for (size_t i = 0; i < got.size(); i++) {
        good = good && got[i] == product[i] + r[i];
    }
    expect(good, "rowmm adds a residual in place");
}

} // namespace

// `all` false: small shapes, for compute-sanitizer.
void check_rowmm(bool all) {
    const Ints widths = all ? Ints{1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 47, 63, 64} : Ints{1, 5, 9, 17, 40};
    for (const Type &t : TYPES) {
        const Matrix odd(t.id, 512, 200, uint32_t(t.id) + 1);
        check_unpack(odd);
        check_matrices({&odd}, widths, name(odd), 1e-3);
        if (t.values < 256) {
            const Matrix cut(t.id, 288, 33, uint32_t(t.id) + 2);
            check_unpack(cut);
            check_matrices({&cut}, {1, 6, 64}, name(cut), 1e-3);
        }
    }
    check_residual();
    for (int T : {1, 7, 40}) {
        check_pack(ROWMM_PLAIN, T, 288, 0);
        check_pack(ROWMM_RMS, T, 5120, 0);
        check_pack(ROWMM_RMS, T, 10240, 0);
        check_pack(ROWMM_SWIGLU, T, 17408 / 8, 0);
        check_pack(ROWMM_HEAD_RMS, T, 6144 / 4, 128);
        check_pack(ROWMM_HEAD_RMS, T, 512, 64);
    }
    if (!all) {
        return;
    }
    const Ints few = {1, 2, 6, 8, 11, 16, 21, 32, 50, 64};
    const Matrix qkv(13, 5120, 1040, 1), z(12, 5120, 640, 2), alpha(8, 5120, 48, 3), beta(0, 5120, 48, 4);
    check_matrices({&qkv, &z, &alpha, &beta}, few, "qkv, z, alpha, beta", 1e-3);
    const Matrix v(14, 5120, 96, 5), f16(1, 5120, 130, 6), bf16(30, 5120, 17, 7);
    check_matrices({&z, &v, &f16, &bf16}, few, "Q4_K, Q6_K, F16, BF16", 1e-3);
    for (int type : {12, 14}) {
        const Matrix down(type, 17408, 144, 8), one(type, 256, 1, 9), head(type, 256, 248320, 10);
        check_matrices({&down}, few, name(down), 1e-3);
        check_matrices({&one}, few, name(one), 1e-3);
        check_matrices({&head}, {1, 64}, name(head), 1e-3);
    }
}
