// Builds the graph of a mixture of experts: the router, the experts of each row, their weighted sum, and the
// shared expert.
#include "ops/moe.h"

#include "graph/blocks.h"
#include "moe/launch_plan.h"
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
    ggml_tensor *first = w.gate_up != nullptr ? w.gate_up : w.gate;
    ExpertsArgs up{}, down{};
    up.n_weights = 2; // they are apart, or fused
    down.own_input = true;
    down.n_weights = 1;
    ggml_tensor *h = ops::experts_matmul(b.ctx, {route, experts_input(b, x, first->type), first, w.up},
                                         up); // {FF, n_used*T}
    return ops::experts_matmul(b.ctx, {route, experts_input(b, h, w.down->type), w.down}, down);
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

// Returns each row's weighted sum of its experts' results {E, T}, of experts in host memory. On a GPU `routed` is what
// ram_give gives, and x is null.
ggml_tensor *ram_experts_of(const StepBuild &b, ggml_tensor *routed, ggml_tensor *x, const Moe &w,
                            int64_t T) {
    RamExpertsArgs a{};
    a.T = int32_t(T);
    a.n_used = int32_t(w.shape.n_used);
    return ops::ram_experts(b.ctx, {routed, x, w.down, w.gate_up != nullptr ? w.gate_up : w.gate, w.up}, a);
}

} // namespace

#ifdef LUCE_USE_CUDA
namespace {

MoeDims dims_of(const Moe &w, int64_t E, int64_t T) {
    const int64_t shared = w.shared_gate == nullptr ? 0 : w.shared.gate->ne[1];
    return {int32_t(T), int32_t(w.shape.n_expert), int32_t(w.shape.n_used), E, w.shape.n_ff, shared};
}

// Holds what the nodes of a layer on a GPU share (moe/moe.h).
struct Layer {
    const StepBuild &b;
    const MatmulInput &input;
    const Moe &w;
    MoeDims dims;
    ggml_tensor *x; // {E, T}

    Layer(const StepBuild &build, const Stream &s, const Moe &moe)
        : b(build), input(s.normed), w(moe), dims(dims_of(moe, s.x->ne[0], s.x->ne[1])),
          x(ggml_is_contiguous(s.x) ? s.x : ggml_cont(build.ctx, s.x)) {
        if (input.kind != ROWMM_RMS || input.x != s.x) {
            fail(LUCE_E_INTERNAL, "a mixture of experts takes its input's norm itself");
        }
    }
    // Returns the params of an op that has the dims alone.
    template <class A> A args() const {
        A a{};
        a.dims = dims;
        return a;
    }
    ggml_tensor *route() const {
        auto a = args<MoeRouteArgs>();
        a.eps = input.eps;
        return (w.in_ram ? ops::moe_route_values : ops::moe_route)(
                   b.ctx, {x, input.w, b.cache.rowmm_scratch(), w.router, w.shared_gate}, a)
            .node;
    }
    // Adds what the experts gave, and of a step packs the sums as the next product takes them. `sums` may be null.
    Stream sum(const Norm &next, ggml_tensor *routed, ggml_tensor *y, ggml_tensor *sums) const {
        const OpNode made = (b.prefill() ? ops::moe_sum_prompt : ops::moe_sum)(
            b.ctx, {routed, y, x, next.weight, sums}, args<MoeSumArgs>());
        ggml_tensor *out = made[0]; // {E, T}
        const MatmulInput normed = rms(out, next.weight, next.eps);
        if (!b.prefill()) {
            made_input(b, normed, true, [&] { return made[1]; });
        }
        return {out, normed};
    }
};

} // namespace

// s.x + the mixture of experts of s.normed, which is an RMS norm of s.x.
static Stream moe_on_gpu(const StepBuild &b, const Stream &s, const Moe &w, const Norm &next) {
    const Layer layer(b, s, w);
    const MoeDims &dims = layer.dims;
    ggml_tensor *routed = layer.route();
    ggml_tensor *h = ops::moe_up(
        b.ctx, {routed, w.gate_up != nullptr ? w.gate_up : w.gate, w.up, w.shared.gate, w.shared.up},
        layer.args<MoeMatmulArgs>());
    const int32_t shared_type = dims.shared() ? w.shared.down->type : w.down->type;
    if (!b.prefill() && moe_ends_at_once(dims, w.down->type, shared_type)) {
        // It polls for what up leaves, so no launch comes between (overlap.cuh).
        ggml_tensor *out = ops::moe_end(b.ctx, {routed, h, w.down, layer.x, w.shared.down},
                                        layer.args<MoeEndArgs>()); // {E, 1}
        return {out, rms(out, next.weight, next.eps)};
    }
    // Of very few rows this polls too.
    ggml_tensor *y = ops::moe_down(b.ctx, {routed, h, w.down, w.shared.down}, layer.args<MoeMatmulArgs>());
    return layer.sum(next, routed, y, nullptr);
}

// The same where the experts are in host memory. The shared expert is the device's. It lies between the way to the host and
// the host's part, which so runs beside it: sources come in a graph's order.
static Stream moe_beside_ram(const StepBuild &b, const Stream &s, const Moe &w, const Norm &next) {
    const Layer layer(b, s, w);
    ggml_tensor *routed = layer.route();
    ggml_tensor *given = ops::ram_give(b.ctx, {routed}, layer.args<RamGiveArgs>());
    ggml_build_forward_expand(b.graph, given); // it is the next node
    ggml_tensor *sums = ram_experts_of(b, given, nullptr, w, layer.dims.T);
    ggml_tensor *shared = sums; // these stand in where there is no shared expert
    if (layer.dims.shared()) {
        const auto gates = matmuls(b, {w.shared.gate, w.shared.up}, s.normed);
        shared = matmul(b, w.shared.down, swiglu(gates[0], gates[1]));
    }
    return layer.sum(next, routed, shared, sums);
}

void check_moe(const Device &device, const char *path, const Moe &moe) {
    if (!device.gpu) {
        return;
    }
    const char *const remedy = "choose the device cpu";
    for (const ggml_tensor *w :
         {moe.gate, moe.up, moe.gate_up, moe.down, moe.shared.gate, moe.shared.up, moe.shared.down}) {
        if (w != nullptr && !is_packed(w) && !(moe.in_ram && w->ne[2] > 1)) {
            fail(LUCE_E_UNSUPPORTED, "%s: tensor %s has type %s, of which luce has no experts on a GPU: %s",
                 path, w->name, type_name(w->type), remedy);
        }
    }
    const auto unit = [](std::initializer_list<const ggml_tensor *> weights) {
        int64_t most = 0;
        for (const ggml_tensor *w : weights) {
            most = std::max(most, w == nullptr ? 0 : int64_t(fragment_bytes(w->type)));
        }
        return most;
    };
    // Where the experts stay in host memory, only the shared one is the device's.
    const bool own = !moe.in_ram;
    const std::string lack = moe_lacks(limits_of(device), device.name, dims_of(moe, moe.router->ne[0], 1),
                                       unit({own ? moe.gate : nullptr, own ? moe.up : nullptr,
                                             own ? moe.gate_up : nullptr, moe.shared.gate, moe.shared.up}),
                                       unit({own ? moe.down : nullptr, moe.shared.down}));
    if (!lack.empty()) {
        fail(LUCE_E_UNSUPPORTED, "%s: %s: %s", path, lack.c_str(), remedy);
    }
}

#endif

Stream moe(const StepBuild &b, const Stream &s, const Moe &w, const Norm &next) {
#ifdef LUCE_USE_CUDA
    if (b.model.device().gpu) {
        return (w.in_ram ? moe_beside_ram : moe_on_gpu)(b, s, w, next);
    }
#endif
    ggml_context *ctx = b.ctx;
    ggml_tensor *x = input_values(b, s.normed);
    // What the experts take of x, and what says how they are mixed. A shared expert comes first.
    std::vector<ggml_tensor *> gates = {w.router};
    if (w.shared_gate != nullptr) {
        gates.push_back(w.shared_gate);
    }
    gates = matmuls(b, gates, plain(x)); // {n, T}, {1, T}
    RouteArgs choice{};
    choice.n_used = int32_t(w.shape.n_used);
    ggml_tensor *route = ops::route(ctx, {gates[0]}, choice); // it has ids, then weights
    ggml_tensor *shared = nullptr;
    if (w.shared_gate != nullptr) {
        const auto y = matmuls(b, {w.shared.gate, w.shared.up}, plain(x)); // {FF, T}
        shared = matmul(b, w.shared.down, swiglu(y[0], y[1]));
    }
    ggml_tensor *y;
    if (w.in_ram) {
        y = ram_experts_of(b, route, x, w, x->ne[1]);
    } else {
        y = has_own_op(w) ? experts_of_luce(b, x, route, w) : experts_of_ggml(b, x, route, w);
        y = ops::experts_sum(ctx, {route, y});
    }
    if (shared != nullptr) {
        y = ops::add_shared(ctx, {y, shared, gates[1]});
    }
    return add_rows(b, y, s.x, next);
}

} // namespace luce
