// Recodes weights for a GPU, as they are uploaded, where its kernels lack the file's type: in one that they have, and
// that holds the same values.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>

namespace luce {

// Returns the type that stands in for a matrix's on a GPU, or that itself: MXFP4 becomes Q5_0 and the ternary types
// Q4_0. What lies between two values of Q5_0 is rounded: E8M0 has powers of two below 2^-24, which F16 has not.
ggml_type recoded_matrix(ggml_type type);

// Returns the same for a table, of which rows are looked up.
ggml_type recoded_table(ggml_type type);

// Recoding of blocks of one type as blocks of another, or a plain copy where they are the same.
struct Recoding {
    ggml_type from, to;

    int64_t values() const {
        return ggml_blck_size(from);
    } // of a unit, which is a whole number of blocks of both
    size_t bytes_from() const { return ggml_type_size(from); }
    size_t bytes_to() const { return ggml_row_size(to, values()); }
};

// Writes n units. To F32 and F16 any type is recoded, and else as recoded_matrix() says; E_ARG is for all others.
void recode(const Recoding &how, const uint8_t *src, uint8_t *dst, size_t n);

} // namespace luce
