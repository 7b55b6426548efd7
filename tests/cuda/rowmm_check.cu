// Checks rowmm: every type and odd shapes against double precision, and that a row's bits depend on that row
// alone.
#include "harness.h"
#include "rowmm_matrix.h"

#include <memory>
#include <numeric>

using namespace rowmm_test;

namespace {

// Returns all outputs of one launch, matrix after matrix, [T][N] each. With `replays` > 1 they come from a
// captured graph.
std::vector<Floats> run(const std::vector<const Matrix *> &matrices, const Floats &x, int T,
                        bool overlap = false, int replays = 1) {
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
    return result;
}

// Of the values 1% are 8 times larger, as activations' outliers are.
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

// Returns the rms of (got - expected) over the rms of expected.
double relative_error(const Floats &got, const Doubles &expected, int T, int64_t N,
                      const std::vector<int> &outputs) {
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

// Runs rows of `base` (what 64 rows gave together) again, few or many at once, among junk, NaN and inf.
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
        Bytes rows; // it holds the rows of these outputs alone
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
    expect(same_bits(run(matrices, x, ROWMM_MAX_ROWS, true, watched() ? 1 : 3)[0], base[0]),
           "rowmm " + what + " twice");
    check_rows(matrices, x, base, widths, what);
}

// Reads every value back, as ggml's F32 rounded to F16. Of F32 weights the last bit may differ, so they are
// held to 2^-22.
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
    const Floats x = normals(size_t(T) * x_row, 3.0f), y = normals(size_t(T) * y_row, 2.0f),
                 w = normals(size_t(K));
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
    const int64_t mean = head;
    if (input == ROWMM_RMS) { // check_norm checks the rest
        bool same = true;
        for (int t = 0; t < T; t++) {
            same = same && same_bits(&got[size_t(t) * K], &x[size_t(t) * x_row], size_t(K));
        }
        expect(same, "rowmm_pack keeps x before its norm");
        return;
    }
    double worst = 0;
    for (int t = 0; t < T; t++) {
        for (int64_t k = 0; k < K; k++) {
            double squares = 0, e = x[t * x_row + k];
            if (input == ROWMM_HEAD_RMS) {
                for (int64_t i = k / mean * mean; i < k / mean * mean + mean; i++) {
                    squares += double(x[t * x_row + i]) * x[t * x_row + i];
                }
                e *= w[k % mean] / std::sqrt(squares / double(mean) + 1e-6);
            }
            if (input == ROWMM_GLU) {
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

// A residual is added in place, and the sum has the bits that it has where the product stays parts for the next kernel.
// Of few rows a block has all of K (matmul/whole_k.cu).
void check_residual(const Matrix &m, int T) {
    const Floats x = random_rows(T, m.K), r = normals(size_t(T) * m.N), ones(size_t(m.N), 1.0f);
    const Floats product = run({&m}, x, T)[0];
    Scratch scratch;
    Device<float> dx(x), dr(r), out(r), w(ones), sum(size_t(T) * m.N);
    Device<uint8_t> packed(size_t(rowmm_x_bytes(T, m.K))), normed(size_t(rowmm_x_bytes(T, m.N)));
    RowmmArgs a = {};
    a.T = T;
    a.K = m.K;
    a.x = packed.p;
    a.scratch = scratch.memory.p;
    a.n_weights = 1;
    a.weights[0] = m.weights(out.p);
    RowmmArgs left = a;
    a.weights[0].residual = out.p;
    a.weights[0].residual_row = m.N;
    Device<float> parts(size_t(rowmm_parts_bytes(left)) / sizeof(float));
    parts.poison();
    left.parts = parts.p;
    RowmmPackArgs adds = plain(dr, T, m.N, normed);
    adds.input = ROWMM_RMS;
    adds.w = w.p;
    adds.parts = &left;
    adds.copy = sum.p;
    must(cuda::rowmm_pack(plain(dx, T, m.K, packed), stream));
    must(cuda::rowmm(a, stream));
    must(cuda::rowmm(left, stream));
    must(cuda::rowmm_pack(adds, stream));
    must(cudaStreamSynchronize(stream));
    const Floats got = out.get();
    bool good = true;
    for (size_t i = 0; i < got.size(); i++) {
        good = good && got[i] == product[i] + r[i];
    }
    const std::string what = name(m) + " at " + std::to_string(T) + " rows";
    expect(good, "rowmm adds a residual in place: " + what);
    expect(same_bits(got.data(), sum.get().data(), got.size()),
           "rowmm adds parts as who reads them does: " + what);
}
void check_residuals() {
    for (const int type : {12, 14, 8, 0, 30}) {
        const Matrix m(type, 1280, 400, uint32_t(60 + type));
        for (const int T : {1, 3, 8, 9}) {
            check_residual(m, T);
        }
    }
}

// Runs a chain x -> first -> (+ x, norm) -> gate, up -> SwiGLU -> down, whose results stay parts up to the
// last.
struct Chain {
    int64_t K, F;
    Matrix first{12, K, K, 31}, gate{12, K, F, 32}, up{14, K, F, 33}, down{13, F, K, 34};
    Floats x = random_rows(ROWMM_MAX_ROWS, K), norm = normals(size_t(K));

    Chain(int64_t width, int64_t inner) : K(width), F(inner) {
        for (int64_t k = 0; k < K; k++) {
            x[3 * K + k] *= 1e15f; // this puts a row far from the others
        }
    }

    struct Results {
        Floats sum, gated, out, normed; // `normed` is of gate alone, added up by the launch itself
        bool same(const Results &o) const {
            const auto begins = [](const Floats &few, const Floats &many) {
                return few.size() <= many.size() && same_bits(few.data(), many.data(), few.size());
            };
            return begins(sum, o.sum) && begins(gated, o.gated) && begins(out, o.out) &&
                   begins(normed, o.normed);
        }
    };

    RowmmArgs args(int T, int64_t k, const Device<uint8_t> &from, const Scratch &scratch,
                   const std::vector<RowmmWeights> &weights) const {
        RowmmArgs a = {};
        a.T = T;
        a.K = k;
        a.x = from.p;
        a.scratch = scratch.memory.p;
        a.overlap = 1;
        a.n_weights = int(weights.size());
        std::copy(weights.begin(), weights.end(), a.weights);
        return a;
    }
    Results run(int T) const {
        Scratch scratch;
        Device<float> dx(Floats(x.begin(), x.begin() + T * K)), w(norm), sum(size_t(T) * K),
            act(size_t(T) * F), out(size_t(T) * K), one(size_t(T) * F);
        const auto packed_rows = [&](int64_t n) { return Device<uint8_t>(size_t(rowmm_x_bytes(T, n))); };
        const Device<uint8_t> packed = packed_rows(K), normed = packed_rows(K), gated = packed_rows(F);
        RowmmArgs m1 = args(T, K, packed, scratch, {first.weights(nullptr)});
        RowmmArgs m2 = args(T, K, normed, scratch, {gate.weights(nullptr), up.weights(nullptr)});
        m2.normed = 1;
        m2.eps = 1e-5f;
        RowmmArgs alone = m2;
        alone.n_weights = 1;
        alone.weights[0].out = one.p;
        Device<float> p1(size_t(rowmm_parts_bytes(m1)) / 4), p2(size_t(rowmm_parts_bytes(m2)) / 4);
        p1.poison();
        p2.poison();
        m1.parts = p1.p;
        m2.parts = p2.p;
        RowmmPackArgs rms = plain(dx, T, K, normed), swiglu = plain(dx, T, F, gated);
        rms.input = ROWMM_RMS;
        rms.w = w.p;
        rms.parts = &m1;
        rms.copy = sum.p;
        swiglu.input = ROWMM_GLU;
        swiglu.parts = &m2;
        swiglu.copy = act.p;
        rms.overlap = swiglu.overlap = 1;
        must(cuda::rowmm_pack(plain(dx, T, K, packed), stream));
        must(cuda::rowmm(m1, stream));
        must(cuda::rowmm_pack(rms, stream));
        must(cuda::rowmm(alone, stream));
        must(cuda::rowmm(m2, stream));
        must(cuda::rowmm_pack(swiglu, stream));
        must(cuda::rowmm(args(T, F, gated, scratch, {down.weights(out.p)}), stream));
        must(cudaStreamSynchronize(stream));
        return {sum.get(), act.get(), out.get(), one.get()};
    }

    static Doubles products(const Matrix &m, const Floats &from, int T) {
        std::vector<int> all(size_t(m.N));
        std::iota(all.begin(), all.end(), 0);
        return product(dequantised(m.type, m.blocks), from, m.K, T, all);
    }
    static void expect_near(const Floats &got, const Doubles &expected, int T, int64_t N, double bound,
                            const char *what) {
        std::vector<int> all(size_t(N), 0);
        std::iota(all.begin(), all.end(), 0);
        const double error = relative_error(got, expected, T, N, all);
        expect(error < bound, std::string("rowmm chain, ") + what + ", is off by " + std::to_string(error));
    }
    // Each result is held against doubles, computed from the one before it as it was found.
    void compare(const Results &got, int T) const {
        Doubles sum = products(first, x, T);
        for (size_t i = 0; i < sum.size(); i++) {
            sum[i] += x[i];
        }
        expect_near(got.sum, sum, T, K, 1e-3, "sum");
        Floats h(size_t(T) * K);
        for (int t = 0; t < T; t++) {
            double squares = 0;
            for (int64_t k = 0; k < K; k++) {
                squares += double(got.sum[t * K + k]) * got.sum[t * K + k];
            }
            for (int64_t k = 0; k < K; k++) {
                h[t * K + k] = float(got.sum[t * K + k] * norm[k] / std::sqrt(squares / double(K) + 1e-5));
            }
        }
        Doubles g = products(gate, h, T);
        const Doubles u = products(up, h, T);
        expect_near(got.normed, g, T, F, 1e-3, "normed");
        for (size_t i = 0; i < g.size(); i++) {
            g[i] = g[i] / (1 + std::exp(-g[i])) * u[i];
        }
        expect_near(got.gated, g, T, F, 2e-3, "gated");
        expect_near(got.out, products(down, got.gated, T), T, K, 1e-3, "down");
    }
};

// Checks that the chain is right at the first of the widths, which is the largest, and has the same bits at the others.
void check_chain(int64_t K, int64_t F, const Ints &widths) {
    const Chain chain(K, F);
    const Chain::Results base = chain.run(widths[0]);
    chain.compare(base, widths[0]);
    for (int T : widths) {
        expect(chain.run(T).same(base), "rowmm chain bits at " + std::to_string(T) + " rows");
    }
}

} // namespace

// Checks launches whose ranges begin anywhere in K, and are long enough to fill the rings more than once. The
// types' units are as long as each other, or not.
void check_rowmm_ranges() {
    // Up to 8 rows have 1, 2, 4 or 8 columns, which have a kernel each.
    const Ints widths = {1, 12, 24, 40}, few = {2, 4, 7};
    const Matrix q4(12, 1280, 1100, 41), q5(13, 1280, 400, 42), q6(14, 1280, 180, 43), q8(8, 1280, 48, 44);
    const Matrix f32(0, 1280, 48, 45), f16(1, 1280, 150, 46), bf16(30, 512, 400, 47), last(12, 256, 2900, 48);
    check_matrices({&q4}, widths, name(q4), 1e-3);
    check_matrices({&q5, &q4, &q8, &q6}, widths, "Q5_K, Q4_K, Q8_0, Q6_K", 1e-3);
    check_matrices({&q5, &q4, &q8, &q6}, few, "Q5_K, Q4_K, Q8_0, Q6_K", 1e-3);
    check_matrices({&q5, &f32, &q8}, widths, "Q5_K, F32, Q8_0", 1e-3);
    check_matrices({&f16, &q6, &f32}, widths, "F16, Q6_K, F32", 1e-3);
    check_matrices({&bf16}, {3, 5, 6, 8}, name(bf16), 1e-3);
    check_matrices({&last}, {8, 12, 40}, name(last), 1e-3);
    check_residuals();
    check_chain(512, 768, {40, 1, 2, 5, 8, 9}); // its products find the scales of their rows
}

// Checks what depends on the kind of device: how many slots of weights it has room for, and which kernel of the tensor
// core it has.
void check_rowmm_kind() {
    const Matrix q8(8, 768, 260, 51), f32(0, 768, 33, 52), q4(12, 768, 100, 53), q5(13, 768, 33, 54);
    check_matrices({&q8, &f32}, {1, 12, 24}, "Q8_0, F32", 1e-3);
    check_matrices({&q4, &q5}, {1, 12, 24, 40}, "Q4_K, Q5_K", 1e-3);
}

// With `all` false the shapes are small, for compute-sanitizer.
void check_rowmm(bool all) {
    Ints widths = {1, 9, 17, 40};
    if (all) {
        widths.resize(ROWMM_MAX_ROWS);
        std::iota(widths.begin(), widths.end(), 1);
    }
    for (const Type &t : TYPES) {
        const Matrix odd(t.id, 512, 200, uint32_t(t.id) + 1);
        check_unpack(odd);
        check_matrices({&odd}, widths, name(odd), 1e-3);
        if (t.values < 256) {
            const Matrix cut(t.id, 288, 33, uint32_t(t.id) + 2);
            check_unpack(cut);
            check_matrices({&cut}, watched() ? Ints{1, 6} : Ints{1, 6, 64}, name(cut), 1e-3);
        }
    }
    check_rowmm_ranges();
    for (int T : {1, 7, 40}) {
        check_pack(ROWMM_PLAIN, T, 288, 0);
        check_pack(ROWMM_RMS, T, 5120, 0);
        check_pack(ROWMM_RMS, T, 10240, 0);
        check_pack(ROWMM_GLU, T, 17408 / 8, 0);
        check_pack(ROWMM_HEAD_RMS, T, 6144 / 4, 128);
        check_pack(ROWMM_HEAD_RMS, T, 512, 64);
        check_pack(ROWMM_HEAD_RMS, T, 512, 16);
    }
    if (!all) {
        return;
    }
    check_chain(512, 768, {64, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 50});
    check_chain(8448, 256, {40, 1, 8, 9, 20}); // a row has more chunks than a warp has lanes
    const Ints few = {1, 2, 6, 8, 11, 16, 21, 32, 50, 64};
    for (const Type &t : TYPES) {
        for (const auto &[K, N] : {std::pair<int64_t, int64_t>{256, 17}, {5120, 72}, {17408, 40}}) {
            const Matrix real(t.id, K, N, uint32_t(t.id) + 3);
            check_matrices({&real}, {1, 7, 13, 30, 61}, name(real), 1e-3);
        }
    }
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
