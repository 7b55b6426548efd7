// Rows of images take the places of embeddings (common/kernels.h).
#pragma once

#include "common/kernels.h"

namespace luce {

void cpu_image_rows(const ImageRowsArgs &args, int ith, int nth);

} // namespace luce
