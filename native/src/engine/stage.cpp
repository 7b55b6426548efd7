#include "engine/stage.h"

#ifdef LUCE_USE_CUDA
#include "matmul/prompt.h"
#include "ops/matmul.h"

extern "C" void *luce_cuda_stream(ggml_backend_t backend); // cuda_stream.cu defines it
#endif

#include <ggml-backend-impl.h> // it says what an event is

#include <algorithm>
#include <atomic>
#include <vector>

namespace luce {

static std::atomic<bool> parted{false}, threaded{false};
static std::atomic<uint32_t> slow_stage{0};

void part_devices(bool on) {
    parted = on;
}

void thread_stages(bool on, uint32_t slow) {
    threaded = on;
    slow_stage = slow;
}

static void close_gemm(void *stream) {
#ifdef LUCE_USE_CUDA
    const std::lock_guard<std::mutex> alone(device_lock());
    cuda::gemm_close(stream);
#else
    (void) stream;
#endif
}

Stage::Stage(const Model &model, const Placement &on, size_t n_tensors)
    : device(*on.device), first(on.first), end(on.end),
      tensors(new_context(ggml_tensor_overhead() * (n_tensors + 2))), gemm(nullptr, close_gemm) {
#ifdef LUCE_USE_CUDA
    if (device.gpu) {
        make_current(device);
        const auto bytes = [&](int64_t n) { return ggml_new_tensor_1d(tensors.get(), GGML_TYPE_I8, n); };
        rowmm_scratch = bytes(launch_scratch_bytes());
        state_bytes += ggml_nbytes(rowmm_scratch);
        int64_t values = 0;
        for (const auto &[K, N] : model.layer_matrices()) {
            values = std::max(values, K * N);
        }
        if (values > 0) { // written out as F16
            gemm_scratch = bytes(values * 2);
            state_bytes += ggml_nbytes(gemm_scratch);
        }
    }
#else
    (void) model;
#endif
    if (threaded && !device.gpu && model.n_ranks() == 1) { // ranks wait for each other all the time
        own = std::make_unique<ggml_backend_buffer_type>(*device.buffer_type());
    }
}

ggml_backend_buffer_type *Stage::compute_type() const {
    return own ? own.get() : device.buffer_type();
}

Stage::~Stage() {
    try {
        make_current(device); // this is for what cuBLAS gives back
    } catch (const Error &) {
        // a device that has failed takes nothing back
    }
}

void Stage::allocate() {
    memory.reset(ggml_backend_alloc_ctx_tensors_from_buft(tensors.get(), device.buffer_type()));
    if (!memory) {
        fail(LUCE_E_MEMORY, "%s: allocating %s for the engine's caches failed", device.name.c_str(),
             human_bytes(kv_bytes + state_bytes + expert_bytes).c_str());
    }
    ggml_backend_buffer_clear(memory.get(), 0);
}

void Stage::open(const Model &model, int n_threads, bool drafts) {
    steps = make_backend(device, n_threads);
    if (!device.gpu) {
        if (own) {
            const auto &all = model.placements();
            const bool slow = all[slow_stage % all.size()].first == first;
            thread = std::make_unique<StageThread>(std::chrono::microseconds(slow ? 2000 : 0));
        }
        return;
    }
    copies = make_backend(device, 1);
    reached = make_event(device);
    if (drafts) {
        beside = make_backend(device, 1);
        beside_ended = make_event(device);
    }
#ifdef LUCE_USE_CUDA
    make_current(device);
    const std::lock_guard<std::mutex> alone(device_lock());
    std::vector<GemmShape> shapes;
    for (const auto &[K, N] : model.layer_matrices()) {
        if (gemm_has(K, N)) {
            shapes.push_back({N, K});
        }
    }
    void *scratch = gemm_scratch == nullptr ? nullptr : gemm_scratch->data;
    if (const int error = cuda::gemm_open(stream(steps), shapes, scratch); error != 0) {
        fail(LUCE_E_DEVICE, "%s: opening cuBLAS failed: %s", device.name.c_str(), cuda::error_text(error));
    }
    gemm.reset(stream(steps));
#endif
}

// Tensors of a compute buffer have room behind them.
uint64_t Stage::passage_bytes(const ggml_tensor *rows) {
    return (ggml_nbytes(rows) + 15) / 16 * 16;
}

bool Stage::reaches([[maybe_unused]] const Stage &other) const {
#ifdef LUCE_USE_CUDA
    return !parted && cuda::peers(other.device.index, device.index);
#else
    return true;
#endif
}

void Stage::connect([[maybe_unused]] const Stage &before, [[maybe_unused]] uint64_t bytes) {
#ifdef LUCE_USE_CUDA
    if (device.gpu && !reaches(before)) {
        passage = pinned(device, std::max<uint64_t>(bytes, 64), "rows between two devices");
    }
#endif
}

#ifdef LUCE_USE_CUDA
static void check(const Device &device, int error) {
    if (error != 0) {
        fail(LUCE_E_DEVICE, "%s: a step failed between two devices: %s", device.name.c_str(),
             cuda::error_text(error));
    }
}
#endif

void Stage::follow(const Stage &ahead) const {
    if (thread) {
        thread->follow(*ahead.thread);
    }
#ifdef LUCE_USE_CUDA
    if (device.gpu) {
        make_current(ahead.device);
        check(device, cuda::follow(stream(ahead.steps), ahead.reached->context, stream(steps)));
    }
#endif
}

void Stage::receive([[maybe_unused]] const Stage &before,
                    [[maybe_unused]] const std::vector<const ggml_tensor *> &rows) const {
#ifdef LUCE_USE_CUDA
    if (!device.gpu) { // there they are copied as all else is computed
        return;
    }
    // A kernel of the receiving device fetches them: what follows on its stream may overlap with a kernel of its own alone.
    const auto copy = [&](const Stage &by, bool leave) {
        make_current(by.device);
        uint8_t *at = passage ? static_cast<uint8_t *>(ggml_backend_buffer_get_base(passage.get())) : nullptr;
        for (const ggml_tensor *here : rows) {
            void *there = here->src[0]->data;
            const size_t bytes = passage_bytes(here);
            const void *from = leave || at == nullptr ? there : at;
            check(by.device, cuda::bring(from, leave ? at : here->data, int64_t(bytes), stream(by.steps)));
            at = at == nullptr ? nullptr : at + bytes;
        }
    };
    if (passage) {
        copy(before, true);
    }
    follow(before);
    copy(*this, false);
#endif
}

void *Stage::stream([[maybe_unused]] const Backend &backend) {
#ifdef LUCE_USE_CUDA
    return luce_cuda_stream(backend.get());
#else
    return nullptr;
#endif
}

} // namespace luce
