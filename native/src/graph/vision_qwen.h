// The vision tower of Qwen3.5 and its kin: LayerNorm, biases, a resampled table of positions, and rows of 2 x 2 patches.
#pragma once

#include "graph/vision.h"

namespace luce {

extern const TowerKind QWEN_TOWER;

} // namespace luce
