// The row of the table of drafters for Gemma 4's assistants (MTP), which have files of their own.
#pragma once

#include "graph/drafter.h"

namespace luce {

extern const DrafterKind ASSISTANT;

} // namespace luce
