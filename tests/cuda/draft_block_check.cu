// Compares what blocks have whose drafts depend on each other with plain loops on the host: convolutions, the tokens before,
// candidates, and the lattice, whose drafts are those of sampling.h's rule over the scores that the kernel left.
#include "harness.h"

#include <array>
#include <numeric>

namespace {

// Returns the control block of blocks of B rows, of which those from `first` on draft, into entries in no order.
StepCtl ctl_of(int blocks, int B, int first, const std::vector<ChoiceCtl> &choices) {
    StepCtl ctl = blank_ctl();
    const int n = B - first;
    ctl.n_seqs = blocks;
    ctl.n_rows = blocks * B;
    for (int b = 0; b < blocks; b++) {
        SeqCtl &seq = ctl.seqs[b];
        seq.row0 = b * B;
        seq.n_rows = B;
        seq.choice = choices[size_t(b) % choices.size()];
        for (int i = 0; i < B; i++) {
            const int entry = (blocks - 1 - b) * n + i - first;
            ctl.rows[b * B + i] = {b, i == 0 ? -1 : b * B + i - 1, 100 * b + i, i < first ? -1 : entry};
        }
    }
    return ctl;
}

ChoiceCtl greedy() {
    ChoiceCtl c{};
    c.top_p = TOP_P_ONE;
    return c;
}

void check_conv(int blocks, int B, int E, int groups, int taps) {
    const int T = blocks * B, added_row = 2 * taps * groups;
    const Floats x = normals(size_t(T) * E), added = normals(size_t(T) * added_row),
                 base = normals(size_t(2) * taps * E);
    Device<float> dx(x), dadded(added), dbase(base), out(size_t(T) * E);
    Device<StepCtl> ctl(std::vector<StepCtl>{ctl_of(blocks, B, 1, {greedy()})});
    for (int side : {0, 1}) {
        BlockConvArgs a{T, E, taps, groups, side, dx.p, dadded.p, dbase.p, ctl.p, out.p};
        must(cuda::block_conv(a, stream));
        must(cudaStreamSynchronize(stream));
        const Floats got = out.get();
        bool good = true;
        for (int t = 0; t < T; t++) {
            for (int c = 0; c < E; c++) {
                double sum = 0, size = 0;
                for (int i = 0; i < taps && i <= t % B; i++) {
                    const double kernel =
                        double(base[(size_t(side) * taps + i) * E + c]) +
                        added[size_t(t) * added_row + (side * taps + i) * groups + c / (E / groups)];
                    sum += kernel * x[size_t(t - i) * E + c];
                    size += std::abs(kernel * x[size_t(t - i) * E + c]);
                }
                good = good && std::abs(got[size_t(t) * E + c] - sum) <= 1e-6 * (size + 1);
            }
        }
        expect(good, "block_conv of " + std::to_string(taps) + " taps, side " + std::to_string(side));
    }
}

void check_prior(int blocks, int B, int first) {
    Ints tokens, drafts;
    for (int t = 0; t < blocks * B; t++) {
        tokens.push_back(t % B == 0 ? 50 + t : 1);
        drafts.insert(drafts.end(), {500 + t, 0});
    }
    const StepCtl ctl = ctl_of(blocks, B, first, {greedy()});
    Device<int32_t> dtokens(tokens), ddrafts(drafts), out{size_t(blocks)};
    Device<StepCtl> control(std::vector<StepCtl>{ctl});
    for (int row = first; row < B; row++) {
        must(cuda::prior_tokens({blocks, row, B - 1, 1000, dtokens.p, ddrafts.p, control.p, out.p}, stream));
        must(cudaStreamSynchronize(stream));
        Ints expected;
        for (int b = 0; b < blocks; b++) {
            expected.push_back(row == first ? 50 + b * B : 500 + ctl.rows[b * B + row - 1].keep);
        }
        expect(out.get() == expected, "prior_tokens of row " + std::to_string(row));
    }
}

void check_candidates(int64_t n, int T, int K) {
    Floats logits = normals(size_t(n) * T, 3.0f);
    std::vector<int64_t> names(size_t(n), 0);
    for (int64_t i = 0; i < n; i++) {
        names[size_t(i)] = 2 * i + 1;
    }
    for (int t = 0; t < T; t++) {
        float *x = &logits[size_t(t) * n];
        for (int64_t i = 0; t % 4 == 1 && i < n; i++) {
            x[i] = std::nearbyint(x[i]); // this gives ties
        }
        if (t % 4 == 2) {
            x[pick(int(n))] = t % 8 == 2 ? NAN : INFINITY;
        }
        if (t % 4 == 3) { // fewer than K can be chosen
            std::fill(x + K / 2, x + n, -INFINITY);
        }
    }
    Device<float> in(logits);
    Device<int64_t> map(names);
    const size_t plane = size_t(T) * K;
    Device<int32_t> out(plane * size_t(candidate_planes(K)));
    for (const int64_t *tokens :
         {static_cast<const int64_t *>(nullptr), static_cast<const int64_t *>(map.p)}) {
        must(cuda::candidates({T, K, n, in.p, tokens, out.p}, stream));
        must(cudaStreamSynchronize(stream));
        const Ints got = out.get();
        bool good = true;
        for (int t = 0; t < T; t++) {
            const float *x = &logits[size_t(t) * n];
            const bool finite = std::all_of(x, x + n, [](float v) { return v < INFINITY; });
            Ints order(static_cast<size_t>(n), 0);
            std::iota(order.begin(), order.end(), 0);
            if (finite) {
                std::stable_sort(order.begin(), order.end(), [x](int a, int b) { return x[a] > x[b]; });
            }
            for (int i = 0; i < K; i++) {
                const int32_t at = got[size_t(t) * K + i];
                float logit;
                memcpy(&logit, &got[2 * plane + size_t(t) * K + i], sizeof(logit));
                const int32_t token = got[plane + size_t(t) * K + i];
                const float most = x[order[size_t(i)]];
                const bool right = !finite ? std::isnan(logit)
                                           : logit == most && (most == -INFINITY || at == order[size_t(i)]);
                good = good && right && at >= 0 && at < n && token == (tokens == nullptr ? at : 2 * at + 1);
            }
        }
        expect(good, "candidates " + std::to_string(K) + " of " + std::to_string(n));
    }
}

// Returns which of K candidates the rule takes of scores s.
int taken(const ChoiceCtl &c, uint64_t position, const int32_t *ids, const float *s, int K) {
    Ints order(static_cast<size_t>(K), 0);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](int a, int b) { return s[a] > s[b] || (s[a] == s[b] && ids[a] < ids[b]); });
    if (c.scale == 0) {
        return order[0];
    }
    const float largest = s[order[0]];
    order.resize(size_t(c.top_k > 0 ? std::min(c.top_k, K) : K));
    const auto mass = [&](int i) { return mass_of(z_of(half_gap(s[i], largest), c.scale)); };
    uint64_t total = 0, kept = 0;
    for (int i : order) {
        total += mass(i);
    }
    int best = -1;
    float most = -INFINITY;
    for (int i : order) {
        if (kept >= needed_mass(total, c.top_p) || mass(i) < c.min_mass) {
            break;
        }
        kept += mass(i);
        const float score = score_of(half_gap(s[i], largest), c.scale,
                                     noise_words(c.seed, position, uint32_t(ids[i]) / 4).w[ids[i] % 4]);
        if (score > most || (score == most && ids[i] < ids[best])) {
            most = score;
            best = i;
        }
    }
    return best;
}

void check_lattice(int blocks, int B, int first, int K, int R, bool gated, bool listed, bool broken) {
    const int T = blocks * B, n = blocks * (B - first), entry = K + K * K + 1;
    Floats z = normals(size_t(T) * K), gates = normals(size_t(T) * R);
    const Floats anchors = normals(size_t(T) * R), before = normals(size_t(T) * K * R),
                 behind = normals(size_t(T) * K * R, 1.0f / std::sqrt(float(R)));
    z[size_t(B + first) * K % z.size()] = broken ? NAN : 0;
    Ints candidates(size_t(3) * T * K);
    for (int i = 0; i < T * K; i++) {
        candidates[size_t(i)] = -1;
        candidates[size_t(T) * K + i] = 7 * i % 1009 + 1009 * (i % 3);
        memcpy(&candidates[size_t(2) * T * K + i], &z[size_t(i)], sizeof(float));
    }
    std::vector<ChoiceCtl> choices = {greedy(), greedy(), greedy()};
    choices[1].scale = 2.0f, choices[1].seed = 77;
    choices[2].scale = 1.0f, choices[2].seed = 78, choices[2].top_k = 5,
    choices[2].top_p = TOP_P_ONE / 10 * 9, choices[2].min_mass = 1ull << 34;
    const StepCtl ctl = ctl_of(blocks, B, first, choices);
    Device<int32_t> of(candidates), drafts(Ints(size_t(2) * n, -5)), given(Ints(size_t(2) * n, -5)),
        lists(Ints(size_t(n) * entry, -5));
    Device<float> da(anchors), db(before), dbehind(behind), dg(gates), out(size_t(T) * K * K);
    Device<StepCtl> control(std::vector<StepCtl>{ctl});
    LatticeArgs a{T,         K,
                  R,         1,
                  1,         of.p,
                  da.p,      db.p,
                  dbehind.p, gated ? dg.p : nullptr,
                  control.p, drafts.p,
                  given.p,   listed ? lists.p : nullptr,
                  entry,     out.p};
    must(cuda::lattice(a, stream));
    must(cudaStreamSynchronize(stream));
    const Floats scores = out.get();
    const Ints drafted = drafts.get(), kept = lists.get();
    bool summed = true, walked = drafted == given.get(), list_good = true;
    for (int b = 0; b < blocks; b++) {
        int chosen = 0;
        for (int t = b * B + first; t < (b + 1) * B; t++) {
            const bool top = t == b * B + first;
            const float *s = &scores[size_t(t) * K * K];
            const int32_t *ids = &candidates[size_t(T + t) * K];
            for (int from = 0; from < (top ? 1 : K); from++) {
                const float *f = top ? &anchors[size_t(b) * B * R] : &before[(size_t(t - 1) * K + from) * R];
                double largest = -INFINITY, mass = 0;
                for (int to = 0; to < K; to++) {
                    double sum = z[size_t(t) * K + to];
                    for (int r = 0; r < R; r++) {
                        sum += double(f[r]) * (gated ? gates[size_t(t) * R + r] : 1) *
                               behind[(size_t(t) * K + to) * R + r];
                    }
                    summed = summed && (std::isnan(sum)
                                            ? std::isnan(s[from * K + to])
                                            : std::abs(s[from * K + to] - sum) <= 1e-5 * (1 + std::abs(sum)));
                    largest = std::max(largest, sum);
                }
                for (int to = 0; to < K; to++) {
                    mass += std::exp(s[from * K + to] - largest);
                }
                for (int to = 0; listed && !std::isnan(mass) && to < K; to++) {
                    float found;
                    const int32_t *list = &kept[size_t(ctl.rows[t].keep) * entry];
                    memcpy(&found, &list[(from + 1) * K + to], sizeof(found));
                    list_good = list_good && list[to] == ids[to] && list[K + K * K] == -5 &&
                                std::abs(found - (s[from * K + to] - largest - std::log(mass))) <= 1e-5;
                }
            }
            s += top ? 0 : size_t(chosen) * K;
            const bool finite = std::all_of(s, s + K, [](float v) { return std::isfinite(v); });
            chosen = finite ? taken(ctl.seqs[b].choice, uint64_t(ctl.rows[t].position + 1), ids, s, K) : 0;
            const int32_t *draft = &drafted[size_t(2) * ctl.rows[t].keep];
            walked = walked && draft[0] == ids[chosen] && draft[1] == (finite ? 0 : 1);
        }
    }
    const std::string what = " of a lattice " + std::to_string(K) + " of rank " + std::to_string(R);
    expect(summed, "scores" + what);
    expect(walked, "drafts" + what);
    expect(list_good, "lists" + what);
}

void check_confidence(int blocks, int B, int first, int K, int R, int E, bool of_tokens) {
    const int T = blocks * B, n = blocks * (B - first), entry = K * (K + 2) + 1, from_lists = K * (K + 1);
    const Floats hidden = normals(size_t(T) * E), anchors = normals(size_t(T) * R),
                 before = normals(size_t(T) * K * R),
                 head = normals(size_t(E) + (of_tokens ? R : 0), 3.0f / std::sqrt(float(E + R))),
                 bias = normals(1);
    const StepCtl ctl = ctl_of(blocks, B, first, {greedy()});
    Device<int32_t> lists(Ints(size_t(n) * entry, -5));
    Device<float> dh(hidden), da(anchors), db(before), dw(head), dbias(bias), out(size_t(T) * K);
    Device<StepCtl> control(std::vector<StepCtl>{ctl});
    ConfidenceArgs a{};
    a.T = T, a.K = K, a.R = R, a.E = E, a.n = int32_t(head.size()), a.entry = entry;
    a.hidden = dh.p, a.anchors = da.p, a.before = db.p, a.head = dw.p, a.bias = of_tokens ? dbias.p : nullptr;
    a.ctl = control.p, a.lists = lists.p, a.out = out.p;
    must(cuda::confidence(a, stream));
    must(cudaStreamSynchronize(stream));
    const Ints kept = lists.get();
    bool good = true;
    for (int t = 0; t < T; t++) {
        if (t % B < first) {
            continue;
        }
        const bool top = t % B == first;
        const int32_t *list = &kept[size_t(ctl.rows[t].keep) * entry];
        for (int i = 0; i < entry; i++) {
            const int from = i - from_lists;
            if (from < 0 || from >= (top ? 1 : K)) {
                good = good && list[i] == -5;
                continue;
            }
            const float *of = top ? &anchors[size_t(t - first) * R] : &before[(size_t(t - 1) * K + from) * R];
            double x = of_tokens ? bias[0] : 0;
            for (int j = 0; j < a.n; j++) {
                x += double(head[size_t(j)]) * (j < E ? hidden[size_t(t) * E + j] : of[j - E]);
            }
            float found;
            memcpy(&found, &list[i], sizeof(found));
            good = good && std::abs(found + std::log1p(std::exp(-x))) <= 1e-4;
        }
    }
    expect(good, "confidence behind " + std::to_string(K) + " of rank " + std::to_string(R));
}

} // namespace

void check_draft_block(bool all) {
    for (const auto &[E, groups, taps] :
         {std::array{64, 4, 2}, std::array{320, 20, 3}, std::array{96, 1, 5}}) {
        check_conv(3, 4, E, groups, taps);
    }
    for (int first : {0, 1}) {
        check_prior(3, 4, first);
        for (const auto &[K, R] :
             {std::array{5, 8}, std::array{16, 256}, std::array{33, 40}, std::array{63, 8}}) {
            if (all || K != 63) {
                check_lattice(4, 4, first, K, R, K != 16, K != 5, false);
                check_lattice(2, 3, first, K, R, true, true, true);
                check_confidence(3, 4, first, K, R, 96, K != 5);
            }
        }
    }
    for (int64_t n : {63, 4097, 50'000}) {
        for (int K : {1, 16, 63}) {
            if (all || n == 4097) {
                check_candidates(n, 9, K);
            }
        }
    }
    if (all) {
        check_candidates(248'320, 16, 16);
        check_lattice(9, 7, 1, 16, 256, true, true, false);
    }
}
