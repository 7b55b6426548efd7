// Plans the launches that choose tokens. They are the same on any device: what a row's blocks share is laid out by its length.
#pragma once

#include "common/kernels.h"
#include "common/launch_plan.h"

namespace luce {
namespace {

constexpr int CHOOSE_THREADS = 256,
              CHOOSE_PICK_THREADS = 1024; // of a part of a row, and of what picks of all
constexpr int TOPK_THREADS = 512, TOPK_PICK_THREADS = 1024;

inline LaunchPlan plan_choose_parts(int T) {
    return {CHOICE_PARTS, T, 1, CHOOSE_THREADS, 0};
}
inline LaunchPlan plan_choose_pick(int T) {
    return {T, 1, 1, CHOOSE_PICK_THREADS, 0};
}

inline LaunchPlan plan_topk_parts(int T, int64_t n) {
    return {divided(n, TOPK_PART), T, 1, TOPK_THREADS, 0};
}
inline LaunchPlan plan_topk_pick(int T) {
    return {T, 1, 1, TOPK_PICK_THREADS, 0};
}

// Where each part has its k best in order, take of each the `deep`-th, and of these the `rank`-th largest: deep * rank >= k
// keys are at least as large, so none below it is among the best k. There may be fewer parts than k.
struct TopkBound {
    int deep, rank;
};
LUCE_BOTH TopkBound topk_bound(int parts, int k) {
    const int deep = (k + parts - 1) / parts;
    return {deep, (k + deep - 1) / deep};
}

constexpr int BLOCK_CONV_THREADS = 256, LATTICE_THREADS = 512, WALK_THREADS = 256;

inline LaunchPlan plan_block_conv(int T, int E) {
    return {divided(E, BLOCK_CONV_THREADS), T, 1, BLOCK_CONV_THREADS, 0};
}
constexpr int CLUSTER_THREADS = 256,
              CLUSTER_FILLED = 4096; // a block fills so many logits, or its warps have a token each

inline LaunchPlan plan_cluster_fill(int T, int64_t n) {
    return {divided(n, CLUSTER_FILLED), T, 1, CLUSTER_THREADS, 0};
}
inline LaunchPlan plan_cluster_scores(int T, int64_t tokens) {
    return {divided(tokens, CLUSTER_THREADS / 32), T, 1, CLUSTER_THREADS, 0};
}
inline LaunchPlan plan_prior_tokens() {
    return {1, 1, 1, MAX_ROWS, 0};
}
inline LaunchPlan plan_lattice_scores(int T, int K) {
    return {K, T, 1, LATTICE_THREADS, 0};
}
inline LaunchPlan plan_confidence(int T, int K) {
    return {K, T, 1, 32, 0};
}
inline LaunchPlan plan_lattice_walk(int T) { // a block for each sequence that a step of T rows may have
    return {T, 1, 1, WALK_THREADS, 0};
}

} // namespace
} // namespace luce
