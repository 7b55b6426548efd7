// Checks attention of a prompt's rows against attention_reference.h, and that no cut of the prompt changes a bit.
#include "attention/prefill.h"
#include "attention_steps.h"

using namespace attention_test;

namespace {

// The last `rows` positions of a sequence of n.
void check_rows(const KvShape &s, int n, int rows, double most) {
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
    for (const Ints &cut : {Ints{rows}, Ints{1, 64, rows}, Ints{130, 65, 3, rows}}) {
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
    for (int t : {0, rows / 2, rows - 1}) {
        const int p = n - rows + t;
        std::vector<const uint8_t *> seen_k, seen_v;
        for (int c = std::max(s.first, s.window > 0 ? p - s.window + 1 : 0); c <= p; c++) {
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

} // namespace

void check_attention_prefill(bool all) {
    constexpr double F16_OFF = 2e-3; // as for steps (attention_steps.h)
    for (const int D : {64, 128, 256}) {
        check_rows({6, 2, D, 1, 0, 0, 0, false}, 200, 200, F16_OFF);
        check_rows({2, 1, D, 1, 0, 70, 3.0f, false}, 300, 140, F16_OFF);
        check_rows({3, 1, D, 1, 2, 0, 0, false}, PREFILL_RANGE + 70, 100, F16_OFF);
        if (all) {
            check_rows({24, 4, D, 1, 0, 0, 0, false}, 3 * PREFILL_RANGE + 5, 700, F16_OFF);
            check_rows({8, 2, D, 1, 0, PREFILL_RANGE + 100, 0, false}, 2 * PREFILL_RANGE + 900, 300, F16_OFF);
        }
    }
}
