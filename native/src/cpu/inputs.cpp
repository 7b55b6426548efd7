#include "cpu/inputs.h"

#include "cpu/exponential.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace luce {
namespace {

constexpr int LANES = 16; // a sum of squares has as many partial sums
constexpr int64_t BLOCK = 32; // a packed block has so many values

float root_mean_square_inverse(const float *x, int64_t n, float eps) {
    float sums[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            sums[l] = std::fma(x[i + l], x[i + l], sums[l]);
        }
    }
    for (; i < n; i++) {
        sums[i % LANES] = std::fma(x[i], x[i], sums[i % LANES]);
    }
    for (int w = LANES / 2; w > 0; w /= 2) {
        for (int l = 0; l < w; l++) {
            sums[l] += sums[l + w];
        }
    }
    return 1.0f / std::sqrt(sums[0] / float(n) + eps);
}

void norm(const float *__restrict x, const float *__restrict w, int64_t n, float eps, float *__restrict out) {
    const float scale = root_mean_square_inverse(x, n, eps);
    for (int64_t i = 0; i < n; i++) {
        out[i] = x[i] * scale * w[i];
    }
}

// A unit of work is some values of a row: a norm's have one mean, or several that are whole heads.
int64_t unit_of(const RowsInputArgs &a) {
    constexpr int64_t LEAST = 512;
    if (a.up != nullptr) {
        return LEAST;
    }
    return a.S == a.K ? a.K : std::max(LEAST / a.S, int64_t(1)) * a.S;
}

// Makes values k0 .. k1 - 1 of row t.
void make(const RowsInputArgs &a, int64_t t, int64_t k0, int64_t k1) {
    const int64_t row = t * a.K, n = k1 - k0;
    const float *x = a.x + row + k0;
    float *__restrict out = a.values + row + k0;
    if (a.up != nullptr) {
        activate(a.activation, x, a.up + row + k0, n, out);
        return;
    }
    if (a.residual != nullptr) {
        const float *residual = a.residual + row + k0;
        float *__restrict sum = a.sum + row + k0;
        for (int64_t i = 0; i < n; i++) {
            sum[i] = x[i] + residual[i];
        }
        x = sum;
    }
    for (int64_t i = 0; i < n; i += a.S) {
        norm(x + i, a.w, a.S, a.eps, out + i);
    }
    if (a.z != nullptr) {
        const float *z = a.z + row + k0;
        for (int64_t i = 0; i < n; i++) {
            out[i] *= silu(z[i]);
        }
    }
}

} // namespace

void cpu_rows_input(const RowsInputArgs &a, int ith, int nth) {
    const int64_t unit = unit_of(a), units = (a.K + unit - 1) / unit;
    for (int64_t u = ith; u < units * a.T; u += nth) {
        const int64_t t = u / units, k0 = u % units * unit, k1 = std::min(k0 + unit, a.K);
        make(a, t, k0, k1);
        for (int64_t k = k0; a.packed != nullptr && k < k1; k += BLOCK) {
            a.packed[k / BLOCK * a.T + t] = packed_block(a.values + t * a.K + k);
        }
    }
}

} // namespace luce
