#include "team.h"

#include <algorithm>
#include <chrono>
#include <utility>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace luce {
namespace {

// This is short beside a step and long beside an op: between the ops of a step helpers stay awake, and after
// it they sleep.
constexpr int SPINS = 2000;
// They count jobs: less than a step, and hundreds of steps.
constexpr int MIN_PATIENCE = 64, MAX_PATIENCE = 1 << 16;
// A helper who slept through a step's first ops may miss the others.
constexpr std::chrono::microseconds WAKE_EVERY(200);
// A wait for a thread that does not run lasts a few milliseconds. So a few of them in a row use up the credit, but one
// in a step of that length does not. One job saves at most as much as few jobs take: what is more is a caller that
// did not run.
constexpr std::chrono::microseconds MOST_CREDIT(20000), MOST_SAVED(500);
constexpr uint64_t PART = 1, PARTS = PART << 16, SERIAL = PARTS << 16, MASK = 0xffff;

bool parts_left(uint64_t job) {
    return (job & MASK) < (job / PARTS & MASK);
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

bool Team::take_part() {
    if (!parts_left(job_.load(std::memory_order_relaxed))) {
        return false;
    }
    const uint64_t job = job_.fetch_add(PART, std::memory_order_acq_rel);
    if (!parts_left(job)) {
        return false; // others were faster; a job has room for as many such takes as there are threads
    }
    try {
        call_(context_, int(job & MASK));
    } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex_);
        failure_ = failure_ ? failure_ : std::current_exception();
    }
    done_++;
    if (waiting_) {
        const std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_one();
    }
    return true;
}

void Team::run(int n_parts, Call call, const void *context) {
    if (active_ == 0 || n_parts == 1) {
        for (int i = 0; i < n_parts; i++) {
            call(context, i);
        }
        adjust(false);
        return;
    }
    call_ = call;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t serial = job_.load(std::memory_order_relaxed) / SERIAL + 1;
    job_.store(serial * SERIAL + uint64_t(n_parts) * PARTS); // it is sequentially consistent with asleep_
    const Clock::time_point began = Clock::now();
    if (asleep_.load() > 0 && began - woken_ > WAKE_EVERY) {
        woken_ = began;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
        }
        wake_.notify_all();
    }
    int taken = 0;
    while (take_part()) {
        taken++;
    }
    const Clock::time_point finished = Clock::now();
    wait_for_parts(n_parts);
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

void Team::wait_for_work(int index) {
    const auto news = [&] { return stop_ || index >= active_ || parts_left(job_.load()); };
    for (int spins = 0; spins < SPINS; spins += awake_ ? 0 : 1) {
        if (news()) {
            return;
        }
        relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_++;
    wake_.wait(lock, [&] { return news() || awake_; });
    asleep_--;
}

void Team::help(int index) {
    while (!stop_) {
        while (index < active_ && take_part()) {
        }
        wait_for_work(index);
        if (index >= active_) {
            std::unique_lock<std::mutex> lock(mutex_);
            rest_.wait(lock, [&] { return stop_ || index < active_; });
        }
    }
}

} // namespace luce
