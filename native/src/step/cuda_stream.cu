// The stream of ggml's CUDA backend, so that our kernels are enqueued between its own. Compiled inside the
// ggml-cuda target: the one file that needs its private headers.
#include "common.cuh"
#include "ggml-backend-impl.h"

extern "C" __attribute__((visibility("default"))) void *luce_cuda_stream(ggml_backend_t backend) {
    return static_cast<ggml_backend_cuda_context *>(backend->context)->stream();
}
