// The CPU runs here what a drafter's block has besides attention where its drafts depend on each other (kernels.h). Each call
// does the part of thread ith of nth, and none waits for another.
#pragma once

#include "common/kernels.h"

namespace luce {

void cpu_block_conv(const BlockConvArgs &args, int ith, int nth);
void cpu_prior_tokens(const PriorArgs &args, int ith, int nth);
void cpu_candidates(const CandidatesArgs &args, int ith, int nth);
void cpu_lattice(const LatticeArgs &args, int ith, int nth);
void cpu_confidence(const ConfidenceArgs &args, int ith, int nth);

} // namespace luce
