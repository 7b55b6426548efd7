// Launches the ops of a prefill's matmul on a GPU (matmul/prompt.h). A weight matrix is written out as F16 in the cache's
// scratch and multiplied with all rows at once; then the next matrix takes its room. What a row's norm or gate gives is
// packed without being stored.
#pragma once

#include <ggml.h>

#include <cstdint>

namespace luce {

// Writing out all weights pays for at least this many rows. Fewer rows have the step's own matmul (rowmm),
// which takes about as long for this many on an H200. The row count alone decides, so that a resumed prompt
// runs as a cold one.
constexpr int64_t GEMM_ROWS = 128;

// Launchers of the ops gemm_pack.. and gemm.. (ops/row.h).
int gemm_pack_op(const ggml_tensor *dst, void *stream, int32_t input, float eps);
int gemm_op(const ggml_tensor *dst, void *stream);

} // namespace luce
