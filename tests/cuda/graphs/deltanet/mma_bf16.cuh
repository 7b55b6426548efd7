// Stands in for kernels/deltanet/mma_bf16.cuh: its kernels are compiled for what is beside them, and not run.
#pragma once

#include <cstdint>

namespace luce {

struct Split {
    uint32_t high, low;
};
Split split(float a, float b);
struct Left {
    uint32_t high[4], low[4];
    Left(const float (&first)[4], const float (&second)[4]);
};
struct Right {
    uint32_t high[4], low[4];
};
void load_matrices(uint32_t (&m)[4], const uint8_t *row);
void load_transposed(uint32_t (&m)[4], const uint8_t *row);
void copy_16(uint8_t *shared, const void *global, bool there);
void copies_wait();
template <int N> void multiply(float (*c)[4], const Left &a, const Right (&b)[N]);

} // namespace luce
