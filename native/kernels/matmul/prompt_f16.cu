// Computes a prompt's product with sums in F16, of F16_SUM products each, which are added up in F32: for GPUs that sum F16
// products in F32 at half the rate (sm_80 and later, compiled for all).
//
// A result is summed in one order: of each F16_SUM values of K, four mma.sync of 16 products add to a sum in F16, from 0, and that
// is added to the F32 sum of those before. So a row's bits depend neither on other rows nor on the tile that it is in.
// Each mma rounds the sum to F16, by 2^-11 of it at most: a result is off by sum |x w| / 512 at most, and by some 4e-4 of the
// results' rms where products have random signs.
#include "common/overlap.cuh"
#include "matmul/prompt.h"
#include "matmul/prompt_plan.h"
#include "matmul/prompt_ptx.cuh"

#include <cuda_fp16.h>

namespace luce {
namespace {

constexpr int WARP = 32;
constexpr int STAGE_VALUES = F16_STAGE, STAGES_OF_SUM = F16_SUM / STAGE_VALUES;
constexpr int ROW = STAGE_VALUES * 2; // bytes of a row of a stage
constexpr int ROWS_AT_ONCE = F16_THREADS / (ROW / 16); // the block copies one word of so many rows at once
constexpr int WARP_ROWS = 2, WARP_COLUMNS = 4; // warps of a block, by rows and by outputs
constexpr int GROUP =
    8; // blocks of so many tiles of rows run side by side over the same weights, which L2 then holds

// Words of 16 bytes change places by the row, so that eight rows of one word lie in different banks.
__device__ uint32_t swizzle(int row, int word) {
    return uint32_t(row * ROW + 16 * (word ^ (row >> 1 & 3)));
}
// Goes from the address of word w to that of w + 2, of w < 2.
__device__ uint32_t next_16(uint32_t address) {
    return address ^ 32;
}
__device__ float2 as_floats(uint32_t halves) {
    return __half22float2(*reinterpret_cast<const __half2 *>(&halves));
}

// A warp has M tiles of 16 rows by N tiles of 8 outputs.
template <int ROWS, int OUTPUTS> struct F16Block {
    static constexpr int M = ROWS / WARP_ROWS / 16, N = OUTPUTS / WARP_COLUMNS / 8;
    static constexpr int STAGE = (ROWS + OUTPUTS) * ROW, COPIES = (ROWS + OUTPUTS) / ROWS_AT_ONCE;
    static_assert(WARP_ROWS * WARP_COLUMNS * WARP == F16_THREADS && N % 2 == 0);
    static_assert(ROWS % ROWS_AT_ONCE == 0 && OUTPUTS % ROWS_AT_ONCE == 0);
    static_assert(STAGE_VALUES == 32 && STAGES_OF_SUM == 2,
                  "the loop over K has two stages, of two mma each");

    const GemmArgs &a;
    const uint32_t base;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int first_row, first_output; // the block's
    const uint8_t *from[2]; // of x and of the weights: this thread's word of the first row that it copies
    uint32_t to = swizzle(threadIdx.x / (ROW / 16), threadIdx.x % (ROW / 16));
    uint32_t inside = 0; // bit i: its copy i is of a row that is there
    float c[M][N][4] = {};
    uint32_t sums[M][N][2] = {}; // in F16, not yet added to c

    __device__ F16Block(const GemmArgs &args, uint32_t shared) : a(args), base(shared) {
        const int tiles = (a.T + ROWS - 1) / ROWS, columns = int((a.N + OUTPUTS - 1) / OUTPUTS);
        const int group = int(blockIdx.x) / (GROUP * columns), in_group = int(blockIdx.x) % (GROUP * columns);
        const int side_by_side = min(GROUP, tiles - group * GROUP);
        first_row = (group * GROUP + in_group % side_by_side) * ROWS;
        first_output = in_group / side_by_side * OUTPUTS;
        const int row = threadIdx.x / (ROW / 16);
        const int64_t word = threadIdx.x % (ROW / 16) * 16;
        from[0] = static_cast<const uint8_t *>(a.x) + (first_row + row) * a.K * 2 + word;
        from[1] = static_cast<const uint8_t *>(a.weights) + (first_output + row) * a.K * 2 + word;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int at = row + i * ROWS_AT_ONCE;
            const bool there = at < ROWS ? first_row + at < a.T : first_output + at - ROWS < a.N;
            inside |= there ? 1u << i : 0;
        }
    }

    // Copies the values of a stage of K, of the tile's rows and weights, zeros for what is not there.
    __device__ void copy(int stage, int stages) const {
        if (stage < stages) {
            const uint32_t at = base + stage % F16_STAGES * STAGE;
            const int64_t k = stage * int64_t(STAGE_VALUES);
            const uint32_t there = k + threadIdx.x % (ROW / 16) * 8 < a.K ? inside : 0;
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                const int of = i < ROWS / ROWS_AT_ONCE ? 0 : 1, more = i - of * (ROWS / ROWS_AT_ONCE);
                copy_word(at + i * ROWS_AT_ONCE * ROW + to, from[of] + (more * ROWS_AT_ONCE * a.K + k) * 2,
                          (there >> i & 1) != 0);
            }
        }
        copies_commit();
    }

    // Loads 16 values of K of the warp's rows and weights.
    struct Fragments {
        uint32_t x[M][4], w[N / 2][4]; // tiles of 16 rows, and pairs of tiles of 8 outputs
    };
    __device__ void fetch(Fragments &to, int stage, int k) const {
        const uint32_t at = base + stage % F16_STAGES * STAGE;
        const uint32_t rows = at + swizzle(warp / WARP_COLUMNS * M * 16 + lane % 16, lane / 16);
        const uint32_t outputs =
            at + ROWS * ROW + swizzle(warp % WARP_COLUMNS * N * 8 + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
        for (int m = 0; m < M; m++) {
            load_matrices(to.x[m], (k == 0 ? rows : next_16(rows)) + m * 16 * ROW);
        }
#pragma unroll
        for (int n = 0; n < N / 2; n++) {
            load_matrices(to.w[n], (k == 0 ? outputs : next_16(outputs)) + n * 16 * ROW);
        }
    }

    // Adds products to the sums in F16, which FIRST begins anew: those before are added up then, tile by tile, while the tensor
    // cores compute.
    template <bool FIRST> __device__ void multiply(const Fragments &f) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int m = 0; m < M; m++) {
                if (FIRST) {
                    add_up(m, n);
                }
                multiply_f16(sums[m][n], f.x[m], f.w[n / 2][n % 2 * 2], f.w[n / 2][n % 2 * 2 + 1]);
            }
        }
    }
    // Does a stage's part. What is multiplied next is fetched ahead of the products, of the next stage too.
    template <bool FIRST> __device__ void add_stage(int stage, int stages, Fragments (&f)[2]) {
        fetch(f[1], stage, 1);
        copy(stage + F16_STAGES - 1, stages); // over the stage before, which all have fetched
        multiply<FIRST>(f[0]);
        next_stage();
        fetch(f[0], stage + 1, 0); // of the last, what an earlier stage has left
        multiply<false>(f[1]);
    }
    // Waits until the next stage's values are there, and all have fetched this one's.
    __device__ void next_stage() const {
        copies_wait<F16_STAGES - 2>();
        __syncthreads();
    }
    // Adds a tile's sum in F16 to that in F32, and begins it anew.
    __device__ void add_up(int m, int n) {
        const float2 upper = as_floats(sums[m][n][0]), lower = as_floats(sums[m][n][1]);
        c[m][n][0] += upper.x, c[m][n][1] += upper.y;
        c[m][n][2] += lower.x, c[m][n][3] += lower.y;
        sums[m][n][0] = sums[m][n][1] = 0;
    }
    // Adds up what the last stage has left.
    __device__ void finish() {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int n = 0; n < N; n++) {
                add_up(m, n);
            }
        }
    }

    __device__ void store() const {
        const float *scales =
            reinterpret_cast<const float *>(static_cast<const uint8_t *>(a.x) + a.T * a.K * 2);
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = first_row + (warp / WARP_COLUMNS * M + m) * 16 + half * 8 + lane / 4;
                if (row >= a.T) {
                    continue;
                }
                const float scale = scales[row];
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const int output = first_output + (warp % WARP_COLUMNS * N + n) * 8 + lane % 4 * 2;
                    if (output >= a.N) {
                        continue;
                    }
                    const int64_t at = row * a.N + output;
                    float2 v = {c[m][n][2 * half] * scale, c[m][n][2 * half + 1] * scale};
                    if (a.residual != nullptr) {
                        const float2 more = *reinterpret_cast<const float2 *>(a.residual + at);
                        v = {v.x + more.x, v.y + more.y};
                    }
                    *reinterpret_cast<float2 *>(a.out + at) = v;
                }
            }
        }
    }
};

template <int ROWS, int OUTPUTS, int BLOCKS>
__global__ void __launch_bounds__(F16_THREADS, BLOCKS) gemm_f16_kernel(const __grid_constant__ GemmArgs a) {
    extern __shared__ __align__(1024) uint8_t shared[];
    F16Block<ROWS, OUTPUTS> block(a, shared_address(shared));
    // Stages behind K are zeros, so that all sums in F16 have as many stages.
    const int stages = int((a.K + F16_SUM - 1) / F16_SUM) * STAGES_OF_SUM;
#pragma unroll
    for (int stage = 0; stage < F16_STAGES - 1; stage++) {
        block.copy(stage, stages);
    }
    typename F16Block<ROWS, OUTPUTS>::Fragments f[2];
    block.next_stage();
    block.fetch(f[0], 0, 0);
    for (int stage = 0; stage < stages; stage += STAGES_OF_SUM) {
        block.template add_stage<true>(stage, stages, f);
        block.template add_stage<false>(stage + 1, stages, f);
    }
    block.finish();
    block.store();
}

template <int TILE, int BLOCKS> int launch(const GemmArgs &a, const LaunchPlan &plan, cudaStream_t stream) {
    const auto kernel = gemm_f16_kernel<F16_TILES[TILE].rows, F16_TILES[TILE].outputs, BLOCKS>;
    if (const cudaError_t error = allow_shared(kernel, size_t(plan.shared)); error != cudaSuccess) {
        return int(error);
    }
    kernel<<<unsigned(plan.x), F16_THREADS, size_t(plan.shared), stream>>>(a);
    return int(cudaGetLastError());
}

} // namespace

int cuda::gemm_f16(const GemmArgs &a, int tile, void *stream) {
    const auto unaligned = [](const void *p, size_t to) { return reinterpret_cast<uintptr_t>(p) % to != 0; };
    if (a.T < 0 || !gemm_has(a.K, a.N) || unaligned(a.x, 16) || unaligned(a.weights, 16) ||
        unaligned(a.out, 8) || unaligned(a.residual, 8)) {
        return int(cudaErrorInvalidValue);
    }
    if (a.T == 0) {
        return 0;
    }
    if (tile < 0) {
        DeviceLimits device;
        if (const int error = device_limits(device); error != 0) {
            return error;
        }
        tile = plan_f16_sums(device, a.T, a.N).tile;
    }
    const auto st = static_cast<cudaStream_t>(stream);
    const auto plan = [&](int i) { return plan_f16_tile(F16_TILES[i], a.T, a.N); };
    switch (tile) {
        case 0: return launch<0, 1>(a, plan(0), st);
        case 1: return launch<1, 1>(a, plan(1), st);
        case 2: return launch<2, 2>(a, plan(2), st);
        default: return int(cudaErrorInvalidValue);
    }
}

} // namespace luce
