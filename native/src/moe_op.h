// A mixture of experts on a GPU as graph ops (kernels/moe.h), over any number of rows. Those of a prefill are done
// MOE_MAX_ROWS at a time, with the arithmetic of a step.
#pragma once

#include "../kernels/moe.h"
#include "ops.h"

namespace luce {

// E_UNSUPPORTED names what the device has no kernel for, of a mixture in the file at `path`. A CPU has all.
void check_moe(const Device &device, const char *path, const Moe &moe);

// residual + the mixture of experts of an input {E, T} that is an RMS norm of residual -> {E, T}.
ggml_tensor *moe_on_gpu(const StepBuild &b, const MatmulInput &input, const Moe &w, ggml_tensor *residual);

// What the params of an op say (custom_op.h). dims.T: all rows.
struct MoeOp {
    MoeDims dims;
    bool fused; // gate and up are one tensor
    float eps;
};

// Launchers of the ops moe_route, moe_up, moe_down and moe_sum.
int moe_route_op(const ggml_tensor *dst, void *stream, const MoeOp &op);
int moe_up_op(const ggml_tensor *dst, void *stream, const MoeOp &op);
int moe_down_op(const ggml_tensor *dst, void *stream, const MoeOp &op);
int moe_sum_op(const ggml_tensor *dst, void *stream, const MoeOp &op);

} // namespace luce
