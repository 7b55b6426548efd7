#include "engine/stage.h"

#ifdef LUCE_USE_CUDA
#include "matmul/prompt.h"
#include "ops/matmul.h"

extern "C" void *luce_cuda_stream(ggml_backend_t backend); // cuda_stream.cu defines it
#endif

#include <algorithm>

namespace luce {

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
             human_bytes(kv_bytes + state_bytes).c_str());
    }
    ggml_backend_buffer_clear(memory.get(), 0);
}

void Stage::open([[maybe_unused]] const Model &model, int n_threads, bool drafts) {
    steps = make_backend(device, n_threads);
    if (!device.gpu) {
        return;
    }
    copies = make_backend(device, 1);
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

void *Stage::stream([[maybe_unused]] const Backend &backend) {
#ifdef LUCE_USE_CUDA
    return luce_cuda_stream(backend.get());
#else
    return nullptr;
#endif
}

} // namespace luce
