// Checks what rowmm_pack makes of parts, and each byte that it packs, against a host that adds and rounds by the layout's
// words (matmul/layout.h), and what the conv makes of them. The parts are made here, so no product is needed.
#include "made_parts.h"

#include "common/activation.h"
#include "common/device_limits.h"
#include "moe/plan.h"

#include <cuda_fp16.h>

namespace {

float of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}
float half_at(const uint8_t *p) {
    __half_raw raw;
    memcpy(&raw.x, p, sizeof(raw.x));
    return __half2float(__half(raw));
}

// Compares one row of one chunk, whose values are v, with what was packed.
bool same_chunk(const uint8_t *chunk, const RowsLayout &layout, int column, const float (&v)[CHUNK]) {
    const int C = layout.columns;
    float most = 0;
    for (float x : v) {
        most = std::max(most, std::fabs(x));
    }
    uint32_t bits;
    memcpy(&bits, &most, sizeof(bits));
    const uint32_t exponent = std::max(bits >> 23, 10u);
    const float up = of_bits((263 - exponent) << 23), down = of_bits((exponent - 9) << 23);
    double sums[8] = {};
    for (int k = 0; k < CHUNK; k++) {
        const int t = k / 64, j = k / 8 % 8, i = k % 8;
        const size_t at = layout.wide ? size_t(((j * 4 + i / 2) * C + column) * 4 + t) * 4 + size_t(i % 2) * 2
                                      : size_t((j * C + column) * 4 + t) * 16 + size_t(i) * 2;
        const float expected = __half2float(__float2half_rn(v[k] * up));
        if (half_at(chunk + at) != expected) {
            return false;
        }
        sums[k / 32] += expected;
    }
    const uint8_t *tail = chunk + chunk_sums(C);
    for (int i = 0; i < 8; i++) { // the tail has hi of two sums, then lo of both
        const uint8_t *pair = tail + (column * 4 + i / 2) * 8 + i % 2 * 2;
        // Of a sum up to 32 * 1023, hi and lo together leave 2^-7 and less.
        if (!(std::fabs(half_at(pair) + half_at(pair + 4) - sums[i]) <= 1.0 / 128)) {
            return false;
        }
    }
    float scale;
    memcpy(&scale, tail + 32 * C + column * 4, sizeof(scale));
    return scale == down;
}

// Compares all that was packed with the values [T][K].
bool same_rows(const std::vector<uint8_t> &packed, const Floats &values, int T, int64_t K) {
    luce::DeviceLimits device;
    must(cuda::device_limits(device));
    const RowsLayout layout(T, device.wgmma);
    bool same = true;
    for (int t = 0; t < T; t++) {
        for (int64_t c = 0; c < chunks_of(K); c++) {
            float v[CHUNK] = {};
            std::copy_n(&values[size_t(t * K + c * CHUNK)], std::min<int64_t>(CHUNK, K - c * CHUNK), v);
            const int64_t at = (t / layout.set * chunks_of(K) + c) * chunk_bytes(layout.columns);
            same = same && same_chunk(&packed[size_t(at)], layout, t % layout.set, v);
        }
    }
    return same;
}

std::string name_of(const char *what, int T, int64_t K, int64_t N) {
    return std::string("pack of parts, ") + what + " " + std::to_string(K) + " -> " + std::to_string(N) +
           ", " + std::to_string(T) + " rows";
}

RowmmPackArgs pack_args(int T, int64_t K, const Parts &parts, const Device<uint8_t> &out,
                        const Device<float> &copy) {
    RowmmPackArgs a = {};
    a.T = T;
    a.K = K;
    a.x_row = K + 8;
    a.out = out.p;
    a.parts = &parts.args;
    a.copy = copy.p;
    a.overlap = 1;
    return a;
}

// Says whether the squares behind packed rows are those of the values [T][N], chunk by chunk.
bool squares_are_near(const std::vector<uint8_t> &packed, const Floats &values, int T, int64_t N) {
    const float *squares = reinterpret_cast<const float *>(&packed[size_t(squares_offset(T, N))]);
    bool near = true;
    for (int t = 0; t < T; t++) {
        for (int64_t c = 0; c < chunks_of(N); c++) {
            double expected = 0;
            for (int64_t n = c * CHUNK; n < std::min<int64_t>(N, (c + 1) * CHUNK); n++) {
                expected += double(values[size_t(t * N + n)]) * values[size_t(t * N + n)];
            }
            near = near && std::fabs(squares[t * chunks_of(N) + c] - expected) <= 1e-5 * expected;
        }
    }
    return near;
}

// `alone` says that there is nothing to be added to the results.
void check_norm(int T, int64_t K, int64_t N, bool alone) {
    const Parts parts(T, K, {{12, N}});
    const Floats x = normals(size_t(T) * (N + 8)), w = normals(size_t(N));
    Device<float> dx(x), dw(w), copy(size_t(T) * N);
    Device<uint8_t> out(size_t(rowmm_x_bytes(T, N)));
    RowmmPackArgs a = pack_args(T, N, parts, out, copy);
    a.x = alone ? nullptr : dx.p;
    a.input = ROWMM_RMS;
    a.w = dw.p;
    must(cuda::rowmm_pack(a, stream));
    must(cudaStreamSynchronize(stream));
    Floats sum = parts.sums[0];
    for (size_t i = 0; i < sum.size(); i++) {
        sum[i] += alone ? 0.0f : x[i / N * (N + 8) + i % N];
    }
    expect(same_bits(copy.get(), sum), name_of("residual and sum", T, K, N));
    const std::vector<uint8_t> packed = out.get();
    expect(squares_are_near(packed, sum, T, N), name_of("squares", T, K, N));
    for (size_t i = 0; i < sum.size(); i++) {
        sum[i] *= w[i % N];
    }
    expect(same_rows(packed, sum, T, N), name_of("norm", T, K, N));
}

// A product is normed, added to the residual and scaled, and that is packed for the norm behind it, or not. A row's bits are
// those that it has alone.
void check_post(int T, int64_t K, int64_t N, bool packs) {
    const Parts parts(T, K, {{12, N}});
    const Floats x = normals(size_t(T) * (N + 8)), w = normals(size_t(N)), post = normals(size_t(N));
    Device<float> dx(x), dw(w), dpost(post), copy(size_t(T) * N);
    Device<uint8_t> out(size_t(rowmm_x_bytes(T, N)));
    RowmmPackArgs a = pack_args(T, N, parts, out, copy);
    a.x = dx.p;
    a.input = ROWMM_RMS;
    a.w = packs ? dw.p : nullptr;
    a.out = packs ? out.p : nullptr;
    a.post = dpost.p;
    a.eps = 1e-6f;
    a.post_scale = 0.37f;
    must(cuda::rowmm_pack(a, stream));
    must(cudaStreamSynchronize(stream));
    Floats got = copy.get();
    double worst = 0;
    for (int t = 0; t < T; t++) {
        const float *sum = &parts.sums[0][size_t(t * N)];
        double squares = 0;
        for (int64_t n = 0; n < N; n++) {
            squares += double(sum[n]) * sum[n];
        }
        for (int64_t n = 0; n < N; n++) {
            const double expected = (x[size_t(t * (N + 8) + n)] +
                                     sum[n] / std::sqrt(squares / double(N) + 1e-6) * post[size_t(n)]) * double(0.37f);
            const double error = std::fabs(got[size_t(t * N + n)] - expected) / (std::fabs(expected) + 1e-2);
            worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
        }
    }
    expect(worst < 1e-5, name_of("a norm ahead of the residual", T, K, N) + " is off by " + std::to_string(worst));
    if (!packs) {
        return;
    }
    const std::vector<uint8_t> packed = out.get();
    expect(squares_are_near(packed, got, T, N), name_of("squares behind a norm", T, K, N));
    for (size_t i = 0; i < got.size(); i++) {
        got[i] *= w[i % N];
    }
    expect(same_rows(packed, got, T, N), name_of("two norms", T, K, N));
}

// A mixture beside a dense layer: what both gave, or the layer's parts and sums that were made elsewhere, is normed, added, normed,
// added to the residual and scaled, and that is packed for the norm behind it, or not.
void check_post_of_mixture(int T, int64_t K, int64_t E, int n_used, bool elsewhere, bool packs) {
    constexpr int EXPERTS = 40;
    MoeDims dims(T, EXPERTS, n_used, E, 64, elsewhere ? 0 : 96);
    dims.dense = !elsewhere;
    const RoutedLayout at(dims);
    const Parts parts(T, K, {{8, E}});
    const size_t pairs = size_t(T) * n_used;
    Floats x = normals(size_t(T) * E), y = normals(pairs * E), weights(pairs), factors(EXPERTS), norms[4];
    Ints ids(pairs);
    std::vector<uint8_t> routed(size_t(at.bytes), 0xff);
    for (int e = 0; e < EXPERTS; e++) {
        factors[e] = 0.4f + float(e % 5) / 3;
    }
    for (size_t i = 0; i < pairs; i++) {
        ids[i] = int(i * 7 + 3) % EXPERTS;
        weights[i] = 0.05f + float(i % 11) / 40;
    }
    memcpy(&routed[size_t(at.ids)], ids.data(), pairs * 4);
    memcpy(&routed[size_t(at.weights)], weights.data(), pairs * 4);
    for (Floats &norm : norms) {
        norm = normals(size_t(E));
    }
    y.insert(y.end(), parts.sums[0].begin(), parts.sums[0].end()); // the dense layer's places are behind the experts'
    Floats sums(size_t(T) * E, 0.0f); // in F32, by rank, as the kernel adds them
    for (size_t i = 0; i < pairs; i++) {
        for (int64_t n = 0; n < E; n++) {
            float &sum = sums[i / size_t(n_used) * E + n];
            sum = std::fma(weights[i] * factors[ids[i]], y[i * E + n], sum);
        }
    }
    Device<uint8_t> d_routed(routed), packed(size_t(rowmm_x_bytes(T, E)));
    Device<float> dx(x), dy(y), d_sums(sums), d_factors(factors), out(size_t(T) * E), d_norms[4] = {
        Device<float>(norms[0]), Device<float>(norms[1]), Device<float>(norms[2]), Device<float>(norms[3])};
    Ints counted(EXPERTS, 0);
    for (int id : ids) {
        counted[size_t(id)]++;
    }
    Device<int32_t> counts(Ints(EXPERTS, 0));
    out.poison();
    MoePostArgs a = {};
    a.dims = dims;
    a.routed = elsewhere ? nullptr : d_routed.p;
    a.y = elsewhere ? d_sums.p : dy.p;
    a.scales = elsewhere ? nullptr : d_factors.p;
    a.counts = elsewhere ? nullptr : counts.p;
    a.parts = elsewhere ? &parts.args : nullptr;
    a.residual = dx.p;
    a.dense_post = d_norms[0].p;
    a.experts_post = d_norms[1].p;
    a.post = d_norms[2].p;
    a.eps = 1e-6f;
    a.post_scale = 0.37f;
    a.out = out.p;
    a.norm = packs ? d_norms[3].p : nullptr;
    a.packed = packs ? packed.p : nullptr;
    a.overlap = T % 2;
    must(cuda::moe_post(a, stream));
    must(cudaStreamSynchronize(stream));
    const std::string name = name_of(elsewhere ? "a mixture of elsewhere" : "a mixture", T, K, E);
    Floats got = out.get();
    double worst = 0;
    for (int t = 0; t < T; t++) {
        const auto normed = [&](const auto &of, const Floats &norm) {
            double squares = 0;
            for (int64_t n = 0; n < E; n++) {
                squares += double(of(n)) * of(n);
            }
            Doubles row(static_cast<size_t>(E));
            for (int64_t n = 0; n < E; n++) {
                row[size_t(n)] = of(n) / std::sqrt(squares / double(E) + 1e-6) * norm[size_t(n)];
            }
            return row;
        };
        const Doubles dense = normed([&](int64_t n) { return parts.sums[0][size_t(t * E + n)]; }, norms[0]),
                      experts = normed([&](int64_t n) { return sums[size_t(t * E + n)]; }, norms[1]),
                      both = normed([&](int64_t n) { return dense[size_t(n)] + experts[size_t(n)]; }, norms[2]);
        for (int64_t n = 0; n < E; n++) {
            const double expected = (x[size_t(t * E + n)] + both[size_t(n)]) * double(0.37f);
            const double error = std::fabs(got[size_t(t * E + n)] - expected) / (std::fabs(expected) + 1e-1);
            worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
        }
    }
    expect(worst < 1e-5, name + " is off by " + std::to_string(worst));
    expect(elsewhere || counts.get() == counted, name + ": counts");
    if (packs) {
        const std::vector<uint8_t> bytes = packed.get();
        expect(squares_are_near(bytes, got, T, E), name + ": squares");
        for (size_t i = 0; i < got.size(); i++) {
            got[i] *= norms[3][i % size_t(E)];
        }
        expect(same_rows(bytes, got, T, E), name + ": the norm behind it");
    }
}

// A convolution over the rows of blocks of B, ahead of a sublayer and behind it. What rows add to its kernels is left in parts.
void check_block_conv(int blocks, int B, int64_t E, int taps, int groups, bool behind) {
    const int T = blocks * B, side = behind ? 1 : 0;
    const Parts added(T, E, {{E % CHUNK == 0 ? 12 : 1, int64_t(2) * taps * groups}}), parts(T, 512, {{12, E}});
    const int64_t row = E + 8;
    const Floats x = normals(size_t(T) * row), w = normals(size_t(E)), base = normals(size_t(2) * taps * E);
    Floats own(size_t(T) * E);
    for (size_t i = 0; i < own.size(); i++) {
        own[i] = x[i / E * row + i % E];
    }
    StepCtl ctl = blank_ctl();
    for (int t = 0; t < T; t++) {
        ctl.rows[t].parent = t % B == 0 ? -1 : t - 1;
    }
    Device<float> dx(x), dw(w), dbase(base), copy(size_t(T) * E);
    Device<uint8_t> out(size_t(rowmm_x_bytes(T, E))), normed(size_t(rowmm_x_bytes(T, E)));
    Device<StepCtl> control(std::vector<StepCtl>{ctl});
    BlockConvPackArgs a = {};
    a.T = T;
    a.taps = taps;
    a.groups = groups;
    a.K = E;
    a.x = dx.p;
    a.x_row = row;
    a.w = dw.p;
    a.eps = 1e-6f;
    a.added = &added.args;
    a.base = dbase.p;
    a.ctl = control.p;
    a.out = out.p;
    if (behind) {
        a.parts = &parts.args;
        a.copy = copy.p;
    } else {
        RowmmPackArgs norm = {};
        norm.x = dx.p;
        norm.x_row = row;
        norm.T = T;
        norm.K = E;
        norm.out = normed.p;
        norm.input = ROWMM_RMS;
        norm.w = dw.p;
        must(cuda::rowmm_pack(norm, stream));
        a.normed = normed.p;
    }
    must(cuda::block_conv_pack(a, stream));
    must(cudaStreamSynchronize(stream));
    const Floats got = copy.get();
    const std::vector<uint8_t> packed = out.get();
    const RowsLayout layout(T, [] {
        luce::DeviceLimits device;
        must(cuda::device_limits(device));
        return device.wgmma;
    }());
    double worst = 0;
    for (int t = 0; t < T; t++) {
        std::vector<double> expected(size_t(E), 0.0), size(size_t(E), 1e-2);
        for (int tap = 0; tap < taps && tap <= t % B; tap++) {
            const int from = t - tap;
            double squares = 0;
            for (int64_t c = 0; c < E; c++) {
                squares += double(own[size_t(from * E + c)]) * own[size_t(from * E + c)];
            }
            for (int64_t c = 0; c < E; c++) {
                const int64_t column = (side * taps + tap) * groups + c / (E / groups);
                const double kernel = double(base[size_t((side * taps + tap) * E + c)]) +
                                      added.sums[0][size_t(t * 2 * taps * groups + column)];
                const double value = behind ? double(parts.sums[0][size_t(from * E + c)])
                                            : own[size_t(from * E + c)] / std::sqrt(squares / double(E) + 1e-6) *
                                                  w[size_t(c)];
                const double parts_size = column % 37 == 0 ? 64 : 1; // of the parts, which are added in another order here
                expected[size_t(c)] += kernel * value;
                size[size_t(c)] += (std::fabs(kernel) + parts_size) * std::fabs(value);
            }
        }
        double row_most[64] = {}, error[64] = {}; // of each chunk
        for (int64_t c = 0; c < E; c++) {
            const double sum = expected[size_t(c)] + (behind ? own[size_t(t * E + c)] : 0.0f);
            if (behind) {
                worst = std::max(worst, std::fabs(got[size_t(t * E + c)] - sum) / size[size_t(c)]);
                continue;
            }
            const uint8_t *chunk = &packed[size_t((t / layout.set * chunks_of(E) + c / CHUNK) * chunk_bytes(layout.columns))];
            const int C = layout.columns, column = t % layout.set, k = int(c % CHUNK), j = k / 8 % 8, i = k % 8;
            const size_t at = layout.wide
                                  ? size_t(((j * 4 + i / 2) * C + column) * 4 + k / 64) * 4 + size_t(i % 2) * 2
                                  : size_t((j * C + column) * 4 + k / 64) * 16 + size_t(i) * 2;
            float down;
            memcpy(&down, chunk + chunk_sums(C) + 32 * C + column * 4, sizeof(down));
            row_most[c / CHUNK] = std::max(row_most[c / CHUNK], std::fabs(sum));
            error[c / CHUNK] = std::max(error[c / CHUNK], std::fabs(double(half_at(chunk + at)) * down - sum));
        }
        for (int64_t c = 0; !behind && c < chunks_of(E); c++) { // half an F16 step of the chunk's largest value
            worst = std::max(worst, error[c] > row_most[c] / 2000 ? 1.0 : 0.0);
        }
    }
    const std::string name = "a convolution of " + std::to_string(taps) + " taps and " + std::to_string(groups) + " groups " +
                             (behind ? "behind" : "ahead") + ", " + std::to_string(T) + " rows of " + std::to_string(E);
    expect(worst < 1e-5, name + " is off by " + std::to_string(worst));
    if (behind) {
        expect(squares_are_near(packed, got, T, E), name + ": squares");
        Floats normed_rows = got;
        for (size_t i = 0; i < normed_rows.size(); i++) {
            normed_rows[i] *= w[i % E];
        }
        expect(same_rows(packed, normed_rows, T, E), name + ": packed");
    }
}

void check_glu(int T, int64_t K, int64_t N) {
    const Parts parts(T, K, {{12, N}, {14, N}});
    Device<float> copy(size_t(T) * N);
    Device<uint8_t> out(size_t(rowmm_x_bytes(T, N)));
    RowmmPackArgs a = pack_args(T, N, parts, out, copy);
    a.input = ROWMM_GLU;
    a.activation = T % 2 == 0 ? GELU : SILU;
    must(cuda::rowmm_pack(a, stream));
    must(cudaStreamSynchronize(stream));
    const Floats got = copy.get();
    double worst = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const double x = parts.sums[0][i], u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x),
                     gate = T % 2 == 0 ? x / 2 * (1 + std::tanh(u)) : x / (1 + std::exp(-x)),
                     expected = gate * parts.sums[1][i];
        const double error = std::fabs(got[i] - expected) / (std::fabs(expected) + 1e-3);
        worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
    }
    expect(worst < 1e-5, name_of("gated values", T, K, N));
    expect(same_rows(out.get(), got, T, N), name_of("gate", T, K, N));
}

// Heads are normed and gated, also by gates that are far from 1, or zero. A lane divides for such ones in another way than for
// usual ones, which have to have the same bits in both.
void check_heads(int T, int64_t K, int head) {
    const int64_t x_row = K + 8, y_row = K + 12;
    const Floats x = normals(size_t(T) * x_row), w = normals(size_t(head)),
                 usual = normals(size_t(T) * y_row, 3.0f);
    Floats y = usual;
    const float gates[] = {0.0f, -0.0f, 90.0f, -90.0f, 1e-30f, -1e-30f, -300.0f, 1e4f};
    for (int t = 0; t < T; t++) {
        for (int i = 0; i < 8; i++) { // lanes have one, none or several
            y[size_t(t * y_row + i * (t % 3))] = gates[i];
        }
        for (int k = 16; k < int(K); k += 2 + 2 * (t % 3)) { // a lane has one beside a usual one
            y[size_t(t * y_row + k)] = gates[k / 2 % 8];
        }
    }
    Device<float> dx(x), dy(usual), dw(w), copy(size_t(T) * K);
    Device<uint8_t> out(size_t(rowmm_x_bytes(T, K)));
    RowmmPackArgs a = {};
    a.x = dx.p;
    a.x_row = x_row;
    a.y = dy.p;
    a.y_row = y_row;
    a.w = dw.p;
    a.head = head;
    a.eps = 1e-6f;
    a.T = T;
    a.K = K;
    a.out = out.p;
    a.copy = copy.p;
    a.input = ROWMM_HEAD_RMS;
    a.overlap = 1;
    must(cuda::rowmm_pack(a, stream));
    must(cudaStreamSynchronize(stream));
    const Floats beside_usual = copy.get();
    dy.set(y);
    must(cuda::rowmm_pack(a, stream));
    must(cudaStreamSynchronize(stream));
    const Floats got = copy.get();
    double worst = 0;
    bool same = true;
    for (int t = 0; t < T; t++) {
        for (int64_t k = 0; k < K; k++) {
            const size_t at = size_t(t * K + k), gate = size_t(t * y_row + k);
            same = same && (y[gate] != usual[gate] || same_bits(&got[at], &beside_usual[at], 1));
            double squares = 0;
            for (int64_t i = k / head * head; i < k / head * head + head; i++) {
                squares += double(x[size_t(t * x_row + i)]) * x[size_t(t * x_row + i)];
            }
            const double z = y[size_t(t * y_row + k)],
                         expected = x[size_t(t * x_row + k)] / std::sqrt(squares / head + 1e-6) *
                                    w[size_t(k % head)] * z / (1 + std::exp(-z));
            const double error = std::fabs(got[size_t(t * K + k)] - expected) / (std::fabs(expected) + 1e-3);
            worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
        }
    }
    const std::string name = "pack of heads of " + std::to_string(head) + ", " + std::to_string(K) + ", " +
                             std::to_string(T) + " rows";
    expect(worst < 1e-5, name + ", values");
    expect(same, name + ", gates beside extreme ones");
    expect(same_rows(out.get(), got, T, K), name);
}

// The conv over parts does what it does over their sums, and leaves the other weights' sums.
void check_conv(int T, int n_seqs, const Shape &s = {2, 4, 128}, int64_t K = 1024) {
    const int64_t others[3] = {int64_t(s.Hv) * s.S, 48, 4};
    const Parts parts(T, K, {{13, s.C()}, {12, others[0]}, {8, others[1]}, {0, others[2]}});
    const Weights w = random_weights(s);
    Layer layer(s, T, w, normals(size_t(n_seqs) * 3 * s.C()), normals(size_t(n_seqs) * s.Hv * s.S * s.S));
    std::vector<Part> rows;
    for (int i = 0, left = T; i < n_seqs; i++) {
        const int n = left / (n_seqs - i);
        left -= n;
        rows.push_back({i, {n, {}, {}, {}}, random_tree(n, 16, true)});
    }
    const Snapshot before = layer.snapshot();
    layer.set_ctl(rows);
    Device<float> x(parts.sums[0]), expected(x.n), got(x.n);
    layer.enqueue_conv(DELTA_VERIFY, T, x, expected);
    must(cudaStreamSynchronize(stream));
    const Snapshot after = layer.snapshot();
    layer.restore(before);
    layer.set_ctl(rows);
    Device<float> z(size_t(T) * others[0]), beta(size_t(T) * others[1]), alpha(size_t(T) * others[2]);
    const ConvPartsArgs conv = {{layer.delta_shape(T, DELTA_VERIFY), nullptr, layer.w.p, layer.window.p,
                                 layer.log.p, layer.ctl.p, got.p},
                                &parts.args,
                                {z.p, beta.p, alpha.p}};
    must(cuda::conv_parts(conv, stream));
    must(cudaStreamSynchronize(stream));
    const Snapshot now = layer.snapshot();
    const std::string name =
        "conv of made parts, " + std::to_string(T) + " rows of " + std::to_string(n_seqs);
    expect(same_bits(got.get(), expected.get()), name);
    expect(same_bits(z.get(), parts.sums[1]) && same_bits(beta.get(), parts.sums[2]) &&
               same_bits(alpha.get(), parts.sums[3]),
           name + ", the others");
    expect(same_bits(now.window, after.window) && same_bits(now.log, after.log), name + ": window, log");
}

} // namespace

// Without wgmma up to 64 rows are narrow chunks, and of more than 32 both they and the parts are two sets.
void check_pack_kind() {
    for (int T : {3, 16, 17, 32, 33, 64}) {
        check_norm(T, 1536, 1288, T % 2 == 0);
        check_glu(T, 1536, 520);
        check_heads(T, 448, 64);
        check_heads(T, 768, 256);
    }
}

void check_pack(bool all) {
    for (int T : all ? Ints() : Ints{1, 16, 17, 40, 64}) {
        check_conv(T, T < 3 ? 1 : 2);
    }
    check_conv(3, 1, {1, 1, 128}, 2048); // so that a tile has more parts than are asked for at once
    // The sums lie behind the rows of as many sequences as there may be, of which a block has sixteen at most.
    check_conv(17, 5);
    check_conv(48, 20);
    // Of the first a tile has all ranges of a small device, of the last a few.
    for (const auto &[K, N] : {std::pair<int64_t, int64_t>{17408, 128}, {1536, 1288}, {17408, 520}}) {
        for (int T : all ? Ints{1, 2, 9, 16, 17, 32, 33, 64} : Ints{1, 9, 17, 40}) {
            check_norm(T, K, N, T % 2 == 0);
            check_glu(T, K, N);
            check_post(T, K, N, T % 2 != 0 || all);
        }
    }
    for (const bool behind : {false, true}) {
        check_block_conv(1, 8, 1536, 2, 96, behind);
        check_block_conv(3, 4, 320, 3, 20, behind);
        check_block_conv(2, 5, 96, 5, 4, behind);
        check_block_conv(9, 7, 520, 2, 4, behind);
        check_block_conv(3, 1, 512, 1, 32, behind);
        if (all) {
            check_block_conv(1, 8, 5120, 2, 320, behind);
        }
    }
    check_post(2, 512, ROWMM_POST_K, true);
    check_post(1, 512, 200, false);
    for (int T : all ? Ints{1, 2, 8, 9, 16, 17, 33, 64} : Ints{1, 3, 17, 40}) {
        check_post_of_mixture(T, 2112, 2816, 8, false, true);
        check_post_of_mixture(T, 96, 264, 11, false, T % 2 == 0); // a row's end within a chunk, and more experts than come at once
        check_post_of_mixture(T, 96, 352, 3, true, true);
    }
    check_post_of_mixture(2, 512, MOE_POST_E, 8, false, true);
    for (int T : all ? Ints{1, 2, 3, 4, 8, 9, 16, 17, 32, 33, 64} : Ints{3, 17, 40}) {
        for (int head : {16, 32, 64, 128, 256}) {
            check_heads(T, head * 7, head); // the last chunk is cut, but of heads of 256
        }
        check_heads(T, 6144, 128);
    }
    for (int T = 1; all && T <= MAX_ROWS; T++) {
        check_conv(T, T < 3 ? 1 : 2);
        check_norm(T, 512, 200, T % 2 == 0);
        check_glu(T, 512, 200);
    }
}
