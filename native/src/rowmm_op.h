// Makes graph ops of luce's matmul on a GPU, over any number of rows. Those of a prefill are done ROWMM_MAX_ROWS at
// a time, each block of rows as a step of its own.
#pragma once

#include "../kernels/rowmm.h"

#include <ggml.h>

namespace luce {

// Bytes that the packed activations of T rows of K values take.
int64_t rowmm_op_bytes(int64_t T, int64_t K);

// Launchers of the ops rowmm_pack.. and rowmm, rowmm_add (custom_op.h).
int rowmm_pack_op(const ggml_tensor *dst, void *stream, RowmmInput input, float eps);
int rowmm_op(const ggml_tensor *dst, void *stream, int32_t T, bool add);

} // namespace luce
