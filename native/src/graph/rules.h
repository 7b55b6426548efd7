// The rules by which fused ops take the place of patterns in a plain graph. The table is in rules.cpp.
#pragma once

#include "graph/plain.h"

namespace luce {

// What the conditions of rules look at.
struct Target {
    const Plain &graph;
    bool gpu;

    bool step() const { return !graph.prefill(); }
    // Whether products with these weights may stay partial sums over K, which the next kernel adds up.
    bool leaves_partials(const std::vector<ggml_tensor *> &weights) const;
    // Whether a kernel of a block_conv adds up the partial sums of what rows add to it: a thread has two values of one group.
    bool convolves(const Node &conv) const;
};

// A Pattern is a node with its inputs. Where it has a name, equal names are one node, or one value where any fits.
struct Pattern {
    Op op;
    const char *name = "";
    std::vector<Pattern> in = {}; // empty: any inputs fit
    int32_t out = -1; // the output of the node that is meant; -1: any
};

// A Match is what a pattern's names stand for.
struct Match {
    std::vector<std::pair<const char *, Val>> found;
    std::vector<int32_t> nodes; // all nodes that the pattern covers

    Val operator[](const char *name) const;
};

enum class Bits {
    same, // a row has the bits that it has without the rule
    device, // the rule changes a row's bits: the fused op sums in another way, within 2e-3 of the logits' range
};

// A Ref is a value of a match: an output of the node of this name.
struct Ref {
    const char *name;
    int32_t out = -1; // -1: the one that matched
};

struct Rule {
    const char *name;
    bool (*when)(const Target &, const Match &);
    Bits bits;
    const char *why;
    const char *gain; // measured on an H200; empty where nobody has measured it
    Pattern pattern;
    Op op; // it comes into the place of the node `at`, whose weights and params it keeps
    const char *at;
    std::vector<Ref> in,
        out; // what it reads (empty: what the node reads); the values that its outputs 0, 1 .. are
};

const std::vector<Rule> &rules();

// Puts fused ops in the place of all patterns whose rules are on. Which patterns of a prompt's graph it finds does not depend on
// how many rows there are.
void fuse(Plain &graph);
uint64_t rules_off(); // a bit for each rule

// For tests: switches rule `index` off for the process, or on again. Graphs that are built from then on follow it.
void switch_rule(size_t index, bool on);
uint64_t uses_of_rule(size_t index); // how often it has fused a pattern in this process

} // namespace luce
