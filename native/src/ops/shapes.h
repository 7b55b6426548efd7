// Refuses shapes that luce has no kernels for, of all architectures and drafters alike. What there are kernels for is said by
// the kernels' chapters (sizes.h).
#pragma once

#include "model/model.h"

namespace luce {

// E_UNSUPPORTED names the key, as it follows the architecture's name in the file at `path`, its value, and what luce runs.
void check_attention(const char *path, const AttentionShape &shape,
                     bool gpu_block); // or of a block that a GPU drafts
void check_shapes(const char *path, const HParams &hp);

} // namespace luce
