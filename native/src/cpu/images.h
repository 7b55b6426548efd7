// Rows of images take the places of embeddings.
#pragma once

#include <cstdint>

namespace luce {

struct ImageRowsArgs {
    int64_t T, E;
    const float *x; // [T][E] embeddings
    const int64_t *rows; // [T] the address of the E values of a row of an image, else 0
    float *out; // [T][E]
};

void cpu_image_rows(const ImageRowsArgs &args, int ith, int nth);

} // namespace luce
