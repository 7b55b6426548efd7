// Here are the op of experts in host memory, and the way of activations to it from a GPU and back, once each.
#pragma once

#include "device.h"
#include "ops.h"
#include "ram_experts.h"
#include "team.h"

namespace luce {

// E_UNSUPPORTED names a tensor of a mixture in the file at `path` whose type cannot be multiplied in host memory.
void check_ram_experts(const char *path, const Moe &moe);

// Computes each row's weighted sum of its experts' results {E, T}. On a CPU `routed` is the route {2*n_used,
// T} of values {E, T}. On a GPU it is what moe_route leaves, which holds both, and values is null.
ggml_tensor *ram_experts_of(const StepBuild &b, ggml_tensor *routed, ggml_tensor *values, const Moe &w,
                            int64_t E, int64_t T);

// Returns what the op's node stands for on a CPU. Elsewhere the caller sets x, route and out.
RamExpertsArgs ram_experts_args(const ggml_tensor *dst);

// A stage runs the op for steps of a CPU or a GPU, one step at a time.
class RamStage {
public:
    explicit RamStage(Team &team) : team_(team) {}
    // Takes a GPU's pinned memory, for up to `rows` rows. It fails with E_MEMORY where there is none.
    void allocate(const Device &device, int32_t rows, const Moe &moe, int64_t E);
    static uint64_t bytes(int32_t rows, const Moe &moe, int64_t E);

    void run(const ggml_tensor *node); // runs it on a CPU
    // A call runs it on a GPU: it enqueues copies, a call of the host and a copy back on `stream`, and
    // returns a cudaError_t. A Call is kept as long as what has been enqueued, or a capture of it, may run.
    struct Call {
        RamStage *stage;
        const ggml_tensor *node;
    };
    int enqueue(const Call &call, void *stream);

private:
    static void called(void *call);
    void multiply(const RamExpertsArgs &args);

    Team &team_;
    RamExperts experts_;
    Buffer pinned_;
    std::vector<int32_t> route_; // [rows][2*n_used]
};

} // namespace luce
