// Adds matmuls to a graph, with what is computed into their input.
#include "graph/blocks.h"

#include "common/device_limits.h"
#include "ops/attention.h"
#include "ops/deltanet.h"

#include <algorithm>

namespace luce {

MatmulInput plain(ggml_tensor *x) {
    return {ROWMM_PLAIN, x, nullptr, nullptr, 0, x->ne[0], x->ne[1]};
}

MatmulInput rms(ggml_tensor *x, ggml_tensor *w, float eps) {
    return {ROWMM_RMS, x, w, nullptr, eps, x->ne[0], x->ne[1]};
}

MatmulInput swiglu(ggml_tensor *gate, ggml_tensor *up) {
    return {ROWMM_SWIGLU, gate, nullptr, up, 0, gate->ne[0], gate->ne[1]};
}

MatmulInput gated_heads(ggml_tensor *x, ggml_tensor *w, ggml_tensor *gate, float eps) {
    return {ROWMM_HEAD_RMS, x, w, gate, eps, x->ne[0], x->ne[1]};
}

MatmulInput gated(ggml_tensor *x, ggml_tensor *gate) {
    return {ROWMM_GATED, x, nullptr, gate, 0, x->ne[0], x->ne[1]};
}

ggml_tensor *rms_norm(ggml_context *ctx, ggml_tensor *x, ggml_tensor *weight, float eps) {
    return ggml_mul(ctx, ggml_rms_norm(ctx, x, eps), weight);
}

ggml_tensor *made_input(const StepBuild &b, const MatmulInput &input, bool packed,
                        const std::function<ggml_tensor *()> &make) {
    for (const MadeInput &known : b.inputs) {
        if (known.input == input && known.packed == packed) {
            return known.node;
        }
    }
    ggml_tensor *node = make();
    b.inputs.push_back({input, packed, node});
    return node;
}

static bool is_dense(const ggml_tensor *t) {
    return t == nullptr || ggml_is_contiguous(t);
}

// Makes an input's values {K, T} and their packed form by an op of the CPU, or returns null where it does not take this input.
// With a residual *sum becomes x + residual {K, T}.
static ggml_tensor *rows_input_values(const StepBuild &b, const MatmulInput &in, ggml_tensor *residual,
                                      ggml_tensor **sum) {
    if (b.model.device().gpu || !is_dense(in.x) || !is_dense(in.y) || !is_dense(residual) ||
        (in.kind != ROWMM_RMS && in.kind != ROWMM_SWIGLU && in.kind != ROWMM_HEAD_RMS)) {
        return nullptr;
    }
    RowsInputArgs a{};
    a.eps = in.eps;
    const bool swiglu = in.kind == ROWMM_SWIGLU;
    const OpNode y =
        ops::rows_input(b.ctx, {in.x, in.w, swiglu ? nullptr : in.y, swiglu ? in.y : nullptr, residual}, a);
    ggml_tensor *values = y[1];
    if (y.results[2].bytes > 0) {
        made_input(b, plain(values), true, [&] { return y[2]; });
    }
    if (residual != nullptr) {
        *sum = y[0];
    }
    return values;
}

Stream add_rows(const StepBuild &b, ggml_tensor *x, ggml_tensor *residual, const Norm &next) {
    ggml_tensor *sum = nullptr;
    ggml_tensor *values =
        residual == nullptr ? nullptr : rows_input_values(b, rms(x, next.weight, next.eps), residual, &sum);
    if (values == nullptr) {
        sum = residual == nullptr ? x : ggml_add(b.ctx, x, residual);
        return {sum, rms(sum, next.weight, next.eps)};
    }
    const MatmulInput normed = rms(sum, next.weight, next.eps);
    made_input(b, normed, false, [&] { return values; });
    return {sum, normed};
}

ggml_tensor *input_values(const StepBuild &b, const MatmulInput &in) {
    if (in.kind == ROWMM_PLAIN) {
        return in.x;
    }
    return made_input(b, in, false, [&] {
        if (ggml_tensor *values = rows_input_values(b, in, nullptr, nullptr)) {
            return values;
        }
        ggml_context *ctx = b.ctx;
        if (in.kind == ROWMM_RMS) {
            return rms_norm(ctx, in.x, in.w, in.eps);
        }
        if (in.kind == ROWMM_SWIGLU) {
            return ggml_swiglu_split(ctx, in.x, in.y);
        }
        if (in.kind == ROWMM_GATED) {
            ggml_tensor *gate = ggml_cont_2d(ctx, in.y, in.K, in.T); // {D*H, T}
            return ggml_mul(ctx, in.x, ggml_sigmoid(ctx, gate));
        }
        const int64_t S = in.w->ne[0], H = in.K / S, T = in.T;
        ggml_tensor *x = rms_norm(ctx, ggml_reshape_3d(ctx, in.x, S, H, T), in.w, in.eps); // {S, H, T}
        x = ggml_mul(ctx, x, ggml_silu(ctx, ggml_reshape_3d(ctx, in.y, S, H, T)));
        return ggml_reshape_2d(ctx, x, S * H, T);
    });
}

ggml_tensor *packed_rows(const StepBuild &b, ggml_tensor *x) {
    return made_input(b, plain(x), true, [&] { return ops::pack_rows(b.ctx, {x}); });
}

// Multiplies those weights that take x in this form, in one op.
static void add_rows_matmul(const StepBuild &b, RowsInput form, const std::vector<ggml_tensor *> &weights,
                            ggml_tensor *x, std::vector<ggml_tensor *> &out) {
    std::vector<ggml_tensor *> args = {nullptr};
    for (ggml_tensor *w : weights) {
        if (rows_input(w->type) == form) {
            args.push_back(w);
        }
    }
    if (args.size() == 1) {
        return;
    }
    args[0] = form == RowsInput::packed ? packed_rows(b, x) : x;
    const OpNode y = ops::rows_matmul(b.ctx, args);
    for (size_t i = 0, n = 0; i < weights.size(); i++) {
        if (rows_input(weights[i]->type) == form) {
            out[i] = y[int(n++)]; // {N, T}
        }
    }
}

#ifdef LUCE_USE_CUDA
static ggml_tensor *packed(const StepBuild &b, const MatmulInput &in) {
    RowmmPackArgs a{};
    a.eps = in.eps;
    switch (in.kind) {
        case ROWMM_RMS: return ops::rowmm_pack_rms(b.ctx, {in.x, in.w}, a);
        case ROWMM_SWIGLU:
            return in.y == nullptr ? ops::rowmm_parts_swiglu(b.ctx, {in.x})
                                   : ops::rowmm_pack_swiglu(b.ctx, {in.x, in.y}, a);
        case ROWMM_HEAD_RMS: return ops::rowmm_pack_gated(b.ctx, {in.x, in.w, in.y}, a);
        default: return ops::rowmm_pack(b.ctx, {in.x}, a);
    }
}

// Returns how an input was packed, as the ops rowmm.. take it.
static RowmmArgs packed_so(const MatmulInput &in) {
    RowmmArgs a{};
    a.T = int32_t(in.T);
    a.normed = in.kind == ROWMM_RMS;
    a.eps = in.eps;
    return a;
}

static bool all_packed(const std::vector<ggml_tensor *> &weights) {
    return std::all_of(weights.begin(), weights.end(), is_packed);
}

// Decides that a product is to norm and pack its row itself: it is one row, no op ahead has packed it, and a block of the
// device has room for it.
static bool packs_in_product(const StepBuild &b, const std::vector<ggml_tensor *> &weights,
                             const MatmulInput &in) {
    const auto fits = [&](const ggml_tensor *w) {
        return !is_packed(w) || rowmm_norms_row(limits_of(b.model.device()), in.K, w->type);
    };
    return in.kind == ROWMM_RMS && in.T == 1 && ggml_is_contiguous(in.x) &&
           std::none_of(b.inputs.begin(), b.inputs.end(),
                        [&](const MadeInput &known) { return known.packed && known.input == in; }) &&
           std::all_of(weights.begin(), weights.end(), fits);
}

// Multiplies packed weights in one launch. Where there is one weight, a residual may be added to its product.
static void add_rowmm(const StepBuild &b, const std::vector<ggml_tensor *> &weights, const MatmulInput &in,
                      ggml_tensor *residual, std::vector<ggml_tensor *> &out) {
    std::vector<ggml_tensor *> args = {nullptr, b.cache.rowmm_scratch()};
    if (residual != nullptr) {
        args.push_back(residual);
    }
    if (std::none_of(weights.begin(), weights.end(), is_packed)) {
        return;
    }
    std::copy_if(weights.begin(), weights.end(), std::back_inserter(args), is_packed);
    // What rowmm_pack does not compute is attention's gate; ggml's matmul needs the values too.
    const bool packs = in.kind != ROWMM_GATED && all_packed(weights);
    const MatmulInput form = packs ? in : plain(input_values(b, in));
    const bool norms = residual == nullptr && packs_in_product(b, weights, form);
    if (norms) {
        args[0] = form.w;
        args.insert(args.begin(), form.x);
    } else {
        args[0] = made_input(b, form, true, [&] { return packed(b, form); });
    }
    const OpRow<RowmmArgs> &op = norms ? ops::rowmm_norm : residual != nullptr ? ops::rowmm_add : ops::rowmm;
    const OpNode y = op(b.ctx, args, packed_so(form));
    for (size_t i = 0, n = 0; i < weights.size(); i++) {
        if (is_packed(weights[i])) {
            out[i] = y[int(n++)]; // {N, T}
        }
    }
}

// Whether products with these weights may stay parts, which the next kernel adds up.
static bool leaves_parts(const StepBuild &b, const std::vector<ggml_tensor *> &weights) {
    return !b.prefill() && all_packed(weights) &&
           std::all_of(weights.begin(), weights.end(),
                       [](const ggml_tensor *w) { return w->ne[1] % 8 == 0; });
}

static ggml_tensor *add_parts(const StepBuild &b, const std::vector<ggml_tensor *> &weights,
                              const MatmulInput &in) {
    const bool norms = packs_in_product(b, weights, in);
    std::vector<ggml_tensor *> args = {in.x, in.w};
    if (!norms) {
        args = {made_input(b, in, true, [&] { return packed(b, in); })};
    }
    args.insert(args.end(), weights.begin(), weights.end());
    return (norms ? ops::rowmm_parts_norm : ops::rowmm_parts)(b.ctx, args, packed_so(in));
}

// ---- prompts ----

// Writing out all weights pays for at least this many rows. Fewer rows have the step's own matmul (rowmm),
// which takes about as long for this many on an H200. The row count alone decides, so that a resumed prompt
// runs as a cold one.
constexpr int64_t GEMM_ROWS = 128;

bool uses_gemm(const StepBuild &b, int64_t T) {
    return b.prefill() && b.model.device().gpu && T >= GEMM_ROWS;
}

// Returns an input as gemm takes it. What a row's norm or gate gives is packed without being stored.
static ggml_tensor *packed_for_gemm(const StepBuild &b, const MatmulInput &in) {
    RowmmPackArgs a{};
    a.eps = in.eps;
    const bool side_by_side = is_dense(in.x) && is_dense(in.y);
    if (in.kind == ROWMM_RMS && side_by_side) {
        return ops::gemm_pack_norm(b.ctx, {in.x, in.w}, a);
    }
    if (in.kind == ROWMM_SWIGLU && side_by_side) {
        return ops::gemm_pack_swiglu(b.ctx, {in.x, in.y});
    }
    if (in.kind == ROWMM_GATED && is_dense(in.x)) {
        return ops::gemm_pack_gated(b.ctx, {in.x, in.y});
    }
    if (in.kind == ROWMM_HEAD_RMS && side_by_side) {
        if (const int64_t head = in.w->ne[0]; head == 16 || head == 32 || head == 64 || head == 128) {
            return ops::gemm_pack_heads(b.ctx, {in.x, in.y, in.w}, a);
        }
    }
    ggml_tensor *x = input_values(b, in);
    return ops::gemm_pack(b.ctx, {is_dense(x) ? x : ggml_cont(b.ctx, x)});
}

// Returns the product of packed weights {K, N} with an input {K, T} on cuBLAS, with residual {N, T} added where it is not
// null -> {N, T}. The matrix is written out as F16 in the cache's scratch; then the next one takes its room. It returns null
// where the product is not done so.
static ggml_tensor *add_gemm(const StepBuild &b, ggml_tensor *weight, const MatmulInput &input,
                             ggml_tensor *residual) {
    const int64_t K = weight->ne[0], N = weight->ne[1];
    if (!uses_gemm(b, input.T) || !is_packed(weight) || !gemm_has(K) ||
        size_t(K * N * 2) > ggml_nbytes(b.cache.gemm_scratch())) {
        return nullptr;
    }
    PromptMatmulArgs a{};
    a.product.T = int32_t(input.T);
    ggml_tensor *rows = made_input(b, input, true, [&] { return packed_for_gemm(b, input); });
    return ops::gemm(b.ctx, {rows, weight, b.cache.gemm_scratch(), residual}, a);
}
#endif

// Multiplies by ggml. In a step each row is a matrix of its own in a batch of products with one row: ggml's kernel for
// one row computes them, and reads the weight once for each. Its kernels for several rows would add in another order.
static ggml_tensor *mul_mat(const StepBuild &b, ggml_tensor *weight, ggml_tensor *x) {
    const int64_t T = x->ne[1];
    const bool by_row = b.model.device().gpu && !b.prefill();
    if (by_row) {
        x = ggml_view_3d(b.ctx, x, x->ne[0], 1, T, x->nb[1], x->nb[1], 0); // {K, 1, T}
    }
    ggml_tensor *y = ggml_mul_mat(b.ctx, weight, x);
    ggml_prec_set_acc(y, GGML_PREC_F32); // otherwise cuBLAS may sum F16 products in F16
    if (ggml_is_quantized(weight->type)) {
        ggml_prec_set_src(y, GGML_PREC_Q8, 1); // otherwise rows may be rounded to 4 bits for weights of 4
    }
    if (const float *scale = scales_of(weight)) {
        y = ggml_scale(b.ctx, y, *scale);
    }
    return by_row ? ggml_reshape_2d(b.ctx, y, weight->ne[1], T) : y;
}

// Chooses who multiplies. Steps have matmuls of luce's own, whose rows do not depend on each other, and of
// which further rows cost little. On a CPU (rows_matmul) a prefill has them too. On a GPU (rowmm) weights lie
// in the order of these matmuls, and ggml's matmul could not read them. So there a prefill of few rows has
// them too. One of many rows writes the weights out for cuBLAS (add_gemm), but for K that cuBLAS does not
// take. ggml multiplies what is left.
static std::vector<ggml_tensor *> products(const StepBuild &b, const std::vector<ggml_tensor *> &weights,
                                           const MatmulInput &in, ggml_tensor *residual) {
    std::vector<ggml_tensor *> out(weights.size());
    bool added = false;
#ifdef LUCE_USE_CUDA
    if (b.model.device().gpu) {
        bool any = false; // all packed ones take add_gemm or none does, since they share K and T
        for (size_t i = 0; i < weights.size(); i++) {
            out[i] = add_gemm(b, weights[i], in, residual);
            any = any || out[i] != nullptr;
        }
        if (!any) {
            add_rowmm(b, weights, in, residual, out);
        }
        added = out[0] != nullptr;
    }
#endif
    if (!b.model.device().gpu) {
        add_rows_matmul(b, RowsInput::packed, weights, input_values(b, in), out);
        add_rows_matmul(b, RowsInput::f32, weights, input_values(b, in), out);
    }
    for (size_t i = 0; i < weights.size(); i++) {
        if (out[i] == nullptr) {
            out[i] = mul_mat(b, weights[i], input_values(b, in));
        }
        if (residual != nullptr && !added) {
            out[i] = ggml_add(b.ctx, out[i], residual);
        }
    }
    return out;
}

std::vector<ggml_tensor *> matmuls(const StepBuild &b, const std::vector<ggml_tensor *> &weights,
                                   const MatmulInput &input) {
    return products(b, weights, input, nullptr);
}

ggml_tensor *matmul(const StepBuild &b, ggml_tensor *weight, const MatmulInput &input) {
    return products(b, {weight}, input, nullptr)[0];
}

DeltaInputs delta_inputs(const StepBuild &b, const MatmulInput &x, const DeltaNet &w, const DeltaState &state,
                         const DeltaShape &shape) {
    const auto y = matmuls(b, {w.qkv, w.gate, w.beta, w.alpha}, x);
    ConvArgs a{};
    a.shape = shape;
    ggml_tensor *qkv = ops::deltanet_conv(b.ctx, {y[0], w.conv, state.window, state.log, b.in.ctl}, a);
    return {qkv, y[1], y[2], y[3]};
}

DeltaOutputs delta_of_parts(const StepBuild &b, const MatmulInput &x, const DeltaNet &w,
                            const DeltaState &state, const DeltaShape &shape) {
#ifdef LUCE_USE_CUDA
    const std::vector<ggml_tensor *> weights = {w.qkv, w.gate, w.beta, w.alpha};
    if (w.shape.state_size == 128 && leaves_parts(b, weights)) {
        DeltaLayerArgs a{};
        a.conv.shape = shape;
        const OpNode y = ops::deltanet_parts(b.ctx,
                                             {add_parts(b, weights, x), w.conv, state.window, state.log,
                                              b.in.ctl, w.dt, w.a, state.state, b.cache.rowmm_scratch()},
                                             a);
        return {y[0], y[1]};
    }
#else
    (void) b, (void) x, (void) w, (void) state, (void) shape;
#endif
    return {};
}

Heads heads_of_parts(const StepBuild &b, const MatmulInput &x, const Attention &w, const KvLayer &kv,
                     float eps, bool queries) {
#ifdef LUCE_USE_CUDA
    std::vector<ggml_tensor *> weights = {w.k, w.v};
    if (queries) {
        weights.insert(weights.begin(), w.q);
    }
    const uint32_t D = w.shape.head_dim;
    // luce's op does not blend frequencies
    if ((D == 128 || D == 256) && !(w.shape.yarn.factor > 1) && leaves_parts(b, weights)) {
        AttentionHeadsArgs a{};
        a.rope_dim = int32_t(w.shape.rope_dim);
        a.base = w.shape.rope_base;
        a.eps = eps;
        a.owner = kv.owner;
        const OpNode y =
            ops::attention_heads(b.ctx,
                                 {add_parts(b, weights, x), w.k_norm, b.in.positions, kv.cells.k, kv.cells.v,
                                  b.in.ctl, b.in.pages, queries ? w.q_norm : nullptr},
                                 a);
        // It is expanded here, since attention reads the cells and not this node.
        ggml_build_forward_expand(b.graph, y.node);
        if (!queries) {
            return {nullptr, nullptr, true};
        }
        return {y[0], y[1], true};
    }
#else
    (void) b, (void) x, (void) w, (void) kv, (void) eps, (void) queries;
#endif
    return {};
}

Stream matmul_add(const StepBuild &b, ggml_tensor *weight, const MatmulInput &input, ggml_tensor *residual,
                  const Norm &next) {
#ifdef LUCE_USE_CUDA
    if (leaves_parts(b, {weight}) && !(next.of_moe && input.T <= ROWMM_WHOLE_ROWS)) {
        const OpNode y = ops::rowmm_parts_rms(b.ctx, {next.weight, add_parts(b, {weight}, input), residual});
        ggml_tensor *x = y[0]; // {E, T}
        const MatmulInput normed = rms(x, next.weight, next.eps);
        made_input(b, normed, true, [&] { return y[1]; });
        return {x, normed};
    }
#endif
    if (!b.model.device().gpu) {
        return add_rows(b, products(b, {weight}, input, nullptr)[0], residual, next);
    }
    ggml_tensor *x = products(b, {weight}, input, residual)[0];
    return {x, rms(x, next.weight, next.eps)};
}

// silu(gate * input) * (up * input), as `down` takes it.
static MatmulInput swiglu(const StepBuild &b, const Ffn &w, const MatmulInput &input) {
#ifdef LUCE_USE_CUDA
    if (leaves_parts(b, {w.gate, w.up, w.down})) {
        ggml_tensor *parts = add_parts(b, {w.gate, w.up}, input);
        return {ROWMM_SWIGLU, parts, nullptr, nullptr, 0, w.gate->ne[1], input.T};
    }
#endif
    const auto y = matmuls(b, {w.gate, w.up}, input); // {FF, T} each
    return swiglu(y[0], y[1]);
}

Stream ffn(const StepBuild &b, const Stream &s, const Ffn &w, const Norm &next) {
    return matmul_add(b, w.down, swiglu(b, w, s.normed), s.x, next);
}

} // namespace luce
