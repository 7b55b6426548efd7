// The lowering makes the ggml graph of a plain one behind the rules (rules.cpp): each node becomes ggml's nodes or an op of
// luce's own (ops/row.h). Nothing else adds nodes to a step's graph.
//
// Who reads a value asks for it in one of these forms, and the node that makes it gives that form as best it can:
//   rows       {n, T} F32
//   packed     as a product of luce's own reads it: on a CPU blocks of 32 rounded to 8 bits, on a GPU F16 in the order of
//              its tiles, to which a norm's scale is yet to come
//   packed_rows  on a GPU the same of the rows with the norm's scale: where ggml multiplies with some of the weights, whose
//              types luce's product lacks
//   f16        what a prompt's product by cuBLAS reads
//   partials   sums over parts of K, of all outputs of a product; the one reader adds them up
//   deferred   of a norm its rows and weight: a product of one row norms and packs the row itself, a mixture and the kept
//              rows norm it themselves. It is no tensor, so nothing is remembered
// Lowering goes from what is wanted back to what it takes, and remembers each form of each value, so that no launch is made
// twice. What writes to caches is expanded in the order in which the builder wrote it.
#pragma once

#include "graph/rules.h"

namespace luce {

// These are a step's inputs on the device.
struct StepInputs {
    ggml_tensor *tokens; // {T} I32; a draft may be referred to instead (kernels.h: TokensArgs)
    ggml_tensor *positions; // {T} I32: a row's index in its sequence
    // Where prompts may have rows of images, else null: {T} I32 of RoPE, behind images less than the index; and of a prefill
    // {4 * T} I32, the time, height and width of all rows and the time again, and {T} I64, the address of a row's F32 values
    // where it is of an image, else 0; and {T} I32, the position up to which, itself not included, each row sees where rows of
    // an image see each other.
    ggml_tensor *rope_positions, *axes, *image_rows, *row_ends;
    ggml_tensor *ctl; // {sizeof(StepCtl) / 4} I32
    ggml_tensor *pages; // {n} I32; this is the page table
    ggml_tensor
        *window_pages; // the same of sliding layers, or null; GONE is in place of pages that no row sees
    // {T} I32: the row of Cache::hidden of the position before each; a prefill has one entry a sequence, of its first row.
    ggml_tensor *hidden_from;
    // {T} I64; it says where each row's hidden state goes. A prefill has one entry a sequence, of its last row.
    ggml_tensor *hidden_to;
    ggml_tensor *first_rows, *last_rows; // {MAX_PROMPTS} I32: of a prefill's sequences
};

// On a CPU ggml's attention sums in one order for this many rows and more, and in another for fewer. So the rows behind the
// last multiple of it, which only the end of a prompt has, are attended by themselves: their bits are the same however the
// rows before them are cut.
constexpr uint32_t ATTEND_ROWS = 64;

struct StepOutputs {
    ggml_tensor *logits = nullptr; // {V, n_out} F32; it is null where none were asked for
    ggml_tensor *hidden = nullptr; // {E, T} F32 of a verify, before the output norm
    ggml_tensor *choice = nullptr; // {CHOICE_WIDTH, n_out} I32; a row is a ChoiceRow (kernels.h)
    // Nodes of one stage, from `first` up to the next run's. The first ones are copies of rows that the stage before sends.
    struct Run {
        uint32_t stage;
        int first, n_arrivals;
    };
    // A run of each stage, in their order; where there are ranks, which all have a part of each layer, they have turns.
    std::vector<Run> runs;
};

// Lowers a plain graph behind its rules into `nodes`. Each stage has the step's inputs on its device, and its nodes read
// nothing of another one's: rows that later stages read pass from each stage to the next as copies. (Ranks read each other's
// parts in an exchange alone.)
StepOutputs lower(Plain &plain, const std::vector<StepInputs> &in, ggml_context *ctx, ggml_cgraph *nodes);

} // namespace luce
