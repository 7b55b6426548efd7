// Compares topk with a sort on the host: the ids exactly, ties and ends of lists included, and scores to
// rounding.
#include "harness.h"
#include "sampling/launch_plan.h"

#include <numeric>

namespace {

struct Expected {
    std::vector<int32_t> ids;
    Doubles scores;
};

Expected expected_of(const float *x, int64_t n, int k) {
    std::vector<int32_t> ids(size_t(n), 0);
    std::iota(ids.begin(), ids.end(), 0);
    std::stable_sort(ids.begin(), ids.end(), [x](int32_t i, int32_t j) { return x[i] > x[j]; });
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += std::exp(double(x[i]) - x[ids[0]]);
    }
    Expected e;
    for (int i = 0; i < k; i++) {
        const bool there = i < n && x[ids[size_t(i)]] > -INFINITY;
        e.ids.push_back(there ? ids[size_t(i)] : -1);
        e.scores.push_back(there ? x[ids[size_t(i)]] - (x[ids[0]] + std::log(sum)) : -INFINITY);
    }
    return e;
}

// Checks n logits in T rows. Rows whose choice is kept nowhere write nothing, and the others write their
// entry alone, in any order.
void check(int64_t n, int T, int k) {
    Floats logits = normals(size_t(n) * T, 3.0f);
    for (int t = 0; t < T; t++) {
        float *x = &logits[size_t(t) * n];
        for (int64_t i = 0; t % 4 == 1 && i < n; i++) {
            x[i] = std::nearbyint(x[i] / 4); // this gives ties, -0 and +0
        }
        if (t % 4 == 2) { // such a list ends
            std::fill(x, x + n, -INFINITY);
            for (int i = 0; i < k / 2 + 1; i++) {
                x[pick(int(n))] = float(pick(3));
            }
        }
        for (int64_t i = 0; t % 4 == 3 && i < n; i++) {
            x[i] = float(i % 7 == 0) * 1e4f; // what is not near the largest has no mass
        }
    }
    StepCtl ctl = blank_ctl();
    for (int t = 0; t < T; t++) {
        ctl.rows[t].keep = t % 5 == 4 ? -1 : T - 1 - t;
    }
    Device<float> in(logits);
    Device<StepCtl> control(std::vector<StepCtl>{ctl});
    Device<int32_t> lists(size_t(T) * 2 * k), scratch(size_t(T) * topk_scratch(k));
    for (int run = 0; run < 2; run++) { // the second run goes over what the first left
        must(cuda::topk({in.p, n, T, k, control.p, lists.p, scratch.p, 2 * k}, stream));
        must(cudaStreamSynchronize(stream));
        const std::vector<int32_t> got = lists.get();
        bool good = true;
        for (int t = 0; t < T; t++) {
            const int32_t *list = &got[size_t(T - 1 - t) * 2 * k];
            const Expected e = expected_of(&logits[size_t(t) * n], n, k);
            for (int i = 0; i < k; i++) {
                float score;
                memcpy(&score, &list[k + i], sizeof(score));
                const double error = e.scores[size_t(i)] == score ? 0 : std::abs(e.scores[size_t(i)] - score);
                good = good && (t % 5 == 4 ? list[i] == -1 && list[k + i] == -1
                                           : list[i] == e.ids[size_t(i)] &&
                                                 error <= 1e-5 * (1 + std::abs(e.scores[size_t(i)])));
            }
        }
        expect(good, "topk n " + std::to_string(n) + " T " + std::to_string(T) + " k " + std::to_string(k));
    }
}

// Counts what is left of a row's parts by their bound, of which the best are selected by comparing each with each.
size_t left_of(int64_t n, int k) {
    const Floats x = normals(size_t(n), 3.0f);
    std::vector<Floats> parts;
    Floats heads;
    const TopkBound bound = topk_bound(int((n + TOPK_PART - 1) / TOPK_PART), k);
    for (int64_t begin = 0; begin < n; begin += TOPK_PART) {
        Floats part(&x[size_t(begin)], &x[size_t(begin)] + std::min<int64_t>(TOPK_PART, n - begin));
        std::sort(part.begin(), part.end(), std::greater<float>());
        part.resize(std::min(part.size(), size_t(k)));
        heads.push_back(bound.deep <= int(part.size()) ? part[size_t(bound.deep) - 1] : -INFINITY);
        parts.push_back(part);
    }
    std::sort(heads.begin(), heads.end(), std::greater<float>());
    size_t left = 0;
    for (const Floats &part : parts) {
        left += size_t(std::count_if(part.begin(), part.end(),
                                     [&](float each) { return each >= heads[size_t(bound.rank) - 1]; }));
    }
    return left;
}

void check_bound() {
    for (int parts = 1; parts <= TOPK_PARTS; parts++) {
        for (int k = 1; k <= TOPK_MAX; k++) {
            const TopkBound b = topk_bound(parts, k);
            expect(b.deep >= 1 && b.deep <= k && b.rank >= 1 && b.rank <= parts && b.deep * b.rank >= k,
                   "topk has no bound of " + std::to_string(k) + " in " + std::to_string(parts) + " parts");
        }
    }
    // The vocabulary of Qwen has 61 parts, fewer than the candidates that are kept of each draft of auto.
    for (int64_t n : {50'000, 151'936, 248'320, 262'144}) {
        for (int k : {1, 22, 61, 62, 63}) {
            const size_t left = left_of(n, k);
            expect(left >= size_t(k) && left <= size_t(5 * k + 16), "topk of " + std::to_string(n) +
                                                                        " compares " + std::to_string(left) +
                                                                        " for " + std::to_string(k));
        }
    }
}

} // namespace

void check_topk(bool all) {
    check_bound();
    if (watched()) { // a list's rounds keep a tool busy, however many rows there are
        check(4097, 1, 63);
        check(4097, 6, 1);
        check(4097, 6, 22);
        return;
    }
    for (int64_t n : {1, 5, 100, 4096, 4097, 50'000, 248'320, 262'144}) {
        for (int k : {1, 4, 8, 22, 63}) {
            if (all || n == 4097) {
                check(n, 1, k);
                check(n, all ? 17 : 6, k);
            }
        }
    }
    for (int T = 1; all && T <= MAX_ROWS; T++) {
        check(5000, T, 1 + pick(TOPK_MAX));
    }
}

// Times topk. A chain's link keeps few of one row, and a block's 15 rows keep as many as its tree may take.
void time_topk() {
    const int64_t n = 248'320;
    Device<float> logits(normals(size_t(n) * 15, 3.0f));
    StepCtl ctl = blank_ctl();
    for (int t = 0; t < 15; t++) {
        ctl.rows[t].keep = t;
    }
    Device<StepCtl> control(std::vector<StepCtl>{ctl});
    Device<int32_t> lists(15 * 2 * TOPK_MAX), scratch(size_t(15) * topk_scratch(TOPK_MAX));
    const int cases[][2] = {{1, 4}, {1, 8}, {1, 63}, {15, 8}, {15, 22}, {15, 63}};
    for (const auto &each : cases) {
        const int T = each[0], k = each[1];
        const double us = median_us(
            [&] { must(cuda::topk({logits.p, n, T, k, control.p, lists.p, scratch.p, 2 * k}, stream)); }, 50);
        printf("topk %2d rows of %lld, k %2d: %7.1f us\n", T, (long long) n, k, us);
    }
}
