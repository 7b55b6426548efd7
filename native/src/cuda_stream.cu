// The stream of ggml's CUDA backend, so that our kernels are enqueued between its own. Compiled inside the
// ggml-cuda target: the one file that needs its private headers.
#include "common.cuh"
#include "ggml-backend-impl.h"

#if defined(_WIN32)
#define LUCE_EXPORT __declspec(dllexport)
#else
#define LUCE_EXPORT __attribute__((visibility("default")))
#endif

extern "C" LUCE_EXPORT void *luce_cuda_stream(ggml_backend_t backend) {
    return static_cast<ggml_backend_cuda_context *>(backend->context)->stream();
}
