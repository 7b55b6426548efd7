// Adds matmuls to a graph, with what is computed into their input.
#include "graph/blocks.h"

#include "common/device_limits.h"
#include "cpu/inputs.h"
#include "cpu/matmul.h"
#include "matmul/prompt.h"
#include "ops/matmul.h"
#include "ops/prompt_matmul.h"
#include "ops/row.h"

#include <algorithm>
#include <array>

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
    return made_input(b, plain(x), true, [&] {
        const int64_t bytes = x->ne[0] / 32 * int64_t(sizeof(PackedBlock));
        return add_op(b.ctx, "pack_rows", GGML_TYPE_I8, bytes, x->ne[1], {x});
    });
}

// Multiplies those weights that take x in this form, in one op.
static void add_rows_matmul(const StepBuild &b, RowsInput form, const std::vector<ggml_tensor *> &weights,
                            ggml_tensor *x, std::vector<ggml_tensor *> &out) {
    std::vector<ggml_tensor *> args = {nullptr};
    int64_t values = 0;
    for (ggml_tensor *w : weights) {
        if (rows_input(w->type) == form) {
            args.push_back(w);
            values += w->ne[1] * x->ne[1];
        }
    }
    if (args.size() == 1) {
        return;
    }
    args[0] = form == RowsInput::packed ? packed_rows(b, x) : x;
    ggml_tensor *y = add_op(b.ctx, *find_op("rows_matmul"), GGML_TYPE_F32, values, 1, args.data(),
                            int(args.size()), nullptr, 0);
    size_t offset = 0;
    for (size_t i = 0; i < weights.size(); i++) {
        if (const int64_t N = weights[i]->ne[1]; rows_input(weights[i]->type) == form) {
            out[i] = ggml_view_2d(b.ctx, y, N, x->ne[1], size_t(N) * sizeof(float), offset); // {N, T}
            offset += size_t(N * x->ne[1]) * sizeof(float);
        }
    }
}

#ifdef LUCE_USE_CUDA
static ggml_tensor *packed(const StepBuild &b, const MatmulInput &in) {
    const int64_t bytes = rowmm_op_bytes(in.T, in.K);
    const int32_t eps = bits_of_real(in.eps);
    switch (in.kind) {
        case ROWMM_RMS: return add_op(b.ctx, "rowmm_pack_rms", GGML_TYPE_I8, bytes, 1, {in.x, in.w}, {eps});
        case ROWMM_SWIGLU:
            if (in.y == nullptr) {
                return add_op(b.ctx, "rowmm_parts_swiglu", GGML_TYPE_I8, bytes, 1, {in.x});
            }
            return add_op(b.ctx, "rowmm_pack_swiglu", GGML_TYPE_I8, bytes, 1, {in.x, in.y}, {eps});
        case ROWMM_HEAD_RMS:
            return add_op(b.ctx, "rowmm_pack_gated", GGML_TYPE_I8, bytes, 1, {in.x, in.w, in.y}, {eps});
        default: return add_op(b.ctx, "rowmm_pack", GGML_TYPE_I8, bytes, 1, {in.x}, {eps});
    }
}

// How an input was packed, as the ops rowmm.. take it.
static std::array<int32_t, 3> params_of(const MatmulInput &in) {
    return {int32_t(in.T), in.kind == ROWMM_RMS, bits_of_real(in.eps)};
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
    const int32_t T = int32_t(in.T);
    int64_t n = 0;
    for (ggml_tensor *w : weights) {
        if (is_packed(w)) {
            args.push_back(w);
            n += w->ne[1] * T;
        }
    }
    if (n == 0) {
        return;
    }
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
    const auto params = params_of(form);
    const CustomOp &op = *find_op(norms ? "rowmm_norm" : residual != nullptr ? "rowmm_add" : "rowmm");
    ggml_tensor *y = add_op(b.ctx, op, GGML_TYPE_F32, n, 1, args.data(), int(args.size()), params.data(),
                            int(params.size()));
    size_t offset = 0;
    for (size_t i = 0; i < weights.size(); i++) {
        if (const int64_t N = weights[i]->ne[1]; is_packed(weights[i])) {
            out[i] = ggml_view_2d(b.ctx, y, N, T, size_t(N) * sizeof(float), offset); // {N, T}
            offset += size_t(N) * size_t(T) * sizeof(float);
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
    const int64_t n = rowmm_parts_op_bytes(in.T, weights) / int64_t(sizeof(float));
    const auto params = params_of(in);
    return add_op(b.ctx, *find_op(norms ? "rowmm_parts_norm" : "rowmm_parts"), GGML_TYPE_F32, n, 1,
                  args.data(), int(args.size()), params.data(), int(params.size()));
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
// them too. One of many rows writes the weights out for cuBLAS (ops/prompt_matmul.h), but for K that cuBLAS does not
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
                         const std::vector<int32_t> &params) {
    const int64_t C = w.shape.conv_dim(), T = x.T;
    const auto y = matmuls(b, {w.qkv, w.gate, w.beta, w.alpha}, x);
    ggml_tensor *args[] = {y[0], w.conv, state.window, state.log, b.in.ctl};
    ggml_tensor *qkv = add_op(b.ctx, *find_op("deltanet_conv"), GGML_TYPE_F32, C, T, args, 5, params.data(),
                              int(params.size()));
    return {qkv, y[1], y[2], y[3]};
}

DeltaOutputs delta_of_parts(const StepBuild &b, const MatmulInput &x, const DeltaNet &w,
                            const DeltaState &state, const std::vector<int32_t> &params) {
#ifdef LUCE_USE_CUDA
    const std::vector<ggml_tensor *> weights = {w.qkv, w.gate, w.beta, w.alpha};
    if (w.shape.state_size == 128 && leaves_parts(b, weights)) {
        const int64_t T = x.T, K = w.gate->ne[1];
        int64_t n = K * T;
        for (const ggml_tensor *weight : weights) {
            n += weight->ne[1] * T;
        }
        ggml_tensor *args[] = {
            add_parts(b, weights, x), w.conv, state.window, state.log, b.in.ctl, w.dt, w.a, state.state,
            b.cache.rowmm_scratch()};
        ggml_tensor *y = add_op(b.ctx, *find_op("deltanet_parts"), GGML_TYPE_F32, n, 1, args, 9,
                                params.data(), int(params.size()));
        const size_t row = size_t(K) * sizeof(float);
        return {ggml_view_2d(b.ctx, y, K, T, row, 0), ggml_view_2d(b.ctx, y, K, T, row, row * size_t(T))};
    }
#else
    (void) b, (void) x, (void) w, (void) state, (void) params;
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
    const int64_t D = w.shape.head_dim, K = D * w.shape.n_head, T = x.T;
    // luce's op does not blend frequencies
    if ((D == 128 || D == 256) && !(w.shape.yarn.factor > 1) && leaves_parts(b, weights)) {
        ggml_tensor *args[] = {add_parts(b, weights, x),
                               w.k_norm,
                               b.in.positions,
                               kv.cells.k,
                               kv.cells.v,
                               b.in.ctl,
                               b.in.pages,
                               w.q_norm};
        const int32_t params[] = {int32_t(w.shape.rope_dim), bits_of_real(w.shape.rope_base),
                                  bits_of_real(eps), kv.owner};
        ggml_tensor *y = add_op(b.ctx, *find_op("attention_heads"), GGML_TYPE_F32, queries ? 2 * K * T : 1, 1,
                                args, queries ? 8 : 7, params, 4);
        // It is expanded here, since attention reads the cells and not this node.
        ggml_build_forward_expand(b.graph, y);
        if (!queries) {
            return {nullptr, nullptr, true};
        }
        const size_t row = size_t(K) * sizeof(float);
        return {ggml_view_2d(b.ctx, y, K, T, row, 0), ggml_view_2d(b.ctx, y, K, T, row, row * size_t(T)),
                true};
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
        const int64_t E = weight->ne[1], T = input.T, packed = rowmm_op_bytes(T, E) / 4;
        ggml_tensor *args[] = {next.weight, add_parts(b, {weight}, input), residual};
        ggml_tensor *y = add_op(b.ctx, *find_op("rowmm_parts_rms"), GGML_TYPE_F32, E * T + packed, 1, args,
                                residual == nullptr ? 2 : 3, nullptr, 0);
        ggml_tensor *x = ggml_view_2d(b.ctx, y, E, T, size_t(E) * sizeof(float), 0);
        const MatmulInput normed = rms(x, next.weight, next.eps);
        made_input(b, normed, true,
                   [&] { return ggml_view_1d(b.ctx, y, packed, size_t(E * T) * sizeof(float)); });
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
