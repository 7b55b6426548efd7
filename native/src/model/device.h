// Lists the devices, and says what their memory and backends are. Only this file knows which backends ggml was built
// with.
#pragma once

#include "abi/status.h"
#include "model/recode.h"
#include "model/split.h"

#include <ggml-backend.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace luce {

struct Device {
    std::string name; // it is "cpu", or "cuda:0" and so on
    ggml_backend_dev_t dev = nullptr;
    bool gpu = false;
    int index = 0; // it is the GPU's number, as CUDA counts
    uint64_t pretended =
        0; // of a device of tests, which the CPU stands in for: the memory that it seems to have free

    // Whether weights are copied there. (A CPU has them mapped.)
    bool holds_weights() const { return gpu || pretended > 0; }

    ggml_backend_buffer_type_t buffer_type() const; // it is that of plain CPU memory, or of the GPU's
    // Bytes that can be had now, and all. Of a CPU that is what the system calls available, within the limit of
    // the process's control group.
    void memory(uint64_t *free, uint64_t *total) const;
    std::string description() const;
    // Returns in words what beside the build decides the bits of what is computed here: "NVIDIA H200 with compute
    // capability 9.0, 132 multiprocessors and cuBLAS 13.0.2", "a CPU with glibc 2.36".
    std::string arithmetic() const;
};

struct DeviceLimits;
// Returns what a GPU can do, which is read once. E_DEVICE where it does not answer.
DeviceLimits limits_of(const Device &device);

// Returns what luce.h says of a GPU, without its struct_size. E_ARG where the device is none.
luce_gpu_info gpu_info(const Device &device);

// Runs part(0) .. part(n - 1) side by side, on as many threads as are to be had; the calling one does the rest.
void run_parts(size_t n, const std::function<void(size_t)> &part);

// Returns the bytes a second that a device's memory gives (luce_device_bandwidth).
uint64_t bandwidth_of(const Device &device, int n_threads);

// Returns all devices that luce runs on; the first is what "auto" takes. GPUs whose compute capability is below 8.0 are
// left out: luce's kernels have instructions that those lack.
const std::deque<Device> &devices();

// For tests: adds a device that the CPU stands in for, with so much memory, or takes all such back where the name is empty.
void pretend_device(const std::string &name, uint64_t memory);

// Says why GPUs may be missing among them, in a line; "" where none is.
const std::string &no_gpu();

// Returns the device of a name, which is null or "auto", "cpu", "cuda" (the first), or "cuda:N". E_ARG lists
// what there is.
const Device &find_device(const char *name);
// Returns those of a list, "cuda:0,cuda:1", or of one name.
std::vector<const Device *> find_devices(const char *names);

// CUDA launches on the calling thread's current device, which other code may change between any two calls of luce.
void make_current(const Device &device); // each call does this before whatever it launches
void check_current(const Device &device); // it fails with E_INTERNAL where launches would go to another one
// Tests call it: it makes GPU `index` current where there is one, and no device of luce's.
void leave_current(int index);

// Held while a step is captured, and while a backend or a handle of cuBLAS is made or given back: those wait for the
// whole device, which ends the captures of other threads.
std::mutex &device_lock();

// Work of a GPU that failed takes all along that the process has on it, and ggml ends the process that touches it. So
// it is noted, calls that would touch it are E_DEVICE (check_works), and what lies there is left to the system.
[[noreturn]] void fail_device(const Device &device, const char *what, int error);
bool works(const Device &device);
void check_works(const Device &device);

struct BackendFree {
    void operator()(ggml_backend_t b) const;
};
struct BufferFree {
    void operator()(ggml_backend_buffer_t b) const;
};
struct EventFree {
    void operator()(ggml_backend_event_t e) const;
};
struct AllocatorFree {
    const Device *device;
    void operator()(struct ggml_gallocr *a) const;
};
using Backend = std::unique_ptr<struct ggml_backend, BackendFree>;
using Buffer = std::unique_ptr<struct ggml_backend_buffer, BufferFree>;
using Event = std::unique_ptr<struct ggml_backend_event, EventFree>;
using GraphAllocator = std::unique_ptr<struct ggml_gallocr, AllocatorFree>;

// Events mark places of a GPU's streams. A CPU has none: then it is null.
Event make_event(const Device &device);
// Its buffer i lies on devices[i], and is of type i.
GraphAllocator new_graph_allocator(const std::vector<const Device *> &devices,
                                   std::vector<ggml_backend_buffer_type *> types);
inline GraphAllocator new_graph_allocator(const Device &device) {
    return new_graph_allocator({&device}, {device.buffer_type()});
}

// Makes one stream of work on a device. On a CPU it has n_threads threads.
Backend make_backend(const Device &device, int n_threads);

// Chooses on a CPU between the row-invariant kernels (steps) and the fast tiled ones (prefill). step.h says
// which graph has which.
void set_row_invariant(ggml_backend_t backend, const Device &device, bool on);

Buffer allocate(const Device &device, size_t size, const char *what);

// Allocates host memory for `what`, which on a GPU is pinned: its kernels and copies read and write it too. E_MEMORY
// where the host has not so much.
Buffer pinned(const Device &device, size_t size, const char *what);

// Fails with E_MEMORY and both figures when `need` bytes are not free on the device.
void check_memory(const Device &device, uint64_t need, const char *what);

// Copies host bytes into device tensors through two pinned buffers, so that reading the file and the transfer
// overlap. progress gets the bytes done, and returns false to cancel (E_CANCELLED).
struct Upload {
    ggml_tensor *tensor;
    const uint8_t *data;
    uint64_t size; // those that arrive
    Recoding recoding;
    // Where not null, `tensor` is passed through, and its permuted weights go there.
    ggml_tensor *packed = nullptr;
    int64_t n_packed = 1; // it counts the matrices that it holds, each of which is permuted alone
    ggml_tensor *copy = nullptr; // where not null, the packed weights are written out there as F16
    // Where not null, `packed` lies in host memory, and what is permuted passes through this, {bytes} I8 on the device: single
    // values that a kernel writes to the host are slow.
    ggml_tensor *through_home = nullptr;
    Slice slice = {}; // of `data`, where the tensor is a part of what lies there
};
void upload(const Device &device, const std::vector<Upload> &items,
            const std::function<bool(uint64_t)> &progress);

} // namespace luce
