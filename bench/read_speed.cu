// How fast a GPU reads its memory: what a step that only reads weights could reach.
//
// A kernel sums a buffer far larger than the L2 cache by 16-byte loads, many in flight in each thread; a copy from the
// device to itself beside it reads and writes. Medians over the runs, after a warm-up. Prints one object: the bytes a
// second of both (a copy's count once), and what the memory's clock and width give.
//
//   nvcc -O3 -arch=native -o read_speed bench/read_speed.cu && ./read_speed
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include <cuda_runtime.h>

static constexpr int RUNS = 15, THREADS = 512, BLOCKS_PER_SM = 4, IN_FLIGHT = 8;

static void must(cudaError_t error) {
    if (error != cudaSuccess) {
        fprintf(stderr, "read_speed: %s\n", cudaGetErrorString(error));
        exit(1);
    }
}

// out is written where the sum is a value that a buffer of zeros never has: so the loads are needed.
__global__ void __launch_bounds__(THREADS) sum_kernel(const uint4 *in, size_t n, unsigned *out) {
    const size_t stride = size_t(gridDim.x) * THREADS;
    unsigned sum = 0;
    for (size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x; i < n; i += stride * IN_FLIGHT) {
        uint4 x[IN_FLIGHT];
#pragma unroll
        for (int j = 0; j < IN_FLIGHT; j++) {
            x[j] = i + j * stride < n ? __ldcs(in + i + j * stride) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < IN_FLIGHT; j++) {
            sum += x[j].x + x[j].y + x[j].z + x[j].w;
        }
    }
    if (sum == 1) {
        *out = sum;
    }
}

// The median of the runs, in seconds.
static double time_of(const std::function<void()> &work) {
    cudaEvent_t begin, end;
    must(cudaEventCreate(&begin));
    must(cudaEventCreate(&end));
    std::vector<float> ms(RUNS);
    work();
    for (float &each : ms) {
        must(cudaEventRecord(begin));
        work();
        must(cudaEventRecord(end));
        must(cudaEventSynchronize(end));
        must(cudaEventElapsedTime(&each, begin, end));
    }
    std::nth_element(ms.begin(), ms.begin() + RUNS / 2, ms.end());
    return ms[RUNS / 2] * 1e-3;
}

int main() {
    size_t free = 0, total = 0;
    must(cudaMemGetInfo(&free, &total));
    const size_t bytes = std::min(free / 4, size_t(8) << 30) / 4096 * 4096; // one buffer of the two
    int sms = 0, khz = 0, bits = 0;
    must(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    must(cudaDeviceGetAttribute(&khz, cudaDevAttrMemoryClockRate, 0));
    must(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, 0));
    uint4 *a = nullptr, *b = nullptr;
    unsigned *out = nullptr;
    must(cudaMalloc(&a, bytes));
    must(cudaMalloc(&b, bytes));
    must(cudaMalloc(&out, sizeof(*out)));
    must(cudaMemset(a, 0, bytes));
    const double read =
        time_of([&] { sum_kernel<<<sms * BLOCKS_PER_SM, THREADS>>>(a, bytes / sizeof(uint4), out); });
    must(cudaGetLastError());
    const double copy = time_of([&] { must(cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice)); });
    printf("{\"read_bytes_per_s\": %.5g, \"copy_bytes_per_s\": %.5g, \"nominal_bytes_per_s\": %.5g}\n", bytes / read,
           bytes / copy, 2e3 * khz * bits / 8);
    return 0;
}
