// The draft tree says which candidates one verify takes of a drafter's lists, and of a chain beside them.
//
// A drafter gives a list of its best tokens at each depth, best first, each with a score (a log-probability; when
// sampling, one with the noise that the target will choose with). A node of the tree is a path of ranks, one at each
// depth; its score is the sum of those along the path. Nodes are taken best first until the budget is spent, a node
// before its children and before its next sibling. Ties go to the lexicographically smaller path of ranks. This is
// DDTree: of log-probabilities, which are no more than 0, it is the tree of the budget with the largest expected
// accepted length, under the drafter's own probabilities.
#pragma once

#include "sampling/sampling.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace luce {

struct TreeLists {
    const int32_t *ids; // (depth, k); the best comes first; an id below 0 says that the list ends before it
    const float *scores; // (depth, k); -inf says that the list ends before it
    uint32_t depth, k;
    // The lists follow the first choices alone (a chain's), so only nodes on that path have children.
    bool comb;
};

// Turns the best candidates of a draft, in the order (logit descending, id ascending), into those that
// `choice` is likely to take at `position`. Of the ones that its filters keep, they are those with the
// largest log-probability and noise, best first, with these sums as scores. The draft itself, which was
// chosen of all of the vocabulary, comes first. The filters' sums are taken over the n candidates alone.
void add_noise(const ChoiceCtl &choice, uint64_t position, int32_t draft, int32_t *ids, float *scores,
               uint32_t n);

struct Tree {
    static constexpr uint8_t OF_LISTS = 1, OF_CHAIN = 2;

    std::vector<int32_t> tokens, parents; // rows are in depth-first order; row 0 is the anchor
    std::vector<uint8_t> sources; // bits say whose candidate a row is; the anchor has 0
};

// Makes the tree of `budget` nodes of the lists, joined with a chain of n_chain tokens. A prefix that they
// share is there once. It fails with E_NUMERIC where a score that is looked at is NaN.
Tree make_tree(int32_t anchor, const TreeLists &lists, uint32_t budget, const int32_t *chain,
               uint32_t n_chain);

} // namespace luce
