// Computes what gates of FFNs become, in double precision.
#pragma once

#include <cmath>

inline double silu(double x) {
    return x / (1 + std::exp(-x));
}
inline double gelu(double x) {
    return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
