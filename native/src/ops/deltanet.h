// Rows of the ops of the gated delta rule (ops/row.h says how to read them).
#pragma once

#include "cpu/deltanet.h"
#include "deltanet/sizes.h"
#include "ops/matmul.h"
#include "ops/row.h"

namespace luce::ops {
using namespace extents;

template <class Row, class Shape> void takes_shape(Row &op, Shape &a) {
    op.params(FIELD(R), FIELD(n_slots), FIELD(Hk), FIELD(Hv), FIELD(S), FIELD(mode), FIELD(n_prompts));
}

// The conv over a row's ancestors, SiLU, and the norms of q and k.
inline const auto &deltanet_conv = row<ConvArgs>("deltanet_conv", [](auto &op, auto &a) {
    op.in(FIELD(x), {C, T});
    op.in(FIELD(w), {CONV_TAPS, C});
    op.in(FIELD(window), {C, CONV_TAPS - 1, slots});
    op.in(FIELD(log), {log_size, seqs});
    op.in(FIELD(ctl));
    op.dims(a.shape.T, T);
    takes_shape(op, a.shape);
    op.lacks([](const auto &args) { return delta_lacks(args.shape.S, args.shape.Hk, args.shape.Hv); });
    op.out(FIELD(out), {C, T});
    op.runs(cpu_conv, LUCE_CUDA(conv));
});

template <class Row, class A> void takes_delta(Row &op, A &a) {
    op.in(FIELD(x), {C, T});
    op.in(FIELD(alpha), {Hv, T});
    op.in(FIELD(beta), {Hv, T});
    op.in(FIELD(dt), {Hv});
    op.in(FIELD(a), {Hv});
    op.in(FIELD(state), {S, S, Hv, slots});
    op.in(FIELD(log), {log_size, seqs});
    op.in(FIELD(ctl));
    op.dims(a.shape.T, T);
    takes_shape(op, a.shape);
    op.lacks([](const auto &args) { return delta_lacks(args.shape.S, args.shape.Hk, args.shape.Hv); });
    op.out(FIELD(out), {S * Hv, T});
}
inline const auto &deltanet = row<DeltaArgs>("deltanet", [](auto &op, auto &a) {
    takes_delta(op, a);
    op.runs(cpu_deltanet, LUCE_CUDA(deltanet));
});

#ifdef LUCE_USE_CUDA
// The same, of a long prefill.
inline const auto &deltanet_chunks = row<DeltaArgs>("deltanet_chunks", [](auto &op, auto &a) {
    takes_delta(op, a);
    op.room([](const auto &args) { return (deltanet_chunks_scratch(args.shape) + 3) / 4 * 4; });
    op.runs(nullptr, [](const DeltaArgs &args, void *stream) {
        const int64_t values = int64_t(args.shape.T) * args.shape.Hv * args.shape.S;
        return cuda::deltanet_chunks(args, args.out + values, stream);
    });
});

// deltanet_conv and deltanet of the parts of qkv, z, beta and alpha. Its results are the rule's, then z.
inline const auto &deltanet_parts = row<DeltaLayerArgs>("deltanet_parts", [](auto &op, auto &a) {
    op.launch(FIELD(conv.parts));
    op.in(FIELD(conv.w), {CONV_TAPS, C});
    op.in(FIELD(conv.window), {C, CONV_TAPS - 1, slots});
    op.in(FIELD(conv.log), {log_size, seqs});
    op.in(FIELD(conv.ctl));
    op.in(FIELD(delta.dt), {Hv});
    op.in(FIELD(delta.a), {Hv});
    op.in(FIELD(delta.state), {S, S, Hv, slots});
    op.in("turns", ArgForm::rows, {ANY},
          [](auto &args, const ggml_tensor &t, uint8_t *at) { args.turns = launch_scratch(t, at).turns; });
    takes_shape(op, a.conv.shape);
    op.derive([](auto &args) { args.conv.shape.T = args.conv.parts->T; });
    op.known(T, a.conv.shape.T);
    op.out(FIELD(delta.out), {S * Hv, T});
    op.out(FIELD(conv.others[0]), {S * Hv, T});
    op.out(FIELD(conv.others[1]), {Hv, T});
    op.out(FIELD(conv.others[2]), {Hv, T});
    op.out(FIELD(conv.out), {C, T});
    op.runs(nullptr, [](const DeltaLayerArgs &args, void *stream) {
        DeltaLayerArgs all = args;
        const ConvPartsArgs &conv = all.conv;
        all.delta.shape = conv.shape;
        all.delta.x = conv.out;
        all.delta.beta = conv.others[1];
        all.delta.alpha = conv.others[2];
        all.delta.log = conv.log;
        all.delta.ctl = conv.ctl;
        return cuda::deltanet_layer(all, stream);
    });
});
#endif

} // namespace luce::ops
