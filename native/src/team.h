// A team is the CPU threads that share one op's work. Whoever comes first takes the next part. So a thread
// that is not running, since a neighbour has its CPU, delays no more than the part that it holds. (ggml's
// threads meet after every op, so all wait for such a thread at every op: a step of 200 ops then takes 200
// times a scheduler's slice.) Where the caller waits longer for such parts than helpers save it, fewer of them take
// part for a while.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace luce {

void relax(); // it says to the processor that the thread spins

class Team {
public:
    explicit Team(int n_threads); // the caller of run() is one of them
    ~Team();
    Team(const Team &) = delete;
    Team &operator=(const Team &) = delete;

    int n_threads() const { return int(helpers_.size()) + 1; }

    // Calls part(0), .. part(n_parts - 1), each once, on any of the threads, and returns when all have
    // returned. There is one caller at a time. If parts throw, the first thing thrown is thrown here after
    // all have returned.
    template <class Part> void run(int n_parts, const Part &part) {
        run(n_parts, [](const void *context, int i) { (*static_cast<const Part *>(context))(i); }, &part);
    }

    // While this is on, helpers wait for jobs without sleeping, and those asleep wake. It is for jobs that follow each other
    // after times that the caller spends waiting too.
    void stay_awake(bool on);

private:
    using Clock = std::chrono::steady_clock;
    using Call = void (*)(const void *context, int part);
    void run(int n_parts, Call call, const void *context);
    bool take_part(); // it returns false when none is left
    void help(int index);
    void wait_for_work(int index);
    void wait_for_parts(int n_parts);
    void weigh(Clock::duration took, Clock::duration waited, int taken, int n_parts);
    void adjust(bool stalled);

    // job_ holds serial (32 bits), parts (16) and the next part (16). It is one word, so that a late thread
    // cannot take a part of a job that it has not seen. call_ and context_ are read by holders of a part
    // only, for whom the job waits.
    std::atomic<uint64_t> job_{0};
    alignas(64) std::atomic<int> done_{0};
    Call call_ = nullptr;
    const void *context_ = nullptr;
    // What a part threw; mutex_ guards it until done_ says that all have returned.
    std::exception_ptr failure_;

    // As many helpers take parts. The number is halved when they cost more than they save, and doubled after
    // `patience_` jobs.
    std::atomic<int> active_{0};
    Clock::duration credit_; // it is what they saved lately, less what the caller waited for them
    int calm_ = 0, patience_ = 0; // both count jobs

    std::vector<std::thread> helpers_;
    alignas(64) std::atomic<int> asleep_{0};
    std::atomic<bool> awake_{false};
    Clock::time_point woken_; // it is when sleeping helpers were woken last
    std::atomic<bool> waiting_{false}; // the caller is asleep
    std::mutex mutex_;
    // Helpers without work, helpers without a place, and the caller wait on these.
    std::condition_variable wake_, rest_, finished_;
    std::atomic<bool> stop_{false};
};

} // namespace luce
