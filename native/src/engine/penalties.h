// The host changes a row of logits before a choice: by penalties and by a mask.
#pragma once

#include "luce.h"

#include <cstdint>
#include <vector>

namespace luce {

// Penalties are luce_penalties with a bias list of their own.
struct Penalties {
    std::vector<luce_logit_bias> bias;
    uint32_t n_prompt = 0;
    float repetition = 1, presence = 0, frequency = 0;

    bool none() const { return bias.empty() && repetition == 1 && presence == 0 && frequency == 0; }
};

// Checks the range of each field and copies them. E_ARG names the field that is off.
Penalties check_penalties(const luce_penalties &penalties, uint32_t n_vocab);

// Does what luce_penalties in luce.h says, after the tokens `before`.
void penalise(float *logits, uint32_t n, const Penalties &penalties, const std::vector<int32_t> &before);

// Sets a logit to -inf where bit i % 8 of byte i / 8 is 0, or where it lies beyond the mask. Where no token
// is left it fails with E_ARG and changes nothing.
void apply_mask(float *logits, uint32_t n, const uint8_t *mask, uint64_t mask_size);

} // namespace luce
