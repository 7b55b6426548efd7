// Lanes are places in K here: lane l sums the products at l, LANES + l, .. in this order, and the lanes are added
// pairwise at the end.
#include "cpu/matmul_float.h"

#include "cpu/simd.h"

#include <algorithm>

namespace luce {
namespace {

using namespace lanes;

constexpr int COLS = 4, ROWS = 2; // a tile has so many

struct F32 {
    using Value = float;
    LUCE_INLINE Floats values(const Value *w) { return load<Floats>(w); }
};
struct F16 {
    using Value = uint16_t;
    LUCE_INLINE Floats values(const Value *w) { return load_halves(w); }
};
struct Bf16 {
    using Value = uint16_t;
    LUCE_INLINE Floats values(const Value *w) {
        typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
        return (Floats) (__builtin_convertvector(load<Halves>(w), Words) << 16);
    }
};

LUCE_INLINE float total(Floats sum) {
    float part[LANES];
    memcpy(part, &sum, sizeof(part));
    for (int n = LANES / 2; n > 0; n /= 2) {
        for (int l = 0; l < n; l++) {
            part[l] += part[l + n];
        }
    }
    return part[0];
}

// Computes out[c * pitch + r] = scale * w[r] . x[c]. What is left at the end of K is filled with zeros.
template <class Type, int R, int C>
void multiply(const uint8_t *w, size_t row_bytes, const float *x, int64_t K, float scale, float *out,
              int64_t pitch) {
    using Value = typename Type::Value;
    const auto row = [&](int r) { return reinterpret_cast<const Value *>(w + r * row_bytes); };
    Floats sums[R][C] = {};
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES) {
        for (int r = 0; r < R; r++) {
            const Floats values = Type::values(row(r) + k);
            for (int c = 0; c < C; c++) {
                sums[r][c] = fma(values, load<Floats>(x + c * K + k), sums[r][c]);
            }
        }
    }
    const size_t left = size_t(K - k);
    for (int r = 0; r < R && left > 0; r++) {
        Value weights[LANES] = {};
        memcpy(weights, row(r) + k, left * sizeof(Value));
        for (int c = 0; c < C; c++) {
            float values[LANES] = {};
            memcpy(values, x + c * K + k, left * sizeof(float));
            sums[r][c] = fma(Type::values(weights), load<Floats>(values), sums[r][c]);
        }
    }
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++) {
            out[c * pitch + r] = scale * total(sums[r][c]);
        }
    }
}

template <class Type, int R>
void columns(const RowsMatmulArgs &a, const RowsWeight &w, int64_t n, int t0, int t1) {
    const uint8_t *rows = static_cast<const uint8_t *>(w.data) + size_t(n) * w.row_bytes;
    const float *x = static_cast<const float *>(a.x);
    const float scale = w.scale == nullptr ? 1.0f : *w.scale;
    for (int t = t0; t < t1; t += COLS) {
        float *out = w.out + t * w.N + n;
        switch (std::min(COLS, t1 - t)) {
            case 1: multiply<Type, R, 1>(rows, w.row_bytes, x + t * a.K, a.K, scale, out, w.N); break;
            case 2: multiply<Type, R, 2>(rows, w.row_bytes, x + t * a.K, a.K, scale, out, w.N); break;
            case 3: multiply<Type, R, 3>(rows, w.row_bytes, x + t * a.K, a.K, scale, out, w.N); break;
            default: multiply<Type, R, COLS>(rows, w.row_bytes, x + t * a.K, a.K, scale, out, w.N);
        }
    }
}

template <class Type>
void run(const RowsMatmulArgs &a, const RowsWeight &w, int64_t n0, int64_t n1, int t0, int t1) {
    int64_t n = n0;
    for (; n + ROWS <= n1; n += ROWS) {
        columns<Type, ROWS>(a, w, n, t0, t1);
    }
    for (; n < n1; n++) {
        columns<Type, 1>(a, w, n, t0, t1);
    }
}

} // namespace

void multiply_floats(const RowsMatmulArgs &a, const RowsWeight &w, int64_t n0, int64_t n1, int t0, int t1) {
    switch (w.type) {
        case GGML_TYPE_F32: run<F32>(a, w, n0, n1, t0, t1); break;
        case GGML_TYPE_F16: run<F16>(a, w, n0, n1, t0, t1); break;
        default: run<Bf16>(a, w, n0, n1, t0, t1);
    }
}

} // namespace luce
