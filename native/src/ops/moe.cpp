#include "ops/moe.h"

#include "model/model.h"
#include "moe/launch_plan.h"

namespace luce {

void cpu_ram_experts(const RamExpertsArgs &args, int ith, int) {
    if (ith == 0) {
        RamExperts().run(args,
                         [](int64_t n, const std::function<void(int64_t, int64_t)> &share) { share(0, n); });
    }
}

#ifdef LUCE_USE_CUDA

namespace {

// Makes the launches of all rows, until one fails. It calls run(dims of the launch, its first row, the launches before it).
template <class Run> int each_block(const MoeDims &all, const Run &run) {
    for (int32_t t = 0; t < all.T; t += all.rows_at_once()) {
        MoeDims dims = all;
        dims.T = std::min(all.T - t, all.rows_at_once());
        if (const int error = run(dims, int64_t(t), int64_t(t / all.rows_at_once())); error != 0) {
            return error;
        }
    }
    return 0;
}

// Returns the dims of a launch that others follow.
MoeDims full(MoeDims dims) {
    dims.T = dims.rows_at_once();
    return dims;
}

template <class Bytes> Bytes *routed_of(Bytes *routed, const MoeDims &all, int64_t launch) {
    using Byte = std::conditional_t<std::is_const_v<Bytes>, const uint8_t, uint8_t>;
    return static_cast<Byte *>(routed) + launch * moe_routed_bytes(full(all));
}

} // namespace

int64_t moe_all_routed_bytes(const MoeDims &all) {
    int64_t bytes = 0;
    each_block(all, [&](const MoeDims &dims, int64_t, int64_t) {
        bytes += moe_routed_bytes(dims);
        return 0;
    });
    return bytes;
}

int64_t moe_all_record_bytes(const MoeDims &all) { // launches have them in turn
    return moe_record_bytes(all.T > all.rows_at_once() ? full(all) : all);
}

MoeMatrix moe_matrix(const ggml_tensor &w, uint8_t *address, int64_t part, int64_t parts) {
    const int64_t bytes = rowmm_packed_bytes(w.type, w.ne[0], w.ne[1] / parts);
    return {w.type, address + part * bytes, parts * bytes, nullptr};
}

int route_blocks(const MoeRouteArgs &all, void *stream) {
    return each_block(all.dims, [&](const MoeDims &dims, int64_t t, int64_t launch) {
        MoeRouteArgs a = all;
        a.dims = dims;
        a.x += t * dims.E;
        a.routed = routed_of(a.routed, all.dims, launch);
        a.values = a.values == nullptr ? nullptr : a.values + t * dims.E;
        return cuda::moe_route(a, stream);
    });
}

int up_blocks(const MoeMatmulArgs &all, void *stream) {
    return each_block(all.dims, [&](const MoeDims &dims, int64_t, int64_t launch) {
        MoeMatmulArgs a = all;
        a.dims = dims;
        a.routed = routed_of(a.routed, all.dims, launch);
        a.out += launch * full(dims).places() * dims.h_row();
        return cuda::moe_up(a, stream);
    });
}

int down_blocks(const MoeMatmulArgs &all, void *stream) {
    return each_block(all.dims, [&](const MoeDims &dims, int64_t, int64_t launch) {
        const int64_t places = launch * full(dims).places();
        MoeMatmulArgs a = all;
        a.dims = dims;
        a.routed = routed_of(a.routed, all.dims, launch);
        a.h += places * dims.h_row();
        a.out += places * dims.E;
        return cuda::moe_down(a, stream);
    });
}

int sum_blocks(const MoeSumArgs &all, void *stream) {
    return each_block(all.dims, [&](const MoeDims &dims, int64_t t, int64_t launch) {
        MoeSumArgs a = all;
        a.dims = dims;
        a.routed = routed_of(a.routed, all.dims, launch);
        a.y += (a.sums == nullptr ? launch * full(dims).places() : t) * dims.E;
        a.sums = a.sums == nullptr ? nullptr : a.sums + t * dims.E;
        a.residual = a.residual == nullptr ? nullptr : a.residual + t * dims.E;
        a.out += t * dims.E; // with `packed` one launch has all rows
        return cuda::moe_sum(a, stream);
    });
}

int give_blocks(const RamGiveArgs &all, const GiveRowsArgs &to, void *stream) {
    const auto *values = reinterpret_cast<const float *>(static_cast<const uint8_t *>(all.routed) +
                                                         moe_all_routed_bytes(all.dims));
    return each_block(all.dims, [&](const MoeDims &dims, int64_t t, int64_t launch) {
        const auto *routed = static_cast<const uint8_t *>(routed_of(all.routed, all.dims, launch));
        GiveRowsArgs a = to;
        a.T = dims.T;
        a.n_used = dims.n_used;
        a.E = dims.E;
        a.values = values + t * dims.E;
        a.ids = reinterpret_cast<const int32_t *>(routed + moe_ids_offset(dims));
        a.weights = reinterpret_cast<const float *>(routed + moe_weights_offset(dims));
        a.x += t * dims.E;
        a.route += t * 2 * dims.n_used;
        a.given += t;
        return cuda::give_rows(a, stream);
    });
}

namespace {

// The largest fragments of the matrices that the device multiplies, in bytes. Where the experts stay in host memory, only the
// shared one is its.
struct LargestUnits {
    int64_t up = 0, down = 0;

    explicit LargestUnits(const Moe &moe, const Ffn &shared) {
        const bool own = !moe.in_ram;
        const auto most = [](int64_t &unit, std::initializer_list<const ggml_tensor *> weights) {
            for (const ggml_tensor *w : weights) {
                unit = std::max(unit, w == nullptr ? 0 : int64_t(fragment_bytes(w->type)));
            }
        };
        most(up, {own ? moe.gate : nullptr, own ? moe.up : nullptr, own ? moe.gate_up : nullptr, shared.gate,
                  shared.up});
        most(down, {own ? moe.down : nullptr, shared.down});
    }
};

} // namespace

MoeDims dims_of(const Device &device, const Moe &w, int64_t T, const Ffn *dense) {
    const Ffn &shared = dense != nullptr ? *dense : w.shared;
    MoeDims dims(int32_t(T), int32_t(w.shape.n_expert), int32_t(w.shape.n_used), w.router->ne[0],
                 w.shape.n_ff, shared.gate == nullptr ? 0 : shared.gate->ne[1]);
    dims.dense = dense != nullptr;
    const LargestUnits unit(w, shared);
    dims.most = moe_item_rows(limits_of(device), dims, unit.up, unit.down);
    dims.wide = moe_wide_rows(limits_of(device), dims);
    return dims;
}

namespace {

std::string lack_of(const Device &device, const Moe &moe, const Ffn *dense) {
    const LargestUnits unit(moe, dense != nullptr ? *dense : moe.shared);
    return moe_lacks(limits_of(device), device.name, dims_of(device, moe, 1, dense), unit.up, unit.down);
}

} // namespace

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
    if (const std::string lack = lack_of(device, moe, nullptr); !lack.empty()) {
        fail(LUCE_E_UNSUPPORTED, "%s: %s: %s", path, lack.c_str(), remedy);
    }
}

bool takes_dense(const Device &device, const Moe &moe, const Ffn &dense) {
    return device.gpu && !moe.in_ram && moe.shared.gate == nullptr && is_packed(dense.gate) &&
           is_packed(dense.up) && is_packed(dense.down) && lack_of(device, moe, &dense).empty();
}

#else

void check_moe(const Device &, const char *, const Moe &) {}
bool takes_dense(const Device &, const Moe &, const Ffn &) {
    return false;
}

#endif

} // namespace luce
