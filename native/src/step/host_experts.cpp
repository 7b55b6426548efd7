#include "step/host_experts.h"

#include "ops/moe.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace luce {
namespace {

// More parts spread the work better. A prefill's are as unequal as the numbers of rows that chose an expert.
constexpr int PARTS_PER_THREAD = 32;

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

void RamRunner::allocate(const Device &device, int32_t rows, const Moe &moe, int64_t E) {
    rows_ = rows;
    n_used_ = int32_t(moe.shape.n_used);
    E_ = E;
    const uint64_t size = Crossing(nullptr, uint64_t(rows), moe.shape.n_used, uint64_t(E)).bytes;
    pinned_ = pinned(device, size, "rows that experts in host memory take");
    experts_.reserve(rows, n_used_, int32_t(moe.shape.n_expert), E, moe.shape.n_ff);
}

void RamRunner::multiply(const RamExpertsArgs &args) {
    experts_.run(args, [&](int64_t n, const std::function<void(int64_t, int64_t)> &share) {
        const int parts = int(std::min<int64_t>(n, team_.n_threads() * PARTS_PER_THREAD));
        team_.run(parts, [&](int i) { share(n * i / parts, n * (i + 1) / parts); });
    });
}

void RamRunner::run(const ggml_tensor *node) {
    multiply(ops::ram_experts.args(node));
}

#ifdef LUCE_USE_CUDA

static Crossing crossing(const Buffer &pinned, int32_t rows, int32_t n_used, int64_t E) {
    return Crossing(ggml_backend_buffer_get_base(pinned.get()), uint64_t(rows), uint64_t(n_used),
                    uint64_t(E));
}

void RamRunner::clear() {
    if (pinned_) {
        memset(crossing(pinned_, rows_, n_used_, E_).given, 0, size_t(rows_) * sizeof(uint32_t));
    }
}

int RamRunner::enqueue(const ggml_tensor *node, void *stream) {
    const Crossing at = crossing(pinned_, rows_, n_used_, E_);
    if (custom_op(node)->on_team) {
        return cuda::bring(at.out, node->data, int64_t(ggml_nbytes(node)), stream);
    }
    GiveRowsArgs to{};
    to.x = at.x;
    to.route = at.route;
    to.given = at.given;
    return give_blocks(ops::ram_give.args(node), to, stream);
}

int RamRunner::serve(const ggml_tensor *node, void *stream) {
    const Crossing at = crossing(pinned_, rows_, n_used_, E_);
    RamExpertsArgs a = ops::ram_experts.args(node);
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
