// A step as one CUDA graph: recorded once from its stream, then replayed. What may change between replays is
// only what the captured pointers point to.
#include "kernels.h"

#include <cuda_runtime.h>

namespace luce {

const char *cuda::error_text(int error) {
    return cudaGetErrorString(cudaError_t(error));
}

// Relaxed: ggml may allocate from its pools while the step is recorded.
int cuda::capture_begin(void *stream) {
    return int(cudaStreamBeginCapture(static_cast<cudaStream_t>(stream), cudaStreamCaptureModeRelaxed));
}

// *executable is null after an error. A failed recording is ended too, so that the stream is usable again.
int cuda::capture_end(void *stream, void **executable) {
    *executable = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    cudaError_t error = cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &graph);
    if (error == cudaSuccess) {
        error = cudaGraphInstantiateWithFlags(&exec, graph, 0);
    }
    if (graph != nullptr) {
        cudaGraphDestroy(graph);
    }
    if (error != cudaSuccess) {
        cudaGetLastError(); // it is reported here; the next launch must not report it again
        return int(error);
    }
    *executable = exec;
    return 0;
}

int cuda::capture_launch(void *executable, void *stream) {
    return int(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable), static_cast<cudaStream_t>(stream)));
}

void cuda::capture_free(void *executable) {
    if (executable != nullptr) {
        cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable));
    }
}

} // namespace luce
