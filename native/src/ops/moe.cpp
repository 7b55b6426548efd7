#include "ops/moe.h"

#ifdef LUCE_USE_CUDA

#include "common/kernels.h"
#include "moe/plan.h"
#include "ops/matmul.h"
#include "ops/row.h"

#include <algorithm>

namespace luce {
namespace {

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

} // namespace

MoeDims dims_of(const Moe &w, int64_t T) {
    const int64_t shared = w.shared_gate == nullptr ? 0 : w.shared.gate->ne[1];
    return {int32_t(T), int32_t(w.shape.n_expert), int32_t(w.shape.n_used), w.router->ne[0], w.shape.n_ff,
            shared};
}

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
    if (!moe_has(dims_of(moe, 1))) {
        fail(LUCE_E_UNSUPPORTED,
             "%s: %u of %u experts of %u values are more than luce has on a GPU (%d of %d of %lld): %s", path,
             moe.shape.n_used, moe.shape.n_expert, moe.shape.n_ff, MOE_MAX_USED, MOE_MAX_EXPERTS,
             (long long) MOE_MAX_FF, remedy);
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
    const int64_t need = least_shared(dims_of(moe, 1),
                                      unit({own ? moe.gate : nullptr, own ? moe.up : nullptr,
                                            own ? moe.gate_up : nullptr, moe.shared.gate, moe.shared.up}),
                                      unit({own ? moe.down : nullptr, moe.shared.down}));
    if (const int64_t have = cuda::shared_memory(device.index); need > have) {
        fail(LUCE_E_UNSUPPORTED,
             "%s: experts of %lld values take %lld bytes of a GPU's shared memory, %s has %lld: %s", path,
             (long long) moe.router->ne[0], (long long) need, device.name.c_str(), (long long) have, remedy);
    }
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
