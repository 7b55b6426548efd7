// Checks that attention_heads leaves, of parts, the bits that norm_rope and kv_store leave of the parts' sums. Cells hold
// random bytes before, and all others have to keep them.
#include "attention/sine.cuh"
#include "attention_reference.h"
#include "harness.h"
#include "matmul/plan.h"

namespace {

// Shape is what one step has. The rows are those of up to three sequences, and a few of none.
struct Shape {
    KvShape kv;
    int T;
    bool queries;
    int64_t K; // the product sums over so many values
    // Queries have no gates, V is normed, or it is K before its norm, and RoPE's frequencies are divided.
    bool plain = false, v_is_k = false, q_alone = false;
};

// Parts are random, with the sums that they stand for.
struct Parts {
    RowmmArgs args{};
    RowmmParts where{};
    Floats values;
    Device<float> memory{4};

    explicit Parts(const Shape &s) {
        const int D = s.kv.D;
        args.T = s.T;
        args.K = s.K;
        if (s.queries) {
            args.weights[args.n_weights++] = {8, (s.plain ? 1 : 2) * s.kv.H * D, nullptr, nullptr, 0, nullptr,
                                              0};
        }
        for (int i = 0; i < (s.q_alone ? 0 : s.v_is_k ? 1 : 2); i++) {
            args.weights[args.n_weights++] = {8, s.kv.width(), nullptr, nullptr, 0, nullptr, 0};
        }
        args.parts = memory.p;
        must(rowmm_parts_of(args, where));
        values = normals(size_t((s.T + where.set - 1) / where.set) * size_t(where.set_size));
    }
    // Returns the results of a weight, [T][N].
    Floats sums(int weight) const {
        const auto &w = where.weights[weight];
        const int64_t N = args.weights[weight].N;
        Floats out;
        for (int t = 0; t < args.T; t++) {
            for (int64_t n = 0; n < N; n++) {
                const int tile = int(n / TILE), begin = w.first_unit + tile * w.units_k;
                float sum = 0;
                for (int r = 0; r < where.ranges; r++) {
                    if (where.first[r] < begin + w.units_k && where.first[r + 1] > begin) {
                        const int64_t part = r + w.first_tile + tile, row = t % where.set;
                        sum += values[size_t(t / where.set * where.set_size +
                                             (part * where.rows + row) * TILE + n % TILE)];
                    }
                }
                out.push_back(sum);
            }
        }
        return out;
    }
};

// Makes sequences with pages of their own and rows in trees.
StepCtl random_step(const Shape &s, int pages_each, Ints &table) {
    StepCtl host = blank_ctl();
    host.n_seqs = 1 + pick(3);
    int row = 0;
    for (int i = 0; i < host.n_seqs; i++) {
        SeqCtl &seq = host.seqs[i];
        seq.row0 = row;
        seq.n_past = 200 + pick(100);
        seq.pages = i * pages_each;
        const int most = s.T - row - pick(2);
        seq.n_rows = std::max(0, i + 1 < host.n_seqs ? std::min(pick(12), most) : most);
        for (int r = 0; r < seq.n_rows; r++, row++) {
            host.rows[row].seq = i;
            host.rows[row].parent = r == 0 ? -1 : row - 1 - pick(r);
            host.rows[row].position = seq.n_past + r;
        }
    }
    host.n_rows = row;
    table = chain(host.n_seqs * pages_each + 1);
    table.erase(table.begin());
    std::shuffle(table.begin(), table.end(), rng);
    return host;
}

std::vector<uint8_t> random_bytes(size_t n) {
    std::vector<uint8_t> x(n);
    for (uint8_t &byte : x) {
        byte = uint8_t(pick(256));
    }
    return x;
}

// Returns how far keys are from those of the formulas in kernels.h, in double precision.
double rope_error(const NormRopeArgs &a, const Floats &raw, const Ints &positions, const Floats &norm,
                  const Floats &keys) {
    double worst = 0;
    for (size_t first = 0; first < raw.size(); first += size_t(a.D)) {
        const double position = positions[first / size_t(a.k.n_heads * a.D)];
        std::vector<double> x(raw.begin() + int64_t(first), raw.begin() + int64_t(first) + a.D);
        double sum = 0;
        for (const double value : x) {
            sum += value * value;
        }
        for (int i = 0; i < a.D; i++) {
            x[size_t(i)] *= norm[size_t(i)] / std::sqrt(sum / a.D + a.eps);
        }
        for (int i = 0; i < a.D; i++) {
            const int half = a.rope_dim / 2, pair = i % std::max(half, 1);
            const double angle = position * std::pow(double(a.base), -2.0 * pair / a.rope_dim);
            const double turned =
                i < half         ? x[size_t(i)] * std::cos(angle) - x[size_t(i + half)] * std::sin(angle)
                : i < a.rope_dim ? x[size_t(i)] * std::cos(angle) + x[size_t(i - half)] * std::sin(angle)
                                 : x[size_t(i)];
            worst = std::fmax(worst, std::fabs(turned - keys[first + size_t(i)]));
        }
    }
    return worst;
}

// Queries and keys of heads of any size, of which all values are rotated, some, or none.
void check_norm_rope(int D, int rope_dim) {
    constexpr int T = 5, H = 3;
    Ints where;
    for (int t = 0; t < T; t++) {
        where.push_back(pick(300));
    }
    const Floats x = normals(size_t(T) * H * D), norm = normals(size_t(D));
    const Device<int32_t> positions(where);
    const Device<float> heads(x), norms(norm), keys(x.size()), queries(x.size());
    NormRopeArgs a{T, D, rope_dim, 1e6f, 1e-6f, positions.p, {}, {}};
    a.k = {heads.p, H * D, D, H, norms.p, keys.p};
    a.q = a.k;
    a.q.out = queries.p;
    must(cuda::norm_rope(a, stream));
    must(cudaStreamSynchronize(stream));
    const double error = rope_error(a, x, where, norm, keys.get());
    expect(error < 2e-4, "norm_rope of " + std::to_string(D) + " is off by " + std::to_string(error));
    expect(same_bits(keys.get(), queries.get()), "norm_rope of " + std::to_string(D) + ": queries");
}

// Rows whose pairs turn by axes of their own, as the host's rule says, and rows whose axes are equal, which have the bits of
// positions.
void check_axes(int D, int rope_dim, int height_pairs, int width_pairs) {
    constexpr int T = 5, H = 3;
    Ints axes, equal, where;
    for (int t = 0; t < T; t++) {
        where.push_back(pick(300));
    }
    for (int i = 0; i < 4 * T; i++) {
        axes.push_back(pick(300));
        equal.push_back(where[size_t(i % T)]);
    }
    const Floats x = normals(size_t(T) * H * D), norm = normals(size_t(D));
    const Device<int32_t> positions(where), apart(axes), together(equal);
    const Device<float> heads(x), norms(norm), keys(x.size()), queries(x.size());
    NormRopeArgs a{T, D, rope_dim, 1e6f, 1e-6f, positions.p, {}, {}};
    a.height_pairs = height_pairs, a.width_pairs = width_pairs;
    a.k = {heads.p, H * D, D, H, norms.p, keys.p};
    a.q = a.k;
    a.q.out = queries.p;
    must(cuda::norm_rope(a, stream));
    must(cudaStreamSynchronize(stream));
    const Floats plain = keys.get();
    a.axes = together.p;
    must(cuda::norm_rope(a, stream));
    must(cudaStreamSynchronize(stream));
    expect(same_bits(keys.get(), plain), "norm_rope of equal axes");
    a.axes = apart.p;
    must(cuda::norm_rope(a, stream));
    must(cudaStreamSynchronize(stream));
    NormRopeArgs host = a;
    host.axes = axes.data();
    const Floats turned = keys.get();
    double worst = 0;
    for (int pair = 0; pair < rope_dim / 2; pair++) { // as if the pair's axis were the row's only one
        Ints own;
        for (int t = 0; t < T; t++) {
            own.push_back(rope_position(host, t, pair));
        }
        Floats only = turned;
        const Device<int32_t> at(own);
        NormRopeArgs one = a;
        one.axes = nullptr;
        one.positions = at.p;
        must(cuda::norm_rope(one, stream));
        must(cudaStreamSynchronize(stream));
        const Floats wanted = keys.get();
        for (int64_t head = 0; head < int64_t(T) * H; head++) {
            for (const int i : {pair, pair + rope_dim / 2}) {
                const size_t value = size_t(head * D + i);
                worst = std::fmax(worst, std::fabs(double(only[value]) - wanted[value]));
            }
        }
    }
    expect(worst == 0, "norm_rope of axes is off by " + std::to_string(worst));
    bool apart_differ = false;
    for (size_t i = 0; i < turned.size(); i++) {
        apart_differ = apart_differ || turned[i] != plain[i];
    }
    expect(apart_differ, "norm_rope reads axes");
}

void check_heads(const Shape &s) {
    constexpr int PAGES = 3; // a sequence has so many
    const KvShape &kv = s.kv;
    const int64_t D = kv.D;
    const size_t q_values = size_t(s.T) * kv.H * D;
    Ints table, where(size_t(s.T));
    Device<StepCtl> ctl(1);
    ctl.set({random_step(s, PAGES, table)});
    for (int &position : where) {
        position = pick(300);
    }
    const std::vector<uint8_t> cells_k = random_bytes(table.size() * PAGE * kv.cell_bytes());
    const std::vector<uint8_t> cells_v = random_bytes(cells_k.size());
    Device<uint8_t> k(cells_k), v(cells_v), got_k(cells_k), got_v(cells_v);
    Device<int32_t> pages(table), positions(where);
    const Device<float> q_norm(normals(size_t(D))), k_norm(normals(size_t(D)));
    Parts parts(s);
    const int first = s.queries ? 1 : 0;
    const Floats q_gate = s.queries ? parts.sums(0) : Floats();
    Device<float> raw_q(q_gate), raw_k(parts.sums(first)), raw_v(parts.sums(parts.args.n_weights - 1));
    Device<float> q(q_values), keys(raw_k.n), got_q(2 * q_values), memory(parts.values);
    const KvPool pool = {k.p, v.p, kv.type, kv.Hkv, kv.D};

    NormRopeArgs rope{s.T, kv.D, kv.D / 4, 1e6f, 1e-6f, positions.p, {}, {}};
    rope.k = {raw_k.p, kv.width(), D, kv.Hkv, k_norm.p, keys.p};
    if (s.queries) {
        rope.q = s.plain ? RopeHeads{raw_q.p, kv.H * D, D, kv.H, q_norm.p, q.p}
                         : RopeHeads{raw_q.p, 2 * kv.H * D, 2 * D, kv.H, q_norm.p, q.p};
    }
    must(cuda::norm_rope(rope, stream));
    const Device<float> ones(Floats(size_t(D), 1.0f)), unit_v(raw_v.n), factors(Floats(size_t(D) / 8, 1.0f));
    if (s.plain) { // V is normed as K is, by ones, and does not turn
        NormRopeArgs unit = rope;
        unit.rope_dim = 0;
        unit.q = {};
        unit.k = {raw_v.p, kv.width(), D, kv.Hkv, ones.p, unit_v.p};
        must(cuda::norm_rope(unit, stream));
        raw_v.set(unit_v.get());
    }
    must(cuda::kv_store({pool, s.T, 0, keys.p, raw_v.p, ctl.p, pages.p}, stream));

    AttentionHeadsArgs a{};
    parts.args.parts = memory.p;
    a.parts = &parts.args;
    a.pool = pool;
    a.pool.k = got_k.p;
    a.pool.v = got_v.p;
    a.T = s.T;
    a.H = s.queries ? kv.H : 0;
    a.rope_dim = rope.rope_dim;
    a.base = rope.base;
    a.eps = rope.eps;
    a.positions = positions.p;
    a.q_norm = q_norm.p;
    a.k_norm = k_norm.p;
    a.ctl = ctl.p;
    a.pages = pages.p;
    a.q = got_q.p;
    a.gate = got_q.p + q_values;
    a.gated = !s.plain;
    a.unit_v = s.plain;
    a.rope_factors = s.plain ? factors.p : nullptr;
    must(cuda::attention_heads(a, stream));
    must(cudaStreamSynchronize(stream));

    const double error = rope_error(rope, raw_k.get(), where, k_norm.get(), keys.get());
    expect(error < 2e-4,
           "norm_rope is off by " + std::to_string(error)); // angles of up to 300 are off by 2e-5
    const std::string what = "attention_heads of type " + std::to_string(kv.type) + " D " +
                             std::to_string(D) + " T " + std::to_string(s.T) +
                             (s.queries ? ": " : ", K and V: ");
    expect(got_k.get() == k.get(), what + "cells of K");
    expect(got_v.get() == v.get(), what + "cells of V");
    if (s.queries) {
        const Floats got = got_q.get(), expected = q.get();
        expect(same_bits(got.data(), expected.data(), q_values), what + "queries");
        bool gates = true;
        for (size_t i = 0; !s.plain && i < q_values; i++) {
            gates = gates && got[q_values + i] == q_gate[i / D * 2 * D + D + i % D];
        }
        expect(gates, what + "gates");
    }
}

// What stands where frequencies are divided by much is not rotated, and what has half of a frequency turns half as far.
void check_factors(bool q_alone) {
    constexpr int D = 256, T = 3;
    const KvShape kv{2, 1, D, 0};
    const Shape s{kv, T, true, 512, true, true, q_alone};
    Ints table, where{5, 90, 241};
    Device<StepCtl> ctl(1);
    ctl.set({random_step(s, 3, table)});
    Floats factors(size_t(D) / 2, 1.0f);
    for (int i = 0; i < D / 2; i++) {
        factors[size_t(i)] = i < 20 ? 1.0f : i < 40 ? 2.0f : 1e30f;
    }
    Parts parts(s);
    const Device<float> memory(parts.values), norm(normals(size_t(D))), divisors(factors);
    const Device<int32_t> pages(table), positions(where);
    const Device<uint8_t> k(table.size() * PAGE * kv.cell_bytes()), v(k.n);
    Device<float> q(size_t(T) * 2 * D);
    parts.args.parts = memory.p;
    AttentionHeadsArgs a{};
    a.parts = &parts.args;
    a.pool = q_alone ? KvPool{nullptr, nullptr, 0, 0, D} : KvPool{k.p, v.p, 0, 1, D};
    a.T = T;
    a.H = 2;
    a.rope_dim = D;
    a.base = 1e4f;
    a.eps = 1e-6f;
    a.positions = positions.p;
    a.q_norm = a.k_norm = norm.p;
    a.ctl = ctl.p;
    a.pages = pages.p;
    a.q = q.p;
    a.unit_v = 1;
    a.rope_factors = divisors.p;
    must(cuda::attention_heads(a, stream));
    must(cudaStreamSynchronize(stream));
    const Floats raw = parts.sums(0), w = norm.get(), got = q.get();
    double worst = 0;
    for (size_t first = 0; first < raw.size(); first += D) {
        double sum = 0;
        for (int i = 0; i < D; i++) {
            sum += double(raw[first + size_t(i)]) * raw[first + size_t(i)];
        }
        const auto normed = [&](int i) {
            return raw[first + size_t(i)] * w[size_t(i)] / std::sqrt(sum / D + 1e-6);
        };
        for (int i = 0; i < D / 2; i++) {
            const double angle = where[first / (2 * D)] * std::pow(1e4, -2.0 * i / D) / factors[size_t(i)];
            const double x = normed(i), y = normed(i + D / 2);
            worst = std::fmax(worst,
                              std::fabs(x * std::cos(angle) - y * std::sin(angle) - got[first + size_t(i)]));
            worst = std::fmax(
                worst, std::fabs(y * std::cos(angle) + x * std::sin(angle) - got[first + size_t(i + D / 2)]));
        }
    }
    expect(worst < 2e-4, "attention_heads with factors is off by " + std::to_string(worst));
}

__global__ void sines_kernel(const float *angles, int n, float2 *out) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        sine_and_cosine(angles[i], out[i].x, out[i].y);
    }
}

// Angles of all sizes against double precision.
void check_sines() {
    Floats angles{0.0f, -0.0f, 105614.99f, 105615.0f, -105615.0f, 262144.0f, 4294967296.0f, 3e38f, 1e-40f};
    for (int bits = -20; bits < 127; bits++) {
        for (int i = 0; i < 100; i++) {
            angles.push_back(std::ldexp(1.0f + float(pick(1 << 23)) / float(1 << 23), bits) *
                             (i % 2 == 0 ? 1.0f : -1.0f));
        }
    }
    const Device<float> from(angles);
    Device<float2> to(angles.size());
    sines_kernel<<<1, 256, 0, stream>>>(from.p, int(angles.size()), to.p);
    must(cudaStreamSynchronize(stream));
    const std::vector<float2> got = to.get();
    double worst = 0;
    for (size_t i = 0; i < angles.size(); i++) {
        worst = std::fmax(worst, std::fabs(double(got[i].x) - std::sin(double(angles[i]))));
        worst = std::fmax(worst, std::fabs(double(got[i].y) - std::cos(double(angles[i]))));
    }
    expect(worst < 1.2e-7, "sines are off by " + std::to_string(worst));
}

#ifdef __CUDACC__ // a CPU's sincosf has other bits
__global__ void all_sines_kernel(unsigned long long *differ) {
    const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
    unsigned long long count = 0;
    for (uint64_t bits = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; bits < uint64_t(1) << 32;
         bits += step) {
        const float angle = __uint_as_float(uint32_t(bits));
        float sine, cosine, x, y;
        sincosf(angle, &sine, &cosine);
        sine_and_cosine(angle, x, y);
        const bool same =
            __float_as_uint(sine) == __float_as_uint(x) && __float_as_uint(cosine) == __float_as_uint(y);
        count += !same && !(isnan(sine) && isnan(x) && isnan(cosine) && isnan(y));
    }
    atomicAdd(differ, count);
}
void check_all_sines() {
    Device<unsigned long long> differ(std::vector<unsigned long long>{0});
    all_sines_kernel<<<2048, 256, 0, stream>>>(differ.p);
    must(cudaStreamSynchronize(stream));
    const unsigned long long found = differ.get()[0];
    expect(found == 0, std::to_string(found) + " of 2^32 angles have another sine or cosine than CUDA's");
}
#endif

} // namespace

void check_attention_heads(bool all) {
    check_sines();
#ifdef __CUDACC__
    if (all) {
        check_all_sines();
    }
#endif
    check_factors(false);
    check_factors(true);
    for (const int D : {64, 128, 256, 512}) {
        for (const int rope_dim : {D, D / 4, 0}) {
            check_norm_rope(D, rope_dim);
        }
        check_axes(D, 64, 11, 10);
    }
    for (const int type : {0, 1, 2, 8}) {
        for (const int D : {128, 256}) {
            for (const int T : {1, 2, 7, 9, 33, 64}) {
                const KvShape kv{all ? 24 : 3, all ? 4 : 1, D, type};
                check_heads({kv, T, T % 2 != 0 || all, all ? 5120 : 768});
                check_heads({kv, T, T % 2 == 0, 512});
            }
        }
        for (const int D : {256, 512}) {
            for (const int T : {1, 7, 33}) {
                const KvShape kv{all ? 32 : 2, all ? 4 : 1, D, type};
                check_heads({kv, T, true, all ? 5376 : 768, true, false});
                check_heads({kv, T, true, 512, true, true});
            }
        }
    }
    for (int T = 1; all && T <= MAX_ROWS; T++) {
        check_heads({{6, 1, 256, 1}, T, true, 512});
    }
}
