// The step executor alone owns graph allocation, reuse, capture and synchronisation.
//
// At its opening it measures the largest steps, allocates one buffer for all of them, builds the graph of
// every step width, runs and times it. Then for each step it fills the step's region (step/inputs.h), runs,
// and reads the choices. The host waits once for a round, and once more where it reads lists of drafts. On a GPU
// steps of one row follow each other: the next one takes its tokens on the device, and is enqueued before the host
// has waited for the last one.
// - No shape depends on a context: widths come from a fixed list (row_bucket), lengths are in the control block. Only
//   a prefill's graph is built for the occasion, over cells in buckets (kv_bucket).
// - A graph runs as segments between our ops. CPU: a team of threads shares each of our ops, and ggml runs what lies
//   between them (step/threads.h says why); a prefill has ggml's tiled attention, all else the row-invariant kernels.
// - CUDA: our kernels are launched in the places of our ops on the same stream. A step other than prefill is one
//   captured CUDA graph, or several where the host computes experts in its middle (step/host_experts.h).
#pragma once

#include "graph/lower.h"
#include "model/host_pages.h"
#include "step/host_experts.h"
#include "step/inputs.h"
#include "step/tails.h"
#include "step/threads.h"

#include <map>
#include <memory>
#include <tuple>
#include <vector>

namespace luce {

struct StepShape {
    StepKind kind;
    uint32_t rows;
    uint32_t n_kv; // it counts the cells of a prefill, in buckets
    bool brief = false; // it is a trial of one layer of each kind
    uint32_t drafter = 0; // of a draft: which of the engine's it is
    std::vector<PromptRows> prompts = {}; // of a prefill of several sequences
    bool images = false; // of a prefill: some of its rows are of images

    bool operator<(const StepShape &o) const {
        return std::tie(kind, rows, n_kv, brief, drafter, prompts, images) <
               std::tie(o.kind, o.rows, o.n_kv, o.brief, o.drafter, o.prompts, o.images);
    }
    bool prefill() const { return kind <= StepKind::prefill_tail; }
    bool reads_trunk() const { return kind != StepKind::draft && kind != StepKind::feed; }
};

// Bytes that steps take on the device of each stage.
struct StepSizes {
    struct Compute {
        uint64_t bytes = 0; // activations and outputs take so much
        StepShape largest{}; // this step takes as much
        uint64_t arriving = 0; // of rows from the stage before, so many at most
    };
    std::vector<Compute> compute; // by stage
    // A prompt may be cut at its multiples without a bit changing: TAIL on a GPU, ATTEND_ROWS on a CPU, and n_chunk where
    // ggml multiplies with some weights, or has a GPU's attention: its sums depend on how many rows there are.
    uint32_t n_cut = 0;
    uint32_t n_tail = 0; // a prompt's tail has at most so many rows (step/tails.h)
    uint64_t inputs = 0;
    uint64_t other = 0; // captured graphs, on a CPU all graphs, and ggml's work buffers take at most so much
};

// A Choice is what a row's sequence chooses after it (ChoiceRow).
struct Choice {
    int32_t token;
    int32_t not_finite;
};

class Step {
public:
    // Returns the sizes without allocating anything; the caches need not be allocated either.
    static StepSizes measure(const Model &model, const Cache &cache, const EngineParams &params);

    // Opens the cache's stages, allocates everything, builds all graphs and times them; `sizes` are what measure() says.
    Step(const Model &model, Cache &cache, const EngineParams &params, const StepSizes &sizes);
    ~Step();
    Step(const Step &) = delete;
    Step &operator=(const Step &) = delete;

    const std::vector<luce_cost> &costs() const { return costs_; }
    uint64_t allocated() const;

    // Returns the width that a step of `rows` rows, or a draft of so many sequences, really has.
    uint32_t verify_width(uint32_t rows) const;
    uint32_t draft_width(uint32_t sequences) const;
    uint32_t feed_width(uint32_t rows) const;

    // For each kind of step, fill the region and then run. Each of the steps of a draft has a mirror (a host copy of its
    // inputs), and draft_host() waits where an earlier draft may still be read.
    Region::Host prefill_host(); // it waits where the chunk that had this mirror has not ended
    void finish_chunks(); // it waits for chunks of prompts that are under way
    void check_chunks() const; // it fails with E_DEVICE where a device has failed under one of them
    Region::Host verify_host() { return in_.verify.host(turn_); }
    Region::Host draft_host(uint32_t index);
    // Each slot has a mirror: of the verifies that are under way, one at most feeds a sequence.
    Region::Host feed_host(int32_t slot);

    // Runs rows of prompts, and waits. On GPUs it does not wait for the end of chunks that no prompt ends with: the next chunk
    // then is enqueued behind them (run_segments), and what fails is told by the call that waits. On one GPU it waits for most
    // of the chunk: what comes next is chosen late, and yet built and enqueued while the last ops run.
    // In a step of prompts' ends, prefill_last or prefill_tail, it gives choices() and logits of the last row of each.
    void prefill(StepKind kind, const std::vector<PromptRows> &prompts, uint32_t n_pages,
                 bool images = false);
    // Begins a step of this width, whose first n_rows rows are wanted, and returns its number for finish_verify(), which
    // waits for it. A CPU runs it at once. So many as MAX_ENQUEUED may be under way, which end in their order.
    uint32_t start_verify(uint32_t width, uint32_t n_rows, uint32_t n_pages);
    void finish_verify(uint32_t number);
    void verify(uint32_t width, uint32_t n_rows, uint32_t n_pages) {
        finish_verify(start_verify(width, n_rows, n_pages));
    }
    // Comes before another step is enqueued behind this verify: finish_verify() then waits for what is enqueued up to here,
    // and not for that.
    void mark_end(uint32_t number);
    // Rows of images in a prompt come first to where the device reads them: room for those of a chunk. On a CPU that is where
    // they lie, and there is none. E_MEMORY where the host has no room for them; it comes before image_room().
    void have_image_room();
    float *image_room() const;
    // The next prefill's or verify's logits of rows first .. first + n - 1 come to the host with its choices: reading
    // them waits for nothing. have_logits() comes before; it is E_MEMORY where the host has no room for them.
    void have_logits();
    void fetch_logits(uint32_t first, uint32_t n) {
        fetched_next_ |= (n < 64 ? (uint64_t(1) << n) - 1 : ~uint64_t(0)) << first;
    }
    // Enqueues a step of one of the engine's drafters, the index-th of a draft, without waiting: a link of chains, or
    // blocks.
    void draft(uint32_t drafter, uint32_t rows, uint32_t index, uint32_t n_pages);
    // Enqueues a feed of the drafters that lag, without waiting.
    void feed(uint32_t width, uint32_t slot, uint32_t n_pages);
    // Enqueues all links of one sequence's chain at once, where has_chains(): nothing of the host's comes between them.
    void draft_chain(uint32_t drafter, uint32_t links);
    bool has_chains() const { return model_.gpu() && model_.in_ram() == nullptr; }

    // Returns the results of the last prefill, or of the verify of this number. Logits are valid until the next step of
    // any kind.
    const Choice *choices(uint32_t number = 0) const { return &chosen(cache_.choice_entry(number, 0)); }
    // These are of the last draft, and wait for it where no verify has done so.
    const Choice &drafted(int32_t entry);
    const int32_t *listed(int32_t entry);
    void read_logits(uint32_t row, float *out);
    // Reads the hidden state of a row of the last verify, after the output norm. It waits for the device.
    void read_hidden(uint32_t row, float *out);
    // Reads the mean of the n_best largest scores of each of n positions, over the layers and heads of the last verify. It
    // waits for the device.
    void read_scores(uint32_t n_best, float *out, uint32_t n);
    uint64_t serial() const { return steps_; } // it numbers the last step

    // Every wait of an engine for its devices is one of these two: for all that is enqueued, or for an event, which is the
    // end of an earlier verify or of another stream's copy. They are counted, and so are steps: what a round costs beside
    // its kernels.
    // E_DEVICE: what was enqueued has failed.
    void synchronize();
    void wait(const Event &event);
    // Waits for a copy beside the steps, in a thread of its own, and returns what it failed with. The engine does not wait for
    // it: it is not counted.
    static int finish_copy(const Event &event);
    // Tests call it: it makes NaN of the compute buffer, of which no step may read what it has not written.
    void poison();
    uint64_t steps() const { return steps_; }
    uint64_t synchronisations() const { return synchronisations_; }
    // Keeps what enqueued copies read until the next synchronize().
    void keep(const std::vector<HostMemory> &sources) {
        kept_.insert(kept_.end(), sources.begin(), sources.end());
    }

    struct Graph; // shapes.h defines it
    // Plain graphs of prompts behind their rules, by kind, by whether they have images, and by the rules that were off. A prompt of
    // another length has the same one but for its rows, and so to write one and to fuse it is done once.
    using PlainPrompts = std::map<std::tuple<StepKind, bool, uint64_t>, std::unique_ptr<Plain>>;

private:
    // A Mark is a place of what is enqueued on the last stage.
    struct Mark {
        Event event; // null on a CPU,
        uint64_t given = 0; // whose last stage's thread was given so much
    };
    Graph &graph(StepShape shape);
    std::shared_ptr<Graph> &place_of(const StepShape &shape);
    void move_kv(const Region &sent, uint32_t mirror);
    void move_kv(const Stage &stage, const std::vector<KvPool> &pools, const StepCtl *ctl,
                 const int32_t *pages);
    void wait_for_drafts();
    void fail_wait() const; // where a test asks for it
    void check_exchange() const;
    void mend_exchange() const;
    void enqueue_logits(const Graph &g);
    const Choice &chosen(int32_t entry) const {
        return static_cast<const Choice *>(cache_.given()->data)[entry];
    }
    float *host_logits(uint32_t row) const;
    void compute(Graph &g, uint32_t links = 1);
    template <class Ours> void run_segments(Graph &g, const Ours &run_op);
    template <class Ours>
    void run_segments(Graph &g, const Stage &stage, int begin, int end, const Ours &run_op);
    bool pipelines(const Graph &g) const;
    int late_node(const Graph &g) const;
    bool chunks_run() const; // or have run, and nobody has waited for them
    void end_chunk(Graph &g);
    void end_chunks();
    void set(Mark &mark) const;
    void wait_for(const Mark &mark);
    void finish_threads() const; // of stages on a CPU, where a test asked for them
    void join_stages() const;
    void part_stages() const;
    const Stage *finish_all(int *error) const;
    void run_cpu(Graph &g);
    // These are only there where luce is built with CUDA. A step begins, and is captured and launched, on the first stage's
    // stream.
    void check(int error, const char *what) const;
    template <class OnHost> void enqueue_cuda(Graph &g, const OnHost &run_on_host);
    void capture(Graph &g);
    void capture_chain(Graph &g, uint32_t links);
    void run_on_host(const ggml_tensor *node);
    void launch(void *captured);
    void run_cuda(Graph &g);
    const Stage &first() const { return cache_.stages().front(); }
    void reserve(const StepSizes &sizes);
    bool reserve(const Graph &g);
    void build_all();
    void run_trial(const StepShape &shape);
    void try_all();
    void time_all();

    const Model &model_;
    const Cache &cache_;
    EngineParams params_;
    // They are freed after all that reads them.
    std::vector<HostMemory> kept_;
    Team team_; // it has the CPU's threads; on a GPU the caller alone, where no experts are in host memory
    RamRunner ram_{team_};
    Regions in_;
    uint32_t turn_ = 0, under_way_ = 0; // the next verify has this number, and so many have not ended
    Event ended_[MAX_ENQUEUED]; // on the last stage; they are null on the CPU
    GraphAllocator galloc_; // its buffers are those of the stages
    std::vector<uint64_t> compute_sizes_;
    GraphAllocator measures_; // it says what a graph takes, and has no memory
    std::map<StepShape, std::shared_ptr<Graph>> graphs_;
    PlainPrompts plain_prompts_;
    std::vector<std::shared_ptr<Graph>> prompts_; // those of prompts that are kept, the last used first
    // Chunks of prompts by mirror: the graph is kept while it runs.
    struct Chunk {
        std::shared_ptr<Graph> graph; // null where none is under way
        Mark late, ended; // late: of a lone stage, ahead of its last ops
    };
    std::vector<Chunk> chunks_;
    uint32_t chunk_ = 0; // the next one's mirror
    Graph *last_ = nullptr; // its logits are in the compute buffer
    std::vector<luce_cost> costs_;
    // The last row of the last trial had this token, as a part of the vocabulary in 2^-32.
    uint32_t tried_ = 0;
    uint64_t steps_ = 0, synchronisations_ = 0;
    bool drafting_ = false; // a draft is enqueued that nobody has waited for
    // It has room for all rows of a step. It is null until have_logits().
    Buffer logits_buffer_;
    Buffer image_buffer_; // null until have_image_room()
    // They have a bit for each row: whether its logits will come to the host, and whether they have come.
    uint64_t fetched_next_ = 0, fetched_ = 0;
    bool capturing_ = false; // steps are captured on their first run
    bool brief_ = false; // steps have one layer of each kind
    bool launching_ = true; // while it is false, a step is captured and does not run
};

// These round rows and cells up to the fixed lists.
uint32_t row_bucket(uint32_t rows, uint32_t max_rows);
uint32_t kv_bucket(uint32_t n);

// For tests: engines that are opened on a CPU from now on time their steps, or take made-up costs.
void time_steps(bool on);

} // namespace luce
