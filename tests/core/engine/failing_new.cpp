// operator new for a process that this is preloaded into: of the allocations that code in one range of addresses makes
// on the thread that armed it, the one after `passed` others fails, and with `on` all after it too. arm_others() does so to all
// other threads, and there all after it fail.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

static thread_local long left = -1;
static thread_local bool all, failed;
static thread_local uintptr_t begin, end;
static thread_local bool arms_others;
static std::atomic<long> others_left{-1}, others_failed{0};
static std::atomic<uintptr_t> others_begin, others_end;

extern "C" void arm(long passed, int on, uintptr_t first, uintptr_t last) {
    left = passed;
    all = on != 0;
    failed = false;
    begin = first;
    end = last;
}

// Whether none has failed since.
extern "C" int disarm() {
    left = -1;
    return !failed;
}

extern "C" void arm_others(long passed, uintptr_t first, uintptr_t last) {
    arms_others = true;
    others_begin = first;
    others_end = last;
    others_failed = 0;
    others_left = passed;
}

// Returns how many have failed since.
extern "C" long disarm_others() {
    others_left = -1;
    return others_failed;
}

static void *take(size_t size, const void *caller) {
    const auto from = reinterpret_cast<uintptr_t>(caller);
    if (others_left >= 0 && !arms_others && others_begin <= from && from < others_end) {
        if (others_left == 0) {
            others_failed++;
            throw std::bad_alloc();
        }
        others_left--;
    }
    if (left >= 0 && begin <= from && from < end && left-- == 0) {
        failed = true;
        left = all ? 0 : -1;
        throw std::bad_alloc();
    }
    void *memory = malloc(size == 0 ? 1 : size);
    if (memory == nullptr) {
        throw std::bad_alloc();
    }
    return memory;
}

void *operator new(size_t size) {
    return take(size, __builtin_return_address(0));
}
void *operator new[](size_t size) {
    return take(size, __builtin_return_address(0));
}
void operator delete(void *memory) noexcept {
    free(memory);
}
void operator delete[](void *memory) noexcept {
    free(memory);
}
void operator delete(void *memory, size_t) noexcept {
    free(memory);
}
void operator delete[](void *memory, size_t) noexcept {
    free(memory);
}
