// Compares the choices of rows with the rule of sampling.h on the host, applied by sorting whole rows, and
// times them.
#include "harness.h"

#include <cfloat>
#include <memory>

namespace {

struct Setting {
    const char *name;
    float temperature, top_p, min_p;
    int32_t top_k;
};
const Setting SETTINGS[] = {
    {"greedy", 0, 1, 0, 0},
    {"T 1", 1, 1, 0, 0},
    {"T .7 k 20 p .95", 0.7f, 0.95f, 0, 20},
    {"T 1 p .95", 1, 0.95f, 0, 0},
    {"T 1.5 k 300 p .97 m .02", 1.5f, 0.97f, 0.02f, 300},
    {"T .3 m .1", 0.3f, 1, 0.1f, 0},
    {"T 1 k 1", 1, 1, 0, 1},
    {"T 1e30 k 2 p .6", 1e30f, 0.6f, 0, 2}, // one wrong id more or less is as likely as each right one
    {"T 1e30 k 2", 1e30f, 1, 0, 2},
    {"T .5 k 9", 0.5f, 1, 0, 9},
    {"T 5 k 40000 p .5", 5, 0.5f, 0, 40000},
    {"T 30 k 3000", 30, 1, 0, 3000},
    {"T 1e-30 p .5", 1e-30f, 0.5f, 0, 0},
    {"T 1e30 p .5", 1e30f, 0.5f, 0, 0},
    {"T 1e30 k 1700 p .3 m .5", 1e30f, 0.3f, 0.5f, 1700},
    {"T 1e30", 1e30f, 1, 0, 0},
};
constexpr int N_SETTINGS = sizeof(SETTINGS) / sizeof(SETTINGS[0]);

ChoiceCtl ctl_of(const Setting &s, uint64_t seed) {
    ChoiceCtl c{};
    c.seed = seed;
    c.min_mass = uint64_t(std::ceil(double(s.min_p) * 0x1p40));
    c.scale = s.temperature == 0 ? 0 : float(std::min(2.0 / double(s.temperature), double(FLT_MAX)));
    c.top_k = s.top_k;
    c.top_p = uint32_t(std::ceil(double(s.top_p) * TOP_P_ONE));
    return c;
}

int32_t expected(const float *x, int32_t n, const ChoiceCtl &c, uint64_t position) {
    Ints order;
    for (int32_t i = 0; i < n; i++) {
        if (!std::isnan(x[i])) {
            order.push_back(i);
        }
    }
    std::sort(order.begin(), order.end(),
              [&](int a, int b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
    if (order.empty()) {
        return 0;
    }
    if (c.scale == 0) {
        return order[0];
    }
    const float x_max = x[order[0]];
    if (c.top_k > 0 && size_t(c.top_k) < order.size()) {
        order.resize(size_t(c.top_k));
    }
    const auto mass = [&](int i) { return mass_of(z_of(half_gap(x[i], x_max), c.scale)); };
    uint64_t total = 0, before = 0;
    for (int i : order) {
        total += mass(i);
    }
    const uint64_t need = needed_mass(total, c.top_p);
    int32_t best = -1;
    float best_score = -INFINITY;
    for (int i : order) {
        if (c.top_p < TOP_P_ONE && before >= need) {
            break;
        }
        before += mass(i);
        if (mass(i) >= std::max<uint64_t>(c.min_mass, 1)) {
            const uint32_t word = noise_words(c.seed, position, uint32_t(i) / 4).w[i % 4];
            const float score = score_of(half_gap(x[i], x_max), c.scale, word);
            if (score > best_score || (score == best_score && i < best)) {
                best_score = score;
                best = i;
            }
        }
    }
    return best;
}

// Returns the control block of a step's rows, each of a sequence of its own.
StepCtl ctl_for(const std::vector<ChoiceCtl> &rows) {
    StepCtl ctl = blank_ctl();
    ctl.n_seqs = ctl.n_rows = int32_t(rows.size());
    for (size_t t = 0; t < rows.size(); t++) {
        ctl.rows[t] = {int32_t(t), -1, int32_t(977 * t), t % 3 == 1 ? -1 : int32_t(2 * t)};
        ctl.seqs[t].choice = rows[t];
    }
    return ctl;
}

// Checks rows. With spread 0 all logits are equal, in every second row all but three. Some rows have ties, some have values
// that are not finite. Choices are kept where rows say so, and nothing else changes.
void check_rows(int32_t n, int T, float spread, int first) {
    Floats logits = normals(size_t(n) * T, 1.0f);
    std::vector<ChoiceCtl> rows;
    for (int t = 0; t < T; t++) {
        float *x = &logits[size_t(t) * n];
        const int kind = pick(6);
        for (int32_t i = 0; i < n; i++) {
            x[i] *= spread;
            // This gives ties, -0 and +0.
            x[i] = kind == 1 ? std::nearbyint(x[i]) : kind == 2 ? std::nearbyint(x[i] / 4) : x[i];
        }
        for (int i = 0; spread == 0 && t % 2 == 1 && i < 3; i++) {
            x[pick(n)] = 1;
        }
        if (kind == 3) {
            x[pick(n)] = t % 3 == 0 ? NAN : t % 3 == 1 ? INFINITY : -INFINITY;
        }
        if (kind == 4 && t % 2 == 0) {
            std::fill(x, x + n, t % 4 == 0 ? NAN : -INFINITY);
        }
        rows.push_back(ctl_of(SETTINGS[(first + t) % N_SETTINGS], uint64_t(t) * 0x9E3779B97F4A7C15u));
    }
    Device<float> in(logits);
    Device<StepCtl> ctl(std::vector<StepCtl>{ctl_for(rows)});
    Device<ChoiceRow> out{size_t(T)};
    Ints kept(size_t(4) * T, -5);
    Device<int32_t> drafts(kept), given(kept);
    for (int run = 0; run < (watched() ? 1 : 2); run++) { // the second run goes over what the first left
        must(cuda::choose({in.p, n, T, ctl.p, 1, out.p, drafts.p, given.p}, stream));
        must(cudaStreamSynchronize(stream));
        const std::vector<ChoiceRow> got = out.get();
        for (int t = 0; t < T; t++) {
            const float *x = &logits[size_t(t) * n];
            const bool finite = std::all_of(x, x + n, [](float v) { return std::isfinite(v); });
            const bool right = !finite || got[t].token == expected(x, n, rows[t], uint64_t(977 * t) + 1);
            expect(right && got[t].token >= 0 && got[t].token < n && got[t].not_finite == (finite ? 0 : 1),
                   std::string("choose ") + SETTINGS[(first + t) % N_SETTINGS].name + ", n " +
                       std::to_string(n) + " row " + std::to_string(t) + " spread " + std::to_string(spread));
            if (t % 3 != 1) {
                kept[4 * t] = got[t].token, kept[4 * t + 1] = got[t].not_finite;
            }
        }
        expect(drafts.get() == kept && given.get() == kept, "kept choices of n " + std::to_string(n));
    }
}

// Logits of one row of each block go by what the step says of these rows.
void check_rows_of_blocks() {
    const int n = 300, blocks = 4, between = 2, first = 1, T = blocks * (1 + between);
    const Floats logits = normals(size_t(n) * blocks);
    std::vector<ChoiceCtl> rows;
    for (int t = 0; t < T; t++) {
        rows.push_back(ctl_of(SETTINGS[t % 4], uint64_t(t)));
    }
    StepCtl control = ctl_for(rows);
    for (int t = 0; t < T; t++) {
        control.rows[t].keep = t;
    }
    Device<float> in(logits);
    Device<StepCtl> ctl(std::vector<StepCtl>{control});
    Device<ChoiceRow> out{size_t(blocks)};
    Ints kept(size_t(2) * T, -5);
    Device<int32_t> drafts(kept), given(kept);
    must(cuda::choose({in.p, n, blocks, ctl.p, 1, out.p, drafts.p, given.p, first, between}, stream));
    must(cudaStreamSynchronize(stream));
    for (int b = 0; b < blocks; b++) {
        const int t = first + b * (1 + between);
        kept[size_t(2) * t] = expected(&logits[size_t(b) * n], n, rows[size_t(t)], uint64_t(977 * t) + 1);
        kept[size_t(2) * t + 1] = 0;
    }
    expect(drafts.get() == kept && given.get() == kept, "choices of one row of each block");
}

// The tokens of rows that earlier rows have chosen.
void check_tokens() {
    Device<int32_t> tokens(Ints{5, -1, -4, -8, 0}),
        drafts(Ints{200, 1, -9, 0, -9, 0, 7, 0, -9, 0, -9, 0, -9, 0, 300, 0}), out(5);
    must(cuda::row_tokens({tokens.p, drafts.p, 5, 300, out.p}, stream));
    must(cudaStreamSynchronize(stream));
    expect(out.get() == Ints({5, 200, 7, 0, 0}), "tokens of rows"); // row 3's is beyond the vocabulary
}

} // namespace

void check_choose(bool all) {
    check_tokens();
    check_rows_of_blocks();
    if (!all) { // a row's blocks all look into counts and masses, which keeps a sanitizer busy: a setting has a row or two
        for (int32_t n : {1, 62}) {
            check_rows(n, 1, 3.0f, 2);
        }
        check_rows(1001, 5, 3.0f, 0);
        check_rows(watched() ? 201 : 1001, 2, 1e-6f, 2); // one range of z has all ids, which the list takes
        check_rows(4096, 4, 1e-6f, 1); // and here more than that
        for (int i = 0; i < (watched() ? 1 : 4); i++) {
            check_rows(1001, 3, 3.0f, 7); // top-k keeps few
            check_rows(4096, 2, 0, 8); // and here more than the list takes are as large as parts' largest
        }
        return;
    }
    for (int32_t n : {1, 5, 62, 100, 1001, 4096}) {
        for (float spread : {3.0f, 0.0f, 1e-6f}) {
            check_rows(n, 64, spread, pick(N_SETTINGS));
        }
    }
    for (int T = 1; T <= MAX_ROWS; T++) {
        check_rows(1002, T, 3.0f, pick(N_SETTINGS));
    }
    for (float spread : {3.0f, 8.0f, 1.0f, 1e-6f}) {
        check_rows(248320, N_SETTINGS, spread, 0);
    }
}

void time_choose() {
    constexpr int32_t n = 248320;
    Device<float> logits(normals(size_t(n) * MAX_ROWS, 3.0f));
    Device<ChoiceRow> out{size_t(MAX_ROWS)};
    for (const Setting &setting : SETTINGS) {
        printf("choose, %-26s", setting.name);
        for (int T : {1, 4, 16, 64}) {
            std::vector<ChoiceCtl> rows;
            for (int t = 0; t < T; t++) {
                rows.push_back(ctl_of(setting, uint64_t(t)));
            }
            Device<StepCtl> ctl(std::vector<StepCtl>{ctl_for(rows)});
            const double us =
                median_us([&] { must(cuda::choose({logits.p, n, T, ctl.p, 1, out.p}, stream)); }, 15);
            printf(" %2d rows %7.2f us", T, us);
        }
        printf("\n");
    }
}
