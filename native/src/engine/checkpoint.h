// A checkpoint is a position that sequences can start from. It has whole pages of KV, shared by count, a copy of the page that
// it ends in, if it ends within one, and a copy of the recurrent state, the conv windows and the last hidden row. It lives on
// the device (pages and a slot), in host memory, or as bytes.
//
// Saved bytes are: header | tokens i32[n_past] | body, where the body is the pieces of Cache::pieces one
// after the other. They depend on the tokens, on where the prompt was cut, and on the model, build and device that the
// header names. They do not depend on the sequence or the pages. Host memory holds the body.
#pragma once

#include "engine/sequence.h"
#include "model/host_pages.h"

#include <future>

namespace luce {

class Checkpoint : public std::enable_shared_from_this<Checkpoint> {
public:
    static std::shared_ptr<Checkpoint> make(Sequence &sequence);
    // load() takes no lock, since what it reads of the engine never changes.
    static std::shared_ptr<Checkpoint> load(std::shared_ptr<Engine> engine, const uint8_t *data,
                                            uint64_t size);
    ~Checkpoint();

    const std::shared_ptr<Engine> &engine() const { return engine_; }
    const std::vector<int32_t> &tokens() const { return tokens_; }
    uint32_t n_past() const { return uint32_t(tokens_.size()); }
    bool on_device() const { return slot_ >= 0 && !leaving_; }
    // Its copy to the host runs; its pages and slot are free after it.
    bool leaving() const { return leaving_; }
    const PageLists &pages() const { return pages_; } // these are the ones on the device
    uint64_t size() const; // it says how many bytes save() writes

    void to_host();
    void to_device();
    // It waits for a copy that is on its way, and gives back what it leaves. Where a copy to the host could not be begun, the
    // checkpoint is closed.
    void settle();
    // Gives back all that it holds. What runs on it in another thread fails with E_STATE.
    void close();
    void check_open() const;
    // Writes size() bytes. It is called without the engine's lock, and takes it for a part of the bytes at a
    // time. So steps go on beside it, and the checkpoint may be moved meanwhile.
    void save(uint8_t *data, uint64_t size);
    // Says how many free pages restore() needs.
    uint32_t pages_wanted() const { return slot_ < 0 ? n_pages() : has_part() ? 1 : 0; }
    void restore(Timeline &line) const; // it brings the timeline to this position

private:
    Checkpoint(std::shared_ptr<Engine> engine, std::vector<int32_t> tokens, int32_t delta);

    uint32_t n_pages() const { return (n_past() + PAGE - 1) / PAGE; }
    bool has_part() const { return n_past() % PAGE != 0; } // of its last page, which nobody shares
    std::vector<Cache::Piece> pieces() const; // these are the ones on the device
    void take_device(); // it takes a slot, and fails with E_MEMORY when all are taken
    PageLists new_pages() const; // for all its positions, of which those of window pages are in a few
    void release_device();
    void begin_beside_steps() const; // the copies' streams wait for where the steps' are now
    void end_beside_steps() const; // events_ are there on the copies' streams
    bool
    finish_copying(); // it waits until a copy to the host has been enqueued, or made on a CPU, and says whether it was
    void let_steps_wait() const;
    HostMemory host_memory() const;
    void read(uint64_t begin, uint64_t n, uint8_t *to) const; // it copies n bytes of the body

    std::shared_ptr<Engine> engine_;
    std::vector<int32_t> tokens_;
    int32_t delta_; // Timeline::delta
    PageLists pages_; // they count while there is a slot_
    int32_t slot_ = -1; // it is one of Cache::checkpoint_slots; -1 means that it is not on the device
    // It holds the body, which nothing changes. It is null while the body is not in host memory.
    HostMemory host_;
    bool leaving_ = false, arriving_ = false; // a copy is on its way
    std::string why_closed_; // what a copy to the host failed with
    std::vector<Event> events_; // by stage: they mark the copy's end there, and are null on the CPU
    std::future<void>
        copying_; // of one that leaves: on a CPU it copies, for a GPU it pins host memory and enqueues copies
};

// Writes the committed state of a sequence as bytes, in the form of a checkpoint, and returns their number.
// Prefill in chunks need not have brought the sequence there. Where data is null it only returns the number.
uint64_t dump(Sequence &sequence, uint8_t *data, uint64_t size);

} // namespace luce
