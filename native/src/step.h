// The step executor: the only owner of graph allocation, reuse, capture and synchronisation.
//
// Order of life: measure the largest steps, allocate one buffer for all of them, then for each step
// build-or-reuse a graph, write its inputs, compute, read the choices: one host synchronisation.
// - Shapes come from two fixed lists (row_bucket, kv_bucket), so a graph is built once per bucket pair.
// - CPU: verify steps use ggml's row-invariant kernels, prefill the fast tiled ones.
// - CUDA: a graph runs as segments between our ops, with our kernels launched in their places on the same
//   stream; from a verify graph's second run on, the whole step is one captured CUDA graph.
#pragma once

#include "graph.h"

#include <map>
#include <memory>
#include <vector>

namespace luce {

struct SessionParams {
    uint32_t n_ctx, n_rows, n_chunk, n_threads;
    ggml_type kv_type;
};

enum class StepKind { prefill, prefill_last, verify, kv_move };

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

    // One chunk of the prompt, committed at once; with `last`, the logits of its last row.
    void prefill(const int32_t *tokens, uint32_t n, bool last);
    // n rows after the committed ones; logits of each.
    void verify(const int32_t *tokens, const int32_t *parents, uint32_t n);
    // KV of rows path[i] to cells n_past + i.
    void kv_move(const int32_t *path, uint32_t n);

    // Results of the last step that had logits; valid until the next step.
    struct Greedy {
        int32_t token;
        int32_t not_finite;
    };
    const std::vector<Greedy> &greedy() const { return greedy_; }
    void read_logits(uint32_t row, float *out);

    uint64_t allocated() const;

private:
    struct Graph;
    struct Inputs;
    using Key = std::tuple<StepKind, uint32_t, uint32_t>;

    Graph &graph(StepKind kind, uint32_t rows, uint32_t n_kv);
    void compute(Graph &g);
    void enqueue(Graph &g);
    void enqueue_cuda(Graph &g, void *stream);
    void read_greedy(Graph &g, uint32_t n);
    void warm_up();

    const Model &model_;
    Cache &cache_;
    SessionParams params_;
    Backend backend_;
    std::unique_ptr<Inputs> inputs_;
    std::unique_ptr<struct ggml_gallocr, void (*)(struct ggml_gallocr *)> galloc_;
    uint64_t compute_size_ = 0;
    std::map<Key, std::unique_ptr<Graph>> graphs_;
    Graph *last_ = nullptr;
    std::vector<Greedy> greedy_;
};

} // namespace luce
