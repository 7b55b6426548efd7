#include "model/device.h"

#include <ggml-alloc.h>
#include <ggml-cpu.h>
#ifdef LUCE_USE_CUDA
#include "common/device_limits.h"
#include "common/kernels.h"
#include "matmul/prompt.h"
#include "matmul/quantised.h"

#include <ggml-cuda.h>

extern "C" void *luce_cuda_stream(ggml_backend_t backend); // cuda_stream.cu defines it
#endif

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <fstream>
#include <sstream>
#include <thread>
#ifdef __GLIBC__
#include <gnu/libc-version.h>
#endif

namespace luce {
namespace {

void forward_log(ggml_log_level level, const char *text, void *) {
    static const int levels[] = {0, 0, 1, 2, 3, 0}; // these are none, debug, info, warn, error, cont
    std::string line(text);
    while (!line.empty() && line.back() == '\n') {
        line.pop_back();
    }
    if (!line.empty()) {
        log(level >= 0 && level <= 5 ? levels[level] : 0, "ggml: %s", line.c_str());
    }
}

std::string left_out; // it says which GPUs luce does not run on, and why: "; cuda:0 (...) has ..."

// Bytes of host memory that can be had without swapping, as Linux estimates it; 0 where the system does not say.
uint64_t available_memory() {
    std::ifstream file("/proc/meminfo");
    for (std::string line; std::getline(file, line);) {
        if (line.compare(0, 13, "MemAvailable:") == 0) {
            return std::strtoull(line.c_str() + 13, nullptr, 10) * 1024;
        }
    }
    return 0;
}

// Bytes that the control group of this process may still take; UINT64_MAX where it has no limit. Of the files that it has
// read, the kernel gives up those that nobody read again: they count as free.
uint64_t group_memory() {
    const auto number = [](const char *path) {
        std::ifstream file(path);
        uint64_t value = UINT64_MAX; // "max" is no number
        file >> value;
        return file ? value : UINT64_MAX;
    };
    const uint64_t limit = number("/sys/fs/cgroup/memory.max"),
                   taken = number("/sys/fs/cgroup/memory.current");
    if (limit == UINT64_MAX || taken == UINT64_MAX) {
        return UINT64_MAX;
    }
    std::ifstream stat("/sys/fs/cgroup/memory.stat");
    uint64_t given_up = 0, value = 0;
    for (std::string name; stat >> name >> value;) {
        given_up = name == "inactive_file" ? value : given_up;
    }
    return limit - std::min(limit, taken - std::min(taken, given_up));
}

std::deque<Device> list_devices() {
    ggml_log_set(forward_log, nullptr);
    std::deque<Device> found;
#ifdef LUCE_USE_CUDA
    ggml_backend_reg_t reg = ggml_backend_cuda_reg();
    for (size_t i = 0; i < ggml_backend_reg_dev_count(reg); i++) {
        ggml_backend_dev_t dev = ggml_backend_reg_dev_get(reg, i);
        if (const int capability = cuda::compute_capability(int(i)); capability >= 80) {
            found.push_back({format("cuda:%zu", i), dev, true, int(i)});
        } else {
            left_out += format("; cuda:%zu (%s) has compute capability %d.%d, and luce needs 8.0", i,
                               ggml_backend_dev_description(dev), capability / 10, capability % 10);
        }
    }
#endif
    found.push_back({"cpu", ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0), false});
    return found;
}

// Copies n units with several threads, since a copy from a mapping is bound by page faults and threads fault in
// parallel.
void parallel_recode(const Recoding &how, uint8_t *dst, const uint8_t *src, size_t n) {
    const size_t n_threads = std::max<size_t>(
        1, std::min<size_t>({4, n * how.bytes_to() >> 20, std::thread::hardware_concurrency()}));
    const auto part = [=](size_t i) {
        const size_t lo = n * i / n_threads, hi = n * (i + 1) / n_threads;
        recode(how, src + lo * how.bytes_from(), dst + lo * how.bytes_to(), hi - lo);
    };
    run_parts(n_threads, part);
}

} // namespace

void run_parts(size_t n, const std::function<void(size_t)> &part) {
    std::vector<std::thread> threads;
    threads.reserve(n);
    size_t next = 1;
    try {
        for (; next < n; next++) {
            threads.emplace_back(part, next);
        }
    } catch (const std::exception &) {
        // No more threads are to be had, or no memory for them, and this one does the rest.
    }
    for (; next < n; next++) {
        part(next);
    }
    part(0);
    for (auto &t : threads) {
        t.join();
    }
}

// It is never destroyed (handles.h).
static std::deque<Device> &listed() {
    static auto &list = *new std::deque<Device>(list_devices());
    return list;
}

const std::deque<Device> &devices() {
    return listed();
}

void pretend_device(const std::string &name, uint64_t memory) {
    std::deque<Device> &list = listed();
    while (name.empty() && list.back().pretended > 0) {
        list.pop_back();
    }
    if (!name.empty()) {
        list.push_back({name, find_device("cpu").dev, false, 0, memory});
    }
}

const Device &find_device(const char *name) {
    const std::string wanted = name == nullptr ? "auto" : name;
    const auto &list = devices();
    for (const Device &d : list) {
        if (wanted == "auto" || wanted == d.name || (wanted == "cuda" && d.gpu)) {
            return d;
        }
    }
    std::string have;
    for (const Device &d : list) {
        have += (have.empty() ? "" : ", ") + d.name;
    }
    const std::string hint = wanted.compare(0, 4, "cuda") == 0 ? no_gpu() : "";
    fail(LUCE_E_ARG, "no device '%s': this machine has %s%s%s", wanted.c_str(), have.c_str(),
         hint.empty() ? "" : "; ", hint.c_str());
}

std::vector<const Device *> find_devices(const char *names) {
    std::vector<const Device *> found;
    std::stringstream list(names == nullptr ? "auto" : names);
    for (std::string name; std::getline(list, name, ',');) {
        found.push_back(&find_device(name.c_str()));
    }
    return found.empty() ? std::vector<const Device *>{&find_device("")} : found;
}

const std::string &no_gpu() {
    static const std::string said = [] {
        devices();
#ifdef LUCE_USE_CUDA
        std::string why = left_out.empty() ? "" : left_out.substr(2);
        if (const int error = cuda::device_error(); error != 0 && devices().size() == 1 && why.empty()) {
            why = format("CUDA finds no GPU: %s", cuda::error_text(error));
        }
        return why;
#else
        return std::string("this luce was built without CUDA (" LUCE_CUDA_WHY ")");
#endif
    }();
    return said;
}

// The device that this thread's launches go to, as luce knows it: its address, and on a GPU what CUDA says too.
static thread_local const Device *current = nullptr;

void make_current(const Device &device) {
#ifdef LUCE_USE_CUDA
    if (device.gpu) {
        if (const int error = cuda::set_device(device.index); error != 0) {
            fail(LUCE_E_DEVICE, "%s: %s", device.name.c_str(), cuda::error_text(error));
        }
    }
#endif
    current = &device;
}

void check_current(const Device &device) {
    bool same = current == &device;
#ifdef LUCE_USE_CUDA
    same = same && (!device.gpu || cuda::current_device() == device.index);
#endif
    if (!same) {
        fail(LUCE_E_INTERNAL, "a launch for %s would go to another device", device.name.c_str());
    }
}

void leave_current([[maybe_unused]] int index) {
#ifdef LUCE_USE_CUDA
    for (const Device &device : devices()) {
        if (device.gpu && device.index == index) {
            cuda::set_device(index);
        }
    }
#endif
    current = nullptr;
}

ggml_backend_buffer_type_t Device::buffer_type() const {
    return gpu ? ggml_backend_dev_buffer_type(dev) : ggml_backend_cpu_buffer_type();
}

void Device::memory(uint64_t *free, uint64_t *total) const {
    size_t f = 0, t = 0;
    ggml_backend_dev_memory(dev, &f, &t);
    // ggml calls all of a CPU's memory free.
    const uint64_t available = gpu ? 0 : available_memory();
    *free = available != 0 ? std::min({uint64_t(f), available, group_memory()}) : f;
    *total = t;
    if (pretended > 0) {
        *free = *total = pretended;
    }
}

std::string Device::description() const {
    return ggml_backend_dev_description(dev);
}

// Of a CPU the build says all else: it compiles for the instructions that it takes.
static std::string cpu_arithmetic() {
#ifdef __GLIBC__
    return format("a CPU with glibc %s", gnu_get_libc_version());
#else
    return "a CPU";
#endif
}

#ifdef LUCE_USE_CUDA
DeviceLimits limits_of(const Device &device) {
    DeviceLimits limits;
    if (const int error = cuda::device_limits(device.index, limits); error != 0) {
        fail(LUCE_E_DEVICE, "%s: %s", device.name.c_str(), cuda::error_text(error));
    }
    return limits;
}
#endif

luce_gpu_info gpu_info(const Device &device) {
#ifdef LUCE_USE_CUDA
    if (device.gpu) {
        luce_gpu_info info{};
        cuda::GpuFacts facts;
        if (const int error = cuda::gpu_facts(device.index, facts); error != 0) {
            fail(LUCE_E_DEVICE, "%s: %s", device.name.c_str(), cuda::error_text(error));
        }
        static_assert(sizeof(info.pci) == sizeof(facts.pci));
        memcpy(info.pci, facts.pci, sizeof(info.pci));
        info.bandwidth = facts.bandwidth;
        info.capability = cuda::compute_capability(device.index);
        info.multiprocessors = limits_of(device).multiprocessors;
        info.driver_cuda = facts.driver_cuda, info.built_cuda = facts.built_cuda;
        return info;
    }
#endif
    fail(LUCE_E_ARG, "%s is no GPU", device.name.c_str());
}

std::string Device::arithmetic() const {
#ifdef LUCE_USE_CUDA
    if (gpu) {
        const int capability = cuda::compute_capability(index), cublas = cuda::cublas_version();
        return format("%s with compute capability %d.%d, %d multiprocessors and cuBLAS %d.%d.%d",
                      description().c_str(), capability / 10, capability % 10,
                      limits_of(*this).multiprocessors, cublas / 10000, cublas / 100 % 100, cublas % 100);
    }
#endif
    return cpu_arithmetic();
}

std::mutex &device_lock() {
    static std::mutex lock;
    return lock;
}

static std::atomic<bool> gpu_failed{false};

void fail_device(const Device &device, const char *what, [[maybe_unused]] int error) {
#ifdef LUCE_USE_CUDA
    gpu_failed = true;
    fail(LUCE_E_DEVICE, "%s: %s: %s", device.name.c_str(), what, cuda::error_text(error));
#else
    fail(LUCE_E_DEVICE, "%s: %s", device.name.c_str(), what);
#endif
}

bool works(const Device &device) {
    return !device.gpu || !gpu_failed;
}

void check_works(const Device &device) {
    if (!works(device)) {
        fail(LUCE_E_DEVICE, "%s has failed: no more can be done with it in this process",
             device.name.c_str());
    }
}

static bool is_left(ggml_backend_dev_t dev) {
    return gpu_failed && dev != nullptr && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU;
}

void BackendFree::operator()(ggml_backend_t b) const {
    const std::lock_guard<std::mutex> alone(device_lock());
    if (!is_left(ggml_backend_get_device(b))) {
        ggml_backend_free(b);
    }
}

void BufferFree::operator()(ggml_backend_buffer_t b) const {
    if (!is_left(ggml_backend_buft_get_device(ggml_backend_buffer_get_type(b)))) {
        ggml_backend_buffer_free(b);
    }
}

void EventFree::operator()(ggml_backend_event_t e) const {
    if (!gpu_failed) { // a CPU has none
        ggml_backend_event_free(e);
    }
}

void AllocatorFree::operator()(ggml_gallocr *a) const {
    if (!is_left(device->dev)) {
        ggml_gallocr_free(a);
    }
}

Event make_event(const Device &device) {
    return Event(device.gpu ? ggml_backend_event_new(device.dev) : nullptr);
}

GraphAllocator new_graph_allocator(const std::vector<const Device *> &devices,
                                   std::vector<ggml_backend_buffer_type *> types) {
    return GraphAllocator(ggml_gallocr_new_n(types.data(), int(types.size())), AllocatorFree{devices[0]});
}

static Backend start(const Device &device) {
    const std::lock_guard<std::mutex> alone(device_lock());
    return Backend(ggml_backend_dev_init(device.dev, nullptr));
}

Backend make_backend(const Device &device, int n_threads) {
    Backend backend = start(device);
    if (!backend) {
        fail(LUCE_E_DEVICE, "%s: the device could not be started", device.name.c_str());
    }
    if (!device.gpu) {
        ggml_backend_cpu_set_n_threads(backend.get(), n_threads);
    }
    return backend;
}

void set_row_invariant(ggml_backend_t backend, const Device &device, bool on) {
    if (!device.gpu) {
        ggml_backend_cpu_set_use_ref(backend, on);
    }
}

Buffer allocate(const Device &device, size_t size, const char *what) {
    Buffer buffer(ggml_backend_buft_alloc_buffer(device.buffer_type(), std::max<size_t>(size, 64)));
    if (!buffer) {
        fail(LUCE_E_MEMORY, "%s: allocating %s for %s failed", device.name.c_str(), human_bytes(size).c_str(),
             what);
    }
    return buffer;
}

Buffer pinned(const Device &device, size_t size, const char *what) {
    Buffer buffer(ggml_backend_buft_alloc_buffer(
        device.gpu ? ggml_backend_dev_host_buffer_type(device.dev) : ggml_backend_cpu_buffer_type(), size));
    void *base = buffer ? ggml_backend_buffer_get_base(buffer.get()) : nullptr;
    bool there = base != nullptr;
#ifdef LUCE_USE_CUDA
    there = there && (!device.gpu || cuda::is_pinned(base)); // ggml gives other memory where there is none
#endif
    if (!there) {
        fail(LUCE_E_MEMORY, "allocating %s of %shost memory for %s failed", human_bytes(size).c_str(),
             device.gpu ? "pinned " : "", what);
    }
    return buffer;
}

void check_memory(const Device &device, uint64_t need, const char *what) {
    uint64_t free = 0, total = 0;
    device.memory(&free, &total);
    if (need > free) {
        fail(LUCE_E_MEMORY, "%s needs %s on %s, %s are free", what, human_bytes(need).c_str(),
             device.name.c_str(), human_bytes(free).c_str());
    }
}

// Converts from ggml's layout, which has arrived in item.tensor, to that of luce's own matmul.
static void permute([[maybe_unused]] const Device &device, [[maybe_unused]] const Upload &item,
                    [[maybe_unused]] ggml_backend_t backend) {
#ifdef LUCE_USE_CUDA
    const ggml_tensor *w = item.packed;
    make_current(device);
    const int64_t N = w->ne[1] * w->ne[2] / item.n_packed;
    const int64_t from = int64_t(item.size) / item.n_packed, to = rowmm_packed_bytes(w->type, w->ne[0], N);
    void *const base = item.through_home != nullptr ? item.through_home->data : w->data;
    for (int64_t i = 0; i < item.n_packed; i++) {
        const uint8_t *src = static_cast<const uint8_t *>(item.tensor->data) + i * from;
        uint8_t *dst = static_cast<uint8_t *>(base) + i * to;
        if (const int error =
                cuda::rowmm_permute({w->type, w->ne[0], N, src, dst}, luce_cuda_stream(backend));
            error != 0) {
            fail(LUCE_E_DEVICE, "%s: permuting %s failed: %s", device.name.c_str(), w->name,
                 cuda::error_text(error));
        }
    }
    if (item.through_home != nullptr) {
        ggml_backend_tensor_get_async(backend, item.through_home, w->data, 0, size_t(item.n_packed * to));
    }
    if (item.copy != nullptr) {
        const RowmmPermuteArgs args = {w->type, w->ne[0], N, w->data, item.copy->data};
        if (const int error = cuda::rowmm_unpack(args, luce_cuda_stream(backend)); error != 0) {
            fail(LUCE_E_DEVICE, "%s: copying %s failed: %s", device.name.c_str(), w->name,
                 cuda::error_text(error));
        }
    }
#endif
}

void upload(const Device &device, const std::vector<Upload> &items,
            const std::function<bool(uint64_t)> &progress) {
    constexpr size_t slot_size = size_t(32) << 20;
    Backend backend = make_backend(device, 1);
    const Buffer slots[2] = {pinned(device, slot_size, "uploading weights"),
                             pinned(device, slot_size, "uploading weights")};
    uint64_t done = 0;
    int turn = 0;
    std::vector<uint8_t> gathered; // what lies in pieces
    for (const Upload &item : items) {
        const size_t unit = item.recoding.bytes_to(), units = size_t(item.size / unit);
        for (size_t at = 0; at < units; turn ^= 1) {
            const size_t n = std::min(slot_size / unit, units - at);
            auto *slot = static_cast<uint8_t *>(ggml_backend_buffer_get_base(slots[turn].get()));
            const size_t from = item.recoding.bytes_from();
            const uint8_t *data = item.data + item.slice.first + at * from;
            if (item.slice.piece != 0 && item.slice.piece < units * from) {
                gathered.resize(n * from);
                copy_slice(item.slice, item.data, at * from, n * from, gathered.data());
                data = gathered.data();
            }
            // This runs while the other slot is transferred.
            parallel_recode(item.recoding, slot, data, n);
            ggml_backend_synchronize(backend.get());
            ggml_backend_tensor_set_async(backend.get(), item.tensor, slot, at * unit, n * unit);
            at += n;
            done += n * unit;
            if (!progress(done)) {
                ggml_backend_synchronize(backend.get());
                fail(LUCE_E_CANCELLED, "loading was cancelled");
            }
        }
        // It is on the stream of the copies, since the next item may overwrite what is read.
        if (item.packed != nullptr) {
            permute(device, item, backend.get());
        }
    }
    ggml_backend_synchronize(backend.get());
}

} // namespace luce
