#include "nextn_op.h"

#include "rowmm_op.h"

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

// The arguments from `first` on are x, its norm, the kept rows, and where each row goes.
static KeepHiddenArgs keep_hidden_args(const ggml_tensor *dst, int first, float eps) {
    const ggml_tensor *x = dst->src[first];
    return {int32_t(x->ne[1]),
            x->ne[0],
            int64_t(x->nb[1] / sizeof(float)),
            eps,
            data<float>(x),
            data<float>(dst->src[first + 1]),
            data<int64_t>(dst->src[first + 3]),
            data<float>(dst->src[first + 2])};
}

int keep_hidden_op(const ggml_tensor *dst, void *stream, float eps) {
    return cuda::keep_hidden(keep_hidden_args(dst, 0, eps), stream);
}

int choose_draft_op(const ggml_tensor *dst, void *stream, float eps) {
    const RowmmArgs launch = parts_launch(dst->src[0]);
    const ggml_tensor *table = dst->src[8];
    ChooseArgs a{};
    a.logits = data<float>(dst);
    a.n = launch.weights[0].N;
    a.T = launch.T;
    a.ctl = data<const StepCtl>(dst->src[1]);
    a.ahead = 1;
    a.out = reinterpret_cast<ChoiceRow *>(a.logits + a.n * a.T);
    a.drafts = data<int32_t>(dst->src[2]);
    a.given = data<int32_t>(dst->src[3]);
    a.parts = &launch;
    a.hidden = keep_hidden_args(dst, 4, eps);
    a.table = table->ne[1] >= a.n ? table->data : nullptr;
    a.row_bytes = int64_t(table->nb[1]);
    return cuda::choose(a, stream);
}

} // namespace luce

#endif
