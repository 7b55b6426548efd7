#include "ram_op.h"

#include "custom_op.h"
#include "moe_op.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace luce {
namespace {

// More parts spread the work better. A prefill's are as unequal as the numbers of rows that chose an expert.
constexpr int PARTS_PER_THREAD = 8;

// These are the params of the node.
enum Param { FUSED, ROWS, USED, WIDTH, EXPERT_WIDTH, SHARED_WIDTH };
int32_t param(const ggml_tensor *node, Param p) {
    return node->op_params[8 + int(p)];
}

RowsWeight weight(const ggml_tensor *w, int part, int parts) {
    const int64_t N = w->ne[1] / parts;
    return {static_cast<const uint8_t *>(w->data) + size_t(part * N) * w->nb[1], w->type, N, w->nb[1],
            nullptr};
}

// Returns the bytes of an array that crosses, in pinned memory.
uint64_t padded(uint64_t bytes) {
    return (bytes + 255) / 256 * 256;
}

} // namespace

void check_ram_experts(const char *path, const Moe &moe) {
    const ggml_tensor *gate = moe.gate_up != nullptr ? moe.gate_up : moe.gate;
    const ggml_tensor *up = moe.gate_up != nullptr ? moe.gate_up : moe.up;
    if (!ram_experts_have(gate->type, up->type, moe.down->type)) {
        fail(LUCE_E_UNSUPPORTED, "%s: experts of %s (%s, %s and %s) are not multiplied in host memory", path,
             gate->name, type_name(gate->type), type_name(up->type), type_name(moe.down->type));
    }
}

ggml_tensor *ram_experts_of(const StepBuild &b, ggml_tensor *routed, ggml_tensor *values, const Moe &w,
                            int64_t E, int64_t T) {
    const bool fused = w.gate_up != nullptr;
    ggml_tensor *args[] = {routed, values == nullptr ? routed : values, w.down, fused ? w.gate_up : w.gate,
                           w.up};
    const int64_t shared = w.shared_gate == nullptr ? 0 : w.shared.gate->ne[1];
    const int32_t params[] = {
        fused, int32_t(T), int32_t(w.shape.n_used), int32_t(E), int32_t(w.shape.n_ff), int32_t(shared)};
    return add_op(b.ctx, *find_op("ram_experts"), GGML_TYPE_F32, E, T, args, fused ? 4 : 5, params, 6);
}

RamExpertsArgs ram_experts_args(const ggml_tensor *dst) {
    const ggml_tensor *down = dst->src[2], *gate = dst->src[3];
    const bool fused = param(dst, FUSED) != 0;
    const ggml_tensor *up = fused ? gate : dst->src[4];
    RamExpertsArgs a{};
    a.route = static_cast<const int32_t *>(dst->src[0]->data);
    a.x = static_cast<const float *>(dst->src[1]->data);
    a.T = int32_t(dst->ne[1]);
    a.n_expert = int32_t(down->ne[2]);
    a.n_used = param(dst, USED);
    a.E = dst->ne[0];
    a.FF = down->ne[0];
    a.gate = weight(gate, 0, fused ? 2 : 1);
    a.up = weight(up, fused ? 1 : 0, fused ? 2 : 1);
    a.down = weight(down, 0, 1);
    a.gate_bytes = gate->nb[2];
    a.up_bytes = up->nb[2];
    a.down_bytes = down->nb[2];
    a.out = static_cast<float *>(dst->data);
    return a;
}

uint64_t RamStage::bytes(int32_t rows, const Moe &moe, int64_t E) {
    return 2 * padded(uint64_t(rows) * uint64_t(E) * sizeof(float)) +
           padded(uint64_t(rows) * moe.shape.n_used * 2 * sizeof(int32_t) + 4096);
}

void RamStage::allocate(const Device &device, int32_t rows, const Moe &moe, int64_t E) {
    ggml_backend_buffer_type_t pinned = device.gpu ? ggml_backend_dev_host_buffer_type(device.dev) : nullptr;
    const uint64_t size = bytes(rows, moe, E);
    pinned_.reset(ggml_backend_buft_alloc_buffer(pinned ? pinned : ggml_backend_cpu_buffer_type(), size));
    if (!pinned_) {
        fail(LUCE_E_MEMORY, "allocating %s of host memory for experts failed", human_bytes(size).c_str());
    }
    route_.resize(size_t(rows) * moe.shape.n_used * 2);
    experts_.reserve(rows, int32_t(moe.shape.n_used), int32_t(moe.shape.n_expert), E, moe.shape.n_ff);
}

void RamStage::multiply(const RamExpertsArgs &args) {
    experts_.run(args, [&](int64_t n, const std::function<void(int64_t, int64_t)> &share) {
        const int parts = int(std::min<int64_t>(n, team_.n_threads() * PARTS_PER_THREAD));
        team_.run(parts, [&](int i) { share(n * i / parts, n * (i + 1) / parts); });
    });
}

void RamStage::run(const ggml_tensor *node) {
    multiply(ram_experts_args(node));
}

#ifdef LUCE_USE_CUDA

// A Crossing is what crosses, in pinned memory: x [rows][E], out [rows][E], ids and weights [rows][n_used]
// each.
struct Crossing {
    float *x, *out;
    uint8_t *routes;
};
static Crossing crossing(void *base, uint64_t rows, uint64_t E) {
    uint8_t *p = static_cast<uint8_t *>(base);
    const uint64_t values = padded(rows * E * sizeof(float));
    return {reinterpret_cast<float *>(p), reinterpret_cast<float *>(p + values), p + 2 * values};
}

static MoeDims dims_of(const ggml_tensor *node) {
    return {param(node, ROWS),  int32_t(node->src[2]->ne[2]), param(node, USED),
            param(node, WIDTH), param(node, EXPERT_WIDTH),    param(node, SHARED_WIDTH)};
}

// A thread of the driver's calls this, so nothing may be thrown. Memory that is lacking shows as results that
// are not finite.
void RamStage::called(void *context) {
    const Call &call = *static_cast<const Call *>(context);
    RamStage &stage = *call.stage;
    RamExpertsArgs a = ram_experts_args(call.node);
    const Crossing at =
        crossing(ggml_backend_buffer_get_base(stage.pinned_.get()), uint64_t(a.T), uint64_t(a.E));
    const size_t used = size_t(a.n_used);
    const uint8_t *routes = at.routes;
    // It gives ids, then weights.
    moe_each_launch(dims_of(call.node), [&](int32_t t, const MoeDims &dims, int64_t) {
        const uint8_t *weights = routes + (moe_weights_offset(dims) - moe_ids_offset(dims));
        for (size_t row = 0; row < size_t(dims.T); row++) {
            int32_t *to = &stage.route_[(size_t(t) + row) * 2 * used];
            memcpy(to, routes + row * used * 4, used * 4);
            memcpy(to + used, weights + row * used * 4, used * 4);
        }
        routes += moe_open_offset(dims) - moe_ids_offset(dims);
        return 0;
    });
    a.route = stage.route_.data();
    a.x = at.x;
    a.out = at.out;
    try {
        stage.multiply(a);
    } catch (...) {
        std::fill_n(at.out, int64_t(a.T) * a.E, NAN);
    }
}

int RamStage::enqueue(const Call &call, void *stream) {
    const ggml_tensor *node = call.node;
    const MoeDims all = dims_of(node);
    const size_t values = size_t(all.T) * size_t(all.E) * sizeof(float);
    const Crossing at =
        crossing(ggml_backend_buffer_get_base(pinned_.get()), uint64_t(all.T), uint64_t(all.E));
    const uint8_t *routed = static_cast<const uint8_t *>(node->src[0]->data);
    uint8_t *routes = at.routes;
    int error = moe_each_launch(all, [&](int32_t, const MoeDims &dims, int64_t launch) {
        const int64_t from = moe_ids_offset(dims), bytes = moe_open_offset(dims) - from;
        const uint8_t *ids = routed + launch * moe_routed_bytes(moe_full(all)) + from;
        const int copied = cuda::to_host(routes, ids, size_t(bytes), stream);
        routes += bytes;
        return copied;
    });
    error = error != 0 ? error : cuda::to_host(at.x, routed + moe_all_routed_bytes(all), values, stream);
    error = error != 0 ? error : cuda::call_on_host(called, const_cast<Call *>(&call), stream);
    return error != 0 ? error : cuda::to_device(node->data, at.out, values, stream);
}

#else

int RamStage::enqueue(const Call &, void *) {
    return 0;
}

#endif

} // namespace luce
