// What it takes two GPUs to add their parts of rows to each other, twice a layer of a model shared out by `--split tensor`, and that no
// value is lost, torn or taken for one of another exchange.
//
// All exchanges of a step are launched one after the other in one graph on each GPU, by the kernel of steps (kernels/exchange) with
// nothing between. Each step has other parts, whose sums are exact. Prints the microseconds of one, the median over the runs, and
// how many sums were wrong.
//
//   nvcc -std=c++17 -O3 -fmad=false -arch=native -Inative/kernels -o exchange bench/exchange.cu native/kernels/exchange/exchange.cu
#include "exchange/exchange.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda_runtime.h>

using namespace luce;

static constexpr int EXCHANGES = 128, RUNS = 41, THREADS = 256, BLOCKS = 264, WIDTH = 5120;

static void must(int error) {
    if (error != 0) {
        fprintf(stderr, "exchange: %s\n", cudaGetErrorString(cudaError_t(error)));
        exit(1);
    }
}

// A whole number below a million or so, by rank, exchange, place and run.
__device__ static float made(unsigned rank, unsigned exchange, unsigned i, unsigned run) {
    unsigned h = (i * 2654435761u) ^ (exchange * 40503u + rank * 97u + run * 7919u) * 2246822519u;
    h ^= h >> 15;
    return float(int(h % 2000001u) - 1000000);
}

struct Rank {
    float *parts, *out, *x; // (EXCHANGES, rows, width), the same, (rows, width)
    void *box;
    int32_t *counts;
    unsigned *run, *wrong;
    cudaStream_t stream;
    cudaEvent_t began, ended;
};

__global__ void begin(Rank r, int n, unsigned rank) {
    for (int64_t i = blockIdx.x * THREADS + threadIdx.x; i < int64_t(EXCHANGES) * n; i += BLOCKS * THREADS) {
        r.parts[i] = made(rank, unsigned(i / n), unsigned(i % n), *r.run);
    }
}
__global__ void check(Rank r, int n) {
    for (int64_t i = blockIdx.x * THREADS + threadIdx.x; i < int64_t(EXCHANGES) * n; i += BLOCKS * THREADS) {
        const unsigned exchange = unsigned(i / n), at = unsigned(i % n);
        if (r.out[i] != r.x[at] + (made(0, exchange, at, *r.run) + made(1, exchange, at, *r.run))) {
            atomicAdd(r.wrong, 1u);
        }
    }
}
__global__ void next(unsigned *run) {
    ++*run;
}

static cudaGraphExec_t captured(const Rank (&ranks)[2], int own, int rows, int32_t *failure, int64_t most) {
    const Rank &r = ranks[own];
    const int n = rows * WIDTH;
    cudaGraph_t graph;
    cudaGraphExec_t made;
    must(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < EXCHANGES; i++) {
        ExchangeArgs a{WIDTH, rows, r.x, r.parts + int64_t(i) * n, r.out + int64_t(i) * n, {}};
        a.ranks = {own, 2, i % 2, r.counts, failure, {ranks[0].box, ranks[1].box}, most, most};
        must(cuda::exchange(a, r.stream));
    }
    must(cudaStreamEndCapture(r.stream, &graph));
    must(cudaGraphInstantiate(&made, graph, 0));
    return made;
}

int main() {
    int devices = 0, reach = 0;
    must(cudaGetDeviceCount(&devices));
    if (devices > 1) {
        must(cudaDeviceCanAccessPeer(&reach, 0, 1));
    }
    if (!reach) {
        fprintf(stderr, "exchange: it takes two GPUs that reach each other\n");
        return 1;
    }
    constexpr int64_t MOST = 64 * WIDTH;
    const size_t box_bytes = size_t(exchange_box_bytes(2, MOST, MOST));
    Rank ranks[2]{};
    int32_t *failure;
    must(cudaHostAlloc(&failure, sizeof(int32_t), cudaHostAllocPortable));
    *failure = 0;
    for (int d = 0; d < 2; d++) {
        Rank &r = ranks[d];
        must(cudaSetDevice(d));
        must(cudaDeviceEnablePeerAccess(1 - d, 0));
        must(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
        must(cudaEventCreate(&r.began));
        must(cudaEventCreate(&r.ended));
        must(cudaMalloc(&r.parts, EXCHANGES * MOST * sizeof(float)));
        must(cudaMalloc(&r.out, EXCHANGES * MOST * sizeof(float)));
        must(cudaMalloc(&r.x, MOST * sizeof(float)));
        must(cudaMalloc(&r.box, box_bytes));
        must(cudaMalloc(&r.counts, EXCHANGE_COUNTS * sizeof(int32_t)));
        must(cudaMalloc(&r.run, sizeof(unsigned)));
        must(cudaMalloc(&r.wrong, sizeof(unsigned)));
        must(cudaMemset(r.x, 0, MOST * sizeof(float)));
        must(cudaMemset(r.box, EXCHANGE_NOTHING, box_bytes));
        must(cudaMemset(r.counts, 0, EXCHANGE_COUNTS * sizeof(int32_t)));
        must(cudaMemset(r.run, 0, sizeof(unsigned)));
        must(cudaMemset(r.wrong, 0, sizeof(unsigned)));
        must(cudaDeviceSynchronize());
    }
    unsigned all_wrong = 0;
    for (int rows : {1, 3, 4, 8, 16, 64, 16, 1}) {
        const int n = rows * WIDTH;
        cudaGraphExec_t step[2];
        for (int d = 0; d < 2; d++) {
            must(cudaSetDevice(d));
            step[d] = captured(ranks, d, rows, failure, MOST);
        }
        std::vector<float> ms(RUNS);
        for (float &each : ms) {
            for (int d = 0; d < 2; d++) {
                must(cudaSetDevice(d));
                next<<<1, 1, 0, ranks[d].stream>>>(ranks[d].run);
                begin<<<BLOCKS, THREADS, 0, ranks[d].stream>>>(ranks[d], n, unsigned(d));
                must(cudaStreamSynchronize(ranks[d].stream)); // a step begins when all of the step before has ended
            }
            for (int d : {1, 0}) { // that one waits for the other, which is timed from its start
                must(cudaSetDevice(d));
                must(cudaEventRecord(ranks[d].began, ranks[d].stream));
                must(cudaGraphLaunch(step[d], ranks[d].stream));
                must(cudaEventRecord(ranks[d].ended, ranks[d].stream));
                check<<<BLOCKS, THREADS, 0, ranks[d].stream>>>(ranks[d], n);
            }
            for (int d = 0; d < 2; d++) {
                must(cudaStreamSynchronize(ranks[d].stream));
            }
            must(cudaEventElapsedTime(&each, ranks[0].began, ranks[0].ended));
        }
        std::nth_element(ms.begin(), ms.begin() + RUNS / 2, ms.end());
        unsigned wrong[2];
        for (int d = 0; d < 2; d++) {
            must(cudaMemcpy(&wrong[d], ranks[d].wrong, sizeof(unsigned), cudaMemcpyDeviceToHost));
            all_wrong += wrong[d];
        }
        printf("%2d rows of %d: %.2f us an exchange, %.3f ms for %d of them; %u and %u sums wrong so far\n", rows, WIDTH,
               1e3 * ms[RUNS / 2] / EXCHANGES, ms[RUNS / 2], EXCHANGES, wrong[0], wrong[1]);
    }
    return all_wrong != 0 || *failure != 0;
}
