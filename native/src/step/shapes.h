// Builds the graph that a step's shape stands for, and says which shapes an engine has.
#pragma once

#include "step/step.h"

namespace luce {

// `outputs` and the nodes point into `context`. Their data is in the shared compute buffer.
struct Step::Graph : std::enable_shared_from_this<Step::Graph> {
    Context context;
    ggml_cgraph *nodes = nullptr;
    std::vector<StepInputs> inputs; // by stage
    StepOutputs outputs;
    StepShape shape;
    // A step is captured in pieces, one after each of the ops that the host runs in its middle (step/host_experts.h).
    std::vector<void *> captured;
    std::vector<const ggml_tensor *> on_host; // these are the nodes of those ops
    std::map<uint32_t, void *>
        chains; // a draft's links are also captured as chains of so many, which are one graph each

    ~Graph() { drop_capture(); }
    void drop_capture();
    // What a run has of the rows of the stage before.
    std::vector<const ggml_tensor *> arrivals(const StepOutputs::Run &run) const;
    void move_inputs(ptrdiff_t bytes); // the ops that are enqueued from now on read them there
    // A prompt's plain graph is taken from `kept` and resized, or written and left there.
    static std::unique_ptr<Graph> build(const Model &model, const Cache &cache, const Region &in,
                                        const StepShape &shape, PlainPrompts *kept = nullptr);
    // Of each node, or leaf, the stage whose buffer has it. A leaf without memory of its own is a drafter's.
    std::vector<int> stages_of_nodes() const;
    std::vector<int> stages_of_leaves(const Cache &cache) const;
    // Tells the log the ops that do something: "a verify of 1 rows: deltanet 3, rowmm 6, of ggml: GET_ROWS 1".
    void log_ops(const CacheParams &params) const;
};

// Says whether a node waits for nothing: ggml does nothing for it.
bool is_empty(const ggml_tensor *node);

// Says whether an op of ours reads so little that one thread is done with it before others hear of it.
bool is_light(const ggml_tensor *node);

// The allocator of the compute buffers, one a stage; what a graph takes of each.
GraphAllocator step_allocator(const Cache &cache);
std::vector<uint64_t> compute_sizes(ggml_gallocr *galloc, const Cache &cache, const Step::Graph &graph);

// Returns the shape of a step of these prompts, which lie side by side.
StepShape prompts_shape(StepKind kind, const std::vector<PromptRows> &prompts);
// What one step of prompts has at most: sequences, rows, and room for cells. Of tails it has no more rows than one may have.
struct PromptLimits {
    uint32_t prompts, rows, n_kv;
};
PromptLimits prompt_limits(const CacheParams &params, StepKind kind);

// Returns all widths of verifies and of drafts, ascending.
std::vector<StepShape> step_shapes(const Cache &cache);
// Returns each kind at its largest, over a full context.
std::vector<StepShape> largest_steps(const CacheParams &params);
// Returns graphs whose memory bounds that of every step. ggml's planning of a graph is not quite monotone: a
// smaller one may take a little more than a larger one. So these have more rows and cells than any step.
std::vector<StepShape> sizing_steps(const CacheParams &params);

} // namespace luce
