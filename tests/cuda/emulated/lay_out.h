// Lays out launches of real shapes as each kind of device would be asked for them, and runs none: blocks have to fit its
// shared memory. The kernels have run before, so that what they declare is known.
#pragma once

#include "harness.h"
#include "matmul/layout.h"

namespace {

constexpr int TYPES[] = {TYPE_F32,  TYPE_F16,  TYPE_BF16, TYPE_Q8_0, TYPE_Q4_0, TYPE_Q4_1,   TYPE_Q5_0,  TYPE_Q5_1,
                         TYPE_Q2_K, TYPE_Q3_K, TYPE_Q4_K, TYPE_Q5_K, TYPE_Q6_K, TYPE_IQ4_NL, TYPE_IQ4_XS};
uint8_t *const NOWHERE = reinterpret_cast<uint8_t *>(uintptr_t(1) << 20); // aligned, and never read

inline std::string at(const char *what, int type, int T) {
    return std::string(what) + " of type " + std::to_string(type) + " at " + std::to_string(T) + " rows on " +
           emulated::kind->name;
}

inline void on_each_kind(void (*lay_out)()) {
    emulated::dry = true;
    for (const emulated::DeviceKind &kind : emulated::KINDS) {
        emulated::kind = &kind;
        lay_out();
    }
    emulated::kind = emulated::KINDS;
    emulated::dry = false;
}

} // namespace
