// Rows of the ops of attention (ops/row.h says how to read them).
#pragma once

#include "attention/prefill.h"
#include "attention/sizes.h"
#include "cpu/attention.h"
#include "ops/matmul.h"
#include "ops/row.h"

namespace luce::ops {
using namespace extents;

// The pools of a layer's cells.
template <class Row, class A> void takes_pool(Row &op, A &a) {
    op.matrix(FIELD(pool.k), {D, PAGE, Hkv, pages}).type(a.pool.type);
    op.matrix(FIELD(pool.v), {D, PAGE, Hkv, pages});
    op.in(FIELD(ctl));
    op.in(FIELD(pages), {ANY});
    op.dims(a.pool.Hkv, Hkv, a.pool.D, D);
}

// Norms and rotates k, and q where there is one, which has D values and then D of a gate for each head.
inline const auto &norm_rope = row<NormRopeArgs>("norm_rope", [](auto &op, auto &a) {
    op.in(FIELD(k.x), {D * Hkv, T});
    op.in(FIELD(k.norm), {D});
    op.in(FIELD(positions), {T});
    op.in(FIELD(q.x), {2 * D * H, T}).maybe();
    op.in(FIELD(q.norm), {D}).maybe();
    op.in(FIELD(axes), {4 * T}).maybe();
    op.dims(a.T, T, a.D, D, a.k.x_row, D * Hkv, a.k.x_head, D, a.k.n_heads, Hkv, a.q.x_row, 2 * D * H,
            a.q.n_heads, H);
    op.derive([](auto &args) { args.q.x_head = args.q.x == nullptr ? 0 : 2 * args.D; });
    op.params(FIELD(rope_dim), FIELD(base), FIELD(eps), FIELD(height_pairs), FIELD(width_pairs));
    op.lacks([](const auto &args) { return rope_lacks(args.rope_dim, args.D, args.base); });
    op.out(FIELD(k.out), {D * Hkv, T});
    op.out(FIELD(q.out), {D * H, T});
    op.runs(cpu_norm_rope, LUCE_CUDA(norm_rope));
});

// Moves accepted rows of one pool to where they belong. (Ahead of a step those of all pools are moved at once: Step::move_kv.)
inline const auto &kv_move = row<KvMoveArgs>("kv_move", [](auto &op, auto &a) {
    op.matrix(FIELD(pools[0].k), {D, PAGE, Hkv, pages}).type(a.pools[0].type);
    op.matrix(FIELD(pools[0].v), {D, PAGE, Hkv, pages});
    op.in(FIELD(ctl));
    op.in(FIELD(pages), {ANY});
    op.dims(a.pools[0].Hkv, Hkv, a.pools[0].D, D);
    op.derive([](auto &args) { args.n_pools = 1; });
    op.runs(cpu_kv_move, LUCE_CUDA(kv_move));
});

// Writes K and V of a step's rows into their cells.
inline const auto &kv_store = row<KvStoreArgs>("kv_store", [](auto &op, auto &a) {
    op.in(FIELD(k), {D * Hkv, T});
    op.in(FIELD(v), {D * Hkv, T});
    takes_pool(op, a);
    op.dims(a.T, T);
    op.params(FIELD(append));
    op.runs(cpu_kv_store, LUCE_CUDA(kv_store));
});

// Attention of a step's rows over what they see. gate has D values for each head, or those of q and then its own.
template <class Row, class A> void attends(Row &op, A &a) {
    op.in(FIELD(q), {D * H, T});
    op.in("gate", ArgForm::f32, {ANY, T}, [](auto &args, const ggml_tensor &t, uint8_t *at) {
          args.gate_row = t.ne[0];
          args.gate_head = t.ne[0] / args.H;
          args.gate = reinterpret_cast<const float *>(at) + args.gate_head - args.pool.D;
      }).maybe();
    takes_pool(op, a);
    op.in(FIELD(sinks), {H}).maybe();
    op.dims(a.T, T, a.H, H);
    // max_pages is 0 on a CPU, which needs no room for partial results
    op.params(FIELD(first), FIELD(window), FIELD(max_pages), FIELD(scale), FIELD(softcap));
    op.lacks([](const auto &args) {
        const bool gpu = args.max_pages > 0;
        if (gpu && args.committed != 0 && args.window == 1) {
            return std::string("no kernel has rows that see nothing, by a window of 1");
        }
        return gpu && args.block != 0 ? attention_lacks<BlockHeadSizes>(args.pool.D, args.H, args.pool.Hkv)
                                      : attention_lacks(args.pool.D, args.H, args.pool.Hkv);
    });
}
#ifdef LUCE_USE_CUDA
inline int64_t partial_bytes(const AttentionArgs &args) {
    return args.max_pages == 0 ? 0 : attention_scratch(args) * int64_t(sizeof(float));
}
#else
inline int64_t partial_bytes(const AttentionArgs &) {
    return 0;
}
#endif
inline const auto &attention = row<AttentionArgs>("attention", [](auto &op, auto &a) {
    attends(op, a);
    op.out(FIELD(out), {D * H, T});
    op.room(FIELD(scratch), partial_bytes);
    op.runs(cpu_attention, LUCE_CUDA(attention));
});
// The same, of rows that all see each other; on a GPU it takes no gate.
inline const auto &block_attention = row<AttentionArgs>("block_attention", [](auto &op, auto &a) {
    attends(op, a);
    op.params(FIELD(block));
    op.out(FIELD(out), {D * H, T});
    op.room(FIELD(scratch), [](const auto &args) {
        const int64_t values = block_attention_scratch(args.T, args.H, args.pool.D);
        return args.max_pages == 0 ? 0 : values * int64_t(sizeof(float));
    });
    op.runs(cpu_attention, LUCE_CUDA(block_attention));
});

// Attention of rows over committed positions alone: of a drafter that reads the target's cells. It is that of a row at
// n_past - 1, whose K and V are in its cell as all others are, with a window that is smaller by one.
inline const auto &committed_attention = row<AttentionArgs>("committed_attention", [](auto &op, auto &a) {
    attends(op, a);
    op.derive([](auto &args) { args.committed = 1; });
    op.out(FIELD(out), {D * H, T});
    op.room(FIELD(scratch), partial_bytes);
    op.runs(cpu_attention, LUCE_CUDA(attention));
});

#ifdef LUCE_USE_CUDA
inline int64_t row_scores_bytes(const RowScoresArgs &args) {
    return args.on_gpu == 0 ? 0 : row_scores_partials(args) * int64_t(sizeof(float));
}
#else
inline int64_t row_scores_bytes(const RowScoresArgs &) {
    return 0;
}
#endif
// What each cell has of the attention of a step's rows.
inline const auto &row_scores = row<RowScoresArgs>("row_scores", [](auto &op, auto &a) {
    op.in(FIELD(q), {D * H, T});
    op.matrix(FIELD(pool.k), {D, PAGE, Hkv, pages}).type(a.pool.type);
    op.in(FIELD(ctl));
    op.in(FIELD(pages), {ANY});
    op.in(FIELD(scores), {cells, H});
    op.dims(a.pool.Hkv, Hkv, a.pool.D, D, a.T, T, a.H, H, a.n, cells);
    op.derive([](auto &args) { args.pool.v = args.pool.k; });
    op.params(FIELD(on_gpu), FIELD(scale), FIELD(softcap));
    op.lacks([](const auto &args) {
        return args.on_gpu != 0 ? attention_lacks(args.pool.D, args.H, args.pool.Hkv) : std::string();
    });
    op.room(FIELD(partials), row_scores_bytes);
    op.runs(cpu_row_scores, LUCE_CUDA(row_scores));
});

// Cells of a prefill's sequences, of k or of v, in order: in F16 on a GPU, in F16 or F32 on a CPU.
inline const auto &kv_gather = row<KvGatherArgs>("kv_gather", [](auto &op, auto &a) {
    op.matrix(FIELD(pool.k), {D, PAGE, Hkv, pages}).type(a.pool.type);
    op.in(FIELD(ctl));
    op.in(FIELD(pages), {ANY});
    op.dims(a.pool.Hkv, Hkv, a.pool.D, D);
    op.derive([](auto &args) { args.pool.v = args.pool.k; });
    op.params(FIELD(n_kv), FIELD(out_type), FIELD(window));
    op.known(cells, a.n_kv);
    op.out(FIELD(out), {D * Hkv, cells}).typed(op.number(a.out_type));
    op.runs(cpu_kv_gather, LUCE_CUDA(kv_gather));
});

// The mask {n_kv, T} of a prefill's rows, for ggml's attention on a CPU.
inline const auto &prefill_mask = row<MaskArgs>("prefill_mask", [](auto &op, auto &a) {
    op.in(FIELD(ctl));
    op.in(FIELD(row_ends), {ends}).maybe();
    op.dims(a.n_ends, ends);
    op.params(FIELD(T), FIELD(n_kv), FIELD(first), FIELD(window));
    op.known(T, a.T);
    op.known(cells, a.n_kv);
    op.out(FIELD(out), {cells, T});
    op.runs(cpu_prefill_mask, nullptr);
});

#ifdef LUCE_USE_CUDA
// Attention of prompts' rows over the cells of each one's sequence, as kv_gather puts them side by side.
inline const auto &prefill_attention = row<PrefillAttentionArgs>("prefill_attention", [](auto &op, auto &a) {
    op.in(FIELD(q), {D, H, T});
    op.matrix(FIELD(k), {D, Hkv, cells});
    op.matrix(FIELD(v), {D, Hkv, cells});
    op.in(FIELD(ctl));
    op.in(FIELD(row_ends), {T}).maybe();
    op.dims(a.T, T, a.H, H, a.Hkv, Hkv, a.D, D, a.n_kv, cells);
    op.params(FIELD(n_prompts), FIELD(first), FIELD(window), FIELD(scale), FIELD(softcap), FIELD(apart));
    op.lacks([](const auto &args) { return attention_lacks(args.D, args.H, args.Hkv); });
    op.out(FIELD(out), {D * H, T});
    op.room(FIELD(ranges),
            [](const auto &args) { return args.apart == 0 ? 0 : 4 * prefill_range_values(args); });
    op.runs(nullptr, cuda::prefill_attention);
});

// norm_rope and kv_store of the parts of q, with its gate where it is gated, k and v, or of k and v alone. Its results are q and
// the gate.
inline const auto &attention_heads = row<AttentionHeadsArgs>("attention_heads", [](auto &op, auto &a) {
    op.launch(FIELD(parts));
    op.in(FIELD(k_norm), {D});
    op.in(FIELD(positions), {T});
    takes_pool(op, a);
    op.in(FIELD(q_norm), {D}).maybe();
    op.in(FIELD(rope_factors), {ANY}).maybe();
    op.dims(a.T, T);
    op.derive([](auto &args) {
        const int64_t of_head = (args.gated != 0 ? 2 : 1) * int64_t(args.pool.D);
        args.H = args.q_norm == nullptr ? 0 : int32_t(args.parts->weights[0].N / of_head);
    });
    op.params(FIELD(rope_dim), FIELD(base), FIELD(eps), FIELD(gated), FIELD(unit_v));
    op.known(H, a.H);
    op.known(gates, [](const auto &args) { return args.gated != 0 ? args.H : 0; });
    op.out(FIELD(q), {D * H, T});
    op.out(FIELD(gate), {D * gates, T});
    op.runs(nullptr, cuda::attention_heads);
});

// The same of q alone, without a gate, where a layer reads the cells of another.
inline const auto &attention_queries = row<AttentionHeadsArgs>("attention_queries", [](auto &op, auto &a) {
    op.launch(FIELD(parts));
    op.in(FIELD(q_norm), {D});
    op.in(FIELD(positions), {T});
    op.in(FIELD(rope_factors), {ANY}).maybe();
    op.dims(a.T, T, a.pool.D, D);
    op.derive([](auto &args) { args.H = int32_t(args.parts->weights[0].N / args.pool.D); });
    op.params(FIELD(rope_dim), FIELD(base), FIELD(eps));
    op.known(H, a.H);
    op.out(FIELD(q), {D * H, T});
    op.runs(nullptr, cuda::attention_heads);
});

// What each block of attention_packed does, in all layers that are alike. They count in it, by layer.
inline const auto &attention_plan = row<AttentionArgs>("attention_plan", [](auto &op, auto &a) {
    op.in(FIELD(ctl));
    op.params(FIELD(T), FIELD(H), FIELD(first), FIELD(window), FIELD(pool.type), FIELD(pool.Hkv),
              FIELD(pool.D));
    op.room(FIELD(plan), [](const auto &) { return attention_plan_bytes(); });
    op.runs(nullptr, [](const AttentionArgs &args, void *stream) {
        AttentionArgs shape = args;
        shape.plan = nullptr;
        return cuda::attention_plan(shape, args.plan, stream);
    });
});

// block_attention, whose results are packed for rowmm.
inline const auto &block_attention_packed =
    row<AttentionArgs>("block_attention_packed", [](auto &op, auto &a) {
        attends(op, a);
        op.params(FIELD(block));
        op.room(FIELD(packed),
                [](const auto &args) { return rowmm_op_bytes(args.T, int64_t(args.pool.D) * args.H); });
        op.room(FIELD(scratch), [](const auto &args) {
            return block_attention_scratch(args.T, args.H, args.pool.D) * int64_t(sizeof(float));
        });
        op.runs(nullptr, cuda::block_attention);
    });
// attention, or that of committed positions, whose results are packed for rowmm.
inline const auto &attention_packed = row<AttentionArgs>("attention_packed", [](auto &op, auto &a) {
    attends(op, a);
    op.in(FIELD(plan), {ANY}).maybe();
    op.params(FIELD(layer), FIELD(committed));
    op.room(FIELD(packed),
            [](const auto &args) { return rowmm_op_bytes(args.T, int64_t(args.pool.D) * args.H); });
    op.room(FIELD(scratch), partial_bytes);
    op.runs(nullptr, cuda::attention);
});
#endif

} // namespace luce::ops
