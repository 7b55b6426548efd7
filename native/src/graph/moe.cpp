// Builds the graph of a mixture of experts: the router, the experts of each row, their weighted sum, and the
// shared expert.
#include "ops/moe.h"
#include "cpu/inputs.h"
#include "cpu/matmul.h"
#include "graph/blocks.h"
#include "ops/row.h"
#include "step/host_experts.h"

namespace luce {
namespace {

// Returns x as luce's own op takes it for weights of this type.
ggml_tensor *experts_input(const StepBuild &b, ggml_tensor *x, ggml_type type) {
    return rows_input(type) == RowsInput::packed ? packed_rows(b, x) : x;
}

// Returns whether luce's own op multiplies these experts. Two matrices of one op take x in the same form.
bool has_own_op(const Moe &w) {
    const ggml_tensor *first = w.gate_up != nullptr ? w.gate_up : w.gate;
    const ggml_tensor *second = w.gate_up != nullptr ? w.gate_up : w.up;
    return rows_input(first->type) != RowsInput::none &&
           rows_input(first->type) == rows_input(second->type) && rows_input(w.down->type) != RowsInput::none;
}

void check_no_scales(const Moe &w) {
    for (const ggml_tensor *weight : {w.gate, w.up, w.gate_up, w.down}) {
        if (weight != nullptr && scales_of(weight) != nullptr) {
            fail(LUCE_E_UNSUPPORTED, "experts of %s have scales, and matrices beside them are of other types",
                 weight->name);
        }
    }
}

// Takes x {E, T} to each row's results of its experts {E, n_used*T}, by luce's own op.
ggml_tensor *experts_of_luce(const StepBuild &b, ggml_tensor *x, ggml_tensor *route, const Moe &w) {
    const int64_t pairs = int64_t(w.shape.n_used) * x->ne[1];
    ggml_tensor *first = w.gate_up != nullptr ? w.gate_up : w.gate;
    ggml_tensor *args[] = {route, experts_input(b, x, first->type), first, w.up};
    const int32_t up[] = {0, w.gate_up != nullptr}, down[] = {1, 0};
    ggml_tensor *h = add_op(b.ctx, *find_op("experts"), GGML_TYPE_F32, w.shape.n_ff, pairs, args,
                            w.gate_up != nullptr ? 3 : 4, up, 2); // {FF, n_used*T}
    ggml_tensor *last[] = {route, experts_input(b, h, w.down->type), w.down};
    return add_op(b.ctx, *find_op("experts"), GGML_TYPE_F32, x->ne[0], pairs, last, 3, down, 2);
}

// Does the same by ggml.
ggml_tensor *experts_of_ggml(const StepBuild &b, ggml_tensor *x, ggml_tensor *route, const Moe &w) {
    ggml_context *ctx = b.ctx;
    check_no_scales(w);
    const int64_t E = x->ne[0], T = x->ne[1], used = w.shape.n_used;
    ggml_tensor *ids = ggml_view_2d(ctx, route, used, T, route->nb[1], 0); // {n_used, T}
    const auto product = [&](ggml_tensor *weight, ggml_tensor *rows) {
        ggml_tensor *y = ggml_mul_mat_id(ctx, weight, rows, ids);
        ggml_prec_set_acc(y, GGML_PREC_F32);
        return y;
    };
    x = ggml_reshape_3d(ctx, x, E, 1, T);
    ggml_tensor *h; // {FF, n_used, T}
    if (w.gate_up != nullptr) {
        ggml_tensor *y = product(w.gate_up, x); // {2*FF, n_used, T}
        h = ggml_swiglu(ctx, y);
    } else {
        h = ggml_swiglu_split(ctx, product(w.gate, x), product(w.up, x));
    }
    return ggml_reshape_2d(ctx, product(w.down, h), E, used * T);
}

} // namespace

Stream moe(const StepBuild &b, const Stream &s, const Moe &w, const Norm &next) {
#ifdef LUCE_USE_CUDA
    if (b.model.device().gpu) {
        return (w.in_ram ? moe_beside_ram : moe_on_gpu)(b, s, w, next);
    }
#endif
    ggml_context *ctx = b.ctx;
    ggml_tensor *x = input_values(b, s.normed);
    const int64_t E = x->ne[0], T = x->ne[1];
    // What the experts take of x, and what says how they are mixed. A shared expert comes first.
    std::vector<ggml_tensor *> gates = {w.router};
    if (w.shared_gate != nullptr) {
        gates.push_back(w.shared_gate);
    }
    gates = matmuls(b, gates, plain(x)); // {n, T}, {1, T}
    ggml_tensor *route =
        add_op(ctx, "route", GGML_TYPE_I32, 2 * w.shape.n_used, T, {gates[0]}); // it has ids, then weights
    ggml_tensor *shared = nullptr;
    if (w.shared_gate != nullptr) {
        const auto y = matmuls(b, {w.shared.gate, w.shared.up}, plain(x)); // {FF, T}
        shared = matmul(b, w.shared.down, swiglu(y[0], y[1]));
    }
    ggml_tensor *y;
    if (w.in_ram) {
        y = ram_experts_of(b, route, x, w, E, T);
    } else {
        y = has_own_op(w) ? experts_of_luce(b, x, route, w) : experts_of_ggml(b, x, route, w);
        y = add_op(ctx, "experts_sum", GGML_TYPE_F32, E, T, {route, y});
    }
    if (shared != nullptr) {
        y = add_op(ctx, "add_shared", GGML_TYPE_F32, E, T, {y, shared, gates[1]});
    }
    return add_rows(b, y, s.x, next);
}

} // namespace luce
