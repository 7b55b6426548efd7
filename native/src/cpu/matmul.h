// Multiplies the weights of a matrix with the rows of a step or a prefill on the CPU. Each weight is unpacked once
// for up to 8 rows. A product of a weight row and a step's row is the same sequence of operations at any number of
// rows and threads, so its bits are the same too.
#pragma once

#include "exchange/exchange.h"

#include <ggml.h>

#include <cstdint>

namespace luce {

constexpr int MAX_WEIGHTS = 4; // one op has at most this many

// A block is 32 activations, rounded to 8 bits, and takes a cache line. One that is not finite has q 0 and d
// NaN, so that all results of its row are NaN.
struct PackedBlock {
    int8_t q[32];
    float d; // x = d * q
    int32_t minus[3]; // they are the negated sums of q: of the first 16, the last 16, all
    float minus_real[3]; // they are the same times d
    int32_t unused;
};
static_assert(sizeof(PackedBlock) == 64, "a block must be a cache line");

PackedBlock packed_block(const float *x); // it packs 32 values

// pack_rows takes x [T][K] F32 and gives blocks [K/32][T].
struct PackArgs {
    const float *x;
    int64_t K;
    int32_t T;
    PackedBlock *out;
};

// A RowsWeight is one of the matrices that have the same input.
struct RowsWeight {
    const void *data;
    ggml_type type;
    int64_t N;
    size_t row_bytes;
    float *out; // [T][N]
    const float *scale = nullptr; // the products are times this, where there is one
};

struct RowsMatmulArgs {
    RowsWeight weights[MAX_WEIGHTS];
    int32_t n_weights;
    int64_t K;
    int32_t T;
    const void *x; // it has packed blocks, or [T][K] F32 for F32, F16 and BF16 weights
};

// Returns factors of a weight's products, one for each of its matrices, or null where there are none.
inline const float *scales_of(const ggml_tensor *weight) {
    return static_cast<const float *>(weight->extra);
}

// Returns the matrices of a tensor whose data is at `address`.
inline RowsWeight rows_weight(const ggml_tensor &w, const uint8_t *address) {
    return {address, w.type, w.ne[1], w.nb[1], nullptr, scales_of(&w)};
}
inline void take(RowsWeight &weight, const ggml_tensor &w, const uint8_t *address) {
    weight = rows_weight(w, address);
}
// Makes two matrices of one that holds the rows of the first and then those of the second.
inline void split_rows(RowsWeight &first, RowsWeight &second) {
    first.N /= 2;
    second = first;
    second.data = static_cast<const uint8_t *>(first.data) + size_t(first.N) * first.row_bytes;
}

// RowsInput says how rows_matmul takes the activations for a weight type.
enum class RowsInput { none, packed, f32 };
RowsInput rows_input(ggml_type type); // none means that it does not multiply this type

// As many weight rows are multiplied together, so the shares of threads begin at multiples of it.
constexpr int ROWS_GROUP = 16;

// Fetches what multiply_rows reads of rows n0 .. n1 - 1 before its own fetches are ahead.
void fetch_rows(const RowsWeight &w, int64_t n0, int64_t n1);

// Multiplies rows n0 .. n1 - 1 of w with all rows of the step, where n0 is a multiple of ROWS_GROUP.
void multiply_rows(const RowsMatmulArgs &args, const RowsWeight &w, int64_t n0, int64_t n1);

void cpu_pack_rows(const PackArgs &args, int ith, int nth);
void cpu_rows_matmul(const RowsMatmulArgs &args, int ith, int nth);
void cpu_add_parts(const AddPartsArgs &args, int ith, int nth);
void cpu_gather_parts(const GatherPartsArgs &args, int ith, int nth);

} // namespace luce
