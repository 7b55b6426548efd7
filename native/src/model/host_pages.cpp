#include "model/host_pages.h"

#ifdef LUCE_USE_CUDA
#include "common/kernels.h"
#endif

#include <ggml-backend.h>
#include <sys/mman.h>

#include <algorithm>
#include <thread>

namespace luce {
namespace {

constexpr size_t HUGE_PAGE = size_t(2) << 20, SMALL_PAGE = 4096;
constexpr size_t WORTH_A_THREAD = size_t(32) << 20; // so much is touched in some milliseconds
constexpr size_t MOST_THREADS = 8;

// Has the system give all pages of a range.
void touch(uint8_t *begin, const uint8_t *end) {
    for (uint8_t *page = begin; page < end; page += SMALL_PAGE) {
        *static_cast<volatile uint8_t *>(page) = 0;
    }
}

size_t round_up(size_t size, size_t to) {
    return (size + to - 1) / to * to;
}

} // namespace

void HostPages::check(const Device &device, uint64_t size, const char *what) {
    if (device.gpu) { // a CPU's allocation tells
        check_memory(find_device("cpu"), size, what);
    }
}

HostPages::HostPages(const Device &device, size_t size, const char *what) : device_(device) {
    if (!device.gpu) {
        plain_ = pinned(device, std::max<size_t>(size, 1), what); // ggml allocates no 0 bytes
        data_ = static_cast<uint8_t *>(ggml_backend_buffer_get_base(plain_.get()));
        return;
    }
    size_ = round_up(std::max<size_t>(size, 1), HUGE_PAGE);
    mapped_size_ = size_ + HUGE_PAGE; // some of it is left before a place that is aligned
    mapped_ = mmap(nullptr, mapped_size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) {
        mapped_ = nullptr;
        fail(LUCE_E_MEMORY, "allocating %s of host memory for %s failed", human_bytes(size).c_str(), what);
    }
    data_ = reinterpret_cast<uint8_t *>(round_up(reinterpret_cast<uintptr_t>(mapped_), HUGE_PAGE));
    madvise(data_, size_, MADV_HUGEPAGE); // where there are none, small ones serve
}

HostPages::~HostPages() {
#ifdef LUCE_USE_CUDA
    if (pinned_ && works(device_)) {
        try {
            make_current(device_); // any thread may free it
            cuda::unpin(data_);
        } catch (const Error &) {
            // a device that has failed takes nothing back
        }
    }
#endif
    if (mapped_ != nullptr && (!pinned_ || works(device_))) { // a GPU that failed may still be given it
        munmap(mapped_, mapped_size_);
    }
}

void HostPages::pin() {
    if (mapped_ == nullptr) {
        return;
    }
    const size_t cores = std::max(1u, std::thread::hardware_concurrency());
    const size_t n = std::max<size_t>(1, std::min({MOST_THREADS, cores, size_ / WORTH_A_THREAD}));
    const size_t part = round_up(size_ / n, HUGE_PAGE);
    run_parts((size_ + part - 1) / part,
              [&](size_t i) { touch(data_ + i * part, data_ + std::min(size_, (i + 1) * part)); });
#ifdef LUCE_USE_CUDA
    make_current(device_); // the thread's own may be a GPU that luce does not use
    pinned_ = cuda::pin(data_, size_);
#endif
}

} // namespace luce
