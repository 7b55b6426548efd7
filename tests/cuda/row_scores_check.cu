// Checks what each cell has of the attention of a step's rows, against a softmax in F64 over the same cells.
#include "attention_steps.h"

using namespace attention_test;

namespace {

void check_step(const KvShape &s, int n_past, const Ints &parents, int n_pages) {
    Kv kv(s, n_pages + 2);
    Context c;
    const Floats rows = normals(size_t(n_past) * s.width());
    kv.append(c, rows, normals(rows.size()));
    std::vector<Work> works = {{&c, parents, {}}};
    const int n = int(parents.size()), T = std::min(n + pick(3), MAX_ROWS);
    Inputs in = random_inputs(s, n);
    Ints table;
    kv.write(works, in, T, table);
    in.q.resize(size_t(T) * s.H * s.D, NAN);
    Device<float> q(in.q), scores(Floats(size_t(s.H) * size_t(n_pages) * PAGE, 7.0f));
    Device<int32_t> pages(table);
    RowScoresArgs a{};
    a.pool = kv.pool();
    a.T = T;
    a.H = s.H;
    a.on_gpu = 1;
    a.scale = 1 / std::sqrt(float(s.D));
    a.softcap = s.softcap;
    a.n = int64_t(n_pages) * PAGE;
    a.q = q.p;
    a.ctl = kv.ctl.p;
    a.pages = pages.p;
    a.scores = scores.p;
    Device<float> partials(Floats(size_t(row_scores_partials(a)), NAN));
    a.partials = partials.p;
    must(cuda::row_scores(a, stream));
    must(cudaStreamSynchronize(stream));
    const Floats got = scores.get();
    const std::vector<uint8_t> cells = kv.k.get();
    const int end = n_past + n;
    double worst = 0;
    std::vector<std::vector<double>> keys;
    for (int p = 0; p < end; p++) { // of each head
        for (int head = 0; head < s.Hkv; head++) {
            KvShape one = s;
            one.Hkv = 1;
            const size_t row = (size_t(c.pages[size_t(p / PAGE)]) * s.Hkv + head) * PAGE + p % PAGE;
            keys.push_back(read_cell(one, &cells[row * (s.cell_bytes() / size_t(s.Hkv))]));
        }
    }
    for (int h = 0; h < s.H; h++) {
        std::vector<double> expected(size_t(n_pages) * PAGE, 0.0);
        for (int r = 0; r < n; r++) {
            std::vector<bool> seen(size_t(n), false);
            for (int row = r; row >= 0; row = parents[size_t(row)]) {
                seen[size_t(row)] = true;
            }
            std::vector<double> x(size_t(end), -INFINITY);
            double most = -INFINITY, sum = 0;
            for (int p = 0; p < end; p++) {
                if (p < n_past || seen[size_t(p - n_past)]) {
                    const std::vector<double> &key = keys[size_t(p) * s.Hkv + h / (s.H / s.Hkv)];
                    double dot = 0;
                    for (int d = 0; d < s.D; d++) {
                        dot += key[size_t(d)] * in.q[(size_t(r) * s.H + h) * s.D + d];
                    }
                    dot *= a.scale;
                    x[size_t(p)] = s.softcap > 0 ? s.softcap * std::tanh(dot / s.softcap) : dot;
                    most = std::max(most, x[size_t(p)]);
                }
            }
            for (double value : x) {
                sum += std::exp(value - most);
            }
            for (int p = 0; p < end; p++) {
                expected[size_t(p)] += std::exp(x[size_t(p)] - most) / sum / n;
            }
        }
        for (int p = 0; p < n_pages * PAGE; p++) {
            const double e = p < end ? expected[size_t(p)] : 7.0;
            const double off = std::abs(got[size_t(h) * n_pages * PAGE + p] - e);
            worst = off <= worst ? worst : off; // NaN stays
        }
    }
    expect(worst < 1e-5, name_of(s) + "scores of " + std::to_string(n) + " rows");
}

} // namespace

void check_row_scores(bool all) {
    for (KvShape s : SHAPES) {
        s.first = s.window = 0; // layers with a window keep no scores
        check_step(s, 300, chain(3), 3);
        if (all || s.D == 64) {
            check_step(s, 1, chain(1), 1);
            check_step(s, 255, chain(20), 4);
            check_step(s, 256, random_tree(37, 12, true), 3);
            check_step(s, 700, chain(64), 4);
        }
    }
}
