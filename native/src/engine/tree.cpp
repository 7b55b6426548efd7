#include "engine/tree.h"

#include "abi/status.h"
#include "cpu/sampler.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <queue>
#include <tuple>

namespace luce {
namespace {

constexpr uint32_t NONE = UINT32_MAX;

// A node is entered as it is found. Its path of ranks is that of its parent and its own rank.
struct Node {
    int32_t token;
    uint32_t parent, depth, rank; // parent NONE means the anchor; depth counts from 0
    uint32_t candidate; // of its depth's: the rank, unless lists are conditional
    double score;
    std::vector<uint32_t> children; // by rank
};

class Builder {
public:
    Builder(const TreeLists &lists, int32_t anchor) : lists_(lists) {
        nodes_.push_back({anchor, NONE, 0, 0, 0, 0.0, {}});
    }

    void take_best(uint32_t budget) {
        const auto later = [this](const Candidate &a, const Candidate &b) { return before(b, a); };
        std::priority_queue<Candidate, std::vector<Candidate>, decltype(later)> heap(later);
        const auto offer = [&](uint32_t parent, uint32_t rank) {
            float score = -INFINITY;
            if (nodes_[parent].depth < lists_.depth && rank < lists_.k) {
                score = score_of(parent, at_rank(parent, rank));
            }
            if (std::isnan(score)) {
                fail(LUCE_E_NUMERIC, "the score of rank %u at depth %u is not a number", rank,
                     nodes_[parent].depth + 1);
            }
            if (score > -INFINITY) {
                heap.push({nodes_[parent].score + double(score), parent, rank});
            }
        };
        offer(0, 0);
        for (; budget > 0 && !heap.empty(); budget--) {
            const Candidate best = heap.top();
            heap.pop();
            const uint32_t depth = nodes_[best.parent].depth, of = at_rank(best.parent, best.rank);
            const uint32_t node = add(best.parent, lists_.ids[size_t(depth) * lists_.k + of]);
            nodes_[node].rank = best.rank;
            nodes_[node].candidate = of;
            nodes_[node].score = best.score;
            offer(best.parent, best.rank + 1);
            if (lists_.form != Candidates::chain || best.rank == 0) {
                offer(node, 0);
            }
        }
    }

    Tree rows() const {
        Tree tree;
        write(0, -1, tree);
        return tree;
    }

private:
    struct Candidate {
        double score;
        uint32_t parent, rank;
    };

    // Where a candidate of the depth below a node stands in the scores.
    size_t place(uint32_t parent, uint32_t candidate) const {
        const size_t depth = nodes_[parent].depth, k = lists_.k;
        const bool conditional = lists_.form == Candidates::conditional;
        return (conditional ? depth * k + nodes_[parent].candidate : depth) * k + candidate;
    }

    float score_of(uint32_t parent, uint32_t candidate) const {
        const bool there = lists_.ids[size_t(nodes_[parent].depth) * lists_.k + candidate] >= 0;
        return there ? lists_.scores[place(parent, candidate)] : -INFINITY;
    }

    // Which candidate of the depth below a node has this rank there. Conditional lists are sorted as they are asked for:
    // by score, and then by id. NaN comes first.
    uint32_t at_rank(uint32_t parent, uint32_t rank) {
        if (lists_.form != Candidates::conditional) {
            return rank;
        }
        std::vector<uint32_t> &order = orders_[place(parent, 0)];
        if (order.empty()) {
            const int32_t *ids = lists_.ids + size_t(nodes_[parent].depth) * lists_.k;
            order.resize(lists_.k);
            std::iota(order.begin(), order.end(), 0);
            const auto key = [&](uint32_t i) {
                const float score = score_of(parent, i);
                return std::tuple(!std::isnan(score), std::isnan(score) ? 0.0f : -score, ids[i]);
            };
            std::sort(order.begin(), order.end(), [&](uint32_t i, uint32_t j) { return key(i) < key(j); });
        }
        return order[rank];
    }

    std::vector<uint32_t> path(const Candidate &candidate) const {
        std::vector<uint32_t> ranks = {candidate.rank};
        for (uint32_t at = candidate.parent; at != 0; at = nodes_[at].parent) {
            ranks.push_back(nodes_[at].rank);
        }
        std::reverse(ranks.begin(), ranks.end());
        return ranks;
    }

    bool before(const Candidate &a, const Candidate &b) const {
        return a.score != b.score ? a.score > b.score : path(a) < path(b);
    }

    uint32_t add(uint32_t parent, int32_t token) {
        const uint32_t at = uint32_t(nodes_.size());
        nodes_.push_back({token, parent, nodes_[parent].depth + 1, 0, 0, 0.0, {}});
        nodes_[parent].children.push_back(at);
        return at;
    }

    void write(uint32_t at, int32_t parent, Tree &tree) const {
        const int32_t row = int32_t(tree.tokens.size());
        tree.tokens.push_back(nodes_[at].token);
        tree.parents.push_back(parent);
        for (const uint32_t child : nodes_[at].children) {
            write(child, row, tree);
        }
    }

    const TreeLists &lists_;
    std::map<size_t, std::vector<uint32_t>> orders_; // by where a list begins
    std::vector<Node> nodes_; // a node comes after its parent and its better siblings
};

// Of what the filters keep, in units of 2^-40.
float log_mass(uint64_t mass) {
    return std::log(std::max(float(mass) * 0x1p-40f, 1e-30f));
}

} // namespace

void add_noise(const ChoiceCtl &choice, uint64_t position, int32_t draft, int32_t *ids, float *scores,
               uint32_t n) {
    struct Candidate {
        int32_t id;
        float score;
    };
    std::vector<float> noisy(n);
    uint64_t kept = 0;
    const uint32_t n_kept = score_candidates(choice, position, ids, scores, n, noisy.data(), &kept);
    std::vector<Candidate> list;
    for (uint32_t i = 0; i < n_kept; i++) {
        list.push_back({ids[i], noisy[i]});
    }
    std::sort(list.begin(), list.end(), [](const Candidate &a, const Candidate &b) {
        return a.score != b.score ? a.score > b.score : a.id < b.id;
    });
    const auto at =
        std::find_if(list.begin(), list.end(), [draft](const Candidate &c) { return c.id == draft; });
    const float best = list.empty() ? 0.0f : list[0].score;
    if (at != list.end()) {
        list.erase(at);
    }
    list.insert(list.begin(), {draft, best});
    const float log_kept = log_mass(kept);
    for (uint32_t i = 0; i < n; i++) {
        const bool there = i < list.size();
        ids[i] = there ? list[i].id : -1;
        scores[i] = there ? list[i].score - log_kept : -INFINITY;
    }
}

void add_noise(const ChoiceCtl &choice, uint64_t position, const int32_t *ids, float *scores, uint32_t n) {
    if (std::any_of(scores, scores + n, [](float score) { return std::isnan(score); })) {
        return; // it has no order; make_tree() refuses it
    }
    std::vector<uint32_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](uint32_t i, uint32_t j) {
        return scores[i] != scores[j] ? scores[i] > scores[j] : ids[i] < ids[j];
    });
    std::vector<int32_t> sorted(n);
    std::vector<float> logits(n), noisy(n);
    for (uint32_t i = 0; i < n; i++) {
        sorted[i] = ids[order[i]];
        logits[i] = scores[order[i]];
    }
    uint64_t kept = 0;
    const uint32_t n_kept =
        score_candidates(choice, position, sorted.data(), logits.data(), n, noisy.data(), &kept);
    for (uint32_t i = 0; i < n; i++) {
        scores[order[i]] = i < n_kept ? noisy[i] - log_mass(kept) : -INFINITY;
    }
}

void add_confidence(const float *log_confidence, float *scores, uint32_t k, uint32_t n) {
    const float least = std::log(LEAST_CONFIDENCE);
    for (uint32_t i = 0; i < k * n; i++) {
        scores[i] = log_confidence[i / k] < least ? -INFINITY : scores[i] + log_confidence[i / k];
    }
}

TreeLists tree_lists(const luce_lists &lists) {
    if (lists.form < LUCE_FORM_CHAIN || lists.form > LUCE_FORM_CONDITIONAL) {
        fail(LUCE_E_ARG, "the lists have form %d, expected 0 to %d", lists.form, LUCE_FORM_CONDITIONAL);
    }
    return {lists.ids, lists.scores, lists.depth, lists.k, Candidates(lists.form)};
}

Tree make_tree(int32_t anchor, const TreeLists &lists, uint32_t budget) {
    Builder builder(lists, anchor);
    builder.take_best(budget);
    return builder.rows();
}

} // namespace luce
