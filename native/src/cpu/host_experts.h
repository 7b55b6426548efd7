// These are the experts of a layer whose weights stay in host memory, whatever device has the rest of the
// model. The CPU's row-invariant kernels multiply them, so a row's result does not depend on the other rows,
// or on threads.
//
// The threads meet twice: after gate, up and f(gate) * up, and after down and the weighted sum. So what they
// share out is a few rows of the matrices: first those of each expert that was chosen, then those of down, each over
// all experts.
#pragma once

#include "cpu/experts.h"

#include <functional>
#include <vector>

namespace luce {

// RunUnits calls share(begin, end) for shares of units 0 .. n - 1 on any threads, and returns when all have returned.
using RunUnits = std::function<void(int64_t n, const std::function<void(int64_t begin, int64_t end)> &share)>;

// The matrices of a layer are down, and gate and up apart or both fused: an expert's gate, then its up. data
// is that of expert 0, and out is not used.
struct RamExpertsArgs {
    const float *x; // [T][E]
    const int32_t *route; // [T][2*n_used], as cpu_route leaves it
    int32_t T, n_expert, n_used;
    Activation activation;
    int64_t E, FF;
    RowsWeight gate, up, down;
    size_t gate_bytes, up_bytes, down_bytes; // one expert's matrix is so far from the next
    float *out; // [T][E]; it is the sum by rank of each expert's result times its weight
};

// Says whether these types can be multiplied here, where gate and up take x in the same form.
bool ram_experts_have(ggml_type gate, ggml_type up, ggml_type down);

// RamExperts is working memory, which grows to what the largest call takes.
class RamExperts {
public:
    // Makes room, so that calls of up to T rows allocate nothing but a thread's own scratch.
    void reserve(int32_t T, int32_t n_used, int32_t n_expert, int64_t E, int64_t FF);
    void run(const RamExpertsArgs &args, const RunUnits &run);

private:
    // Chosen is an expert with its pairs of a row and a rank: pairs_[first] .. pairs_[first + n - 1].
    struct Chosen {
        int32_t expert, first, n;
    };
    void group(const RamExpertsArgs &a);
    void up(const RamExpertsArgs &a, int64_t begin, int64_t end);
    void down(const RamExpertsArgs &a, int64_t begin, int64_t end);
    const void *input(const RamExpertsArgs &a, const Chosen &chosen) const;
    void *hidden(const RamExpertsArgs &a, const Chosen &chosen);

    std::vector<PackedBlock> packed_, packed_h_; // x is [E/32][T], and h of each expert is [FF/32][n]
    std::vector<float> h_; // it is [n][FF] of each expert, where down takes it so
    std::vector<Chosen> chosen_; // they are sorted by expert
    std::vector<int32_t> first_; // [n_expert + 1]
    // A pair is t * n_used + rank. Those of an expert rise, and places_ says where a pair is among pairs_.
    std::vector<int32_t> pairs_, places_;
};

} // namespace luce
