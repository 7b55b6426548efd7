#include "graph/architecture.h"

#include "graph/gemma4.h"
#include "graph/qwen35.h"

namespace luce {

// This is the table. An architecture is a row here and has a file of its own.
static const Architecture *const ARCHITECTURES[] = {&QWEN35, &QWEN35MOE, &GEMMA4};

const Architecture &architecture_of(const GgufFile &file) {
    const std::string name = file.string("general.architecture");
    std::string known;
    for (const Architecture *a : ARCHITECTURES) {
        if (name == a->name) {
            return *a;
        }
        known += (known.empty() ? "" : ", ") + std::string(a->name);
    }
    if (const DrafterKind *drafter = drafter_alone(file)) {
        fail(LUCE_E_UNSUPPORTED, "%s: architecture %s is %s: it drafts for a model, it is not one",
             file.path().c_str(), name.c_str(), drafter->title);
    }
    fail(LUCE_E_UNSUPPORTED, "%s: architecture %s: luce runs %s", file.path().c_str(), name.c_str(),
         known.c_str());
}

} // namespace luce
