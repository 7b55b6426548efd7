// Rows of the ops of matmul, and of what makes their inputs (ops/row.h says how to read them).
#pragma once

#include "cpu/inputs.h"
#include "cpu/matmul.h"
#include "exchange/exchange.h"
#include "matmul/prompt.h"
#include "ops/row.h"

#include <algorithm>

namespace luce {

#ifdef LUCE_USE_CUDA
// Returns the bytes that the packed activations of T rows of K values take. Those of a prefill are packed, and multiplied,
// ROWMM_MAX_ROWS at a time, each block of rows as a step of its own.
int64_t rowmm_op_bytes(int64_t T, int64_t K);

// This is what an engine's launches share, in the order in which it lies in Stage::rowmm_scratch.
struct LaunchScratch {
    void *partial; // RowmmArgs.scratch
    void *turns; // DeltaLayerArgs.turns
    void *counters; // MoeRouteArgs.counters
};
int64_t launch_scratch_bytes();
LaunchScratch launch_scratch(const ggml_tensor &scratch, uint8_t *address);

// A prefill's product on cuBLAS: the weights are written out, then multiplied.
struct PromptMatmulArgs {
    RowmmPermuteArgs unpack; // to its dst
    GemmArgs product; // of which `weights` is that
};

// These launch blocks of rows.
int pack_blocks(const RowmmPackArgs &all, void *stream);
int multiply_blocks(const RowmmArgs &all, void *stream);
int prompt_matmul(const PromptMatmulArgs &args, void *stream);
#endif

} // namespace luce

namespace luce::ops {
using namespace extents;

// Rows as blocks of 8 bits.
inline const auto &pack_rows = row<PackArgs>("pack_rows", [](auto &op, auto &a) {
    op.in(FIELD(x), {K, T});
    op.dims(a.K, K, a.T, T);
    op.out(FIELD(out), {2 * K, T}); // a block of 64 bytes has 32 values
    op.even = true;
    op.runs(cpu_pack_rows, nullptr);
});

// An input of matmuls, with what is computed into it. Its results are x + residual, where there is one, the values, and
// the values packed, where K is whole blocks.
inline const auto &rows_input = row<RowsInputArgs>("rows_input", [](auto &op, auto &a) {
    op.in(FIELD(x), {K, T});
    op.in(FIELD(w), {S}).maybe();
    op.in(FIELD(z), {K, T}).maybe();
    op.in(FIELD(up), {K, T}).maybe();
    op.in(FIELD(residual), {K, T}).maybe();
    op.dims(a.T, T, a.K, K, a.S, S);
    op.params(FIELD(eps), FIELD(activation));
    op.known(sums, [](const auto &args) { return args.residual == nullptr ? 0 : args.T; });
    op.known(width, [](const auto &args) { return args.K % 32 == 0 ? 2 * args.K : 0; });
    op.out(FIELD(sum), {K, sums});
    op.out(FIELD(values), {K, T});
    op.out(FIELD(packed), {width, T});
    op.even = true;
    op.runs(cpu_rows_input, nullptr);
});

// Products of one input, packed or F32 as the weights take it, with each of the weights.
inline const auto &rows_matmul = row<RowsMatmulArgs>("rows_matmul", [](auto &op, auto &a) {
    op.in(FIELD(x), {ANY, T});
    op.in("weights", ArgForm::matrix, {K, ANY}, [](auto &args, const ggml_tensor &w, uint8_t *at) {
          args.weights[args.n_weights++] = rows_weight(w, at);
      }).up_to(MAX_WEIGHTS);
    op.dims(a.K, K, a.T, T);
    op.out_of_weights();
    op.even = true;
    op.runs(cpu_rows_matmul, nullptr);
});

// x + (the first part + the second ..), of products whose K several ranks share.
inline const auto &add_parts = row<AddPartsArgs>("add_parts", [](auto &op, auto &a) {
    op.in(FIELD(x), {E, T}).maybe();
    op.in("parts", ArgForm::f32, {E, T}, [](auto &args, const ggml_tensor &, uint8_t *at) {
          args.parts[args.n_parts++] = reinterpret_cast<const float *>(at);
      }).up_to(MAX_RANKS);
    op.dims(a.E, E, a.T, T);
    op.out(FIELD(out), {E, T});
    op.even = true;
    op.runs(cpu_add_parts, nullptr);
});
// Logits of which each rank has some, side by side.
inline const auto &gather_parts = row<GatherPartsArgs>("gather_parts", [](auto &op, auto &a) {
    op.in("parts", ArgForm::f32, {ANY, T}, [](auto &args, const ggml_tensor &part, uint8_t *at) {
          args.n[args.n_parts] = part.ne[0];
          args.parts[args.n_parts++] = reinterpret_cast<const float *>(at);
          args.V += part.ne[0];
      }).up_to(MAX_RANKS);
    op.dims(a.T, T);
    op.known(V, a.V);
    op.out(FIELD(out), {V, T});
    op.even = true;
    op.runs(cpu_gather_parts, nullptr);
});

#ifdef LUCE_USE_CUDA
// Inputs of rowmm, packed: the ops rowmm_pack..
template <class Row, class A> void packs(Row &op, A &a, RowmmInput input) {
    op.dims(a.T, T, a.K, K);
    op.params(FIELD(eps));
    op.derive([input](auto &args) {
        args.input = input;
        args.overlap = 1;
    });
    op.room(FIELD(out), [](const auto &args) { return rowmm_op_bytes(args.T, args.K); });
    op.runs(nullptr, pack_blocks);
}
inline const auto &rowmm_pack = row<RowmmPackArgs>("rowmm_pack", [](auto &op, auto &a) {
    op.in(FIELD(x), {K, T}).row(a.x_row);
    packs(op, a, ROWMM_PLAIN);
});
inline const auto &rowmm_pack_rms = row<RowmmPackArgs>("rowmm_pack_rms", [](auto &op, auto &a) {
    op.in(FIELD(x), {K, T}).row(a.x_row);
    op.in(FIELD(w), {K});
    op.dims(a.head, K);
    packs(op, a, ROWMM_RMS);
});
inline const auto &rowmm_pack_glu = row<RowmmPackArgs>("rowmm_pack_glu", [](auto &op, auto &a) {
    op.in(FIELD(x), {K, T}).row(a.x_row);
    op.in(FIELD(y), {K, T}).row(a.y_row);
    op.params(FIELD(activation));
    packs(op, a, ROWMM_GLU);
});
inline const auto &rowmm_pack_gated = row<RowmmPackArgs>("rowmm_pack_gated", [](auto &op, auto &a) {
    op.in(FIELD(x), {K, T}).row(a.x_row);
    op.in(FIELD(w), {S});
    op.in(FIELD(y), {K, T}).row(a.y_row);
    op.dims(a.head, S);
    packs(op, a, ROWMM_HEAD_RMS);
});

// Products with packed weights, of 1 to 4 in one launch: the ops rowmm..
template <class Row, class A> void multiplies(Row &op, A &a) {
    op.in("weights", ArgForm::matrix, {K, ANY}, [](auto &args, const ggml_tensor &w, uint8_t *at) {
          RowmmWeights &weights = args.weights[args.n_weights++];
          weights.type = w.type;
          weights.packed = at;
          weights.N = weights.out_row = w.ne[1];
      }).up_to(4);
    op.dims(a.K, K);
    // normed and eps say how x was packed
    op.params(FIELD(T), FIELD(normed), FIELD(eps));
    op.derive([](auto &args) { args.overlap = 1; });
    op.known(T, a.T);
}
template <class Row, class A> void takes_partial(Row &op, A &) {
    op.in("scratch", ArgForm::rows, {ANY}, [](auto &args, const ggml_tensor &t, uint8_t *at) {
        args.scratch = launch_scratch(t, at).partial;
    });
}
inline const auto &rowmm = row<RowmmArgs>("rowmm", [](auto &op, auto &a) {
    op.in(FIELD(x), {ANY});
    takes_partial(op, a);
    multiplies(op, a);
    op.out_of_weights();
    op.runs(nullptr, multiply_blocks);
});
// The same, of one row that it norms and packs itself.
inline const auto &rowmm_norm = row<RowmmArgs>("rowmm_norm", [](auto &op, auto &a) {
    op.in(FIELD(row), {K});
    op.in(FIELD(norm), {K});
    takes_partial(op, a);
    multiplies(op, a);
    op.out_of_weights();
    op.runs(nullptr, multiply_blocks);
});
// The same, of one matrix, with a residual.
inline const auto &rowmm_add = row<RowmmArgs>("rowmm_add", [](auto &op, auto &a) {
    op.in(FIELD(x), {ANY});
    takes_partial(op, a);
    op.in(FIELD(weights[0].residual), {ANY, T}).row(a.weights[0].residual_row);
    multiplies(op, a);
    op.out_of_weights();
    op.runs(nullptr, multiply_blocks);
});
// The same, whose results stay parts for the next op to add.
inline const auto &rowmm_parts = row<RowmmArgs>("rowmm_parts", [](auto &op, auto &a) {
    op.in(FIELD(x), {ANY});
    multiplies(op, a);
    op.room(FIELD(parts), rowmm_parts_bytes);
    op.runs(nullptr, cuda::rowmm);
});
inline const auto &rowmm_parts_norm = row<RowmmArgs>("rowmm_parts_norm", [](auto &op, auto &a) {
    op.in(FIELD(row), {K});
    op.in(FIELD(norm), {K});
    multiplies(op, a);
    op.room(FIELD(parts), rowmm_parts_bytes);
    op.runs(nullptr, cuda::rowmm);
});

// x + the sum of parts, and that packed for a product that norms it.
inline const auto &rowmm_parts_rms = row<RowmmPackArgs>("rowmm_parts_rms", [](auto &op, auto &a) {
    op.in(FIELD(w), {K});
    op.launch(FIELD(parts));
    op.in(FIELD(x), {K, T}).maybe().row(a.x_row);
    op.dims(a.K, K);
    op.derive([](auto &args) {
        args.T = args.parts->T;
        args.input = ROWMM_RMS;
        args.overlap = 1;
    });
    op.known(T, a.T);
    op.out(FIELD(copy), {K, T});
    op.room(FIELD(out), [](const auto &args) { return rowmm_op_bytes(args.T, args.K); });
    op.runs(nullptr, cuda::rowmm_pack);
});
// Where a rank meets the others.
template <class Row, class A> void meets(Row &op, A &a) {
    op.in(FIELD(ranks.counts), {ANY});
    op.in(FIELD(ranks.failure), {ANY});
    op.in("boxes", ArgForm::i64, {ANY}, [](auto &args, const ggml_tensor &table, uint8_t *at) {
        const auto *boxes = reinterpret_cast<const int64_t *>(at); // in the host's memory
        args.ranks.n_ranks = int32_t(table.ne[0]) - 2;
        args.ranks.values = boxes[args.ranks.n_ranks];
        args.ranks.step_values = boxes[args.ranks.n_ranks + 1];
        for (int32_t rank = 0; rank < args.ranks.n_ranks; rank++) {
            args.ranks.boxes[rank] = reinterpret_cast<void *>(uintptr_t(boxes[rank]));
        }
    });
    op.params(FIELD(ranks.rank), FIELD(ranks.slot));
}
// x + the sum of all ranks' parts, of which each has one and sends it to the others (add_parts).
inline const auto &exchange = row<ExchangeArgs>("exchange", [](auto &op, auto &a) {
    op.in(FIELD(x), {E, T}).maybe();
    op.in(FIELD(part), {E, T});
    meets(op, a);
    op.dims(a.E, E, a.T, T);
    op.out(FIELD(out), {E, T});
    op.runs(nullptr, cuda::exchange);
});
// The same of a part that a launch has left in parts itself, and the sum packed for a product that norms it.
inline const auto &exchange_norm = row<ExchangeNormArgs>("exchange_norm", [](auto &op, auto &a) {
    op.in(FIELD(pack.w), {K});
    op.launch(FIELD(pack.parts));
    op.in(FIELD(pack.x), {K, T}).row(a.pack.x_row);
    meets(op, a);
    op.dims(a.pack.K, K);
    op.derive([](auto &args) {
        args.pack.T = args.pack.parts->T;
        args.pack.input = ROWMM_RMS;
        args.pack.overlap = 1;
    });
    op.known(T, a.pack.T);
    op.out(FIELD(pack.copy), {K, T});
    op.room(FIELD(pack.out), [](const auto &args) { return rowmm_op_bytes(args.pack.T, args.pack.K); });
    op.runs(nullptr, cuda::exchange_norm);
});
// All logits, on the last rank, to which each sends what it has (gather_parts). Others have no result.
inline const auto &gather = row<GatherArgs>("gather", [](auto &op, auto &a) {
    op.in(FIELD(part), {E, T});
    meets(op, a);
    op.dims(a.E, E, a.T, T);
    op.params(FIELD(V));
    op.known(width, [](const auto &args) { return args.ranks.rank + 1 == args.ranks.n_ranks ? args.V : 1; });
    op.out(FIELD(out), {width, T});
    op.runs(nullptr, cuda::gather);
});
// x + the sum of parts, normed ahead, times a number, and where there is w that packed for a product that norms it.
inline const auto &rowmm_parts_post = row<RowmmPackArgs>("rowmm_parts_post", [](auto &op, auto &a) {
    op.in(FIELD(post), {K});
    op.launch(FIELD(parts));
    op.in(FIELD(x), {K, T}).row(a.x_row);
    op.in(FIELD(w), {K}).maybe();
    op.dims(a.K, K);
    op.params(FIELD(eps), FIELD(post_scale));
    op.derive([](auto &args) {
        args.T = args.parts->T;
        args.input = ROWMM_RMS;
        args.overlap = 1;
    });
    op.known(T, a.T);
    op.out(FIELD(copy), {K, T});
    op.room(FIELD(out),
            [](const auto &args) { return args.w == nullptr ? 0 : rowmm_op_bytes(args.T, args.K); });
    op.runs(nullptr, cuda::rowmm_pack);
});
// A convolution over a block's rows ahead of a sublayer, of the norm of x, packed.
inline const auto &block_conv_pack = row<BlockConvPackArgs>("block_conv_pack", [](auto &op, auto &a) {
    op.in(FIELD(x), {K, T}).row(a.x_row);
    op.in(FIELD(w), {K});
    op.in("normed", ArgForm::rows, {ANY},
          [](auto &args, const ggml_tensor &, uint8_t *at) { args.normed = at; });
    op.launch(FIELD(added));
    op.in(FIELD(base), {K, C, 2});
    op.in(FIELD(ctl));
    op.dims(a.T, T, a.K, K, a.taps, C);
    op.params(FIELD(eps));
    op.derive([](auto &args) { args.groups = int32_t(args.added->weights[0].N / (2 * args.taps)); });
    op.room(FIELD(out), [](const auto &args) { return rowmm_op_bytes(args.T, args.K); });
    op.runs(nullptr, cuda::block_conv_pack);
});
// x + the convolution behind a sublayer of the sum of parts, and that packed for a product that norms it.
inline const auto &block_conv_rms = row<BlockConvPackArgs>("block_conv_rms", [](auto &op, auto &a) {
    op.in(FIELD(x), {K, T}).row(a.x_row);
    op.in(FIELD(w), {K});
    op.launch(FIELD(parts));
    op.launch(FIELD(added));
    op.in(FIELD(base), {K, C, 2});
    op.in(FIELD(ctl));
    op.dims(a.T, T, a.K, K, a.taps, C);
    op.derive([](auto &args) { args.groups = int32_t(args.added->weights[0].N / (2 * args.taps)); });
    op.out(FIELD(copy), {K, T});
    op.room(FIELD(out), [](const auto &args) { return rowmm_op_bytes(args.T, args.K); });
    op.runs(nullptr, cuda::block_conv_pack);
});
// f(gate) * up of parts, packed.
inline const auto &rowmm_parts_glu = row<RowmmPackArgs>("rowmm_parts_glu", [](auto &op, auto &a) {
    op.launch(FIELD(parts));
    op.params(FIELD(activation));
    op.derive([](auto &args) {
        args.T = args.parts->T;
        args.K = args.parts->weights[0].N;
        args.input = ROWMM_GLU;
        args.overlap = 1;
    });
    op.room(FIELD(out), [](const auto &args) { return rowmm_op_bytes(args.T, args.K); });
    op.runs(nullptr, cuda::rowmm_pack);
});

// Inputs of gemm, packed: the ops gemm_pack..
template <class Row, class A> void packs_prompt(Row &op, A &a, RowmmInput input) {
    op.dims(a.T, T, a.K, K, a.x_row, K);
    op.derive([input](auto &args) {
        args.input = input;
        args.y_row = input == ROWMM_GATED ? 2 * args.K : args.K;
    });
    op.room(FIELD(out), [](const auto &args) { return gemm_x_bytes(args.T, args.K); });
    op.runs(nullptr, cuda::gemm_pack);
}
inline const auto &gemm_pack = row<RowmmPackArgs>("gemm_pack", [](auto &op, auto &a) {
    op.in(FIELD(x), {K, T});
    packs_prompt(op, a, ROWMM_PLAIN);
});
inline const auto &gemm_pack_norm = row<RowmmPackArgs>("gemm_pack_norm", [](auto &op, auto &a) {
    op.in(FIELD(x), {K, T});
    op.in(FIELD(w), {K});
    op.params(FIELD(eps));
    packs_prompt(op, a, ROWMM_RMS);
});
inline const auto &gemm_pack_glu = row<RowmmPackArgs>("gemm_pack_glu", [](auto &op, auto &a) {
    op.in(FIELD(x), {K, T});
    op.in(FIELD(y), {K, T});
    op.params(FIELD(activation));
    packs_prompt(op, a, ROWMM_GLU);
});
// Heads of the gate lie 2 D apart.
inline const auto &gemm_pack_gated = row<RowmmPackArgs>("gemm_pack_gated", [](auto &op, auto &a) {
    op.in(FIELD(x), {K, T});
    op.in("y", ArgForm::f32, {D, H, T},
          [](auto &args, const ggml_tensor &, uint8_t *at) { args.y = reinterpret_cast<const float *>(at); });
    op.dims(a.head, D);
    packs_prompt(op, a, ROWMM_GATED);
});
inline const auto &gemm_pack_heads = row<RowmmPackArgs>("gemm_pack_heads", [](auto &op, auto &a) {
    op.in(FIELD(x), {K, T});
    op.in(FIELD(y), {K, T});
    op.in(FIELD(w), {S});
    op.dims(a.head, S);
    op.params(FIELD(eps));
    packs_prompt(op, a, ROWMM_HEAD_RMS);
});

// A prefill's product with packed weights, and a residual where there is one.
inline const auto &gemm = row<PromptMatmulArgs>("gemm", [](auto &op, auto &a) {
    op.in(FIELD(product.x), {ANY});
    op.matrix(FIELD(unpack.src), {K, N}).type(a.unpack.type);
    op.in(FIELD(unpack.dst), {ANY});
    op.in(FIELD(product.residual), {N, T}).maybe();
    op.dims(a.unpack.K, K, a.unpack.N, N, a.product.K, K, a.product.N, N);
    op.params(FIELD(product.T));
    op.derive([](auto &args) { args.product.weights = args.unpack.dst; });
    op.known(T, a.product.T);
    op.out(FIELD(product.out), {N, T});
    op.runs(nullptr, prompt_matmul);
});
// Products with copies of weights that are F16 already, and a residual where there is one copy.
inline const auto &gemm_copies = row<GemmCopiesArgs>("gemm_copies", [](auto &op, auto &a) {
    op.in(FIELD(x), {ANY});
    op.in(FIELD(residual), {ANY, T}).maybe();
    op.in("weights", ArgForm::matrix, {K, ANY}, [](auto &args, const ggml_tensor &w, uint8_t *at) {
          args.weights[args.n_weights++] = {at, nullptr, w.ne[1]};
      }).up_to(GEMM_MAX_WEIGHTS);
    op.dims(a.K, K);
    op.params(FIELD(T));
    op.known(T, a.T);
    op.out_of_weights();
    op.runs(nullptr, cuda::gemm_copies);
});
#endif

} // namespace luce::ops
