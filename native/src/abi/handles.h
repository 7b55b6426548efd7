// Handles are checked. The ABI hands out numbers that look like pointers, but are never dereferenced and
// never reused. So a closed, foreign or made-up handle is an error and not a crash.
// What is open as the process exits stays as it is, and the system takes it: devices, their drivers and other threads'
// calls may end in any order then, so tables of handles and of devices are never destroyed.
#pragma once

#include "abi/status.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace luce {

template <typename Handle, typename Object> class Handles {
public:
    // Returns a new table, which lives as long as the process. `base` keeps the numbers of different kinds apart.
    static Handles &table(const char *what, uintptr_t base) { return *new Handles(what, base); }

    Handle *add(std::shared_ptr<Object> object) {
        std::lock_guard<std::mutex> lock(mutex_);
        next_ += 2;
        objects_[next_] = std::move(object);
        return reinterpret_cast<Handle *>(next_);
    }
    std::shared_ptr<Object> get(Handle *handle) {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto it = objects_.find(reinterpret_cast<uintptr_t>(handle));
        if (it == objects_.end()) {
            fail(LUCE_E_ARG, "%s handle is %s", what_,
                 handle == nullptr ? "null" : "closed, or not a handle");
        }
        return it->second;
    }
    void remove(Handle *handle) {
        const std::shared_ptr<Object> last = get(handle); // the object is destroyed outside the lock
        std::lock_guard<std::mutex> lock(mutex_);
        objects_.erase(reinterpret_cast<uintptr_t>(handle));
    }

private:
    Handles(const char *what, uintptr_t base) : what_(what), next_(base) {}
    ~Handles() = delete;

    const char *what_;
    std::mutex mutex_;
    std::unordered_map<uintptr_t, std::shared_ptr<Object>> objects_;
    uintptr_t next_;
};

} // namespace luce
