#include "step/threads.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace luce {
namespace {

// The caller waits so long for parts before it sleeps.
constexpr int SPINS = 2000;
// A helper waits so long for a job before it sleeps: BRIEFLY is longer than what a caller does between the jobs of a step,
// and LONG is longer than what it does between steps of one text. Waking a helper costs the caller up to a tenth of a
// small model's step.
constexpr std::chrono::microseconds BRIEFLY(25), LONG(300);
// A helper that did not run for so long, though it wanted to, has a neighbour on its CPU. One who sleeps is let in as soon
// as it wakes, and one who spins waits for its turn. So it waits briefly for a while then, which doubles each time and
// fades in calm times.
constexpr std::chrono::milliseconds ABSENT(1), LEAST_CROWDED(20), MOST_CROWDED(2560);
constexpr int FADES = 16; // a calm time takes such a part of itself away
// They count jobs: less than a step, and hundreds of steps.
constexpr int MIN_PATIENCE = 64, MAX_PATIENCE = 1 << 16;
// A helper who slept through a step's first ops may miss the others.
constexpr std::chrono::microseconds WAKE_EVERY(200);
// A wait for a thread that does not run lasts a few milliseconds. So a few of them in a row use up the credit, but one
// in a step of that length does not. One job saves at most as much as few jobs take: what is more is a caller that
// did not run.
constexpr std::chrono::microseconds MOST_CREDIT(20000), MOST_SAVED(500);

constexpr uint64_t NEXT = uint64_t(1) << 16, SERIAL = NEXT << 16, MASK = 0xffff;

// Returns how long the calling thread has run.
std::chrono::nanoseconds time_run() {
    timespec ran{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ran);
    return std::chrono::seconds(ran.tv_sec) + std::chrono::nanoseconds(ran.tv_nsec);
}

// Returns the number of the CPU that the calling thread is on, or -1 where that is not known.
int this_cpu() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

bool parts_left(uint64_t parts) {
    return (parts / NEXT & MASK) < (parts & MASK);
}

} // namespace

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

Team::Team(int n_threads) {
    helpers_.reserve(size_t(std::max(n_threads, 1) - 1));
    // It comes first: a helper without a place would rest until it is told.
    active_ = std::max(n_threads, 1) - 1;
    try {
        for (int i = 1; i < n_threads; i++) {
            helpers_.emplace_back([this, i] { help(i - 1); });
        }
    } catch (const std::exception &) {
        // No more threads are to be had, or no memory for them, and fewer do the work.
    }
    active_ = int(helpers_.size());
    credit_ = MOST_CREDIT;
    patience_ = MIN_PATIENCE;
}

Team::~Team() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    rest_.notify_all();
    for (std::thread &helper : helpers_) {
        helper.join();
    }
}

int Team::place_of(int thread) const {
    return thread % std::min(active_ + 1, MOST_PLACES);
}

// Takes the first part that is left, or else the last, and runs it.
bool Team::take_part(Place &place, bool first) {
    uint64_t parts = place.parts.load(std::memory_order_acquire);
    do {
        if (!parts_left(parts)) {
            return false;
        }
    } while (!place.parts.compare_exchange_weak(parts, first ? parts + NEXT : parts - 1,
                                                std::memory_order_acq_rel));
    try {
        place.call(place.context, int(first ? parts / NEXT & MASK : (parts & MASK) - 1));
    } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex_);
        failure_ = failure_ ? failure_ : std::current_exception();
    }
    return true;
}

// Takes parts of a thread's own place, and then, while there are any, of the others. Returns how many.
int Team::take_parts(int thread) {
    const int n_places = std::min(active_ + 1, MOST_PLACES), own = place_of(thread);
    int taken = 0;
    for (int i = 0; i < n_places; i++) {
        int n = 0;
        while (take_part(places_[size_t((own + i) % n_places)], i == 0)) {
            n++;
        }
        if (n > 0 && thread > 0) {
            report(n);
        }
        taken += n;
    }
    return taken;
}

// Says that a helper has done n parts.
void Team::report(int n) {
    done_ += n;
    if (waiting_) {
        const std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_one();
    }
}

// Gives each place its share. The last store is sequentially consistent with asleep_.
void Team::give(int n_parts, Call call, const void *context) {
    done_.store(0, std::memory_order_relaxed);
    serial_++;
    const int n_places = std::min(active_ + 1, MOST_PLACES);
    for (int i = n_places - 1; i >= 0; i--) {
        Place &place = places_[size_t(i)];
        place.call = call;
        place.context = context;
        const uint64_t begin = uint64_t(n_parts * i / n_places), end = uint64_t(n_parts * (i + 1) / n_places);
        place.parts.store(serial_ * SERIAL + begin * NEXT + end,
                          i > 0 ? std::memory_order_release : std::memory_order_seq_cst);
    }
}

// Returns when it was done, since waking takes the caller's time.
Team::Clock::time_point Team::wake_helpers() {
    const Clock::time_point now = Clock::now();
    if (asleep_.load() == 0 || now - woken_ <= WAKE_EVERY) {
        return now;
    }
    {
        const std::lock_guard<std::mutex> lock(mutex_);
    }
    wake_.notify_all();
    woken_ = Clock::now();
    credit_ -= woken_ - now;
    return woken_;
}

void Team::run(int n_parts, Call call, const void *context) {
    if (active_ == 0 || n_parts == 1) {
        for (int i = 0; i < n_parts; i++) {
            call(context, i);
        }
        adjust(false);
        return;
    }
    if (const int cpu = this_cpu(); cpu >= 0 && cpu != callers_cpu_) {
        callers_cpu_ = cpu;
    }
    give(n_parts, call, context);
    const Clock::time_point began = wake_helpers();
    const int taken = take_parts(0);
    const Clock::time_point finished = Clock::now();
    wait_for_parts(n_parts - taken);
    weigh(finished - began, Clock::now() - finished, taken, n_parts);
    if (failure_) {
        std::rethrow_exception(std::exchange(failure_, nullptr));
    }
}

void Team::wait_for_parts(int n_parts) {
    const auto done = [&] { return done_.load() == n_parts; };
    for (int spins = 0; spins < SPINS; spins++) {
        if (done()) {
            return;
        }
        relax();
    }
    std::unique_lock<std::mutex> lock(mutex_); // a holder of parts may need this CPU
    waiting_ = true;
    finished_.wait(lock, done);
    waiting_ = false;
}

// With half as many helpers a job that all had equal shares of would have taken up to twice as long: where memory
// bounds it, less. Half of that counts, so that helpers whose CPU is shared go: they cost as long as they help.
// At its end a job waits for parts that are being done, however long a prefill's parts are. So a wait as long as two of
// the caller's own costs nothing.
void Team::weigh(Clock::duration took, Clock::duration waited, int taken, int n_parts) {
    const Clock::duration stalled = waited - 2 * took / std::max(taken, 1);
    const Clock::duration saved = std::min<Clock::duration>(took, MOST_SAVED) / 2;
    const int helped = n_parts - taken, fair = std::max(taken, 1) * active_;
    credit_ += helped < fair ? saved * helped / fair : saved;
    credit_ = std::min(credit_ - std::max(stalled, Clock::duration::zero()), Clock::duration(MOST_CREDIT));
    adjust(credit_ < Clock::duration::zero());
}

void Team::adjust(bool stalled) {
    const int all = int(helpers_.size());
    calm_++;
    if (stalled) {
        active_ = active_ / 2;
        credit_ = MOST_CREDIT / 2;
        patience_ = std::min(2 * patience_, MAX_PATIENCE);
        calm_ = 0;
    } else if (calm_ >= patience_) {
        if (active_ == all) {
            patience_ = std::max(patience_ / 2, MIN_PATIENCE);
        }
        calm_ = 0;
        if (active_ < all) {
            const std::lock_guard<std::mutex> lock(mutex_);
            active_ = std::min(2 * active_ + 1, all);
            rest_.notify_all();
        }
    }
}

void Team::stay_awake(bool on) {
    awake_ = on; // it is sequentially consistent with asleep_
    if (on && asleep_.load() > 0) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
        }
        wake_.notify_all();
    }
}

bool Team::has_news(int index) const {
    return stop_ || index >= active_ || parts_left(places_[size_t(place_of(index + 1))].parts.load());
}

// Says whether the helper's CPU has been its own since the last time, and lately.
bool Team::Crowd::calm(Clock::time_point now) {
    const Clock::duration ran = time_run(), absent = now - seen_ - (ran - ran_);
    seen_ = now;
    ran_ = ran;
    if (absent > ABSENT) {
        const Clock::duration lasts = 2 * lasts_ - (now - until_) / FADES;
        lasts_ = std::clamp<Clock::duration>(lasts, LEAST_CROWDED, MOST_CROWDED);
        until_ = now + lasts_;
    }
    return now >= until_;
}

void Team::Crowd::woke(Clock::time_point now) {
    seen_ = now;
    ran_ = time_run();
}

// Returns whether there was news before the helper had waited for long.
bool Team::spin(int index, Crowd &crowd) {
    constexpr int POLLS = 8; // it polls so often between two looks at the clock
    Clock::time_point began = Clock::now();
    for (bool calm = false;;) {
        for (int i = 0; i < POLLS; i++) {
            if (has_news(index)) {
                return true;
            }
            relax();
        }
        const Clock::time_point now = Clock::now();
        if (awake_) {
            began = now;
        } else if (now - began >= BRIEFLY) {
            calm = calm || crowd.calm(now);
            if (!calm || now - began >= LONG || this_cpu() == callers_cpu_) {
                return false;
            }
        }
    }
}

void Team::wait_for_work(int index, Crowd &crowd) {
    if (spin(index, crowd)) {
        return;
    }
    {
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_++;
        wake_.wait(lock, [&] { return has_news(index) || awake_; });
        asleep_--;
    }
    crowd.woke(Clock::now());
}

void Team::help(int index) {
    Crowd crowd;
    while (!stop_) {
        while (index < active_ && take_parts(index + 1) > 0) {
        }
        wait_for_work(index, crowd);
        if (index >= active_) {
            std::unique_lock<std::mutex> lock(mutex_);
            rest_.wait(lock, [&] { return stop_ || index < active_; });
            crowd.woke(Clock::now());
        }
    }
}

} // namespace luce
