// Host memory for what leaves a GPU for a while, of up to gigabytes. The driver allocates pinned memory slowly (1.2 s for 2 GiB,
// 0.1 s for 160 MiB on a host of an H200), and all other calls wait meanwhile. Here pages are huge, several threads touch them,
// and what is touched is pinned, which others hardly notice: so it may be done beside a GPU's steps.
#pragma once

#include "model/device.h"

namespace luce {

class HostPages {
public:
    // Fails with E_MEMORY where the host has not so many bytes for `what`. It is asked once for all pages that are reserved
    // together, since that takes as long as to reserve many.
    static void check(const Device &device, uint64_t size, const char *what);
    // Reserves pages for `what`, or on a CPU allocates them. E_MEMORY where that cannot be.
    HostPages(const Device &device, size_t size, const char *what);
    ~HostPages();
    HostPages(const HostPages &) = delete;
    HostPages &operator=(const HostPages &) = delete;

    uint8_t *data() const { return data_; }
    // Has the system give the pages, and lets a GPU's copies reach them by themselves. Where it may not pin them they are
    // copied more slowly. Any thread may call it, once, before anything is copied.
    void pin();

private:
    const Device &device_;
    Buffer plain_; // of a CPU
    void *mapped_ = nullptr;
    size_t mapped_size_ = 0, size_ = 0;
    uint8_t *data_ = nullptr;
    bool pinned_ = false;
};

// Shared with copies that are on their way (Step::keep).
using HostMemory = std::shared_ptr<HostPages>;

} // namespace luce
