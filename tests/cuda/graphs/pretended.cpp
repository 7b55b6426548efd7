#include "pretended.h"

#include "common/device_limits.h"
#include "common/kernels.h"
#include "matmul/prompt.h"

#include <ggml-backend-impl.h>
#include <ggml-cuda.h>

#include <cstdio>
#include <cstring>
#include <set>

namespace pretended {
namespace {

constexpr int SHIFT = 40; // a place has room for a terabyte
constexpr uint64_t FIRST = uint64_t(1) << 56;
struct Place {
    std::string name;
    uint64_t bytes;
};
std::vector<Place> places;
std::string launches;
std::set<uint64_t> allowed; // places
// In a launch that left parts, which an op is told of (`parts`, and `added` to a convolution), only the parts
// themselves are read.
int in_parts = 0;

uint64_t number(const void *p) {
    return (reinterpret_cast<uint64_t>(p) - FIRST) >> SHIFT;
}

} // namespace

void *place(const std::string &name, uint64_t bytes) {
    places.push_back({name, bytes});
    return reinterpret_cast<void *>(FIRST + (uint64_t(places.size() - 1) << SHIFT));
}

void forget_after(size_t n) {
    places.resize(n);
}

size_t n_places() {
    return places.size();
}

bool is_placed(const void *p) {
    const uint64_t at = reinterpret_cast<uint64_t>(p);
    return at >= FIRST && (at - FIRST) >> SHIFT < places.size();
}

std::string named(const void *p) {
    if (p == nullptr) {
        return "null";
    }
    if (!is_placed(p)) {
        return "an address that is no tensor's";
    }
    const uint64_t at = reinterpret_cast<uint64_t>(p) - FIRST, offset = at & ((uint64_t(1) << SHIFT) - 1);
    const Place &found = places[at >> SHIFT];
    const std::string beyond = offset > found.bytes ? ", which is beyond it" : "";
    return found.name + (offset == 0 ? "" : "+" + std::to_string(offset)) + beyond;
}

void allow(const std::vector<const void *> &tensors) {
    allowed.clear();
    for (const void *p : tensors) {
        allowed.insert(number(p));
    }
}

void launch(const char *name) {
    launches += (launches.empty() ? "" : "\n") + std::string("    ") + name;
}

void show(const char *field, double value) {
    char text[32];
    snprintf(text, sizeof(text), "%.9g", value);
    launches += std::string(" ") + field + "=" + text;
}

void show(const char *field, int64_t value) {
    launches += std::string(" ") + field + "=" + std::to_string(value);
}

void show(const char *field, const void *value) {
    const bool read = in_parts == 0 || strcmp(field, "parts") == 0;
    const bool known = !is_placed(value) || !read || allowed.count(number(value)) > 0;
    launches += std::string(" ") + field + "=" + named(value) + (known ? "" : " (NOT A SOURCE)");
}

void begin(const char *field) {
    in_parts += in_parts > 0 || strcmp(field, "parts") == 0 || strcmp(field, "added") == 0;
    launches += std::string(" ") + field + "={";
}

void end() {
    in_parts -= in_parts > 0;
    launches += " }";
}

std::string take_launches() {
    std::string taken;
    taken.swap(launches);
    return taken;
}

// ---- a device with an H200's limits ----

namespace {

const char *name(ggml_backend_dev_t) { return "CUDA0"; }
const char *description(ggml_backend_dev_t) { return "a pretended H200"; }
void memory(ggml_backend_dev_t, size_t *free, size_t *total) { *free = *total = size_t(140) << 30; }
enum ggml_backend_dev_type type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }
bool supports(ggml_backend_dev_t, const ggml_tensor *) { return true; }

void *base(ggml_backend_buffer_t buffer) { return buffer->context; }
const char *buffer_name(ggml_backend_buffer_type_t) { return "pretended"; }
size_t alignment(ggml_backend_buffer_type_t) { return 128; }
ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t kind, size_t size) {
    ggml_backend_buffer_i functions{};
    functions.get_base = base;
    return ggml_backend_buffer_init(kind, functions, place(static_cast<const char *>(kind->context), size), size);
}

ggml_backend_buffer_type device_memory, pinned_memory;
ggml_backend_buffer_type_t buffers(ggml_backend_dev_t) { return &device_memory; }
ggml_backend_buffer_type_t pinned_buffers(ggml_backend_dev_t) { return &pinned_memory; }

ggml_backend_device gpu;
size_t one(ggml_backend_reg_t) { return 1; }
ggml_backend_dev_t first(ggml_backend_reg_t, size_t) { return &gpu; }
ggml_backend_reg registered;

} // namespace
} // namespace pretended

ggml_backend_reg_t ggml_backend_cuda_reg() {
    using namespace pretended;
    device_memory = {{buffer_name, allocate, alignment, nullptr, nullptr, nullptr}, &gpu, const_cast<char *>("device")};
    pinned_memory = {{buffer_name, allocate, alignment, nullptr, nullptr, nullptr}, &gpu, const_cast<char *>("pinned")};
    gpu.iface.get_name = name;
    gpu.iface.get_description = description;
    gpu.iface.get_memory = memory;
    gpu.iface.get_type = type;
    gpu.iface.get_buffer_type = buffers;
    gpu.iface.get_host_buffer_type = pinned_buffers;
    gpu.iface.supports_op = supports;
    registered.iface.get_device_count = one;
    registered.iface.get_device = first;
    return &registered;
}

extern "C" void *luce_cuda_stream(ggml_backend_t) {
    return nullptr;
}

namespace luce::cuda {

int compute_capability(int) { return 90; }
int set_device(int) { return 0; }
int current_device() { return 0; }
int device_error() { return 0; }
int cublas_version() { return 130002; }
int gpu_facts(int, GpuFacts &) { return 0; }
void capture_free(void *) {}
void gemm_close(void *) {}
const char *error_text(int) { return "an error"; }
bool is_pinned(void *) { return true; }
bool pin(void *, size_t) { return true; }
void unpin(void *) {}
bool peers(int, int) { return true; }

} // namespace luce::cuda
