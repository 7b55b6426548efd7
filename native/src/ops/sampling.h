// Rows of the ops of tokens: what rows choose, and what goes into the next (ops/row.h says how to read them).
#pragma once

#include "cpu/attention.h" // cpu_row_tokens
#include "cpu/cluster_logits.h"
#include "cpu/draft_block.h"
#include "cpu/sampler.h"
#include "ops/matmul.h"
#include "ops/row.h"

namespace luce::ops {
using namespace extents;

// The token of each row's logits, which is kept for later rows and for the host.
inline const auto &choose = row<ChooseArgs>("choose", [](auto &op, auto &a) {
    op.in(FIELD(logits), {V, T});
    op.in(FIELD(ctl));
    op.in(FIELD(drafts), {2, entries}).maybe();
    op.in(FIELD(given), {2, entries}).maybe();
    op.dims(a.n, V, a.T, T);
    op.params(FIELD(ahead), FIELD(first), FIELD(between));
    op.out(FIELD(out), {CHOICE_WIDTH, T});
    op.runs(cpu_choose, LUCE_CUDA(choose));
});

// The k best candidates of each row.
inline const auto &topk = row<TopkArgs>("topk", [](auto &op, auto &a) {
    op.in(FIELD(logits), {V, T});
    op.in(FIELD(ctl));
    op.in(FIELD(lists), {width, entries});
    op.dims(a.n, V, a.T, T, a.entry, width);
    op.params(FIELD(k));
    op.known(sums, [](const auto &args) { return topk_scratch(args.k); });
    op.out(FIELD(scratch), {sums, T});
    op.runs(cpu_topk, LUCE_CUDA(topk));
});

// The tokens of a step's rows, some of which are drafts.
inline const auto &row_tokens = row<TokensArgs>("row_tokens", [](auto &op, auto &a) {
    op.in(FIELD(tokens), {T});
    op.in(FIELD(drafts), {2, entries});
    op.dims(a.T, T);
    op.params(FIELD(n_vocab));
    op.out(FIELD(out), {T});
    op.runs(cpu_row_tokens, LUCE_CUDA(row_tokens));
});

inline std::string cluster_logits_lacks([[maybe_unused]] const ClusterLogitsArgs &args) {
#ifdef LUCE_USE_CUDA
    if (args.on_gpu != 0 && (!nextn_has_table(args.type) || args.E % 8 != 0)) {
        return "no kernel looks rows of " + std::to_string(args.E) + " weights of such a type up";
    }
#endif
    return "";
}

// ---- blocks of drafters whose drafts depend on each other ----

inline const auto &block_conv = row<BlockConvArgs>("block_conv", [](auto &op, auto &a) {
    op.in(FIELD(x), {E, T});
    op.in(FIELD(added), {Extent(2) * K * C, T});
    op.in(FIELD(base), {E, K, 2});
    op.in(FIELD(ctl));
    op.dims(a.E, E, a.T, T, a.taps, K, a.groups, C);
    op.params(FIELD(side));
    op.out(FIELD(out), {E, T});
    op.runs(cpu_block_conv, LUCE_CUDA(block_conv));
});

inline const auto &prior_tokens = row<PriorArgs>("prior_tokens", [](auto &op, auto &a) {
    op.in(FIELD(tokens), {ANY});
    op.in(FIELD(drafts), {2, entries});
    op.in(FIELD(ctl));
    op.params(FIELD(T), FIELD(first), FIELD(between), FIELD(n_vocab));
    op.known(T, a.T);
    op.out(FIELD(out), {T});
    op.runs(cpu_prior_tokens, LUCE_CUDA(prior_tokens));
});

inline const auto &candidates = row<CandidatesArgs>("candidates", [](auto &op, auto &a) {
    op.in(FIELD(logits), {V, T});
    op.in(FIELD(tokens), {V}).maybe();
    op.dims(a.n, V, a.T, T);
    op.params(FIELD(K));
    op.known(K, a.K);
    op.known(width, [](const auto &args) { return candidate_planes(args.K); });
    op.out(FIELD(out), {K * T, width});
    op.runs(cpu_candidates, LUCE_CUDA(candidates));
});

// Logits of the tokens of some clusters. (candidates has chosen these.)
inline const auto &cluster_logits = row<ClusterLogitsArgs>("cluster_logits", [](auto &op, auto &a) {
    op.in(FIELD(x), {E, T});
    op.in(FIELD(clusters), {K * T, ANY});
    op.matrix(FIELD(table), {E, V}).type(a.type).row(a.row_bytes);
    op.in(FIELD(order), {V});
    op.dims(a.T, T, a.K, K, a.E, E, a.n, V);
    op.params(FIELD(size), FIELD(on_gpu));
    op.lacks(cluster_logits_lacks);
    op.out(FIELD(out), {V, T});
    op.runs(cpu_cluster_logits, LUCE_CUDA(cluster_logits));
});

inline const auto &lattice = row<LatticeArgs>("lattice", [](auto &op, auto &a) {
    op.in(FIELD(candidates), {K * T, ANY});
    op.in(FIELD(anchors), {D, T});
    op.in(FIELD(before), {D, K * T});
    op.in(FIELD(behind), {D, K * T});
    op.in(FIELD(gates), {D, T}).maybe();
    op.in(FIELD(ctl));
    op.in(FIELD(drafts), {2, entries});
    op.in(FIELD(given), {2, entries});
    op.in(FIELD(lists), {width, ANY}).maybe();
    op.dims(a.T, T, a.K, K, a.R, D, a.entry, width);
    op.params(FIELD(ahead), FIELD(chooses));
    op.out(FIELD(out), {K * K, T});
    op.runs(cpu_lattice, LUCE_CUDA(lattice));
});

inline const auto &confidence = row<ConfidenceArgs>("confidence", [](auto &op, auto &a) {
    op.in(FIELD(hidden), {E, T});
    op.in(FIELD(anchors), {D, T});
    op.in(FIELD(before), {D, K * T});
    op.matrix(FIELD(head), {C, 1}).type(a.type);
    op.in(FIELD(bias), {1}).maybe();
    op.in(FIELD(ctl));
    op.in(FIELD(lists), {width, ANY});
    op.dims(a.T, T, a.K, K, a.R, D, a.E, E, a.n, C, a.entry, width);
    op.out(FIELD(out), {K, T});
    op.runs(cpu_confidence, LUCE_CUDA(confidence));
});

#ifdef LUCE_USE_CUDA
// The NextN head's input, packed for rowmm: rows of 2 E values.
inline const auto &nextn_pack = row<NextnPackArgs>("nextn_pack", [](auto &op, auto &a) {
    op.in(FIELD(tokens), {T});
    op.in(FIELD(drafts), {2, entries});
    op.matrix(FIELD(table), {E, V}).type(a.type).row(a.row_bytes);
    op.in(FIELD(hidden), {E, ANY});
    op.in(FIELD(hidden_from), {T});
    op.in(FIELD(e_norm), {E});
    op.in(FIELD(h_norm), {E});
    op.dims(a.T, T, a.E, E, a.n_vocab, V);
    op.params(FIELD(eps));
    op.room(FIELD(out), [](const auto &args) { return rowmm_op_bytes(args.T, 2 * args.E); });
    op.runs(nullptr, cuda::nextn_pack);
});

// Keeps the norms of rows for drafts.
inline const auto &keep_hidden = row<KeepHiddenArgs>("keep_hidden", [](auto &op, auto &a) {
    op.in(FIELD(x), {E, T}).row(a.x_row);
    op.in(FIELD(norm), {E});
    op.in(FIELD(hidden), {E, ANY});
    op.in(FIELD(hidden_to), {T});
    op.dims(a.T, T, a.E, E);
    op.params(FIELD(eps));
    op.runs(nullptr, cuda::keep_hidden);
});
#endif

} // namespace luce::ops
