// Reads prompts of any number of sequences: those that wait share steps, since a step reads all weights whatever it computes.
#pragma once

#include "engine/sequence.h"

namespace luce {

struct PromptItem {
    std::shared_ptr<Sequence> sequence; // each is in one item
    const int32_t *tokens; // the next n of its prompt
    uint32_t n;
    bool last; // the prompt ends here
    const luce_image_span *images; // (n_images): what of the tokens is of images
    uint32_t n_images;
    const luce_gap *gaps; // (n_gaps): where text was left out
    uint32_t n_gaps;
};

// Does what luce.h says of luce_engine_prefill.
void read_prompts(Engine &engine, const PromptItem *items, uint32_t n, int32_t *choices, luce_status *status);

} // namespace luce
