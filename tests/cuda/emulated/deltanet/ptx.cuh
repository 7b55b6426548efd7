// Stands in for native/kernels/deltanet_ptx.cuh.
#pragma once

#include <cuda_runtime.h>

namespace luce {

inline float pick(bool c, float a, float b) {
    return c ? a : b;
}
template <typename T> void store_back(void *to, T from) {
    memcpy(to, &from, sizeof(from));
}
inline void prefetch_line(const void *) {}

} // namespace luce
