// Checks what stores, moves and gathers cells, and the mask of a prefill.
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
        Device<float> wide(size_t(n_kv) * s.width());
        Device<__half> narrow(wide.n);
        must(cuda::kv_gather({kv.pool(), n_kv, kv.ctl.p, pages.p, which, 0, wide.p}, stream));
        must(cuda::kv_gather({kv.pool(), n_kv, kv.ctl.p, pages.p, which, 1, narrow.p}, stream));
        must(cudaStreamSynchronize(stream));
        const Floats f = wide.get();
        const std::vector<__half> h = narrow.get();
        bool good = true;
        for (int p = 0; p < n_kv; p++) {
            const std::vector<double> cell = p < 300 && (!gone || p >= PAGE)
                                                 ? read_cell(s, &(which == 0 ? c.k : c.v)[p * s.cell_bytes()])
                                                 : std::vector<double>(s.width());
            for (int i = 0; i < s.width(); i++) {
                const size_t at = size_t(p) * s.width() + i;
                good = good && f[at] == float(cell[i]) &&
                       __half2float(h[at]) == __half2float(__float2half_rn(float(cell[i])));
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
    const Floats before = normals(size_t(N_KV) * s.width());
    Device<float> all(before), part(before);
    must(cuda::kv_gather({kv.pool(), N_KV, kv.ctl.p, pages.p, 0, 0, all.p, 0}, stream));
    must(cuda::kv_gather({kv.pool(), N_KV, kv.ctl.p, pages.p, 0, 0, part.p, WINDOW}, stream));
    must(cudaStreamSynchronize(stream));
    Floats expected = all.get();
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
    Device<float> out(size_t(n_kv) * s.width());
    must(cuda::kv_gather({kv.pool(), n_kv, kv.ctl.p, pages.p, 0, 0, out.p}, stream));
    must(cudaStreamSynchronize(stream));
    const Floats found = out.get();
    Floats expected(found.size());
    for (int i = 0; i < 3; i++) {
        for (int p = 0; p < contexts[i].n; p++) {
            const std::vector<double> cell = read_cell(s, &contexts[i].k[p * s.cell_bytes()]);
            std::copy(cell.begin(), cell.end(), expected.begin() + long(rooms[i] + p) * s.width());
        }
    }
    expect(same_bits(found, expected), name_of(s) + "gathered cells of several prompts");
}

void check_mask(int T, int64_t n_kv, int first, int window) {
    Device<StepCtl> ctl(1);
    StepCtl host = blank_ctl();
    host.n_seqs = 1;
    host.seqs[0].row0 = 0;
    host.seqs[0].n_past = 30;
    ctl.set({host});
    Device<uint16_t> out(size_t(T) * n_kv);
    must(cuda::prefill_mask({T, n_kv, first, window, ctl.p, out.p}, stream));
    must(cudaStreamSynchronize(stream));
    const std::vector<uint16_t> got = out.get();
    bool good = true;
    for (int t = 0; t < T; t++) {
        for (int c = 0; c < n_kv; c++) {
            const bool seen = c >= first && c <= 30 + t && (window == 0 || c > 30 + t - window);
            good = good && got[t * n_kv + c] == (seen ? 0 : 0xfc00);
        }
    }
    expect(good, "prefill mask");
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
    check_mask(17, 256, 0, 0);
    check_mask(5, 301, 1, 7);
}
