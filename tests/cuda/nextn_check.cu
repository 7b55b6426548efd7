// Checks the norms around the NextN head: what a step keeps against double precision, and the packed input against
// rowmm_pack of two kept rows side by side. Rows that a step does not keep stay as they are.
#include "harness.h"
#include "matmul/quantised.h"
#include "rowmm_reference.h"

namespace {

// Returns the head's input, which starts out as poison.
std::vector<uint8_t> packed_input(const NextnPackArgs &args) {
    Device<uint8_t> packed(size_t(rowmm_x_bytes(args.T, 2 * args.E)));
    NextnPackArgs a = args;
    a.out = packed.p;
    must(cuda::nextn_pack(a, stream));
    must(cudaStreamSynchronize(stream));
    return packed.get();
}

void check_rows(int T, int64_t E) {
    const int n = T + 5;
    const float eps = 1e-6f;
    const Floats x = normals(size_t(T) * E, 3.0f), w = normals(size_t(E)), before = normals(size_t(n) * E);
    std::vector<int64_t> to;
    Ints from, order = chain(n + 1); // -1, 0 ..
    std::shuffle(order.begin() + 1, order.end(), rng);
    for (int t = 0; t < T; t++) {
        to.push_back(order[size_t(t) + 1]);
        from.push_back(pick(n));
    }
    const Device<float> rows(x), norm(w), e_norm(normals(size_t(E)));
    const Device<int64_t> hidden_to(to);
    const Device<int32_t> hidden_from(from);
    Device<float> hidden(before);
    const std::string what = "of " + std::to_string(T) + " rows of " + std::to_string(E);
    must(cuda::keep_hidden({T, E, E, eps, rows.p, norm.p, hidden_to.p, hidden.p}, stream));
    must(cudaStreamSynchronize(stream));
    const Floats kept = hidden.get();
    Floats expected = before;
    double worst = 0;
    for (int t = 0; t < T; t++) {
        double sum = 0;
        for (int64_t i = 0; i < E; i++) {
            sum += double(x[t * E + i]) * x[t * E + i];
        }
        for (int64_t i = 0; i < E; i++) {
            const double value = x[t * E + i] / std::sqrt(sum / double(E) + eps) * w[size_t(i)];
            const size_t at = size_t(to[size_t(t)] * E + i);
            worst = std::fmax(worst, std::fabs(kept[at] - value));
            expected[at] = kept[at];
        }
    }
    expect(worst < 1e-5, "hidden rows " + what + " are off by " + std::to_string(worst));
    expect(same_bits(kept, expected), "hidden rows " + what + ": another row has changed");

    // each half of the input, as keep_hidden computes it
    Device<float> of_e(size_t(T) * E), of_h(size_t(T) * E), gathered(size_t(T) * E);
    Floats h, both;
    std::vector<int64_t> same;
    for (int t = 0; t < T; t++) {
        h.insert(h.end(), kept.begin() + from[size_t(t)] * E, kept.begin() + (from[size_t(t)] + 1) * E);
        same.push_back(t);
    }
    gathered.set(h);
    const Device<int64_t> in_order(same);
    must(cuda::keep_hidden({T, E, E, eps, rows.p, e_norm.p, in_order.p, of_e.p}, stream));
    must(cuda::keep_hidden({T, E, E, eps, gathered.p, norm.p, in_order.p, of_h.p}, stream));
    must(cudaStreamSynchronize(stream));
    const Floats e_values = of_e.get(), h_values = of_h.get();
    for (int t = 0; t < T; t++) {
        both.insert(both.end(), e_values.begin() + t * E, e_values.begin() + (t + 1) * E);
        both.insert(both.end(), h_values.begin() + t * E, h_values.begin() + (t + 1) * E);
    }
    const Device<float> values(both);
    Device<uint8_t> plain(size_t(rowmm_x_bytes(T, 2 * E)));
    RowmmPackArgs pack{};
    pack.x = values.p;
    pack.x_row = pack.K = 2 * E;
    pack.T = T;
    pack.out = plain.p;
    must(cuda::rowmm_pack(pack, stream));
    // Row t has token t, which is given for even rows and a draft for the others.
    Ints tokens, drafts;
    for (int t = 0; t < T; t++) {
        tokens.push_back(t % 2 == 0 ? t : -1 - t);
        drafts.insert(drafts.end(), {t, 0});
    }
    const Device<int32_t> given(tokens), drafted(drafts);
    const NextnPackArgs args = {T,         E,        eps,           0,        T,      4 * E,  rows.p, given.p,
                                drafted.p, hidden.p, hidden_from.p, e_norm.p, norm.p, nullptr};
    expect(packed_input(args) == plain.get(), "the NextN head's input " + what);
}

// A table of a type gives what a table of its values in F32 gives. A draft beyond the vocabulary is token 0.
void check_table(const rowmm_test::Type &type) {
    constexpr int64_t E = 768;
    constexpr int T = 5, V = 4;
    const auto blocks = rowmm_test::random_weights(type.id, E, V, 17);
    const Device<uint8_t> table(blocks);
    const Device<float> values(rowmm_test::dequantised(type.id, blocks)), hidden(normals(size_t(E), 2.0f)),
        e_norm(normals(size_t(E))), h_norm(normals(size_t(E)));
    const Device<int32_t> tokens(Ints{3, -1, 1, 2, -2}), drafts(Ints{2, 0, V, 0}), from(Ints(T, 0));
    NextnPackArgs args = {T,        E,        1e-6f,    type.id,  V,      E / type.values * type.bytes,
                          table.p,  tokens.p, drafts.p, hidden.p, from.p, e_norm.p,
                          h_norm.p, nullptr};
    expect(nextn_has_table(type.id) == (type.id != 20 && type.id != 23),
           "tables of " + std::string(type.name));
    if (nextn_has_table(type.id)) {
        const auto found = packed_input(args);
        args.type = 0;
        args.row_bytes = 4 * E;
        args.table = values.p;
        expect(found == packed_input(args), "embeddings of " + std::string(type.name));
    }
}

} // namespace

void check_nextn(bool all) {
    for (const rowmm_test::Type &type : rowmm_test::TYPES) {
        check_table(type);
    }
    for (const int64_t E : {256, 768, 5120, 8704}) {
        for (const int T : {1, 3, 17, 40}) {
            if (all || T * E < 40000) {
                check_rows(T, E);
            }
        }
    }
    for (int T = 1; all && T <= MAX_ROWS; T++) {
        check_rows(T, 512);
    }
}
