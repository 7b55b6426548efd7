#include "op_run.h"

#include "custom_op.h"
#include "device.h"
#include "model.h"

#include <ggml-cpu.h>

#ifdef LUCE_USE_CUDA
extern "C" void *luce_cuda_stream(ggml_backend_t backend); // cuda_stream.cu
#endif

namespace luce {
namespace {

ggml_tensor *make_tensor(ggml_context *ctx, const luce_array &array) {
    if (array.type != GGML_TYPE_F32 && array.type != GGML_TYPE_F16 && array.type != GGML_TYPE_I32) {
        fail(LUCE_E_ARG, "an op's arrays are F32, F16 or I32, got type %d", array.type);
    }
    int64_t ne[GGML_MAX_DIMS], elements = 1;
    for (int d = 0; d < GGML_MAX_DIMS; d++) {
        ne[d] = int64_t(array.ne[d]);
        if (ne[d] < 1 || ne[d] > (int64_t(1) << 32) || (elements *= ne[d]) > (int64_t(1) << 32)) {
            fail(LUCE_E_ARG, "dimension %d of an array is %llu", d, (unsigned long long) array.ne[d]);
        }
    }
    return ggml_new_tensor(ctx, ggml_type(array.type), GGML_MAX_DIMS, ne);
}

} // namespace

void run_op(const char *device_name, const char *name, luce_array *args, uint32_t n_args,
            const int32_t *params, uint32_t n_params, luce_array *out) {
    const Device &device = find_device(device_name);
    const CustomOp *op = find_op(name);
    if (op == nullptr || int(n_args) != op->n_args || n_params > 8) {
        fail(LUCE_E_ARG, "op %s with %u arguments and %u params does not exist", name, n_args, n_params);
    }
    const ggml_init_params init = {ggml_tensor_overhead() * (n_args + 2) + ggml_graph_overhead(), nullptr,
                                   true};
    Context context(ggml_init(init));
    ggml_context *ctx = context.get();
    ggml_tensor *tensors[GGML_MAX_SRC] = {};
    for (uint32_t i = 0; i < n_args; i++) {
        tensors[i] = make_tensor(ctx, args[i]);
    }
    make_tensor(ctx, *out); // checks the shape
    ggml_tensor *result = add_op(ctx, *op, ggml_type(out->type), int64_t(out->ne[0]), int64_t(out->ne[1]),
                                 tensors, int(n_args), params, int(n_params));
    Backend backend = make_backend(device, 2);
    Buffer buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx, device.buffer_type()));
    if (!buffer) {
        fail(LUCE_E_MEMORY, "%s: allocating the op's arrays failed", device.name.c_str());
    }
    for (uint32_t i = 0; i < n_args; i++) {
        ggml_backend_tensor_set(tensors[i], args[i].data, 0, ggml_nbytes(tensors[i]));
    }
    ggml_backend_tensor_set(result, out->data, 0, ggml_nbytes(result)); // tests poison it
    if (device.gpu) {
#ifdef LUCE_USE_CUDA
        if (const int error = op->cuda(result, luce_cuda_stream(backend.get())); error != 0) {
            fail(LUCE_E_DEVICE, "%s: %s: %s", device.name.c_str(), name, cuda::error_text(error));
        }
#endif
    } else {
        ggml_cgraph *graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, result);
        ggml_backend_graph_compute(backend.get(), graph);
    }
    ggml_backend_synchronize(backend.get());
    for (uint32_t i = 0; i < n_args; i++) {
        if (op->writes >> i & 1) {
            ggml_backend_tensor_get(tensors[i], args[i].data, 0, ggml_nbytes(tensors[i]));
        }
    }
    ggml_backend_tensor_get(result, out->data, 0, ggml_nbytes(result));
}

} // namespace luce
