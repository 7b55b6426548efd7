// The vision tower of Gemma 4's 12B, whose projector_type is gemma4uv.
#pragma once

#include "graph/vision.h"

namespace luce {

extern const TowerKind GEMMA_UNIFIED_TOWER;

} // namespace luce
