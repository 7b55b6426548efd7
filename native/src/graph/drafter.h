// The graphs of drafters: what a step of the target does for them, and their own steps.
#pragma once

#include "graph/plain.h"

namespace luce {

// Writes K and V of rows x {E, T} into their cells, without attention over them.
Val write_kv(Val x, const Attention &w, const KvLayer &kv, float eps);

// Keeps the hidden states h {E, T} of a target's rows, after its output norm, and writes the NextN head's KV rows: row p
// comes from the hidden state at p - 1 and token p. A verify of one row leaves that to a feed (cache.h).
void feed_nextn(const NextN &head, Val h);

// A feed, or one link of the NextN chains of the step's sequences: a row each, whose choice and hidden state are
// kept for the next link.
void draft_nextn(Plain &g);

// Computes the rows' context for a DFlash drafter: K and V of each of its layers, from what the trunk's
// blocks put out (outputs[il] {E, T}).
void feed_dflash(const DFlash &drafter, const std::vector<Val> &outputs);

// Computes a block for each of the step's sequences, whose rows are [anchor, mask, mask ..]. The choices of
// all rows are kept but the anchors'. Logits are of all rows, over the target's vocabulary.
void draft_dflash(Plain &g);

} // namespace luce
