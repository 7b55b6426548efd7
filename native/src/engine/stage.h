// A stage is what an engine has on one device: consecutive layers of the trunk, their caches, and the streams that work on
// them. An engine has a list of stages in the order of layers, one of each of the model's placements. The
// first has the step's tokens too; the last what is of no layer: the drafters with their KV, hidden rows, the output and the
// choices, beside layers, or on a device for drafts without any.
//
// Nothing else of the core knows a device: what is of a layer asks the layer's stage, and what is of all loops over them.
// Between two stages pass rows that nodes of a later one read (graph/lower.h): each stage fetches them from the one before,
// out of its device's memory, or where the two devices do not reach each other's, out of pinned memory of the host.
#pragma once

#include "common/kernels.h"
#include "engine/stage_thread.h"
#include "model/model.h"

#include <vector>

namespace luce {

struct Stage {
    // Describes its memory without taking any; n_tensors caches lie there beside the scratch.
    Stage(const Model &model, const Placement &on, size_t n_tensors);
    ~Stage();
    Stage(const Stage &) = delete;
    Stage &operator=(const Stage &) = delete;

    ggml_backend_buffer_type *
    compute_type() const; // of its steps' activations; stages with one share a buffer
    void allocate(); // its memory; E_MEMORY names what lacks
    // Starts its streams, of which a CPU's has n_threads threads; `beside` only where the engine drafts.
    void open(const Model &model, int n_threads, bool drafts);
    static void *stream(const Backend &backend); // as CUDA knows it
    static uint64_t passage_bytes(const ggml_tensor *rows); // rows of a step take so many on their way
    bool reaches(const Stage &other) const; // on GPUs: kernels of each reach the other's memory
    // Finds the way to here from the stage before. Where it is the host's memory, `bytes` are what a step sends at most.
    void connect(const Stage &before, uint64_t bytes);
    // Lets the steps of this stage, on a GPU, go on when those of another one have come to where they are now.
    void follow(const Stage &ahead) const;
    // Fetches a step's rows from the stage before: `rows` are copies here of their sources there.
    void receive(const Stage &before, const std::vector<const ggml_tensor *> &rows) const;
    // Says whether what is enqueued here runs beside the host and the other stages.
    bool runs_beside() const { return device.gpu || own != nullptr; }
    // Does work of a CPU: on the stage's thread where it has one.
    template <class Work> void run(Work &&work) const {
        thread ? thread->enqueue(std::forward<Work>(work)) : work();
    }
    bool has(const ggml_tensor *cache) const { return holds(tensors, cache); }

    const Device &device;
    const uint32_t first, end; // its layers of the trunk

    // The memory: pools of KV, recurrent slots and logs of its layers (engine/cache.h), and scratch of the launches there.
    Context tensors;
    ggml_tensor *rowmm_scratch = nullptr; // {bytes} I8; where matmuls count in it, it is zero between steps
    ggml_tensor *gemm_scratch = nullptr; // {bytes} I8
    uint64_t kv_bytes = 0, state_bytes = 0, expert_bytes = 0;
    Buffer memory;
    std::vector<KvPool> pools,
        window_pools; // all pools of KV here, by the kind of their pages, once they are allocated

    // The streams. On a CPU there is only that of the steps.
    Backend steps;
    std::unique_ptr<StageThread> thread; // on a CPU where a test asks for it, else null, from open() on
    std::unique_ptr<struct ggml_backend_buffer_type>
        own; // then its activations share no buffer with other stages'; from the beginning
    std::unique_ptr<void, void (*)(void *)> gemm; // it is the steps' stream, while cuBLAS is open for it
    Event reached; // where they were when another stage began to wait for them
    Buffer passage; // pinned; null where the device before reaches this one's memory
    Backend copies; // checkpoints travel on it, beside the steps
    Backend beside; // what comes to the device while it drafts,
    Event beside_ended; // and where that ends
};

// For tests: GPUs do not reach each other's memory, in engines that are opened from now on.
void part_devices(bool on);

// For tests: in engines that are opened from now on, a CPU's stages read prompts beside each other, each on a thread of its
// own. That of stage `slow` sleeps ahead of all that it does.
void thread_stages(bool on, uint32_t slow);

} // namespace luce
