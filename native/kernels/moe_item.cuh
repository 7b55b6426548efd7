// Multiplies pieces of an expert's weights, by one warp, with the rows of an item (moe_plan.h), each a column of
// the tensor core's tile.
#pragma once

#include "rowmm_multiply.cuh"

namespace luce {

// Adds the products of a unit, counted along K, with a row of activations, which is the lane's own column's, to
// acc.
template <int TYPE>
__device__ __forceinline__ void multiply_item(Sums<1> &acc, const uint8_t *fragment, const uint8_t *row,
                                              int of_row, int lane) {
    constexpr int UNITS = units_of_chunk(TYPE);
    const uint8_t *chunk = row + of_row / UNITS * chunk_bytes(1);
    const int unit = of_row % UNITS;
    constexpr int VALUES = 8 / units_of_chunk(TYPE) * 64; // a unit's activations have so many bytes
    const uint8_t *tail = chunk + chunk_sums(1);
    const float own = word_at<float>(tail + 32);
    const float down[2] = {__shfl_sync(~0u, own, lane % 4 * 8), __shfl_sync(~0u, own, lane % 4 * 8 + 4)};
    Sums<1> c = {};
    float minimums[4] = {}, factor[2] = {1, 1}, minimum_factor[2] = {};
    if constexpr (is_float_type(TYPE)) {
        multiply_floats<TYPE, 1>(c, fragment, chunk + unit * VALUES, 1, lane);
    } else {
        Lane<TYPE> weights;
        weights.load(fragment, lane);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            Fields<bits_of(TYPE)> f[2];
            f[0].load(fragment, 2 * h, lane);
            f[1].load(fragment, 2 * h + 1, lane);
            weights.half(h);
            multiply_half<TYPE, 1>(c, weights, f, chunk, h, 1, lane);
        }
        factor[0] = weights.factor(0), factor[1] = weights.factor(1);
        if constexpr (has_minimum(TYPE)) {
            const uint2 sums = word_at<uint2>(tail + lane % 4 * 8);
            const uint32_t m0 = weights.minimum(0), m1 = weights.minimum(1);
            mma(minimums, m0, m1, m0, m1, sums.x, sums.y);
            minimum_factor[0] = weights.minimum_factor(0), minimum_factor[1] = weights.minimum_factor(1);
        }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float x = c[0][k];
        if constexpr (has_super(TYPE)) {
            x *= factor[k / 2];
        }
        if constexpr (has_minimum(TYPE)) {
            x = fmaf(-minimum_factor[k / 2], minimums[k], x);
        }
        acc[0][k] = fmaf(x, down[k % 2], acc[0][k]);
    }
}

__device__ __forceinline__ void multiply_any(int type, Sums<1> &acc, const uint8_t *fragment,
                                             const uint8_t *row, int unit, int lane) {
    switch (type) {
        case TYPE_F32: multiply_item<TYPE_F32>(acc, fragment, row, unit, lane); break;
        case TYPE_F16:
        case TYPE_BF16: multiply_item<TYPE_F16>(acc, fragment, row, unit, lane); break;
        case TYPE_Q4_0: multiply_item<TYPE_Q4_0>(acc, fragment, row, unit, lane); break;
        case TYPE_Q4_1: multiply_item<TYPE_Q4_1>(acc, fragment, row, unit, lane); break;
        case TYPE_Q5_0: multiply_item<TYPE_Q5_0>(acc, fragment, row, unit, lane); break;
        case TYPE_Q5_1: multiply_item<TYPE_Q5_1>(acc, fragment, row, unit, lane); break;
        case TYPE_Q8_0: multiply_item<TYPE_Q8_0>(acc, fragment, row, unit, lane); break;
        case TYPE_Q2_K: multiply_item<TYPE_Q2_K>(acc, fragment, row, unit, lane); break;
        case TYPE_Q3_K: multiply_item<TYPE_Q3_K>(acc, fragment, row, unit, lane); break;
        case TYPE_Q4_K: multiply_item<TYPE_Q4_K>(acc, fragment, row, unit, lane); break;
        case TYPE_Q5_K: multiply_item<TYPE_Q5_K>(acc, fragment, row, unit, lane); break;
        case TYPE_Q6_K: multiply_item<TYPE_Q6_K>(acc, fragment, row, unit, lane); break;
        case TYPE_IQ4_NL: multiply_item<TYPE_IQ4_NL>(acc, fragment, row, unit, lane); break;
        default: multiply_item<TYPE_IQ4_XS>(acc, fragment, row, unit, lane); break;
    }
}

} // namespace luce
