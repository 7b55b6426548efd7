#include "ops/moe.h"

#ifdef LUCE_USE_CUDA

#include "common/kernels.h"
#include "moe/launch_plan.h"
#include "ops/matmul.h"
#include "ops/row.h"
#include "step/host_experts.h"

#include <algorithm>

namespace luce {
namespace {

MoeDims dims_of(const Moe &w, int64_t E, int64_t T) {
    const int64_t shared = w.shared_gate == nullptr ? 0 : w.shared.gate->ne[1];
    return {int32_t(T), int32_t(w.shape.n_expert), int32_t(w.shape.n_used), E, w.shape.n_ff, shared};
}

float *values(const ggml_tensor *t) {
    return static_cast<float *>(t->data);
}
uint8_t *routed_of(const ggml_tensor *t, const MoeDims &all, int64_t launch) {
    return static_cast<uint8_t *>(t->data) + launch * moe_routed_bytes(moe_full(all));
}

// Returns part `part` of each expert's matrices. All `parts` lie in one tensor, one behind the other.
MoeMatrix matrix(const ggml_tensor *w, int part, int parts) {
    const int64_t bytes = rowmm_packed_bytes(w->type, w->ne[0], w->ne[1] / parts);
    return {w->type, static_cast<const uint8_t *>(w->data) + part * bytes, parts * bytes};
}

// Holds what the nodes of a layer share.
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
    ggml_tensor *add(const char *name, ggml_type type, int64_t ne0, int64_t ne1,
                     std::vector<ggml_tensor *> args) const {
        const int32_t flags = (w.gate_up != nullptr ? MOE_FUSED : 0) | (w.in_ram ? MOE_VALUES : 0);
        const int32_t params[] = {dims.T,          dims.n_expert,          dims.n_used,
                                  int32_t(dims.E), int32_t(dims.FF),       int32_t(dims.FF_shared),
                                  flags,           bits_of_real(input.eps)};
        return add_op(b.ctx, *find_op(name), type, ne0, ne1, args.data(), int(args.size()), params, 8);
    }
    ggml_tensor *route() const {
        std::vector<ggml_tensor *> args = {x, input.w, b.cache.rowmm_scratch(), w.router};
        if (dims.shared()) {
            args.push_back(w.shared_gate);
        }
        const int64_t values = w.in_ram ? dims.T * dims.E * int64_t(sizeof(float)) : 0;
        return add("moe_route", GGML_TYPE_I8, moe_all_routed_bytes(dims) + values, 1, args);
    }
    // Adds what the experts gave, and of a step packs the sums as the next product takes them. `args` are
    // what moe_sum takes ahead of the norm.
    Stream sum(const Norm &next, std::vector<ggml_tensor *> args) const {
        const int64_t E = dims.E, T = dims.T, packed = b.prefill() ? 0 : rowmm_op_bytes(T, E) / 4;
        args.insert(args.begin() + 3, next.weight);
        ggml_tensor *y = add("moe_sum", GGML_TYPE_F32, E * T + packed, 1, args);
        ggml_tensor *out = ggml_view_2d(b.ctx, y, E, T, size_t(E) * sizeof(float), 0); // {E, T}
        const MatmulInput normed = rms(out, next.weight, next.eps);
        if (packed > 0) {
            made_input(b, normed, true,
                       [&] { return ggml_view_1d(b.ctx, y, packed, size_t(E * T) * sizeof(float)); });
        }
        return {out, normed};
    }
};

} // namespace

int64_t moe_all_routed_bytes(const MoeDims &all) {
    int64_t bytes = 0;
    moe_each_launch(all, [&](int32_t, const MoeDims &dims, int64_t) {
        bytes += moe_routed_bytes(dims);
        return 0;
    });
    return bytes;
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

Stream moe_on_gpu(const StepBuild &b, const Stream &s, const Moe &w, const Norm &next) {
    const Layer layer(b, s, w);
    const MoeDims &dims = layer.dims;
    ggml_tensor *routed = layer.route();
    std::vector<ggml_tensor *> up = {routed, w.gate_up != nullptr ? w.gate_up : w.gate};
    std::vector<ggml_tensor *> down = {routed, nullptr, w.down};
    if (w.gate_up == nullptr) {
        up.push_back(w.up);
    }
    if (dims.shared()) {
        up.insert(up.end(), {w.shared.gate, w.shared.up});
        down.push_back(w.shared.down);
    }
    down[1] = layer.add("moe_up", GGML_TYPE_F32, dims.places() * dims.h_row(), 1, up);
    const int32_t shared_type = dims.shared() ? w.shared.down->type : w.down->type;
    if (!b.prefill() && moe_ends_at_once(dims, w.down->type, shared_type)) {
        down.insert(down.begin() + 3, layer.x);
        // It polls for what up leaves, so no launch comes between (overlap.cuh).
        ggml_tensor *out = layer.add("moe_end", GGML_TYPE_F32, dims.E, dims.T, down); // {E, 1}
        return {out, rms(out, next.weight, next.eps)};
    }
    // Of very few rows this polls too.
    ggml_tensor *y = layer.add("moe_down", GGML_TYPE_F32, dims.places() * dims.E, 1, down);
    return layer.sum(next, {routed, y, layer.x});
}

// The shared expert is the device's. It lies between the way to the host and the host's part, which so runs beside it:
// sources come in a graph's order.
Stream moe_beside_ram(const StepBuild &b, const Stream &s, const Moe &w, const Norm &next) {
    const Layer layer(b, s, w);
    const MoeDims &dims = layer.dims;
    ggml_tensor *routed = layer.route();
    ggml_tensor *given = ram_give(b, routed, w, dims.E, dims.T);
    ggml_tensor *sums = ram_experts_of(b, given, nullptr, w, dims.E, dims.T);
    ggml_tensor *shared = sums; // these stand in where there is no shared expert
    if (dims.shared()) {
        const auto gates = matmuls(b, {w.shared.gate, w.shared.up}, s.normed);
        shared = matmul(b, w.shared.down, swiglu(gates[0], gates[1]));
    }
    return layer.sum(next, {routed, shared, layer.x, sums});
}

int moe_route_op(const ggml_tensor *dst, void *stream, const MoeOp &op) {
    const ggml_tensor *gate = dst->src[4];
    return moe_each_launch(op.dims, [&](int32_t t, const MoeDims &dims, int64_t launch) {
        MoeRouteArgs a{};
        a.dims = dims;
        a.x = values(dst->src[0]) + t * dims.E;
        a.norm = values(dst->src[1]);
        a.eps = op.eps;
        a.router = values(dst->src[3]);
        a.shared_gate = gate == nullptr ? nullptr : values(gate);
        a.counters = launch_scratch(dst->src[2]).counters;
        a.routed = routed_of(dst, op.dims, launch);
        if (op.values) {
            a.values =
                reinterpret_cast<float *>(static_cast<uint8_t *>(dst->data) + moe_all_routed_bytes(op.dims)) +
                t * dims.E;
        }
        a.overlap = 1;
        return cuda::moe_route(a, stream);
    });
}

int moe_up_op(const ggml_tensor *dst, void *stream, const MoeOp &op) {
    const int shared = op.fused ? 2 : 3;
    return moe_each_launch(op.dims, [&](int32_t, const MoeDims &dims, int64_t launch) {
        MoeMatmulArgs a{};
        a.dims = dims;
        a.first = op.fused ? matrix(dst->src[1], 0, 2) : matrix(dst->src[1], 0, 1);
        a.second = op.fused ? matrix(dst->src[1], 1, 2) : matrix(dst->src[2], 0, 1);
        if (dims.shared()) {
            a.shared_first = matrix(dst->src[shared], 0, 1);
            a.shared_second = matrix(dst->src[shared + 1], 0, 1);
        }
        a.routed = routed_of(dst->src[0], op.dims, launch);
        a.out = values(dst) + launch * moe_full(dims).places() * dims.h_row();
        a.overlap = 1;
        return cuda::moe_up(a, stream);
    });
}

int moe_down_op(const ggml_tensor *dst, void *stream, const MoeOp &op) {
    return moe_each_launch(op.dims, [&](int32_t, const MoeDims &dims, int64_t launch) {
        const int64_t places = launch * moe_full(dims).places();
        MoeMatmulArgs a{};
        a.dims = dims;
        a.first = matrix(dst->src[2], 0, 1);
        if (dims.shared()) {
            a.shared_first = matrix(dst->src[3], 0, 1);
        }
        a.routed = routed_of(dst->src[0], op.dims, launch);
        a.h = values(dst->src[1]) + places * dims.h_row();
        a.out = values(dst) + places * dims.E;
        a.overlap = 1;
        return cuda::moe_down(a, stream);
    });
}

int moe_end_op(const ggml_tensor *dst, void *stream, const MoeOp &op) {
    MoeEndArgs a{};
    a.dims = op.dims;
    a.down = matrix(dst->src[2], 0, 1);
    if (op.dims.shared()) {
        a.shared_down = matrix(dst->src[4], 0, 1);
    }
    a.routed = routed_of(dst->src[0], op.dims, 0);
    a.h = values(dst->src[1]);
    a.residual = values(dst->src[3]);
    a.out = values(dst);
    a.overlap = 1;
    return cuda::moe_end(a, stream);
}

int moe_sum_op(const ggml_tensor *dst, void *stream, const MoeOp &op) {
    const ggml_tensor *sums = dst->src[4];
    const bool packs = ggml_nelements(dst) > op.dims.E * op.dims.T; // then one launch has all rows
    return moe_each_launch(op.dims, [&](int32_t t, const MoeDims &dims, int64_t launch) {
        MoeSumArgs a{};
        a.dims = dims;
        a.routed = routed_of(dst->src[0], op.dims, launch);
        a.y = values(dst->src[1]) + (sums == nullptr ? launch * moe_full(dims).places() : t) * dims.E;
        a.sums = sums == nullptr ? nullptr : values(sums) + t * dims.E;
        a.residual = values(dst->src[2]) + t * dims.E;
        a.out = values(dst) + t * dims.E;
        a.norm = values(dst->src[3]);
        a.packed = packs ? values(dst) + op.dims.T * dims.E : nullptr;
        a.overlap = 1;
        return cuda::moe_sum(a, stream);
    });
}

} // namespace luce

#endif
