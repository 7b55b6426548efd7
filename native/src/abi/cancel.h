// An engine has a flag that asks it to stop. Another thread or a signal handler may raise it, so raising it takes no
// lock and no memory.
#pragma once

#include <atomic>
#include <cstdint>

namespace luce {

class CancelFlag {
public:
    CancelFlag(); // it fails with E_MEMORY when MOST engines are open
    ~CancelFlag();
    CancelFlag(const CancelFlag &) = delete;
    CancelFlag &operator=(const CancelFlag &) = delete;

    void name(uintptr_t handle); // it says what raise() is called with
    bool is_raised() const;
    bool take(); // it returns whether it was raised, and lowers it

    // Raises the flag of a handle, and returns false when there is none. It is async-signal-safe.
    static bool raise(uintptr_t handle);

private:
    static constexpr int MOST = 1024;
    struct Entry {
        std::atomic<bool> used{false}, raised{false};
        std::atomic<uintptr_t> handle{0};
    };
    static Entry entries_[MOST];
    Entry *entry_ = nullptr;
};

} // namespace luce
