// Says for each architecture that luce runs how it is read from a file, and how its steps are built. A new one is a row
// of the table in architecture.cpp and files of its own: no other file knows an architecture's name.
#pragma once

#include "graph.h"
#include "weights.h"

namespace luce {

struct Architecture {
    const char *name; // general.architecture

    // Reads the hyperparameters but n_vocab. E_UNSUPPORTED where the file holds no model that can generate.
    HParams (*read_hparams)(const GgufFile &file);
    // The trunk, taken from the reader; and every NextN head in the file is checked, whether or not it is loaded.
    Weights (*read_trunk)(WeightReader &reader, const HParams &hp);
    // The NextN head of a file that may hold nothing else; both values in the error where it does not fit the trunk.
    // Null, as build_draft, where luce knows no heads of the architecture.
    std::unique_ptr<NextN> (*read_head)(Model &model, const GgufFile &file, const HParams &trunk,
                                        const Weights &weights);

    StepOutputs (*build_step)(const StepBuild &build);
    void (*build_draft)(const StepBuild &build);
};

// Whether general.architecture is that of a DFlash drafter, in any of its layouts (dflash.cpp, graph_dflash.cpp).
bool is_dflash(const std::string &architecture);
// The drafter of a file. E_UNSUPPORTED names what luce does not implement; E_FILE a key or tensor that is missing, or
// both values where it does not fit the trunk.
std::unique_ptr<DFlash> read_dflash(Model &model, const GgufFile &file, const HParams &trunk,
                                    const Weights &weights);

// E_UNSUPPORTED says what the file's architecture is, where luce does not run it.
const Architecture &architecture_of(const GgufFile &file);

} // namespace luce
