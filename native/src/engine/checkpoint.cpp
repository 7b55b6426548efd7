#include "engine/checkpoint.h"

#include "common/pointers.h"
#include "graph/drafter.h"
#include "luce_build.h" // CMake writes it
#include "step/faults.h"

#include <ggml-backend-impl.h> // it says what an event is

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <system_error>
#include <utility>

namespace luce {
namespace {

// What has to be equal where the bytes are loaded, else a warm answer might not be the cold one. Text ends in zeros.
struct Header {
    char magic[8]; // it holds "LUCECHKP"
    uint32_t version; // it is the number of this layout
    uint32_t kv_type; // it is ggml's id of the type
    uint64_t model; // it is Model::identity
    uint64_t size; // it counts everything
    uint64_t checksum; // it covers everything, with itself taken as 0
    uint32_t n_past;
    uint32_t n_cut; // it is that of the engine: prompts were cut at its multiples
    uint32_t drafters; // it has a bit for each of the model's drafters of which there is KV
    int32_t delta; // it is Timeline::delta
    char build[24]; // it is LUCE_BUILD
    char arithmetic[240]; // it is Model::arithmetic, as far as there is room
};
constexpr char MAGIC[8] = {'L', 'U', 'C', 'E', 'C', 'H', 'K', 'P'},
               DUMP[8] = {'L', 'U', 'C', 'E', 'D', 'U', 'M', 'P'};
constexpr uint32_t VERSION = 8;

// A portion of pages that leaves a GPU has at least so many bytes: pinning as many takes some milliseconds.
constexpr uint64_t PORTION = uint64_t(16) << 20;

// save() reads as many bytes while it holds the engine, which takes under 1 ms.
constexpr uint64_t AT_ONCE = uint64_t(2) << 20;

// Sums n bytes, 64 bits at a time, since states are hundreds of megabytes. They may come in parts, of which
// all but the last are multiples of 8.
class Checksum {
public:
    explicit Checksum(uint64_t n) : hash_(0x9e3779b97f4a7c15u ^ n) {}

    Checksum &add(const uint8_t *data, uint64_t n) {
        for (uint64_t i = 0; i < n; i += 8) {
            uint64_t word = 0;
            memcpy(&word, data + i, size_t(n - i < 8 ? n - i : 8));
            hash_ = (hash_ ^ word) * 0xff51afd7ed558ccdu;
            hash_ ^= hash_ >> 32;
        }
        return *this;
    }
    uint64_t value() const { return hash_; }

private:
    uint64_t hash_;
};

// Returns the checksum of a header and of `rest`, the bytes after it.
uint64_t checksum(Header header, const Checksum &rest) {
    header.checksum = 0;
    const auto *data = reinterpret_cast<const uint8_t *>(&header);
    return Checksum(sizeof(header)).add(data, sizeof(header)).value() ^ rest.value();
}

uint64_t checksum(const Header &header, const uint8_t *data) {
    const uint64_t rest = header.size - sizeof(header);
    return checksum(header, Checksum(rest).add(data + sizeof(header), rest));
}

uint64_t total(const std::vector<Cache::Piece> &pieces) {
    uint64_t size = 0;
    for (const Cache::Piece &p : pieces) {
        size += p.size;
    }
    return size;
}

// Returns a piece as a tensor of bytes, for ggml's copies.
ggml_tensor bytes(const Cache::Piece &p) {
    ggml_tensor t = *p.tensor;
    t.type = GGML_TYPE_I8;
    t.ne[0] = int64_t(p.size);
    t.ne[1] = t.ne[2] = t.ne[3] = 1;
    t.nb[0] = 1;
    t.nb[1] = t.nb[2] = t.nb[3] = p.size;
    t.data = static_cast<uint8_t *>(p.tensor->data) + p.offset;
    return t;
}

// The stream of a stage on which a copy is enqueued: that of its steps, or the one beside it.
using Stream = Backend Stage::*;

// Copies n bytes of all pieces, from their byte `begin` on.
void fetch(Stream stream, const std::vector<Cache::Piece> &pieces, uint8_t *to, uint64_t begin, uint64_t n) {
    for (const Cache::Piece &p : pieces) {
        if (n == 0) {
            return;
        }
        const uint64_t skipped = std::min(begin, uint64_t(p.size)), taken = std::min(n, p.size - skipped);
        begin -= skipped;
        if (taken > 0) {
            ggml_backend_tensor_get_async((p.stage->*stream).get(), p.tensor, to, p.offset + skipped, taken);
            to += taken;
            n -= taken;
        }
    }
}

void fetch(Stream stream, const std::vector<Cache::Piece> &pieces, uint8_t *to) {
    fetch(stream, pieces, to, 0, total(pieces));
}

// Copies the pieces on the streams beside the steps, and waits for that. ggml would end the process where a device has
// failed meanwhile, so it is not asked.
void leave([[maybe_unused]] const std::deque<Stage> &stages,
           [[maybe_unused]] const std::vector<Event> &events,
           [[maybe_unused]] const std::vector<Cache::Piece> &pieces, [[maybe_unused]] uint8_t *to) {
#ifdef LUCE_USE_CUDA
    const auto check = [](int error) {
        if (error != 0) {
            fail(LUCE_E_DEVICE, "its copy to the host failed: %s", cuda::error_text(error));
        }
    };
    for (const Cache::Piece &p : pieces) {
        const auto *from = static_cast<const uint8_t *>(p.tensor->data) + p.offset;
        check(cuda::leave_beside(from, to, int64_t(p.size), Stage::stream(p.stage->copies)));
        to += p.size;
    }
    for (size_t i = 0; i < events.size(); i++) {
        check(cuda::record(events[i]->context, Stage::stream(stages[i].copies)));
    }
    for (const Event &event : events) {
        check(Step::finish_copy(event));
    }
#endif
}

// Copies the pieces on the CPU. It reads what no step writes: pages that a checkpoint shares, and its own slot.
void copy_out(const std::vector<Cache::Piece> &pieces, uint8_t *to) {
    for (const Cache::Piece &p : pieces) {
        memcpy(to, static_cast<const uint8_t *>(p.tensor->data) + p.offset, p.size);
        to += p.size;
    }
}

void send(Stream stream, const std::vector<Cache::Piece> &pieces, const uint8_t *from) {
    for (const Cache::Piece &p : pieces) {
        ggml_backend_tensor_set_async((p.stage->*stream).get(), p.tensor, from, p.offset, p.size);
        from += p.size;
    }
}

// Enqueues copies on a GPU's stream of steps, as many at once as a launch takes.
void launch([[maybe_unused]] const Stage &stage, [[maybe_unused]] const std::vector<CopyPiece> &pieces) {
#ifdef LUCE_USE_CUDA
    make_current(stage.device);
    for (size_t first = 0; first < pieces.size(); first += CopyPiecesArgs::MOST) {
        CopyPiecesArgs a{};
        a.n = int32_t(std::min(pieces.size() - first, size_t(CopyPiecesArgs::MOST)));
        std::copy_n(pieces.begin() + ptrdiff_t(first), a.n, a.pieces);
        if (const int error = cuda::copy_pieces(a, Stage::stream(stage.steps)); error != 0) {
            fail(LUCE_E_DEVICE, "%s: copying a sequence's state failed: %s", stage.device.name.c_str(),
                 cuda::error_text(error));
        }
    }
#endif
}

// Enqueues copies of pieces to others of the same stages and sizes.
void copy(const std::vector<Cache::Piece> &from, const std::vector<Cache::Piece> &to) {
    std::map<const Stage *, std::vector<CopyPiece>> on_gpus;
    for (size_t i = 0; i < from.size(); i++) {
        const Stage *stage = from[i].stage;
        ggml_tensor source = bytes(from[i]), target = bytes(to[i]);
        if (stage->device.gpu && given(source.data) && given(target.data) && from[i].size % 16 == 0) {
            on_gpus[stage].push_back({source.data, target.data, int64_t(from[i].size)});
        } else {
            ggml_backend_tensor_copy_async(stage->steps.get(), stage->steps.get(), &source, &target);
        }
    }
    for (const auto &[stage, pieces] : on_gpus) {
        launch(*stage, pieces);
    }
}

void check_devices(Engine &engine) {
    for (const Stage &stage : engine.cache().stages()) {
        check_works(stage.device);
    }
    engine.step().check_chunks();
}

uint64_t header_and_tokens(uint32_t n_past) {
    return sizeof(Header) + n_past * sizeof(int32_t);
}

template <size_t N> void put_text(char (&to)[N], const std::string &text) {
    memcpy(to, text.data(), std::min(text.size(), N - 1)); // the rest is zeros
}
template <size_t N> std::string text_of(const char (&from)[N]) {
    return std::string(from, strnlen(from, N));
}

uint32_t drafters_of(const Engine &engine) {
    uint32_t bits = 0;
    for (const Drafter *drafter : engine.cache().drafters()) {
        bits |= 1u << drafter->index;
    }
    return bits;
}

Header header_of(uint64_t size, const Engine &engine, const std::vector<int32_t> &tokens, int32_t delta,
                 const char (&magic)[8]) {
    Header h{};
    memcpy(h.magic, magic, sizeof(magic));
    h.version = VERSION;
    h.kv_type = engine.params().cache.kv_type;
    h.model = engine.model().identity();
    h.size = size;
    h.n_past = uint32_t(tokens.size());
    h.n_cut = engine.cache().n_cut;
    h.drafters = drafters_of(engine);
    h.delta = delta;
    put_text(h.build, LUCE_BUILD);
    put_text(h.arithmetic, engine.model().arithmetic());
    return h;
}

void put_tokens(uint8_t *data, const std::vector<int32_t> &tokens) {
    if (!tokens.empty()) {
        memcpy(data + sizeof(Header), tokens.data(), tokens.size() * sizeof(int32_t));
    }
}

Header read_header(const Engine &engine, const uint8_t *data, uint64_t size) {
    const CacheParams &c = engine.params().cache;
    const uint32_t drafters = drafters_of(engine);
    Header h{};
    if (size < sizeof(h)) {
        fail(LUCE_E_ARG, "%llu bytes are no saved checkpoint", (unsigned long long) size);
    }
    memcpy(&h, data, sizeof(h));
    if (memcmp(h.magic, MAGIC, sizeof(MAGIC)) != 0) {
        fail(LUCE_E_ARG, "these bytes are no checkpoint that luce saved");
    }
    if (h.version != VERSION) {
        fail(LUCE_E_ARG,
             "the checkpoint has version %u, this version of luce has %u: read its prompt again and save it "
             "anew",
             h.version, VERSION);
    }
    if (h.size != size || h.checksum != checksum(h, data)) {
        fail(LUCE_E_ARG, "the saved checkpoint is damaged: %llu of %llu bytes, or its checksum is wrong",
             (unsigned long long) size, (unsigned long long) h.size);
    }
    Header own{};
    put_text(own.build, LUCE_BUILD);
    put_text(own.arithmetic, engine.model().arithmetic());
    if (memcmp(h.build, own.build, sizeof(h.build)) != 0) {
        fail(LUCE_E_ARG, "the checkpoint was saved by build %s of luce, this is build %s",
             text_of(h.build).c_str(), own.build);
    }
    if (memcmp(h.arithmetic, own.arithmetic, sizeof(h.arithmetic)) != 0) {
        fail(LUCE_E_ARG, "the checkpoint was computed on %s, this engine is on %s",
             text_of(h.arithmetic).c_str(), own.arithmetic);
    }
    if (h.model != engine.model().identity()) {
        fail(LUCE_E_ARG, "the checkpoint was saved with another model");
    }
    if (h.kv_type != uint32_t(c.kv_type)) {
        fail(LUCE_E_ARG, "the checkpoint was saved with kv_type %s, this engine has %s",
             h.kv_type < GGML_TYPE_COUNT ? type_name(ggml_type(h.kv_type)) : "?", type_name(c.kv_type));
    }
    for (const auto &drafter : engine.model().weights().drafters) {
        const bool saved = (h.drafters >> drafter->index & 1) != 0,
                   has = (drafters >> drafter->index & 1) != 0;
        if (saved != has) {
            fail(LUCE_E_ARG, "the checkpoint was saved %s %s, this engine is %s one",
                 saved ? "with" : "without", drafter->kind->title, has ? "with" : "without");
        }
    }
    if (h.n_cut != engine.cache().n_cut || h.n_past % engine.cache().n_kept() != 0 || h.n_past == 0) {
        fail(LUCE_E_ARG, "the checkpoint has %u tokens, cut at multiples of %u, this engine cuts at %u",
             h.n_past, h.n_cut, engine.cache().n_cut);
    }
    return h;
}

// Where tests hold copies.
struct {
    std::mutex mutex;
    std::condition_variable changed;
    int32_t at = -1;
} g_hold;

} // namespace

void hold_copies(int32_t at) {
    {
        const std::lock_guard<std::mutex> lock(g_hold.mutex);
        g_hold.at = at;
    }
    g_hold.changed.notify_all();
}

// What the thread that copies and those that want room tell each other.
struct Checkpoint::Leaving {
    std::mutex mutex;
    std::condition_variable changed;
    uint32_t landed = 0; // so many portions are copied
    bool ended = false; // no more will be
    std::exception_ptr failed; // with this
    std::atomic<bool> stopped{false}; // nobody wants it any more

    // Copies portion after portion. Who waits is told of every end, so it takes no memory of its own.
    template <typename Copy> void run(uint32_t n, const Copy &copy) {
        std::exception_ptr why;
        try {
            for (uint32_t i = 0; i < n && may_copy(i); i++) {
                if (fails_here(Fault::leave)) {
                    fail(LUCE_E_DEVICE, "its copy to the host failed, since a test asked for it");
                }
                copy(i);
                const std::lock_guard<std::mutex> lock(mutex);
                landed = i + 1;
                changed.notify_all();
            }
        } catch (...) { // a device that has failed tells so in its next step too
            why = std::current_exception();
        }
        const std::lock_guard<std::mutex> lock(mutex);
        failed = why;
        ended = true;
        changed.notify_all();
    }
    void stop() {
        {
            const std::lock_guard<std::mutex> lock(g_hold.mutex);
            stopped = true;
        }
        g_hold.changed.notify_all();
    }

private:
    bool may_copy(uint32_t i) const {
        std::unique_lock<std::mutex> lock(g_hold.mutex);
        g_hold.changed.wait(lock, [&] { return stopped || g_hold.at != int32_t(i); });
        return !stopped;
    }
};

Checkpoint::Checkpoint(std::shared_ptr<Engine> engine, std::vector<int32_t> tokens, int32_t delta)
    : engine_(std::move(engine)), tokens_(std::move(tokens)), delta_(delta) {
    check_devices(*engine_);
    for (const Stage &stage : engine_->cache().stages()) {
        events_.push_back(make_event(stage.device));
    }
}

Checkpoint::~Checkpoint() {
    close();
}

void Checkpoint::begin_beside_steps() const {
    for (size_t i = 0; i < events_.size(); i++) {
        const Stage &stage = engine_->cache().stages()[i];
        ggml_backend_event_record(events_[i].get(), stage.steps.get());
        ggml_backend_event_wait(stage.copies.get(), events_[i].get());
    }
}

void Checkpoint::end_beside_steps() const {
    for (size_t i = 0; i < events_.size(); i++) {
        ggml_backend_event_record(events_[i].get(), engine_->cache().stages()[i].copies.get());
    }
}

// Lets steps that are enqueued from now on wait for copies that are under way.
void Checkpoint::let_steps_wait() const {
    for (size_t i = 0; i < events_.size(); i++) {
        const Stage &stage = engine_->cache().stages()[i];
        if (works(stage.device)) {
            ggml_backend_event_wait(stage.steps.get(), events_[i].get());
        }
    }
}

std::vector<HostMemory> Checkpoint::close() {
    if (leaving_) {
        leaving_->stop();
        copying_.get(); // it reads what is given back here, and ends behind the portion that it copies now
        leaving_.reset();
    } else if (arriving_) {
        let_steps_wait(); // nobody waits for the copy here: the engine's next step comes after it
        engine_->step().keep(host_);
    }
    arriving_ = false;
    release_device();
    return std::exchange(host_, {});
}

void Checkpoint::check_open() const {
    if (slot_ >= 0 || !host_.empty()) {
        return;
    }
    if (!lost_) {
        fail(LUCE_E_STATE, "the checkpoint was closed meanwhile");
    }
    try {
        std::rethrow_exception(lost_);
    } catch (const std::exception &e) {
        fail(LUCE_E_STATE, "the checkpoint is lost: %s", e.what());
    }
}

uint32_t Checkpoint::pages_each() const {
    PageLists any;
    any.all.push_back(0);
    const uint64_t page = std::max<uint64_t>(1, total(engine_->cache().kept_pieces(any, PAGE, 0, 1)));
    return engine_->model().gpu() ? uint32_t((PORTION + page - 1) / page) : 1;
}

// Portions and their sizes are the same for all checkpoints of n_past tokens, wherever they lie.
std::vector<Checkpoint::Portion> Checkpoint::portions(const PageLists &pages, int32_t slot,
                                                      int32_t hidden) const {
    const Cache &cache = engine_->cache();
    std::vector<Portion> list;
    const auto add = [&](std::vector<Cache::Piece> pieces) {
        const uint64_t size = total(pieces);
        list.push_back({std::move(pieces), size});
    };
    add(cache.rest_pieces(pages, n_past(), slot, hidden));
    const uint32_t each = pages_each();
    for (uint32_t first = 0; first < n_pages(); first += each) {
        const uint32_t end = std::min(n_pages(), first + each);
        add(cache.kept_pieces(pages, n_past(), first, end));
    }
    return list;
}

std::vector<Checkpoint::Portion> Checkpoint::portions() const {
    const Cache &cache = engine_->cache();
    const int32_t slot = int32_t(engine_->params().cache.n_sequences) + std::max(slot_, 0);
    const bool is_there = slot_ >= 0 || leaving_;
    PageLists nowhere;
    nowhere.all.resize(is_there ? 0 : n_pages(), 0);
    nowhere.window.resize(nowhere.all.size(), 0);
    return portions(is_there ? pages_ : nowhere, slot, cache.hidden_row(slot, 0, 0));
}

uint64_t Checkpoint::size() const {
    uint64_t size = header_and_tokens(n_past());
    for (const Portion &portion : portions()) {
        size += portion.size;
    }
    return size;
}

void Checkpoint::take_device() {
    engine_->need_checkpoint();
    slot_ = engine_->cache().checkpoint_slots.take();
}

void Checkpoint::release_device() {
    Cache &cache = engine_->cache();
    cache.release(pages_);
    if (slot_ >= 0) {
        cache.checkpoint_slots.release(slot_);
    }
    slot_ = -1;
}

PageLists Checkpoint::new_pages() const {
    Cache &cache = engine_->cache();
    PageLists lists;
    lists.all.reserve(n_pages());
    lists.window.reserve(cache.has_windows() ? n_pages() : 0);
    cache.take(lists, n_past(), cache.first_window_page(n_past()));
    return lists;
}

std::vector<HostMemory> Checkpoint::host_memory(const std::vector<Portion> &portions) const {
    const Device &device = engine_->cache().last().device;
    uint64_t size = 0;
    for (const Portion &portion : portions) {
        size += portion.size;
    }
    HostPages::check(device, size, "a checkpoint");
    std::vector<HostMemory> memory;
    for (const Portion &portion : portions) {
        memory.push_back(std::make_shared<HostPages>(device, portion.size, "a checkpoint"));
    }
    return memory;
}

std::shared_ptr<Checkpoint> Checkpoint::make(Sequence &sequence) {
    sequence.check_usable();
    const std::shared_ptr<Engine> &engine = sequence.engine();
    const Timeline &line = sequence.line();
    const uint32_t n_past = line.n_past();
    Cache &cache = engine->cache();
    if (n_past == 0 || n_past % cache.n_kept() != 0 || !line.prompt_only()) {
        fail(LUCE_E_STATE,
             "a checkpoint is made where prefill has ended at a multiple of %u: the sequence has %u tokens%s",
             cache.n_kept(), n_past,
             line.prompt_only() ? "" : ", not all of them from prefill that is cut where it may be");
    }
    std::shared_ptr<Checkpoint> made(new Checkpoint(engine, line.tokens(), line.delta()), DeleteLocked());
    engine->need_pages(made->has_part() ? 1 : 0);
    PageLists pages = line.pages(); // no more memory is needed once they are shared
    made->take_device();
    pages.all.resize(n_past / PAGE);
    pages.window.resize(cache.has_windows() ? n_past / PAGE : 0);
    cache.share(pages);
    made->pages_ = std::move(pages);
    if (made->has_part()) { // the sequence goes on in its own
        cache.take(made->pages_, n_past);
        copy(cache.page_pieces(line.pages(), n_past / PAGE), cache.page_pieces(made->pages_, n_past / PAGE));
    }
    const int32_t slot = int32_t(engine->params().cache.n_sequences) + made->slot_;
    copy(cache.state_pieces(line.slot(), line.hidden()),
         cache.state_pieces(slot, cache.hidden_row(slot, 0, 0)));
    return made;
}

void Checkpoint::to_host() {
    settle();
    if (slot_ < 0) {
        return;
    }
    check_devices(*engine_);
    std::vector<Portion> list = portions();
    std::vector<HostMemory> memory = host_memory(list);
    auto leaving = std::make_shared<Leaving>();
    engine_->leaving(weak_from_this());
    const bool gpu = engine_->model().gpu();
    if (gpu) {
        begin_beside_steps();
    }
    const auto run = [this, gpu, leaving, memory, list = std::move(list)] {
        leaving->run(uint32_t(list.size()), [&](uint32_t i) {
            if (gpu) {
                memory[i]->pin();
                leave(engine_->cache().stages(), events_, list[i].pieces, memory[i]->data());
            } else {
                copy_out(list[i].pieces, memory[i]->data());
            }
        });
    };
    try {
        copying_ = std::async(std::launch::async, run);
    } catch (const std::system_error &) { // no more threads are to be had
        copying_ = std::async(std::launch::deferred, run);
        copying_.wait();
    }
    leaving_ = std::move(leaving); // nothing is half done where memory lacks
    given_ = 0;
    host_ = std::move(memory);
}

bool Checkpoint::give_back(bool waits) {
    uint32_t landed = 0;
    {
        std::unique_lock<std::mutex> lock(leaving_->mutex);
        const auto has_news = [&] { return leaving_->landed > given_ || leaving_->ended; };
        if (waits) {
            leaving_->changed.wait(lock, has_news);
        }
        if (!has_news()) {
            return false;
        }
        landed = leaving_->landed;
    }
    if (landed == given_) { // the copy has ended, or failed
        settle();
        return true;
    }
    Cache &cache = engine_->cache();
    if (given_ == 0) {
        PageLists windows;
        windows.window.swap(pages_.window);
        pages_.window.resize(windows.window.size(), GONE);
        cache.release(windows);
        cache.checkpoint_slots.release(slot_);
        slot_ = -1;
    } else {
        const uint32_t first = (given_ - 1) * pages_each();
        for (uint32_t page = first; page < std::min(n_pages(), first + pages_each()); page++) {
            cache.pages.release(pages_.all[page]);
            pages_.all[page] = GONE;
        }
    }
    given_++;
    return true;
}

void Checkpoint::be_whole() {
    if (leaving_ && given_ > 0) {
        settle();
    }
}

void Checkpoint::to_device() {
    settle();
    if (slot_ >= 0) {
        return;
    }
    check_open();
    check_devices(*engine_);
    engine_->need_pages(n_pages());
    take_device();
    std::vector<Portion> list;
    try {
        pages_ = new_pages();
        list = portions();
    } catch (...) {
        release_device();
        throw;
    }
    const bool gpu = engine_->model().gpu();
    if (gpu) { // the copy waits for steps that used these pages
        begin_beside_steps();
    }
    for (size_t i = 0; i < list.size(); i++) {
        send(gpu ? &Stage::copies : &Stage::steps, list[i].pieces, host_[i]->data());
    }
    if (gpu) {
        end_beside_steps();
        arriving_ = true;
    } else {
        host_.clear();
    }
}

void Checkpoint::settle() {
    if (leaving_) {
        copying_.get();
        if (leaving_->failed) {
            lost_ = leaving_->failed;
            host_.clear();
        }
        leaving_.reset();
        release_device();
    } else if (arriving_) {
        for (const Event &event : events_) {
            engine_->step().wait(event);
        }
        arriving_ = false;
        host_.clear();
    }
}

void Checkpoint::restore(Timeline &line) const {
    check_devices(*engine_);
    Cache &cache = engine_->cache();
    if (slot_ >= 0) { // this is so while it leaves, too
        if (arriving_) {
            let_steps_wait();
        }
        PageLists whole = pages_;
        whole.all.resize(n_past() / PAGE);
        whole.window.resize(cache.has_windows() ? n_past() / PAGE : 0);
        line.resume(tokens_, whole, delta_);
        if (has_part()) { // this page is the sequence's alone
            line.take_pages(0);
            copy(cache.page_pieces(pages_, n_past() / PAGE),
                 cache.page_pieces(line.pages(), n_past() / PAGE));
        }
        const int32_t slot = int32_t(engine_->params().cache.n_sequences) + slot_;
        copy(cache.state_pieces(slot, cache.hidden_row(slot, 0, 0)),
             cache.state_pieces(line.slot(), line.hidden()));
        return;
    }
    PageLists pages = new_pages();
    line.resume(tokens_, pages, delta_);
    PageLists taken = pages;
    cache.release(taken); // they are the sequence's alone
    const std::vector<Portion> list = portions(pages, line.slot(), line.hidden());
    for (size_t i = 0; i < list.size(); i++) {
        send(&Stage::steps, list[i].pieces, host_[i]->data());
    }
    engine_->step().keep(host_); // nothing waits here: a step after it does
}

void Checkpoint::read(uint64_t begin, uint64_t n, uint8_t *to) const {
    check_open();
    const std::vector<Portion> list = portions();
    size_t there = host_.size(); // so many portions are in host memory
    if (leaving_) {
        const std::lock_guard<std::mutex> lock(leaving_->mutex);
        there = leaving_->landed;
    }
    bool fetched = false;
    for (size_t i = 0; i < list.size() && n > 0; i++) {
        const uint64_t skipped = std::min(begin, list[i].size), taken = std::min(n, list[i].size - skipped);
        begin -= skipped;
        if (taken == 0) {
            continue;
        }
        if (i < there) {
            memcpy(to, host_[i]->data() + skipped, taken);
        } else {
            if (!fetched) {
                check_devices(*engine_);
            }
            fetch(&Stage::steps, list[i].pieces, to, skipped, taken);
            fetched = true;
        }
        to += taken;
        n -= taken;
    }
    if (fetched) {
        engine_->step().synchronize();
    }
}

void Checkpoint::save(uint8_t *data, uint64_t size) {
    const uint64_t body_at = header_and_tokens(n_past());
    put_tokens(data, tokens_);
    Checksum rest(size - sizeof(Header));
    rest.add(data + sizeof(Header), body_at - sizeof(Header));
    for (uint64_t at = body_at; at < size; at += AT_ONCE) {
        const uint64_t n = std::min(AT_ONCE, size - at);
        {
            const std::lock_guard<std::recursive_mutex> lock(engine_->mutex());
            read(at - body_at, n, data + at);
        }
        rest.add(data + at, n); // steps that waited for the engine run meanwhile
    }
    Header h = header_of(size, *engine_, tokens_, delta_, MAGIC);
    h.checksum = checksum(h, rest);
    memcpy(data, &h, sizeof(h));
}

std::shared_ptr<Checkpoint> Checkpoint::load(std::shared_ptr<Engine> engine, const uint8_t *data,
                                             uint64_t size) {
    const Header h = read_header(*engine, data, size);
    if (header_and_tokens(h.n_past) > size) {
        fail(LUCE_E_ARG, "the saved checkpoint's %u tokens do not fit into its %llu bytes", h.n_past,
             (unsigned long long) size);
    }
    std::vector<int32_t> tokens(h.n_past);
    memcpy(tokens.data(), data + sizeof(h), h.n_past * sizeof(int32_t));
    engine->check_tokens(tokens.data(), h.n_past, /*images=*/true);
    const int64_t positions = int64_t(h.n_past) + h.delta;
    if (positions < 0 || positions > 1 << 30 || (h.delta > 0 && !engine->params().cache.gaps)) {
        fail(LUCE_E_ARG, "the saved checkpoint's %u tokens take %lld positions", h.n_past,
             (long long) positions);
    }
    std::shared_ptr<Checkpoint> made(new Checkpoint(std::move(engine), std::move(tokens), h.delta),
                                     DeleteLocked());
    if (made->size() != size) {
        fail(LUCE_E_ARG, "the saved checkpoint's layout is another: %llu bytes, expected %llu",
             (unsigned long long) size, (unsigned long long) made->size());
    }
    const std::vector<Portion> list = made->portions();
    made->host_ = made->host_memory(list);
    data += header_and_tokens(h.n_past);
    for (size_t i = 0; i < list.size(); i++) {
        made->host_[i]->pin();
        memcpy(made->host_[i]->data(), data, list[i].size);
        data += list[i].size;
    }
    return made;
}

uint64_t dump(Sequence &sequence, uint8_t *data, uint64_t size) {
    sequence.check_usable();
    Engine &engine = *sequence.engine();
    const Timeline &line = sequence.line();
    const auto pieces = [&] {
        std::vector<Cache::Piece> all;
        if (line.n_past() > 0) {
            const Cache &cache = engine.cache();
            all = cache.rest_pieces(line.pages(), line.n_past(), line.slot(), line.hidden());
            const uint32_t end = (line.n_past() + PAGE - 1) / PAGE;
            const auto kept = cache.kept_pieces(line.pages(), line.n_past(), 0, end);
            all.insert(all.end(), kept.begin(), kept.end());
        }
        return all;
    };
    const uint64_t needed = header_and_tokens(line.n_past()) + total(pieces());
    if (data == nullptr) {
        return needed;
    }
    if (size < needed) {
        fail(LUCE_E_ARG, "size is %llu, the sequence takes %llu bytes", (unsigned long long) size,
             (unsigned long long) needed);
    }
    sequence.settle();
    check_devices(engine);
    fetch(&Stage::steps, pieces(), data + header_and_tokens(line.n_past()));
    engine.step().synchronize();
    put_tokens(data, line.tokens());
    Header h = header_of(needed, engine, line.tokens(), line.delta(), DUMP);
    h.checksum = checksum(h, data);
    memcpy(data, &h, sizeof(h));
    return needed;
}

} // namespace luce
