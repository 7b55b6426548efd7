#include "cpu/cluster_logits.h"

#include <ggml.h>

#include <algorithm>
#include <vector>

namespace luce {
namespace {

// Sums are of every 16th product, so that a compiler may take several at once.
float dot_of(const float *x, const float *w, int32_t n) {
    constexpr int32_t SUMS = 16;
    float sums[SUMS] = {}, sum = 0;
    int32_t i = 0;
    for (; i + SUMS <= n; i += SUMS) {
        for (int32_t j = 0; j < SUMS; j++) {
            sums[j] += x[i + j] * w[i + j];
        }
    }
    for (; i < n; i++) {
        sums[i % SUMS] += x[i] * w[i];
    }
    for (const float part : sums) {
        sum += part;
    }
    return sum;
}

} // namespace

// A thread has a range of tokens, of whatever clusters they are.
void cpu_cluster_logits(const ClusterLogitsArgs &a, int ith, int nth) {
    const int64_t begin = a.n * ith / nth, end = a.n * (ith + 1) / nth;
    const auto to_float = ggml_get_type_traits(ggml_type(a.type))->to_float;
    std::vector<float> weights(static_cast<size_t>(a.E));
    for (int32_t t = 0; t < a.T; t++) {
        const float *x = a.x + int64_t(t) * a.E;
        float *out = a.out + int64_t(t) * a.n;
        std::fill(out + begin, out + end, NEVER_CHOSEN);
        for (int32_t i = 0; i < a.K * a.size; i++) {
            const int32_t cluster = a.clusters[int64_t(t) * a.K + i / a.size];
            const int32_t token = a.order[int64_t(cluster) * a.size + i % a.size];
            if (token < begin || token >= end) {
                continue;
            }
            const auto *row = static_cast<const uint8_t *>(a.table) + token * a.row_bytes;
            const float *w = weights.data();
            if (a.type == GGML_TYPE_F32) {
                w = reinterpret_cast<const float *>(row);
            } else {
                to_float(row, weights.data(), a.E);
            }
            out[token] = dot_of(x, w, a.E);
        }
    }
}

} // namespace luce
