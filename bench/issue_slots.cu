// What the tensor core's instructions cost a scheduler of a multiprocessor, beside others: what bounds products whose arithmetic
// memory does not hide.
//
// A multiprocessor has four schedulers, and here each has four warps, as in native/kernels/rowmm_kernel.cuh. A warp runs a loop of
// one step: 16 outputs times 16 rows over 16 k, by two mma.sync of 8 rows (HMMA.16816) or by a warpgroup's wgmma (HGMMA), and X other
// instructions between, which depend on each other eight apart. Of wgmma a group of four steps is in flight while the next one's others run,
// which in a product would make its operands. What is told is the cycles that a step takes the scheduler for each of
// its warps. So where the tensor core works beside the others a step takes as long as the longer of the two, and where it
// holds the scheduler up it takes as long as both. Starting the loop is outside the figures; a GPU's clock does not matter.
//
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -I native/kernels -o issue_slots bench/issue_slots.cu && ./issue_slots
#include "matmul/sm90/wgmma.cuh"

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include <cuda_runtime.h>

static constexpr int WARPS = 16, SCHEDULERS = 4, LOOPS = 200, GROUPS = 2, UNROLL = 4, CHAINS = 8;

static void must(cudaError_t error) {
    if (error != cudaSuccess) {
        fprintf(stderr, "issue_slots: %s\n", cudaGetErrorString(error));
        exit(1);
    }
}

// What is between the tensor core's instructions: the integer pipe's, those of half2, of F32, or the first two by turns.
enum Others { LOP3, HMUL2, FFMA, MIX };

template <Others OTHERS, int X> __device__ __forceinline__ void others(uint32_t (&x)[CHAINS]) {
#pragma unroll
    for (int i = 0; i < X; i++) {
        uint32_t &to = x[i % CHAINS];
        const uint32_t from = x[(i + 1) % CHAINS];
        if (OTHERS == LOP3 || (OTHERS == MIX && i % 2 == 0)) {
            asm volatile("lop3.b32 %0, %0, %1, 0x5555, 0x96;" : "+r"(to) : "r"(from));
        } else if (OTHERS == FFMA) {
            asm volatile("fma.rn.f32 %0, %0, %1, %0;" : "+r"(to) : "r"(from));
        } else {
            asm volatile("mul.rn.f16x2 %0, %0, %1;" : "+r"(to) : "r"(from));
        }
    }
}

__device__ __forceinline__ void hmma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void hgmma(float (&c)[8], const uint32_t (&a)[4], uint64_t rows) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, "
                 "%12, 1, 1, 1, 0;"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
}

enum Tensor { NONE, MMA_SYNC, WGMMA };

// Puts the cycles of all steps to `cycles`. `sink` is written where a sum is a value that it hardly has, so that all is needed.
template <Tensor TENSOR, Others OTHERS, int X>
__global__ void __launch_bounds__(WARPS * 32) steps(long long *cycles, float *sink, uint32_t seed) {
    __shared__ __align__(1024) uint32_t rows[2048];
    for (int i = threadIdx.x; i < 2048; i += blockDim.x) {
        rows[i] = 0x3c003c00;
    }
    float c[2][4] = {}, wide[8] = {};
    uint32_t a[GROUPS][UNROLL][4], b[4], x[CHAINS];
    for (int i = 0; i < 4; i++) {
        for (int u = 0; u < GROUPS * UNROLL; u++) {
            a[u / UNROLL][u % UNROLL][i] = seed * (i + u + 1) + threadIdx.x;
        }
        b[i] = seed ^ i;
    }
    for (int i = 0; i < CHAINS; i++) {
        x[i] = seed + i * threadIdx.x;
    }
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    const uint32_t at = __shfl_sync(~0u, uint32_t(__cvta_generic_to_shared(rows)), 0);
    const long long begin = clock64();
#pragma unroll 1
    for (int i = 0; i < LOOPS; i++) {
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            if constexpr (TENSOR == WGMMA) {
#pragma unroll
                for (int u = 0; u < UNROLL * 4; u++) {
                    asm volatile("" : "+r"(a[group][u / 4][u % 4])::"memory");
                }
                luce::wgmma_begin();
#pragma unroll
                for (int u = 0; u < UNROLL; u++) { // 8 rows x 16 bytes side by side for each 8 rows, the next 8 k behind
                    const uint32_t low = ((at & 0x3ffff) >> 4) + u * 32 + (16 << 16);
                    uint64_t descriptor;
                    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(8));
                    hgmma(wide, a[group][u], descriptor);
                }
                luce::wgmma_commit();
                others<OTHERS, X * UNROLL>(x);
                luce::wgmma_wait<1>();
            } else {
#pragma unroll
                for (int u = 0; u < UNROLL; u++) {
                    if constexpr (TENSOR == MMA_SYNC) {
                        hmma(c[0], a[group][u], b[0], b[1]);
                        hmma(c[1], a[group][u], b[2], b[3]);
                    }
                    others<OTHERS, X>(x);
                }
            }
        }
    }
    if constexpr (TENSOR == WGMMA) {
        luce::wgmma_wait<0>();
    }
    __syncthreads();
    const long long end = clock64();
    float sum = 0;
    for (int i = 0; i < 8; i++) {
        sum += c[i / 4][i % 4] + wide[i] + float(x[i]);
    }
    if (sum == 12345.678f) {
        *sink = sum;
    }
    if (threadIdx.x == 0 && blockIdx.x == 0) {
        *cycles = end - begin;
    }
}

static long long *cycles;
static float *sink;

template <Tensor TENSOR, Others OTHERS, int X> double cycles_of() {
    int blocks = 0;
    must(cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0));
    for (int i = 0; i < 2; i++) { // the first one meets its code
        steps<TENSOR, OTHERS, X><<<blocks, WARPS * 32>>>(cycles, sink, 0x3c003c00);
    }
    must(cudaGetLastError());
    long long all = 0;
    must(cudaMemcpy(&all, cycles, sizeof(all), cudaMemcpyDeviceToHost));
    return double(all) / (double(LOOPS) * GROUPS * UNROLL * (WARPS / SCHEDULERS));
}

template <Tensor TENSOR, Others OTHERS> void print_row(const char *name) {
    printf("%-36s %5.1f %5.1f %5.1f %5.1f %5.1f %5.1f\n", name, cycles_of<TENSOR, OTHERS, 0>(),
           cycles_of<TENSOR, OTHERS, 4>(), cycles_of<TENSOR, OTHERS, 8>(), cycles_of<TENSOR, OTHERS, 12>(),
           cycles_of<TENSOR, OTHERS, 16>(), cycles_of<TENSOR, OTHERS, 24>());
}

int main() {
    must(cudaMalloc(&cycles, sizeof(*cycles)));
    must(cudaMalloc(&sink, sizeof(*sink)));
    printf("cycles of a step, with so many others    0     4     8    12    16    24\n");
    print_row<NONE, LOP3>("LOP3 alone");
    print_row<NONE, HMUL2>("HMUL2 alone");
    print_row<NONE, FFMA>("FFMA alone");
    print_row<NONE, MIX>("LOP3 and HMUL2 by turns");
    print_row<MMA_SYNC, LOP3>("two HMMA and LOP3");
    print_row<MMA_SYNC, HMUL2>("two HMMA and HMUL2");
    print_row<MMA_SYNC, FFMA>("two HMMA and FFMA");
    print_row<MMA_SYNC, MIX>("two HMMA, LOP3 and HMUL2");
    print_row<WGMMA, LOP3>("HGMMA and LOP3");
    print_row<WGMMA, HMUL2>("HGMMA and HMUL2");
    print_row<WGMMA, MIX>("HGMMA, LOP3 and HMUL2");
    return 0;
}
