// The vision tower of Gemma 4: blocks as its text has, a table of positions for each axis, and rows of 3 x 3 patches.
#pragma once

#include "graph/vision.h"

namespace luce {

extern const TowerKind GEMMA_TOWER;

} // namespace luce
