// Compares the logits of some clusters of a vocabulary with sums in double precision: of tables of each type, of rows of widths
// that fill a warp's pass and that do not. Tokens of other clusters have the one logit that is never chosen.
#include "harness.h"
#include "rowmm_reference.h"
#include "sampling/launch_plan.h"

namespace {

bool looks_up(const rowmm_test::Type &type) {
    return type.id != 20 && type.id != 23; // types with a table of values have no kernel
}

void check_logits(const rowmm_test::Type &type, int64_t E, int T, int clusters, int size, int K) {
    const int n = clusters * size;
    const auto blocks = rowmm_test::random_weights(type.id, E, n, 17);
    const Floats values = rowmm_test::dequantised(type.id, blocks), x = normals(size_t(T) * E);
    Ints order = chain(n + 1), best;
    order.erase(order.begin()); // 0 ..
    std::shuffle(order.begin(), order.end(), rng);
    for (int t = 0; t < T; t++) {
        Ints some = chain(clusters + 1);
        some.erase(some.begin());
        std::shuffle(some.begin(), some.end(), rng);
        best.insert(best.end(), some.begin(), some.begin() + K);
    }
    const Device<uint8_t> table(blocks);
    const Device<float> dx(x);
    const Device<int32_t> dorder(order), dbest(best);
    Device<float> out(size_t(T) * n);
    ClusterLogitsArgs a{};
    a.T = T;
    a.K = K;
    a.E = int32_t(E);
    a.size = size;
    a.type = type.id;
    a.on_gpu = 1;
    a.n = n;
    a.row_bytes = E / type.values * type.bytes;
    a.x = dx.p;
    a.clusters = dbest.p;
    a.table = table.p;
    a.order = dorder.p;
    a.out = out.p;
    const std::string what =
        std::string("cluster_logits of ") + type.name + ", " + std::to_string(E) + " wide";
    if (!looks_up(type)) {
        expect(cuda::cluster_logits(a, stream) != 0, what + " are refused");
        return;
    }
    must(cuda::cluster_logits(a, stream));
    must(cudaStreamSynchronize(stream));
    const Floats got = out.get();
    bool good = true;
    for (int t = 0; t < T; t++) {
        std::vector<bool> seen(static_cast<size_t>(n), false);
        for (int i = 0; i < K * size; i++) {
            seen[size_t(order[size_t(best[size_t(t * K + i / size)]) * size + i % size])] = true;
        }
        for (int v = 0; v < n; v++) {
            double sum = 0, of_sizes = 0;
            for (int64_t k = 0; k < E; k++) {
                const double product = double(x[size_t(t * E + k)]) * values[size_t(v * E + k)];
                sum += product;
                of_sizes += std::abs(product);
            }
            const float logit = got[size_t(t) * n + v];
            good =
                good && (seen[size_t(v)] ? std::abs(logit - sum) <= 1e-6 * of_sizes : logit == NEVER_CHOSEN);
        }
    }
    expect(good, what);
}

} // namespace

void check_clusters(bool all) {
    for (const rowmm_test::Type &type : rowmm_test::TYPES) {
        check_logits(type, 256, 3, 12, 5, 4);
        if (type.values <= 32) {
            check_logits(type, 32, 1, 12, 3, 2);
            check_logits(type, 288, 2, 12, 3, 12);
        }
    }
    check_logits(rowmm_test::type_of(8), 256, 2, 60, CLUSTER_FILLED / 60 + 5, 3); // more than a block fills
    if (all) {
        check_logits(rowmm_test::type_of(8), 256, 9, 2048, 16, 32);
    }
}
