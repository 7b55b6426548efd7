// Measures how fast a device's memory is read, so that users see what a step could cost at the least.
#include "model/device.h"
#include "model/model.h"

#include <algorithm>
#include <chrono>
#include <vector>

namespace luce {
namespace {

constexpr uint64_t MOST = uint64_t(1) << 29, LEAST = uint64_t(1) << 26; // bytes of an array: caches hold less
constexpr int RUNS = 6; // the first of which warms up

// Returns the seconds of the fastest run.
template <class Run> double fastest(const Run &run) {
    double best = 0;
    for (int i = 0; i < RUNS; i++) {
        const auto begin = std::chrono::steady_clock::now();
        run();
        const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        best = i <= 1 ? took : std::min(best, took);
    }
    return best;
}

double cpu_seconds(uint64_t bytes, int n_threads) {
    const size_t n = size_t(bytes / sizeof(uint64_t));
    const std::unique_ptr<uint64_t[]> values(new uint64_t[n]); // each thread touches its own part first
    std::vector<uint64_t> sums(size_t(n_threads) * 8); // a cache line each
    const auto begin = [&](size_t i) { return values.get() + n * i / size_t(n_threads); };
    run_parts(size_t(n_threads), [&](size_t i) { std::fill(begin(i), begin(i + 1), uint64_t(i + 1)); });
    return fastest([&] {
        run_parts(size_t(n_threads), [&](size_t i) {
            uint64_t sum = 0;
            for (const uint64_t *at = begin(i); at < begin(i + 1); at++) {
                sum += *at;
            }
            static_cast<volatile uint64_t &>(sums[i * 8]) = sum; // so that it is computed
        });
    });
}

double gpu_seconds(const Device &device, uint64_t bytes) {
    check_works(device);
    const Context context = new_context(ggml_tensor_overhead() * 3);
    ggml_tensor *from = ggml_new_tensor_1d(context.get(), GGML_TYPE_I8, int64_t(bytes));
    ggml_tensor *to = ggml_new_tensor_1d(context.get(), GGML_TYPE_I8, int64_t(bytes));
    const Buffer buffer(ggml_backend_alloc_ctx_tensors_from_buft(context.get(), device.buffer_type()));
    if (!buffer) {
        fail(LUCE_E_MEMORY, "%s: allocating %s to copy failed", device.name.c_str(),
             human_bytes(2 * bytes).c_str());
    }
    make_current(device);
    return fastest([&] { ggml_backend_tensor_copy(from, to); }); // it waits for the copy
}

} // namespace

uint64_t bandwidth_of(const Device &device, int n_threads) {
    uint64_t free = 0, total = 0;
    device.memory(&free, &total);
    const uint64_t bytes = std::min(MOST, free / 4) / 256 * 256;
    if (bytes < LEAST) {
        fail(LUCE_E_MEMORY, "measuring the memory of %s takes %s, %s are free", device.name.c_str(),
             human_bytes(4 * LEAST).c_str(), human_bytes(free).c_str());
    }
    const double seconds = device.gpu ? gpu_seconds(device, bytes) / 2 : cpu_seconds(bytes, n_threads);
    return uint64_t(double(bytes) / std::max(seconds, 1e-9));
}

} // namespace luce
