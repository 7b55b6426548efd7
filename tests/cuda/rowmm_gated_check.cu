// Checks that a product which gates and packs heads itself (rowmm_rows_gated.cu) leaves the parts that two launches leave.
#include "harness.h"
#include "rowmm_reference.h"

using namespace rowmm_test;

namespace {

void check_gated(int type, int64_t K, int64_t N, int head, int T) {
    Device<uint8_t> blocks(random_weights(type, K, N, uint32_t(70 + type)));
    Device<uint8_t> weights(size_t(rowmm_packed_bytes(type, K, N))), packed(size_t(rowmm_x_bytes(T, K)));
    must(cuda::rowmm_permute({type, K, N, blocks.p, weights.p}, stream));
    Floats values = normals(size_t(T) * K);
    values[size_t(pick(int(values.size())))] = 1e20f;
    // Some gates are far from 1, or zero. A launch divides for two gates of a lane together, and the product for eight.
    Floats gates = normals(size_t(T) * (K + 64), 3.0f);
    const float extreme[] = {0.0f, -0.0f, 90.0f, -90.0f, 1e-30f, -79.9f, 80.0f, 1e4f};
    for (size_t i = 0; i < gates.size(); i += 29) {
        gates[i] = extreme[i / 29 % 8];
    }
    // Rows lie further from each other than they are long.
    const Device<float> x(values), y(gates), w(normals(size_t(head)));
    RowmmPackArgs input = {};
    input.x = x.p;
    input.x_row = K;
    input.T = T;
    input.K = K;
    input.out = packed.p;
    input.input = ROWMM_HEAD_RMS;
    input.head = head;
    input.eps = 1e-6f;
    input.w = w.p;
    input.y = y.p;
    input.y_row = K + 64;
    input.overlap = 1;
    Floats results[2];
    for (int one : {0, 1}) {
        packed.poison();
        RowmmArgs a = {};
        a.T = T;
        a.K = K;
        a.x = packed.p;
        a.overlap = 1;
        a.n_weights = 1;
        a.weights[0] = {type, N, weights.p, nullptr, N, nullptr, 0};
        Device<float> parts(size_t(rowmm_parts_bytes(a)) / sizeof(float));
        parts.poison();
        a.parts = parts.p;
        if (one == 0) {
            must(cuda::rowmm_pack(input, stream));
            must(cuda::rowmm(a, stream));
        } else {
            a.input = &input;
            must(cuda::rowmm(a, stream));
        }
        must(cudaStreamSynchronize(stream));
        results[one] = parts.get(); // what no range has is poison in both
    }
    expect(same_bits(results[0], results[1]),
           "rowmm_gated of " + std::string(type_of(type).name) + " " + std::to_string(K) + " -> " +
               std::to_string(N) + ", heads of " + std::to_string(head) + ", " + std::to_string(T) + " rows");
}

} // namespace

void check_rowmm_gated(bool all) {
    for (int T : {1, 2, 3, 5, 8, 9}) {
        check_gated(14, 1024, 904, 128, T);
        if (all) {
            check_gated(12, 6144, 5120, 128, T);
            check_gated(13, 4096, 2560, 128, T);
        }
    }
    for (int T : {1, 3}) {
        check_gated(12, 1024, 1500, 128, T); // the emulated device's ranges have more chunks than a block packs
        check_gated(8, 512, 400, 256, T);
        check_gated(8, 320, 200, 32, T); // the last chunk is cut
        check_gated(0, 512, 40, 16, T); // a unit is a part of a chunk
        check_gated(12, 256, 64, 64, T); // there are fewer units than a multiprocessor has ranges
    }
}
