// Makes parts of a product's results, so that what adds them up is checked without a product.
#pragma once

#include "harness.h"
#include "matmul/plan.h"

namespace {

// Holds parts of a launch's results: random numbers where a range has a part of a tile, NaN elsewhere.
struct Parts {
    RowmmArgs args = {};
    RowmmParts layout = {};
    Floats values;
    std::vector<Floats> sums; // each weight has its own [T][N]
    Device<float> device{0};

    Parts(int T, int64_t K, const std::vector<std::pair<int, int64_t>> &weights) {
        args.T = T;
        args.K = K;
        for (const auto &[type, N] : weights) {
            args.weights[args.n_weights++] = {type, N, nullptr, nullptr, N, nullptr, 0};
        }
        values.assign(size_t(rowmm_parts_bytes(args)) / sizeof(float), NAN);
        must(cudaFree(device.p));
        must(cudaMalloc(reinterpret_cast<void **>(&device.p), values.size() * sizeof(float)));
        device.n = values.size();
        args.parts = device.p;
        must(rowmm_parts_of(args, layout));
        for (int i = 0; i < args.n_weights; i++) {
            fill(i);
        }
        device.set(values);
    }
    void fill(int weight) {
        const int64_t N = args.weights[weight].N;
        const auto &w = layout.weights[weight];
        Floats sum(size_t(args.T) * N);
        for (int tile = 0; tile * TILE < N; tile++) {
            const int begin = w.first_unit + tile * w.units_k, end = begin + w.units_k;
            for (int r = 0; r < layout.ranges; r++) {
                if (layout.first[r] >= end || layout.first[r + 1] <= begin) {
                    continue;
                }
                for (int t = 0; t < args.T; t++) {
                    const int64_t row =
                        t / layout.set * layout.set_size +
                        (int64_t(r + w.first_tile + tile) * layout.rows + t % layout.set) * TILE;
                    const Floats random = normals(TILE);
                    for (int64_t n = tile * TILE; n < std::min<int64_t>(N, (tile + 1) * TILE); n++) {
                        // a column's numbers have their own size, so that lanes differ
                        const float x = random[size_t(n % TILE)] * (n % 37 == 0 ? 64.0f : 1.0f);
                        values[size_t(row + n % TILE)] = x;
                        sum[size_t(t * N + n)] += x;
                    }
                }
            }
        }
        sums.push_back(sum);
    }
};

} // namespace
