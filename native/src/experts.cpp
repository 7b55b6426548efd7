#include "experts.h"

#include "exponential.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

namespace luce {
namespace {

void route_row(const float *logits, int32_t n, int32_t n_used, int32_t *out) {
    static thread_local std::vector<int32_t> ids;
    ids.resize(size_t(n));
    std::iota(ids.begin(), ids.end(), 0);
    const bool finite = std::all_of(logits, logits + n, [](float x) { return std::isfinite(x); });
    if (finite) { // if not, the order of the experts does not matter
        std::partial_sort(ids.begin(), ids.begin() + n_used, ids.end(), [&](int32_t a, int32_t b) {
            return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
        });
    }
    std::copy(ids.begin(), ids.begin() + n_used, out);
    float weights[MAX_USED], sum = 0;
    for (int32_t i = 0; i < n_used; i++) {
        weights[i] = finite ? std::exp(logits[out[i]] - logits[out[0]]) : NAN;
        sum += weights[i];
    }
    for (int32_t i = 0; i < n_used; i++) {
        weights[i] /= sum;
    }
    memcpy(out + n_used, weights, size_t(n_used) * sizeof(float));
}

// Chosen has rows and ranks, as t * n_used + rank, by expert and then rising.
struct Chosen {
    std::vector<int32_t> first; // those of expert e are pairs[first[e] .. first[e + 1])
    std::vector<int32_t> pairs;

    explicit Chosen(const ExpertsArgs &a) : first(size_t(a.n_expert) + 1), pairs(size_t(a.T * a.n_used)) {
        const auto expert = [&](int32_t pair) {
            return size_t(a.route[pair / a.n_used * 2 * a.n_used + pair % a.n_used]);
        };
        for (int32_t p = 0; p < a.T * a.n_used; p++) {
            first[expert(p) + 1]++;
        }
        std::partial_sum(first.begin(), first.end(), first.begin());
        std::vector<int32_t> next(first.begin(), first.end() - 1);
        for (int32_t p = 0; p < a.T * a.n_used; p++) {
            pairs[size_t(next[expert(p)]++)] = p;
        }
    }
};

// An Expert has the inputs of its rows side by side.
class Expert {
public:
    void take(const ExpertsArgs &a, const int32_t *pairs, int32_t n, int32_t e) {
        args_ = {};
        args_.K = a.K;
        args_.T = n;
        const int64_t rows = a.own_input ? a.T * a.n_used : a.T;
        const auto row = [&](int32_t pair) { return a.own_input ? pair : pair / a.n_used; };
        if (rows_input(a.weights[0].type) == RowsInput::packed) {
            const auto *x = static_cast<const PackedBlock *>(a.x);
            blocks_.resize(size_t(a.K / 32 * n));
            for (int64_t b = 0; b < a.K / 32; b++) {
                for (int32_t c = 0; c < n; c++) {
                    blocks_[size_t(b * n + c)] = x[b * rows + row(pairs[c])];
                }
            }
            args_.x = blocks_.data();
        } else {
            const auto *x = static_cast<const float *>(a.x);
            values_.resize(size_t(a.K * n));
            for (int32_t c = 0; c < n; c++) {
                std::copy_n(x + row(pairs[c]) * a.K, a.K, values_.begin() + c * a.K);
            }
            args_.x = values_.data();
        }
        for (int32_t i = 0; i < a.n_weights; i++) {
            products_[i].resize(size_t(n * a.weights[i].N));
            weights_[i] = a.weights[i];
            weights_[i].data =
                static_cast<const uint8_t *>(a.weights[i].data) + size_t(e) * a.expert_bytes[i];
            weights_[i].out = products_[i].data();
        }
    }

    // Computes values n0 .. n1 - 1 of the results of its rows.
    void multiply(const ExpertsArgs &a, const int32_t *pairs, int64_t n0, int64_t n1) {
        const int64_t N = a.weights[0].N;
        for (int32_t i = 0; i < a.n_weights; i++) {
            multiply_rows(args_, weights_[i], n0, n1);
        }
        for (int32_t c = 0; c < args_.T; c++) {
            float *out = a.out + pairs[c] * N;
            const float *x = products_[0].data() + c * N, *y = products_[1].data() + c * N;
            for (int64_t n = n0; n < n1; n++) {
                out[n] = a.n_weights == 1 ? x[n] : silu(x[n]) * y[n];
            }
        }
    }

private:
    RowsMatmulArgs args_{};
    RowsWeight weights_[2]{};
    std::vector<PackedBlock> blocks_;
    std::vector<float> values_, products_[2];
};

} // namespace

void cpu_route(const RouteArgs &a, int ith, int nth) {
    for (int32_t t = ith; t < a.T; t += nth) {
        route_row(a.logits + int64_t(t) * a.n, a.n, a.n_used, a.out + t * 2 * a.n_used);
    }
}

// Each thread takes a contiguous share of the groups of weight rows of all experts that were chosen.
void cpu_experts(const ExpertsArgs &a, int ith, int nth) {
    static thread_local Expert expert;
    const Chosen chosen(a);
    const int64_t N = a.weights[0].N, groups = (N + ROWS_GROUP - 1) / ROWS_GROUP;
    int64_t n_present = 0;
    for (int32_t e = 0; e < a.n_expert; e++) {
        n_present += chosen.first[size_t(e)] < chosen.first[size_t(e) + 1];
    }
    const int64_t begin = n_present * groups * ith / nth, end = n_present * groups * (ith + 1) / nth;
    int64_t before = 0;
    for (int32_t e = 0; e < a.n_expert && before < end; e++) {
        const int32_t first = chosen.first[size_t(e)], n = chosen.first[size_t(e) + 1] - first;
        if (n == 0) {
            continue;
        }
        const int64_t g0 = std::max<int64_t>(begin - before, 0), g1 = std::min(end - before, groups);
        if (g0 < g1) {
            const int32_t *pairs = chosen.pairs.data() + first;
            expert.take(a, pairs, n, e);
            expert.multiply(a, pairs, g0 * ROWS_GROUP, std::min(g1 * ROWS_GROUP, N));
        }
        before += groups;
    }
}

void cpu_experts_sum(const ExpertsSumArgs &a, int ith, int nth) {
    for (int32_t t = ith; t < a.T; t += nth) {
        float weights[MAX_USED];
        memcpy(weights, a.route + t * 2 * a.n_used + a.n_used, size_t(a.n_used) * sizeof(float));
        float *out = a.out + t * a.E;
        const float *y = a.y + t * a.n_used * a.E;
        for (int64_t i = 0; i < a.E; i++) {
            float sum = 0;
            for (int32_t r = 0; r < a.n_used; r++) {
                sum = std::fma(weights[r], y[r * a.E + i], sum);
            }
            out[i] = sum;
        }
    }
}

} // namespace luce
