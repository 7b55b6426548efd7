// Checks the mixture of experts against double precision, and that a row's bits depend on that row alone,
// whoever shares its experts.
#include "moe/launch_plan.h"
#include "moe_reference.h"

#include <map>

using namespace moe_test;

namespace {

Floats random_rows(int T, int64_t E) {
    Floats x = normals(size_t(T) * E);
    for (float &v : x) {
        v *= pick(100) == 0 ? 8.0f : 1.0f;
    }
    return x;
}

// Of one row, down and sum in one launch give what they give in two. Here they come right behind up, which leaves the experts
// that they wait for, where another row's were before.
void check_end(Mixture &l, const Buffers &b, bool overlap) {
    if (l.apart || !moe_ends_at_once(b.dims, l.down.type, l.down_s.type)) {
        return;
    }
    Buffers other(b.dims, random_rows(1, b.dims.E));
    other.enqueue(l, overlap);
    must(cudaStreamSynchronize(stream));
    const Buffers *rows[] = {&other, &b};
    const size_t E = size_t(b.dims.E);
    Device<float> out(2 * E);
    out.poison();
    run_times(overlap ? 20 : 1, [&] {
        for (int i = 0; i < 2; i++) {
            const float *x = rows[i]->x.p;
            b.enqueue_up(l, x, overlap, /*hands_out=*/false);
            must(cuda::moe_end({b.dims, l.down.matrix(), l.down_s.matrix(), b.routed.p, b.h.p, x, out.p + i * E, overlap, l.counts.n > 0 ? l.counts.p : nullptr}, stream));
        }
    });
    const Floats found = out.get();
    for (int i = 0; i < 2; i++) {
        const Floats of_row(found.begin() + i * E, found.begin() + (i + 1) * E);
        expect(same_bits(of_row, rows[i]->out.get()), "moe ends in one launch as in two");
    }
}

Routed run(Mixture &l, const Floats &x, bool overlap, int replays = 1) {
    MoeDims d = l.dims;
    d.T = int32_t(x.size() / size_t(d.E));
    Buffers b(d, x);
    run_times(replays, [&] { b.enqueue(l, overlap, /*hands_out=*/false); });
    const std::vector<uint8_t> after = l.counters.get();
    expect(std::all_of(after.begin(), after.end(), [](uint8_t c) { return c == 0; }), "moe leaves its counters at zero");
    if ((!l.apart || d.dense) && d.T <= ROWMM_MAX_ROWS) {
        Device<uint8_t> packed(b.packed.n);
        RowmmPackArgs a{};
        a.x = b.out.p;
        a.x_row = a.K = d.E;
        a.T = d.T;
        a.out = packed.p;
        a.input = ROWMM_RMS;
        a.w = l.d_norm.p;
        must(cuda::rowmm_pack(a, stream));
        must(cudaStreamSynchronize(stream));
        expect(b.packed.get() == packed.get(), "moe packs its sums as rowmm does at " + std::to_string(d.T) + " rows");
    }
    check_end(l, b, overlap);
    return b.get();
}

// Returns whether a row's experts are those with the largest logits, in falling order, and its weights their
// softmax.
bool good_route(const Mixture &l, const Expected &e, const int32_t *ids, const float *weights) {
    constexpr double NEAR = 2e-5; // this allows for F32 sums
    const int used = l.dims.n_used;
    std::vector<bool> taken(size_t(l.dims.n_expert), false);
    double total = 0, least = INFINITY;
    for (int r = 0; r < used; r++) {
        if (ids[r] < 0 || ids[r] >= l.dims.n_expert || taken[size_t(ids[r])]) {
            return false;
        }
        taken[size_t(ids[r])] = true;
        const double x = e.logits[size_t(ids[r])];
        if (x > least + NEAR) {
            return false;
        }
        least = std::min(least, x);
        total += std::exp(x - e.logits[size_t(ids[0])]);
    }
    for (int n = 0; n < l.dims.n_expert; n++) {
        if (!taken[size_t(n)] && e.logits[size_t(n)] > least + NEAR) {
            return false;
        }
    }
    for (int r = 0; r < used; r++) {
        const double w = std::exp(e.logits[size_t(ids[r])] - e.logits[size_t(ids[0])]) / total;
        if (!(std::fabs(weights[r] - w) < 1e-4)) {
            return false;
        }
    }
    return true;
}

// Returns the rms of what is wrong over the rms of what is expected, of the rows in `some`.
double error_of(const Mixture &l, const Floats &x, const Routed &got, const Ints &some, bool &routes) {
    const int64_t E = l.dims.E;
    const int used = l.dims.n_used;
    double error = 0, size = 0;
    for (int t : some) {
        const Expected e = expected_row(l, &x[size_t(t * E)], &got.ids[size_t(t * used)]);
        routes = routes && good_route(l, e, &got.ids[size_t(t * used)], &got.weights[size_t(t * used)]);
        for (int64_t i = 0; i < E; i++) {
            const double expected = e.ffn[size_t(i)], found = double(got.out[size_t(t * E + i)]) - (l.apart ? 0.0f : x[size_t(t * E + i)]);
            error += (found - expected) * (found - expected);
            size += expected * expected;
        }
    }
    return std::sqrt(error / size);
}

bool has_wgmma() {
    DeviceLimits device;
    return cuda::device_limits(device) == 0 && device.wgmma;
}

// Runs rows of `base` again, in other widths and companies: among junk, NaN and inf, more than once.
void check_company(Mixture &l, const Floats &x, const Routed &base, const Ints &widths, bool captures,
                   const std::string &what) {
    const int64_t E = l.dims.E, n_base = int64_t(x.size()) / E;
    for (int T : widths) {
        Floats in(size_t(T) * E);
        Ints from(T, -1);
        const int sure = pick(T);
        for (int t = 0; t < T; t++) {
            const int junk = t == sure ? 9 : pick(6); // about half are rows of the base
            from[t] = junk < 3 ? -1 : pick(int(n_base));
            for (int64_t k = 0; k < E; k++) {
                float &v = in[size_t(t * E + k)];
                v = junk == 0 ? NAN : junk == 1 ? (k % 7 == 0 ? INFINITY : 3e38f) : float(pick(1000)) * 1e30f;
                v = from[t] >= 0 ? x[size_t(from[t] * E + k)] : v;
            }
        }
        for (const int wide : T >= MANY_FROM && has_wgmma() ? Ints{0, WIDE_ROWS} : Ints{0}) {
            l.dims.wide = wide;
            const Routed got = run(l, in, T % 2 == 1, captures && T % 3 == 0 ? 2 : 1);
            bool same = true, shows = true;
            for (int t = 0; t < T; t++) {
                const float *row = &got.out[size_t(t * E)];
                if (from[t] >= 0) {
                    same = same && same_bits(row, &base.out[size_t(from[t] * E)], size_t(E));
                } else if (std::isnan(in[size_t(t * E)])) {
                    shows = shows && std::none_of(row, row + E, [](float v) { return std::isfinite(v); });
                }
            }
            const std::string where = what + " at " + std::to_string(T) + " rows, " + std::to_string(wide) + " at once";
            expect(same, "moe bits of " + where);
            expect(shows, "moe shows NaN of " + where);
        }
        l.dims.wide = 0;
    }
}

std::string name(const MoeDims &d, const Types &t) {
    const auto type = [](int id) { return std::string(rowmm_test::type_of(id).name); };
    return type(t.gate) + "/" + type(t.up) + "/" + type(t.down) + "/" + type(t.shared) + " " + std::to_string(d.E) + "x" +
           std::to_string(d.FF) + (d.dense ? " beside " : "+") + std::to_string(d.FF_shared) + ", " + std::to_string(d.n_used) + " of " +
           std::to_string(d.n_expert);
}

void check_mixture(const MoeDims &dims, const Types &types, int n_base, const Ints &widths, bool captures, bool apart = false) {
    Mixture l(dims, types, uint32_t(dims.n_expert) * 100 + uint32_t(types.down), apart);
    const std::string what = name(dims, types);
    const Floats x = random_rows(n_base, dims.E);
    const Routed base = run(l, x, false);
    Ints some;
    for (int i = 0; i < std::min(n_base, 6); i++) {
        some.push_back(i * n_base / std::min(n_base, 6));
    }
    bool routes = true;
    const double error = error_of(l, x, base, some, routes);
    printf("  moe %-50s error %.2e\n", what.c_str(), error);
    expect(error < 2e-3, "moe " + what + " is off by " + std::to_string(error));
    expect(routes, "moe routes of " + what);
    check_company(l, x, base, widths, captures, what);
}

// Router rows that are all zero but for one value of v make any choice, since x[0] is the same in all rows.
Mixture &steer(Mixture &l, Floats &x, const Floats &favour) {
    const int64_t E = l.dims.E;
    for (size_t t = 0; t < x.size() / size_t(E); t++) {
        x[t * size_t(E)] = 4;
    }
    l.norm[0] = 1;
    l.d_norm.set(l.norm);
    Floats router(size_t(l.dims.n_expert * E), 0.0f);
    for (int n = 0; n < l.dims.n_expert; n++) {
        router[size_t(n * E)] = favour[size_t(n)];
    }
    l.set_router(router);
    return l;
}

// Checks that ties go to the lowest ids. All rows are on the same experts, and what nobody chose may be
// anything.
void check_choices(int T) {
    const MoeDims dims = {0, 8, 3, 256, 64, 0};
    Mixture l(dims, {8, 8, 8, 8}, 77);
    Floats x = random_rows(T, dims.E);
    steer(l, x, {1, 1, 5, 3, 1, 5, 5, 2});
    const Routed all = run(l, x, true);
    bool ids = true, weights = true;
    for (int t = 0; t < T; t++) {
        ids = ids && all.ids[size_t(t * 3)] == 2 && all.ids[size_t(t * 3 + 1)] == 5 && all.ids[size_t(t * 3 + 2)] == 6;
        for (int r = 0; r < 3; r++) {
            weights = weights && std::fabs(all.weights[size_t(t * 3 + r)] - 1.0f / 3) < 1e-6f;
        }
    }
    expect(ids, "moe takes the lowest of equal experts");
    expect(weights, "moe gives equal experts equal weights");
    bool routes = true;
    expect(error_of(l, x, all, {0, T - 1}, routes) < 2e-3, "moe of rows that all chose the same");
    for (Matrices *m : {&l.gate, &l.up, &l.down}) {
        must(cudaMemset(m->packed.p, 0xff, size_t(2 * m->bytes()))); // this spoils experts 0 and 1
        must(cudaMemset(m->packed.p + 7 * m->bytes(), 0xff, size_t(m->bytes())));
    }
    expect(same_bits(run(l, x, false).out, all.out), "moe reads no expert that nobody chose");
    steer(l, x, {1, 1, INFINITY, 3, 1, 5, 5, 2});
    const Routed bad = run(l, x, true);
    bool first = true, nan = true;
    for (int t = 0; t < T; t++) {
        for (int r = 0; r < 3; r++) {
            first = first && bad.ids[size_t(t * 3 + r)] == r;
            nan = nan && std::isnan(bad.weights[size_t(t * 3 + r)]);
        }
    }
    expect(first && nan, "moe shows a router's logit that is not finite");
}

// Checks ties of more experts than can be told apart at once.
void check_many_ties(int T) {
    const MoeDims dims = {0, 256, 8, 256, 32, 0};
    Mixture l(dims, {8, 8, 8, 8}, 79);
    Floats x = random_rows(T, dims.E), favour(256, 1.0f);
    favour[200] = 2;
    const Routed all = run(steer(l, x, favour), x, true);
    bool ids = true;
    for (int i = 0; i < T * dims.n_used; i++) {
        ids = ids && all.ids[size_t(i)] == (i % dims.n_used == 0 ? 200 : i % dims.n_used - 1);
    }
    expect(ids, "moe takes the lowest of many equal experts at " + std::to_string(T) + " rows");
    favour[100] = -INFINITY;
    const Routed bad = run(steer(l, x, favour), x, true);
    for (int i = 0; i < T * dims.n_used; i++) {
        ids = ids && bad.ids[size_t(i)] == i % dims.n_used;
    }
    expect(ids, "moe takes the first of many experts where a logit is not finite");
}

// Checks rows that share some of many experts, at all ranks, where blocks choose the experts themselves.
void check_common_experts() {
    const MoeDims dims = {0, 232, 3, 512, 160, 96};
    Mixture l(dims, {12, 14, 2, 8}, 81);
    constexpr int MOST = 4;
    const int64_t E = dims.E;
    // The second row is nearly the first, the third like it, and the last one is not.
    const float own[MOST] = {0.0f, 0.01f, 0.5f, 1.0f};
    const Floats common = random_rows(1, E);
    Floats x = random_rows(MOST, E);
    for (size_t i = 0; i < x.size(); i++) {
        const float part = own[i / size_t(E)];
        x[i] = (1 - part) * common[i % size_t(E)] + part * x[i];
    }
    std::vector<Floats> alone;
    for (int t = 0; t < MOST; t++) {
        alone.push_back(run(l, Floats(x.begin() + t * E, x.begin() + (t + 1) * E), false).out);
    }
    for (int T = 2; T <= MOST; T++) {
        const Floats rows(x.begin(), x.begin() + T * E);
        const Routed got = run(l, rows, T == 3);
        std::map<int, int> rows_of; // of each expert
        for (int id : got.ids) {
            rows_of[id]++;
        }
        const auto shared = std::count_if(rows_of.begin(), rows_of.end(), [](const auto &e) { return e.second > 1; });
        expect(T < MOST || (shared > 0 && shared < int(rows_of.size())), "rows have some experts in common, and not all");
        bool routes = true, same = true;
        expect(error_of(l, rows, got, {0, T - 1}, routes) < 2e-3 && routes, "moe of rows with common experts");
        for (int t = 0; t < T; t++) {
            same = same && same_bits(&got.out[size_t(t * E)], alone[size_t(t)].data(), size_t(E));
        }
        expect(same, "moe bits of rows with common experts at " + std::to_string(T) + " rows");
    }
}

// Gives rows to the host and returns its sums as the device has taken them.
Floats taken_back(const MoeDims &dims, const Buffers &b, const Routed &routed, const Floats &values, const Floats &sums) {
    const size_t n = sums.size(), used = size_t(dims.n_used), T = size_t(dims.T);
    void *pinned = nullptr;
    must(cudaMallocHost(&pinned, (2 * n + 2 * T * used + T) * sizeof(float)));
    expect(cuda::is_pinned(pinned), "kernels reach pinned memory");
    float *x = static_cast<float *>(pinned), *out = x + n;
    int32_t *route = reinterpret_cast<int32_t *>(out + n);
    uint32_t *given = reinterpret_cast<uint32_t *>(route + 2 * T * used);
    memset(given, 0, T * sizeof(uint32_t));
    GiveRowsArgs a{dims.T, dims.n_used, dims.E, b.values.p, nullptr, nullptr, x, route, given};
    a.ids = reinterpret_cast<const int32_t *>(b.routed.p + moe_ids_offset(dims));
    a.weights = reinterpret_cast<const float *>(b.routed.p + moe_weights_offset(dims));
    must(cuda::give_rows(a, stream));
    bool ids = true, weights = true;
    for (size_t t = 0; t < T; t++) {
        const volatile uint32_t &here = given[t];
        for (int64_t polls = 0; here == 0 && polls < int64_t(1) << 32; polls++) {
        }
        expect(here == 1, "the host sees that a row is given");
        ids = ids && memcmp(route + 2 * t * used, &routed.ids[t * used], used * 4) == 0;
        weights = weights && memcmp(route + (2 * t + 1) * used, &routed.weights[t * used], used * 4) == 0;
    }
    expect(ids && weights, "moe gives routes to the host");
    expect(memcmp(x, values.data(), n * sizeof(float)) == 0, "moe gives values to the host");
    must(int(cudaStreamSynchronize(stream)));
    memcpy(out, sums.data(), n * sizeof(float));
    Device<float> taken(n);
    for (const auto bring : {cuda::bring, cuda::bring_beside}) {
        taken.poison();
        must(bring(out, taken.p, int64_t(n * sizeof(float)), stream));
        must(int(cudaStreamSynchronize(stream)));
        expect(same_bits(taken.get(), sums), "a copy of pinned memory is there");
    }
    must(cudaFreeHost(pinned));
    return taken.get();
}

// Checks experts that are multiplied elsewhere: route hands out the rows' values, and sum takes the weighted
// sums.
void check_elsewhere(int T) {
    const MoeDims dims = {T, 8, 3, 260, 32, 64};
    Mixture l(dims, {1, 1, 8, 1}, 78);
    l.dims = dims;
    const Floats x = random_rows(T, dims.E);
    Buffers b(dims, x);
    b.enqueue(l, false);
    must(cudaStreamSynchronize(stream));
    const Routed whole = b.get();
    const Floats y = b.y.get(), values = b.values.get();
    Buffers alone(dims, x);
    must(cuda::moe_route({dims, alone.x.p, l.d_norm.p, Mixture::EPS, l.d_router.p, l.d_shared_gate.p, l.counters.p,
                          alone.routed.p, alone.values.p, 0}, stream));
    must(cudaStreamSynchronize(stream));
    const Routed given = alone.get();
    expect(given.ids == whole.ids && same_bits(given.weights, whole.weights) && same_bits(given.open, whole.open),
           "moe routes for experts elsewhere, by route alone");
    Floats sums(x.size(), 0.0f);
    double worst = 0;
    for (int t = 0; t < T; t++) {
        double squares = 0;
        for (int64_t k = 0; k < dims.E; k++) {
            squares += double(x[size_t(t * dims.E + k)]) * x[size_t(t * dims.E + k)];
        }
        for (int64_t k = 0; k < dims.E; k++) {
            const size_t at = size_t(t * dims.E + k);
            const double v = x[at] / std::sqrt(squares / double(dims.E) + Mixture::EPS) * l.norm[size_t(k)];
            worst = std::max(worst, std::fabs(values[at] - v) / (std::fabs(v) + 1e-3));
            for (int r = 0; r < dims.n_used; r++) {
                const size_t place = size_t(t * dims.n_used + r);
                sums[at] = std::fma(whole.weights[place], y[place * size_t(dims.E) + size_t(k)], sums[at]);
            }
        }
    }
    expect(worst < 1e-5, "moe values are off by " + std::to_string(worst));
    const Floats taken = taken_back(dims, b, whole, values, sums);
    expect(same_bits(taken, sums), "moe takes sums back from the host");
    Device<float> d_sums(taken), out(x.size());
    must(cuda::moe_sum({dims, b.routed.p, b.y.p + T * dims.n_used * dims.E, d_sums.p, b.x.p, out.p, nullptr, nullptr, 0}, stream));
    must(cudaStreamSynchronize(stream));
    expect(same_bits(out.get(), whole.out), "moe adds sums that were made elsewhere");
}

// Lays some experts of a matrix in pinned memory of the host and the others behind each other on the device, and spoils what
// they were copied from: a table says where each is.
struct Placed {
    Matrices &m;
    const size_t bytes;
    Device<uint8_t> slots;
    uint8_t *home = nullptr;

    explicit Placed(Matrices &matrices)
        : m(matrices), bytes(size_t(m.bytes())), slots(size_t(m.n) * bytes) {
        must(cudaMallocHost(reinterpret_cast<void **>(&home), size_t(m.n) * bytes));
        must(cudaMemcpy(home, m.packed.p, size_t(m.n) * bytes, cudaMemcpyDeviceToHost));
        must(cudaMemset(m.packed.p, 0xff, size_t(m.n) * bytes));
        m.offsets.resize(size_t(m.n));
    }
    ~Placed() {
        m.offsets.resize(0);
        must(cudaMemcpy(m.packed.p, home, size_t(m.n) * bytes, cudaMemcpyHostToDevice));
        must(cudaFreeHost(home));
    }
    // Expert e is in slot slots_of[e], or at home where that is below zero.
    void place(const Ints &slots_of) {
        std::vector<int64_t> table;
        slots.poison();
        for (int64_t e = 0; e < m.n; e++) {
            const int slot = slots_of[size_t(e)];
            const uint8_t *at = slot < 0 ? home + e * int64_t(bytes) : slots.p + slot * int64_t(bytes);
            if (slot >= 0) {
                must(cudaMemcpy(slots.p + slot * int64_t(bytes), home + e * int64_t(bytes), bytes, cudaMemcpyHostToDevice));
            }
            table.push_back(at - m.packed.p);
        }
        m.offsets.set(table);
    }
};

// Wherever experts lie a row has the same bits, and each is counted that a row has had.
void check_places(MoeDims dims, const Types &types, const Ints &widths) {
    dims.wide = has_wgmma() ? WIDE_ROWS : 0;
    Mixture l(dims, types, uint32_t(dims.n_expert) * 91 + uint32_t(types.gate));
    const std::string what = name(dims, types);
    for (int T : widths) {
        const Floats x = random_rows(T, dims.E);
        const Floats together = run(l, x, T % 2 == 0).out;
        Placed gate(l.gate), up(l.up), down(l.down);
        Ints slots;
        for (int e = 0; e < dims.n_expert; e++) {
            slots.push_back(e % 3 == 0 ? -1 : (e * 5 + T) % dims.n_expert); // 5 and n_expert have no common factor
        }
        for (int turn = 0; turn < 3; turn++) {
            for (Placed *each : {&gate, &up, &down}) {
                each->place(slots);
            }
            expect(same_bits(run(l, x, T % 2 == 0).out, together),
                   "moe bits of experts in places, " + what + " at " + std::to_string(T) + " rows");
            if (turn == 0) { // some go home, and others take their slots
                std::rotate(slots.begin(), slots.begin() + 1, slots.end());
            } else {
                std::fill(slots.begin(), slots.end(), -1);
            }
        }
        l.counts.resize(size_t(dims.n_expert));
        must(cudaMemset(l.counts.p, 0, l.counts.n * sizeof(int32_t)));
        MoeDims d = dims;
        d.T = T;
        Buffers b(d, x);
        b.enqueue(l, false, /*hands_out=*/false);
        must(cudaStreamSynchronize(stream));
        Ints counted(size_t(dims.n_expert), 0);
        for (int id : b.get().ids) {
            counted[size_t(id)]++;
        }
        expect(l.counts.get() == counted, "moe counts experts of " + std::to_string(T) + " rows");
        l.counts.resize(0);
        if (T == 1 && moe_ends_at_once(d, l.down.type, l.down_s.type)) {
            Device<int32_t> ended(Ints(size_t(dims.n_expert), 5));
            b.enqueue_up(l, b.x.p, false, false);
            must(cuda::moe_end({d, l.down.matrix(), l.down_s.matrix(), b.routed.p, b.h.p, b.x.p, b.out.p, false, ended.p}, stream));
            must(cudaStreamSynchronize(stream));
            for (int &n : counted) {
                n += 5;
            }
            expect(ended.get() == counted, "moe counts the experts of one row in one launch");
        }
    }
}

// A layer of no rows launches nothing, and writes nothing.
void check_no_rows() {
    const MoeDims dims = {2, 8, 3, 256, 256, 64};
    Mixture l(dims, {12, 12, 14, 8}, 79);
    Buffers b(dims, random_rows(2, dims.E));
    for (Device<float> *each : {&b.h, &b.y, &b.out, &b.values}) {
        each->poison();
    }
    const Floats h = b.h.get(), y = b.y.get(), out = b.out.get(), values = b.values.get();
    b.dims.T = 0;
    b.enqueue(l, false);
    must(cudaStreamSynchronize(stream));
    expect(same_bits(b.h.get(), h) && same_bits(b.y.get(), y) && same_bits(b.out.get(), out) &&
               same_bits(b.values.get(), values),
           "moe of no rows writes nothing");
}

} // namespace

// With `all` false shapes are small and widths few, for compute-sanitizer and the emulation.
// Launches what waits for a step's experts without the launch that leaves them. What is there is -1, as route leaves it.
bool moe_gives_up() {
    const MoeDims dims = {1, 8, 2, 256, 64, 0};
    Mixture l(dims, {8, 8, 8, 8}, 83);
    const Buffers b(dims, random_rows(1, dims.E));
    must(cuda::moe_end({dims, l.down.matrix(), l.down_s.matrix(), b.routed.p, b.h.p, b.x.p, b.out.p, false}, stream));
    device_lost = cudaStreamSynchronize(stream) != cudaSuccess;
    return device_lost;
}

// Where a device has little shared memory, an item has fewer rows, and a step of more is no longer one of few. The bits are the same.
void check_items_of_fewer_rows() {
    const MoeDims dims = {0, 8, 3, 512, 256, 64};
    const Floats x = random_rows(70, dims.E);
    for (const int T : {1, 2, 3, 4, 5, 8, 9, 33, 70}) {
        const Floats rows(x.begin(), x.begin() + T * dims.E);
        Floats first;
        Mixture l(dims, {12, 12, 14, 8}, 81);
        for (const int most : {8, 4, 2}) {
            l.dims.most = most;
            const Routed out = run(l, rows, false);
            first = most == 8 ? out.out : first;
            expect(same_bits(out.out, first), "moe of " + std::to_string(T) + " rows by items of " + std::to_string(most));
        }
    }
}

MoeDims beside(int n_expert, int n_used, int64_t E, int64_t FF, int64_t dense) {
    MoeDims dims = {0, n_expert, n_used, E, FF, dense};
    dims.dense = 1;
    return dims;
}

void check_moe(bool all) {
    const MoeDims small = {0, 8, 3, 512, 256, 64};
    check_choices(all ? 64 : 11);
    for (int T : {1, 3, 9}) {
        check_many_ties(T);
    }
    check_common_experts();
    check_elsewhere(all ? 40 : 3);
    check_elsewhere(1);
    check_no_rows();
    check_places({0, 8, 3, 512, 256, 64}, {12, 12, 14, 8}, all ? Ints{1, 2, 4, 8, 9, 33, 64} : Ints{1, 2, 3, 9});
    check_places({0, 12, 2, 260, 40, 24}, {1, 0, 30, 1}, {1, 2, MANY_FROM + 5});
    check_places({0, 9, 2, 288, 96, 0}, {1, 1, 1, 1}, {1, 5});
    if (DeviceLimits device; cuda::device_limits(device) == 0 && !device.wgmma) {
        check_items_of_fewer_rows();
    }
    check_mixture(small, {12, 12, 14, 8}, all ? 64 : 10, all ? Ints{1, 2, 3, 7, 8, 9, 16, 17, 33, 64} : Ints{1, 2, 3, 4, 7, 9}, all);
    check_mixture({0, 5, 2, 1060, 40, 24}, {1, 0, 30, 1}, 9, {1, 4, 12, MANY_FROM + 5}, all); // this has 5 chunks in 4 parts
    check_mixture({0, 5, 2, 516, 36, 20}, {1, 0, 30, 1}, 9, {1, 2, 5}, all); // a lane's last values are half of its own
    check_mixture({0, 4, 2, 2304, 32, 32}, {8, 8, 8, 8}, 9, {1, 2}, all); // a row is longer than route reads at once
    check_mixture({0, 240, 8, 128, 64, 32}, {8, 8, 8, 8}, 9, {1, 2, 3, 4}, all); // a block chooses the experts of one row together
    check_mixture({0, 6, 2, 256, 320, 288}, {8, 8, 8, 8}, 9, {1, 2}, all); // the parts of K differ in up and down
    check_mixture({0, 300, 10, 256, 32, 32}, {8, 8, 8, 8}, 9, {1, 2, 3, 6, 7}, all); // 6 rows have 60 pairs, 7 have too many
    // A norm of the router alone, GELU, factors of experts and no residual; rows of no multiple of 256.
    check_mixture({0, 9, 3, 352, 96, 0}, {8, 8, 20, 8}, 9, {1, 2, 5, 10, MANY_FROM}, all, true);
    check_mixture({0, 240, 8, 128, 96, 0}, {8, 8, 6, 8}, 9, {1, 3}, all, true);
    check_mixture({0, 4, 2, 2304, 32, 0}, {8, 8, 8, 8}, 9, {1, 2}, all, true); // likewise a row that is longer
    // A dense layer for the shared expert: wider, so that a block's tasks are of both; of other types and parts of K.
    check_mixture(beside(9, 3, 352, 96, 288), {8, 8, 20, 8}, 9, {1, 2, 3, 5, 8, 9, 10, 64}, all, true);
    check_mixture(beside(240, 8, 264, 40, 520), {1, 0, 30, 1}, 9, {1, 2, 4, 7}, all, true);
    check_mixture(beside(4, 2, 2304, 32, 64), {8, 8, 8, 8}, 5, {1, 2, 9}, all, true);
    check_mixture({0, 6, 2, 256, 512, 64}, {12, 13, 14, 8}, 9, {MANY_FROM + 1}, all); // units of many rows that are quantised
    check_mixture({0, 264, 3, 260, 40, 24}, {1, 0, 30, 1}, 9, {MANY_FROM + 5}, all); // items of many rows, and a tile of route that is not full
    if (!all) {
        return;
    }
    const Ints widths = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 20, 24, 32, 40, 48, 63, 64, 100, 300, 512};
    for (int type : {12, 14, 8, 1, 13}) { // these are Q4_K, Q6_K, Q8_0, F16, Q5_K
        check_mixture({0, 16, 4, 512, 512, 256}, {type, type, type, type}, 64, widths, true);
    }
    Ints every(ROWMM_MAX_ROWS);
    std::iota(every.begin(), every.end(), 1);
    check_mixture({0, 16, 4, 512, 256, 256}, {12, 12, 14, 8}, 64, every, true);
    for (const rowmm_test::Type &t : rowmm_test::TYPES) { // each type is beside another
        check_mixture({0, 4, 1, 256, 512, 256}, {t.id, 12, t.id, t.id}, 20, {1, 5, 40}, true);
        check_mixture({0, 6, 6, 512, 256, 0}, {12, t.id, t.id, 12}, 20, {1, 5, 40}, true);
        if (t.values < 256) {
            check_mixture({0, 4, 2, 288, 96, 32}, {t.id, t.id, t.id, t.id}, 20, {1, 6, 64}, true);
        }
    }
    check_mixture({0, 256, 8, 256, 256, 256}, {12, 12, 14, 8}, 64, widths, true);
    check_mixture({0, 256, 8, 1536, 256, 512}, {12, 14, 12, 8}, 64, {MANY_FROM - 1, MANY_FROM, 700, 2048}, true);
    check_mixture({0, 512, 10, 256, 32, 0}, {8, 8, 8, 8}, 64, {1, 8, 64, 512}, true);
    check_mixture({0, 12, 8, 2048, 512, 512}, {12, 12, 14, 8}, 64, widths, true);
    check_mixture({0, 4, 2, 6144, 1536, 768}, {12, 13, 12, 14}, 64, {1, 2, 9, 64}, true);
    check_mixture({0, 128, 8, 2816, 704, 0}, {12, 12, 8, 8}, 64, {1, 2, 8, 16, 64, MANY_FROM, 700}, true, true);
    check_mixture(beside(128, 8, 2816, 704, 2112), {12, 12, 8, 8}, 64, every, true, true);
}
