// Sampling is counter-based: a token depends only on its logits, its position, the seed and the settings.
// kernels/sampling/sampling.h has the rule; this is its form over a row of the CPU.
#pragma once

#include "luce.h"

#include "common/kernels.h"

#include <cstdint>
#include <vector>

namespace luce {

// Checks the range of every field; E_ARG names the one that is off.
void check_sampling(const luce_sampling &sampling);

// Returns the settings as steps take them.
ChoiceCtl choice_ctl(const luce_sampling &sampling);

// Chooses the token of logits x (n) at a position, and never one of -inf. None of x may be NaN or +inf, and
// one must be finite.
int32_t choose(const float *x, int64_t n, const ChoiceCtl &ctl, uint64_t position);

struct Candidate {
    float x;
    int32_t id;
};
// Says which candidate comes first, everywhere.
inline bool better(const Candidate &a, const Candidate &b) {
    return a.x > b.x || (a.x == b.x && a.id < b.id);
}
// Returns the first k of logits x (n) in that order, themselves in no order; those of -inf are left out. None of x may be
// NaN.
std::vector<Candidate> first_k(const float *x, int64_t n, size_t k);

// Keeps of n candidates, whose logits are in the order (logit descending, id ascending), what the filters keep: the first
// ones, whose number is returned. Each gets its z + G in `scores`. Their mass goes to *kept, in units of 2^-40 of the
// first one's. An id below 0 ends the candidates. (The filters' sums are over these n alone.)
uint32_t score_candidates(const ChoiceCtl &ctl, uint64_t position, const int32_t *ids, const float *logits,
                          uint32_t n, float *scores, uint64_t *kept);

// Does what luce.h says of luce_sample.
int32_t sample(const float *logits, uint32_t n, const luce_sampling &sampling, uint64_t position);

// These are ops, in parts as attention.h says.
void cpu_choose(const ChooseArgs &args, int ith, int nth);
void cpu_topk(const TopkArgs &args, int ith, int nth); // topk.cpp

} // namespace luce
