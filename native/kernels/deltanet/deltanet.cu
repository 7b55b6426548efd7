// Computes the gated delta rule over the rows of a step.
// An item of work is W columns (v dimensions) of one v head's state of one sequence. Columns never
// meet, so items do not either. The grid is what the device holds at once, or less. A block takes every
// gridDim-th item of the sequences that the step has, so a step captured for many costs one no more.
// A thread keeps 2 columns by S / 8 k entries in registers from the first row to the last. 8 lanes of a
// warp share 2 columns and sum over k by a butterfly, in the same order for every row. So a row's bits depend
// on its ancestors only. Rows come through shared memory, TILE_ROWS at a time, STAGES - 1 tiles ahead.
//
// In a tree, the registers keep the parent's state over its leaves, so siblings follow at no cost. A row
// whose parent's state is not there starts from the nearest saved ancestor (depths 0, 5, 10 are saved in
// shared memory, or fewer where a device has less) or from the committed state, and replays the rows between. A chain saves and
// replays none.
#include "deltanet/launch_plan.h"
#include "deltanet/run.cuh"
#include "deltanet/worker.cuh"

namespace luce {
namespace {

constexpr int SINGLE_ROWS = 8; // up to so many rows of a verify are run one by one

// The grid is any number of blocks up to the items of all sequences. Three blocks on an SM keep the memory
// busy where there are many sequences. Four would spill registers. SINGLY has Worker::run_singly() run what is no tree.
template <int S, bool APPEND, bool SINGLY>
__global__ void __launch_bounds__(Layout<S>::THREADS, 3) deltanet_kernel(const __grid_constant__ Params a) {
    __shared__ Shared<S, APPEND> sh;
    extern __shared__ Cols save_space[];
    let_next_start();
    Item item{0, 0};
    item.skip(blockIdx.x, Layout<S>::BLOCKS * a.shape.Hv);
    while (true) {
        Worker<S, APPEND> worker(a, sh, save_space, item);
        if (!worker.read_control(item.seq)) {
            wait_for_previous();
            return;
        }
        if (!worker.template run<SINGLY>(item)) {
            return;
        }
        __syncthreads(); // all have left this item's shared memory
    }
}

template <int S> int launch(const DeltaArgs &args, cudaStream_t stream) {
    using L = Layout<S>;
    DeviceLimits device;
    if (const int error = cuda::device_limits(device); error != 0) {
        return error;
    }
    const Params a(args, delta_saves(device, args.shape));
    const auto kernel = a.shape.mode == DELTA_APPEND ? deltanet_kernel<S, true, false>
                        : a.shape.T <= SINGLE_ROWS   ? deltanet_kernel<S, false, true>
                                                     : deltanet_kernel<S, false, false>;
    const int64_t bytes = delta_shared(device, a.shape);
    int per_sm = 1;
    if (a.shape.max_seqs() > 1) {
        // The driver is asked on each call: its answer holds for so many bytes on the current device.
        cudaError_t error = allow_shared(kernel, size_t(bytes));
        if (error == cudaSuccess) {
            error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, L::THREADS, size_t(bytes));
        }
        if (error != cudaSuccess || per_sm == 0) {
            return int(error != cudaSuccess ? error : cudaErrorLaunchOutOfResources);
        }
    }
    const bool overlap = a.shape.mode == DELTA_VERIFY;
    return int(launch_kernel(kernel, plan_delta(device, a.shape, per_sm), stream, overlap, a));
}

} // namespace

int cuda::deltanet(const DeltaArgs &args, void *stream) {
    const DeltaShape &s = args.shape;
    if (s.T < 1 || s.n_slots < 1 || s.Hk < 1 || s.Hv % s.Hk != 0 ||
        (s.mode == DELTA_VERIFY ? s.T > MAX_ROWS : s.n_prompts < 1)) {
        return int(cudaErrorInvalidValue);
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    return StateSizes::with(s.S, int(cudaErrorInvalidValue), [&](auto S) { return launch<S()>(args, st); });
}

} // namespace luce
