// Makes graph ops of luce's matmul on a GPU, over any number of rows. Those of a prefill are done ROWMM_MAX_ROWS at
// a time, each block of rows as a step of its own.
#pragma once

#include "matmul/quantised.h"

#include <ggml.h>

#include <vector>

namespace luce {

// Returns the bytes that the packed activations of T rows of K values take.
int64_t rowmm_op_bytes(int64_t T, int64_t K);

// Returns the bytes of the parts that a step of T rows leaves of these weights.
int64_t rowmm_parts_op_bytes(int64_t T, const std::vector<ggml_tensor *> &weights);

// This is what an engine's launches share, in the order in which it lies in Cache::rowmm_scratch().
struct LaunchScratch {
    void *partial; // RowmmArgs.scratch
    void *turns; // DeltaLayerArgs.turns
    void *counters; // MoeRouteArgs.counters
};
int64_t launch_scratch_bytes();
LaunchScratch launch_scratch(const ggml_tensor *scratch);

// These are launchers of the ops rowmm_pack.. and of those whose input is parts, rowmm.. (ops/row.h).
// `normed` and `eps` say how x was packed.
int rowmm_pack_op(const ggml_tensor *dst, void *stream, RowmmInput input, float eps);
int rowmm_parts_rms_op(const ggml_tensor *dst, void *stream);
int rowmm_parts_swiglu_op(const ggml_tensor *dst, void *stream);
struct RowmmOp {
    int32_t T, normed;
    float eps;
};
RowmmOp rowmm_op_of(const ggml_tensor *dst); // it reads the op from its params
int rowmm_op(const ggml_tensor *dst, void *stream); // it runs rowmm and rowmm_add
int rowmm_parts_op(const ggml_tensor *dst, void *stream);
RowmmArgs parts_launch(const ggml_tensor *node); // it fills the launch of a rowmm_parts

} // namespace luce
