// Has steps of attention over paged KV, and how they are checked: against attention_reference.h, and bit by bit against plain
// decoding, which has one row a step on other pages. Cells that nothing has written, scratch and outputs hold NaN.
#pragma once

#include "attention_inputs.h"
#include "attention_reference.h"
#include "harness.h"
#include "matmul/quantised.h"

#include <map>

namespace attention_test {

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
    Device<float> sinks; // [H], or nothing
    Device<StepCtl> ctl{1};

    Kv(const KvShape &shape, int pages)
        : s(shape), n_pages(pages), k(size_t(pages) * PAGE * shape.cell_bytes()),
          v(size_t(pages) * PAGE * shape.cell_bytes()), sinks(sinks_of(shape)) {
        for (int i = 0; i < pages; i++) {
            free.push_back(i);
        }
        std::shuffle(free.begin(), free.end(), rng);
    }
    static Floats sinks_of(const KvShape &s) {
        Floats found;
        for (int h = 0; s.sinks && h < s.H; h++) {
            found.push_back(s.sink(h));
        }
        return found;
    }
    KvPool pool() const { return {k.p, v.p, s.type, s.Hkv, s.D}; }

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
            seq.n_replay = int(w.pending.size());
            seq.moves = 1;
            seq.pages = int(table.size());
            seq.cells = 0;
            std::copy(w.pending.begin(), w.pending.end(), seq.pending);
            for (int page = 0; page < int(w.context->pages.size()); page++) {
                // A page behind the window has gone: where it was there is nothing to be read.
                const bool gone =
                    s.window > 0 && (page + 1) * PAGE <= w.context->n - s.window + 1 - int(w.pending.size());
                table.push_back(gone ? -(1 << 20) : w.context->pages[size_t(page)]);
            }
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

    // Moves pending rows, then stores new ones.
    void store(const Device<int32_t> &table, const Floats &dk, const Floats &dv, int T, int append) {
        Device<float> rows_k(dk), rows_v(dv);
        must(cuda::kv_move({{pool()}, 1, ctl.p, table.p}, stream));
        must(cuda::kv_store({pool(), T, append, rows_k.p, rows_v.p, ctl.p, table.p}, stream));
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
        a.sinks = s.sinks ? sinks.p : nullptr;
        return a;
    }

    // Stores the cells of a step of width T. Rows that belong to no sequence are NaN.
    void write(const std::vector<Work> &works, const Inputs &in, int T, Ints &table) {
        for (const Work &w : works) {
            grow(*w.context, w.context->n + MAX_ROWS);
        }
        ctl.set({control(works, table)});
        Floats k = in.k, v = in.v;
        k.resize(size_t(T) * s.width(), NAN);
        v.resize(k.size(), NAN);
        store(Device<int32_t>(table), k, v, T, 0);
    }
    // Runs a step of width T, and returns {T, H, D}. With `layers` others follow it on the same scratch.
    Floats step(const std::vector<Work> &works, const Inputs &in, int T, bool layers = false) {
        Ints table;
        write(works, in, T, table);
        return attend(table, in, T, layers, s.window, 0);
    }
    // Attention of the step of `ctl`, whose cells are written.
    Floats attend(const Ints &table, Inputs in, int T, bool layers, int window, int committed) const {
        in.q.resize(size_t(T) * s.H * s.D, NAN);
        in.gate.resize(2 * in.q.size(), NAN);
        Device<int32_t> pages(table);
        Device<float> q(in.q), gate(in.gate), out(in.q.size());
        AttentionArgs a = args(T, q, gate, pages, int(table.size()) + pick(3)); // no sequence has more
        a.window = window;
        a.committed = committed;
        Device<float> scratch(size_t(attention_scratch(a)));
        a.out = out.p;
        a.scratch = scratch.p;
        const Device<uint8_t> plan{size_t(attention_plan_bytes())};
        if (pick(watched() ? 6 : 2) !=
            0) { // a plan that was made before does the same as the blocks' own, and sooner
            must(cuda::attention_plan(a, plan.p, stream));
            a.plan = plan.p;
        }
        must(cuda::attention(a, stream));
        must(cudaStreamSynchronize(stream));
        if (!watched() || pick(4) == 0) {
            check_packed(a, out);
        }
        if (layers) {
            check_layers(a, out.get());
        }
        return out.get();
    }
    // Runs layers one behind the other on the scratch of the one before, whose lines it has given up: each gives what it gives
    // on scratch of its own. `values` are what the queries give that `a` has.
    void check_layers(AttentionArgs a, const Floats &values) const {
        Device<float> other(normals(values.size())), own(size_t(attention_scratch(a)));
        const Device<float> outs[] = {Device<float>(values.size()), Device<float>(values.size()),
                                      Device<float>(values.size()), Device<float>(values.size())};
        const float *const queries[] = {other.p, a.q, other.p, a.q};
        float *const shared = a.scratch;
        for (int i = 0; i < 4; i++) {
            a.layer = 2 + i; // two may have taken the plan before
            a.q = queries[i];
            a.out = outs[i].p;
            a.scratch = i == 0 ? own.p : shared;
            must(cuda::attention(a, stream));
        }
        must(cudaStreamSynchronize(stream));
        for (int i = 1; i < 4; i++) {
            expect(same_bits(outs[i].get(), i == 2 ? outs[0].get() : values),
                   name_of(s) + "a layer differs on the scratch of the one before");
        }
    }
    // Attention that packs its result leaves what rowmm_pack makes of the values.
    void check_packed(AttentionArgs a, const Device<float> &values) const {
        const int64_t K = int64_t(s.H) * s.D;
        Device<uint8_t> packed(size_t(rowmm_x_bytes(a.T, K))), expected(packed.n);
        a.out = nullptr;
        a.packed = packed.p;
        a.layer = 1;
        must(cuda::attention(a, stream));
        RowmmPackArgs pack{};
        pack.x = values.p;
        pack.x_row = K;
        pack.T = a.T;
        pack.K = K;
        pack.out = expected.p;
        must(cuda::rowmm_pack(pack, stream));
        must(cudaStreamSynchronize(stream));
        expect(packed.get() == expected.get(),
               "attention of " + std::to_string(s.H) + " heads packs other values");
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
        store(pages, rows_k, rows_v, n, 1);
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

inline std::map<int, double> worst; // it holds the worst error by type

// q and the weights are F16 numbers (11 bits) on the tensor cores, so each score and each term of the sum has
// an independent relative error of 2^-12 on average. Scores are of size 1 to 3. F32 is summed over thousands.
inline double bound(const KvShape &s) {
    return s.type == 0 ? 1e-5 : 2e-3;
}

inline void compare_outputs(const KvShape &s, const std::vector<double> &expected, const float *got,
                            const std::string &what) {
    double diff = 0, norm = 1e-30;
    for (size_t i = 0; i < expected.size(); i++) {
        diff += (got[i] - expected[i]) * (got[i] - expected[i]);
        norm += expected[i] * expected[i];
    }
    const double error = std::sqrt(diff / norm);
    worst[s.type] = std::fmax(worst[s.type], error);
    expect(error < bound(s), what + " off by " + std::to_string(error));
}

inline void compare_row(const KvShape &s, const Context &c, const Ints &parents, const Inputs &in, int row,
                        const float *got, const std::string &what) {
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
    compare_outputs(
        s, attend_row(s, &in.q[row * q], s.gated ? &in.gate[2 * row * q + s.D] : nullptr, 2 * s.D, k, v), got,
        name_of(s) + what + " row " + std::to_string(row));
}

// Runs the first rows again as plain decoding does: in depth-first order, a step a row, in the cell of its depth.
inline void compare_plain(Kv &plain, const Context &c, Context &copy, const Ints &parents, const Inputs &in,
                          const float *got, const std::vector<bool> &skip, const std::string &what,
                          int decoded) {
    const KvShape &s = plain.s;
    const size_t q = size_t(s.H) * s.D;
    plain.grow(copy, c.n + 2 * MAX_ROWS);
    for (size_t r = 0; r < std::min(parents.size(), size_t(decoded)); r++) {
        Context alone = copy;
        alone.n = c.n + int(path_to(parents, int(r)).size()) - 1;
        const Floats out = plain.step({{&alone, {-1}, {}}}, rows_of(s, in, int(r), 1), 1);
        expect(skip[r] || same_bits(out.data(), got + r * q, q),
               name_of(s) + what + " row " + std::to_string(r) + " is not plain decoding's");
    }
}

// Makes some rows' V and K huge, Inf or NaN, and returns true for the rows that see one.
inline std::vector<bool> spoil(const KvShape &s, const Ints &parents, Inputs &in, int first) {
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
inline void spoil_window(const KvShape &s, const Ints &parents, Floats &v, std::vector<bool> &sees) {
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
    int decoded = MAX_ROWS; // as many of its first rows are compared with plain decoding
};

inline void check_case(const KvShape &s, const Case &c, const std::string &what) {
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
    const Floats got = kv.step(works, in, wide);
    expect(watched() || same_bits(got, kv.step(works, in, wide, true)),
           name_of(s) + what + " differs from run to run");
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
        compare_plain(plain, contexts[i], copies[i], c.parents[i], mine, &got[row0 * q], sees[i], what,
                      c.decoded);
        row0 += n;
    }
    for (size_t i = row0 * q; i < got.size(); i++) {
        if (got[i] != 0) {
            expect(false, name_of(s) + what + " a row of no sequence is not zero");
            break;
        }
    }
}

inline Ints any_tree(int T) {
    return T == 0 ? Ints() : pick(3) == 0 ? chain(T) : random_tree(T, 1 + pick(12), pick(2) == 0);
}

// Checks rows that see committed positions alone, `rows` of each sequence, whatever their places in the step are. Nothing is in
// the step's own cells.
inline void check_committed(const KvShape &s, const Ints &past, const Ints &rows, const std::string &what) {
    int T = 0, pages = 4;
    for (size_t i = 0; i < past.size(); i++) {
        T += rows[i];
        pages += (past[i] + MAX_ROWS) / PAGE + 2;
    }
    Kv kv(s, pages);
    std::vector<Context> contexts(past.size());
    std::vector<Work> works;
    for (size_t i = 0; i < past.size(); i++) {
        const size_t n = size_t(past[i]) * s.width();
        kv.append(contexts[i], normals(n), normals(n));
        works.push_back({&contexts[i], any_tree(rows[i]), {}});
    }
    const Inputs in = random_inputs(s, T);
    const int wide = std::min(MAX_ROWS, T + pick(4));
    Ints table;
    kv.ctl.set({kv.control(works, table)});
    const Floats got = kv.attend(table, in, wide, false, s.window, 1);
    const size_t q = size_t(s.H) * s.D, bytes = s.cell_bytes();
    int row = 0;
    for (size_t i = 0; i < past.size(); i++) {
        const Context &c = contexts[i];
        std::vector<const uint8_t *> k, v;
        for (int p = std::max(s.first, s.window > 0 ? c.n - s.window + 1 : 0); p < c.n; p++) {
            k.push_back(&c.k[p * bytes]);
            v.push_back(&c.v[p * bytes]);
        }
        for (int r = 0; r < rows[i]; r++, row++) {
            const std::string name = name_of(s) + what + ": committed positions, row " + std::to_string(row);
            if (k.empty()) {
                expect(std::all_of(&got[row * q], &got[row * q] + q, [](float x) { return x == 0; }),
                       name + " sees some");
                continue;
            }
            compare_outputs(
                s,
                attend_row(s, &in.q[row * q], s.gated ? &in.gate[2 * row * q + s.D] : nullptr, 2 * s.D, k, v),
                &got[row * q], name);
            // It is attention of a row whose K and V are the last committed ones.
            Context shorter = c;
            shorter.n--;
            Ints own;
            kv.ctl.set({kv.control({{&shorter, {-1}, {}}}, own)});
            const Floats alone =
                kv.attend(own, rows_of(s, in, row, 1), 1, false, s.window > 0 ? s.window - 1 : 0, 0);
            expect(same_bits(alone.data(), &got[row * q], q), name + " is not that of the last of them");
        }
    }
    expect(std::all_of(got.begin() + row * q, got.end(), [](float x) { return x == 0; }),
           name_of(s) + what + ": a row of no sequence is not zero");
}

// Shapes of all types and sizes of heads. In the last ones one KV head serves many.
inline const std::vector<KvShape> SHAPES = {{24, 4, 256, 1},
                                            {6, 1, 256, 8},
                                            {6, 1, 256, 2},
                                            {4, 1, 256, 0},
                                            {8, 2, 128, 1},
                                            {8, 1, 128, 8},
                                            {3, 1, 128, 2},
                                            {2, 2, 128, 0},
                                            {4, 4, 64, 1},
                                            {8, 2, 64, 8},
                                            {5, 1, 64, 2, 1},
                                            {7, 1, 64, 0, 1},
                                            {6, 1, 128, 1, 0, 100, 0, false},
                                            {16, 1, 128, 1, 1, 300, 5.0f},
                                            {4, 1, 64, 0, 1, 70, 3.0f},
                                            {12, 4, 128, 1, 0, 0, 30.0f, false},
                                            {24, 1, 128, 1},
                                            {34, 2, 64, 0},
                                            {48, 2, 256, 8},
                                            {17, 1, 64, 2, 0, 90},
                                            {32, 4, 512, 1, 0, 0, 0, false},
                                            {8, 1, 512, 8, 0, 300, 0, false},
                                            {16, 1, 512, 0, 0, 70, 0, false},
                                            {4, 2, 512, 2}};

} // namespace attention_test
