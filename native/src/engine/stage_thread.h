// A thread that does what a stage is given, in order: for tests it makes of a CPU's stage what a GPU's stream is, so that a
// wait that is missing between stages shows in what they compute.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace luce {

class StageThread {
public:
    explicit StageThread(std::chrono::microseconds delay) : delay_(delay), thread_([this] { serve(); }) {}
    ~StageThread();

    void enqueue(std::function<void()> work);
    // What is enqueued from now on comes behind all that `ahead` was given so far.
    void follow(StageThread &ahead);
    // Waits until so much was done, or all. Work behind a failure is left out. finish() throws what failed, once.
    void wait(uint64_t n);
    void finish();
    uint64_t given(); // it counts

private:
    void serve();

    const std::chrono::microseconds delay_; // ahead of each work
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> waiting_;
    uint64_t given_ = 0, done_ = 0;
    bool stop_ = false;
    std::exception_ptr failure_;
    std::thread thread_;
};

} // namespace luce
