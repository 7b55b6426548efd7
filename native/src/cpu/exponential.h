// Computes e^x for the CPU's ops without a call or a branch, so that loops over it become vector code. A value's bits do
// not depend on its place in such a loop.
#pragma once

#include "common/activation.h"

#include <cmath>
#include <cstdint>
#include <cstring>

namespace luce {

// Returns e^x, to 2 ulp: 0 far down, infinity far up, NaN of NaN.
inline float exponential(float x) {
    const float shift = 12582912.0f; // this is 1.5 * 2^23: adding it rounds to an integer
    const float above = x < -104.0f ? -104.0f : x, clamped = above > 89.0f ? 89.0f : above;
    const float n = std::fma(clamped, 1.44269504f, shift) - shift;
    const float r = std::fma(n, -1.42860677e-6f, std::fma(n, -0.693145752f, clamped)); // |r| <= ln(2)/2
    float y = 1.38888889e-3f;
    y = std::fma(y, r, 8.33333333e-3f);
    y = std::fma(y, r, 4.16666667e-2f);
    y = std::fma(y, r, 1.66666667e-1f);
    y = std::fma(y, r, 0.5f);
    y = std::fma(y, r, 1.0f);
    y = std::fma(y, r, 1.0f);
    // There are two factors, since neither 2^-150 nor 2^128 is a number.
    const int32_t exponent = n == n ? int32_t(n) : 0;
    const int32_t half = exponent >> 1;
    const uint32_t low = uint32_t(half + 127) << 23, high = uint32_t(exponent - half + 127) << 23;
    float a, b;
    memcpy(&a, &low, sizeof(a));
    memcpy(&b, &high, sizeof(b));
    return y * a * b;
}

inline float sigmoid(float x) {
    return 1.0f / (1.0f + exponential(-x));
}

inline float silu(float x) {
    return x / (1.0f + exponential(-x));
}

// Returns GELU by tanh, since (1 + tanh(u)) / 2 = sigmoid(2 u). It is exact but for rounding: ggml's looks up a table of F16.
inline float gelu(float x) {
    const float twice = 1.59576912f * std::fma(0.044715f * x * x, x, x); // 2 sqrt(2 / pi) (x + 0.044715 x^3)
    return x / (1.0f + exponential(-twice));
}

// Computes out[i] = f(gate[i]) * up[i], where out may be gate.
inline void activate(Activation f, const float *gate, const float *up, int64_t n, float *out) {
    if (f == GELU) {
        for (int64_t i = 0; i < n; i++) {
            out[i] = gelu(gate[i]) * up[i];
        }
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        out[i] = silu(gate[i]) * up[i];
    }
}

} // namespace luce
