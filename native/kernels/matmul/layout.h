// Says how rowmm lays out weights and activations, as plain sizes and offsets for host and device.
//
// The tensor core multiplies tiles of 16 outputs x 16 k by 16 k x 8 rows. Which k are the 16 of one step is
// ours to choose. Of each block of 256, thread t of a group of four (t = lane % 4) has k = 64 t .. 64 t + 63,
// four a step. So a lane meets only the quantisation scales of its own 64 values, and reads them in whole
// words.
//
// Weights are tiles of 128 outputs, and the last tile of a matrix has as many sixteenths as it needs. A tile
// is a run of units along K, and a unit is a run of fragments of 16 outputs. A unit is 256 k wide, of F16 and
// BF16 64, of F32 32, so that all have about as many bytes. After the last unit of BF16 and F32 weights comes
// one F32 power of two for each output.
//
// Activations have a chunk for each 256 k, of C columns (rows of the step, padded):
//   F16 values times the column's power of two, k = 64 t + 4 i .. + 3 being what thread t needs in step i:
//     narrow [8 pairs of steps][C][4 t][8], as a lane of mma.sync reads them, or
//     wide   [16 steps][2 of their pairs][C / 8][8 columns][4 t][2], as wgmma reads them from shared memory
//   F16 [C][4 t][2 hi, 2 lo]: sums of the values over k = 64 t .. + 31 and 64 t + 32 .. + 63, as hi + lo
//   F32 [C or more]: one over the column's power of two
// Behind all chunks of inputs that are normed come F32 [rows][chunks], the sums of squares before the norm. A
// kernel has up to 32 rows of narrow chunks (more rows are several sets of chunks), or 64 of wide ones.
#pragma once

#include "matmul/quantised.h"

namespace luce {

// These are ggml's numbers.
enum GgmlType : int32_t {
    TYPE_F32 = 0,
    TYPE_F16 = 1,
    TYPE_Q4_0 = 2,
    TYPE_Q4_1 = 3,
    TYPE_Q5_0 = 6,
    TYPE_Q5_1 = 7,
    TYPE_Q8_0 = 8,
    TYPE_Q2_K = 10,
    TYPE_Q3_K = 11,
    TYPE_Q4_K = 12,
    TYPE_Q5_K = 13,
    TYPE_Q6_K = 14,
    TYPE_IQ4_NL = 20,
    TYPE_IQ4_XS = 23,
    TYPE_BF16 = 30,
};

constexpr int FRAGMENT = 16; // a fragment has so many outputs
constexpr int TILE = 128; // a tile has so many outputs
constexpr int FRAGMENTS = TILE / FRAGMENT;
constexpr int CHUNK = 256; // a chunk spans so many values of K

constexpr ROWMM_BOTH bool is_float_type(int type) {
    return type == TYPE_F32 || type == TYPE_F16 || type == TYPE_BF16;
}
// Returns how many values a ggml block has.
constexpr ROWMM_BOTH int block_values(int type) {
    switch (type) {
        case TYPE_F32:
        case TYPE_F16:
        case TYPE_BF16: return 1;
        case TYPE_Q4_0:
        case TYPE_Q4_1:
        case TYPE_Q5_0:
        case TYPE_Q5_1:
        case TYPE_Q8_0:
        case TYPE_IQ4_NL: return 32;
        case TYPE_Q2_K:
        case TYPE_Q3_K:
        case TYPE_Q4_K:
        case TYPE_Q5_K:
        case TYPE_Q6_K:
        case TYPE_IQ4_XS: return 256;
        default: return 0;
    }
}
// These return the bytes of 256 values in ggml's layout, and in ours. A type that is not known has 0.
constexpr ROWMM_BOTH int chunk_weight_bytes(int type) {
    switch (type) {
        case TYPE_F32: return 1024;
        case TYPE_F16:
        case TYPE_BF16: return 512;
        case TYPE_Q4_0:
        case TYPE_IQ4_NL: return 144;
        case TYPE_Q4_1: return 160;
        case TYPE_Q5_0: return 176;
        case TYPE_Q5_1: return 192;
        case TYPE_Q8_0: return 272;
        case TYPE_Q2_K: return 84;
        case TYPE_Q3_K: return 110;
        case TYPE_Q4_K: return 144;
        case TYPE_Q5_K: return 176;
        case TYPE_Q6_K: return 210;
        case TYPE_IQ4_XS: return 136;
        default: return 0;
    }
}
// A chunk has 2^unit_shift() units.
constexpr ROWMM_BOTH int unit_shift(int type) {
    return type == TYPE_F32 ? 3 : is_float_type(type) ? 2 : 0;
}
constexpr ROWMM_BOTH int units_of_chunk(int type) {
    return 1 << unit_shift(type);
}
// Returns the bytes of a fragment, which has 16 outputs of one unit.
constexpr ROWMM_BOTH int fragment_bytes(int type) {
    return FRAGMENT * chunk_weight_bytes(type) / units_of_chunk(type);
}
constexpr ROWMM_BOTH bool has_output_scale(int type) {
    return type == TYPE_F32 || type == TYPE_BF16;
}

constexpr ROWMM_BOTH int64_t chunks_of(int64_t K) {
    return (K + CHUNK - 1) / CHUNK;
}
constexpr ROWMM_BOTH int64_t fragments_of(int64_t N) {
    return (N + FRAGMENT - 1) / FRAGMENT;
}
constexpr ROWMM_BOTH int64_t tiles_of(int64_t N) {
    return (N + TILE - 1) / TILE;
}

// Returns where the fragment of outputs 16 n16 .. + 15 begins in packed weights, for unit u along K.
constexpr ROWMM_BOTH int64_t fragment_offset(int type, int64_t units_k, int64_t N, int64_t n16, int64_t u) {
    const int64_t tile = n16 / FRAGMENTS, left = fragments_of(N) - tile * FRAGMENTS;
    const int64_t wide = left < FRAGMENTS ? left : FRAGMENTS; // this tile has so many fragments
    return (tile * FRAGMENTS * units_k + u * wide + n16 % FRAGMENTS) * fragment_bytes(type);
}
// Returns where the outputs' powers of two begin, which is after the last unit.
constexpr ROWMM_BOTH int64_t output_scale_offset(int type, int64_t K, int64_t N) {
    return fragments_of(N) * chunks_of(K) * units_of_chunk(type) * fragment_bytes(type);
}

// ---- activations ----

constexpr int SET = 32; // a set of narrow chunks has so many rows
// Up to 8 rows have 1, 2, 4 or 8 columns, whose kernels know where each lies (matmul/forms.cu). On an H200 a step of the 27b of 2 rows
// took 5.14 ms so and 5.29 by a kernel of any number of columns. Kernels of 3 and of 5 columns saved 0.03 and 0.05 ms more
// (bench/results/2026-11-23-few-rows-h200.txt).
constexpr ROWMM_BOTH int few_columns(int T) {
    return T <= 2 ? T : T <= 4 ? 4 : 8;
}
struct RowsLayout {
    int columns; // the functions below call it C
    int set; // one set of chunks has so many rows
    bool wide; // up to 16 rows mma.sync is faster than wgmma, which has more to do between its products

    ROWMM_BOTH RowsLayout(int T, bool has_wgmma)
        : columns(T <= 8                   ? few_columns(T)
                  : T <= 16                ? 16
                  : T <= SET || !has_wgmma ? SET
                                           : ROWMM_MAX_ROWS),
          set(T > SET && has_wgmma ? ROWMM_MAX_ROWS : SET), wide(T > 16 && has_wgmma) {}
};
// Returns the offset of the sums in a chunk of activations.
constexpr ROWMM_BOTH int chunk_sums(int C) {
    return 512 * C;
}
// Returns the bytes of a chunk's sums and scales.
constexpr ROWMM_BOTH int chunk_tail(int C) {
    return 32 * C + (C < 8 ? 32 : 4 * C);
}
constexpr ROWMM_BOTH int chunk_bytes(int C) {
    return chunk_sums(C) + chunk_tail(C);
}
// Returns the offset of the sums of squares behind the chunks of T rows.
inline ROWMM_BOTH int64_t squares_offset(int T, int64_t K) {
    // wide chunks give the same
    return (T + SET - 1) / SET * chunks_of(K) * chunk_bytes(RowsLayout(T, false).columns);
}

} // namespace luce
