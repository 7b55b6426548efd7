#include "ops/nextn.h"

#ifdef LUCE_USE_CUDA

namespace luce {

template <typename T> static T *data(const ggml_tensor *t) {
    return static_cast<T *>(t->data);
}

int nextn_pack_op(const ggml_tensor *dst, void *stream, float eps) {
    const ggml_tensor *tokens = dst->src[0], *table = dst->src[2], *hidden = dst->src[3];
    NextnPackArgs a{};
    a.T = int32_t(tokens->ne[0]);
    a.E = hidden->ne[0];
    a.eps = eps;
    a.type = table->type;
    a.n_vocab = int32_t(table->ne[1]);
    a.row_bytes = int64_t(table->nb[1]);
    a.table = table->data;
    a.tokens = data<int32_t>(tokens);
    a.drafts = data<int32_t>(dst->src[1]);
    a.hidden = data<float>(hidden);
    a.hidden_from = data<int32_t>(dst->src[4]);
    a.e_norm = data<float>(dst->src[5]);
    a.h_norm = data<float>(dst->src[6]);
    a.out = dst->data;
    return cuda::nextn_pack(a, stream);
}

int keep_hidden_op(const ggml_tensor *dst, void *stream, float eps) {
    const ggml_tensor *x = dst->src[0];
    return cuda::keep_hidden({int32_t(x->ne[1]), x->ne[0], int64_t(x->nb[1] / sizeof(float)), eps,
                              data<float>(x), data<float>(dst->src[1]), data<int64_t>(dst->src[3]),
                              data<float>(dst->src[2])},
                             stream);
}

} // namespace luce

#endif
