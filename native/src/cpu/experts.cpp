#include "cpu/experts.h"

#include "cpu/exponential.h"

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
    std::vector<int32_t> pairs, next;
    std::vector<int32_t> present; // the experts that have any

    void find(const ExpertsArgs &a) {
        first.assign(size_t(a.n_expert) + 1, 0);
        pairs.resize(size_t(a.T * a.n_used));
        const auto expert = [&](int32_t pair) {
            return size_t(a.route[pair / a.n_used * 2 * a.n_used + pair % a.n_used]);
        };
        for (int32_t p = 0; p < a.T * a.n_used; p++) {
            first[expert(p) + 1]++;
        }
        present.clear();
        for (int32_t e = 0; e < a.n_expert; e++) {
            if (first[size_t(e) + 1] > 0) {
                present.push_back(e);
            }
        }
        std::partial_sum(first.begin(), first.end(), first.begin());
        next.assign(first.begin(), first.end() - 1);
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
            weights_[i] = a.weight(i, e);
            weights_[i].out = products_[i].data();
        }
    }

    // Computes values n0 .. n1 - 1 of the results of its rows.
    void multiply(const ExpertsArgs &a, const int32_t *pairs, int64_t n0, int64_t n1) {
        const int64_t N = a.weights[0].N;
        for (int32_t i = 0; i < a.n_weights; i++) {
            if (i + 1 < a.n_weights) {
                fetch_rows(weights_[i + 1], n0, n1);
            }
            multiply_rows(args_, weights_[i], n0, n1);
        }
        for (int32_t c = 0; c < args_.T; c++) {
            float *out = a.out + pairs[c] * N;
            const float *x = products_[0].data() + c * N, *y = products_[1].data() + c * N;
            if (a.n_weights == 1) {
                std::copy(x + n0, x + n1, out + n0);
            } else {
                activate(a.activation, x + n0, y + n0, n1 - n0, out + n0);
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
    static thread_local Chosen chosen;
    chosen.find(a);
    const int64_t N = a.weights[0].N, groups = (N + ROWS_GROUP - 1) / ROWS_GROUP;
    const int64_t all = int64_t(chosen.present.size()) * groups, end = all * (ith + 1) / nth;
    for (int64_t at = all * ith / nth; at < end;) {
        const int32_t e = chosen.present[size_t(at / groups)], first = chosen.first[size_t(e)];
        const int64_t g0 = at % groups, g1 = std::min(groups, g0 + end - at);
        at += g1 - g0;
        if (at < all) { // this thread may have these next
            fetch_rows(a.weight(0, chosen.present[size_t(at / groups)]), at % groups * ROWS_GROUP, N);
        }
        const int32_t *pairs = chosen.pairs.data() + first;
        expert.take(a, pairs, chosen.first[size_t(e) + 1] - first, e);
        expert.multiply(a, pairs, g0 * ROWS_GROUP, std::min(g1 * ROWS_GROUP, N));
    }
}

// A unit of work is some values of a row.
void cpu_experts_sum(const ExpertsSumArgs &a, int ith, int nth) {
    constexpr int64_t UNIT = 256;
    const int64_t units = (a.E + UNIT - 1) / UNIT;
    if (a.counts != nullptr && ith == 0) {
        for (int32_t p = 0; p < a.T * a.n_used; p++) {
            int32_t &count = a.counts[a.route[p / a.n_used * 2 * a.n_used + p % a.n_used]];
            count = int32_t(uint32_t(count) + 1); // a GPU's wrap around too
        }
    }
    for (int64_t u = ith; u < units * a.T; u += nth) {
        const int64_t t = u / units, i0 = u % units * UNIT, n = std::min(UNIT, a.E - i0);
        float weights[MAX_USED], sums[UNIT] = {};
        memcpy(weights, a.route + t * 2 * a.n_used + a.n_used, size_t(a.n_used) * sizeof(float));
        for (int32_t r = 0; r < a.n_used; r++) {
            const float *y = a.y + (t * a.n_used + r) * a.E + i0;
            for (int64_t i = 0; i < n; i++) {
                sums[i] = std::fma(weights[r], y[i], sums[i]);
            }
        }
        std::copy_n(sums, n, a.out + t * a.E + i0);
    }
}

void cpu_add_shared(const AddSharedArgs &a, int ith, int nth) {
    for (int64_t t = ith; t < a.T; t += nth) {
        const float open = sigmoid(a.open[t]);
        for (int64_t i = t * a.E; i < (t + 1) * a.E; i++) {
            a.out[i] = a.y[i] + a.shared[i] * open;
        }
    }
}

} // namespace luce
