// Faults that luce's tests ask for, one at a time (luce_fault in abi/test_hooks.h): a device's failure, and memory that lacks in
// the middle of a step, cannot be had on demand. Nothing else sets one, and then a point costs a load.
#pragma once

#include <atomic>
#include <cstdint>

namespace luce {

enum class Fault : int32_t {
    none,
    graph, // it throws std::bad_alloc while a graph is being built
    size, // a graph that was built does not fit the compute buffer
    op, // it fails with E_DEVICE where one of luce's ops is to run in a step, is enqueued, or captured
    launch, // it fails with E_DEVICE where what was captured of a step is to be launched
    wait, // it fails with E_DEVICE where the host waits for the device
    move, // it fails with E_DEVICE where a matrix of an expert is to be copied to a slot
    leave, // it fails with E_DEVICE where a portion of a checkpoint is to be copied to the host
};

// `after`: how many such points go by before the one that fails. Fault::none takes back what was asked for.
void ask_for(Fault fault, uint64_t after);
// Whether this is the point that fails. It fails once.
bool fails_here(Fault fault);

} // namespace luce
