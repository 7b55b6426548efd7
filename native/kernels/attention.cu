// Attention of a step's rows over paged KV, in two kernels: one block a multiprocessor leaves each chunk's partial
// results in scratch, then a block for each row and head adds them up in the order of chunks. The grid depends on the
// step's width and the device; how much there is to do, each block reads from the control block (attention_plan.cuh).
#include "attention_f32.cuh"
#include "attention_mma.cuh"

namespace luce {
namespace {

// ---- partial results ----

// Blocks have 227 KB of shared memory from sm_90 to sm_10x, elsewhere 99 KB or more.
constexpr bool big_blocks(int architecture) {
    return architecture >= 900 && architecture < 1100;
}
#ifdef __CUDA_ARCH__
constexpr bool BIG_BLOCKS = big_blocks(__CUDA_ARCH__);
#else
constexpr bool BIG_BLOCKS = false;
#endif

template <int D, int TYPE>
__global__ void __launch_bounds__(TYPE == KV_F32 ? F32_THREADS : MMA_THREADS, 1)
    attention_kernel(const __grid_constant__ AttentionParams a) {
    extern __shared__ __align__(128) uint8_t shared[];
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;"); // combine_kernel may come up beside this one
#endif
    if constexpr (TYPE == KV_F32) {
        f32_attention<D>(a, shared);
    } else {
        mma_attention<D, TYPE, BIG_BLOCKS>(a, shared);
    }
}

template <int D, int TYPE> cudaError_t launch_parts(AttentionParams &a, int blocks, cudaStream_t stream) {
    cudaFuncAttributes attributes; // of the code that was compiled for this device
    cudaError_t error = cudaFuncGetAttributes(&attributes, attention_kernel<D, TYPE>);
    if (error != cudaSuccess) {
        return error;
    }
    int bytes = int(sizeof(F32Layout<D>)), most_pairs = F32_M;
    if constexpr (TYPE != KV_F32) {
        const bool big = big_blocks(10 * attributes.ptxVersion);
        bytes = big ? MmaLayout<D, TYPE, true>::BYTES : MmaLayout<D, TYPE, false>::BYTES;
        most_pairs = big ? MmaLayout<D, TYPE, true>::MAX_M : MmaLayout<D, TYPE, false>::MAX_M;
    }
    a.tile_rows = most_pairs / a.G;
    // on each call, since it holds for the current device only
    error =
        cudaFuncSetAttribute(attention_kernel<D, TYPE>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) {
        return error;
    }
    const int threads = TYPE == KV_F32 ? F32_THREADS : MMA_THREADS;
    attention_kernel<D, TYPE><<<blocks, threads, size_t(bytes), stream>>>(a);
    return cudaGetLastError();
}

template <int D> cudaError_t launch_type(AttentionParams &a, int blocks, cudaStream_t stream) {
    switch (a.pool.type) {
        case KV_F32: return launch_parts<D, KV_F32>(a, blocks, stream);
        case KV_F16: return launch_parts<D, KV_F16>(a, blocks, stream);
        case KV_Q4_0: return launch_parts<D, KV_Q4_0>(a, blocks, stream);
        case KV_Q8_0: return launch_parts<D, KV_Q8_0>(a, blocks, stream);
        default: return cudaErrorInvalidValue;
    }
}

// ---- their sum ----

constexpr int PARTS =
    8; // chunk i is added by group i % PARTS of a block's threads, the groups' sums in order

__device__ float block_maximum(float x, float *shared) {
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) {
        x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
    }
    if (threadIdx.x % WARP == 0) {
        shared[threadIdx.x / WARP] = x;
    }
    __syncthreads();
    for (int w = 0; w < int(blockDim.x) / WARP; w++) {
        x = fmaxf(x, shared[w]);
    }
    return x;
}

__device__ float4 scale_add(float4 x, float w, float4 sum) {
    return {fmaf(x.x, w, sum.x), fmaf(x.y, w, sum.y), fmaf(x.z, w, sum.z), fmaf(x.w, w, sum.w)};
}

// grid: heads, rows. A thread has four columns.
template <int D> __global__ void __launch_bounds__(PARTS *D / 4) combine_kernel(AttentionParams a) {
    __shared__ float4 sums_of_parts[PARTS][D / 4];
    __shared__ float weights_of_parts[PARTS], maxima[PARTS * D / 4 / WARP];
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory"); // until all of attention_kernel is in memory
#endif
    const int column = threadIdx.x % (D / 4), part = threadIdx.x / (D / 4);
    const int64_t row = blockIdx.y, head = blockIdx.x, pair = row * a.H + head;
    float4 *out = reinterpret_cast<float4 *>(a.out + pair * D) + column;
    const RowCtl ctl = a.ctl->rows[row];
    const int first = chunk_at(lowest_visible(ctl.position, a.first, a.window));
    const int last = ctl.seq < 0 ? -1 : chunk_at(ctl.position);
    if (last < first) { // it sees nothing
        if (part == 0) {
            *out = {};
        }
        return;
    }
    const float2 *sums = a.sums + pair * a.chunks;
    const float4 *partial = reinterpret_cast<const float4 *>(a.partial + pair * a.chunks * D) + column;
    float most = -INFINITY;
    for (int c = first + int(threadIdx.x); c <= last; c += PARTS * D / 4) {
        most = fmaxf(most, sums[c].x);
    }
    most = block_maximum(most, maxima);
    const float origin = most == -INFINITY ? 0.0f : most;
    float4 sum = {};
    float weight = 0;
#pragma unroll 8
    for (int c = first + (part + PARTS - first % PARTS) % PARTS; c <= last; c += PARTS) {
        const float2 s = sums[c];
        const float w = exp2_fast(s.x - origin);
        weight = fmaf(s.y, w, weight);
        sum = scale_add(partial[int64_t(c) * (D / 4)], w, sum);
    }
    sums_of_parts[part][column] = sum;
    if (column == 0) {
        weights_of_parts[part] = weight;
    }
    __syncthreads();
    if (part != 0) {
        return;
    }
    sum = {};
    weight = 0;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        sum = scale_add(sums_of_parts[p][column], 1.0f, sum);
        weight += weights_of_parts[p];
    }
    const float scale = weight == 0 ? 0.0f : 1.0f / weight;
    float4 gate = {1, 1, 1, 1};
    if (a.gate != nullptr) {
        const float *g = a.gate + row * a.gate_row + head * a.gate_head + column * 4;
        gate = {1 / (1 + expf(-g[0])), 1 / (1 + expf(-g[1])), 1 / (1 + expf(-g[2])), 1 / (1 + expf(-g[3]))};
    }
    *out = {sum.x * scale * gate.x, sum.y * scale * gate.y, sum.z * scale * gate.z, sum.w * scale * gate.w};
}

int32_t most_chunks(const AttentionArgs &args) {
    return chunk_at(args.max_pages * PAGE - 1) + 1;
}

// From sm_90 on the second kernel's blocks come up while the first one's end, and wait there.
template <int D> cudaError_t launch_combine(const AttentionParams &a, int capability, cudaStream_t stream) {
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(a.H, a.T);
    config.blockDim = dim3(PARTS * D / 4);
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = capability >= 9 ? 1 : 0;
    return cudaLaunchKernelEx(&config, combine_kernel<D>, a);
}

template <int D> int launch(AttentionParams &a, cudaStream_t stream) {
    int device = 0, blocks = 0, capability = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device);
    }
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, device);
    }
    if (error == cudaSuccess) {
        error = launch_type<D>(a, blocks, stream);
    }
    if (error == cudaSuccess) {
        error = launch_combine<D>(a, capability, stream);
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
        args.H / pool.Hkv > F32_M || !aligned(args.q, 16) || !aligned(args.out, 16) ||
        !aligned(args.scratch, 16) || !aligned(pool.k, 16) || !aligned(pool.v, 16)) {
        return int(cudaErrorInvalidValue);
    }
    AttentionParams a{};
    static_cast<AttentionArgs &>(a) = args;
    a.G = args.H / pool.Hkv;
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
