// A checkpoint is a position that sequences can start from. It has whole pages of KV, shared by count, a copy of the page that
// it ends in, if it ends within one, and a copy of the recurrent state, the conv windows and the last hidden row. It lives on
// the device (pages and a slot), in host memory, or as bytes.
//
// It leaves the device in portions, in a thread beside the steps: first its state, with its place among the checkpoints, then
// page after page. What needs room takes the portions that are copied, and waits for no others. A sequence may start from one
// that leaves; where it has given back pages by then, it has to leave whole first.
//
// Saved bytes are: header | tokens i32[n_past] | body, where the body is the pieces of Cache::rest_pieces and
// Cache::kept_pieces one after the other. They depend on the tokens, on where the prompt was cut, and on the model, build and
// device that the header names. They do not depend on the sequence or the pages. Host memory holds the body.
#pragma once

#include "engine/sequence.h"
#include "model/host_pages.h"

#include <exception>
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
    bool on_device() const { return slot_ >= 0 && !leaving(); }
    // Its copy to the host runs. What of its pages and slot it has not given back is free after it.
    bool leaving() const { return leaving_ != nullptr; }
    bool has_slot() const { return slot_ >= 0; }
    const PageLists &pages() const {
        return pages_;
    } // these are the ones on the device, and GONE those that it gave back
    uint64_t size() const; // it says how many bytes save() writes

    void to_host();
    void to_device();
    // It waits for a copy that is on its way, and gives back what it leaves. Where a copy to the host failed, the checkpoint is
    // closed.
    void settle();
    // Gives back the next portion of one that is leaving, if that is copied, or `waits` for it. Says whether there was one.
    bool give_back(bool waits);
    // Has it on the device or in host memory as a whole: where it has given back a part it waits for the rest.
    void be_whole();
    // Gives back all that it holds, and returns its host memory: to free 2 GB that are pinned takes 50 ms, which is no matter of
    // who waits for the engine. What runs on it in another thread fails with E_STATE.
    std::vector<HostMemory> close();
    void check_open() const;
    // Writes size() bytes. It is called without the engine's lock, and takes it for a part of the bytes at a
    // time. So steps go on beside it, and the checkpoint may be moved meanwhile.
    void save(uint8_t *data, uint64_t size);
    // Says how many free pages restore() needs.
    uint32_t pages_wanted() const { return slot_ < 0 ? n_pages() : has_part() ? 1 : 0; }
    void restore(Timeline &line) const; // it brings the timeline to this position

private:
    Checkpoint(std::shared_ptr<Engine> engine, std::vector<int32_t> tokens, int32_t delta);

    // Portion 0 is the rest, without pages of `all`. Where host memory has to be pinned, the others are of several pages, so
    // that they are worth a call.
    struct Portion {
        std::vector<Cache::Piece> pieces; // those on the device
        uint64_t size;
    };
    struct Leaving;

    uint32_t pages_each() const; // of a portion of pages
    uint32_t n_pages() const { return (n_past() + PAGE - 1) / PAGE; }
    bool has_part() const { return n_past() % PAGE != 0; } // of its last page, which nobody shares
    std::vector<Portion> portions() const;
    std::vector<Portion> portions(const PageLists &pages, int32_t slot, int32_t hidden) const;
    void take_device(); // it takes a slot, and fails with E_MEMORY when all are taken
    PageLists new_pages() const; // for all its positions, of which those of window pages are in a few
    void release_device();
    void begin_beside_steps() const; // the copies' streams wait for where the steps' are now
    void end_beside_steps() const; // events_ are there on the copies' streams
    void let_steps_wait() const;
    std::vector<HostMemory> host_memory(const std::vector<Portion> &portions) const;
    void read(uint64_t begin, uint64_t n, uint8_t *to) const; // it copies n bytes of the body

    std::shared_ptr<Engine> engine_;
    std::vector<int32_t> tokens_;
    int32_t delta_; // Timeline::delta
    PageLists pages_; // they count while there is a slot_
    int32_t slot_ = -1; // it is one of Cache::checkpoint_slots; -1 means that it is not on the device
    // It holds the body by portions, which nothing changes. It is empty while the body is not in host memory.
    std::vector<HostMemory> host_;
    std::shared_ptr<Leaving> leaving_; // its copy to the host, which is on its way
    uint32_t given_ = 0; // so many portions of that copy have given back what they had on the device
    bool arriving_ = false; // the other copy is on its way
    std::exception_ptr lost_; // what its copy to the host failed with
    std::vector<Event> events_; // by stage: they mark the copy's end there, and are null on the CPU
    std::future<void> copying_; // the thread of one that leaves
};

// For tests: copies to the host wait ahead of portion `at`, until another number is given; -1 holds none.
void hold_copies(int32_t at);

// Writes the committed state of a sequence as bytes, in the form of a checkpoint, and returns their number.
// Prefill in chunks need not have brought the sequence there. Where data is null it only returns the number.
uint64_t dump(Sequence &sequence, uint8_t *data, uint64_t size);

} // namespace luce
