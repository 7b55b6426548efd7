// Computes attention of a step's rows over paged KV, in two kernels. In the first, one block a multiprocessor
// leaves each chunk's partial results in scratch. The second one adds them up (attention/combine.cu). The
// grid depends on the step's width and the device. How much there is to do and who does it is the plan's, which a
// third kernel makes once a step for all its layers (attention/plan.cuh).
#include "attention/f32.cuh"
#include "attention/launch_plan.h"
#include "attention/mma.cuh"
#include "attention/sm90/wgmma.cuh"
#include "common/pointers.h"

#include <algorithm>

namespace luce {
namespace {

// ---- partial results ----

// Hopper's own instructions need code for sm_90a.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool HOPPER = true;
#else
constexpr bool HOPPER = false;
#endif

template <int D, int TYPE, bool AHEAD>
__device__ void tensor_attention(const AttentionParams &a, uint8_t *shared) {
    using L = Layout<D, TYPE, HOPPER, AHEAD>;
    Plan &plan = *reinterpret_cast<Plan *>(shared + L::PLAN);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (L::WGMMA) {
        lay_ones<L>(shared);
    }
#endif
    plan.have(a, L::MAX_M);
    if (!plan.stays()) {
        return;
    }
    int leaving = L::WARPS; // so many warps leave a slot
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (L::WGMMA) {
        leaving = prepare_wgmma<L>(a, plan, shared);
    }
#endif
    // It does not run beside the plan's writes: racecheck takes those 4 KiB further for this one.
    if (threadIdx.x < L::SLOTS) {
        barrier_init(shared_address(shared) + L::FULL + threadIdx.x * 8, LOAD_THREADS);
        barrier_init_warps(shared_address(shared) + L::EMPTY + threadIdx.x * 8, leaving);
    }
    Told::init(L::told(shared));
    if (AHEAD && threadIdx.x < L::TILES) {
        barrier_init_warps(shared_address(shared) + L::READY + threadIdx.x * 8, L::UNPACK_THREADS / WARP);
        barrier_init_warps(shared_address(shared) + L::LEFT + threadIdx.x * 8, L::WARPS);
    }
    __syncthreads();
    if (threadIdx.x < L::MATH_THREADS) {
        if constexpr (!L::WGMMA) {
            mma_units<D, TYPE, HOPPER>(a, plan, shared);
        }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(L::MATH_REGISTERS));
            wgmma_units<D, TYPE, AHEAD>(a, plan, shared);
        }
#endif
    } else if (threadIdx.x >= MMA_THREADS - LOAD_THREADS) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        if constexpr (L::WGMMA) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(L::LOAD_REGISTERS));
        }
#endif
        Loader<L> loader{a, plan, shared};
        loader.run();
    } else if constexpr (AHEAD) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(L::UNPACK_REGISTERS));
#endif
        unpack_units<TYPE, L>(shared);
    }
}

template <int D, int TYPE>
__global__ void __launch_bounds__(TYPE == KV_F32 ? F32_THREADS : MMA_THREADS, 1)
    attention_kernel(const __grid_constant__ AttentionParams a) {
    extern __shared__ __align__(1024) uint8_t shared[];
    let_next_start(); // the kernel that adds up may come up as this one's blocks end
    if constexpr (TYPE == KV_F32) {
        f32_attention<D>(a, shared);
    } else {
        // On 12.0 threads of heads of 256 keep less in memory so. Hopper's have registers for addresses of their own.
        tensor_attention<D, TYPE, false>(a, HOPPER || D != 256 ? shared : held_address(shared));
    }
}

// It is for packed cells in steps whose units all fit one warpgroup. Its threads have 128 registers at first. A layer of 1 to 8
// rows at 102,400 positions of Q8_0 takes 0.37 to 0.40 of what it takes with neither this nor the faster unpacking, which alone
// gives 16 rows 0.67 (H200; bench/results/2026-11-22-kernels-2-h200.txt): some 1.5 ms of a step of the 27b.
template <int D, int TYPE>
__global__ void __launch_bounds__(MMA_THREADS + 4 * WARP, 1)
    ahead_kernel(const __grid_constant__ AttentionParams a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t shared[];
    let_next_start();
    tensor_attention<D, TYPE, true>(a, shared);
#endif
}

template <int D, int TYPE>
cudaError_t launch_parts(const AttentionParams &a, const DeviceLimits &device, cudaStream_t stream) {
    const LaunchPlan plan = plan_attention(device, a);
    if constexpr ((TYPE == KV_Q8_0 || TYPE == KV_Q4_0) && D <= WGMMA_D) {
        if (unpacks_ahead(device, a)) {
            return launch_kernel(ahead_kernel<D, TYPE>, plan, stream, true, a);
        }
    }
    return launch_kernel(attention_kernel<D, TYPE>, plan, stream, true, a);
}

template <int D>
cudaError_t launch_type(const AttentionParams &a, const DeviceLimits &device, cudaStream_t stream) {
    return KvTypes::with(a.pool.type, cudaErrorInvalidValue,
                         [&](auto type) { return launch_parts<D, type()>(a, device, stream); });
}

int32_t most_chunks(const AttentionArgs &args) {
    return chunk_at(args.max_pages * PAGE - 1) + 1;
}

// Makes the plan for all blocks of all layers. It never says let_next_start(), so that what is behind comes up when it has ended,
// and may read the plan at once.
__global__ void __launch_bounds__(MAX_WORKERS)
    plan_kernel(const __grid_constant__ AttentionParams a, int most_pairs, MadePlan *to) {
    __shared__ MadePlan made;
    made.plan.make(a, most_pairs, &made.ends_of_workers[0][0]);
    if (threadIdx.x < PLAN_LAYERS) {
        made.taken[threadIdx.x] = 0;
    }
    __syncthreads();
    wait_for_previous();
    for (int i = int(threadIdx.x); i < int(sizeof(MadePlan) / 16); i += MAX_WORKERS) {
        reinterpret_cast<uint4 *>(to)[i] = reinterpret_cast<const uint4 *>(&made)[i];
    }
    __threadfence();
}

template <int D> int launch(const AttentionParams &a, const DeviceLimits &device, cudaStream_t stream) {
    const cudaError_t error = launch_type<D>(a, device, stream);
    return error == cudaSuccess ? attention_combine(a, device, stream) : int(error);
}

// Returns what the arguments and the device alone decide.
AttentionParams params_of(const AttentionArgs &args, const DeviceLimits &device) {
    AttentionParams a{};
    static_cast<AttentionArgs &>(a) = args;
    a.window -=
        args.window > 0 ? args.committed : 0; // rows count as one position lower, and see no more below
    const HeadGroups heads = head_groups(args);
    a.G = heads.size;
    a.groups = heads.groups;
    a.groups_of_head = heads.of_head;
    a.per_G = (65536 + a.G - 1) / a.G;
    a.score_scale = args.softcap > 0 ? args.scale / args.softcap : args.scale * LOG2E;
    a.score_cap = args.softcap * LOG2E;
    a.workers = attention_workers(device);
    return a;
}

} // namespace

int64_t attention_scratch(const AttentionArgs &args) {
    const int D =
        args.pool.type == KV_F32 ? args.pool.D : args.pool.D / 2; // means take as much room as D floats
    return int64_t(args.T) * args.H * most_chunks(args) * (D + 2);
}

int64_t attention_plan_bytes() {
    return sizeof(MadePlan);
}

int cuda::attention_plan(const AttentionArgs &args, void *plan, void *stream) {
    if (args.T == 0) {
        return 0;
    }
    if (args.T < 0 || args.T > MAX_ROWS || args.pool.Hkv <= 0 || args.H % args.pool.Hkv != 0 ||
        !aligned(plan)) {
        return int(cudaErrorInvalidValue);
    }
    DeviceLimits device;
    if (const int error = device_limits(device); error != 0) {
        return error;
    }
    AttentionParams a = params_of(args, device);
    a.taken = a.pool.type == KV_F32 ? nullptr : static_cast<MadePlan *>(plan)->taken;
    return int(launch_kernel(plan_kernel, dim3(1), MAX_WORKERS, 0, static_cast<cudaStream_t>(stream), true, a,
                             plan_units(device, a).pairs, static_cast<MadePlan *>(plan)));
}

int cuda::attention(const AttentionArgs &args, void *stream) {
    const KvPool &pool = args.pool;
    if (args.T == 0) {
        return 0;
    }
    if (args.T < 0 || args.T > MAX_ROWS || args.max_pages <= 0 || pool.Hkv <= 0 || args.H % pool.Hkv != 0 ||
        (args.committed != 0 && args.window == 1) || !aligned(args.q) || !aligned(args.out) ||
        !aligned(args.packed) || (args.out == nullptr) == (args.packed == nullptr) ||
        !aligned(args.scratch) || !aligned(args.plan) || args.layer < 0 || args.layer >= PLAN_LAYERS ||
        !aligned(pool.k) || !aligned(pool.v)) {
        return int(cudaErrorInvalidValue);
    }
    DeviceLimits device;
    if (const int error = device_limits(device); error != 0) {
        return error;
    }
    AttentionParams a = params_of(args, device);
    if (args.plan != nullptr) {
        a.taken = static_cast<MadePlan *>(args.plan)->taken + args.layer;
    }
    a.chunks = most_chunks(args);
    a.means = args.scratch; // it comes first, since it is read and written in words of 16 bytes
    a.sums = reinterpret_cast<float2 *>(args.scratch + attention_scratch(args)) -
             int64_t(args.T) * args.H * a.chunks;
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    return HeadSizes::with(pool.D, int(cudaErrorInvalidValue),
                           [&](auto D) { return launch<D()>(a, device, st); });
}

} // namespace luce
