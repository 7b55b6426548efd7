#include "step/host_experts.h"

#include "ops/moe.h"
#include "ops/row.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace luce {
namespace {

// More parts spread the work better. A prefill's are as unequal as the numbers of rows that chose an expert.
constexpr int PARTS_PER_THREAD = 32;

// These are the params of the node.
enum Param { FUSED, ROWS, USED, WIDTH, EXPERT_WIDTH, SHARED_WIDTH, EXPERTS };
int32_t param(const ggml_tensor *node, Param p) {
    return node->op_params[8 + int(p)];
}

RowsWeight weight(const ggml_tensor *w, int part, int parts) {
    const int64_t N = w->ne[1] / parts;
    return {static_cast<const uint8_t *>(w->data) + size_t(part * N) * w->nb[1],
            w->type,
            N,
            w->nb[1],
            nullptr,
            scales_of(w)};
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

// A Crossing is what crosses, in pinned memory.
struct Crossing {
    float *x, *out; // [rows][E]
    int32_t *route; // [rows][2*n_used]
    uint32_t *given; // [rows]
    uint64_t bytes;

    Crossing(void *base, uint64_t rows, uint64_t n_used, uint64_t E) {
        uint8_t *first = static_cast<uint8_t *>(base), *at = first;
        const auto take = [&](uint64_t n) {
            uint8_t *const taken = at;
            at += padded(n * 4);
            return taken;
        };
        x = reinterpret_cast<float *>(take(rows * E));
        out = reinterpret_cast<float *>(take(rows * E));
        route = reinterpret_cast<int32_t *>(take(rows * 2 * n_used));
        given = reinterpret_cast<uint32_t *>(take(rows));
        bytes = uint64_t(at - first);
    }
};

void RamStage::allocate(const Device &device, int32_t rows, const Moe &moe, int64_t E) {
    rows_ = rows;
    n_used_ = int32_t(moe.shape.n_used);
    E_ = E;
    const uint64_t size = Crossing(nullptr, uint64_t(rows), moe.shape.n_used, uint64_t(E)).bytes;
    pinned_ = pinned(device, size, "rows that experts in host memory take");
    experts_.reserve(rows, n_used_, int32_t(moe.shape.n_expert), E, moe.shape.n_ff);
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

static Crossing crossing(const Buffer &pinned, int32_t rows, int32_t n_used, int64_t E) {
    return Crossing(ggml_backend_buffer_get_base(pinned.get()), uint64_t(rows), uint64_t(n_used),
                    uint64_t(E));
}

static MoeDims dims_of(const ggml_tensor *node) {
    return {param(node, ROWS),  param(node, EXPERTS),      param(node, USED),
            param(node, WIDTH), param(node, EXPERT_WIDTH), param(node, SHARED_WIDTH)};
}

void RamStage::clear() {
    if (pinned_) {
        memset(crossing(pinned_, rows_, n_used_, E_).given, 0, size_t(rows_) * sizeof(uint32_t));
    }
}

static int give(const ggml_tensor *node, const Crossing &to, void *stream) {
    const MoeDims all = dims_of(node);
    const uint8_t *routed = static_cast<const uint8_t *>(node->src[0]->data);
    const float *values = reinterpret_cast<const float *>(routed + moe_all_routed_bytes(all));
    return moe_each_launch(all, [&](int32_t t, const MoeDims &dims, int64_t launch) {
        const uint8_t *from = routed + launch * moe_routed_bytes(moe_full(all));
        const int64_t first = t;
        GiveRowsArgs a{};
        a.T = dims.T;
        a.n_used = dims.n_used;
        a.E = dims.E;
        a.values = values + first * dims.E;
        a.ids = reinterpret_cast<const int32_t *>(from + moe_ids_offset(dims));
        a.weights = reinterpret_cast<const float *>(from + moe_weights_offset(dims));
        a.x = to.x + first * dims.E;
        a.route = to.route + first * 2 * dims.n_used;
        a.given = to.given + first;
        return cuda::give_rows(a, stream);
    });
}

int RamStage::enqueue(const ggml_tensor *node, void *stream) {
    const Crossing at = crossing(pinned_, rows_, n_used_, E_);
    if (custom_op(node)->on_team) {
        return cuda::bring(at.out, node->data, int64_t(ggml_nbytes(node)), stream);
    }
    return give(node, at, stream);
}

int RamStage::serve(const ggml_tensor *node, void *stream) {
    const Crossing at = crossing(pinned_, rows_, n_used_, E_);
    RamExpertsArgs a = ram_experts_args(node);
    constexpr int POLLS = 1 << 16; // the device is seldom asked whether it has failed
    for (int32_t t = 0, polls = 0; t < a.T;) {
        const volatile uint32_t &given = at.given[t];
        if (given != 0) {
            t++;
        } else if (++polls % POLLS != 0) {
            relax();
        } else if (const int error = cuda::stopped(stream); error != 0 && given == 0) {
            return error;
        }
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    a.x = at.x;
    a.route = at.route;
    a.out = at.out;
    multiply(a);
    return 0;
}

#endif

} // namespace luce
