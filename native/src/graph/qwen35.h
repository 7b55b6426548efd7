// The rows of the table of architectures for qwen35 and qwen35moe (Qwen3.5 and Qwen3.6).
#pragma once

#include "graph/architecture.h"

namespace luce {

extern const Architecture QWEN35, QWEN35MOE;

} // namespace luce
