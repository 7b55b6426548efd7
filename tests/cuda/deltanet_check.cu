// Checks the DeltaNet ops against a reference in double precision, and against themselves bit by bit.
#include "harness.h"
#include "rowmm_reference.h"

#include <memory>

static double error(const double *expected, const float *got, size_t n) {
    double diff = 0, norm = 1e-30;
    for (size_t i = 0; i < n; i++) {
        const double d = got[i] - expected[i];
        diff += d * d;
        norm += expected[i] * expected[i];
    }
    return std::sqrt(diff / norm); // NaN stays NaN
}

static bool untouched(const float *x, size_t n) { // it asks since Device::poison()
    const std::vector<uint8_t> poison(n * sizeof(float), 0xff);
    return n == 0 || memcmp(x, poison.data(), poison.size()) == 0;
}

// These are for the row by row kernel, and for products in split BF16.
constexpr double BOUND = 1e-5, CHUNKS_BOUND = 3e-5;

// A Pair is a layer with a sequence in each slot, beside what the reference makes of each.
struct Pair {
    Shape s;
    Layer layer;
    std::vector<Reference> refs;
    std::string name;
    double bound = BOUND;

    Pair(const Shape &shape, int R, int n_slots) : Pair(shape, random_weights(shape), R, n_slots) {}
    Pair(const Shape &shape, const Weights &w, int R, int n_slots)
        : s(shape), layer(s, R, w, normals(size_t(n_slots) * 3 * s.C()),
                          normals(size_t(n_slots) * s.Hv * s.S * s.S, 0.3f)),
          name("S" + std::to_string(s.S) + " " + std::to_string(s.Hk) + "/" + std::to_string(s.Hv) + " R" +
               std::to_string(R) + " slots " + std::to_string(n_slots) + " ") {
        const Snapshot now = layer.snapshot();
        for (int slot = 0; slot < n_slots; slot++) {
            refs.emplace_back(s, w, part_of(now.window, slot), part_of(now.state, slot));
        }
    }

    Floats part_of(const Floats &x, int slot) const {
        const size_t n = x.size() / layer.n_slots;
        return Floats(&x[slot * n], &x[slot * n] + n);
    }
    // Lets the slot hold nothing but junk.
    void forget(int slot) {
        Snapshot now = layer.snapshot();
        for (Floats *x : {&now.window, &now.state, &now.log}) {
            std::fill_n(&(*x)[slot * (x->size() / layer.n_slots)], x->size() / layer.n_slots, NAN);
        }
        now.timelines[slot] = {{}, pick(2), true};
        layer.restore(now);
        refs[slot].clear();
    }

    void compare(const Output &got, int first, const Result &expected, const std::string &what) {
        const size_t C = s.C(), n = size_t(s.Hv) * s.S;
        const double conv = error(expected.conv.data(), &got.conv[first * C], expected.conv.size()),
                     out = error(expected.out.data(), &got.out[first * n], expected.out.size());
        expect(conv < 1e-6, name + what + ": conv off by " + std::to_string(conv));
        expect(out < bound, name + what + ": out off by " + std::to_string(out));
    }
    void compare_committed(const Snapshot &now, int slot, const std::string &what) {
        const Floats found_window = part_of(now.window, slot), found_state = part_of(now.state, slot);
        const double window = error(refs[slot].window.data(), found_window.data(), found_window.size()),
                     state = error(refs[slot].state.data(), found_state.data(), found_state.size());
        expect(window == 0, name + what + ": window off by " + std::to_string(window));
        expect(state < bound, name + what + ": state off by " + std::to_string(state));
    }
    void expect_slot_untouched(const Snapshot &before, const Snapshot &after, int slot,
                               const std::string &what) {
        const bool same = same_bits(part_of(before.window, slot), part_of(after.window, slot)) &&
                          same_bits(part_of(before.state, slot), part_of(after.state, slot)) &&
                          same_bits(part_of(before.log, slot), part_of(after.log, slot));
        expect(same, name + what + ": another slot is touched");
    }

    void append(int slot, int T, bool chunks = false) {
        const Rows rows = random_rows(s, T);
        const Ints all = chain(T + 1); // -1, 0, .. T - 1
        const Result expected = refs[slot].verify(rows, chain(T));
        refs[slot].commit(Ints(all.begin() + 1, all.end()));
        const std::string what = (chunks ? "append chunks " : "append ") + std::to_string(T);
        const Snapshot before = layer.snapshot();
        const Output got = layer.append(slot, rows, chunks);
        compare(got, 0, expected, what);
        const Snapshot after = layer.snapshot();
        compare_committed(after, slot, what);
        if (chunks) {
            layer.restore(before);
            const Output again = layer.append(slot, rows, chunks);
            expect(same_bits(got.out, again.out) &&
                       same_bits(part_of(after.state, slot), part_of(layer.snapshot().state, slot)),
                   name + what + " twice");
        }
        for (int other = 0; other < layer.n_slots; other++) {
            if (other != slot) {
                expect_slot_untouched(before, after, other, what);
            }
        }
    }

    // Runs a step of T rows, and then accepts some rows of each sequence.
    void verify(const std::vector<Part> &parts, int T, const std::string &what) {
        const Snapshot before = layer.snapshot();
        const Output got = layer.run(DELTA_VERIFY, parts, T);
        const Snapshot after = layer.snapshot();
        const Ints first = first_rows(parts);
        Ints others = chain(layer.n_slots + 1);
        others.erase(others.begin());
        for (size_t i = 0; i < parts.size(); i++) {
            const Part &part = parts[i];
            compare(got, first[i], refs[part.slot].verify(part.rows, part.parents), what);
            // Pending rows are on the state, and a fresh one is zeros.
            compare_committed(after, part.slot, what);
            others.erase(std::find(others.begin(), others.end(), part.slot));
        }
        for (int slot : others) {
            expect_slot_untouched(before, after, slot, what);
        }
        const size_t used = first.back(), C = s.C(), n = size_t(s.Hv) * s.S;
        expect(untouched(&got.conv[0] + used * C, (T - used) * C) &&
                   untouched(&got.out[0] + used * n, (T - used) * n),
               name + what + ": a row that only fills the step is written");

        std::vector<Ints> accepted;
        for (const Part &part : parts) {
            accepted.push_back(part.rows.T == 0 ? Ints() : path_to(part.parents, pick(part.rows.T)));
        }
        const size_t i = pick(int(parts.size()));
        if (parts[i].rows.T > 0) {
            check_alone(parts[i], first[i], got, before, after, accepted[i], what);
        }
        layer.restore(after);
        for (size_t j = 0; j < parts.size(); j++) {
            layer.timelines[parts[j].slot].pending = accepted[j];
            refs[parts[j].slot].commit(accepted[j]);
        }
    }
    void verify(int slot, const Ints &parents, const std::string &what) {
        const int T = int(parents.size());
        verify({{slot, random_rows(s, T), parents}}, T, what);
    }

    // Checks that a part's rows have the same bits alone, on a path of their own and in another slot. What is
    // accepted has to end in the same bits whether it is replayed or appended.
    void check_alone(const Part &part, int first, const Output &got, Snapshot before, const Snapshot &after,
                     const Ints &accepted, const std::string &what) {
        const int to = pick(layer.n_slots);
        layer.copy_slot(before, part.slot, to);
        const size_t C = s.C(), n = size_t(s.Hv) * s.S;
        for (const Ints &path : {accepted, path_to(part.parents, pick(part.rows.T))}) {
            layer.restore(before);
            const int T = int(path.size());
            const Part moved{to, take(s, part.rows, path), chain(T)};
            const Output alone = layer.run(DELTA_VERIFY, {moved}, std::min(T + pick(4), MAX_ROWS));
            bool same = true;
            for (int i = 0; i < T; i++) {
                same = same && same_bits(&got.conv[(first + path[i]) * C], &alone.conv[i * C], C);
                same = same && same_bits(&got.out[(first + path[i]) * n], &alone.out[i * n], n);
            }
            expect(same, name + what + ": rows differ from their path alone");
        }
        layer.restore(before);
        layer.append(to, take(s, part.rows, accepted));
        const Snapshot appended = layer.snapshot();
        layer.restore(after);
        layer.timelines[part.slot].pending = accepted;
        layer.flush(part.slot);
        const Snapshot replayed = layer.snapshot();
        expect(same_bits(part_of(replayed.state, part.slot), part_of(appended.state, to)),
               name + what + ": replayed state differs from append");
        expect(same_bits(part_of(replayed.window, part.slot), part_of(appended.window, to)),
               name + what + ": replayed window differs from append");
    }

    // Returns up to n sequences in random slots, some fresh, with up to T rows between them.
    std::vector<Part> random_parts(int n, int T) {
        Ints slots = chain(layer.n_slots + 1);
        slots.erase(slots.begin());
        std::shuffle(slots.begin(), slots.end(), rng);
        std::vector<Part> parts;
        for (int i = 0; i < n; i++) {
            const int most = std::min(layer.R, i + 1 < n ? T / 2 + 1 : T);
            const int rows = pick(4) == 0 ? 0 : pick(std::min(most, T) + 1);
            T -= rows;
            const Ints parents[] = {chain(rows), random_tree(rows, 16, false), random_tree(rows, 64, true),
                                    random_order(rows)};
            if (pick(4) == 0) {
                forget(slots[i]);
            }
            parts.push_back({slots[i], random_rows(s, rows), parents[pick(4)]});
        }
        return parts;
    }
};

static void check_rounds(const Shape &s, int R, int n_slots, int rounds, int long_append) {
    Pair pair(s, R, n_slots);
    const int slot = pick(n_slots);
    pair.append(slot, 1);
    pair.append(slot, 2);
    pair.verify(slot, chain(1), "verify 1");
    pair.verify(slot, chain(1), "verify 1 after 1");
    pair.append(slot, 37);
    pair.verify(slot, chain(R), "verify chain R");
    pair.verify(slot, random_tree(R, 16, false), "verify tree R after R");
    pair.verify(slot, random_tree(R, 64, false), "verify deep tree");
    pair.append(slot, 3);
    pair.verify(slot, random_order(R), "verify unordered tree");
    pair.forget(slot);
    pair.append(slot, 5);
    pair.forget(slot);
    pair.verify(slot, random_tree(std::min(R, 12), 16, true), "verify fresh forest");
    for (int i = 0; i < rounds; i++) {
        const int T = i % 4 == 0 ? MAX_ROWS : 1 + pick(MAX_ROWS), n = 1 + pick(std::min(T, n_slots));
        pair.verify(pair.random_parts(n, T), T,
                    "verify " + std::to_string(T) + " rows of " + std::to_string(n));
    }
    pair.append(slot, long_append);
    pair.layer.flush(slot);
    pair.compare_committed(pair.layer.snapshot(), slot, "flush of nothing");
}

// Checks long prefills by chunks, between verifies whose rows they replay.
static void check_chunks(const Shape &s, int T) {
    Pair pair(s, 9, 3);
    pair.bound = CHUNKS_BOUND;
    const int slot = pick(3);
    pair.append(slot, T, true);
    pair.verify(slot, chain(9), "verify after chunks");
    pair.append(slot, 33, true);
    pair.verify(slot, random_tree(9, 16, false), "verify tree after chunks");
    pair.append(slot, 64, true);
    pair.forget(slot);
    pair.append(slot, 31, true);
    pair.append(slot, 1, true);
    pair.verify(slot, chain(3), "verify after short chunks");

    Rows rows = random_rows(s, 100);
    const int bad = 40; // it lies in the second chunk
    rows.x[size_t(bad) * s.C() + 2 * s.Hk * s.S] = NAN; // this is v of the first head
    const Floats out = pair.layer.append(slot, rows, true).out;
    bool shows = true;
    for (int t = 0; t < 100; t++) {
        const float *row = &out[size_t(t) * s.Hv * s.S];
        const bool first = std::all_of(row, row + s.S, [](float x) { return std::isfinite(x); });
        const bool others =
            std::all_of(row + s.S, row + s.Hv * s.S, [](float x) { return std::isfinite(x); });
        shows = shows && others && (t < 32 ? first : t < bad || !first);
    }
    expect(shows, pair.name + "chunks show what is not finite");
}

// Checks that several sequences' rows that are appended by one call have the bits that they have alone.
static void check_prompts(const Shape &s, const Ints &lengths, bool chunks) {
    const int n = int(lengths.size()), T = std::accumulate(lengths.begin(), lengths.end(), 0);
    Pair pair(s, 9, n + 1);
    Layer &layer = pair.layer;
    std::vector<Part> parts;
    for (int i = 0; i < n; i++) { // some are new, and some have rows to replay first
        const int slot = (i + 1) % (n + 1);
        if (i % 3 == 0) {
            pair.verify(slot, chain(5), "verify before prompts");
        } else if (i % 3 == 1) {
            pair.forget(slot);
        }
        parts.push_back({slot, random_rows(s, lengths[i]), {}});
    }
    const Snapshot before = layer.snapshot();
    const Output together = layer.run(DELTA_APPEND, parts, T, chunks);
    const Snapshot after = layer.snapshot();
    layer.restore(before);
    Output alone;
    for (const Part &part : parts) {
        const Output one = layer.append(part.slot, part.rows, chunks);
        alone.conv.insert(alone.conv.end(), one.conv.begin(), one.conv.end());
        alone.out.insert(alone.out.end(), one.out.begin(), one.out.end());
    }
    const std::string what =
        pair.name + std::to_string(n) + " prompts of one call" + (chunks ? ", in chunks" : "");
    expect(same_bits(together.conv, alone.conv), what + ": conv");
    expect(same_bits(together.out, alone.out), what + ": out");
    expect(same_bits(after.state, layer.state.get()), what + ": state");
    expect(same_bits(after.window, layer.window.get()), what + ": window");
}

void check_deltanet_prompts() {
    for (const Shape &s : {Shape{2, 6, 32}, Shape{4, 8, 64}, Shape{2, 2, 128}}) {
        for (const Ints &lengths :
             {Ints{1, 2, 3, 4}, Ints{40, 1, 70}, Ints{64, 64}, Ints{33}, Ints{5, 100, 31, 2, 32}}) {
            check_prompts(s, lengths, false);
            if (s.S >= 64) {
                check_prompts(s, lengths, true);
            }
        }
    }
}
// The kernels of long prefills, on shapes that an emulated device is done with.
void check_deltanet_chunks() {
    check_chunks({2, 4, 64}, 70);
}

// Checks that one append and the same rows in pieces end in the same bits.
static void check_append_pieces(const Shape &s, int T) {
    Pair pair(s, 8, 2);
    const Rows rows = random_rows(s, T);
    const Snapshot before = pair.layer.snapshot();
    const Output whole = pair.layer.append(1, rows);
    const Snapshot end = pair.layer.snapshot();
    pair.layer.restore(before);
    Output pieces;
    for (int t = 0; t < T;) {
        Ints which;
        for (int n = 1 + pick(90); n > 0 && t < T; n--) {
            which.push_back(t++);
        }
        const Output part = pair.layer.append(1, take(s, rows, which));
        pieces.conv.insert(pieces.conv.end(), part.conv.begin(), part.conv.end());
        pieces.out.insert(pieces.out.end(), part.out.begin(), part.out.end());
    }
    expect(same_bits(whole.conv, pieces.conv) && same_bits(whole.out, pieces.out),
           pair.name + "append in pieces");
    expect(same_bits(end.state, pair.layer.state.get()), pair.name + "append in pieces: state");
    expect(same_bits(end.window, pair.layer.window.get()), pair.name + "append in pieces: window");
}

// Checks that a captured step, replayed with other sequences, rows, parents and pending rows, does what eager
// launches do.
static void check_captured_step(const Shape &s) {
    const int T = 24, n_slots = 5, rounds = watched() ? 2 : 5;
    Pair pair(s, T, n_slots);
    Layer &layer = pair.layer;
    Device<float> x(size_t(T) * s.C()), alpha(size_t(T) * s.Hv), beta(size_t(T) * s.Hv), conv(x.n),
        out(size_t(T) * s.Hv * s.S);
    void *step = nullptr;
    must(cuda::capture_begin(stream));
    layer.enqueue_conv(DELTA_VERIFY, T, x, conv);
    layer.enqueue_delta(DELTA_VERIFY, T, conv, alpha, beta, out);
    must(cuda::capture_end(stream, &step));
    for (int i = 0; i < rounds; i++) {
        const std::vector<Part> parts = pair.random_parts(1 + i, T);
        const Snapshot before = layer.snapshot();
        const Output eager = layer.run(DELTA_VERIFY, parts, T);
        const Snapshot expected = layer.snapshot();
        layer.restore(before);
        layer.set_ctl(parts);
        const auto fill = [](const Device<float> &to, const std::vector<Part> &from, Floats Rows::*what) {
            Floats host;
            for (const Part &part : from) {
                host.insert(host.end(), (part.rows.*what).begin(), (part.rows.*what).end());
            }
            host.resize(to.n, NAN);
            return host;
        };
        x.set(fill(x, parts, &Rows::x));
        alpha.set(fill(alpha, parts, &Rows::alpha));
        beta.set(fill(beta, parts, &Rows::beta));
        conv.poison();
        out.poison();
        must(cuda::capture_launch(step, stream));
        must(cudaStreamSynchronize(stream));
        expect(same_bits(out.get(), eager.out) && same_bits(conv.get(), eager.conv),
               pair.name + "captured step");
        const Snapshot got = layer.snapshot();
        expect(same_bits(got.state, expected.state) && same_bits(got.window, expected.window) &&
                   same_bits(got.log, expected.log),
               pair.name + "captured step: state, window, log");
        layer.restore(expected);
        for (const Part &part : parts) {
            layer.timelines[part.slot].pending =
                part.rows.T == 0 ? Ints() : path_to(part.parents, pick(part.rows.T));
        }
    }
    cuda::capture_free(step);
}

// The conv over products that have stayed parts does what it does over the same products added up.
static void check_conv_parts(int T, int n_seqs) {
    const Shape s = {2, 4, 128};
    const int64_t K = 512, N[4] = {s.C(), int64_t(s.Hv) * s.S, s.Hv, s.Hv};
    const int types[4] = {13, 12, 0, 8}; // these are Q5_K, Q4_K, F32, Q8_0
    Pair pair(s, T, n_seqs);
    Layer &layer = pair.layer;
    Device<uint8_t> packed(size_t(rowmm_x_bytes(T, K))), scratch(size_t(cuda::rowmm_scratch_bytes()));
    Device<float> x(normals(size_t(T) * K));
    std::vector<std::unique_ptr<Device<uint8_t>>> weights;
    std::vector<std::unique_ptr<Device<float>>> plain, summed;
    RowmmArgs a = {};
    a.T = T;
    a.K = K;
    a.x = packed.p;
    a.scratch = scratch.p;
    a.overlap = 1;
    for (int i = 0; i < 4; i++) {
        const Device<uint8_t> blocks(rowmm_test::random_weights(types[i], K, N[i], uint32_t(i) + 50));
        weights.emplace_back(new Device<uint8_t>(size_t(rowmm_packed_bytes(types[i], K, N[i]))));
        must(cuda::rowmm_permute({types[i], K, N[i], blocks.p, weights[i]->p}, stream));
        must(cudaStreamSynchronize(stream));
        plain.emplace_back(new Device<float>(size_t(T) * N[i]));
        summed.emplace_back(new Device<float>(size_t(T) * N[i]));
        a.weights[a.n_weights++] = {types[i], N[i], weights[i]->p, plain[i]->p, N[i], nullptr, 0};
    }
    RowmmPackArgs pack = {};
    pack.x = x.p;
    pack.x_row = pack.K = K;
    pack.T = T;
    pack.out = packed.p;
    const std::vector<Part> rows = pair.random_parts(n_seqs, T);
    const Snapshot before = layer.snapshot();
    layer.set_ctl(rows);
    must(cuda::rowmm_pack(pack, stream));
    must(cuda::rowmm(a, stream));
    layer.enqueue_conv(DELTA_VERIFY, T, *plain[0], *summed[0]);
    must(cudaStreamSynchronize(stream));
    const Floats expected = summed[0]->get();
    const Snapshot after = layer.snapshot();
    layer.restore(before);
    layer.set_ctl(rows);
    summed[0]->poison();
    Device<float> parts(size_t(rowmm_parts_bytes(a)) / sizeof(float));
    parts.poison();
    a.parts = parts.p;
    must(cuda::rowmm(a, stream));
    ConvPartsArgs conv = {{layer.delta_shape(T, DELTA_VERIFY), nullptr, layer.w.p, layer.window.p,
                           layer.log.p, layer.ctl.p, summed[0]->p},
                          &a,
                          {summed[1]->p, summed[2]->p, summed[3]->p}};
    must(cuda::conv_parts(conv, stream));
    must(cudaStreamSynchronize(stream));
    const Snapshot got = layer.snapshot();
    const std::string name = pair.name + "conv of parts, " + std::to_string(T) + " rows";
    expect(same_bits(summed[0]->get(), expected), name);
    for (int i = 1; i < 4; i++) {
        expect(same_bits(summed[i]->get(), plain[i]->get()),
               name + ", results of weight " + std::to_string(i));
    }
    expect(same_bits(got.window, after.window) && same_bits(got.log, after.log), name + ": window, log");
}

// Steps of every width follow each other.
static void check_widths(const Shape &s) {
    Pair pair(s, MAX_ROWS, 1);
    pair.append(0, 5);
    for (int T = 1; T <= MAX_ROWS; T++) {
        pair.verify(0, T % 2 == 0 ? chain(T) : random_tree(T, 16, false), "verify " + std::to_string(T));
    }
}

// Steps of few rows of one sequence follow each other and those of many rows, in an engine of so many sequences: its
// launches do not know that a step has one.
static void check_few_rows(const Shape &s, int n_slots) {
    Pair pair(s, MAX_ROWS, n_slots);
    for (int i = 0; i < n_slots; i++) {
        pair.append(i, 2 + i);
    }
    for (const int T : {5, 16, 7, 40, 12, MAX_ROWS, 6, 16}) {
        const std::string of = "verify " + std::to_string(T) + " rows of one of " + std::to_string(n_slots);
        pair.verify(n_slots - 1, chain(T), of);
        pair.verify(n_slots - 1, random_tree(T, 16, false), of + ", a tree");
    }
    for (const int T : {8, 13, 16}) {
        pair.verify(pair.random_parts(n_slots, T), T, "verify " + std::to_string(T) + " rows of all");
    }
}

void check_deltanet_rows() {
    for (const Shape &s : {Shape{4, 4, 16}, Shape{2, 6, 32}, Shape{4, 8, 64}, Shape{2, 2, 128}}) {
        check_rounds(s, 9, 3, 4, 130);
        check_rounds(s, 64, 3, 4, 5);
        check_append_pieces(s, 150);
    }
    check_rounds({1, 1, 32}, 9, 3, 4, 40); // odd numbers of heads and rows, whose logs lie where 16 bytes are read at once too
    check_widths({2, 6, 32});
    check_few_rows({2, 2, 128}, 1);
    check_few_rows({2, 2, 128}, 2);
}

void check_deltanet(bool all) {
    const std::vector<Shape> shapes = {{4, 4, 16}, {2, 6, 32}, {4, 8, 64}, {2, 2, 128}};
    for (const Shape &s : shapes) {
        check_rounds(s, 9, 3, all ? 4 : 1, all ? 130 : 40);
        if (all) {
            for (int R : {1, 2, 33, 64}) {
                check_rounds(s, R, R == 33 ? 1 : 16, 10, 130);
            }
            check_rounds(s, 4, 64, 12, 5);
            check_widths(s);
            check_append_pieces(s, 300);
        }
        check_captured_step(s);
        if (deltanet_chunks_scratch({1, 1, 1, s.Hk, s.Hv, s.S, DELTA_APPEND, 1}) > 0) {
            check_chunks(s, all ? 200 : 70);
        }
    }
    check_deltanet_prompts();
    for (int T = 1; T <= MAX_ROWS; T++) {
        if (all || T == 1 || T % 13 == 0) {
            check_conv_parts(T, T == 1 ? 1 : 2);
        }
    }
    if (all) {
        check_few_rows({16, 48, 128}, 1);
        check_few_rows({16, 48, 128}, 2);
        check_rounds({16, 48, 128}, 16, 4, 6, 200);
        check_append_pieces({16, 48, 128}, 512);
        check_chunks({16, 48, 128}, 1037);
    }
}
