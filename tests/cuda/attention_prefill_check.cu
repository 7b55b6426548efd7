// Checks attention of a prompt's rows against attention_reference.h, and that no cut of the prompt changes a bit.
#include "attention/prefill.h"
#include "attention_steps.h"

#include <set>

using namespace attention_test;

namespace {

constexpr double F16_OFF = 2e-3; // as for steps (attention_steps.h)

// Positions of an image, whose rows see each other.
struct Image {
    int first, n;
};

// Returns up to which position a row at p sees.
int end_of(const std::vector<Image> &images, int p) {
    for (const Image &image : images) {
        if (p >= image.first && p < image.first + image.n) {
            return image.first + image.n;
        }
    }
    return p + 1;
}

// The last `rows` positions of a sequence of n, whole and cut, which no image is.
void check_rows(const KvShape &s, int n, int rows, double most = F16_OFF,
                const std::vector<Image> &images = {},
                const std::vector<Ints> &cuts = {{1, 64}, {130, 65, 3}}) {
    const std::string what = name_of(s) + std::to_string(rows) + " rows of a prompt of " + std::to_string(n);
    const size_t width = size_t(s.width()), heads = size_t(s.H) * s.D, bytes = s.cell_bytes();
    const Floats q = normals(rows * heads), keys = normals(n * width), values = normals(n * width);
    std::vector<uint8_t> k(n * bytes), v(n * bytes);
    for (int i = 0; i < n; i++) {
        write_cell(s, &keys[i * width], &k[i * bytes]);
        write_cell(s, &values[i * width], &v[i * bytes]);
    }
    const Device<float> queries(q);
    const Device<uint8_t> key_cells(k), value_cells(v);
    Device<float> out(rows * heads);
    Floats whole;
    Ints ends(rows);
    for (int t = 0; t < rows; t++) {
        ends[t] = end_of(images, n - rows + t);
    }
    const Device<int> row_ends(ends);
    for (size_t i = 0; i <= cuts.size(); i++) {
        Ints cut = i == 0 ? Ints{} : cuts[i - 1];
        cut.push_back(rows);
        for (const bool apart : {false, true}) {
            out.poison();
            int first = 0;
            for (const int wanted : cut) {
                const int T = std::min(wanted, rows - first);
                if (T == 0) {
                    continue;
                }
                StepCtl ctl{};
                ctl.n_seqs = 1;
                ctl.seqs[0].n_past = n - rows + first;
                ctl.seqs[0].n_rows = T;
                const Device<uint8_t> control(std::vector<uint8_t>(reinterpret_cast<uint8_t *>(&ctl),
                                                                   reinterpret_cast<uint8_t *>(&ctl + 1)));
                PrefillAttentionArgs a{};
                a.n_prompts = 1;
                a.T = T;
                a.H = s.H;
                a.Hkv = s.Hkv;
                a.D = s.D;
                a.n_kv = n - rows + first + T;
                a.first = s.first;
                a.window = s.window;
                a.scale = 1 / std::sqrt(float(s.D));
                a.softcap = s.softcap;
                a.apart = apart;
                a.ctl = reinterpret_cast<const StepCtl *>(control.p);
                a.row_ends = images.empty() ? nullptr : row_ends.p + first;
                a.q = queries.p + first * heads;
                a.k = reinterpret_cast<const uint16_t *>(key_cells.p);
                a.v = reinterpret_cast<const uint16_t *>(value_cells.p);
                a.out = out.p + first * heads;
                Device<float> ranges(apart ? size_t(prefill_range_values(a)) : 1);
                a.ranges = ranges.p;
                must(cuda::prefill_attention(a, stream));
                must(cudaStreamSynchronize(stream));
                first += T;
            }
            expect(whole.empty() || same_bits(whole, out.get()), what + ": a cut changes bits");
            whole = out.get();
        }
    }
    std::set<int> looked_at = {0, rows / 2, rows - 1};
    for (const Image &image : images) {
        const int t = image.first - (n - rows);
        looked_at.insert({t - 1, t, t + image.n / 2, t + image.n - 1, t + image.n});
    }
    for (const int t : looked_at) {
        const int p = n - rows + t;
        std::vector<const uint8_t *> seen_k, seen_v;
        for (int c = std::max(s.first, s.window > 0 ? p - s.window + 1 : 0); c < end_of(images, p); c++) {
            seen_k.push_back(&k[c * bytes]);
            seen_v.push_back(&v[c * bytes]);
        }
        const std::vector<double> expected = attend_row(s, &q[t * heads], nullptr, 0, seen_k, seen_v);
        double diff = 0, norm = 1e-30;
        for (size_t i = 0; i < heads; i++) {
            diff += (whole[t * heads + i] - expected[i]) * (whole[t * heads + i] - expected[i]);
            norm += expected[i] * expected[i];
        }
        const double error = std::sqrt(diff / norm);
        expect(error < most, what + ": row " + std::to_string(t) + " is off by " + std::to_string(error));
    }
}

// The last `rows` positions of a sequence of n.
struct Prompt {
    int n, rows;
};

// Several sequences' rows in one call have the bits that they have alone, whatever lies between their cells.
void check_prompts(const KvShape &s, const std::vector<Prompt> &prompts) {
    constexpr int ROOM = 37; // behind each one's cells
    const size_t width = size_t(s.width()), heads = size_t(s.H) * s.D;
    int T = 0, n_kv = 0;
    StepCtl together = blank_ctl();
    together.n_seqs = int(prompts.size());
    for (size_t i = 0; i < prompts.size(); i++) {
        SeqCtl &seq = together.seqs[i];
        seq.row0 = T;
        seq.n_rows = prompts[i].rows;
        seq.n_past = prompts[i].n - prompts[i].rows;
        seq.cells = n_kv;
        T += prompts[i].rows;
        n_kv += prompts[i].n + ROOM;
    }
    const auto halves = [&](const Floats &x) {
        std::vector<uint16_t> out(x.size());
        for (size_t i = 0; i < x.size(); i++) {
            const __half h = __float2half_rn(x[i]);
            memcpy(&out[i], static_cast<const void *>(&h), 2);
        }
        for (size_t i = 0; i < prompts.size(); i++) { // what is no cell is NaN
            const size_t end = size_t(together.seqs[i].cells + prompts[i].n) * width;
            std::fill_n(out.begin() + long(end), ROOM * width, uint16_t(0x7e00));
        }
        return out;
    };
    const Device<float> q(normals(T * heads));
    const Device<uint16_t> k(halves(normals(n_kv * width))), v(halves(normals(n_kv * width)));
    const auto attend = [&](const StepCtl &ctl, int first, int rows, int64_t room, size_t cell, bool apart) {
        const Device<StepCtl> control(std::vector<StepCtl>{ctl});
        Device<float> out(rows * heads);
        out.poison();
        PrefillAttentionArgs a{};
        a.T = rows;
        a.H = s.H;
        a.Hkv = s.Hkv;
        a.D = s.D;
        a.n_prompts = ctl.n_seqs;
        a.n_kv = room;
        a.first = s.first;
        a.window = s.window;
        a.scale = 1 / std::sqrt(float(s.D));
        a.softcap = s.softcap;
        a.apart = apart;
        a.ctl = control.p;
        a.q = q.p + first * heads;
        a.k = k.p + cell * width;
        a.v = v.p + cell * width;
        a.out = out.p;
        Device<float> ranges(apart ? size_t(prefill_range_values(a)) : 1);
        ranges.poison();
        a.ranges = ranges.p;
        must(cuda::prefill_attention(a, stream));
        must(cudaStreamSynchronize(stream));
        return out.get();
    };
    for (const bool apart : {false, true}) {
        Floats alone;
        for (size_t i = 0; i < prompts.size(); i++) {
            const SeqCtl &seq = together.seqs[i];
            StepCtl ctl = blank_ctl();
            ctl.n_seqs = 1;
            ctl.seqs[0] = seq;
            ctl.seqs[0].row0 = ctl.seqs[0].cells = 0;
            const Floats one = attend(ctl, seq.row0, seq.n_rows, prompts[i].n, size_t(seq.cells), apart);
            alone.insert(alone.end(), one.begin(), one.end());
        }
        expect(same_bits(attend(together, 0, T, n_kv, 0, apart), alone),
               name_of(s) + std::to_string(prompts.size()) + " prompts of one call differ from each alone" +
                   (apart ? ", ranges apart" : ""));
    }
}

// Images as long as a window and longer, within a block of rows and over several, over the end of a range, beside each other, and
// with text around: no cut ahead of or behind one changes a bit.
void check_images() {
    const KvShape small{2, 1, 64, 1, 0, 20, 0, false};
    check_rows(small, 290, 280, F16_OFF, {{20, 50}, {75, 5}, {80, 31}, {130, 140}},
               {{10}, {60}, {10, 50, 5, 5, 31}});
    check_rows({2, 1, 64, 1, 0, 0, 3.0f, false}, 200, 190, F16_OFF, {{64, 64}}, {{54}, {118, 64}});
    check_rows({1, 1, 64, 1, 0, 70, 0, false}, PREFILL_RANGE + 60, 90, F16_OFF,
               {{PREFILL_RANGE - 10, 30}, {PREFILL_RANGE + 22, 10}}, {{20}, {50, 2, 10}});
    check_rows({2, 1, 256, 1, 0, 40, 0, false}, 170, 165, F16_OFF, {{30, 100}}, {{25}, {125}});
    check_rows({1, 1, 512, 1, 0, 30, 0, false}, 90, 85, F16_OFF, {{20, 50}}, {{15}, {65}});
}

} // namespace

void check_attention_prompts() {
    check_images();
    check_rows({2, 1, 64, 1, 0, 20, 3.0f, false}, 140, 135);
    check_rows({1, 1, 64, 1, 1, 0, 0, false}, PREFILL_RANGE + 3, 8);
    check_rows({2, 1, 64, 1, 0, 20, 0, false}, PREFILL_RANGE + 90, 12); // a range has no key
    check_rows({2, 1, 256, 1, 0, 0, 0, false}, PREFILL_RANGE + 70, 4);
    check_prompts({2, 1, 64, 1, 0, 0, 0, false}, {{70, 70}, {1, 1}, {200, 3}, {65, 64}});
    check_prompts({2, 2, 64, 1, 1, 40, 3.0f, false}, {{5, 5}, {130, 65}, {64, 64}});
    check_prompts({1, 1, 64, 1, 0, 0, 0, false},
                  {{20, 20}, {PREFILL_RANGE + 9, 70}, {PREFILL_RANGE, 1}, {90, 10}});
    check_prompts({1, 1, 128, 1, 2, 0, 0, false}, {{33, 33}, {3, 1}});
    check_prompts({1, 1, 256, 1, 0, 0, 0, false}, {{17, 17}, {66, 2}});
    check_rows({2, 1, 512, 1, 0, 40, 0, false}, 100, 70);
    check_rows({1, 1, 512, 1, 0, 0, 0, false}, PREFILL_RANGE + 3, 5);
    check_prompts({2, 1, 512, 1, 0, 0, 0, false}, {{33, 33}, {66, 2}});
}

void check_attention_prefill(bool all) {
    check_attention_prompts();
    for (const int D : {64, 128, 256, 512}) {
        check_rows({6, 2, D, 1, 0, 0, 0, false}, 200, 200);
        check_rows({2, 1, D, 1, 0, 70, 3.0f, false}, 300, 140);
        check_rows({3, 1, D, 1, 2, 0, 0, false}, PREFILL_RANGE + 70, 100);
        if (all) {
            check_rows({24, 4, D, 1, 0, 0, 0, false}, 3 * PREFILL_RANGE + 5, 700);
            check_rows({8, 2, D, 1, 0, PREFILL_RANGE + 100, 0, false}, 2 * PREFILL_RANGE + 900, 300);
        }
    }
}
