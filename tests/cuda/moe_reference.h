// Has a mixture of experts of random weights, and what its formulas give in double precision.
#pragma once

#include "activation_reference.h"
#include "common/activation.h"
#include "harness.h"
#include "moe/moe.h"
#include "rowmm_reference.h"

#include <numeric>

namespace moe_test {

using rowmm_test::Bytes;

// Holds matrices [n][N][K] of one type: as ggml has them, as numbers, and packed on the device.
struct Matrices {
    int type = 0;
    int64_t K = 0, N = 0, n = 0;
    Floats values;
    Device<uint8_t> packed;
    Device<int64_t> offsets; // of experts that lie apart, once they do

    Matrices(int type, int64_t K, int64_t N, int64_t n, uint32_t seed)
        : type(type), K(K), N(N), n(n), packed(size_t(n * rowmm_packed_bytes(type, K, N))), offsets(0) {
        const Bytes blocks = rowmm_test::random_weights(type, K, N * n, seed);
        values = rowmm_test::dequantised(type, blocks);
        Device<uint8_t> src(blocks);
        for (int64_t e = 0; e < n; e++) {
            must(cuda::rowmm_permute({type, K, N, src.p + e * (blocks.size() / size_t(n)), packed.p + e * bytes()}, stream));
        }
        must(cudaStreamSynchronize(stream));
    }
    int64_t bytes() const { return rowmm_packed_bytes(type, K, N); }
    MoeMatrix matrix() const { return {type, packed.p, bytes(), offsets.n > 0 ? offsets.p : nullptr}; }
    // Returns the product of expert e's matrix with x.
    Doubles times(int64_t e, const Doubles &x) const {
        Doubles out(static_cast<size_t>(N));
        for (int64_t i = 0; i < N; i++) {
            const float *w = &values[size_t((e * N + i) * K)];
            double sum = 0;
            for (int64_t k = 0; k < K; k++) {
                sum += w[k] * x[size_t(k)];
            }
            out[size_t(i)] = sum;
        }
        return out;
    }
};

struct Types {
    int gate, up, down, shared;
};

// Holds a layer, where dims.T is that of a run.
struct Mixture {
    MoeDims dims;
    Floats router, norm, shared_gate;
    Matrices gate, up, down, gate_s, up_s, down_s;
    Device<float> d_router, d_norm, d_shared_gate;
    Device<uint8_t> counters{size_t(MOE_COUNTER_BYTES)};
    // The router has a norm of its own, experts have factors, their activation is GELU, and nothing is added to their sum.
    const bool apart;
    Floats router_norm, factors, dense_norm;
    Device<float> d_router_norm, d_factors, d_dense_norm;
    Device<int32_t> counts{0}; // of experts, where they are counted

    static constexpr float EPS = 1e-6f, ROUTER_SCALE = 0.7f, POST_SCALE = 0.37f;

    Mixture(const MoeDims &dims, const Types &t, uint32_t seed, bool apart = false)
        : dims(dims), router(normals(size_t(dims.n_expert * dims.E), 0.05f)), norm(normals(size_t(dims.E), 0.3f)),
          shared_gate(normals(size_t(dims.E), 0.05f)), gate(t.gate, dims.E, dims.FF, dims.n_expert, seed),
          up(t.up, dims.E, dims.FF, dims.n_expert, seed + 1), down(t.down, dims.FF, dims.E, dims.n_expert, seed + 2),
          gate_s(t.shared, dims.E, ff(dims), 1, seed + 3), up_s(t.shared, dims.E, ff(dims), 1, seed + 4),
          down_s(t.shared, ff(dims), dims.E, 1, seed + 5), d_router(router), d_norm(norm), d_shared_gate(shared_gate),
          apart(apart), router_norm(apart ? size_t(dims.E) : 0), factors(apart ? size_t(dims.n_expert) : 0),
          dense_norm(normals(dims.dense ? size_t(dims.E) : 0)), d_router_norm(router_norm.size()), d_factors(factors.size()),
          d_dense_norm(dense_norm) {
        for (float &w : norm) {
            w += 1;
        }
        d_norm.set(norm);
        for (size_t i = 0; i < router_norm.size(); i++) {
            router_norm[i] = 0.5f + float(i % 7) / 4;
        }
        for (size_t i = 0; i < factors.size(); i++) {
            factors[i] = 0.4f + float(i % 5) / 3;
        }
        d_router_norm.set(router_norm);
        d_factors.set(factors);
        must(cudaMemset(counters.p, 0, counters.n));
    }
    // Without a shared expert this value is not used.
    static int64_t ff(const MoeDims &d) { return d.shared() ? d.FF_shared : d.FF; }
    void set_router(const Floats &to) {
        router = to;
        d_router.set(to);
    }
};

// Holds what the launches of a layer leave, of T rows.
struct Routed {
    std::vector<int32_t> ids;
    Floats weights, open, out; // [T][n_used], [T], [T][E]
};

struct Buffers {
    MoeDims dims;
    Device<float> x, h, y, out, values;
    Device<uint8_t> routed, packed, records;

    Buffers(const MoeDims &d, const Floats &rows)
        : dims(d), x(rows), h(size_t(d.places() * d.h_row())), y(size_t(d.places() * d.E)), out(rows.size()),
          values(rows.size()),
          routed(size_t(moe_routed_bytes(d))), packed(size_t(rowmm_x_bytes(d.T, d.E))), records(size_t(moe_record_bytes(d))) {}

    // Returns the arguments of up, behind which `rows` have been routed.
    MoeMatmulArgs enqueue_up(Mixture &l, const float *rows, bool overlap, bool hands_out) const {
        must(cuda::moe_route({dims, rows, l.d_norm.p, Mixture::EPS, l.d_router.p, l.d_shared_gate.p, l.counters.p, routed.p,
                              hands_out ? values.p : nullptr, overlap, l.apart ? l.d_router_norm.p : nullptr,
                              l.apart ? Mixture::ROUTER_SCALE : 0.0f, dims.dense ? l.d_dense_norm.p : nullptr}, stream));
        const MoeMatmulArgs a = {dims, l.gate.matrix(), l.up.matrix(), l.gate_s.matrix(), l.up_s.matrix(), routed.p,
                                 nullptr, h.p, overlap, nullptr, l.apart ? GELU : SILU};
        must(cuda::moe_up(a, stream));
        return a;
    }
    void enqueue(Mixture &l, bool overlap, bool hands_out = true) {
        MoeMatmulArgs a = enqueue_up(l, x.p, overlap, hands_out);
        a.first = l.down.matrix();
        a.shared_first = l.down_s.matrix();
        a.h = h.p;
        a.out = y.p;
        a.records = records.p;
        must(cuda::moe_down(a, stream));
        if (dims.dense) {
            must(cuda::moe_post({dims, routed.p, y.p, l.d_factors.p, l.counts.n > 0 ? l.counts.p : nullptr, nullptr, x.p, l.d_norm.p,
                                 l.d_router_norm.p, l.d_norm.p, Mixture::EPS, Mixture::POST_SCALE, out.p, l.d_norm.p, packed.p,
                                 overlap}, stream));
            return;
        }
        const bool packs = !l.apart && dims.T <= ROWMM_MAX_ROWS;
        must(cuda::moe_sum({dims, routed.p, y.p, nullptr, l.apart ? nullptr : x.p, out.p, packs ? l.d_norm.p : nullptr,
                            packs ? packed.p : nullptr, overlap, l.apart ? l.d_factors.p : nullptr, l.counts.n > 0 ? l.counts.p : nullptr}, stream));
    }
    Routed get() const {
        const std::vector<uint8_t> bytes = routed.get();
        Routed r{std::vector<int32_t>(size_t(dims.T * dims.n_used)), Floats(size_t(dims.T * dims.n_used)),
                 Floats(dims.gated() ? size_t(dims.T) : 0), out.get()};
        memcpy(r.ids.data(), &bytes[size_t(moe_ids_offset(dims))], r.ids.size() * 4);
        memcpy(r.weights.data(), &bytes[size_t(moe_weights_offset(dims))], r.weights.size() * 4);
        if (!r.open.empty()) {
            memcpy(r.open.data(), &bytes[size_t(moe_open_offset(dims))], r.open.size() * 4);
        }
        return r;
    }
};

// ---- in double precision ----

struct Expected {
    Doubles logits; // they are the experts'
    Doubles ffn; // the experts in `ids` add this to the row, by their weights; or beside a dense layer, the new row
};

inline Expected expected_row(const Mixture &l, const float *x, const int32_t *ids) {
    const MoeDims &d = l.dims;
    Doubles v(static_cast<size_t>(d.E)), of_router(v), of_dense(v);
    double squares = 0;
    for (int64_t k = 0; k < d.E; k++) {
        squares += double(x[k]) * x[k];
    }
    for (int64_t k = 0; k < d.E; k++) {
        const double normed = x[k] / std::sqrt(squares / double(d.E) + Mixture::EPS);
        v[size_t(k)] = normed * l.norm[size_t(k)];
        of_dense[size_t(k)] = d.dense ? normed * l.dense_norm[size_t(k)] : v[size_t(k)];
        of_router[size_t(k)] =
            l.apart ? normed * l.router_norm[size_t(k)] * double(Mixture::ROUTER_SCALE) : v[size_t(k)];
    }
    const auto dot = [&](const float *w) {
        double sum = 0;
        for (int64_t k = 0; k < d.E; k++) {
            sum += w[k] * of_router[size_t(k)];
        }
        return sum;
    };
    Expected e{Doubles(), Doubles(static_cast<size_t>(d.E))};
    for (int n = 0; n < d.n_expert; n++) {
        e.logits.push_back(dot(&l.router[size_t(n * d.E)]));
    }
    double top = -1e300, total = 0;
    for (int r = 0; r < d.n_used; r++) {
        top = std::max(top, e.logits[size_t(ids[r])]);
    }
    for (int r = 0; r < d.n_used; r++) {
        total += std::exp(e.logits[size_t(ids[r])] - top);
    }
    Doubles dense(d.dense ? size_t(d.E) : 0);
    const auto add = [&](const Doubles &rows, const Matrices &gate, const Matrices &up, const Matrices &down, int64_t expert,
                         double weight, Doubles &to) {
        Doubles h = gate.times(expert, rows);
        const Doubles u = up.times(expert, rows);
        for (size_t i = 0; i < h.size(); i++) {
            h[i] = (l.apart ? gelu(h[i]) : silu(h[i])) * u[i];
        }
        const Doubles y = down.times(expert, h);
        for (size_t i = 0; i < y.size(); i++) {
            to[i] += weight * y[i];
        }
    };
    for (int r = 0; r < d.n_used; r++) {
        const double factor = l.apart ? l.factors[size_t(ids[r])] : 1;
        add(v, l.gate, l.up, l.down, ids[r], std::exp(e.logits[size_t(ids[r])] - top) / total * factor, e.ffn);
    }
    if (d.shared()) {
        const double open = d.dense ? 1 : 1 / (1 + std::exp(-dot(l.shared_gate.data())));
        add(of_dense, l.gate_s, l.up_s, l.down_s, 0, open, d.dense ? dense : e.ffn);
    }
    if (d.dense) {
        const auto normed = [&](Doubles row, const Floats &by) {
            double sum = 0;
            for (double value : row) {
                sum += value * value;
            }
            for (size_t i = 0; i < row.size(); i++) {
                row[i] *= by[i] / std::sqrt(sum / double(d.E) + Mixture::EPS);
            }
            return row;
        };
        const Doubles experts = normed(e.ffn, l.router_norm);
        dense = normed(dense, l.norm);
        for (size_t i = 0; i < dense.size(); i++) {
            dense[i] += experts[i];
        }
        e.ffn = normed(dense, l.norm);
        for (size_t i = 0; i < dense.size(); i++) {
            e.ffn[i] = (x[i] + e.ffn[i]) * double(Mixture::POST_SCALE);
        }
    }
    return e;
}

} // namespace moe_test
