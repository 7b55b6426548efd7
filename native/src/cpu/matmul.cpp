#include "cpu/matmul.h"

#include "cpu/dequantise.h"
#include "cpu/matmul_float.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace luce {
namespace {

using namespace lanes;

constexpr int TILE = 8; // as many rows of a step share an unpacked weight

// A tile is LANES rows of a weight matrix with some rows of a step.
struct Tile {
    Rows rows;
    int64_t n_blocks;     // K / 32
    const PackedBlock *x; // it points at the first of the step's rows
    int64_t x_pitch; // it counts blocks from one 32 of K to the next
    float *out; // it points at the first row of both
    int64_t out_pitch; // it counts values from one row of the step to the next
    int n; // as many weight rows are wanted
    float scale; // the sums are times this
};

template <int COLS> LUCE_INLINE void store(const Tile &t, const Floats *sums) {
    for (int c = 0; c < COLS; c++) {
        const Floats scaled = sums[c] * all(t.scale);
        memcpy(t.out + c * t.out_pitch, &scaled, size_t(t.n) * sizeof(float));
    }
}

// Adds to sums[c] the products of one block of 32 of each weight row with that of column c.
template <class Type, int COLS>
LUCE_INLINE void add_block(Floats *sums, const Words *w, const Scales &s, int block, const PackedBlock *x) {
    constexpr int GROUPS = 32 / Type::GROUP, WORDS = 8 / GROUPS;
    for (int c = 0; c < COLS; c++) {
        for (int g = 0; g < GROUPS; g++) {
            const int sum_of = GROUPS == 1 ? 2 : g;
            Ints product = all(Type::BIAS == 0 ? 0 : x[c].minus[sum_of]) * Type::BIAS;
            product = dot<Type::SIGNED, Type::MOST>(product, w + g * WORDS, x[c].q + 4 * g * WORDS, WORDS);
            const int at = block * GROUPS + g;
            sums[c] = fma(to_float(product), s.scale[at] * all(x[c].d), sums[c]);
            if (Type::MIN) {
                sums[c] = fma(s.min[at], all(x[c].minus_real[sum_of]), sums[c]);
            }
        }
    }
}

template <class Type, int COLS> void multiply(const Tile &t) {
    Floats sums[COLS] = {};
    const PackedBlock *x = t.x;
    Rows rows = t.rows;
    const uint8_t *ahead = t.rows.row(2 * LANES); // it is the group of rows after the next, from end to end
    for (int64_t b = 0; b < t.n_blocks; b += 8, rows.base += Type::BYTES) {
        const int n = int(std::min<int64_t>(8, t.n_blocks - b));
        Scales s;
        Type::scales(rows, n, s);
        Type::each(rows, n, [&](int block, const Words *w) {
            prefetch(ahead, LANES * Type::BYTES / 8);
            ahead += LANES * Type::BYTES / 8;
            add_block<Type, COLS>(sums, w, s, block, x + block * t.x_pitch);
        });
        x += n * t.x_pitch;
    }
    store<COLS>(t, sums);
}

using Multiply = void (*)(const Tile &);

// Returns the functions by their number of columns.
template <class Type, int... I> const Multiply *table(std::integer_sequence<int, I...>) {
    static const Multiply entries[] = {multiply<Type, I + 1>...};
    return entries;
}

const Multiply *kernels(ggml_type type) {
    constexpr auto columns = std::make_integer_sequence<int, TILE>();
    switch (type) {
        case GGML_TYPE_Q8_0: return table<Q8_0>(columns);
        case GGML_TYPE_Q4_0: return table<Q4_0>(columns);
        case GGML_TYPE_Q4_1: return table<Q4_1>(columns);
        case GGML_TYPE_Q5_0: return table<Q5_0>(columns);
        case GGML_TYPE_Q5_1: return table<Q5_1>(columns);
        case GGML_TYPE_IQ4_NL: return table<Iq4Nl>(columns);
        case GGML_TYPE_IQ4_XS: return table<Iq4Xs>(columns);
        case GGML_TYPE_Q2_K: return table<Q2_K>(columns);
        case GGML_TYPE_Q3_K: return table<Q3_K>(columns);
        case GGML_TYPE_Q4_K: return table<Q4_K>(columns);
        case GGML_TYPE_Q5_K: return table<Q5_K>(columns);
        case GGML_TYPE_Q6_K: return table<Q6_K>(columns);
        case GGML_TYPE_MXFP4: return table<Mxfp4>(columns);
        case GGML_TYPE_NVFP4: return table<Nvfp4>(columns);
        case GGML_TYPE_TQ1_0: return table<Tq1_0>(columns);
        case GGML_TYPE_TQ2_0: return table<Tq2_0>(columns);
        default: return nullptr;
    }
}

// Returns the rows n0 .. n0 + LANES - 1 of a matrix. Where there are fewer, zeros stand for the rest.
Rows group_rows(const RowsWeight &w, int64_t n0, std::vector<uint8_t> &scratch) {
    const uint8_t *first = static_cast<const uint8_t *>(w.data) + size_t(n0) * w.row_bytes;
    const int64_t n = std::min<int64_t>(LANES, w.N - n0);
    if (n == LANES) {
        return {first, w.row_bytes};
    }
    scratch.assign(LANES * w.row_bytes, 0);
    memcpy(scratch.data(), first, size_t(n) * w.row_bytes);
    return {scratch.data(), w.row_bytes};
}

void run_packed(const RowsMatmulArgs &a, const RowsWeight &w, int64_t n0, int t0, int t1) {
    static thread_local std::vector<uint8_t> scratch;
    const Multiply *run = kernels(w.type);
    Tile t{};
    t.rows = group_rows(w, n0, scratch);
    t.n_blocks = a.K / 32;
    t.x_pitch = a.T;
    t.out_pitch = w.N;
    t.n = int(std::min<int64_t>(LANES, w.N - n0));
    t.scale = w.scale == nullptr ? 1.0f : *w.scale;
    for (int c = t0; c < t1; c += TILE) {
        t.x = static_cast<const PackedBlock *>(a.x) + c;
        t.out = w.out + c * w.N + n0;
        run[std::min(TILE, t1 - c) - 1](t);
    }
}

} // namespace

PackedBlock packed_block(const float *x) {
    uint32_t magnitude[32], most = 0;
    memcpy(magnitude, x, sizeof(magnitude));
    for (int i = 0; i < 32; i++) {
        most = std::max(most, magnitude[i] & 0x7fffffffu);
    }
    float largest;
    memcpy(&largest, &most, sizeof(largest));
    PackedBlock out{};
    if (most >= 0x7f800000u) { // this is infinite or NaN
        out.d = out.minus_real[0] = out.minus_real[1] = out.minus_real[2] = NAN;
        return out;
    }
    if (largest < 1e-34f) { // its inverse may be infinite, and it is as good as zeros
        return out;
    }
    const float inverse = 127.0f / largest;
    const float shift = 12582912.0f; // this is 1.5 * 2^23: adding it rounds to an integer
    int32_t q[32], sums[2] = {};
    for (int i = 0; i < 32; i++) {
        q[i] = int32_t((x[i] * inverse + shift) - shift);
    }
    for (int i = 0; i < 32; i++) {
        out.q[i] = int8_t(q[i]);
    }
    for (int i = 0; i < 16; i++) {
        sums[0] += q[i];
        sums[1] += q[16 + i];
    }
    out.d = largest / 127.0f;
    const int32_t all_sums[3] = {sums[0], sums[1], sums[0] + sums[1]};
    for (int i = 0; i < 3; i++) {
        out.minus[i] = -all_sums[i];
        out.minus_real[i] = out.d * float(-all_sums[i]);
    }
    return out;
}

RowsInput rows_input(ggml_type type) {
    if (type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16) {
        return RowsInput::f32;
    }
    return kernels(type) != nullptr ? RowsInput::packed : RowsInput::none;
}

void cpu_pack_rows(const PackArgs &a, int ith, int nth) {
    const int64_t n_blocks = a.K / 32, total = n_blocks * a.T;
    for (int64_t i = total * ith / nth; i < total * (ith + 1) / nth; i++) {
        const int64_t block = i / a.T, row = i % a.T;
        a.out[i] = packed_block(a.x + row * a.K + block * 32);
    }
}

static_assert(ROWS_GROUP % LANES == 0, "a group must be whole lanes");

void fetch_rows(const RowsWeight &w, int64_t n0, int64_t n1) {
    const size_t n = size_t(std::min<int64_t>(2 * LANES, n1 - n0)) * w.row_bytes;
    prefetch(static_cast<const uint8_t *>(w.data) + size_t(n0) * w.row_bytes, n);
}

void multiply_rows(const RowsMatmulArgs &a, const RowsWeight &w, int64_t n0, int64_t n1) {
    if (rows_input(w.type) != RowsInput::packed) {
        multiply_floats(a, w, n0, n1, 0, a.T);
        return;
    }
    for (int64_t n = n0; n < n1; n += LANES) {
        run_packed(a, w, n, 0, a.T);
    }
}

// Each part is a contiguous share of the groups of LANES rows of all matrices. Rows of a prefill go through
// it some at a time, so that they stay in a cache while the weights pass by.
void cpu_rows_matmul(const RowsMatmulArgs &a, int ith, int nth) {
    constexpr int ROWS_AT_ONCE = 64;
    int64_t total = 0;
    for (int i = 0; i < a.n_weights; i++) {
        total += (a.weights[i].N + LANES - 1) / LANES;
    }
    const int64_t begin = total * ith / nth, end = total * (ith + 1) / nth;
    int64_t before = 0;
    for (int i = 0; i < a.n_weights; i++) {
        const RowsWeight &w = a.weights[i];
        const int64_t n = (w.N + LANES - 1) / LANES;
        const int64_t first = std::max<int64_t>(begin - before, 0), last = std::min(end - before, n);
        for (int t = 0; t < a.T; t += ROWS_AT_ONCE) {
            const int t1 = std::min(a.T, t + ROWS_AT_ONCE);
            for (int64_t g = first; g < last; g++) {
                if (rows_input(w.type) == RowsInput::packed) {
                    run_packed(a, w, g * LANES, t, t1);
                } else {
                    multiply_floats(a, w, g * LANES, std::min((g + 1) * LANES, w.N), t, t1);
                }
            }
        }
        before += n;
    }
}

void cpu_add_parts(const AddPartsArgs &a, int ith, int nth) {
    const int64_t n = a.E * a.T, begin = n * ith / nth, end = n * (ith + 1) / nth;
    for (int64_t i = begin; i < end; i++) {
        float sum = a.parts[0][i];
        for (int32_t rank = 1; rank < a.n_parts; rank++) {
            sum += a.parts[rank][i];
        }
        a.out[i] = a.x == nullptr ? sum : a.x[i] + sum;
    }
}

void cpu_gather_parts(const GatherPartsArgs &a, int ith, int nth) {
    for (int64_t t = a.T * ith / nth; t < a.T * (ith + 1) / nth; t++) {
        float *out = a.out + t * a.V;
        for (int32_t part = 0; part < a.n_parts; out += a.n[part++]) {
            memcpy(out, a.parts[part] + t * a.n[part], size_t(a.n[part]) * sizeof(float));
        }
    }
}

} // namespace luce
