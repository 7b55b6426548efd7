// Says for each architecture that luce runs how it is read from a file, and how its steps are built. A new
// architecture is a row of the table in architecture.cpp and has a file of its own.
#pragma once

#include "graph/drafter.h"

namespace luce {

struct NextN; // nextn.h defines it

struct Architecture {
    const char *name; // it is the value of general.architecture in the file
    uint32_t layer_nodes; // ggml's nodes and views of a layer of its steps: so many at most

    // Reads the hyperparameters except n_vocab, each block's mixer among them, whose shapes check_shapes (ops/shapes.h)
    // then holds to what there are kernels for. It fails with E_UNSUPPORTED where the file holds no model that can
    // generate.
    HParams (*read_hparams)(const GgufFile &file);
    // Takes the trunk from the reader. It also checks every NextN head in the file, whether or not it is
    // loaded.
    Weights (*read_trunk)(WeightReader &reader, const HParams &hp);
    // Reads the NextN head of a file that may hold nothing else. The error names both values where the head
    // does not fit the trunk. It is null where luce knows no heads of the architecture.
    std::shared_ptr<NextN> (*read_head)(Model &model, const GgufFile &file, const HParams &trunk,
                                        const Weights &weights);

    // Writes the plain graph of a step of the target. A prefill computes its rows and has no logits; prefill_last has
    // logits of the last row, and chooses; a verify has logits of all rows, `hidden`, which is the rows before the output
    // norm, and chooses. It calls feed_drafters with each block's output. Ahead of each layer stands
    // Plain::enter, and layers that it denies are left out.
    void (*build_step)(Plain &graph);

    // Whether its layers can be cut into ranks: read_trunk takes each one's part, and the graph adds parts up (add_part).
    bool has_ranks;
};

// E_UNSUPPORTED says what the file's architecture is, where luce does not run it.
const Architecture &architecture_of(const GgufFile &file);

} // namespace luce
