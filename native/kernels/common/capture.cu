// Records a step as one CUDA graph, once from its stream, and replays it. Between replays, only what the
// captured pointers point to may change.
#include "common/kernels.h"

#include <cuda_runtime.h>

namespace luce {

// cuBLAS's own text comes from its library, which this file does without.
static const char *cublas_text(int status) {
    switch (status) {
        case 1: return "cuBLAS could not be initialised: its library or the device lacks memory";
        case 3: return "cuBLAS found no device memory";
        case 7: return "cuBLAS refused a value";
        case 8: return "cuBLAS does not have this operation on this GPU";
        case 11: return "cuBLAS could not reach device memory";
        case 13: return "cuBLAS could not run a kernel";
        case 14: return "cuBLAS failed within";
        case 15: return "cuBLAS does not support this product";
        default: return "cuBLAS failed";
    }
}

const char *cuda::error_text(int error) {
    return error >= CUBLAS_ERRORS ? cublas_text(error - CUBLAS_ERRORS)
                                  : cudaGetErrorString(cudaError_t(error));
}

int cuda::device_error() {
    int count = 0;
    return int(cudaGetDeviceCount(&count));
}

int cuda::compute_capability(int device) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    return 10 * major + minor;
}

int cuda::set_device(int device) {
    const cudaError_t error = cudaSetDevice(device);
    cudaGetLastError(); // launches report the thread's last error, which other code may have left
    return int(error);
}

int cuda::current_device() {
    int device = -1;
    return cudaGetDevice(&device) == cudaSuccess ? device : -1;
}

// The mode is relaxed, since ggml may allocate from its pools while the step is recorded.
int cuda::capture_begin(void *stream) {
    return int(cudaStreamBeginCapture(static_cast<cudaStream_t>(stream), cudaStreamCaptureModeRelaxed));
}

// After an error *executable is null. A failed recording is ended too, so that the stream is usable again.
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
        cudaGetLastError(); // it is reported here, and the next launch must not report it again
        return int(error);
    }
    *executable = exec;
    return 0;
}

// Ends a recording, also one that something has invalidated. It does nothing where none is going on.
void cuda::capture_abandon(void *stream) {
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(st, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone) {
        cudaGraph_t graph = nullptr;
        if (cudaStreamEndCapture(st, &graph) == cudaSuccess && graph != nullptr) {
            cudaGraphDestroy(graph);
        }
    }
    cudaGetLastError(); // the caller knows what failed, and the next launch must not report it again
}

int cuda::leave_beside(const void *device, void *host, int64_t bytes, void *stream) {
    const cudaError_t error = cudaMemcpyAsync(host, device, size_t(bytes), cudaMemcpyDeviceToHost,
                                              static_cast<cudaStream_t>(stream));
    cudaGetLastError(); // it is reported here, and the next launch must not report it again
    return int(error);
}

int cuda::record(void *event, void *stream) {
    const cudaError_t error =
        cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream));
    cudaGetLastError();
    return int(error);
}

int cuda::failed(void *stream) {
    const cudaError_t error = cudaStreamQuery(static_cast<cudaStream_t>(stream));
    cudaGetLastError(); // so does a stream that is busy
    return error == cudaErrorNotReady ? 0 : int(error);
}

bool cuda::pin(void *host, size_t bytes) {
    const bool done = cudaHostRegister(host, bytes, cudaHostRegisterPortable) == cudaSuccess;
    cudaGetLastError(); // without it copies are slower, and nothing else
    return done;
}

void cuda::unpin(void *host) {
    cudaHostUnregister(host);
    cudaGetLastError();
}

bool cuda::is_pinned(void *host) {
    void *device = nullptr;
    const bool mapped = cudaHostGetDevicePointer(&device, host, 0) == cudaSuccess && device == host;
    cudaGetLastError(); // the caller knows it, and the next launch must not report it
    return mapped;
}

int cuda::stopped(void *stream) {
    const cudaError_t error = cudaStreamQuery(static_cast<cudaStream_t>(stream));
    return error == cudaErrorNotReady ? 0 : error == cudaSuccess ? int(cudaErrorUnknown) : int(error);
}

int cuda::finish(void *stream) {
    const cudaError_t error = cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
    cudaGetLastError(); // it is reported here, and the next launch must not report it again
    return int(error);
}

int cuda::finish_event(void *event) {
    const cudaError_t error = cudaEventSynchronize(static_cast<cudaEvent_t>(event));
    cudaGetLastError();
    return int(error);
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
