// Checks what stores, moves and gathers cells.
#include "attention_steps.h"

using namespace attention_test;

namespace {

// Verifies, accepts random paths, and compares cells after the last moves.
void check_moves(const KvShape &s, int rounds) {
    Kv kv(s, 8);
    std::vector<Context> contexts(2);
    std::vector<Work> works;
    for (Context &c : contexts) {
        const Floats k = normals(size_t(pick(2) * 240 + pick(20)) * s.width());
        kv.append(c, k, normals(k.size()));
        works.push_back({&c, {}, {}});
    }
    for (int round = 0; round < rounds; round++) {
        int T = 0;
        for (Work &w : works) {
            w.parents = random_tree(1 + pick(32), 12, pick(2) == 0);
            T += int(w.parents.size());
        }
        const Inputs in = random_inputs(s, T);
        Ints table;
        kv.write(works, in, T, table);
        int row0 = 0;
        for (Work &w : works) {
            const int n = int(w.parents.size());
            const Inputs mine = rows_of(s, in, row0, n);
            w.pending = path_to(w.parents, pick(n));
            Ints path = w.pending;
            path.insert(path.begin(), -1);
            kv.commit(*w.context, mine.k, mine.v, path);
            row0 += n;
        }
    }
    for (Work &w : works) {
        w.parents.clear();
    }
    const Floats after = normals(size_t(3) * s.width()); // a prefill of the second one pays its moves too
    Ints table;
    kv.write({works[0]}, {}, 1, table);
    table.clear();
    StepCtl host = kv.control({works[1]}, table);
    host.seqs[0].n_rows = 3;
    host.seqs[0].moves = 1;
    kv.ctl.set({host});
    Device<int32_t> pages(table);
    kv.store(pages, after, after, 3, 1);
    kv.commit(contexts[1], after, after, chain(4));
    const std::vector<uint8_t> k = kv.k.get(), v = kv.v.get();
    const size_t bytes = s.cell_bytes() / size_t(s.Hkv); // a head of a cell has so many
    bool good = true;
    for (const Context &c : contexts) {
        for (int i = 0; i < c.n * s.Hkv; i++) {
            const int p = i / s.Hkv, head = i % s.Hkv;
            const size_t at = ((size_t(c.pages[p / PAGE]) * s.Hkv + head) * PAGE + p % PAGE) * bytes;
            good = good && memcmp(&k[at], &c.k[i * bytes], bytes) == 0 &&
                   memcmp(&v[at], &c.v[i * bytes], bytes) == 0;
        }
    }
    expect(good, name_of(s) + "cells after moves");
}

// A page that has gone gives zeros.
void check_gather(const KvShape &s, bool gone) {
    Kv kv(s, 4);
    Context c;
    const Floats rows = normals(size_t(300) * s.width()), values = normals(rows.size());
    kv.append(c, rows, values);
    Ints table;
    StepCtl host = kv.control({{&c, {}, {}}}, table);
    host.seqs[0].n_past = 200;
    host.seqs[0].n_rows = 100;
    table[0] = gone ? -(1 << 20) : c.pages[0];
    kv.ctl.set({host});
    Device<int32_t> pages(table);
    const int n_kv = 512;
    for (int which = 0; which < 2; which++) {
        Device<__half> narrow(size_t(n_kv) * s.width());
        must(cuda::kv_gather({kv.pool(), n_kv, kv.ctl.p, pages.p, which, 1, narrow.p}, stream));
        must(cudaStreamSynchronize(stream));
        const std::vector<__half> h = narrow.get();
        bool good = true;
        for (int p = 0; p < n_kv; p++) {
            const std::vector<double> cell = p < 300 && (!gone || p >= PAGE)
                                                 ? read_cell(s, &(which == 0 ? c.k : c.v)[p * s.cell_bytes()])
                                                 : std::vector<double>(s.width());
            for (int i = 0; i < s.width(); i++) {
                const size_t at = size_t(p) * s.width() + i;
                good = good && __half2float(h[at]) == __half2float(__float2half_rn(float(cell[i])));
            }
        }
        expect(good, name_of(s) + "gathered cells");
    }
}

// Cells below a window stay as they are, in whole tiles.
void check_gather_of_window(const KvShape &s) {
    constexpr int WINDOW = 40, N_KV = 320, SEEN = (200 - WINDOW + 1) / GATHER_CELLS * GATHER_CELLS;
    Kv kv(s, 4);
    Context c;
    const Floats rows = normals(size_t(300) * s.width());
    kv.append(c, rows, rows);
    Ints table;
    StepCtl host = kv.control({{&c, {}, {}}}, table);
    host.seqs[0].n_past = 200;
    host.seqs[0].n_rows = 100;
    kv.ctl.set({host});
    Device<int32_t> pages(table);
    const std::vector<__half> before(size_t(N_KV) * s.width(), __float2half_rn(-7.0f));
    Device<__half> all(before), part(before);
    must(cuda::kv_gather({kv.pool(), N_KV, kv.ctl.p, pages.p, 0, 1, all.p, 0}, stream));
    must(cuda::kv_gather({kv.pool(), N_KV, kv.ctl.p, pages.p, 0, 1, part.p, WINDOW}, stream));
    must(cudaStreamSynchronize(stream));
    std::vector<__half> expected = all.get();
    std::copy_n(before.begin(), size_t(SEEN) * s.width(), expected.begin());
    expect(same_bits(part.get(), expected), name_of(s) + "gathered cells of a window");
}

// Cells of several sequences lie side by side, with room between them.
void check_gather_of_prompts(const KvShape &s) {
    Kv kv(s, 6);
    std::vector<Context> contexts(3);
    std::vector<Work> works;
    StepCtl host;
    const int rooms[] = {0, 40, 350}, n_kv = 400;
    const auto control = [&](const Ints &rows, Ints &table) {
        works.clear();
        for (Context &c : contexts) {
            works.push_back({&c, {}, {}});
        }
        host = kv.control(works, table);
        for (int i = 0, row0 = 0; i < 3; i++) {
            SeqCtl &seq = host.seqs[i];
            seq.row0 = row0;
            seq.n_rows = rows[i];
            seq.cells = rooms[i];
            row0 += rows[i];
        }
        kv.ctl.set({host});
    };
    for (const Ints &rows : {Ints{30, 290, 7}, Ints{2, 1, 9}}) { // they are stored by one call, too
        int T = 0;
        for (int i = 0; i < 3; i++) {
            kv.grow(contexts[i], contexts[i].n + rows[i]);
            T += rows[i];
        }
        const Floats k = normals(size_t(T) * s.width()), v = normals(k.size());
        Ints table;
        control(rows, table);
        kv.store(Device<int32_t>(table), k, v, T, 1);
        for (int i = 0, row0 = 0; i < 3; row0 += rows[i], i++) {
            const auto part = [&](const Floats &x) {
                return Floats(x.begin() + long(row0) * s.width(),
                              x.begin() + long(row0 + rows[i]) * s.width());
            };
            kv.commit(contexts[i], part(k), part(v), chain(rows[i] + 1));
        }
    }
    Ints table;
    control({0, 0, 0}, table);
    Device<int32_t> pages(table);
    Device<__half> out(size_t(n_kv) * s.width());
    must(cuda::kv_gather({kv.pool(), n_kv, kv.ctl.p, pages.p, 0, 1, out.p}, stream));
    must(cudaStreamSynchronize(stream));
    const std::vector<__half> found = out.get();
    std::vector<__half> expected(found.size());
    for (int i = 0; i < 3; i++) {
        for (int p = 0; p < contexts[i].n; p++) {
            const std::vector<double> cell = read_cell(s, &contexts[i].k[p * s.cell_bytes()]);
            std::transform(cell.begin(), cell.end(), expected.begin() + long(rooms[i] + p) * s.width(),
                           [](double x) { return __float2half_rn(float(x)); });
        }
    }
    expect(same_bits(found, expected), name_of(s) + "gathered cells of several prompts");
}

} // namespace

void check_kv_pages(bool all) {
    for (const KvShape &s : SHAPES) {
        check_moves(s, all ? 6 : 1);
        check_gather(s, false);
        check_gather(s, true);
        check_gather_of_window(s);
        check_gather_of_prompts(s);
    }
}
