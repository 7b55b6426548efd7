// A built step: which graph a shape stands for.
#pragma once

#include "step.h"

namespace luce {

// `outputs` and the nodes point into `context`; their data into the shared compute buffer.
struct Step::Graph {
    Context context;
    ggml_cgraph *nodes = nullptr;
    StepOutputs outputs;
    StepShape shape;
    uint32_t runs = 0;
    void *captured = nullptr;

    ~Graph();
    static std::unique_ptr<Graph> build(const Model &model, const Cache &cache, const TrunkRegion &in,
                                        const HeadRegion &head_in, const StepShape &shape);
};

// The steps that bound every buffer: each kind at its largest, over a full cache.
std::vector<StepShape> largest_steps(const Cache &cache, const SessionParams &params);

} // namespace luce
