// Computes attention of a step's rows over paged KV, in two kernels. In the first, one block a multiprocessor
// leaves each chunk's partial results in scratch. In the second, a block for each row and head adds them up
// in the order of chunks. The grid depends on the step's width and the device. Each block reads from the
// control block how much there is to do (attention_plan.cuh).
#include "attention_f32.cuh"
#include "attention_mma.cuh"
#include "attention_wgmma.cuh"

#include <algorithm>

namespace luce {
namespace {

// ---- partial results ----

// Hopper's own instructions need code for sm_90a.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool WGMMA = true;
#else
constexpr bool WGMMA = false;
#endif

template <int D, int TYPE> __device__ void tensor_attention(const AttentionParams &a, uint8_t *shared) {
    using L = Layout<D, TYPE, WGMMA>;
    Plan &plan = *reinterpret_cast<Plan *>(shared + L::PLAN);
    plan.make(a, L::MAX_M);
    if (threadIdx.x <
        L::SLOTS) { // not beside the plan's writes: racecheck takes those 4 KiB further for this one
        init_barrier(shared_address(shared) + L::FULL + threadIdx.x * 8, LOAD_THREADS);
        init_barrier(shared_address(shared) + L::EMPTY + threadIdx.x * 8, WARPS);
    }
    __syncthreads();
    if (threadIdx.x < MATH_THREADS) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        wgmma_units<D, TYPE>(a, plan, shared);
#else
        mma_units<D, TYPE>(a, plan, shared);
#endif
    } else {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
#endif
        Loader<L>{a, plan, shared}.run();
    }
}

template <int D, int TYPE>
__global__ void __launch_bounds__(TYPE == KV_F32 ? F32_THREADS : MMA_THREADS, 1)
    attention_kernel(const __grid_constant__ AttentionParams a) {
    extern __shared__ __align__(1024) uint8_t shared[];
    let_next_start(); // combine_kernel may come up as this one's blocks end
    if constexpr (TYPE == KV_F32) {
        f32_attention<D>(a, shared);
    } else {
        tensor_attention<D, TYPE>(a, shared);
    }
}

template <int D, int TYPE>
cudaError_t launch_parts(AttentionParams &a, int blocks, int capability, cudaStream_t stream) {
    int bytes = int(sizeof(F32Layout<D>));
    if constexpr (TYPE != KV_F32) { // Hopper may run code for sm_80 too, which needs less
        bytes = capability == 9 ? Layout<D, TYPE, true>::BYTES : Layout<D, TYPE, false>::BYTES;
    }
    // It is set on each call, since it holds for the current device only.
    const cudaError_t error =
        cudaFuncSetAttribute(attention_kernel<D, TYPE>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) {
        return error;
    }
    const int threads = TYPE == KV_F32 ? F32_THREADS : MMA_THREADS;
    return launch_kernel(attention_kernel<D, TYPE>, dim3(blocks), threads, size_t(bytes), stream,
                         capability >= 9, a);
}

template <int D>
cudaError_t launch_type(AttentionParams &a, int blocks, int capability, cudaStream_t stream) {
    switch (a.pool.type) {
        case KV_F32: return launch_parts<D, KV_F32>(a, blocks, capability, stream);
        case KV_F16: return launch_parts<D, KV_F16>(a, blocks, capability, stream);
        case KV_Q4_0: return launch_parts<D, KV_Q4_0>(a, blocks, capability, stream);
        case KV_Q8_0: return launch_parts<D, KV_Q8_0>(a, blocks, capability, stream);
        default: return cudaErrorInvalidValue;
    }
}

// ---- their sum ----

// A block has 256 threads, of four columns each. For few chunks it has all columns in a few groups. For many
// chunks it has 64 columns in 16 groups, and other blocks have the other columns. A row's position decides
// how many chunks it has.
constexpr int COMBINE_THREADS = 256, MANY_COLUMNS = 64, FEW_CHUNKS = 8;
constexpr int BATCH = 8; // as many chunks are read at once

__device__ float4 scale_add(float4 x, float w, float4 sum) {
    return {fmaf(x.x, w, sum.x), fmaf(x.y, w, sum.y), fmaf(x.z, w, sum.z), fmaf(x.w, w, sum.w)};
}

// Sums chunks first .. last of a row and head, of COLUMNS columns from `column0`. Group i % PARTS of the
// threads adds chunk i, and then the groups' sums are added in order. They are in units of the largest
// maximum so far.
template <int D, int COLUMNS>
__device__ void combine(const AttentionParams &a, int64_t row, int64_t head, int column0, int first,
                        int last) {
    constexpr int EACH = COLUMNS / 4, PARTS = COMBINE_THREADS / EACH;
    __shared__ float4 sums_of_parts[PARTS][EACH];
    __shared__ float2 weights_of_parts[PARTS];
    const int thread = threadIdx.x % EACH, part = threadIdx.x / EACH, column = column0 + thread * 4;
    const int64_t pair = row * a.H + head;
    const float2 *sums = a.sums + pair * a.chunks;
    const float4 *partial = reinterpret_cast<const float4 *>(a.partial + pair * a.chunks * D + column);
    float4 gate = {1, 1, 1, 1}, sum = {};
    if (a.gate != nullptr && part == 0) {
        const float *g = a.gate + row * a.gate_row + head * a.gate_head + column;
        gate = {g[0], g[1], g[2], g[3]};
    }
    float most = -INFINITY, weight = 0;
    for (int c0 = first + (part + PARTS - first % PARTS) % PARTS; c0 <= last; c0 += BATCH * PARTS) {
        float2 s[BATCH];
        float4 x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) { // the reads are on their way together
            const int c = c0 + i * PARTS;
            s[i] = c <= last ? sums[c] : float2{-INFINITY, 0};
            x[i] = c <= last ? partial[int64_t(c) * (D / 4)] : float4{};
        }
        float next = most;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            next = fmaxf(next, s[i].x);
        }
        const float origin = next == -INFINITY ? 0.0f : next, factor = exp2_fast(most - origin);
        most = next;
        weight *= factor;
        sum = scale_add(sum, factor, {});
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float w = exp2_fast(s[i].x - origin);
            weight = fmaf(s[i].y, w, weight);
            sum = scale_add(x[i], w, sum);
        }
    }
    sums_of_parts[part][thread] = sum;
    if (thread == 0) {
        weights_of_parts[part] = {most, weight};
    }
    __syncthreads();
    if (part != 0) {
        return;
    }
    for (int p = 0; p < PARTS; p++) {
        most = fmaxf(most, weights_of_parts[p].x);
    }
    sum = {};
    weight = 0;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        const float w = exp2_fast(weights_of_parts[p].x - (most == -INFINITY ? 0.0f : most));
        sum = scale_add(sums_of_parts[p][thread], w, sum);
        weight = fmaf(weights_of_parts[p].y, w, weight);
    }
    const float scale = weight == 0 ? 0.0f : 1.0f / weight;
    if (a.gate != nullptr) {
        gate = {1 / (1 + expf(-gate.x)), 1 / (1 + expf(-gate.y)), 1 / (1 + expf(-gate.z)),
                1 / (1 + expf(-gate.w))};
    }
    *reinterpret_cast<float4 *>(a.out + pair * D + column) = {sum.x * scale * gate.x, sum.y * scale * gate.y,
                                                              sum.z * scale * gate.z, sum.w * scale * gate.w};
}

// The grid is heads, rows, parts of D.
template <int D> __global__ void __launch_bounds__(COMBINE_THREADS) combine_kernel(AttentionParams a) {
    let_next_start();
    const int64_t row = blockIdx.y, head = blockIdx.x;
    const RowCtl ctl = a.ctl->rows[row];
    const int first = chunk_at(lowest_visible(ctl.position, a.first, a.window));
    const int last = ctl.seq < 0 ? -1 : chunk_at(ctl.position);
    wait_for_previous(); // all that attention_kernel wrote is in memory
    if (last < first) { // the row sees nothing
        if (threadIdx.x < MANY_COLUMNS) {
            a.out[(row * a.H + head) * D + blockIdx.z * MANY_COLUMNS + threadIdx.x] = 0;
        }
    } else if (last - first >= FEW_CHUNKS) {
        combine<D, MANY_COLUMNS>(a, row, head, blockIdx.z * MANY_COLUMNS, first, last);
    } else if (blockIdx.z == 0) {
        combine<D, D>(a, row, head, 0, first, last);
    }
}

int32_t most_chunks(const AttentionArgs &args) {
    return chunk_at(args.max_pages * PAGE - 1) + 1;
}

template <int D> int launch(AttentionParams &a, cudaStream_t stream) {
    int device = 0, blocks = 0, capability = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device);
    }
    blocks = std::min(blocks, MAX_WORKERS);
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, device);
    }
    if (error == cudaSuccess) {
        error = launch_type<D>(a, blocks, capability, stream);
    }
    if (error == cudaSuccess) {
        error = launch_kernel(combine_kernel<D>, dim3(a.H, a.T, D / MANY_COLUMNS), COMBINE_THREADS, 0, stream,
                              true, a);
    }
    return int(error);
}

bool aligned(const void *p, size_t bytes) {
    return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

} // namespace

int64_t attention_scratch(const AttentionArgs &args) {
    return int64_t(args.T) * args.H * most_chunks(args) * (args.pool.D + 2);
}

int cuda::attention(const AttentionArgs &args, void *stream) {
    const KvPool &pool = args.pool;
    if (args.T == 0) {
        return 0;
    }
    if (args.T < 0 || args.T > MAX_ROWS || args.max_pages <= 0 || pool.Hkv <= 0 || args.H % pool.Hkv != 0 ||
        !aligned(args.q, 16) || !aligned(args.out, 16) || !aligned(args.scratch, 16) ||
        !aligned(pool.k, 16) || !aligned(pool.v, 16)) {
        return int(cudaErrorInvalidValue);
    }
    AttentionParams a{};
    static_cast<AttentionArgs &>(a) = args;
    a.G = args.H / pool.Hkv;
    while (a.G > F32_M || args.H / pool.Hkv % a.G != 0) { // as many as a unit has room for, in equal parts
        a.G--;
    }
    a.groups = args.H / a.G;
    a.groups_of_head = a.groups / pool.Hkv;
    a.per_G = (65536 + a.G - 1) / a.G;
    a.chunks = most_chunks(args);
    const float log2e = 1.44269504f;
    a.score_scale = args.softcap > 0 ? args.scale / args.softcap : args.scale * log2e;
    a.score_cap = args.softcap * log2e;
    a.partial = args.scratch;
    a.sums = reinterpret_cast<float2 *>(args.scratch + int64_t(args.T) * args.H * a.chunks * pool.D);
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    switch (pool.D) {
        case 64: return launch<64>(a, st);
        case 128: return launch<128>(a, st);
        case 256: return launch<256>(a, st);
        default: return int(cudaErrorInvalidValue);
    }
}

} // namespace luce
