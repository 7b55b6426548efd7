// Packs activations of a step into rowmm's order (matmul/layout.h). The gate before it, the sum of the parts
// that the launch before has left, and what a norm needs are done with it. A lane has 8 values in sequence, which are 16
// bytes of F16. Of a norm over the row it leaves sums of squares, so no warp waits for another chunk: the product applies the
// scale. A row's values depend on that row alone. What most launches of a step do has kernels of its own
// (matmul/pack_pairs.cuh).
#include "matmul/launch_plan.h"
#include "matmul/pack_conv.cuh"
#include "matmul/pack_pairs.cuh"
#include "matmul/pack_post.cuh"

namespace luce {
namespace {

constexpr int WARPS = PACK_WARPS;

__device__ void store(const RowmmPackArgs &a, const RowsLayout &layout, const float (&v)[OWN], int row,
                      int64_t chunk, int lane) {
    const int C = layout.columns;
    uint8_t *out =
        static_cast<uint8_t *>(a.out) + (row / layout.set * chunks_of(a.K) + chunk) * chunk_bytes(C);
    pack_chunk(out, C, row % layout.set, layout.wide, v, largest(v), lane);
}

// The grid is {chunks / WARPS, rows}, and a warp has a chunk.
template <int INPUT, Activation F = SILU>
__global__ void __launch_bounds__(WARPS *WARP)
    pack_kernel(const __grid_constant__ RowmmPackArgs a, RowsLayout layout) {
    let_next_start();
    const int lane = threadIdx.x % WARP, row = blockIdx.y;
    const int64_t chunk = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP, k = chunk * CHUNK + lane * OWN;
    float v[OWN] = {}, y[OWN] = {}, w[OWN] = {};
    if constexpr (INPUT == ROWMM_RMS) {
        load_values(w, a.w, k, a.K);
    }
    wait_for_previous();
    if (chunk >= chunks_of(a.K)) { // this is true for a whole warp
        return;
    }
    load_values(v, a.x + row * a.x_row, k, a.K);
    if constexpr (INPUT == ROWMM_RMS) {
        const float sum = warp_sum(squares(v), WARP);
        if (lane == 0) {
            uint8_t *behind = static_cast<uint8_t *>(a.out) + squares_offset(a.T, a.K);
            reinterpret_cast<float *>(behind)[row * chunks_of(a.K) + chunk] = sum;
        }
        if (a.copy != nullptr) {
            store_values(a.copy + row * a.K, v, k, a.K);
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            v[i] *= w[i];
        }
    }
    if constexpr (INPUT == ROWMM_GLU) {
        load_values(y, a.y + row * a.y_row, k, a.K);
        float gated[OWN];
        activate<F>(v, gated);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            v[i] = gated[i] * y[i];
        }
    }
    if (INPUT != ROWMM_RMS && a.copy != nullptr) {
        store_values(a.copy + row * a.K, v, k, a.K);
    }
    store(a, layout, v, row, chunk, lane);
}

bool valid(const RowmmPackArgs &a) {
    if (a.T < 0 || a.T > ROWMM_MAX_ROWS || a.K <= 0 || reinterpret_cast<uintptr_t>(a.out) % 16 != 0) {
        return false;
    }
    if (a.parts != nullptr) {
        const int64_t n = a.input == ROWMM_RMS ? 1 : 2;
        if ((a.input != ROWMM_RMS && a.input != ROWMM_GLU) || a.parts->n_weights != n || a.parts->T != a.T ||
            !rowmm_adds_up(a.K) || !aligned(a.copy)) {
            return false;
        }
        if (a.post != nullptr) {
            return a.input == ROWMM_RMS && a.K <= ROWMM_POST_K && aligned(a.post) && given(a.x) &&
                   a.x_row % 4 == 0 && a.copy != nullptr && a.parts->weights[0].N == a.K &&
                   (a.out == nullptr || given(a.w));
        }
        for (int i = 0; i < n; i++) {
            if (a.parts->weights[i].N != a.K) {
                return false;
            }
        }
    }
    switch (a.input) {
        case ROWMM_PLAIN: return true;
        case ROWMM_GLU: return a.y != nullptr || a.parts != nullptr;
        case ROWMM_RMS:
            return a.w != nullptr &&
                   (a.parts == nullptr || (aligned(a.w) && aligned(a.x) && a.x_row % 4 == 0));
        case ROWMM_HEAD_RMS:
            return given(a.w) && given(a.x) && given(a.y) && aligned(a.copy) && a.x_row % 4 == 0 &&
                   a.y_row % 4 == 0 && a.head >= 16 && a.head <= CHUNK && CHUNK % a.head == 0 &&
                   a.K % a.head == 0;
        default: return false;
    }
}

} // namespace

int64_t rowmm_x_bytes(int32_t T, int64_t K) {
    return T <= 0 ? 0 : squares_offset(T, K) + (T * chunks_of(K) * int64_t(sizeof(float)) + 15) / 16 * 16;
}

int cuda::rowmm_pack(const RowmmPackArgs &args, void *stream) {
    if (!valid(args)) {
        return int(cudaErrorInvalidValue);
    }
    if (args.T == 0) {
        return 0;
    }
    DeviceLimits device;
    if (const int error = device_limits(device); error != 0) {
        return error;
    }
    const PackPlan plan = plan_pack(device, args);
    const auto launch = [&](auto kernel, const auto &...more) {
        return int(launch_kernel(kernel, plan.launch, static_cast<cudaStream_t>(stream), args.overlap != 0,
                                 args, RowsLayout(args.T, device.wgmma), more...));
    };
    if (args.parts != nullptr) {
        RowmmParts parts = {};
        if (const int error = rowmm_parts_of(*args.parts, parts); error != 0) {
            return error;
        }
        if (args.post != nullptr) {
            return launch(pack_post_kernel, parts);
        }
        if (args.input == ROWMM_RMS) {
            return launch(pack_norm_kernel, parts);
        }
        if (args.activation == GELU) {
            return plan.rows == 1 ? launch(pack_glu_kernel<1, GELU>, parts)
                                  : launch(pack_glu_kernel<2, GELU>, parts);
        }
        return plan.rows == 1 ? launch(pack_glu_kernel<1, SILU>, parts)
                              : launch(pack_glu_kernel<2, SILU>, parts);
    }
    switch (args.input) {
        case ROWMM_PLAIN: return launch(pack_kernel<ROWMM_PLAIN>);
        case ROWMM_RMS: return launch(pack_kernel<ROWMM_RMS>);
        case ROWMM_GLU:
            return args.activation == GELU ? launch(pack_kernel<ROWMM_GLU, GELU>)
                                           : launch(pack_kernel<ROWMM_GLU, SILU>);
        default: return launch(pack_heads_kernel);
    }
}

int cuda::block_conv_pack(const BlockConvPackArgs &args, void *stream) {
    const bool behind = args.parts != nullptr;
    const RowmmArgs *added = args.added;
    if (args.T < 1 || args.T > ROWMM_MAX_ROWS || args.K <= 0 || args.taps < 1 || args.groups < 1 ||
        args.K % (2 * args.groups) != 0 || added == nullptr || added->n_weights != 1 || added->T != args.T ||
        added->weights[0].N != int64_t(2) * args.taps * args.groups || !rowmm_adds_up(added->weights[0].N) ||
        args.x_row % 2 != 0 || !given(args.x) || !given(args.w) || !given(args.base) || args.ctl == nullptr ||
        reinterpret_cast<uintptr_t>(args.out) % 16 != 0 ||
        (behind ? args.parts->n_weights != 1 || args.parts->T != args.T ||
                      args.parts->weights[0].N != args.K || !rowmm_adds_up(args.K) || !aligned(args.copy)
                : args.normed == nullptr)) {
        return int(cudaErrorInvalidValue);
    }
    DeviceLimits device;
    RowmmParts of_added = {}, parts = {};
    for (const int error : {device_limits(device), rowmm_parts_of(*added, of_added),
                            behind ? rowmm_parts_of(*args.parts, parts) : 0}) {
        if (error != 0) {
            return error;
        }
    }
    return int(launch_kernel(behind ? pack_conv_kernel<true> : pack_conv_kernel<false>, plan_pack_conv(args),
                             static_cast<cudaStream_t>(stream), true, args, RowsLayout(args.T, device.wgmma),
                             of_added, parts));
}

} // namespace luce
