// The lowering on a CPU: rows_input makes what products read, in one pass over the rows and in both forms that a weight may
// take, and rows_matmul multiplies.
#include "graph/lowering.h"

#include "cpu/experts.h"
#include "cpu/matmul.h"
#include "matmul/quantised.h"
#include "ops/row.h"

namespace luce {
namespace {

constexpr int64_t BLOCK = 32; // a packed block has so many values

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
            fail(LUCE_E_UNSUPPORTED, "experts of %s have scales, and matrices beside them are of other types",
                 weight->name);
        }
    }
}

class CpuLowering : public Lowering {
public:
    using Lowering::Lowering;

protected:
    // Makes values {K, T} and, where K has whole blocks, their packed form; with a residual the sum first.
    void rows_input(RowmmInput kind, float eps, const std::vector<ggml_tensor *> &args, int64_t K, int64_t T,
                    Val y, const Val *sum) {
        const int64_t ahead = sum == nullptr ? 0 : K * T;
        const int64_t n_packed = K % BLOCK == 0 ? K / 2 : 0; // a block takes 16 floats
        ggml_tensor *t = op("rows_input", GGML_TYPE_F32, ahead + (K + n_packed) * T, 1, args,
                            {int32_t(kind), bits_of_real(eps)});
        made(y, Form::rows) = part_of(t, K, T, ahead);
        if (n_packed > 0) {
            made(y, Form::packed) = part_of(t, n_packed, T, ahead + K * T);
        }
        if (sum != nullptr) {
            made(*sum, Form::rows) = part_of(t, K, T, 0);
        }
    }

    ggml_tensor *dense(Val v) {
        ggml_tensor *t = flat(v);
        return ggml_is_contiguous(t) ? t : ggml_cont(ctx, t);
    }

    ggml_tensor *values(Val v) override {
        const Node &n = plain.at(v);
        if (made(v, Form::rows) == nullptr) {
            const int64_t K = plain.width(v);
            if (n.op == Op::norm) {
                rows_input(ROWMM_RMS, std::get<float>(n.params), {dense(n.in[0]), n.w[0]}, K, n.T, v,
                           nullptr);
            } else if (n.op == Op::glu) {
                rows_input(ROWMM_SWIGLU, 0, {dense(n.in[0]), dense(n.in[1])}, K, n.T, v, nullptr);
            } else if (n.op == Op::gated_norm) {
                rows_input(ROWMM_HEAD_RMS, std::get<float>(n.params),
                           {dense(n.in[0]), n.w[0], dense(n.in[1])}, K, n.T, v, nullptr);
            }
        }
        return flat(v);
    }

    ggml_tensor *packed(Val v) {
        ggml_tensor *x = values(v), *&t = made(v, Form::packed);
        if (t == nullptr) {
            t = op("pack_rows", GGML_TYPE_I8, x->ne[0] / BLOCK * int64_t(sizeof(PackedBlock)), x->ne[1], {x});
        }
        return t;
    }

    // Multiplies the weights that take x in this form, in one op.
    void multiply(RowsInput form, const std::vector<ggml_tensor *> &w, Val x, Val y) {
        std::vector<size_t> which;
        std::vector<ggml_tensor *> args = {nullptr};
        int64_t n = 0;
        for (size_t i = 0; i < w.size(); i++) {
            if (luce::rows_input(w[i]->type) == form) {
                which.push_back(i);
                args.push_back(w[i]);
                n += w[i]->ne[1] * plain.at(y).T;
            }
        }
        if (!which.empty()) {
            args[0] = form == RowsInput::packed ? packed(x) : values(x);
            split_products(op("rows_matmul", GGML_TYPE_F32, n, 1, args), w, which, y);
        }
    }

    // ggml multiplies with the types that rows_matmul lacks.
    void matmul(const Node &n, Val y) {
        std::vector<ggml_tensor *> w = n.w;
        if (n.op == Op::matmul_first) {
            w = {first_rows(part(n, "M").w[0], n.n[0])};
        }
        const Val x = n.in[0];
        values(x);
        multiply(RowsInput::packed, w, x, y);
        multiply(RowsInput::f32, w, x, y);
        for (size_t i = 0; i < w.size(); i++) {
            if (luce::rows_input(w[i]->type) == RowsInput::none) {
                made({y.graph, y.node, int32_t(i)}, Form::rows) = mul_mat(w[i], values(x));
            }
        }
    }

    void add_norm(const Node &n, Val y) {
        NormOf norm;
        const Val normed = {y.graph, y.node, 1};
        as_norm(normed, norm);
        rows_input(ROWMM_RMS, norm.eps, {dense(n.in[1]), norm.w, dense(n.in[0])}, plain.width(y), n.T, normed,
                   &y);
    }

    // Computes the products of rows with their experts {N, n_used*T} in one op: of gate and up with SwiGLU, of down, or of
    // gate and up apart.
    void experts(const Node &n, Val y, bool with_glu) {
        const Moe &w = *std::get<const Moe *>(n.params);
        const bool down = n.w[0] == w.down, fused = !down && w.gate_up != nullptr;
        const int64_t used = w.shape.n_used, pairs = n.T, T = pairs / used;
        ggml_tensor *x = values(n.in[0]), *routed = rows(n.in[1]);
        const auto set = [&](int32_t out, ggml_tensor *t) { made({y.graph, y.node, out}, Form::rows) = t; };
        if (has_own_op(w)) {
            const auto product = [&](std::vector<ggml_tensor *> weights, int64_t N, bool halves) {
                ggml_tensor *input =
                    luce::rows_input(weights[0]->type) == RowsInput::packed ? packed(n.in[0]) : x;
                weights.insert(weights.begin(), {routed, input});
                return op("experts", GGML_TYPE_F32, N, pairs, weights, {down, halves});
            };
            if (down || with_glu) {
                set(0, product(n.w, down ? n.w[0]->ne[1] : w.shape.n_ff, fused));
                return;
            }
            for (size_t i = 0; i < n.w.size(); i++) {
                ggml_tensor *t = product({n.w[i]}, n.w[i]->ne[1], false);
                if (!fused) {
                    set(int32_t(i), t);
                    continue;
                }
                for (int32_t half : {0, 1}) {
                    set(half, ggml_cont(ctx, ggml_view_2d(ctx, t, w.shape.n_ff, pairs, t->nb[1],
                                                          size_t(half) * w.shape.n_ff * sizeof(float))));
                }
            }
            return;
        }
        check_no_scales(w);
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
        ggml_tensor *gate = product(n.w[0], x), *up = fused ? nullptr : product(n.w[1], x);
        const auto pairs_of = [&](ggml_tensor *t) { return ggml_reshape_2d(ctx, t, t->ne[0], pairs); };
        if (with_glu) { // {FF, n_used, T}
            set(0, pairs_of(fused ? ggml_swiglu(ctx, gate) : ggml_swiglu_split(ctx, gate, up)));
        } else if (fused) {
            for (int32_t half : {0, 1}) {
                set(half, pairs_of(ggml_cont(
                              ctx, ggml_view_3d(ctx, gate, w.shape.n_ff, used, T, gate->nb[1], gate->nb[2],
                                                size_t(half) * w.shape.n_ff * sizeof(float)))));
            }
        } else {
            set(0, pairs_of(gate));
            set(1, pairs_of(up));
        }
    }

    void emit_own(const Node &n, Val y) override {
        const auto set = [&](ggml_tensor *t) { made(y, Form::rows) = t; };
        switch (n.op) {
            case Op::matmul:
            case Op::matmul_first: matmul(n, y); break;
            case Op::add_norm: add_norm(n, y); break;
            case Op::route: { // ids, then weights
                const int64_t used = std::get<const Moe *>(n.params)->shape.n_used;
                set(op("route", GGML_TYPE_I32, 2 * used, n.T, {flat(n.in[0])}));
                break;
            }
            case Op::experts: experts(n, y, false); break;
            case Op::experts_glu: experts(n, y, true); break;
            case Op::mix:
                set(op("experts_sum", GGML_TYPE_F32, n.n[0], n.T, {rows(n.in[1]), rows(n.in[0])}));
                break;
            case Op::host_experts:
                set(host_experts(rows(n.in[1]), values(n.in[0]), *std::get<const Moe *>(n.params), n.n[0],
                                 n.T));
                break;
            case Op::add_shared:
                set(op("add_shared", GGML_TYPE_F32, n.n[0], n.T,
                       {flat(n.in[0]), flat(n.in[1]), flat(n.in[2])}));
                break;
            default: fail(LUCE_E_INTERNAL, "a CPU has no op %d of a plain graph", int(n.op));
        }
    }
};

} // namespace

std::unique_ptr<Lowering> cpu_lowering(Plain &plain, const StepInputs &in, ggml_context *ctx,
                                       ggml_cgraph *nodes) {
    return std::make_unique<CpuLowering>(plain, in, ctx, nodes);
}

} // namespace luce
