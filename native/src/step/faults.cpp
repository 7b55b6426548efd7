#include "step/faults.h"

#include <atomic>

namespace luce {

static std::atomic<int32_t> asked{int32_t(Fault::none)};
static std::atomic<uint64_t> to_pass{0};

void ask_for(Fault fault, uint64_t after) {
    asked = int32_t(Fault::none);
    to_pass = after;
    asked = int32_t(fault);
}

bool fails_here(Fault fault) {
    if (asked.load(std::memory_order_relaxed) != int32_t(fault) || to_pass.fetch_sub(1) != 0) {
        return false;
    }
    asked = int32_t(Fault::none);
    return true;
}

} // namespace luce
