// Checks attention of blocks, whose rows all see each other and the context before them, against attention_reference.h.
#include "attention_steps.h"

using namespace attention_test;

namespace {

void check_block(const KvShape &s, const Ints &contexts, int rows) {
    const int T = rows * int(contexts.size());
    Kv kv(s, 12);
    std::vector<Context> all(contexts.size());
    std::vector<Work> works;
    for (size_t i = 0; i < all.size(); i++) {
        const Floats k = normals(size_t(contexts[i]) * s.width());
        kv.append(all[i], k, normals(k.size()));
        works.push_back({&all[i], chain(rows), {}});
    }
    const Inputs in = random_inputs(s, T);
    Ints table;
    kv.ctl.set({kv.control(works, table)});
    const Device<int32_t> pages(table);
    kv.store(pages, in.k, in.v, T, 0);
    const size_t q = size_t(s.H) * s.D;
    const Device<float> queries(in.q), no_gate(0), scratch(size_t(block_attention_scratch(T, s.H, s.D)));
    Device<float> out(T * q);
    AttentionArgs a = kv.args(T, queries, no_gate, pages, int(table.size()));
    a.block = rows;
    a.out = out.p;
    a.scratch = scratch.p;
    Floats first;
    for (int run = 0; run < (watched() ? 1 : 2); run++) {
        out.poison();
        must(cuda::block_attention(a, stream));
        must(cudaStreamSynchronize(stream));
        expect(run == 0 || same_bits(first, out.get()), name_of(s) + "a block differs from run to run");
        first = out.get();
    }
    for (int t = 0; t < T; t++) {
        const Context &c = all[t / rows];
        const size_t bytes = s.cell_bytes();
        std::vector<uint8_t> own_k(rows * bytes), own_v(own_k.size());
        std::vector<const uint8_t *> k, v;
        const int end = c.n + rows, position = c.n + t % rows;
        for (int p = std::max(s.first, s.window > 0 ? position - s.window + 1 : 0); p < end; p++) {
            const size_t at = size_t(p - c.n) * bytes, row = size_t(t / rows * rows + p - c.n) * s.width();
            if (p >= c.n) {
                write_cell(s, &in.k[row], &own_k[at]);
                write_cell(s, &in.v[row], &own_v[at]);
            }
            k.push_back(p < c.n ? &c.k[p * bytes] : &own_k[at]);
            v.push_back(p < c.n ? &c.v[p * bytes] : &own_v[at]);
        }
        const std::vector<double> expected = attend_row(s, &in.q[t * q], nullptr, 0, k, v);
        double diff = 0, norm = 1e-30;
        for (size_t i = 0; i < q; i++) {
            diff += (first[t * q + i] - expected[i]) * (first[t * q + i] - expected[i]);
            norm += expected[i] * expected[i];
        }
        const double error = std::sqrt(diff / norm);
        expect(error < 1e-5,
               name_of(s) + "row " + std::to_string(t) + " of a block is off by " + std::to_string(error));
    }
}

} // namespace

// In some a part of the keys has more than one tile, and there are more pairs than a block of threads takes at once.
void check_attention_block(bool all) {
    for (const int D : {64, 128, 256}) {
        for (const int type : {0, 1, 2, 8}) {
            check_block({6, 2, D, type, 0, 0, 0, false}, {all ? 1100 : 70, 0}, 3);
            if (all) {
                check_block({8, 1, D, type, 1, 40, 5.0f, false}, {300}, 32);
            }
        }
    }
    check_block({8, 1, 256, 1, 1, 40, 5.0f, false}, {70}, 5);
    check_block({1, 1, 64, 8, 0, 0, 0, false}, {1100}, 2);
    for (const int type : {0, 1, 2, 8}) {
        check_block({6, 2, 64, type, 0, 0, 0, false, true}, {70, 0}, 3);
    }
    check_block({8, 1, 128, 1, 1, 40, 5.0f, false, true}, {all ? 1100 : 70}, 5);
    check_block({4, 4, 256, 0, 0, 9, 0, false, true}, {300, 1}, 4);
}
