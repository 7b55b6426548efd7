// The step executor: the only owner of graph allocation, reuse, capture and synchronisation.
//
// Order of life: measure the largest steps, allocate one buffer for all of them, then for each step
// build-or-reuse a graph, write its inputs, compute, read the choices: one host synchronisation a round.
// - Shapes come from two fixed lists (row_bucket, kv_bucket), so a graph is built once per bucket pair.
// - CPU: prefill uses ggml's fast tiled kernels, all other steps the row-invariant ones.
// - CUDA: a graph runs as segments between our ops, with our kernels launched in their places on the same
//   stream; from its second run on, a step other than prefill is one captured CUDA graph.
#pragma once

#include "graph.h"
#include "step_inputs.h"

#include <map>
#include <memory>
#include <tuple>
#include <vector>

namespace luce {

enum class StepKind { prefill, prefill_last, verify, kv_move, flush, catch_up, draft };

struct StepShape {
    StepKind kind;
    uint32_t rows;     // draft, catch_up: owed rows
    uint32_t n_kv;     // cells, in buckets
    uint32_t n_drafts; // draft only

    bool operator<(const StepShape &o) const {
        return std::tie(kind, rows, n_kv, n_drafts) < std::tie(o.kind, o.rows, o.n_kv, o.n_drafts);
    }
    bool prompt() const { return kind == StepKind::prefill || kind == StepKind::prefill_last; }
};

struct StepSizes {
    uint64_t compute = 0; // activations and outputs
    uint64_t inputs = 0;
};

// Rows and cells rounded up to the fixed lists.
uint32_t row_bucket(uint32_t rows, uint32_t n_rows);
uint32_t kv_bucket(uint32_t n, uint32_t n_cells);

class Step {
public:
    // Describes only; the caches need not be allocated.
    static StepSizes measure(const Model &model, const Cache &cache, const SessionParams &params);

    // Allocates everything; warms a GPU up on the largest steps, so that its pools are full-grown.
    Step(const Model &model, Cache &cache, const SessionParams &params);
    ~Step();
    Step(const Step &) = delete;
    Step &operator=(const Step &) = delete;

    // One chunk of the prompt; with `last`, the logits of its last row. Returns its hidden cell.
    uint32_t prefill(const int32_t *tokens, uint32_t n, bool last);
    // n rows after the committed ones; logits of each. tokens null: the drafted ones.
    void verify(const int32_t *tokens, const int32_t *parents, uint32_t n);
    // n drafts after the anchor; enqueued, not waited for.
    void draft(int32_t anchor, uint32_t n);
    // Writes the head's KV rows for all committed tokens.
    void catch_up();
    // KV of rows path[i] to cells n_past + i.
    void kv_move(const int32_t *path, uint32_t n);
    // Replays pending rows onto the recurrent state.
    void flush();

    // Results of the last step that had logits; valid until the next step.
    struct Greedy {
        int32_t token;
        int32_t not_finite;
    };
    const std::vector<Greedy> &greedy() const { return greedy_; }
    const std::vector<Greedy> &drafts(); // of the last draft; waits where no verify has
    void read_logits(uint32_t row, float *out);
    // Bytes of a cache tensor, waiting for what is enqueued.
    void read(const ggml_tensor *tensor, void *data, size_t offset, size_t size);
    void write(ggml_tensor *tensor, const void *data, size_t offset, size_t size);

    uint64_t allocated() const;

private:
    struct Graph;

    Graph &graph(const StepShape &shape);
    void compute(Graph &g, bool drafted_tokens = false);
    void enqueue_cuda(Graph &g, void *stream);
    void send_inputs(const Graph &g, bool drafted_tokens);
    void head_rows(const std::vector<int32_t> &row_tokens, uint32_t k, uint32_t n);
    void warm_up();

    const Model &model_;
    Cache &cache_;
    SessionParams params_;
    Backend backend_;
    TrunkRegion in_;
    HeadRegion head_in_;
    std::unique_ptr<struct ggml_gallocr, void (*)(struct ggml_gallocr *)> galloc_;
    uint64_t compute_size_ = 0;
    std::map<StepShape, std::unique_ptr<Graph>> graphs_;
    Graph *last_ = nullptr; // whose logits are in the compute buffer
    std::vector<Greedy> greedy_;
    std::vector<Greedy> drafts_;
    bool drafts_fetched_ = true;
};

} // namespace luce
