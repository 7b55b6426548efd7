// These are the experts of a layer whose weights stay in host memory, whatever device has the rest of the
// model. The CPU's row-invariant kernels multiply them, so a row's result does not depend on the other rows,
// or on threads.
#pragma once

#include "experts.h"

#include <functional>
#include <vector>

namespace luce {

// RunParts calls part(i, n) for each i of some n, on any threads, and returns when all have returned.
using RunParts = std::function<void(const std::function<void(int, int)> &part)>;

// The matrices of a layer are down, and gate and up apart or both fused: an expert's gate, then its up. data
// is that of expert 0, and out is not used.
struct RamExpertsArgs {
    const float *x; // [T][E]
    const int32_t *route; // [T][2*n_used], as cpu_route leaves it
    int32_t T, n_expert, n_used;
    int64_t E, FF;
    RowsWeight gate, up, down;
    size_t gate_bytes, up_bytes, down_bytes; // the distance from one expert's matrix to the next
    float *out; // [T][E]: the sum by rank of each expert's result times its weight
};

// Says whether these types can be multiplied here, where gate and up take x in the same form.
bool ram_experts_have(ggml_type gate, ggml_type up, ggml_type down);

// RamExperts is working memory, which grows to what the largest call takes.
class RamExperts {
public:
    // Makes room, so that calls of up to T rows allocate nothing but a thread's own scratch.
    void reserve(int32_t T, int32_t n_used, int64_t E, int64_t FF);
    void run(const RamExpertsArgs &args, const RunParts &run);

private:
    std::vector<float> h_, y_; // [T*n_used][FF], [T*n_used][E]
    std::vector<PackedBlock> packed_;
};

} // namespace luce
