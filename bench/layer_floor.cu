// How fast a GPU can go through the layers of a mixture of experts for one row: what a chain of dependent stages costs beside
// its bytes.
//
// 40 layers have the stages and bytes of the oracle 35b-a3b's: qkv, (conv,) delta, (gate,) out, (norm,) router, up, down (,
// sum). A stage needs all that the one before it has left: 30 values of each block. A block has pieces of 4 KB of each
// stage's weights, and a warp takes every 16th. Dense weights may be read at any time; experts' only after eight of 256 were
// chosen by what the router left. The arithmetic stands for nothing, but each result depends on all before it, and all forms
// must end with the same values:
//   counter   One kernel has a block on each multiprocessor; blocks add to one counter and wait for it.
//   carried   The same, but a block's values carry the stage's number, in 16 bytes that are read and written at once. So
//             nobody waits for anything but the values.
//   launches  A stage is a kernel, and they overlap as luce's do (native/kernels/common/overlap.cuh), in a captured graph.
//   alone     One kernel waits for nothing: this is what the bytes take.
// In the first two, weights come ahead of their stage, as far as shared memory has room. `light` is a multiplication for each
// four bytes, `heavy` 48 instructions for each 16, as native/kernels/matmul/multiply.cuh has for Q4_K. Microseconds of a layer
// are printed, and for each stage how long the first block waits for its values and then works.
//
//   nvcc -std=c++17 -O3 -arch=sm_90a -I native/kernels -o layer_floor bench/layer_floor.cu && ./layer_floor
#include "layer_floor.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

__global__ void fill_kernel(uint4 *p, int64_t n) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n;
         i += int64_t(gridDim.x) * blockDim.x) {
        const uint32_t x = uint32_t(i) * 2654435761u;
        p[i] = {x, x * 3 ^ uint32_t(i >> 7), x * 5 + 1, x ^ x >> 15};
    }
}
__global__ void begin_kernel(Chain c) {
    for (int i = threadIdx.x; i < BUFFERS * VALUES; i += blockDim.x) {
        c.values[i] = stir(i % VALUES);
    }
    for (int i = threadIdx.x; i < BUFFERS * VALUES / 3; i += blockDim.x) {
        c.carried[i] = {};
    }
    if (threadIdx.x == 0) {
        *c.counter = 0;
    }
}

static void must(cudaError_t error) {
    if (error != cudaSuccess) {
        fprintf(stderr, "layer_floor: %s\n", cudaGetErrorString(error));
        exit(1);
    }
}

// ---- what is measured ----

static Plan plan_of(int stages, bool bytes) {
    const Stage qkv = {26, 0}, none = {0, 0}, out = {10, 0}, router = {4, 0}, up = {2, 18}, down = {1, 11};
    std::vector<Stage> all = {qkv, none, out, router, up, down};
    if (stages >= 7) { // norm
        all.insert(all.begin() + 3, none);
    }
    if (stages >= 8) { // sum
        all.push_back(none);
    }
    if (stages >= 10) { // conv and gate
        all.insert(all.begin() + 1, 2, none);
    }
    Plan plan = {};
    plan.n = int(all.size());
    plan.up = int(std::find_if(all.begin(), all.end(), [](const Stage &s) { return s.experts == 18; }) -
                  all.begin());
    for (int i = 0; i < plan.n; i++) {
        plan.stages[i] = bytes ? all[i] : none;
        plan.dense_layer += plan.stages[i].dense;
    }
    return plan;
}

template <typename F> static double median_us(const Chain &c, cudaStream_t stream, const F &run) {
    cudaEvent_t begin, end;
    must(cudaEventCreate(&begin));
    must(cudaEventCreate(&end));
    std::vector<float> ms(RUNS);
    for (int i = -1; i < RUNS; i++) {
        begin_kernel<<<1, 1024, 0, stream>>>(c);
        must(cudaEventRecord(begin, stream));
        run();
        must(cudaEventRecord(end, stream));
        must(cudaEventSynchronize(end));
        must(cudaEventElapsedTime(&ms[std::max(i, 0)], begin, end));
    }
    std::nth_element(ms.begin(), ms.begin() + RUNS / 2, ms.end());
    return ms[RUNS / 2] * 1e3 / (STEPS * LAYERS);
}
static uint64_t values_left(const Chain &c) {
    std::vector<uint32_t> x(VALUES);
    must(cudaMemcpy(x.data(), c.values + (BUFFERS - 1) * VALUES, VALUES * 4, cudaMemcpyDeviceToHost));
    uint64_t sum = 0;
    for (const uint32_t each : x) {
        sum = sum * 1000003 + each;
    }
    return sum;
}

template <Form FORM, int EXTRA> static double time_chain(Chain c, int blocks, cudaStream_t stream) {
    const int bytes = (DENSE_SLOTS + EXPERT_SLOTS) * PIECE;
    must(cudaFuncSetAttribute(chain_kernel<FORM, EXTRA>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    void *args[] = {&c};
    return median_us(c, stream, [&] {
        must(cudaLaunchCooperativeKernel(reinterpret_cast<void *>(chain_kernel<FORM, EXTRA>), dim3(blocks),
                                         dim3(THREADS + 2 * WARP), args, bytes, stream));
    });
}
template <int EXTRA> static double time_launches(const Chain &c, int blocks, cudaStream_t stream) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int layer = 0, e = 0; layer < LAYERS; layer++) {
        for (int stage = 0, first = 0; stage < c.plan.n; first += c.plan.stages[stage++].dense, e++) {
            const int bytes = (c.plan.stages[stage].dense + c.plan.stages[stage].experts) * PIECE;
            must(launch_kernel(stage_kernel<EXTRA>, dim3(blocks), THREADS, bytes, stream, e > 0, c, layer,
                               stage, first, e));
        }
    }
    must(cudaStreamEndCapture(stream, &graph));
    must(cudaGraphInstantiate(&exec, graph, 0));
    const double us = median_us(c, stream, [&] {
        for (int i = 0; i < STEPS; i++) {
            must(cudaGraphLaunch(exec, stream));
        }
    });
    must(cudaGraphExecDestroy(exec));
    must(cudaGraphDestroy(graph));
    return us;
}

// Prints of each stage how long the first block waited and worked, over the layers of a step but the first.
static void print_stages(const Chain &c) {
    std::vector<uint64_t> at(size_t(c.plan.n) * LAYERS * 2);
    must(cudaMemcpy(at.data(), c.stamps, at.size() * sizeof(at[0]), cudaMemcpyDeviceToHost));
    for (int stage = 0; stage < c.plan.n; stage++) {
        double wait = 0, work = 0;
        for (int layer = 1; layer < LAYERS; layer++) {
            const size_t e = size_t(layer) * c.plan.n + stage;
            wait += double(at[e * 2] - at[e * 2 - 1]);
            work += double(at[e * 2 + 1] - at[e * 2]);
        }
        printf("  %.2f+%.2f", wait * 1e-3 / (LAYERS - 1), work * 1e-3 / (LAYERS - 1));
    }
}

template <int EXTRA>
static void time_forms(const Chain &c, const char *what, int blocks, cudaStream_t stream) {
    const char *names[] = {"counter", "carried", "launches"};
    uint64_t first = 0;
    for (int form = 0; form < 3; form++) {
        const double us = form == 0   ? time_chain<COUNTER, EXTRA>(c, blocks, stream)
                          : form == 1 ? time_chain<CARRIED, EXTRA>(c, blocks, stream)
                                      : time_launches<EXTRA>(c, blocks, stream);
        const uint64_t left = values_left(c);
        first = form == 0 ? left : first;
        printf("%2d stages, %-8s  %-8s %6.2f:", c.plan.n, what, names[form], us);
        print_stages(c);
        printf("%s\n", left == first ? "" : "  WRONG VALUES");
        fflush(stdout);
    }
}

int main() {
    int blocks = 0;
    must(cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0));
    blocks = std::min(blocks, MOST_BLOCKS);
    Chain c = {};
    uint8_t *weights;
    must(cudaMalloc(&weights, (DENSE_PIECES + EXPERT_PIECES) * PIECE));
    fill_kernel<<<blocks * 8, 256>>>(reinterpret_cast<uint4 *>(weights),
                                     (DENSE_PIECES + EXPERT_PIECES) * PIECE / 16);
    c.dense = weights;
    c.experts = weights + DENSE_PIECES * PIECE;
    must(cudaMalloc(&c.values, BUFFERS * VALUES * 4));
    must(cudaMalloc(&c.carried, BUFFERS * VALUES / 3 * 16));
    must(cudaMalloc(&c.counter, 4));
    must(cudaMalloc(&c.stamps, STEPS * LAYERS * MOST_STAGES * 16));
    cudaStream_t stream;
    must(cudaStreamCreate(&stream));
    must(cudaDeviceSynchronize());
    c.plan = plan_of(6, true);
    int pieces = 0;
    for (const Stage &s : c.plan.stages) {
        pieces += s.dense + s.experts;
    }
    const double bytes = double(pieces) * PIECE * blocks;
    const double light = time_chain<ALONE, 0>(c, blocks, stream),
                 heavy = time_chain<ALONE, HEAVY>(c, blocks, stream);
    printf("%d blocks, %.2f MB a layer; alone, light %.2f us (%.2f TB/s), heavy %.2f us\n", blocks,
           bytes * 1e-6, light, bytes / light * 1e-6, heavy);
    for (const int stages : {6, 7, 8, 10}) {
        c.plan = plan_of(stages, false);
        time_forms<0>(c, "no bytes", blocks, stream);
        c.plan = plan_of(stages, true);
        time_forms<0>(c, "light", blocks, stream);
        time_forms<HEAVY>(c, "heavy", blocks, stream);
    }
    return 0;
}
