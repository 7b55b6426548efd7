// Counter-based sampling: a token depends on its logits, its position and the seed only.
#pragma once

#include "luce.h"

#include <cstdint>

namespace luce {

// Range check of every field; E_ARG names the one that is off.
void check_sampling(const luce_sampling &sampling);

// luce_sample in luce.h is the rule. E_NUMERIC when a logit is not finite.
int32_t sample(const float *logits, uint32_t n, const luce_sampling &sampling, uint64_t position);

// First word of Philox4x32-10 with key = seed and counter = position (Salmon et al., SC 2011).
uint32_t philox(uint64_t seed, uint64_t position);

} // namespace luce
