// Has what a GPU can do, as plain data. A launch is planned by pure functions of it and of a shape (launch_plan.h of each
// chapter), so that a plan for any card is made, and tested, on any machine.
#pragma once

#include <stdint.h>

namespace luce {

struct DeviceLimits {
    int multiprocessors = 0;
    // These are bytes of shared memory: those of a multiprocessor, those of a block at most, and those that
    // each block loses.
    int shared_sm = 0, shared_block = 0, shared_reserved = 0;
    int registers = 0; // of a multiprocessor, each of 32 bits
    int64_t l2 = 0; // bytes of the cache that all multiprocessors share
    bool wgmma = false; // the device has wgmma, and the kernels were compiled for it
    bool bulk_copies = false; // one thread's copy of a whole row completes on a barrier, likewise
};

namespace cuda {
// Finds what a device can do, or the calling thread's current one. It is read on the first call for a device, and kept.
// These return a cudaError_t as int.
int device_limits(int device, DeviceLimits &limits);
int device_limits(DeviceLimits &limits);

// What a report on a device says of it (luce_gpu_info in luce.h).
struct GpuFacts {
    char pci[16] = {};
    uint64_t bandwidth = 0; // bytes a second by clock and bus; 0 where the driver does not say
    int driver_cuda = 0, built_cuda = 0;
};
int gpu_facts(int device, GpuFacts &facts);
} // namespace cuda

} // namespace luce
