#include "engine/tree.h"

#include "abi/status.h"

#include <algorithm>
#include <cmath>
#include <queue>

namespace luce {
namespace {

constexpr uint32_t NONE = UINT32_MAX;

// A node is entered as it is found. Its path of ranks is that of its parent and its own rank.
struct Node {
    int32_t token;
    uint8_t sources;
    uint32_t parent, depth, rank; // parent NONE means the anchor; depth counts from 0
    double score;
    std::vector<uint32_t> children; // they are by rank, then the chain's
};

class Builder {
public:
    Builder(const TreeLists &lists, int32_t anchor) : lists_(lists) {
        nodes_.push_back({anchor, 0, NONE, 0, 0, 0.0, {}});
    }

    void take_best(uint32_t budget) {
        const auto later = [this](const Candidate &a, const Candidate &b) { return before(b, a); };
        std::priority_queue<Candidate, std::vector<Candidate>, decltype(later)> heap(later);
        const auto offer = [&](uint32_t parent, uint32_t rank) {
            const uint32_t depth = nodes_[parent].depth;
            const size_t at = size_t(depth) * lists_.k + rank;
            if (depth >= lists_.depth || rank >= lists_.k || lists_.ids[at] < 0) {
                return;
            }
            if (std::isnan(lists_.scores[at])) {
                fail(LUCE_E_NUMERIC, "the score of rank %u at depth %u is not a number", rank, depth + 1);
            }
            if (lists_.scores[at] > -INFINITY) {
                heap.push({nodes_[parent].score + double(lists_.scores[at]), parent, rank});
            }
        };
        offer(0, 0);
        for (; budget > 0 && !heap.empty(); budget--) {
            const Candidate best = heap.top();
            heap.pop();
            const uint32_t depth = nodes_[best.parent].depth;
            const int32_t token = lists_.ids[size_t(depth) * lists_.k + best.rank];
            const uint32_t node = add(best.parent, token, Tree::OF_LISTS);
            nodes_[node].rank = best.rank;
            nodes_[node].score = best.score;
            offer(best.parent, best.rank + 1);
            if (!lists_.comb || best.rank == 0) {
                offer(node, 0);
            }
        }
    }

    void join(const int32_t *chain, uint32_t n) {
        uint32_t at = 0;
        for (uint32_t i = 0; i < n; i++) {
            const auto &children = nodes_[at].children;
            const auto same = std::find_if(children.begin(), children.end(),
                                           [&](uint32_t child) { return nodes_[child].token == chain[i]; });
            at = same != children.end() ? *same : add(at, chain[i], Tree::OF_CHAIN);
            nodes_[at].sources |= Tree::OF_CHAIN;
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

    uint32_t add(uint32_t parent, int32_t token, uint8_t source) {
        const uint32_t at = uint32_t(nodes_.size());
        nodes_.push_back({token, source, parent, nodes_[parent].depth + 1, 0, 0.0, {}});
        nodes_[parent].children.push_back(at);
        return at;
    }

    void write(uint32_t at, int32_t parent, Tree &tree) const {
        const int32_t row = int32_t(tree.tokens.size());
        tree.tokens.push_back(nodes_[at].token);
        tree.parents.push_back(parent);
        tree.sources.push_back(nodes_[at].sources);
        for (const uint32_t child : nodes_[at].children) {
            write(child, row, tree);
        }
    }

    const TreeLists &lists_;
    std::vector<Node> nodes_; // a node comes after its parent and its better siblings
};

} // namespace

void add_noise(const ChoiceCtl &choice, uint64_t position, int32_t draft, int32_t *ids, float *scores,
               uint32_t n) {
    struct Candidate {
        int32_t id;
        float score;
    };
    const auto z = [&, first = scores[0]](uint32_t i) {
        return z_of(half_gap(scores[i], first), choice.scale);
    };
    uint32_t n_kept = 0;
    uint64_t total = 0, kept = 0;
    const uint32_t most = choice.top_k > 0 ? std::min(n, uint32_t(choice.top_k)) : n;
    for (; n_kept < most && ids[n_kept] >= 0; n_kept++) {
        total += mass_of(z(n_kept));
    }
    const uint64_t needed = needed_mass(total, choice.top_p);
    std::vector<Candidate> list;
    for (uint32_t i = 0; i < n_kept && kept < needed; i++) {
        const uint64_t mass = mass_of(z(i));
        if (mass < choice.min_mass) {
            break;
        }
        kept += mass;
        const Words4 words = noise_words(choice.seed, position, uint32_t(ids[i]) / 4);
        list.push_back({ids[i], score_of(half_gap(scores[i], scores[0]), choice.scale, words.w[ids[i] % 4])});
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
    const float log_kept = std::log(std::max(float(kept) * 0x1p-40f, 1e-30f));
    for (uint32_t i = 0; i < n; i++) {
        const bool there = i < list.size();
        ids[i] = there ? list[i].id : -1;
        scores[i] = there ? list[i].score - log_kept : -INFINITY;
    }
}

Tree make_tree(int32_t anchor, const TreeLists &lists, uint32_t budget, const int32_t *chain,
               uint32_t n_chain) {
    Builder builder(lists, anchor);
    builder.take_best(budget);
    builder.join(chain, n_chain);
    return builder.rows();
}

} // namespace luce
