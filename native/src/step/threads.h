// A team is the CPU threads that share one op's work. Each has parts of its own, side by side, so that what they
// read stays in its near cache from step to step, and whoever has done its own takes those of others. So a thread
// that is not running, since a neighbour has its CPU, delays no more than the part that it holds. (ggml's
// threads meet after every op, so all wait for such a thread at every op: a step of 200 ops then takes 200
// times a scheduler's slice.) Where the caller waits longer for such parts than helpers save it, fewer of them take
// part for a while. After a job a helper spins for longer than a caller takes between two steps of a text, and then sleeps;
// where a neighbour wants its CPU it sleeps much sooner.
#pragma once

#include <array>
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

    // A Place has parts of a job, and what they call. Threads come to their own place first. There are a few at most, since
    // a thread looks at all of them before it waits.
    struct alignas(64) Place {
        // It holds the job's serial (32 bits), the next part (16) and the end of the parts (16). It is one word, so that a
        // late thread cannot take a part of a job that it has not seen. What follows is read by holders of a part only,
        // for whom the job waits.
        std::atomic<uint64_t> parts{0};
        Call call = nullptr;
        const void *context = nullptr;
    };
    static constexpr int MOST_PLACES = 8;

    // A Crowd is what a helper knows of neighbours on its CPU.
    class Crowd {
    public:
        bool calm(Clock::time_point now);
        void woke(Clock::time_point now); // it has been asleep

    private:
        Clock::time_point seen_ = Clock::now(),
                          until_; // these are when it looked last, and when it is calm again
        Clock::duration ran_{}, lasts_{};
    };

    void run(int n_parts, Call call, const void *context);
    void give(int n_parts, Call call, const void *context);
    Clock::time_point wake_helpers();
    int place_of(int thread) const;
    bool take_part(Place &place, bool first);
    int take_parts(int thread);
    void report(int n);
    void help(int index);
    bool has_news(int index) const;
    bool spin(int index, Crowd &crowd);
    void wait_for_work(int index, Crowd &crowd);
    void wait_for_parts(int n_parts);
    void weigh(Clock::duration took, Clock::duration waited, int taken, int n_parts);
    void adjust(bool stalled);

    std::array<Place, MOST_PLACES> places_;

    alignas(64) std::atomic<int> done_{0}; // helpers have done so many parts
    std::atomic<bool> waiting_{false}; // the caller is asleep

    // What all read at each job and seldom write: as many helpers take parts, as many sleep, whether they may, and
    // where the caller is.
    alignas(64) std::atomic<int> active_{0};
    std::atomic<int> asleep_{0};
    std::atomic<bool> awake_{false}, stop_{false};
    std::atomic<int> callers_cpu_{-2}; // it is the one on which the last job began

    // The caller alone has these. The number of active helpers is halved when they cost more than they save, and doubled
    // after `patience_` jobs.
    alignas(64) uint32_t serial_ = 0;
    int calm_ = 0, patience_ = 0; // both count jobs
    Clock::duration credit_; // it is what they saved lately, less what waiting for them and waking them took
    Clock::time_point woken_; // it is when sleeping helpers were woken last

    // What a part threw; mutex_ guards it until done_ says that all have returned.
    std::exception_ptr failure_;
    std::vector<std::thread> helpers_;
    std::mutex mutex_;
    // Helpers without work, helpers without a place, and the caller wait on these.
    std::condition_variable wake_, rest_, finished_;
};

} // namespace luce
