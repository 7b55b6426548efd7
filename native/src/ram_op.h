// The op of experts in host memory, and how activations cross to it from a GPU and back, once each way.
#pragma once

#include "device.h"
#include "ops.h"
#include "ram_experts.h"
#include "team.h"

namespace luce {

// E_UNSUPPORTED names a tensor of a mixture in the file at `path` whose type cannot be multiplied in host memory.
void check_ram_experts(const char *path, const Moe &moe);

// Each row's weighted sum of its experts' results {E, T}. routed: on a CPU the route {2*n_used, T} of values {E, T}; on
// a GPU what moe_route leaves, which holds both, and values null.
ggml_tensor *ram_experts_of(const StepBuild &b, ggml_tensor *routed, ggml_tensor *values, const Moe &w,
                            int64_t E, int64_t T);

// What the op's node stands for on a CPU. Elsewhere x, route and out are the caller's to set.
RamExpertsArgs ram_experts_args(const ggml_tensor *dst);

// Runs the op for steps of a CPU or a GPU. One step at a time.
class RamStage {
public:
    explicit RamStage(Team &team) : team_(team) {}
    // A GPU's pinned memory, for up to `rows` rows. E_MEMORY where there is none.
    void allocate(const Device &device, int32_t rows, const Moe &moe, int64_t E);
    static uint64_t bytes(int32_t rows, const Moe &moe, int64_t E);

    void run(const ggml_tensor *node); // on a CPU
    // On a GPU: copies, a call of the host and a copy back on `stream`; a cudaError_t. `call` is kept as long as what
    // has been enqueued, or a capture of it, may run.
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
