// Says what launchers ask of the pointers that they are given: kernels read and write 16 bytes at once.
#pragma once

#include <stdint.h>

namespace luce {

// Returns whether a pointer is aligned to 16. One that may be left out is null, which is.
inline bool aligned(const void *p) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

// Returns whether a pointer is there and aligned to 16.
inline bool given(const void *p) {
    return p != nullptr && aligned(p);
}

} // namespace luce
