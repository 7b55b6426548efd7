#include "engine/stage_thread.h"

#include <utility>

namespace luce {

StageThread::~StageThread() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void StageThread::enqueue(std::function<void()> work) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        waiting_.push_back(std::move(work));
        given_++;
    }
    changed_.notify_all();
}

uint64_t StageThread::given() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return given_;
}

void StageThread::follow(StageThread &ahead) {
    enqueue([&ahead, n = ahead.given()] { ahead.wait(n); });
}

void StageThread::wait(uint64_t n) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= n; });
}

void StageThread::finish() {
    wait(given());
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const std::exception_ptr failure = std::exchange(failure_, nullptr)) {
        std::rethrow_exception(failure);
    }
}

void StageThread::serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        changed_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
        if (waiting_.empty()) {
            return;
        }
        const std::function<void()> work = std::move(waiting_.front());
        waiting_.pop_front();
        if (!failure_) {
            lock.unlock();
            std::exception_ptr failure;
            try {
                std::this_thread::sleep_for(delay_);
                work();
            } catch (...) {
                failure = std::current_exception();
            }
            lock.lock();
            failure_ = failure;
        }
        done_++;
        changed_.notify_all();
    }
}

} // namespace luce
