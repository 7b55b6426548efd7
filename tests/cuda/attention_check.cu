// Checks paged KV and attention against attention_reference.h, and bit by bit against plain decoding, which
// has one row a step on other pages. Cells that nothing has written, scratch and outputs hold NaN.
#include "attention_inputs.h"
#include "attention_reference.h"
#include "harness.h"
#include "rowmm.h"

#include <map>

namespace {

// A Context is one sequence: what it has committed, raw and as cells.
struct Context {
    Ints pages;
    int n = 0;
    std::vector<uint8_t> k, v; // [n] cells
};

struct Work { // it is one sequence's part of a step
    Context *context;
    Ints parents, pending;
};

struct Kv {
    KvShape s;
    int n_pages;
    Ints free;
    Device<uint8_t> k, v;
    Device<StepCtl> ctl{1};

    Kv(const KvShape &shape, int pages)
        : s(shape), n_pages(pages), k(size_t(pages) * PAGE * shape.cell_bytes()),
          v(size_t(pages) * PAGE * shape.cell_bytes()) {
        for (int i = 0; i < pages; i++) {
            free.push_back(i);
        }
        std::shuffle(free.begin(), free.end(), rng);
    }
    KvPool pool() const { return {k.p, v.p, s.type, s.Hkv, s.D, int64_t(s.cell_bytes())}; }

    void grow(Context &c, int positions) {
        while (int(c.pages.size()) * PAGE < positions) {
            c.pages.push_back(free.back());
            free.pop_back();
        }
    }
    StepCtl control(const std::vector<Work> &works, Ints &table) const {
        StepCtl host = blank_ctl();
        host.n_seqs = int(works.size());
        int row0 = 0;
        for (size_t i = 0; i < works.size(); i++) {
            const Work &w = works[i];
            SeqCtl &seq = host.seqs[i];
            seq.row0 = row0;
            seq.n_rows = int(w.parents.size());
            seq.n_past = w.context->n;
            seq.n_move = int(w.pending.size());
            seq.n_move_head = 0;
            seq.pages = int(table.size());
            std::copy(w.pending.begin(), w.pending.end(), seq.pending);
            table.insert(table.end(), w.context->pages.begin(), w.context->pages.end());
            for (size_t r = 0; r < w.parents.size(); r++) {
                const int parent = w.parents[r];
                RowCtl &row = host.rows[row0 + r];
                row.seq = int(i);
                row.parent = parent < 0 ? -1 : row0 + parent;
                row.position = parent < 0 ? w.context->n : host.rows[row0 + parent].position + 1;
            }
            row0 += int(w.parents.size());
        }
        host.n_rows = row0;
        return host;
    }

    void store(const Device<int32_t> &table, const Floats &dk, const Floats &dv, int T, int append, int head) {
        Device<float> rows_k(dk), rows_v(dv);
        must(cuda::kv_store({pool(), T, append, head, rows_k.p, rows_v.p, ctl.p, table.p}, stream));
        must(cudaStreamSynchronize(stream));
    }
    AttentionArgs args(int T, const Device<float> &q, const Device<float> &gate, const Device<int32_t> &table,
                       int max_pages) const {
        AttentionArgs a{};
        a.pool = pool();
        a.T = T;
        a.H = s.H;
        a.first = s.first;
        a.window = s.window;
        a.scale = 1 / std::sqrt(float(s.D));
        a.softcap = s.softcap;
        a.max_pages = max_pages;
        a.q = q.p;
        a.gate = s.gated ? gate.p + s.D : nullptr;
        a.gate_row = 2 * s.H * s.D;
        a.gate_head = 2 * s.D;
        a.ctl = ctl.p;
        a.pages = table.p;
        return a;
    }

    // Runs a step of width T, and returns {T, H, D}. Rows that belong to no sequence are NaN.
    Floats step(const std::vector<Work> &works, Inputs in, int T) {
        Ints table;
        int most = 1;
        for (const Work &w : works) {
            grow(*w.context, w.context->n + MAX_ROWS);
            most = std::max(most, int(w.context->pages.size()));
        }
        ctl.set({control(works, table)});
        in.q.resize(size_t(T) * s.H * s.D, NAN);
        in.gate.resize(2 * in.q.size(), NAN);
        in.k.resize(size_t(T) * s.width(), NAN);
        in.v.resize(size_t(T) * s.width(), NAN);
        Device<int32_t> pages(table);
        store(pages, in.k, in.v, T, 0, 0);
        Device<float> q(in.q), gate(in.gate), out(in.q.size());
        AttentionArgs a = args(T, q, gate, pages, most + pick(3));
        Device<float> scratch(size_t(attention_scratch(a)));
        a.out = out.p;
        a.scratch = scratch.p;
        const Device<uint8_t> plan{size_t(attention_plan_bytes())};
        if (pick(2) == 0) { // a plan that was made before does the same as the blocks' own
            must(cuda::attention_plan(a, plan.p, stream));
            a.plan = plan.p;
        }
        must(cuda::attention(a, stream));
        must(cudaStreamSynchronize(stream));
        check_packed(a, out);
        return out.get();
    }
    // Attention that packs its result leaves what rowmm_pack makes of the values.
    void check_packed(AttentionArgs a, const Device<float> &values) const {
        const int64_t K = int64_t(s.H) * s.D;
        Device<uint8_t> packed(size_t(rowmm_x_bytes(a.T, K))), expected(packed.n);
        a.out = nullptr;
        a.packed = packed.p;
        must(cuda::attention(a, stream));
        RowmmPackArgs pack{};
        pack.x = values.p;
        pack.x_row = K;
        pack.T = a.T;
        pack.K = K;
        pack.out = expected.p;
        must(cuda::rowmm_pack(pack, stream));
        must(cudaStreamSynchronize(stream));
        expect(packed.get() == expected.get(), "attention of " + std::to_string(s.H) + " heads packs other values");
    }

    // Commits rows as a prefill does.
    void append(Context &c, const Floats &rows_k, const Floats &rows_v) {
        const int n = int(rows_k.size()) / s.width();
        grow(c, c.n + n + MAX_ROWS);
        Ints table;
        StepCtl host = control({{&c, {}, {}}}, table);
        host.seqs[0].n_rows = n;
        ctl.set({host});
        Device<int32_t> pages(table);
        store(pages, rows_k, rows_v, n, 1, 0);
        commit(c, rows_k, rows_v, chain(n + 1));
    }
    // Commits on the host: rows path[1] .. (path[0] is -1).
    void commit(Context &c, const Floats &rows_k, const Floats &rows_v, const Ints &path) const {
        const size_t bytes = s.cell_bytes();
        for (size_t i = 1; i < path.size(); i++, c.n++) {
            c.k.resize(c.k.size() + bytes);
            c.v.resize(c.v.size() + bytes);
            write_cell(s, &rows_k[size_t(path[i]) * s.width()], &c.k[c.k.size() - bytes]);
            write_cell(s, &rows_v[size_t(path[i]) * s.width()], &c.v[c.v.size() - bytes]);
        }
    }
};

std::map<int, double> worst; // it holds the worst error by type

// q and the weights are F16 numbers (11 bits) on the tensor cores, so each score and each term of the sum has
// an independent relative error of 2^-12 on average. Scores are of size 1 to 3. F32 is summed over thousands.
double bound(const KvShape &s) {
    return s.type == 0 ? 1e-5 : 2e-3;
}

void compare_row(const KvShape &s, const Context &c, const Ints &parents, const Inputs &in, int row, const float *got,
                 const std::string &what) {
    const size_t bytes = s.cell_bytes();
    const Ints path = path_to(parents, row);
    const int position = c.n + int(path.size()) - 1;
    std::vector<uint8_t> own_k(path.size() * bytes), own_v(own_k.size());
    std::vector<const uint8_t *> k, v;
    for (int p = std::max(s.first, s.window > 0 ? position - s.window + 1 : 0); p <= position; p++) {
        if (p < c.n) {
            k.push_back(&c.k[p * bytes]);
            v.push_back(&c.v[p * bytes]);
            continue;
        }
        const size_t at = size_t(p - c.n) * bytes, r = size_t(path[p - c.n]) * s.width();
        write_cell(s, &in.k[r], &own_k[at]);
        write_cell(s, &in.v[r], &own_v[at]);
        k.push_back(&own_k[at]);
        v.push_back(&own_v[at]);
    }
    const size_t q = size_t(s.H) * s.D;
    const std::vector<double> expected =
        attend_row(s, &in.q[row * q], s.gated ? &in.gate[2 * row * q + s.D] : nullptr, 2 * s.D, k, v);
    double diff = 0, norm = 1e-30;
    for (size_t i = 0; i < q; i++) {
        diff += (got[i] - expected[i]) * (got[i] - expected[i]);
        norm += expected[i] * expected[i];
    }
    const double error = std::sqrt(diff / norm);
    worst[s.type] = std::fmax(worst[s.type], error);
    expect(error < bound(s), name_of(s) + what + " row " + std::to_string(row) + " off by " + std::to_string(error));
}

// Runs each row again as plain decoding does: in depth-first order, a step a row, in the cell of its depth.
void compare_plain(Kv &plain, const Context &c, Context &copy, const Ints &parents, const Inputs &in,
                   const float *got, const std::vector<bool> &skip, const std::string &what) {
    const KvShape &s = plain.s;
    const size_t q = size_t(s.H) * s.D;
    plain.grow(copy, c.n + 2 * MAX_ROWS);
    for (size_t r = 0; r < parents.size(); r++) {
        Context alone = copy;
        alone.n = c.n + int(path_to(parents, int(r)).size()) - 1;
        const Floats out = plain.step({{&alone, {-1}, {}}}, rows_of(s, in, int(r), 1), 1);
        expect(skip[r] || same_bits(out.data(), got + r * q, q),
               name_of(s) + what + " row " + std::to_string(r) + " is not plain decoding's");
    }
}

// Makes some rows' V and K huge, Inf or NaN, and returns true for the rows that see one.
std::vector<bool> spoil(const KvShape &s, const Ints &parents, Inputs &in, int first) {
    std::vector<bool> sees(parents.size());
    for (size_t r = 0; r < parents.size(); r++) {
        sees[r] = parents[r] >= 0 && sees[parents[r]];
        if (pick(4) == 0) {
            const float bad[] = {6e4f, -INFINITY, NAN};
            const int kind = pick(3);
            for (Floats *x : {&in.v, &in.k}) {
                for (int i = 0; i < 5; i++) {
                    (*x)[(first + r) * s.width() + pick(s.width())] = bad[kind];
                }
            }
            sees[r] = sees[r] || kind > 0;
        }
    }
    return sees;
}

// Makes a committed V near the window's edge NaN or Inf, and adds the rows that do still see it.
void spoil_window(const KvShape &s, const Ints &parents, Floats &v, std::vector<bool> &sees) {
    const int n = int(v.size()) / s.width(), at = n - s.window + pick(6);
    if (s.window == 0 || at < s.first || at >= n) {
        return;
    }
    v[size_t(at) * s.width() + pick(s.width())] = pick(2) == 0 ? NAN : INFINITY;
    for (size_t r = 0; r < parents.size(); r++) {
        sees[r] = sees[r] || at > n + int(path_to(parents, int(r)).size()) - 1 - s.window;
    }
}

struct Case {
    Ints contexts;
    std::vector<Ints> parents; // each sequence's rows have one list
    bool spoiled;
    int compared; // as many rows of a sequence are compared with the reference too
};

void check_case(const KvShape &s, const Case &c, const std::string &what) {
    int T = 0, pages = 0;
    for (size_t i = 0; i < c.contexts.size(); i++) {
        T += int(c.parents[i].size());
        pages += (c.contexts[i] + MAX_ROWS) / PAGE + 2;
    }
    Kv kv(s, pages + 3), plain(s, pages + 1);
    std::vector<Context> contexts(c.contexts.size()), copies(c.contexts.size());
    std::vector<Work> works;
    Inputs in = random_inputs(s, T);
    std::vector<std::vector<bool>> sees;
    int row0 = 0;
    for (size_t i = 0; i < contexts.size(); i++) {
        const Floats k = normals(size_t(c.contexts[i]) * s.width());
        Floats v = normals(k.size());
        sees.push_back(std::vector<bool>(c.parents[i].size()));
        if (c.spoiled && s.type < 2) {
            sees.back() = spoil(s, c.parents[i], in, row0);
            spoil_window(s, c.parents[i], v, sees.back());
        }
        kv.append(contexts[i], k, v);
        plain.append(copies[i], k, v);
        works.push_back({&contexts[i], c.parents[i], {}});
        row0 += int(c.parents[i].size());
    }
    const int wide = std::min(MAX_ROWS, T + pick(4));
    const Floats got = kv.step(works, in, wide), again = kv.step(works, in, wide);
    expect(same_bits(got, again), name_of(s) + what + " differs from run to run");
    const size_t q = size_t(s.H) * s.D;
    row0 = 0;
    for (size_t i = 0; i < contexts.size(); i++) {
        const int n = int(c.parents[i].size());
        const Inputs mine = rows_of(s, in, row0, n);
        for (int r = std::max(0, n - c.compared); r < n; r++) {
            if (!c.spoiled) {
                compare_row(s, contexts[i], c.parents[i], mine, r, &got[(row0 + r) * q], what);
            }
        }
        compare_plain(plain, contexts[i], copies[i], c.parents[i], mine, &got[row0 * q], sees[i], what);
        row0 += n;
    }
    for (size_t i = row0 * q; i < got.size(); i++) {
        if (got[i] != 0) {
            expect(false, name_of(s) + what + " a row of no sequence is not zero");
            break;
        }
    }
}

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
        kv.step(works, in, T);
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
    kv.step({works[0]}, {}, 1);
    Ints table;
    StepCtl host = kv.control({works[1]}, table);
    host.seqs[0].n_rows = 3;
    std::swap(host.seqs[0].n_move, host.seqs[0].n_move_head);
    kv.ctl.set({host});
    Device<int32_t> pages(table);
    kv.store(pages, after, after, 3, 1, 1);
    kv.commit(contexts[1], after, after, chain(4));
    const std::vector<uint8_t> k = kv.k.get(), v = kv.v.get();
    const size_t bytes = s.cell_bytes();
    bool good = true;
    for (const Context &c : contexts) {
        for (int p = 0; p < c.n; p++) {
            const size_t cell = (size_t(c.pages[p / PAGE]) * PAGE + p % PAGE) * bytes;
            good = good && memcmp(&k[cell], &c.k[p * bytes], bytes) == 0 && memcmp(&v[cell], &c.v[p * bytes], bytes) == 0;
        }
    }
    expect(good, name_of(s) + "cells after moves");
}

void check_gather(const KvShape &s) {
    Kv kv(s, 4);
    Context c;
    const Floats rows = normals(size_t(300) * s.width()), values = normals(rows.size());
    kv.append(c, rows, values);
    Ints table;
    StepCtl host = kv.control({{&c, {}, {}}}, table);
    host.seqs[0].n_past = 200;
    host.seqs[0].n_rows = 100;
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
            const std::vector<double> cell =
                p < 300 ? read_cell(s, &(which == 0 ? c.k : c.v)[p * s.cell_bytes()]) : std::vector<double>(s.width());
            for (int i = 0; i < s.width(); i++) {
                const size_t at = size_t(p) * s.width() + i;
                good = good && f[at] == float(cell[i]) &&
                       __half2float(h[at]) == __half2float(__float2half_rn(float(cell[i])));
            }
        }
        expect(good, name_of(s) + "gathered cells");
    }
}

void check_mask(int T, int64_t n_kv, int first, int window) {
    Device<StepCtl> ctl(1);
    StepCtl host = blank_ctl();
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

Ints any_tree(int T) {
    return T == 0 ? Ints() : pick(3) == 0 ? chain(T) : random_tree(T, 1 + pick(12), pick(2) == 0);
}

} // namespace

// Any number of query heads over a KV head, among them more than a unit takes.
void check_attention_f32() {
    for (const KvShape &s : std::vector<KvShape>{{4, 2, 64, 0}, {34, 2, 64, 0}, {17, 1, 64, 0, 1, 70, 3.0f}}) {
        check_case(s, {{255}, {any_tree(7)}, false, 2}, "context 255");
        check_case(s, {{300, 30}, {any_tree(5), chain(3)}, true, 0}, "company");
        check_case(s, {{2500}, {chain(1)}, false, 1}, "many chunks");
    }
}

// Of many sequences a block has many units, which its warpgroups take by turns. A row alone has other blocks for each chunk.
void check_turns(bool all) {
    for (const KvShape &s : std::vector<KvShape>{{24, 4, 256, 1}, {8, 4, 64, 8}, {12, 4, 128, 1, 0, 3000}, {8, 4, 64, 0}}) {
        for (int rows : {1, 3, 4}) {
            Case c{{}, {}, false, 1};
            for (int i = 0; i < 8 && (all || s.D < 256 || rows != 3); i++) {
                c.contexts.push_back(3000 + pick(1500));
                c.parents.push_back(chain(rows));
            }
            if (!c.contexts.empty()) {
                check_case(s, c, "many units of " + std::to_string(rows) + " rows");
            }
        }
    }
}

void check_attention(bool all) {
    check_attention_f32();
    check_turns(all);
    const std::vector<KvShape> shapes = {{24, 4, 256, 1}, {6, 1, 256, 8}, {6, 1, 256, 2}, {4, 1, 256, 0},
        {8, 2, 128, 1},  {8, 1, 128, 8},           {3, 1, 128, 2},         {2, 2, 128, 0},
        {4, 4, 64, 1},   {8, 2, 64, 8},            {5, 1, 64, 2, 1},       {7, 1, 64, 0, 1},
        {6, 1, 128, 1, 0, 100, 0, false},          {16, 1, 128, 1, 1, 300, 5.0f},
        {4, 1, 64, 0, 1, 70, 3.0f},                {12, 4, 128, 1, 0, 0, 30.0f, false},
        {24, 1, 128, 1}, {34, 2, 64, 0},           {48, 2, 256, 8},        {17, 1, 64, 2, 0, 90}}; // one KV head serves many
    for (const KvShape &s : shapes) {
        const int turn = int(&s - shapes.data()); // a sanitizer gets one context of a shape
        for (int n : all ? Ints{0, 1, 63, 127, 128, 129, 255, 256, 257} : Ints{turn % 3 * 128}) {
            const int T = 1 + pick(all ? 64 : 8);
            for (int spoiled = all ? 0 : turn % 2; spoiled < (all ? 2 : turn % 2 + 1); spoiled++) {
                const std::string what = (spoiled ? "spoiled context " : "context ") + std::to_string(n);
                check_case(s, {{n}, {any_tree(T)}, spoiled != 0, spoiled ? 0 : 3}, what);
            }
        }
        for (int round = 0; round < (all ? 6 : 1); round++) { // other sequences keep it company
            Case c{{}, {}, round % 2 == 1, 2};
            int left = MAX_ROWS;
            for (int i = 0; i < 1 + pick(all ? 9 : 3); i++) {
                const int T = pick(3) == 0 ? pick(2) : std::min(left, pick(all ? 24 : 4));
                c.contexts.push_back(pick(all ? 1500 : 300));
                c.parents.push_back(any_tree(std::min(left, T)));
                left -= int(c.parents.back().size());
            }
            check_case(s, c, "company " + std::to_string(round));
        }
        check_moves(s, all ? 6 : 1);
        check_gather(s);
    }
    if (all) {
        for (int T = 1; T <= MAX_ROWS; T++) { // it tries all widths of a chain and of a tree
            check_case({6, 1, 256, 1}, {{pick(600)}, {T % 2 == 0 ? chain(T) : any_tree(T)}, false, 1},
                       "width " + std::to_string(T));
        }
        for (int n : {4095, 4096, 4097, 16384 - 3, 20000, 40000, 65536 - 2, 70000}) {
            const KvShape s{n > 30000 ? 6 : 12, n > 30000 ? 1 : 2, 256, n % 3 == 1 ? 8 : 1};
            check_case(s, {{n, 300}, {any_tree(9), chain(3)}, false, 1}, "context " + std::to_string(n));
        }
        check_case({4, 1, 128, 0}, {{5000}, {any_tree(20)}, false, 2}, "context 5000");
    }
    check_mask(17, 256, 0, 0);
    check_mask(5, 301, 1, 7);
    for (const auto &[type, error] : worst) {
        printf("attention, type %d: relative error at most %.2e\n", type, error);
    }
}
