#include "sampler.h"

#include "status.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace luce {
namespace {

// By logit, then lower id: the order of candidates everywhere.
struct Better {
    const float *logits;
    bool operator()(int32_t a, int32_t b) const {
        return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    }
};

int32_t argmax(const float *logits, uint32_t n) {
    int32_t best = 0;
    for (uint32_t i = 1; i < n; i++) {
        best = logits[i] > logits[best] ? int32_t(i) : best;
    }
    return best;
}

// Candidates in order, sorted only as far as they are asked for: a full sort of 248k ids costs more than
// the rest of the rule together.
class Candidates {
public:
    Candidates(const float *logits, uint32_t n, uint32_t top_k) : better_{logits}, ids_(n) {
        std::iota(ids_.begin(), ids_.end(), 0);
        if (top_k > 0 && top_k < n) {
            std::nth_element(ids_.begin(), ids_.begin() + (top_k - 1), ids_.end(), better_);
            ids_.resize(top_k);
        }
    }
    size_t size() const { return ids_.size(); }
    int32_t operator[](size_t i) {
        while (i >= sorted_) {
            const size_t end = std::min(ids_.size(), sorted_ == 0 ? size_t(128) : sorted_ * 8);
            std::partial_sort(ids_.begin() + long(sorted_), ids_.begin() + long(end), ids_.end(), better_);
            sorted_ = end;
        }
        return ids_[i];
    }
    std::vector<int32_t> in_id_order() const {
        std::vector<int32_t> ids = ids_;
        std::sort(ids.begin(), ids.end());
        return ids;
    }

private:
    Better better_;
    std::vector<int32_t> ids_;
    size_t sorted_ = 0;
};

} // namespace

uint32_t philox(uint64_t seed, uint64_t position) {
    uint32_t c[4] = {uint32_t(position), uint32_t(position >> 32), 0, 0};
    uint32_t k[2] = {uint32_t(seed), uint32_t(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        const uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
        const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k[0], uint32_t(b),
                                  uint32_t(a >> 32) ^ c[3] ^ k[1], uint32_t(a)};
        std::copy(next, next + 4, c);
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    return c[0];
}

void check_sampling(const luce_sampling &s) {
    if (!(s.temperature >= 0) || std::isinf(s.temperature)) {
        fail(LUCE_E_ARG, "temperature is %g, expected a finite number >= 0", double(s.temperature));
    }
    if (!(s.top_p >= 0 && s.top_p <= 1)) {
        fail(LUCE_E_ARG, "top_p is %g, expected 0 (off) to 1", double(s.top_p));
    }
    if (!(s.min_p >= 0 && s.min_p < 1)) {
        fail(LUCE_E_ARG, "min_p is %g, expected 0 (off) to below 1", double(s.min_p));
    }
    if (s.top_k < 0) {
        fail(LUCE_E_ARG, "top_k is %d, expected 0 (off) or more", s.top_k);
    }
}

int32_t sample(const float *logits, uint32_t n, const luce_sampling &s, uint64_t position) {
    for (uint32_t i = 0; i < n; i++) {
        if (!std::isfinite(logits[i])) {
            fail(LUCE_E_NUMERIC, "logit %u of position %llu is not finite", i, (unsigned long long) position);
        }
    }
    if (s.temperature == 0) {
        return argmax(logits, n);
    }
    // logits / temperature, top-k, softmax: weight(id) = exp(z - z_max), its sum taken in id order. Where the
    // temperature is so near zero that z_max is not finite, what is below the largest logit weighs nothing.
    Candidates candidates(logits, n, uint32_t(s.top_k));
    const float largest = logits[candidates[0]], z_max = largest / s.temperature;
    const auto weight = [&](int32_t id) {
        return logits[id] == largest   ? 1.0f
               : !std::isfinite(z_max) ? 0.0f
                                       : std::exp(logits[id] / s.temperature - z_max);
    };
    float total = 0;
    if (candidates.size() == n) {
        for (uint32_t id = 0; id < n; id++) {
            total += weight(int32_t(id));
        }
    } else {
        for (const int32_t id : candidates.in_id_order()) {
            total += weight(id);
        }
    }
    // top-p and min-p each keep a prefix of the candidates; `kept` is that prefix's mass
    const float top_p = s.top_p == 0 ? 1.0f : s.top_p;
    size_t n_kept = candidates.size();
    float kept = total;
    if (top_p < 1 || s.min_p > 0) {
        kept = 0;
        for (size_t i = 0; i < candidates.size(); i++) {
            const float w = weight(candidates[i]);
            if (w < s.min_p) { // relative to the largest, whose weight is 1
                n_kept = i;
                break;
            }
            kept += w;
            if (top_p < 1 && kept >= top_p * total) {
                n_kept = i + 1;
                break;
            }
        }
    }
    // inverse CDF over what is kept
    const float u = float(philox(s.seed, position)) * 0x1p-32f;
    float cumulative = 0;
    for (size_t i = 0; i < n_kept; i++) {
        cumulative += weight(candidates[i]);
        if (cumulative > u * kept) {
            return candidates[i];
        }
    }
    return candidates[n_kept - 1]; // rounding left the sum below u * kept
}

} // namespace luce
