#include "ops/row.h"

#include "cpu/experts.h"
#include "cpu/inputs.h"
#include "cpu/matmul.h"
#include "cpu/sampler.h"
#include "matmul/quantised.h"
#include "ops/matmul.h"
#include "ops/moe.h"
#include "ops/nextn.h"
#include "ops/prompt_matmul.h"
#include "step/host_experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace luce {
namespace {

// In op_params, the params follow ggml's own {function, n_tasks, userdata}.
constexpr size_t PARAMS_AT = 8;
static_assert(GGML_MAX_OP_PARAMS / sizeof(int32_t) >= PARAMS_AT + 8, "op_params must hold our params");

int32_t param(const ggml_tensor *node, int i) {
    return node->op_params[PARAMS_AT + i];
}

template <typename T> T *data(const ggml_tensor *t) {
    return static_cast<T *>(t->data);
}

float real(const ggml_tensor *node, int i) {
    float x;
    memcpy(&x, &node->op_params[PARAMS_AT + i], sizeof(x));
    return x;
}

const StepCtl *ctl(const ggml_tensor *t) {
    return static_cast<const StepCtl *>(t->data);
}

DeltaShape delta_shape(const ggml_tensor *dst) {
    DeltaShape s{};
    s.T = int32_t(dst->src[0]->ne[1]);
    s.R = param(dst, 0);
    s.n_slots = param(dst, 1);
    s.Hk = param(dst, 2);
    s.Hv = param(dst, 3);
    s.S = param(dst, 4);
    s.mode = param(dst, 5);
    return s;
}

ConvArgs conv_args(const ggml_tensor *dst) {
    return {delta_shape(dst),         data<float>(dst->src[0]), data<float>(dst->src[1]),
            data<float>(dst->src[2]), data<float>(dst->src[3]), ctl(dst->src[4]),
            data<float>(dst)};
}

DeltaArgs delta_args(const ggml_tensor *dst) {
    return {delta_shape(dst),         data<float>(dst->src[0]), data<float>(dst->src[1]),
            data<float>(dst->src[2]), data<float>(dst->src[3]), data<float>(dst->src[4]),
            data<float>(dst->src[5]), data<float>(dst->src[6]), ctl(dst->src[7]),
            data<float>(dst)};
}

// Returns the pool whose k and v are {D, PAGE, Hkv, pages}.
KvPool kv_pool(const ggml_tensor *k, const ggml_tensor *v) {
    return {data<uint8_t>(k), data<uint8_t>(v), k->type, int32_t(k->ne[2]), int32_t(k->ne[0])};
}

// q_gate holds q(D) then gate(D) for each head.
NormRopeArgs norm_rope_args(const ggml_tensor *dst) {
    const ggml_tensor *k = dst->src[0], *q_gate = dst->src[3];
    NormRopeArgs a{};
    a.T = int32_t(k->ne[1]);
    a.D = int32_t(dst->src[1]->ne[0]);
    a.rope_dim = param(dst, 0);
    a.base = real(dst, 1);
    a.eps = real(dst, 2);
    a.positions = data<int32_t>(dst->src[2]);
    a.k = {data<float>(k),           k->ne[0],        a.D, int32_t(k->ne[0]) / a.D,
           data<float>(dst->src[1]), data<float>(dst)};
    if (q_gate != nullptr) {
        a.q = {data<float>(q_gate),      q_gate->ne[0],
               2 * int64_t(a.D),         int32_t(q_gate->ne[0]) / (2 * a.D),
               data<float>(dst->src[4]), data<float>(dst) + k->ne[0] * a.T};
    }
    return a;
}

KvStoreArgs kv_store_args(const ggml_tensor *dst) {
    KvStoreArgs a{};
    a.pool = kv_pool(dst->src[2], dst->src[3]);
    a.T = int32_t(dst->src[0]->ne[1]);
    a.append = param(dst, 0);
    a.owner = param(dst, 1);
    a.k = data<float>(dst->src[0]);
    a.v = data<float>(dst->src[1]);
    a.ctl = ctl(dst->src[4]);
    a.pages = data<int32_t>(dst->src[5]);
    return a;
}

AttentionArgs attention_args(const ggml_tensor *dst) {
    const ggml_tensor *q = dst->src[0], *q_gate = dst->src[1];
    AttentionArgs a{};
    a.pool = kv_pool(dst->src[2], dst->src[3]);
    const int32_t D = a.pool.D;
    a.T = int32_t(q->ne[1]);
    a.H = int32_t(q->ne[0]) / D;
    a.first = param(dst, 0);
    a.window = param(dst, 1);
    a.max_pages = param(dst, 2);
    a.scale = real(dst, 3);
    a.softcap = real(dst, 4);
    a.q = data<float>(q);
    if (param(dst, 5) != 0) { // q_gate holds gate(D), or q(D) then gate(D), for each head
        a.gate_row = q_gate->ne[0];
        a.gate_head = q_gate->ne[0] / a.H;
        a.gate = data<float>(q_gate) + a.gate_head - D;
    }
    a.block = param(dst, 6);
    a.ctl = ctl(dst->src[4]);
    a.pages = data<int32_t>(dst->src[5]);
    a.out = data<float>(dst);
    a.scratch = a.out + int64_t(D) * a.H * a.T;
    return a;
}

#ifdef LUCE_USE_CUDA
int attention_heads_op(const ggml_tensor *dst, void *stream) {
    const RowmmArgs launch = parts_launch(dst->src[0]);
    const ggml_tensor *q_norm = dst->src[7];
    AttentionHeadsArgs a{};
    a.parts = &launch;
    a.T = launch.T;
    a.k_norm = data<float>(dst->src[1]);
    a.positions = data<int32_t>(dst->src[2]);
    a.pool = kv_pool(dst->src[3], dst->src[4]);
    a.ctl = ctl(dst->src[5]);
    a.pages = data<int32_t>(dst->src[6]);
    a.rope_dim = param(dst, 0);
    a.base = real(dst, 1);
    a.eps = real(dst, 2);
    a.owner = param(dst, 3);
    if (q_norm != nullptr) {
        a.H = int32_t(launch.weights[0].N / (2 * a.pool.D));
        a.q_norm = data<float>(q_norm);
        a.q = data<float>(dst);
        a.gate = a.q + int64_t(a.T) * a.H * a.pool.D;
    }
    return cuda::attention_heads(a, stream);
}

int attention_plan_op(const ggml_tensor *dst, void *stream) {
    AttentionArgs a{};
    a.T = param(dst, 0), a.H = param(dst, 1), a.first = param(dst, 2), a.window = param(dst, 3);
    a.pool.type = param(dst, 4), a.pool.Hkv = param(dst, 5), a.pool.D = param(dst, 6);
    a.ctl = ctl(dst->src[0]);
    return cuda::attention_plan(a, dst->data, stream);
}

int attention_packed_op(const ggml_tensor *dst, void *stream) {
    AttentionArgs a = attention_args(dst);
    a.plan = dst->src[6] == nullptr ? nullptr : dst->src[6]->data;
    a.layer = a.plan == nullptr ? 0 : param(dst, 6);
    a.block = 0;
    a.packed = a.out;
    a.scratch = a.out + rowmm_op_bytes(a.T, int64_t(a.pool.D) * a.H) / int64_t(sizeof(float));
    a.out = nullptr;
    return cuda::attention(a, stream);
}
#endif

KvGatherArgs kv_gather_args(const ggml_tensor *dst) {
    KvGatherArgs a{};
    a.pool = kv_pool(dst->src[0], dst->src[0]);
    a.n_kv = dst->ne[1];
    a.ctl = ctl(dst->src[1]);
    a.pages = data<int32_t>(dst->src[2]);
    a.out_type = dst->type;
    a.out = dst->data;
    return a;
}

MaskArgs mask_args(const ggml_tensor *dst) {
    return {int32_t(dst->ne[1]), dst->ne[0],       param(dst, 0),
            param(dst, 1),       ctl(dst->src[0]), data<uint16_t>(dst)};
}

ChooseArgs choose_args(const ggml_tensor *dst) {
    const ggml_tensor *logits = dst->src[0];
    return {data<float>(logits),
            logits->ne[0],
            int32_t(logits->ne[1]),
            ctl(dst->src[1]),
            param(dst, 0),
            data<ChoiceRow>(dst),
            dst->src[2] != nullptr ? data<int32_t>(dst->src[2]) : nullptr,
            dst->src[3] != nullptr ? data<int32_t>(dst->src[3]) : nullptr};
}

TopkArgs topk_args(const ggml_tensor *dst) {
    const ggml_tensor *logits = dst->src[0];
    TopkArgs a{};
    a.logits = data<float>(logits);
    a.n = logits->ne[0];
    a.T = int32_t(logits->ne[1]);
    a.k = param(dst, 0);
    a.ctl = ctl(dst->src[1]);
    a.lists = data<int32_t>(dst->src[2]);
    a.scratch = data<int32_t>(dst);
    return a;
}

TokensArgs tokens_args(const ggml_tensor *dst) {
    const ggml_tensor *tokens = dst->src[0];
    return {data<int32_t>(tokens), data<int32_t>(dst->src[1]), int32_t(tokens->ne[0]), param(dst, 0),
            data<int32_t>(dst)};
}

PackArgs pack_args(const ggml_tensor *dst) {
    const ggml_tensor *x = dst->src[0];
    return {data<float>(x), x->ne[0], int32_t(x->ne[1]), data<PackedBlock>(dst)};
}

RowsMatmulArgs rows_matmul_args(const ggml_tensor *dst) {
    RowsMatmulArgs a{};
    a.x = dst->src[0]->data;
    a.T = int32_t(dst->src[0]->ne[1]);
    a.K = dst->src[1]->ne[0];
    float *out = data<float>(dst);
    for (int i = 0; i < MAX_WEIGHTS && dst->src[1 + i] != nullptr; i++) {
        const ggml_tensor *w = dst->src[1 + i];
        a.weights[a.n_weights++] = {w->data, w->type, w->ne[1], w->nb[1], out, scales_of(w)};
        out += w->ne[1] * a.T;
    }
    return a;
}

#ifdef LUCE_USE_CUDA
int deltanet_chunks_op(const ggml_tensor *dst, void *stream) {
    const DeltaArgs a = delta_args(dst);
    return cuda::deltanet_chunks(a, a.out + int64_t(a.shape.T) * a.shape.Hv * a.shape.S, stream);
}
#endif

// One thread runs it alone here. A step has its team run it (RamStage).
void cpu_ram_experts(const ggml_tensor *dst, int ith, int) {
    if (ith == 0) {
        RamExperts().run(ram_experts_args(dst),
                         [](int64_t n, const std::function<void(int64_t, int64_t)> &share) { share(0, n); });
    }
}

void cpu_choose(const ChooseArgs &a, int ith, int nth) {
    for (int t = ith; t < a.T; t += nth) {
        const float *x = a.logits + t * a.n;
        const RowCtl &row = a.ctl->rows[t];
        const bool finite = std::all_of(x, x + a.n, [](float value) { return std::isfinite(value); });
        const ChoiceCtl greedy{};
        a.out[t].token = choose(x, a.n, finite && row.seq >= 0 ? a.ctl->seqs[row.seq].choice : greedy,
                                uint64_t(row.position + a.ahead));
        a.out[t].not_finite = finite ? 0 : 1;
        for (int32_t *kept : {a.drafts, a.given}) {
            if (kept != nullptr && row.keep >= 0) {
                kept[2 * row.keep] = a.out[t].token;
                kept[2 * row.keep + 1] = a.out[t].not_finite;
            }
        }
    }
}

#ifdef LUCE_USE_CUDA
#define LUCE_CUDA_OP(call) [](const ggml_tensor *dst, void *stream) -> int { return cuda::call; }
#else
#define LUCE_CUDA_OP(call) nullptr
#endif
// LUCE_OP is an op `name` whose arguments are those that `args` makes of a node.
#define LUCE_OP(name, signature, cpu, cuda, args)                                                            \
    {name, signature, [](const ggml_tensor *dst, int ith, int nth) { cpu(args(dst), ith, nth); },            \
     LUCE_CUDA_OP(cuda(args(dst), stream))}
// LUCE_CPU_OP is the same for a matmul that CUDA has other ops for. It is even.
#define LUCE_CPU_OP(name, signature, cpu, args)                                                              \
    {name, signature, [](const ggml_tensor *dst, int ith, int nth) { cpu(args(dst), ith, nth); }, nullptr,   \
     true}

#ifdef LUCE_USE_CUDA
MoeOp moe_params(const ggml_tensor *dst) {
    return {{param(dst, 0), param(dst, 1), param(dst, 2), param(dst, 3), param(dst, 4), param(dst, 5)},
            (param(dst, 6) & MOE_FUSED) != 0,
            (param(dst, 6) & MOE_VALUES) != 0,
            real(dst, 7)};
}
template <int (*LAUNCH)(const ggml_tensor *, void *, const MoeOp &)>
int moe_op(const ggml_tensor *dst, void *stream) {
    return LAUNCH(dst, stream, moe_params(dst));
}

int deltanet_parts_op(const ggml_tensor *dst, void *stream) {
    const RowmmArgs launch = parts_launch(dst->src[0]);
    DeltaShape shape = delta_shape(dst);
    shape.T = launch.T;
    float *results[5]; // the delta rule's, then z, beta and alpha, then the conv's
    float *at = data<float>(dst);
    for (int i = 0; i < 5; i++) {
        results[i] = at;
        at += launch.weights[i == 0 ? 1 : i % 4].N * shape.T;
    }
    float *log = data<float>(dst->src[3]);
    const StepCtl *control = ctl(dst->src[4]);
    return cuda::deltanet_layer(
        {{{shape, nullptr, data<float>(dst->src[1]), data<float>(dst->src[2]), log, control, results[4]},
          &launch,
          {results[1], results[2], results[3]}},
         {shape, results[4], results[3], results[2], data<float>(dst->src[5]), data<float>(dst->src[6]),
          data<float>(dst->src[7]), log, control, results[0]},
         launch_scratch(dst->src[8]).turns},
        stream);
}

template <RowmmInput KIND> int pack_op(const ggml_tensor *dst, void *stream) {
    return rowmm_pack_op(dst, stream, KIND, real(dst, 0));
}
#endif

static_assert(CHOICE_WIDTH == 5372, "choose says so");
const CustomOp OPS[] = {
    LUCE_OP("deltanet_conv", "C,T 4,C C,3,s* l,q* ctl > C,T", cpu_conv, conv, conv_args),
    LUCE_OP("deltanet", "C,T h,T h,T h h S,S,h,s* l,q* ctl > S,h,T", cpu_deltanet, deltanet, delta_args),
#ifdef LUCE_USE_CUDA
    {"deltanet_chunks", "C,T h,T h,T h h S,S,h,s* l,q* ctl > S,h,T", nullptr, deltanet_chunks_op},
#endif
    LUCE_OP("norm_rope", "K,T h iT Q,T? h? > K,T", cpu_norm_rope, norm_rope, norm_rope_args),
    LUCE_OP("kv_store", "Dh,T Dh,T kD,256,h,p* kD,256,h,p* ctl in > 1", cpu_kv_store, kv_store,
            kv_store_args),
    LUCE_OP("attention", "Q,T G,T kD,256,h,p kD,256,h,p ctl in > Q,T", cpu_attention, attention,
            attention_args),
    LUCE_OP("block_attention", "Q,T G,T kD,256,h,p kD,256,h,p ctl in > Q,T", cpu_attention, block_attention,
            attention_args),
    LUCE_OP("kv_gather", "kD,256,h,p ctl in > D,h", cpu_kv_gather, kv_gather, kv_gather_args),
    LUCE_OP("prefill_mask", "ctl > 1", cpu_prefill_mask, prefill_mask, mask_args),
    LUCE_OP("choose", "n,T ctl i2,d*? i2,d*? > 5372,T", cpu_choose, choose, choose_args),
    LUCE_OP("topk", "n,T ctl iL,e* > 1,T", cpu_topk, topk, topk_args),
    LUCE_OP("row_tokens", "iT i2,n > T", cpu_row_tokens, row_tokens, tokens_args),
    LUCE_CPU_OP("pack_rows", "K,T > 2,K,T", cpu_pack_rows, pack_args),
    LUCE_CPU_OP("rows_input", "K,T N,M K,T? > K,T", cpu_rows_input, rows_input_args),
    LUCE_CPU_OP("rows_matmul", "xP,T mK,A mK,B? mK,C? mK,D? > A,T", cpu_rows_matmul, rows_matmul_args),
    LUCE_CPU_OP("route", "n,T > T", cpu_route, route_args),
    LUCE_CPU_OP("experts", "iU,T xP,R mK,N,n mK,N,n? > R", cpu_experts, experts_args),
    {"ram_experts", "xR xV mF,E,n mE,G,n mE,F,n? > 1", cpu_ram_experts, nullptr, false, true},
    LUCE_CPU_OP("add_shared", "E,T E,T 1,T > E,T", cpu_add_shared, add_shared_args),
    LUCE_CPU_OP("experts_sum", "iU,T E,P > E,T", cpu_experts_sum, experts_sum_args),
#ifdef LUCE_USE_CUDA
    {"rowmm_pack", "K,T > 1", nullptr, pack_op<ROWMM_PLAIN>},
    {"rowmm_pack_rms", "K,T K > 1", nullptr, pack_op<ROWMM_RMS>},
    {"rowmm_pack_swiglu", "K,T K,T > 1", nullptr, pack_op<ROWMM_SWIGLU>},
    {"rowmm_pack_gated", "K,T h K,T > 1", nullptr, pack_op<ROWMM_HEAD_RMS>},
    {"rowmm", "xP xS mK,A mK,B? mK,C? mK,D? > A", nullptr, rowmm_op},
    {"rowmm_norm", "K,T K xS mK,A mK,B? mK,C? mK,D? > A", nullptr, rowmm_op},
    {"rowmm_add", "xP xS A,T mK,A > A", nullptr, rowmm_op},
    {"rowmm_parts", "xP mK,A mK,B? mK,C? mK,D? > A", nullptr, rowmm_parts_op},
    {"rowmm_parts_norm", "K,T K mK,A mK,B? mK,C? mK,D? > A", nullptr, rowmm_parts_op},
    {"deltanet_parts", "xP 4,C C,3,s* l,q* ctl h h S,S,h,s* xS* > C", nullptr, deltanet_parts_op},
    {"nextn_pack", "iT i2,d mE,V E,n iT E E > 1", nullptr,
     [](const ggml_tensor *dst, void *stream) { return nextn_pack_op(dst, stream, real(dst, 0)); }},
    {"keep_hidden", "E,T E E,n* iT > 1", nullptr,
     [](const ggml_tensor *dst, void *stream) { return keep_hidden_op(dst, stream, real(dst, 0)); }},
    {"attention_heads", "xP h iT kw,c* kw,c* ctl ip h? > 1", nullptr, attention_heads_op},
    {"attention_plan", "ctl > 1", nullptr, attention_plan_op},
    {"attention_packed", "Q,T G,T kw,c kw,c ctl ip iP? > 1", nullptr, attention_packed_op},
    {"rowmm_parts_rms", "K xP K,T? > K,T", nullptr, rowmm_parts_rms_op},
    {"rowmm_parts_swiglu", "xP > 1", nullptr, rowmm_parts_swiglu_op},
    {"gemm_pack", "K,T > 1", nullptr,
     [](const ggml_tensor *dst, void *stream) { return gemm_pack_op(dst, stream, ROWMM_PLAIN, 0); }},
    {"gemm_pack_norm", "K,T K > 1", nullptr,
     [](const ggml_tensor *dst, void *stream) { return gemm_pack_op(dst, stream, ROWMM_RMS, real(dst, 0)); }},
    {"gemm_pack_swiglu", "K,T K,T > 1", nullptr,
     [](const ggml_tensor *dst, void *stream) { return gemm_pack_op(dst, stream, ROWMM_SWIGLU, 0); }},
    {"gemm_pack_gated", "K,T D,H,T > 1", nullptr,
     [](const ggml_tensor *dst, void *stream) { return gemm_pack_op(dst, stream, ROWMM_GATED, 0); }},
    {"gemm_pack_heads", "K,T K,T h > 1", nullptr,
     [](const ggml_tensor *dst, void *stream) {
         return gemm_pack_op(dst, stream, ROWMM_HEAD_RMS, real(dst, 0));
     }},
    {"gemm", "xP mK,N xS* > N", nullptr, gemm_op},
    {"gemm_add", "xP mK,N xS* N,T > N,T", nullptr, gemm_op},
    {"ram_give", "xR > 1", nullptr, nullptr, false, false, true},
    {"moe_route", "E,T E xS E,n E? > 1", nullptr, moe_op<moe_route_op>},
    {"moe_up", "xR mE,F,n mE,G,m? mE,H,l? mE,I,k? > 1", nullptr, moe_op<moe_up_op>},
    {"moe_down", "xR H mF,E,n mG,E? > 1", nullptr, moe_op<moe_down_op>},
    {"moe_end", "xR H mF,E,n E,T mG,E? > 1", nullptr, moe_op<moe_end_op>},
    {"moe_sum", "xR Y E,T E E,T? > 1", nullptr, moe_op<moe_sum_op>},
#endif
};

void run_on_cpu(ggml_tensor *dst, int ith, int nth, void *op) {
    static_cast<const CustomOp *>(op)->cpu(dst, ith, nth);
}

} // namespace

#ifdef LUCE_USE_CUDA
RowmmOp rowmm_op_of(const ggml_tensor *dst) {
    return {param(dst, 0), param(dst, 1), real(dst, 2)};
}
#endif

int32_t bits_of_real(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

int CustomOp::n_args() const {
    return int(std::count(signature, strchr(signature, '>'), ' ')); // there is one before the result, too
}

int CustomOp::n_required() const {
    return n_args() - int(std::count(signature, signature + strlen(signature), '?'));
}

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
    struct { // ggml_custom_4d writes this layout
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
    if (n_args > op.n_args() || n_args < op.n_required() || n_params > 8) {
        fail(LUCE_E_INTERNAL, "op %s takes %d arguments, got %d", op.name, op.n_args(), n_args);
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
