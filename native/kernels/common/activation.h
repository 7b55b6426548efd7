// Says by which function the gate of a gated feed-forward layer opens: f(gate) * up.
#pragma once

#include <stdint.h>

namespace luce {

enum Activation : int32_t {
    SILU = 0, // x * sigmoid(x)
    GELU = 1, // by tanh: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
};

} // namespace luce
