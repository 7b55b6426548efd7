// The row of the table of architectures for gemma4 (Gemma 4, text alone).
#pragma once

#include "graph/architecture.h"

namespace luce {

extern const Architecture GEMMA4;

} // namespace luce
