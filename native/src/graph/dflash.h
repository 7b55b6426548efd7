// The row of the table of drafters for DFlash: a block diffusion drafter, in a file of its own.
#pragma once

#include "graph/drafter.h"

namespace luce {

extern const DrafterKind DFLASH;

} // namespace luce
