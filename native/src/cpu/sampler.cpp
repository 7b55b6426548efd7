#include "cpu/sampler.h"

#include "abi/status.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

namespace luce {
namespace {

int64_t first_largest(const float *x, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++) {
        best = x[i] > x[best] ? i : best;
    }
    return best;
}

// Best finds the largest z + G of the ids that it is shown.
class Best {
public:
    Best(const ChoiceCtl &ctl, uint64_t position, float x_max)
        : ctl_(ctl), position_(position), x_max_(x_max) {}

    void see(float x, int32_t id, uint32_t word) {
        const float gap = half_gap(x, x_max_), z = z_of(gap, ctl_.scale);
        if (z < Z_MIN || z + gumbel_bound(word) < score_) { // it cannot win
            return;
        }
        const float score = score_of(gap, ctl_.scale, word);
        if ((score > score_ || (score == score_ && id < id_)) &&
            (ctl_.min_mass == 0 || mass_of(z) >= ctl_.min_mass)) {
            score_ = score;
            id_ = id;
        }
    }
    void see(const Candidate &c) {
        see(c.x, c.id, noise_words(ctl_.seed, position_, uint32_t(c.id) / 4).w[c.id % 4]);
    }
    // Shows it all ids of a row, four to a block of random words.
    void see_all(const float *x, int64_t n) {
        for (int64_t i = 0; i < n; i += 4) {
            const int64_t end = std::min(n, i + 4);
            float most = x[i];
            for (int64_t j = i + 1; j < end; j++) {
                most = std::max(most, x[j]);
            }
            const float z = z_of(half_gap(most, x_max_), ctl_.scale);
            if (z < Z_MIN || z + NOISE_MAX < score_) {
                continue;
            }
            const Words4 words = noise_words(ctl_.seed, position_, uint32_t(i / 4));
            for (int64_t j = i; j < end; j++) {
                see(x[j], int32_t(j), words.w[j - i]);
            }
        }
    }
    int32_t id() const { return id_; }

private:
    const ChoiceCtl &ctl_;
    uint64_t position_;
    float x_max_, score_ = -INFINITY;
    int32_t id_ = INT32_MAX;
};

} // namespace

std::vector<Candidate> first_k(const float *x, int64_t n, size_t k) {
    std::vector<Candidate> kept;
    kept.reserve(2 * k + 64);
    float least = -INFINITY; // it is the least of the k best candidates seen so far
    for (int64_t i = 0; i < n; i++) {
        if (x[i] > least) { // an equal one has a higher id
            kept.push_back({x[i], int32_t(i)});
            if (kept.size() == 2 * k + 64) {
                std::nth_element(kept.begin(), kept.begin() + long(k - 1), kept.end(), better);
                kept.resize(k);
                least = kept[k - 1].x;
            }
        }
    }
    if (kept.size() > k) {
        std::nth_element(kept.begin(), kept.begin() + long(k - 1), kept.end(), better);
        kept.resize(k);
    }
    return kept;
}

namespace {

// Keeps of `candidates`, in no order, the fewest first ones that reach top_p of their mass. z goes into bins,
// best first, and only the bin in which that happens is sorted.
void keep_top_p(std::vector<Candidate> &candidates, const ChoiceCtl &ctl, float x_max) {
    const auto z = [&](const Candidate &c) { return z_of(half_gap(c.x, x_max), ctl.scale); };
    const auto bin = [&](const Candidate &c) { return bin_of(std::max(z(c), Z_MIN)); };
    std::vector<uint64_t> masses(SAMPLE_BINS);
    uint64_t total = 0, before = 0;
    for (const Candidate &c : candidates) {
        const uint64_t mass = mass_of(z(c));
        masses[size_t(bin(c))] += mass;
        total += mass;
    }
    const uint64_t need = needed_mass(total, ctl.top_p);
    int last = 0;
    while (before + masses[size_t(last)] < need) {
        before += masses[size_t(last++)];
    }
    const auto middle = std::partition(candidates.begin(), candidates.end(),
                                       [&](const Candidate &c) { return bin(c) < last; });
    const auto end =
        std::partition(middle, candidates.end(), [&](const Candidate &c) { return bin(c) == last; });
    std::sort(middle, end, better);
    auto kept = middle;
    while (before < need) {
        before += mass_of(z(*kept++));
    }
    candidates.erase(kept, candidates.end());
}

} // namespace

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

ChoiceCtl choice_ctl(const luce_sampling &s) {
    ChoiceCtl ctl{};
    ctl.seed = s.seed;
    ctl.scale = s.temperature == 0 ? 0.0f : float(std::min(2.0 / double(s.temperature), double(FLT_MAX)));
    ctl.top_k = s.top_k;
    ctl.top_p = s.top_p == 0 ? TOP_P_ONE : uint32_t(std::ceil(double(s.top_p) * TOP_P_ONE));
    ctl.min_mass = uint64_t(std::ceil(double(s.min_p) * 0x1p40));
    return ctl;
}

int32_t choose(const float *x, int64_t n, const ChoiceCtl &ctl, uint64_t position) {
    const int64_t first = first_largest(x, n);
    if (ctl.scale == 0) {
        return int32_t(first);
    }
    const float x_max = x[first];
    Best best(ctl, position, x_max);
    best.see({x_max, int32_t(first)}); // it is always kept
    const bool top_k = ctl.top_k > 0 && ctl.top_k < n;
    if (!top_k && ctl.top_p == TOP_P_ONE) {
        best.see_all(x, n);
        return best.id();
    }
    std::vector<Candidate> candidates;
    if (top_k) {
        candidates = first_k(x, n, size_t(ctl.top_k));
    } else {
        for (int64_t i = 0; i < n; i++) {
            if (z_of(half_gap(x[i], x_max), ctl.scale) >= Z_MIN) {
                candidates.push_back({x[i], int32_t(i)});
            }
        }
    }
    if (ctl.top_p < TOP_P_ONE) {
        keep_top_p(candidates, ctl, x_max);
    }
    for (const Candidate &c : candidates) {
        best.see(c);
    }
    return best.id();
}

uint32_t score_candidates(const ChoiceCtl &ctl, uint64_t position, const int32_t *ids, const float *logits,
                          uint32_t n, float *scores, uint64_t *kept) {
    const auto gap = [&](uint32_t i) { return half_gap(logits[i], logits[0]); };
    const uint32_t most = ctl.top_k > 0 ? std::min(n, uint32_t(ctl.top_k)) : n;
    uint64_t total = 0;
    uint32_t end = 0;
    for (; end < most && ids[end] >= 0; end++) {
        total += mass_of(z_of(gap(end), ctl.scale));
    }
    const uint64_t needed = needed_mass(total, ctl.top_p);
    uint32_t i = 0;
    for (*kept = 0; i < end && *kept < needed; i++) {
        const uint64_t mass = mass_of(z_of(gap(i), ctl.scale));
        if (mass < ctl.min_mass) {
            break;
        }
        *kept += mass;
        const Words4 words = noise_words(ctl.seed, position, uint32_t(ids[i]) / 4);
        scores[i] = score_of(gap(i), ctl.scale, words.w[ids[i] % 4]);
    }
    return i;
}

int32_t sample(const float *logits, uint32_t n, const luce_sampling &s, uint64_t position) {
    bool any = false;
    for (uint32_t i = 0; i < n; i++) {
        if (std::isnan(logits[i]) || logits[i] == INFINITY) {
            fail(LUCE_E_NUMERIC, "logit %u of position %llu is not finite", i, (unsigned long long) position);
        }
        any = any || logits[i] != -INFINITY;
    }
    if (!any) {
        fail(LUCE_E_NUMERIC, "the logits of position %llu are all -inf", (unsigned long long) position);
    }
    return choose(logits, n, choice_ctl(s), position);
}

void cpu_choose(const ChooseArgs &a, int ith, int nth) {
    for (int t = ith; t < a.T; t += nth) {
        const float *x = a.logits + t * a.n;
        const RowCtl &row = a.ctl->rows[a.row_of(t)];
        const bool finite = std::all_of(x, x + a.n, [](float value) { return std::isfinite(value); });
        const ChoiceCtl greedy{};
        a.out[t].token = choose(x, a.n, finite && row.seq >= 0 ? a.ctl->seqs[row.seq].choice : greedy,
                                uint64_t(row.position + a.ahead));
        a.out[t].not_finite = finite ? 0 : 1;
        for (int32_t *kept : {a.drafts, a.given}) {
            if (kept != nullptr && row.keep >= 0) {
                kept[2 * row.keep] = a.out[t].token;
                kept[2 * row.keep + 1] = a.out[t].not_finite;
            }
        }
    }
}

} // namespace luce
