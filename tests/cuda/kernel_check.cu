// Checks luce's CUDA kernels against a reference in double precision and against themselves bit by bit, then
// times them (kernel_time.cu). Needs a GPU and nvcc, no ggml:
//   nvcc -std=c++17 -O3 -fmad=false -arch=native -I native/kernels -o kernel_check
//       tests/cuda/*.cu native/kernels/*.cu
//   ./kernel_check          # or: ./kernel_check check, ./kernel_check time
#include "harness.h"

#include <cstring>
#include <string>

static int n_checks = 0, n_failed = 0;

static void expect(bool good, const std::string &what) {
    n_checks++;
    if (!good) {
        n_failed++;
        printf("FAILED %s\n", what.c_str());
    }
}

static double error(const Doubles &expected, const Floats &got) {
    double diff = 0, norm = 1e-30;
    for (size_t i = 0; i < expected.size(); i++) {
        const double d = got[i] - expected[i];
        diff += d * d;
        norm += expected[i] * expected[i];
    }
    return std::sqrt(diff / norm); // NaN stays NaN
}

static bool same_bits(const float *a, const float *b, size_t n) {
    return memcmp(a, b, n * sizeof(float)) == 0;
}
static bool same_bits(const Floats &a, const Floats &b) {
    return a.size() == b.size() && same_bits(a.data(), b.data(), a.size());
}

// ---- DeltaNet ----

struct Session {
    Shape s;
    Weights w;
    Layer layer;
    Reference ref;
    std::string name;

    Session(const Shape &shape, const Weights &weights, int R, const Floats &window, const Floats &state)
        : s(shape), w(weights), layer(s, R, w, window, state), ref(s, w, window, state),
          name("S" + std::to_string(s.S) + " " + std::to_string(s.Hk) + "/" + std::to_string(s.Hv) + " R" +
               std::to_string(R) + " ") {}

    static Session make(const Shape &s, int R) {
        return Session(s, random_weights(s), R, normals(size_t(3) * s.C()),
                       normals(size_t(s.Hv) * s.S * s.S, 0.3f));
    }

    void compare(const Output &got, const Result &expected, const std::string &what) {
        const double conv = error(expected.conv, got.conv), out = error(expected.out, got.out);
        expect(conv < 1e-6, name + what + ": conv off by " + std::to_string(conv));
        expect(out < 1e-5, name + what + ": out off by " + std::to_string(out));
    }
    void compare_committed(const std::string &what) {
        const double window = error(ref.window, layer.window.get()),
                     state = error(ref.state, layer.state.get());
        expect(window == 0, name + what + ": window off by " + std::to_string(window));
        expect(state < 1e-5, name + what + ": state off by " + std::to_string(state));
    }

    void append(int T) {
        const Rows rows = random_rows(s, T);
        const Ints all = chain(T + 1); // -1, 0, .. T - 1
        const Result expected = ref.verify(rows, chain(T));
        ref.commit(Ints(all.begin() + 1, all.end()));
        const std::string what = "append " + std::to_string(T);
        compare(layer.run(DELTA_APPEND, rows, {}), expected, what);
        compare_committed(what);
    }

    // Verifies; the rows of two root paths must have the same bits alone, as a chain; then accepts one of the
    // two, whose replay must end in the same bits as an append of its rows.
    void verify(const Ints &parents, bool accept_last, const std::string &what) {
        const Rows rows = random_rows(s, int(parents.size()));
        const Snapshot before = layer.snapshot();
        const Output got = layer.run(DELTA_VERIFY, rows, parents);
        compare(got, ref.verify(rows, parents), what);
        compare_committed(what); // the pending rows are on the state now
        const Snapshot after = layer.snapshot();

        const Ints accepted = path_to(parents, accept_last ? rows.T - 1 : pick(rows.T));
        const Ints other = path_to(parents, pick(rows.T));
        for (const Ints &path : {accepted, other}) {
            layer.restore(before);
            const Output alone = layer.run(DELTA_VERIFY, take(s, rows, path), chain(int(path.size())));
            bool same = true;
            for (size_t i = 0; i < path.size(); i++) {
                const size_t C = s.C(), n = size_t(s.Hv) * s.S;
                same = same && same_bits(&got.conv[path[i] * C], &alone.conv[i * C], C);
                same = same && same_bits(&got.out[path[i] * n], &alone.out[i * n], n);
            }
            expect(same, name + what + ": rows differ from their path alone");
        }
        layer.restore(before);
        layer.run(DELTA_APPEND, take(s, rows, accepted), {});
        const Snapshot appended = layer.snapshot();
        layer.restore(after);
        layer.pending = accepted;
        layer.flush();
        expect(same_bits(layer.state.get(), appended.state),
               name + what + ": replayed state differs from append");
        expect(same_bits(layer.window.get(), appended.window),
               name + what + ": replayed window differs from append");
        layer.restore(after);
        layer.pending = accepted;
        ref.commit(accepted);
    }
};

static void check_deltanet(const Shape &s, int R, int long_append) {
    Session session = Session::make(s, R);
    session.append(1);
    session.append(2);
    session.verify(chain(1), true, "verify 1");
    session.verify(chain(1), true, "verify 1 after 1");
    session.verify(chain(std::min(R, 7)), false, "verify chain 7");
    session.append(37);
    Ints padded = chain(R); // the last row again and again, as a step fills its bucket
    for (int t = R / 2 + 1; t < R; t++) {
        padded[t] = R / 2 - 1;
    }
    session.verify(padded, false, "verify padded chain");
    session.verify(chain(R), true, "verify chain R");
    session.verify(random_tree(R, 16, false), true, "verify tree R after R");
    session.verify(random_tree(R, 64, false), false, "verify deep tree");
    session.verify(random_tree(std::min(R, 12), 16, true), false, "verify forest");
    session.append(3);
    session.verify(random_order(R), false, "verify unordered tree");
    for (int i = 0; i < 4; i++) {
        const int T = 1 + pick(R);
        session.verify(random_tree(T, 16, i % 2 == 1), i < 2, "verify tree " + std::to_string(T));
    }
    session.layer.flush();
    session.compare_committed("flush");
    session.layer.flush();
    session.compare_committed("flush of nothing");
    session.append(long_append);
}

// One append and the same rows in pieces end in the same bits.
static void check_append_pieces(const Shape &s, int T) {
    Session session = Session::make(s, 8);
    const Rows rows = random_rows(s, T);
    const Snapshot before = session.layer.snapshot();
    const Output whole = session.layer.run(DELTA_APPEND, rows, {});
    const Snapshot end = session.layer.snapshot();
    session.layer.restore(before);
    Output pieces;
    for (int t = 0; t < T;) {
        Ints which;
        for (int n = 1 + pick(90); n > 0 && t < T; n--) {
            which.push_back(t++);
        }
        const Output part = session.layer.run(DELTA_APPEND, take(s, rows, which), {});
        pieces.conv.insert(pieces.conv.end(), part.conv.begin(), part.conv.end());
        pieces.out.insert(pieces.out.end(), part.out.begin(), part.out.end());
    }
    expect(same_bits(whole.conv, pieces.conv) && same_bits(whole.out, pieces.out),
           session.name + "append in pieces");
    expect(same_bits(end.state, session.layer.state.get()), session.name + "append in pieces: state");
    expect(same_bits(end.window, session.layer.window.get()), session.name + "append in pieces: window");
}

// A captured step, replayed with other rows, parents and pending rows, does what eager launches do.
static void check_capture(const Shape &s) {
    const int T = 8;
    Session session = Session::make(s, T);
    Layer &layer = session.layer;
    const Snapshot before = layer.snapshot();
    Device<float> x(size_t(T) * s.C()), alpha(size_t(T) * s.Hv), beta(size_t(T) * s.Hv), conv(x.n),
        out(size_t(T) * s.Hv * s.S);
    void *step = nullptr;
    must(cuda::capture_begin(stream));
    layer.enqueue(DELTA_VERIFY, x, alpha, beta, T, conv, out);
    must(cuda::capture_end(stream, &step));
    std::vector<Rows> rows;
    std::vector<Ints> parents, accepted;
    std::vector<Floats> outs;
    for (int i = 0; i < 4; i++) {
        rows.push_back(random_rows(s, T));
        parents.push_back(i == 0 ? chain(T) : random_tree(T, 16, false));
        accepted.push_back(path_to(parents[i], pick(T)));
        layer.set_ctl(parents[i]);
        x.set(rows[i].x);
        alpha.set(rows[i].alpha);
        beta.set(rows[i].beta);
        out.poison();
        must(cuda::capture_launch(step, stream));
        must(cudaStreamSynchronize(stream));
        outs.push_back(out.get());
        layer.pending = accepted[i];
        layer.bank ^= 1;
    }
    cuda::capture_free(step);
    const Snapshot captured = layer.snapshot();
    layer.restore(before);
    for (int i = 0; i < 4; i++) {
        expect(same_bits(layer.run(DELTA_VERIFY, rows[i], parents[i]).out, outs[i]),
               session.name + "captured step");
        layer.pending = accepted[i];
    }
    expect(same_bits(layer.state.get(), captured.state), session.name + "captured state");
}

// ---- argmax, kv_move ----

static void check_argmax(int64_t n, int T) {
    Floats logits = normals(size_t(n) * T, 3.0f);
    for (int t = 0; t < T; t++) {
        float *x = &logits[size_t(t) * n];
        for (int64_t i = 0; t % 4 == 1 && i < n; i++) {
            x[i] = std::nearbyint(x[i] / 4); // ties, -0 and +0
        }
        if (t % 4 == 2) {
            std::fill(x, x + n, -INFINITY);
        }
        if (t % 4 == 3) {
            x[pick(int(n))] = t % 8 == 3 ? NAN : INFINITY;
        }
    }
    Device<float> in(logits);
    Device<int32_t> out(size_t(T) * ARGMAX_WIDTH);
    for (int run = 0; run < 2; run++) { // the second over what the first left
        must(cuda::argmax({in.p, n, T, out.p}, stream));
        must(cudaStreamSynchronize(stream));
        const std::vector<int32_t> got = out.get();
        bool good = true;
        for (int t = 0; t < T; t++) {
            const float *x = &logits[size_t(t) * n];
            int64_t best = -1;
            bool finite = true;
            for (int64_t i = 0; i < n; i++) {
                finite = finite && std::isfinite(x[i]);
                best = !std::isnan(x[i]) && (best < 0 || x[i] > x[best]) ? i : best;
            }
            const int32_t *row = &got[size_t(t) * ARGMAX_WIDTH];
            good = good && row[0] == std::max<int64_t>(best, 0) && row[1] == (finite ? 0 : 1);
        }
        expect(good, "argmax n " + std::to_string(n) + " T " + std::to_string(T));
    }
}

static void check_kv_move(int k_row, int v_row) {
    const int cells = 160, base = 21, n = 1 + pick(40);
    std::vector<uint8_t> k(size_t(cells) * k_row), v(size_t(cells) * v_row);
    std::generate(k.begin(), k.end(), [] { return uint8_t(rng()); });
    std::generate(v.begin(), v.end(), [] { return uint8_t(rng()); });
    std::vector<int32_t> path(2 + MAX_ROWS, -1);
    path[0] = base;
    path[1] = n;
    for (int i = 0, row = 0; i < n; i++) {
        row += i == 0 ? pick(2) : 1 + pick(3);
        path[2 + i] = row;
    }
    Device<uint8_t> dk(k), dv(v);
    Device<int32_t> dpath(path);
    must(cuda::kv_move({dk.p, dv.p, k_row, v_row, dpath.p}, stream));
    must(cudaStreamSynchronize(stream));
    for (int i = 0; i < n; i++) {
        memmove(&k[size_t(base + i) * k_row], &k[size_t(base + path[2 + i]) * k_row], k_row);
        memmove(&v[size_t(base + i) * v_row], &v[size_t(base + path[2 + i]) * v_row], v_row);
    }
    expect(dk.get() == k && dv.get() == v, "kv_move " + std::to_string(k_row) + " " + std::to_string(v_row));
}

static void check() {
    for (const Shape &s : {Shape{4, 4, 16}, Shape{2, 6, 32}, Shape{4, 8, 64}, Shape{2, 2, 128}}) {
        for (int R : {1, 2, 9, 33, 64}) {
            check_deltanet(s, R, 130);
        }
        check_append_pieces(s, 300);
        check_capture(s);
    }
    check_deltanet({16, 48, 128}, 64, 512);
    check_append_pieces({16, 48, 128}, 512);
    for (int64_t n : {1, 5, 62, 100, 1001, 4096, 248320}) {
        check_argmax(n, 1);
        check_argmax(n, 17);
    }
    check_argmax(248320, 64);
    for (int i = 0; i < 8; i++) {
        check_kv_move(2048, 1088);
        check_kv_move(68, 36);
        check_kv_move(512, 512);
    }
    printf("%d checks, %d failed\n", n_checks, n_failed);
}

int main(int argc, char **argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (argc > 2 || (!what.empty() && what != "check" && what != "time")) {
        printf("usage: kernel_check [check|time]\n");
        return 2;
    }
    must(cudaStreamCreate(&stream));
    if (what != "time") {
        check();
    }
    if (what != "check") {
        time_kernels();
    }
    return n_failed == 0 ? 0 : 1;
}
