// Runs a mixture of experts on a GPU, in four launches: route, up, down, sum.
//
//   route  v = RMS(x) * norm; the router's logits, in F32; each row's experts and their weights; the list of work
//   up     h = f(gate v) * (up v) for each row and each of its experts, where f is an activation
//   down   y = down h
//   sum    out = residual + sum over ranks of weight * y + sigmoid(shared gate . v) * y of the shared expert;
//          it may also pack out for the product behind, which norms it
// The router may have a norm of its own, a weight a factor of its expert's, and the sum no residual. Where a mixture stands
// beside a dense layer, that may be the shared expert of a step's launches: then it has no gate, and reads RMS(x) * dense_norm.
// Post takes the place of sum there:
//   post   out = (residual + RMS(RMS(dense) * dense_post + RMS(sum over ranks) * experts_post) * post) * post_scale
//
// A step of few rows needs no list: there up and down choose the experts themselves, each block anew, but for down of very few
// rows, which takes what up has left. Of one row, down and sum may be one launch, end, which packs nothing: the product behind
// it does that itself (RowmmArgs.row).
//
// Rows are grouped by expert on the device, into items of one expert and up to 8 of its rows. Nothing
// synchronises with the host, and the shapes of all launches depend on T and the layer alone, so that all can
// be captured. An item's weights are read once, and items of one expert follow each other, so that memory is
// read once for all of them.
//
// A row's bits are the same at every T, position and company. This is so because a row is one column of the
// tensor core's tile, and its sums are split and ordered by the weights' shapes alone. Weights and
// activations enter products as rowmm's do (matmul/quantised.h). The router's logits are sums of F32 products. An expert
// that nobody chose is not read.
//
// Nothing here knows ggml. Launchers enqueue on `stream` and return a cudaError_t as int. They need sm_80 or
// later.
#pragma once

#include "matmul/quantised.h"

namespace luce {

// A launch has at most so many rows, and so many pairs of a row and an expert of it, which a block of route lists in shared memory.
constexpr int MOE_MAX_ROWS = 2048, MOE_MAX_PAIRS = 16384;
constexpr int MOE_MAX_EXPERTS = 512;
constexpr int MOE_MAX_USED = 32;
constexpr int64_t MOE_MAX_E = 6144, MOE_MAX_FF = 6144; // a block's shared memory holds no more

// Holds what the launches of a layer share.
struct MoeDims {
    int32_t T; // there are 0 .. rows_at_once() rows
    int32_t n_expert, n_used; // a row uses n_used of the n_expert experts
    int32_t
        most; // an item of a step has so many rows at most (moe/plan.h): 8, or fewer where a device has no room for them
    int32_t
        wide; // 0, or wgmma multiplies a prompt's many rows, so many of an expert at most at once (moe/plan.h)
    int32_t dense = 0; // the shared expert is a dense layer, of a step
    int64_t E, FF; // an expert's matrices are {E, FF} twice and {FF, E}; E is a multiple of 4
    int64_t FF_shared; // it is the shared expert's FF, or 0 where there is none

    constexpr MoeDims(int32_t rows = 0, int32_t experts = 0, int32_t used = 0, int64_t e = 0, int64_t ff = 0,
                      int64_t ff_shared = 0, int32_t most_rows = 8, int32_t wide_rows = 0)
        : T(rows), n_expert(experts), n_used(used), most(most_rows), wide(wide_rows), E(e), FF(ff),
          FF_shared(ff_shared) {}

    constexpr int rows_at_once() const {
        return MOE_MAX_PAIRS / n_used < MOE_MAX_ROWS ? MOE_MAX_PAIRS / n_used : MOE_MAX_ROWS;
    }
    constexpr ROWMM_BOTH bool shared() const { return FF_shared > 0; }
    constexpr ROWMM_BOTH bool gated() const { return shared() && dense == 0; }
    // A row has a place for each of its experts, by rank, then all rows have one for the shared expert.
    constexpr ROWMM_BOTH int64_t places() const { return int64_t(T) * (n_used + (shared() ? 1 : 0)); }
    // Returns how many values a place has in h.
    constexpr ROWMM_BOTH int64_t h_row() const { return FF > FF_shared ? FF : FF_shared; }
};

// These say how many bytes route leaves to the other launches, and at which offsets the routes lie in them:
// [T][n_used] I32 expert ids by falling weight, [T][n_used] F32 weights, and [T] F32 sigmoids of the shared
// gate.
int64_t moe_routed_bytes(const MoeDims &dims);
int64_t moe_ids_offset(const MoeDims &dims);
int64_t moe_weights_offset(const MoeDims &dims);
int64_t moe_open_offset(const MoeDims &dims);
// Returns the bytes that down needs besides, for many rows: 0 for few.
int64_t moe_record_bytes(const MoeDims &dims);

// So many bytes must be zero before the first route, and each route leaves them zero.
constexpr int64_t MOE_COUNTER_BYTES = 2048;

struct MoeRouteArgs {
    MoeDims dims;
    const float *x; // [T][E], aligned to 16
    const float *norm; // [E], aligned to 16
    float eps;
    const float *router; // [n_expert][E], aligned to 16
    const float *shared_gate; // [E], aligned to 16; null where no shared expert has a gate
    void *counters; // [MOE_COUNTER_BYTES]; launches that may run at once need their own
    void *routed; // [moe_routed_bytes(dims)], aligned to 16
    float *values; // null, or [T][E]: v is left here as well; aligned to 16
    int32_t overlap; // it means what it does in RowmmArgs
    const float *
        router_norm; // null, or [E], aligned to 16: the router reads RMS(x) * router_norm * router_scale, and not v
    float router_scale;
    const float *dense_norm; // null, or of a dense layer [E], aligned to 16

    ROWMM_BOTH float logit_scale() const { return router_norm != nullptr ? router_scale : 1.0f; }
};

// These are matrices that each expert has one of, packed by rowmm_permute one behind the other.
struct MoeMatrix {
    int32_t type;
    const void *packed; // it is expert 0's, aligned to 16
    int64_t expert_bytes; // one expert's matrix is so far from the next; it is a multiple of 16
    // Null, or [n_expert]: expert e's matrix lies so many bytes from `packed`, a multiple of 16, wherever that is: in slots of the
    // device or in pinned memory of the host, of which the same kernel reads the same bits. Launches that were captured read the
    // table as it is when they run.
    const int64_t *offsets;
};

// In up there are two matrices (gate, up) {E, FF}, and the input h is null. In down there is one {FF, E} in
// `first`.
struct MoeMatmulArgs {
    MoeDims dims;
    MoeMatrix first, second; // they are the routed experts'
    MoeMatrix shared_first, shared_second; // they are the shared expert's, where there is one
    void *routed; // route has left it; of few rows, up adds what they chose
    const float *h; // down: [places][h_row], what up left; aligned to 16
    float *out; // up: h; down: y, [places][E]; aligned to 16
    int32_t overlap;
    void *records; // down: room for h packed, moe_record_bytes(dims); aligned to 16
    int32_t activation; // of up (common/activation.h)
};

struct MoeSumArgs {
    MoeDims dims;
    const void *routed;
    const float *y; // it is aligned to 16, and unused where there are sums and no shared expert
    // Null, or [T][E], aligned to 16: the experts' weighted sums, made elsewhere. Then y is the shared
    // expert's [T][E].
    const float *sums;
    const float *residual; // null, or [T][E], aligned to 16
    float *out; // [T][E], aligned to 16; may be residual
    const float *norm; // [E], aligned to 16; `packed` needs it
    // Null, or [rowmm_x_bytes(T, E)], aligned to 16: `out` is packed here as ROWMM_RMS, with `norm` for its
    // weights. Then T is ROWMM_MAX_ROWS or less.
    void *packed;
    int32_t overlap;
    const float *scales; // null, or [n_expert], by which the weights of experts are multiplied; not of `sums`
    int32_t *counts; // null, or [n_expert]: adds up how often rows have had each expert
};

constexpr int64_t MOE_POST_E = 4096; // a block of post has a row of so many values at most

// Of a step: T is ROWMM_MAX_ROWS or less, and E is what rowmm_adds_up takes. The dense layer is the shared expert, or its results
// are the parts of a launch, and the experts' weighted sums were made elsewhere.
struct MoePostArgs {
    MoeDims dims;
    const void *routed; // as in MoeSumArgs, and so are y, scales and counts
    const float *y; // or where `routed` is null, [T][E], aligned to 16: the experts' weighted sums
    const float *scales;
    int32_t *counts;
    const RowmmArgs *
        parts; // where `routed` is null: the launch that has left the dense layer's results (RowmmArgs.parts)
    const float *residual; // [T][E], aligned to 16
    const float *dense_post, *experts_post, *post; // [E], aligned to 16
    float eps, post_scale;
    float *out; // [T][E], aligned to 16
    const float *norm; // `packed` needs it, and both are as in MoeSumArgs
    void *packed;
    int32_t overlap;
};

struct MoeEndArgs {
    MoeDims dims; // T is 1
    MoeMatrix down, shared_down;
    const void *routed; // route has left it, and the launch ahead, up, adds what the row chose
    const float *h; // what up left; aligned to 16
    const float *residual; // [E], aligned to 16
    float *out; // [E], aligned to 16
    int32_t overlap;
    int32_t *counts; // as in MoeSumArgs
};

namespace cuda {
int moe_route(const MoeRouteArgs &args, void *stream);
int moe_up(const MoeMatmulArgs &args, void *stream);
int moe_down(const MoeMatmulArgs &args, void *stream);
int moe_sum(const MoeSumArgs &args, void *stream);
int moe_post(const MoePostArgs &args, void *stream);
// It does what down and sum do of one row, with the same bits.
int moe_end(const MoeEndArgs &args, void *stream);
} // namespace cuda

} // namespace luce
