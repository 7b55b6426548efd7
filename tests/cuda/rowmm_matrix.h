// Has weight matrices on the device, and what a launch of rowmm takes besides.
#pragma once

#include "harness.h"
#include "rowmm_reference.h"

namespace rowmm_test {

// Holds one weight matrix, permuted on the device.
struct Matrix {
    int type;
    int64_t K, N;
    Bytes blocks;
    Device<uint8_t> packed;

    Matrix(int type, int64_t K, int64_t N, uint32_t seed)
        : type(type), K(K), N(N), blocks(random_weights(type, K, N, seed)),
          packed(size_t(rowmm_packed_bytes(type, K, N))) {
        Device<uint8_t> src(blocks);
        must(cuda::rowmm_permute({type, K, N, src.p, packed.p}, stream));
        must(cudaStreamSynchronize(stream));
    }
    RowmmWeights weights(float *out) const { return {type, N, packed.p, out, N, nullptr, 0}; }
};

// Makes scratch as an engine has it: its counters are zero and the rest is junk.
struct Scratch {
    Device<uint8_t> memory;
    Scratch() : memory(size_t(cuda::rowmm_scratch_bytes())) { memory.poison(); }
};

inline RowmmPackArgs plain(const Device<float> &x, int T, int64_t K, const Device<uint8_t> &out) {
    RowmmPackArgs a = {};
    a.x = x.p;
    a.x_row = K;
    a.T = T;
    a.K = K;
    a.out = out.p;
    return a;
}

} // namespace rowmm_test
