// Has a thread's asynchronous copies into shared memory, on a CPU. They are done as late as they may be, so that a wait
// that counts wrongly, or a place that is filled too early, shows.
#pragma once

#include "cuda_runtime.h"

#include <deque>

namespace emulated {

struct Copy {
    void *to;
    const void *from;
    size_t bytes;
};
// The copies of each thread of a block since its last commit, and its groups of copies that are not done.
inline std::vector<Copy> uncommitted[1024];
inline std::deque<std::vector<Copy>> groups[1024];

} // namespace emulated

inline void __pipeline_memcpy_async(void *to, const void *from, size_t bytes) {
    emulated::uncommitted[threadIdx.x].push_back({to, from, bytes});
}
inline void __pipeline_commit() {
    emulated::groups[threadIdx.x].push_back(std::move(emulated::uncommitted[threadIdx.x]));
    emulated::uncommitted[threadIdx.x].clear();
}
inline void __pipeline_wait_prior(size_t n) {
    auto &groups = emulated::groups[threadIdx.x];
    for (; groups.size() > n; groups.pop_front()) {
        for (const emulated::Copy &copy : groups.front()) {
            memcpy(copy.to, copy.from, copy.bytes);
        }
    }
}
