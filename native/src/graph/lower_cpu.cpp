// The lowering on a CPU: rows_input makes what products read, in one pass over the rows and in both forms that a weight may
// take, and rows_matmul multiplies.
#include "graph/lowering.h"

#include "ops/moe.h"

namespace luce {
namespace {

// Returns whether luce's own op multiplies these experts. Two matrices of one op take x in the same form.
bool has_own_op(const Moe &w) {
    const ggml_tensor *gate = w.gate_up != nullptr ? w.gate_up : w.gate;
    const ggml_tensor *up = w.gate_up != nullptr ? w.gate_up : w.up;
    return rows_input(gate->type) != RowsInput::none && rows_input(gate->type) == rows_input(up->type) &&
           rows_input(w.down->type) != RowsInput::none;
}

void check_no_scales(const Moe &w) {
    for (const ggml_tensor *weight : {w.gate, w.up, w.gate_up, w.down}) {
        if (weight != nullptr && scales_of(weight) != nullptr) {
            fail(LUCE_E_UNSUPPORTED,
                 "tensor %s, of type %s, has scales beside it: luce multiplies such experts where its own op "
                 "has the types of gate, up and down",
                 weight->name, type_name(weight->type));
        }
    }
}

class CpuLowering : public Lowering {
public:
    using Lowering::Lowering;

protected:
    // Makes values {K, T} and, where K has whole blocks, their packed form; with a residual the sum first.
    void rows_input(float eps, const std::vector<ggml_tensor *> &args, Val y, const Val *sum,
                    Activation activation = SILU) {
        RowsInputArgs a{};
        a.eps = eps;
        a.activation = activation;
        const OpNode t = ops::rows_input(ctx, args, a);
        made(y, Form::rows) = t[1];
        if (t.results[2].bytes > 0) {
            made(y, Form::packed) = t[2];
        }
        if (sum != nullptr) {
            made(*sum, Form::rows) = t[0];
        }
    }

    ggml_tensor *dense(Val v) {
        ggml_tensor *t = values(v);
        return ggml_is_contiguous(t) ? t : ggml_cont(ctx, t);
    }

    ggml_tensor *values(Val v) override {
        const Node &n = plain.at(v);
        if (made(v, Form::rows) == nullptr) {
            if (n.op == Op::norm) {
                rows_input(std::get<float>(n.params), {dense(n.in[0]), n.w[0], nullptr, nullptr, nullptr}, v,
                           nullptr);
            } else if (n.op == Op::glu) {
                ggml_tensor *gate = dense(n.in[0]), *up = dense(n.in[1]);
                rows_input(0, {gate, nullptr, nullptr, up, nullptr}, v, nullptr,
                           std::get<Activation>(n.params));
            } else if (n.op == Op::gated_norm) {
                ggml_tensor *o = dense(n.in[0]), *z = dense(n.in[1]);
                rows_input(std::get<float>(n.params), {o, n.w[0], z, nullptr, nullptr}, v, nullptr);
            }
        }
        return flat(v);
    }

    ggml_tensor *packed(Val v) {
        ggml_tensor *x = values(v), *&t = made(v, Form::packed);
        if (t == nullptr) {
            t = ops::pack_rows(ctx, {x});
        }
        return t;
    }

    // Multiplies the weights that take x in this form, in one op.
    void multiply(RowsInput form, const std::vector<ggml_tensor *> &w, Val x, Val y) {
        std::vector<size_t> which;
        std::vector<ggml_tensor *> args = {nullptr};
        for (size_t i = 0; i < w.size(); i++) {
            if (luce::rows_input(w[i]->type) == form) {
                which.push_back(i);
                args.push_back(w[i]);
            }
        }
        if (!which.empty()) {
            args[0] = form == RowsInput::packed ? packed(x) : values(x);
            split_products(ops::rows_matmul(ctx, args), which, y);
        }
    }

    // ggml multiplies with the types that rows_matmul lacks.
    void matmul(const Node &n, Val y) {
        const std::vector<ggml_tensor *> w = weights_of(n);
        const Val x = n.in[0];
        values(x);
        multiply(RowsInput::packed, w, x, y);
        multiply(RowsInput::f32, w, x, y);
        for (size_t i = 0; i < w.size(); i++) {
            if (luce::rows_input(w[i]->type) == RowsInput::none) {
                made({y.graph, y.node, int32_t(i)}, Form::rows) = mul_mat(w[i], values(x), gives_logits(y));
            }
        }
    }

    void add_norm(const Node &n, Val y) {
        NormOf norm;
        const Val normed = {y.graph, y.node, 1};
        as_norm(normed, norm);
        ggml_tensor *x = dense(n.in[1]), *residual = dense(n.in[0]);
        rows_input(norm.eps, {x, norm.w, nullptr, nullptr, residual}, normed, &y);
    }

    // All parts are in reach.
    void exchange(const Node &n, Val y) {
        const size_t n_ranks = plain.model.n_ranks();
        std::vector<ggml_tensor *> args = {n.in.size() > n_ranks ? dense(n.in[n_ranks]) : nullptr};
        for (size_t rank = 0; rank < n_ranks; rank++) {
            args.push_back(dense(n.in[rank]));
        }
        made(y, Form::rows) = expand(ops::add_parts(ctx, args));
    }

    // In the order of the vocabulary, of which the last rank has the first ones.
    void gather(const Node &n, Val y) {
        if (stage_index() + 1 == plain.model.n_ranks()) {
            std::vector<ggml_tensor *> args = {dense(n.in.back())};
            for (size_t rank = 0; rank + 1 < n.in.size(); rank++) {
                args.push_back(dense(n.in[rank]));
            }
            made(y, Form::rows) = expand(ops::gather_parts(ctx, args));
        }
    }

    void check_no_slots(const Moe &w) const {
        if (plain.cache.slots_of(w) != nullptr) {
            fail(LUCE_E_UNSUPPORTED,
                 "experts of %s (%s) have no slots on a CPU: its own op has not their types", w.down->name,
                 type_name(w.down->type));
        }
    }

    // Computes the products of rows with their experts {N, n_used*T} in one op: of gate and up with SwiGLU, of down, or of
    // gate and up apart.
    void experts(const Node &n, Val y, bool with_glu) {
        const Moe &w = *std::get<const Moe *>(n.params);
        const bool down = n.w[0] == w.down, fused = !down && w.gate_up != nullptr;
        if (fused && !with_glu) {
            fail(LUCE_E_UNSUPPORTED,
                 "gate and up of experts in one tensor have no op but by the rule experts_glu");
        }
        const int64_t used = w.shape.n_used, pairs = n.T, T = pairs / used;
        ggml_tensor *x = values(n.in[0]), *routed = rows(n.in[1]);
        const auto set = [&](int32_t out, ggml_tensor *t) { made({y.graph, y.node, out}, Form::rows) = t; };
        if (has_own_op(w)) {
            const ExpertSlots *slots = plain.cache.slots_of(w);
            const auto product = [&](ggml_tensor *first, ggml_tensor *second, int32_t n_weights) {
                ExpertsArgs a{};
                a.own_input = down;
                a.n_weights = n_weights; // two are apart, or fused
                a.activation = w.activation;
                ggml_tensor *input = luce::rows_input(first->type) == RowsInput::packed ? packed(n.in[0]) : x;
                return ops::experts_matmul(
                    ctx, {routed, input, first, second, offsets(slots, first), offsets(slots, second)}, a);
            };
            if (down || with_glu) {
                set(0, product(n.w[0], n.w.size() > 1 ? n.w[1] : nullptr, down ? 1 : 2));
                return;
            }
            for (size_t i = 0; i < n.w.size(); i++) {
                set(int32_t(i), product(n.w[i], nullptr, 1));
            }
            return;
        }
        check_no_scales(w);
        check_no_slots(w);
        ggml_tensor *ids = ggml_view_2d(ctx, routed, used, T, routed->nb[1], 0); // {n_used, T}
        const auto product = [&](ggml_tensor *weight, ggml_tensor *input) {
            ggml_tensor *t = ggml_mul_mat_id(ctx, weight, input, ids);
            ggml_prec_set_acc(t, GGML_PREC_F32);
            return t;
        };
        if (down) { // its rows have been {FF, n_used, T} since gate and up
            set(0, ggml_reshape_2d(ctx, product(w.down, ggml_reshape_3d(ctx, x, x->ne[0], used, T)),
                                   w.down->ne[1], pairs));
            return;
        }
        x = ggml_reshape_3d(ctx, x, x->ne[0], 1, T);
        const auto pairs_of = [&](ggml_tensor *t) { return ggml_reshape_2d(ctx, t, t->ne[0], pairs); };
        ggml_tensor *gate = pairs_of(product(n.w[0], x)),
                    *up = nullptr; // {FF or, where they are fused, 2*FF, pairs}
        if (fused) {
            const auto half = [&](int64_t first) {
                const size_t at = size_t(first) * gate->nb[0];
                return ggml_cont(ctx, ggml_view_2d(ctx, gate, gate->ne[0] / 2, pairs, gate->nb[1], at));
            };
            up = half(gate->ne[0] / 2);
            gate = half(0);
        } else {
            up = pairs_of(product(n.w[1], x));
        }
        if (with_glu) {
            rows_input(0, {gate, nullptr, nullptr, up, nullptr}, y, nullptr, w.activation);
        } else {
            set(0, gate);
            set(1, up);
        }
    }

    void emit_own(const Node &n, Val y) override {
        const auto set = [&](ggml_tensor *t) { made(y, Form::rows) = t; };
        switch (n.op) {
            case Op::matmul:
            case Op::matmul_first: matmul(n, y); break;
            case Op::add_norm: add_norm(n, y); break;
            case Op::glu: values(y); break;
            case Op::part: set(expand(dense(n.in[0]))); break;
            case Op::exchange: exchange(n, y); break;
            case Op::gather: gather(n, y); break;
            case Op::route: { // ids, then weights
                RouteArgs a{};
                a.n_used = int32_t(std::get<const Moe *>(n.params)->shape.n_used);
                set(ops::route(ctx, {flat(n.in[0])}, a));
                break;
            }
            case Op::experts: experts(n, y, false); break;
            case Op::experts_glu: experts(n, y, true); break;
            case Op::mix:
                set(ops::experts_sum(
                    ctx, {rows(n.in[1]), rows(n.in[0]), counts(*std::get<const Moe *>(n.params))}));
                break;
            case Op::host_experts:
                set(host_experts(rows(n.in[1]), values(n.in[0]), *std::get<const Moe *>(n.params), n.T));
                break;
            case Op::add_shared:
                set(ops::add_shared(ctx, {flat(n.in[0]), flat(n.in[1]), flat(n.in[2])}));
                break;
            default: fail(LUCE_E_INTERNAL, "a CPU has no op %d of a plain graph", int(n.op));
        }
    }
};

} // namespace

std::unique_ptr<Lowering> cpu_lowering(Plain &plain, const std::vector<StepInputs> &in, ggml_context *ctx,
                                       ggml_cgraph *nodes) {
    return std::make_unique<CpuLowering>(plain, in, ctx, nodes);
}

} // namespace luce
