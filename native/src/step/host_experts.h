// Here are the op of experts in host memory, and the way of activations to it from a GPU and back, once each.
//
// On a GPU a step is enqueued, or captured, up to such an op. The op ram_give leaves the rows in pinned memory; what the
// device has to do beside the host, the shared expert, lies behind it. The calling thread waits for the rows, computes
// with the team, and enqueues the rest of the step, which begins with the way back. So a GPU never waits for the host
// while it runs something, and whatever stops the host stops no device.
#pragma once

#include "cpu/host_experts.h"
#include "model/model.h"
#include "step/threads.h"

namespace luce {

// E_UNSUPPORTED names a tensor of a mixture in the file at `path` whose type cannot be multiplied in host memory.
void check_ram_experts(const char *path, const Moe &moe);

// Runs the op for steps of a CPU or a GPU, one step at a time.
class RamRunner {
public:
    explicit RamRunner(Team &team) : team_(team) {}
    // Takes a GPU's pinned memory, for up to `rows` rows. It fails with E_MEMORY where there is none.
    void allocate(const Device &device, int32_t rows, const Moe &moe, int64_t E);

    void run(const ggml_tensor *node); // it runs the op on a CPU

    // Run it on a GPU, in this order. enqueue() is of both ops' nodes, and like serve() returns a cudaError_t.
    void clear(); // it comes before ram_give is launched
    int enqueue(const ggml_tensor *node, void *stream);
    int serve(const ggml_tensor *node, void *stream); // it waits until its rows are here, and runs it

private:
    void multiply(const RamExpertsArgs &args);

    Team &team_;
    RamExperts experts_;
    Buffer pinned_;
    int32_t rows_ = 0, n_used_ = 0;
    int64_t E_ = 0;
};

} // namespace luce
