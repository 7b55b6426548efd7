// Shows what compute-sanitizer's racecheck follows of rings in shared memory.
//
// Four warps take what a fifth puts into two slots, as in native/kernels/matmul/rings.cuh: the barrier `full` says that a
// slot can be read, `free` that all have read it. A slot is filled by a bulk copy, by copies of each lane, or by stores.
//   one_lane    lane 0 arrives at `free` for its warp, behind __syncwarp(). This is right by the PTX manual.
//   every_lane  all lanes arrive there. Nothing else differs.
//   one_waits   all lanes arrive, and lane 0 waits for the warp that fills, ahead of __syncwarp(). This is right too.
//   race        all lanes arrive ahead of reading. This has to be reported.
//   own_slot    a warp has its own slot filled again behind __syncwarp(), as experts do, without a barrier. This is right too.
//
//   nvcc -std=c++17 -O3 -arch=sm_90a -I native/kernels -o racecheck_ring bench/racecheck_ring.cu
//   compute-sanitizer --tool racecheck ./racecheck_ring
#include "matmul/ptx.cuh"

#include <cstdio>

using namespace luce;

constexpr int WARP = 32, TAKERS = 4, THREADS = (TAKERS + 1) * WARP, SLOTS = 2, WORDS = 32, UNITS = 64;
enum Fill { BULK, COPIES, STORES };

__device__ void add(uint4 &sum, const uint4 &x) {
    sum = {sum.x + x.x, sum.y ^ x.y, sum.z + x.z, sum.w ^ x.w};
}
__device__ void copy_slot(uint4 *slot, const uint4 *from, uint32_t full) {
    constexpr int BYTES = WORDS * int(sizeof(uint4));
    copies_begin(full, BYTES);
    copy_to_shared(shared_address(slot), reinterpret_cast<const uint8_t *>(from), BYTES, full, false);
    copies_end(full);
}

// Lanes < LANES of a warp arrive, behind what they read or ahead of it, and lanes < WAIT of the fifth warp wait for them.
template <Fill FILL, int LANES, int WAIT, bool EARLY> __device__ void run_ring(const uint4 *in, uint4 *out) {
    __shared__ __align__(128) uint4 slots[SLOTS][WORDS];
    __shared__ uint64_t full[SLOTS], free[SLOTS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            barrier_init(shared_address(&full[i]), FILL == BULK ? 1 : WARP);
            barrier_init(shared_address(&free[i]), TAKERS * LANES);
        }
        barrier_init_done();
    }
    __syncthreads();
    uint4 sum = {};
    for (int u = 0; u < UNITS; u++) {
        const int i = u % SLOTS, parity = u / SLOTS % 2;
        const uint32_t filled = shared_address(&full[i]), left = shared_address(&free[i]);
        if (warp < TAKERS) {
            barrier_wait(filled, parity);
            if (!EARLY) {
                add(sum, slots[i][lane ^ (warp + 1)]);
            }
            __syncwarp();
            if (lane < LANES) {
                barrier_arrive(left);
            }
            if (EARLY) {
                add(sum, slots[i][lane ^ (warp + 1)]);
            }
            continue;
        }
        if (u >= SLOTS && lane < WAIT) {
            barrier_wait(left, parity ^ 1);
        }
        __syncwarp();
        const uint4 *from = in + u * WORDS;
        if (FILL == BULK && lane == 0) {
            copy_slot(slots[i], from, filled);
        } else if (FILL == COPIES) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(&slots[i][lane])),
                         "l"(from + lane)
                         : "memory");
            asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(filled) : "memory");
        } else if (FILL == STORES) {
            slots[i][lane] = from[lane];
            barrier_arrive(filled);
        }
    }
    if (warp < TAKERS) {
        out[threadIdx.x] = sum;
    }
}

template <Fill FILL> __global__ void one_lane(const uint4 *in, uint4 *out) {
    run_ring<FILL, 1, WARP, false>(in, out);
}
template <Fill FILL> __global__ void every_lane(const uint4 *in, uint4 *out) {
    run_ring<FILL, WARP, WARP, false>(in, out);
}
template <Fill FILL> __global__ void one_waits(const uint4 *in, uint4 *out) {
    run_ring<FILL, WARP, 1, false>(in, out);
}
template <Fill FILL> __global__ void race(const uint4 *in, uint4 *out) {
    run_ring<FILL, WARP, WARP, true>(in, out);
}

__global__ void own_slot(const uint4 *in, uint4 *out) {
    __shared__ __align__(128) uint4 slots[TAKERS][WORDS];
    __shared__ uint64_t full[TAKERS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (warp == TAKERS) {
        return;
    }
    const uint32_t filled = shared_address(&full[warp]);
    if (lane == 0) {
        barrier_init(filled, 1);
        barrier_init_done();
    }
    uint4 sum = {};
    for (int u = 0; u < UNITS; u++) {
        __syncwarp();
        if (lane == 0) {
            copy_slot(slots[warp], in + u * WORDS, filled);
        }
        barrier_wait(filled, u % 2);
        add(sum, slots[warp][lane ^ 1]);
    }
    out[threadIdx.x] = sum;
}

template <Fill FILL> void run_forms(const uint4 *in, uint4 *out) {
    one_lane<FILL><<<1, THREADS>>>(in, out);
    every_lane<FILL><<<1, THREADS>>>(in, out);
    one_waits<FILL><<<1, THREADS>>>(in, out);
    race<FILL><<<1, THREADS>>>(in, out);
}

int main() {
    uint4 *in, *out;
    cudaMalloc(&in, sizeof(uint4) * UNITS * WORDS);
    cudaMalloc(&out, sizeof(uint4) * TAKERS * WARP);
    cudaMemset(in, 1, sizeof(uint4) * UNITS * WORDS);
    run_forms<BULK>(in, out);
    run_forms<COPIES>(in, out);
    run_forms<STORES>(in, out);
    own_slot<<<1, THREADS>>>(in, out);
    const cudaError_t error = cudaDeviceSynchronize();
    printf("all forms ran: %s\n", cudaGetErrorString(error));
    return error == cudaSuccess ? 0 : 1;
}
