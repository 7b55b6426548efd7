// Says where a step's inputs lie, and puts a step together from its sequences' rows. Steps of each kind have
// a region of their own on the device, and host mirrors. So the host can fill the next step's inputs while
// the device still works on the last one's. A step's inputs are one copy to the device, by a kernel that reads
// the host's memory, or beside a draft by a copy engine.
#pragma once

#include "graph/lower.h"

namespace luce {

// What a region has for images and gaps in prompts: nothing, positions of RoPE that are not the index, or of prompts' rows all
// axes.
enum class Images { none, positions, rows };

// A region holds the inputs of one kind of step: at most `rows` rows and `n_pages` page entries.
class Region {
public:
    // The region has `mirrors` host copies (pinned on a GPU), and as many places on the device of each stage: steps that
    // run by themselves use the first, the links of a chain of steps one each. It has no memory until allocate().
    // With `windows` there is a table of window pages, as long as that of pages.
    Region(uint32_t rows, uint32_t n_pages, uint32_t mirrors, bool windows, Images images);

    void allocate(const std::deque<Stage> &stages);
    size_t size() const { return mirrors_ * size_; } // it counts its bytes on a stage's device
    size_t place() const { return size_; } // one place lies so many bytes behind the other

    // Host is the host's side of one mirror.
    struct Host {
        int64_t *hidden_to;
        int32_t *hidden_from, *positions, *tokens, *first_rows, *last_rows;
        int32_t *rope_positions, *axes; // null where the region has none, as image_rows and row_ends
        int64_t *image_rows;
        int32_t *row_ends;
        StepCtl *ctl;
        int32_t *window_pages; // null where there are none
        int32_t *pages;
    };
    Host host(uint32_t mirror) const;
    // Enqueues on GPUs the copies of a mirror, up to its first n_pages page entries. On a CPU the one mirror
    // is the first stage's region itself.
    void send(uint32_t mirror, uint32_t n_pages);
    void send_chain(uint32_t n); // the first n mirrors, each to its own place
    // The same as send() beside the steps, by an engine that leaves the multiprocessors alone. Later steps wait for it.
    void send_beside(uint32_t mirror, uint32_t n_pages);

    // What a stage's device has of a mirror that was sent: the control block and the page table.
    const StepCtl *ctl(uint32_t stage) const { return at<StepCtl>(stage, ctl_); }
    const int32_t *pages(uint32_t stage) const { return at<int32_t>(stage, pages_); }
    const int32_t *window_pages(uint32_t stage) const { return at<int32_t>(stage, window_pages_); }

    // Returns the inputs of a step of `rows` rows on a stage. Before allocate() they are tensors without memory, for
    // measuring.
    StepInputs tensors(ggml_context *ctx, uint32_t rows, uint32_t stage) const;

private:
    template <class T> const T *at(uint32_t stage, size_t offset) const {
        void *base = ggml_backend_buffer_get_base(places_[stage].memory.get());
        return reinterpret_cast<const T *>(static_cast<uint8_t *>(base) + offset);
    }
    void send_bytes(const uint8_t *host, size_t bytes, bool beside = false);

    uint32_t rows_, n_pages_, mirrors_;
    bool windows_;
    Images images_;
    // They are offsets; hidden_to comes first.
    size_t hidden_from_, positions_, tokens_, first_rows_, last_rows_, rope_positions_, axes_, image_rows_,
        row_ends_, ctl_, window_pages_, pages_, size_;
    struct Place {
        const Stage *stage;
        Buffer memory;
    };
    std::vector<Place> places_; // one a stage
    Buffer pinned_;
    uint8_t *host_ = nullptr;
};

struct EngineParams {
    CacheParams cache;
    uint32_t n_threads;
};

// Returns of how many sequences one step of a drafter may draft.
uint32_t drafted_at_once(const CacheParams &params, const DrafterUse &use);

// Returns how many chunks of prompts may be under way: one on each stage, and one that is being enqueued. A lone stage on a CPU
// has one.
uint32_t chunks_under_way(const Cache &cache);

// An engine has one region for each kind of step. The chunks and the verifies that may be under way have a mirror each, and so have the
// steps of a draft, whichever drafter's, and the feeds of each sequence.
struct Regions {
    Region prefill, verify, draft, feed;
    Regions(const Cache &cache, const EngineParams &params);
    // Counts bytes on a stage's device, of those regions that the engine has.
    uint64_t size(const Cache &cache) const;
    Region &of(StepKind kind) {
        switch (kind) {
            case StepKind::verify: return verify;
            case StepKind::draft: return draft;
            case StepKind::feed: return feed;
            default: return prefill;
        }
    }
};

// Where a row of a prompt with images or gaps stands: its axes of RoPE, and the values of a row of an image, else null. Behind it
// positions of RoPE are the index plus `delta`.
struct PromptPlace {
    int32_t time, height, width;
    const float *row;
    int32_t delta;
    int32_t end; // it sees positions ahead of this one
};

// A batch is a step under construction: of at most MAX_ROWS rows, or of prompts.
class Batch {
public:
    Batch(Region::Host host, const Cache &cache);

    // Adds n rows of a sequence, in depth-first order, whose parents count from the item's first row.
    // token(i) is that of row i, or -1 - e for entry e of the cache's drafts. With n 0 it adds the sequence's
    // debts alone.
    void add_verify(const Timeline &line, const ChoiceCtl &choice, uint32_t n, const int32_t *parents,
                    const int32_t *tokens);
    // Adds row i of a chain, whose token is the anchor or the draft before. It chooses that of n_past + i + 1. It is at n_past
    // + i, behind the rows before it, or where the drafter has no KV of its own at n_past.
    void add_draft(const Timeline &line, const ChoiceCtl &choice, int32_t anchor, const DrafterUse &use,
                   uint32_t i);
    // Adds a block of rows after what is committed: [anchor, mask, mask ..]. The choices of those that draft are kept.
    void add_block(const Timeline &line, const ChoiceCtl &choice, int32_t anchor, const DrafterUse &use,
                   int32_t mask);
    // Adds the committed rows that drafters which lag have not seen.
    void add_unseen(const Timeline &line);
    // Adds rows that only fill the step's width.
    void fill_up(uint32_t width);
    // Adds the next n tokens of a prompt, of at most MAX_PROMPTS. Its last row's choice is kept as the verify's of this
    // index is: that of the first prompt as that of row 0. With images or gaps there is a place of each row; else places is
    // empty.
    void add_prompt(const Timeline &line, const ChoiceCtl &choice, const int32_t *tokens, uint32_t n,
                    const std::vector<PromptPlace> &places);
    // Comes behind the last prompt. Returns whether any has images. Their rows, of E values, are copied to `room`, which has
    // room for as many rows as the step has; with null they are read where they lie.
    bool place_images(float *room, uint32_t E);

    uint32_t n_rows() const { return uint32_t(h_.ctl->n_rows); }
    uint32_t n_pages() const { return n_pages_; }
    const std::vector<PromptRows> &prompts() const { return prompts_; }

private:
    SeqCtl &add_sequence(const Timeline &line, const ChoiceCtl &choice, uint32_t n_rows);

    Region::Host h_;
    const Cache &cache_;
    uint32_t n_pages_ = 0, n_cells_ = 0;
    void put_position(int32_t row, int32_t index, const Timeline &line);

    std::vector<PromptRows> prompts_;
    std::vector<PromptPlace> places_; // of all rows of prompts so far, where the region has axes
    bool images_ = false;
};

} // namespace luce
