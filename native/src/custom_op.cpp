#include "custom_op.h"

#include <cmath>
#include <cstring>
#include <vector>

namespace luce {
namespace {

// params follow ggml's own {function, n_tasks, userdata} in op_params
constexpr size_t PARAMS_AT = 8;
static_assert(GGML_MAX_OP_PARAMS / sizeof(int32_t) >= PARAMS_AT + 8, "op_params must hold our params");

int32_t param(const ggml_tensor *node, int i) {
    return node->op_params[PARAMS_AT + i];
}

template <typename T> T *data(const ggml_tensor *t) {
    return static_cast<T *>(t->data);
}

DeltaShape delta_shape(const ggml_tensor *dst) {
    DeltaShape s{};
    s.T = int32_t(dst->src[0]->ne[1]);
    s.R = param(dst, 0);
    s.Hk = param(dst, 1);
    s.Hv = param(dst, 2);
    s.S = param(dst, 3);
    s.mode = param(dst, 4);
    return s;
}

ConvArgs conv_args(const ggml_tensor *dst) {
    return {delta_shape(dst),         data<float>(dst->src[0]), data<float>(dst->src[1]),
            data<float>(dst->src[2]), data<float>(dst->src[3]), data<int32_t>(dst->src[4]),
            data<float>(dst)};
}

DeltaArgs delta_args(const ggml_tensor *dst) {
    return {delta_shape(dst),         data<float>(dst->src[0]), data<float>(dst->src[1]),
            data<float>(dst->src[2]), data<float>(dst->src[3]), data<float>(dst->src[4]),
            data<float>(dst->src[5]), data<float>(dst->src[6]), data<int32_t>(dst->src[7]),
            data<float>(dst)};
}

ArgmaxArgs argmax_args(const ggml_tensor *dst) {
    const ggml_tensor *logits = dst->src[0];
    return {data<float>(logits), logits->ne[0], int32_t(logits->ne[1]), data<int32_t>(dst)};
}

KvMoveArgs kv_move_args(const ggml_tensor *dst) {
    const ggml_tensor *k = dst->src[0], *v = dst->src[1];
    return {data<uint8_t>(k), data<uint8_t>(v), int64_t(k->nb[1]), int64_t(v->nb[1]),
            data<int32_t>(dst->src[2])};
}

void cpu_argmax(const ggml_tensor *dst, int ith, int nth) {
    const ArgmaxArgs a = argmax_args(dst);
    for (int row = ith; row < a.T; row += nth) {
        const float *x = a.logits + row * a.n;
        int64_t best = 0;
        bool finite = true;
        for (int64_t i = 0; i < a.n; i++) {
            finite = finite && std::isfinite(x[i]);
            best = x[i] > x[best] ? i : best;
        }
        a.out[row * ARGMAX_WIDTH] = int32_t(best);
        a.out[row * ARGMAX_WIDTH + 1] = finite ? 0 : 1;
    }
}

void cpu_kv_move(const ggml_tensor *dst, int ith, int nth) {
    const KvMoveArgs a = kv_move_args(dst);
    const int32_t base = a.path[0], n = a.path[1];
    for (int which = ith; which < 2; which += nth) {
        uint8_t *cache = which == 0 ? a.k : a.v;
        const int64_t row = which == 0 ? a.k_row : a.v_row;
        for (int32_t i = 0; i < n; i++) {
            memmove(cache + (base + i) * row, cache + (base + a.path[2 + i]) * row, size_t(row));
        }
    }
}

#ifdef LUCE_USE_CUDA
#define LUCE_CUDA_OP(call) [](const ggml_tensor *dst, void *stream) -> int { return cuda::call; }
#else
#define LUCE_CUDA_OP(call) nullptr
#endif

const CustomOp OPS[] = {
    {"deltanet_conv", 5, 1u << 2 | 1u << 3,
     [](const ggml_tensor *dst, int ith, int nth) { cpu_conv(conv_args(dst), ith, nth); },
     LUCE_CUDA_OP(conv(conv_args(dst), stream))},
    {"deltanet", 8, 1u << 5 | 1u << 6,
     [](const ggml_tensor *dst, int ith, int nth) { cpu_deltanet(delta_args(dst), ith, nth); },
     LUCE_CUDA_OP(deltanet(delta_args(dst), stream))},
    {"argmax", 1, 0, cpu_argmax, LUCE_CUDA_OP(argmax(argmax_args(dst), stream))},
    {"kv_move", 3, 1u << 0 | 1u << 1, cpu_kv_move, LUCE_CUDA_OP(kv_move(kv_move_args(dst), stream))},
};

void run_on_cpu(ggml_tensor *dst, int ith, int nth, void *op) {
    static_cast<const CustomOp *>(op)->cpu(dst, ith, nth);
}

} // namespace

const CustomOp *find_op(const char *name) {
    for (const CustomOp &op : OPS) {
        if (strcmp(op.name, name) == 0) {
            return &op;
        }
    }
    return nullptr;
}

const CustomOp *custom_op(const ggml_tensor *node) {
    if (node->op != GGML_OP_CUSTOM) {
        return nullptr;
    }
    struct { // the layout that ggml_custom_4d writes
        ggml_custom_op_t fun;
        int n_tasks;
        void *userdata;
    } header;
    static_assert(sizeof(header) <= PARAMS_AT * sizeof(int32_t), "our params must not overlap ggml's");
    memcpy(&header, node->op_params, sizeof(header));
    return static_cast<const CustomOp *>(header.userdata);
}

ggml_tensor *add_op(ggml_context *ctx, const CustomOp &op, ggml_type type, int64_t ne0, int64_t ne1,
                    ggml_tensor **args, int n_args, const int32_t *params, int n_params) {
    if (n_args != op.n_args || n_params > 8) {
        fail(LUCE_E_INTERNAL, "op %s takes %d arguments, got %d", op.name, op.n_args, n_args);
    }
    ggml_tensor *node = ggml_custom_4d(ctx, type, ne0, ne1, 1, 1, args, n_args, run_on_cpu, GGML_N_TASKS_MAX,
                                       const_cast<CustomOp *>(&op));
    for (int i = 0; i < n_params; i++) {
        node->op_params[PARAMS_AT + i] = params[i];
    }
    return node;
}

ggml_tensor *add_op(ggml_context *ctx, const char *name, ggml_type type, int64_t ne0, int64_t ne1,
                    std::initializer_list<ggml_tensor *> args, std::initializer_list<int32_t> params) {
    std::vector<ggml_tensor *> list(args);
    return add_op(ctx, *find_op(name), type, ne0, ne1, list.data(), int(list.size()), params.begin(),
                  int(params.size()));
}

} // namespace luce
