// Rows of the ops of a mixture of experts (ops/row.h says how to read them): those of a CPU, those of a GPU (moe/moe.h), and
// those of experts in host memory (step/host_experts.h).
#pragma once

#include "cpu/experts.h"
#include "cpu/host_experts.h"
#include "moe/moe.h"
#include "ops/matmul.h"
#include "ops/row.h"

namespace luce {

struct Device;
struct Ffn;
struct Moe;

// What a GPU's rows bring to the host: what moe_route_values leaves.
struct RamGiveArgs {
    MoeDims dims;
    const void *routed;
};

void cpu_ram_experts(const RamExpertsArgs &args, int ith,
                     int nth); // one thread runs all; a step has its team run it

// E_UNSUPPORTED names what the device has no kernel for, of a mixture in the file at `path`. A CPU can run all of them.
void check_moe(const Device &device, const char *path, const Moe &moe);
// Says whether a step's launches of a mixture take a dense layer for its shared expert.
bool takes_dense(const Device &device, const Moe &moe, const Ffn &dense);

#ifdef LUCE_USE_CUDA
// Those of a mixture over T rows, in a step maybe with a dense layer for its shared expert.
MoeDims dims_of(const Device &device, const Moe &moe, int64_t T, const Ffn *dense = nullptr);

// Returns the bytes of what route leaves of all rows, launch after launch. Then come the rows' values, where they are left.
int64_t moe_all_routed_bytes(const MoeDims &all);
int64_t moe_all_record_bytes(const MoeDims &all);

// Returns part `part` of each expert's matrices. All `parts` lie in one tensor, one behind the other.
MoeMatrix moe_matrix(const ggml_tensor &w, uint8_t *address, int64_t part, int64_t parts);

inline void take(MoeMatrix &matrix, const ggml_tensor &w, uint8_t *address) {
    matrix = moe_matrix(w, address, 0, 1);
}

// These launch the kernels of moe/moe.h over any number of rows: those of a prefill are done MoeDims::rows_at_once() at a time, with
// the arithmetic of a step.
int route_blocks(const MoeRouteArgs &all, void *stream);
int up_blocks(const MoeMatmulArgs &all, void *stream);
int down_blocks(const MoeMatmulArgs &all, void *stream);
int sum_blocks(const MoeSumArgs &all, void *stream);
int give_blocks(const RamGiveArgs &all, const GiveRowsArgs &to, void *stream); // `to` says where
#endif

} // namespace luce

namespace luce::ops {
using namespace extents;

// The ids of each row's experts, then their weights.
inline const auto &route = row<RouteArgs>("route", [](auto &op, auto &a) {
    op.in(FIELD(logits), {experts, T});
    op.dims(a.n, experts, a.T, T);
    op.params(FIELD(n_used));
    op.known(used, a.n_used);
    op.out(FIELD(out), {2 * used, T});
    op.even = true;
    op.runs(cpu_route, nullptr);
});

// Each row's product with its experts; with two weights the activation of the first, times the second. They may be one tensor, an
// expert's first matrix and then its second.
inline const auto &experts_matmul = row<ExpertsArgs>("experts", [](auto &op, auto &a) {
    op.in(FIELD(route), {2 * used, T});
    op.in(FIELD(x), {ANY, ANY});
    op.in(FIELD(weights[0]), {K, ANY, experts}).plane(a.expert_bytes[0]);
    op.in(FIELD(weights[1]), {K, ANY, experts}).plane(a.expert_bytes[1]).maybe();
    op.in(FIELD(offsets[0]), {experts}).maybe();
    op.in(FIELD(offsets[1]), {experts}).maybe();
    op.dims(a.T, T, a.K, K, a.n_used, used, a.n_expert, experts);
    op.params(FIELD(own_input), FIELD(n_weights), FIELD(activation));
    op.derive([](auto &args) {
        if (args.n_weights == 2 && args.weights[1].data == nullptr) {
            split_rows(args.weights[0], args.weights[1]);
            args.expert_bytes[1] = args.expert_bytes[0];
            args.offsets[1] = args.offsets[0];
        }
    });
    op.known(N, a.weights[0].N);
    op.out(FIELD(out), {N, used * T});
    op.even = true;
    op.runs(cpu_experts, nullptr);
});

// The weighted sum of what a row's experts gave.
inline const auto &experts_sum = row<ExpertsSumArgs>("experts_sum", [](auto &op, auto &a) {
    op.in(FIELD(route), {2 * used, T});
    op.in(FIELD(y), {E, used * T});
    op.in(FIELD(counts), {ANY}).maybe();
    op.dims(a.n_used, used, a.T, T, a.E, E);
    op.out(FIELD(out), {E, T});
    op.even = true;
    op.runs(cpu_experts_sum, nullptr);
});

// y + shared * sigmoid(open).
inline const auto &add_shared = row<AddSharedArgs>("add_shared", [](auto &op, auto &a) {
    op.in(FIELD(y), {E, T});
    op.in(FIELD(shared), {E, T});
    op.in(FIELD(open), {1, T});
    op.dims(a.T, T, a.E, E);
    op.out(FIELD(out), {E, T});
    op.even = true;
    op.runs(cpu_add_shared, nullptr);
});

// The weighted sum of what experts in host memory give a row. On a GPU the rows and their route come from ram_give.
inline const auto &ram_experts = row<RamExpertsArgs>("ram_experts", [](auto &op, auto &a) {
    op.in("route", ArgForm::any, {ANY, ANY}, [](auto &args, const ggml_tensor &, uint8_t *at) {
        args.route = reinterpret_cast<const int32_t *>(at);
    });
    op.in(FIELD(x), {E, T}).maybe();
    op.in(FIELD(down), {FF, E, experts}).plane(a.down_bytes);
    op.in(FIELD(gate), {E, ANY, experts}).plane(a.gate_bytes);
    op.in(FIELD(up), {E, FF, experts}).plane(a.up_bytes).maybe();
    op.dims(a.E, E, a.FF, FF, a.n_expert, experts);
    op.params(FIELD(T), FIELD(n_used), FIELD(activation));
    op.derive([](auto &args) {
        if (args.up.data == nullptr) { // gate and up are fused
            split_rows(args.gate, args.up);
            args.up_bytes = args.gate_bytes;
        }
    });
    op.known(T, a.T);
    op.out(FIELD(out), {E, T});
    op.on_team = true;
    op.runs(cpu_ram_experts, nullptr);
});

#ifdef LUCE_USE_CUDA
template <class Row, class Dims> void takes_dims(Row &op, Dims &a) {
    op.params(FIELD(T), FIELD(n_expert), FIELD(n_used), FIELD(most), FIELD(wide), FIELD(E), FIELD(FF),
              FIELD(FF_shared));
}

// For ram_experts, which gets this instead of rows and route.
inline const auto &ram_give = row<RamGiveArgs>("ram_give", [](auto &op, auto &a) {
    op.in(FIELD(routed), {ANY});
    takes_dims(op, a.dims);
    op.to_team = true;
});

template <class Row, class A> void routes(Row &op, A &a) {
    op.in(FIELD(x), {E, T});
    op.in(FIELD(norm), {E});
    op.in("counters", ArgForm::rows, {ANY}, [](auto &args, const ggml_tensor &t, uint8_t *at) {
        args.counters = launch_scratch(t, at).counters;
    });
    op.in(FIELD(router), {E, experts});
    op.in(FIELD(shared_gate), {E}).maybe();
    op.in(FIELD(router_norm), {E}).maybe();
    op.in(FIELD(dense_norm), {E}).maybe();
    takes_dims(op, a.dims);
    op.params(FIELD(eps), FIELD(router_scale));
    op.derive([](auto &args) {
        args.overlap = 1;
        args.dims.dense = args.dense_norm != nullptr;
    });
    op.room(FIELD(routed), [](const auto &args) { return moe_all_routed_bytes(args.dims); });
    op.runs(nullptr, route_blocks);
}
inline const auto &moe_route = row<MoeRouteArgs>("moe_route", [](auto &op, auto &a) { routes(op, a); });
// It leaves the rows' values too, for the host.
inline const auto &moe_route_values = row<MoeRouteArgs>("moe_route_values", [](auto &op, auto &a) {
    routes(op, a);
    op.out(FIELD(values), {E, T});
});

// Gate and up may be one tensor, an expert's gate and then its up.
inline const auto &moe_up = row<MoeMatmulArgs>("moe_up", [](auto &op, auto &a) {
    op.in(FIELD(routed), {ANY});
    op.in("first", ArgForm::matrix, {E, ANY, experts}, [](auto &args, const ggml_tensor &w, uint8_t *at) {
        const int64_t parts = w.ne[1] / args.dims.FF;
        args.first = moe_matrix(w, at, 0, parts);
        args.second = moe_matrix(w, at, parts - 1, parts);
    });
    op.in(FIELD(second), {E, FF, experts}).maybe();
    op.in(FIELD(shared_first), {E, N}).maybe();
    op.in(FIELD(shared_second), {E, N}).maybe();
    op.in(FIELD(first.offsets), {experts}).maybe();
    op.in(FIELD(second.offsets), {experts}).maybe();
    takes_dims(op, a.dims);
    op.params(FIELD(activation), FIELD(dims.dense));
    op.derive([](auto &args) { args.overlap = 1; });
    op.room(FIELD(out), [](const auto &args) { return args.dims.places() * args.dims.h_row() * 4; });
    op.runs(nullptr, up_blocks);
});

inline const auto &moe_down = row<MoeMatmulArgs>("moe_down", [](auto &op, auto &a) {
    op.in(FIELD(routed), {ANY});
    op.in(FIELD(h), {ANY});
    op.in(FIELD(first), {FF, E, experts});
    op.in(FIELD(shared_first), {N, E}).maybe();
    op.in(FIELD(first.offsets), {experts}).maybe();
    takes_dims(op, a.dims);
    op.params(FIELD(dims.dense));
    op.derive([](auto &args) { args.overlap = 1; });
    op.room(FIELD(out), [](const auto &args) { return args.dims.places() * args.dims.E * 4; });
    op.room(FIELD(records), [](const auto &args) { return moe_all_record_bytes(args.dims); });
    op.runs(nullptr, down_blocks);
});

// moe_down and moe_sum of one row.
inline const auto &moe_end = row<MoeEndArgs>("moe_end", [](auto &op, auto &a) {
    op.in(FIELD(routed), {ANY});
    op.in(FIELD(h), {ANY});
    op.in(FIELD(down), {FF, E, experts});
    op.in(FIELD(residual), {E});
    op.in(FIELD(shared_down), {N, E}).maybe();
    op.in(FIELD(down.offsets), {experts}).maybe();
    op.in(FIELD(counts), {experts}).maybe();
    takes_dims(op, a.dims);
    op.derive([](auto &args) { args.overlap = 1; });
    op.out(FIELD(out), {E});
    op.runs(nullptr, cuda::moe_end);
});

template <class Row, class A> void sums_up(Row &op, A &a) {
    op.in(FIELD(routed), {ANY});
    op.in("y", ArgForm::f32, {ANY, ANY}, [](auto &args, const ggml_tensor &, uint8_t *at) {
        args.y = reinterpret_cast<const float *>(at); // places of E, or the shared expert's {E, T}
    });
    op.in(FIELD(residual), {E, T}).maybe();
    op.in(FIELD(norm), {E}).maybe();
    op.in(FIELD(sums), {E, T}).maybe();
    op.in(FIELD(scales), {experts}).maybe();
    op.in(FIELD(counts), {experts}).maybe();
    takes_dims(op, a.dims);
    op.derive([](auto &args) { args.overlap = 1; });
    op.known(E, a.dims.E);
    op.known(T, a.dims.T);
    op.out(FIELD(out), {E, T});
    op.runs(nullptr, sum_blocks);
}
// Of a prefill.
inline const auto &moe_sum_prompt =
    row<MoeSumArgs>("moe_sum_prompt", [](auto &op, auto &a) { sums_up(op, a); });
// It packs the sums for the product behind as well.
inline const auto &moe_sum = row<MoeSumArgs>("moe_sum", [](auto &op, auto &a) {
    sums_up(op, a);
    op.room(FIELD(packed), [](const auto &args) { return rowmm_op_bytes(args.dims.T, args.dims.E); });
});
template <class Row, class A> void norms_both(Row &op, A &a) {
    op.in("y", ArgForm::f32, {ANY, ANY}, [](auto &args, const ggml_tensor &, uint8_t *at) {
        args.y = reinterpret_cast<const float *>(at); // places of E, or sums {E, T}
    });
    op.in(FIELD(residual), {E, T});
    op.in(FIELD(dense_post), {E});
    op.in(FIELD(experts_post), {E});
    op.in(FIELD(post), {E});
    op.in(FIELD(norm), {E}).maybe();
}
template <class Row, class A> void leaves_both(Row &op, A &a) {
    takes_dims(op, a.dims);
    op.params(FIELD(eps), FIELD(post_scale));
    op.known(E, a.dims.E);
    op.known(T, a.dims.T);
    op.out(FIELD(out), {E, T});
    op.room(FIELD(packed), [](const auto &args) {
        return args.norm == nullptr ? 0 : rowmm_op_bytes(args.dims.T, args.dims.E);
    });
    op.runs(nullptr, cuda::moe_post);
}
// Of a step's mixture beside a dense layer, which is the shared expert of its launches.
inline const auto &moe_post = row<MoePostArgs>("moe_post", [](auto &op, auto &a) {
    op.in(FIELD(routed), {ANY});
    norms_both(op, a);
    op.in(FIELD(scales), {experts}).maybe();
    op.in(FIELD(counts), {experts}).maybe();
    op.derive([](auto &args) {
        args.overlap = 1;
        args.dims.dense = 1;
    });
    leaves_both(op, a);
});
// Of one whose sums are made elsewhere. The dense layer comes first in its graph: experts of the host are computed beside it.
inline const auto &moe_post_sums = row<MoePostArgs>("moe_post_sums", [](auto &op, auto &a) {
    op.launch(FIELD(parts));
    norms_both(op, a);
    op.derive([](auto &args) { args.overlap = 1; });
    leaves_both(op, a);
});
#endif

} // namespace luce::ops
