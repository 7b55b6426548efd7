// The draft tree says which candidates one verify takes of a drafter's lists.
//
// A drafter gives a list of its best tokens at each depth, or one behind each candidate of the depth above, each token with
// a score (a log-probability; when sampling, one with the noise that the target will choose with). A node of the tree is a
// path of ranks, one at each depth; its score is the sum of those along the path. Nodes are taken best first until the
// budget is spent, a node before its children and before its next sibling. Ties go to the lexicographically smaller path
// of ranks. This is DDTree: of log-probabilities, which are no more than 0, it is the tree of the budget with the largest
// expected accepted length, under the drafter's own probabilities.
#pragma once

#include "graph/drafter.h"
#include "sampling/sampling.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace luce {

// As luce_lists says. Those of a chain follow the first choices alone, so only nodes on that path have children.
struct TreeLists {
    const int32_t *ids; // (depth, k)
    const float *scores; // (depth, k), or conditional (depth, k, k)
    uint32_t depth, k;
    Candidates form;
};
// E_ARG: there is no such form.
TreeLists tree_lists(const luce_lists &lists);

// Turns the best candidates of a draft, in the order (logit descending, id ascending), into those that
// `choice` is likely to take at `position`. Of the ones that its filters keep, they are those with the
// largest log-probability and noise, best first, with these sums as scores. The draft itself, which was
// chosen of all of the vocabulary, comes first. The filters' sums are taken over the n candidates alone.
void add_noise(const ChoiceCtl &choice, uint64_t position, int32_t draft, int32_t *ids, float *scores,
               uint32_t n);
// The same of candidates in any order, which keep it: the scores of those that the filters drop become -inf.
void add_noise(const ChoiceCtl &choice, uint64_t position, const int32_t *ids, float *scores, uint32_t n);

// A draft that is right less often is not worth its row. On an H200 a row more takes a 27b as long as 0.014 plain steps, and in
// that time rounds of seven drafts give 0.04 tokens of a mixture of texts.
constexpr float LEAST_CONFIDENCE = 0.05f;
// Adds to the k scores behind each of n candidates the logarithm of how likely a draft there is right, as a confidence head
// has it. Where that is below the least the scores become -inf, which cuts the tree there.
void add_confidence(const float *log_confidence, float *scores, uint32_t k, uint32_t n);

struct Tree {
    std::vector<int32_t> tokens, parents; // rows are in depth-first order; row 0 is the anchor
};

// Makes the tree of `budget` nodes of the lists. It fails with E_NUMERIC where a score that is looked at is NaN.
Tree make_tree(int32_t anchor, const TreeLists &lists, uint32_t budget);

} // namespace luce
