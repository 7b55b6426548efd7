// Makes launches of graph ops around the NextN head on a GPU (kernels/nextn.cu). eps is that of the norms.
#pragma once

#include "common/kernels.h"

#include <ggml.h>

namespace luce {

int nextn_pack_op(const ggml_tensor *dst, void *stream, float eps);
int keep_hidden_op(const ggml_tensor *dst, void *stream, float eps);

} // namespace luce
