// Launches the ops of a mixture of experts on a GPU (moe/moe.h), over any number of rows. Those of a
// prefill are done MOE_MAX_ROWS at a time, with the arithmetic of a step.
#pragma once

#include "model/model.h"
#include "moe/moe.h"

#include <ggml.h>

namespace luce {

// E_UNSUPPORTED names what the device has no kernel for, of a mixture in the file at `path`. A CPU can run
// all of them.
void check_moe(const Device &device, const char *path, const Moe &moe);

// The dims of a mixture over T rows.
MoeDims dims_of(const Moe &moe, int64_t T);

// These are bits of a param.
constexpr int32_t MOE_FUSED = 1, MOE_VALUES = 2;

// Holds what the params of an op say (ops/row.h). dims.T counts all rows.
struct MoeOp {
    MoeDims dims;
    bool fused; // gate and up are one tensor
    bool values; // route leaves the rows' values too, behind all else: [T][E] F32
    float eps;
};

// These are launchers of the ops moe_route, moe_up, moe_down, moe_end and moe_sum.
int moe_route_op(const ggml_tensor *dst, void *stream, const MoeOp &op);
int moe_up_op(const ggml_tensor *dst, void *stream, const MoeOp &op);
int moe_down_op(const ggml_tensor *dst, void *stream, const MoeOp &op);
int moe_end_op(const ggml_tensor *dst, void *stream, const MoeOp &op);
int moe_sum_op(const ggml_tensor *dst, void *stream, const MoeOp &op);

// Returns the dims of a launch of MOE_MAX_ROWS.
inline MoeDims moe_full(MoeDims dims) {
    dims.T = MOE_MAX_ROWS;
    return dims;
}

// Makes the launches of all rows, until one fails. It calls run(first row, dims of the launch, launches
// before it).
template <class Run> int moe_each_launch(const MoeDims &all, const Run &run) {
    for (int32_t t = 0; t < all.T; t += MOE_MAX_ROWS) {
        MoeDims dims = all;
        dims.T = all.T - t < MOE_MAX_ROWS ? all.T - t : MOE_MAX_ROWS;
        if (const int error = run(t, dims, int64_t(t / MOE_MAX_ROWS)); error != 0) {
            return error;
        }
    }
    return 0;
}

// Returns the bytes of what route leaves of all rows, launch after launch.
int64_t moe_all_routed_bytes(const MoeDims &all);

} // namespace luce
