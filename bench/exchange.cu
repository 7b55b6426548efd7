// What it takes two GPUs to add halves of a row to each other: what a matrix split between them would cost, twice a layer.
//
// Each GPU has the sums of its half of the products, (rows, width) F32. A kernel writes them into the other's memory, says
// so by a number there, waits for the other's, and adds both in the order of the GPUs. All exchanges of a step are launched
// one after the other in one graph on each GPU, with nothing between. Prints the microseconds of one, the median over the runs.
//
//   nvcc -O3 -arch=native -o exchange bench/exchange.cu && ./exchange
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda_runtime.h>

static constexpr int EXCHANGES = 128, RUNS = 21, THREADS = 256, WIDTH = 5120;

static void must(cudaError_t error) {
    if (error != cudaSuccess) {
        fprintf(stderr, "exchange: %s\n", cudaGetErrorString(error));
        exit(1);
    }
}

struct Half {
    float *sums; // (rows, width), this GPU's
    float *other; // (2, rows, width) here, which the other GPU writes
    float *there; // the other GPU's `other`
    unsigned *said, *say; // (blocks) here, and there
    float *out; // (rows, width)
    int first; // whether this one's halves come first
};

// A block exchanges its part, so that blocks need not wait for each other. A number counts all exchanges so far.
__global__ void __launch_bounds__(THREADS) exchange(Half h, int n, int turn, const unsigned *run) {
    const int at = blockIdx.x * THREADS + threadIdx.x, place = (turn & 1) * n + at;
    const unsigned number = *run * EXCHANGES + turn + 1;
    const float mine = at < n ? h.sums[at] : 0;
    if (at < n) {
        __stcg(h.there + place, mine);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        *(volatile unsigned *) (h.say + blockIdx.x) = number;
        while (*(volatile unsigned *) (h.said + blockIdx.x) < number) {
        }
        __threadfence_system();
    }
    __syncthreads();
    if (at < n) {
        const float theirs = __ldcv(h.other + place);
        h.out[at] = h.first ? mine + theirs : theirs + mine;
    }
}

__global__ void next(unsigned *run) {
    ++*run;
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
    for (int rows : {1, 4, 8, 16}) {
        const int n = rows * WIDTH, blocks = (n + THREADS - 1) / THREADS;
        Half half[2]{};
        cudaStream_t stream[2];
        cudaGraphExec_t graph[2];
        unsigned *run[2];
        for (int d = 0; d < 2; d++) {
            must(cudaSetDevice(d));
            const cudaError_t already = cudaDeviceEnablePeerAccess(1 - d, 0);
            if (already != cudaErrorPeerAccessAlreadyEnabled) {
                must(already);
            }
            cudaGetLastError();
            must(cudaStreamCreateWithFlags(&stream[d], cudaStreamNonBlocking));
            must(cudaMalloc(&half[d].sums, n * sizeof(float)));
            must(cudaMalloc(&half[d].other, 2 * n * sizeof(float)));
            must(cudaMalloc(&half[d].out, n * sizeof(float)));
            must(cudaMalloc(&half[d].said, blocks * sizeof(unsigned)));
            must(cudaMalloc(&run[d], sizeof(unsigned)));
            must(cudaMemset(half[d].sums, 0, n * sizeof(float)));
            must(cudaMemset(half[d].said, 0, blocks * sizeof(unsigned)));
            must(cudaMemset(run[d], 0, sizeof(unsigned)));
            must(cudaDeviceSynchronize());
            half[d].first = d == 0;
        }
        for (int d = 0; d < 2; d++) {
            half[d].there = half[1 - d].other;
            half[d].say = half[1 - d].said;
        }
        for (int d = 0; d < 2; d++) {
            must(cudaSetDevice(d));
            cudaGraph_t made;
            must(cudaStreamBeginCapture(stream[d], cudaStreamCaptureModeThreadLocal));
            for (int turn = 0; turn < EXCHANGES; turn++) {
                exchange<<<blocks, THREADS, 0, stream[d]>>>(half[d], n, turn, run[d]);
            }
            next<<<1, 1, 0, stream[d]>>>(run[d]);
            must(cudaStreamEndCapture(stream[d], &made));
            must(cudaGraphInstantiate(&graph[d], made, 0));
        }
        std::vector<float> ms(RUNS);
        for (float &each : ms) {
            cudaEvent_t begin, end;
            must(cudaSetDevice(0));
            must(cudaEventCreate(&begin));
            must(cudaEventCreate(&end));
            must(cudaGraphLaunch(graph[1], stream[1])); // it waits for the first one, which is timed from its start
            must(cudaEventRecord(begin, stream[0]));
            must(cudaGraphLaunch(graph[0], stream[0]));
            must(cudaEventRecord(end, stream[0]));
            must(cudaEventSynchronize(end));
            must(cudaStreamSynchronize(stream[1]));
            must(cudaEventElapsedTime(&each, begin, end));
        }
        std::nth_element(ms.begin(), ms.begin() + RUNS / 2, ms.end());
        printf("%d rows of %d: %.2f us an exchange, %.3f ms for %d of them\n", rows, WIDTH,
               1e3 * ms[RUNS / 2] / EXCHANGES, ms[RUNS / 2], EXCHANGES);
    }
    return 0;
}
