#include "cpu/draft_block.h"

#include "cpu/sampler.h"

#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

namespace luce {

void cpu_block_conv(const BlockConvArgs &a, int ith, int nth) {
    const int64_t per_side = int64_t(a.taps) * a.groups, in_group = a.E / a.groups;
    for (int t = ith; t < a.T; t += nth) {
        float *out = a.out + int64_t(t) * a.E;
        std::fill(out, out + a.E, 0.0f);
        int32_t row = t;
        for (int32_t tap = 0; tap < a.taps && row >= 0; tap++, row = a.ctl->rows[row].parent) {
            const float *x = a.x + int64_t(row) * a.E;
            const float *base = a.base + (int64_t(a.side) * a.taps + tap) * a.E;
            const float *added = a.added + int64_t(t) * 2 * per_side + a.side * per_side + tap * a.groups;
            for (int64_t c = 0; c < a.E; c++) {
                out[c] += (base[c] + added[c / in_group]) * x[c];
            }
        }
    }
}

void cpu_prior_tokens(const PriorArgs &a, int ith, int nth) {
    for (int t = ith; t < a.T; t += nth) {
        a.out[t] = token_of(prior_of(a, t), a.drafts, a.n_vocab);
    }
}

void cpu_candidates(const CandidatesArgs &a, int ith, int nth) {
    const int64_t plane = int64_t(a.T) * a.K;
    for (int t = ith; t < a.T; t += nth) {
        const float *x = a.logits + t * a.n;
        int32_t *out = a.out + int64_t(t) * a.K;
        std::vector<Candidate> best;
        const bool finite = std::all_of(x, x + a.n, [](float value) { return value < INFINITY; });
        if (finite) { // NaN has no place in an order
            best = first_k(x, a.n, size_t(a.K));
            std::sort(best.begin(), best.end(), better);
        }
        best.resize(size_t(a.K), {finite ? -INFINITY : NAN, 0});
        for (int32_t i = 0; i < a.K; i++) {
            const Candidate &c = best[size_t(i)];
            out[i] = c.id;
            out[plane + i] = a.tokens == nullptr ? c.id : int32_t(a.tokens[c.id]);
            memcpy(&out[2 * plane + i], &c.x, sizeof(c.x));
        }
    }
}

namespace {

// A row's candidates in the order (score descending, token ascending).
struct Ordered {
    int32_t at[TOPK_MAX], tokens[TOPK_MAX];
    float scores[TOPK_MAX];

    Ordered(const int32_t *ids, const float *s, int32_t K) {
        std::iota(at, at + K, 0);
        std::sort(at, at + K,
                  [&](int32_t i, int32_t j) { return s[i] > s[j] || (s[i] == s[j] && ids[i] < ids[j]); });
        for (int32_t i = 0; i < K; i++) {
            tokens[i] = ids[at[i]];
            scores[i] = s[at[i]];
        }
    }
};

// Returns which of K candidates the sequence's settings take, of finite scores.
int32_t taken(const ChoiceCtl &choice, uint64_t position, const int32_t *ids, const float *s, int32_t K) {
    const Ordered best(ids, s, K);
    if (choice.scale == 0) {
        return best.at[0];
    }
    float noisy[TOPK_MAX];
    uint64_t kept = 0;
    const uint32_t n =
        score_candidates(choice, position, best.tokens, best.scores, uint32_t(K), noisy, &kept);
    uint32_t most = 0;
    for (uint32_t i = 1; i < n; i++) {
        const bool tie = noisy[i] == noisy[most] && best.tokens[i] < best.tokens[most];
        most = noisy[i] > noisy[most] || tie ? i : most;
    }
    return best.at[most];
}

void log_softmax(const float *s, int32_t n, float *out) {
    const double largest = *std::max_element(s, s + n);
    double sum = 0;
    for (int32_t i = 0; i < n; i++) {
        sum += std::exp(double(s[i]) - largest);
    }
    for (int32_t i = 0; i < n; i++) {
        out[i] = float(double(s[i]) - largest - std::log(sum));
    }
}

// The lattice of one block, row by row.
class Block {
public:
    explicit Block(const LatticeArgs &args) : a(args), ids_(args.candidates + int64_t(args.T) * args.K) {}

    void row(int32_t t, int32_t anchor) {
        const RowCtl &row = a.ctl->rows[t];
        const int32_t above = drafted_above(*a.ctl, t), n = above < 0 ? 1 : a.K;
        float *out = a.out + int64_t(t) * a.K * a.K;
        for (int32_t from = 0; from < n; from++) {
            if (a.lists != nullptr || above < 0 || from == chosen_) {
                const float *of = above < 0 ? a.anchors + int64_t(anchor) * a.R
                                            : a.before + (int64_t(above) * a.K + from) * a.R;
                score(t, of, out + int64_t(from) * a.K);
            }
        }
        if (a.lists != nullptr) {
            list(t, out, n, a.lists + int64_t(row.keep) * a.entry);
        }
        if (a.chooses != 0) {
            choose(t, out + (above < 0 ? 0 : int64_t(chosen_) * a.K));
        }
    }

private:
    const int32_t *ids(int32_t t) const { return ids_ + int64_t(t) * a.K; }

    void score(int32_t t, const float *of, float *out) const {
        const int32_t *bits = a.candidates + (2 * int64_t(a.T) + t) * a.K;
        for (int32_t to = 0; to < a.K; to++) {
            const float *behind = a.behind + (int64_t(t) * a.K + to) * a.R;
            const float *gates = a.gates == nullptr ? nullptr : a.gates + int64_t(t) * a.R;
            float sum = 0, logit;
            for (int32_t r = 0; r < a.R; r++) {
                sum += of[r] * (gates == nullptr ? 1.0f : gates[r]) * behind[r];
            }
            memcpy(&logit, &bits[to], sizeof(logit));
            out[to] = logit + sum;
        }
    }

    void list(int32_t t, const float *s, int32_t n, int32_t *entry) const {
        std::copy_n(ids(t), a.K, entry);
        std::vector<float> of(size_t(a.K));
        for (int32_t from = 0; from < n; from++) {
            log_softmax(s + int64_t(from) * a.K, a.K, of.data());
            memcpy(entry + int64_t(from + 1) * a.K, of.data(), size_t(a.K) * sizeof(float));
        }
    }

    void choose(int32_t t, const float *s) {
        const RowCtl &row = a.ctl->rows[t];
        const bool finite = std::all_of(s, s + a.K, [](float value) { return std::isfinite(value); });
        chosen_ = !finite
                      ? 0
                      : taken(a.ctl->seqs[row.seq].choice, uint64_t(row.position + a.ahead), ids(t), s, a.K);
        for (int32_t *kept : {a.drafts, a.given}) {
            kept[2 * int64_t(row.keep)] = ids(t)[chosen_];
            kept[2 * int64_t(row.keep) + 1] = finite ? 0 : 1;
        }
    }

    const LatticeArgs &a;
    const int32_t *ids_; // [T][K]
    int32_t chosen_ = 0; // of the row above
};

} // namespace

void cpu_lattice(const LatticeArgs &a, int ith, int nth) {
    for (int32_t s = ith; s < a.ctl->n_seqs; s += nth) {
        const SeqCtl &seq = a.ctl->seqs[s];
        Block block(a);
        for (int32_t t = seq.row0; t < seq.row0 + seq.n_rows; t++) {
            if (a.ctl->rows[t].keep >= 0) {
                block.row(t, seq.row0);
            }
        }
    }
}

void cpu_confidence(const ConfidenceArgs &a, int ith, int nth) {
    std::vector<float> head(size_t(a.n));
    const auto to_float = ggml_get_type_traits(ggml_type(a.type))->to_float;
    if (to_float != nullptr) {
        to_float(a.head, head.data(), a.n);
    } else { // it is F32
        memcpy(head.data(), a.head, head.size() * sizeof(float));
    }
    for (int32_t t = ith; t < a.T; t += nth) {
        const RowCtl &row = a.ctl->rows[t];
        if (row.keep < 0) {
            continue;
        }
        const int32_t above = drafted_above(*a.ctl, t), n = above < 0 ? 1 : a.K;
        for (int32_t from = 0; from < n; from++) {
            const float *of = above < 0 ? a.anchors + int64_t(a.ctl->seqs[row.seq].row0) * a.R
                                        : a.before + (int64_t(above) * a.K + from) * a.R;
            double x = a.bias == nullptr ? 0 : a.bias[0];
            for (int32_t i = 0; i < a.n; i++) {
                x += double(head[size_t(i)]) * (i < a.E ? a.hidden[int64_t(t) * a.E + i] : of[i - a.E]);
            }
            const float found = float(std::min(x, 0.0) - std::log1p(std::exp(-std::abs(x))));
            a.out[int64_t(t) * a.K + from] = found;
            memcpy(a.lists + int64_t(row.keep) * a.entry + a.K * (a.K + 1) + from, &found, sizeof(found));
        }
    }
}

} // namespace luce
