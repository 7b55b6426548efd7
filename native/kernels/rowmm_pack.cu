// Packs activations of a step into rowmm's order (rowmm_layout.h). The gate before it, the sum of the parts
// that the launch before has left, and what a norm needs are done with it. A warp has 256 values of one row,
// and a lane has 8 in sequence, which are 16 bytes of F16. Of a norm over the row it leaves sums of squares,
// so no warp waits for another: the product applies the scale. A row's values depend on that row alone.
#include "rowmm_pack.cuh"
#include "rowmm_parts.cuh"
#include "rowmm_ptx.cuh"

#include <type_traits>

namespace luce {
namespace {

// A block has few warps, so that the rows of a small step are spread over multiprocessors.
constexpr int WARPS = 2;

__device__ float silu(float x) {
    return x / (1 + expf(-x));
}
__device__ void store(const RowmmPackArgs &a, const RowsLayout &layout, const float (&v)[OWN], int row,
                      int64_t chunk, int lane) {
    const int C = layout.columns;
    uint8_t *out =
        static_cast<uint8_t *>(a.out) + (row / layout.set * chunks_of(a.K) + chunk) * chunk_bytes(C);
    pack_chunk(out, C, row % layout.set, layout.wide, v, largest(v), lane);
}

// Makes values beyond the row's end zeros.
__device__ void cut(float (&v)[OWN], bool present) {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        v[i] = present ? v[i] : 0.0f;
    }
}

// Stands where an input is not parts.
struct NoParts {
    __device__ NoParts(const RowmmParts &, int, int, int64_t) {}
};

// The grid is {chunks / WARPS, rows}. AHEAD is 0, or as many parts of each input are fetched before the first is added.
template <int INPUT, int AHEAD>
__global__ void __launch_bounds__(WARPS *WARP)
    pack_kernel(const __grid_constant__ RowmmPackArgs a, RowsLayout layout,
                const __grid_constant__ RowmmParts parts) {
    constexpr bool PARTS = AHEAD > 0;
    let_next_start();
    const int lane = threadIdx.x % WARP, row = blockIdx.y;
    const int64_t chunk = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP, k = chunk * CHUNK + lane * OWN;
    float v[OWN] = {}, y[OWN] = {}, w[OWN] = {};
    if constexpr (INPUT == ROWMM_HEAD_RMS) {
        load_values(w, a.w, k % a.head, a.head);
    } else if constexpr (INPUT == ROWMM_RMS) {
        load_values(w, a.w, k, a.K);
    }
    const int64_t at = k < a.K ? k : 0;
    const std::conditional_t<PARTS, LaneParts<OWN / 4>, NoParts> of_x(parts, 0, row, at);
    const std::conditional_t<PARTS && INPUT == ROWMM_SWIGLU, LaneParts<OWN / 4>, NoParts> of_y(parts, 1, row,
                                                                                               at);
    wait_for_previous();
    if (chunk >= chunks_of(a.K)) { // this is true for a whole warp
        return;
    }
    if constexpr (!PARTS) {
        load_values(v, a.x + row * a.x_row, k, a.K);
    } else if constexpr (INPUT == ROWMM_RMS) {
        float4 x[AHEAD][2];
        of_x.fetch(x, 0);
        if (a.x != nullptr) {
            load_values(y, a.x + row * a.x_row, k, a.K);
        }
        of_x.add(x, v);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            v[i] = k < a.K ? v[i] + y[i] : 0.0f;
        }
    } else {
        float4 x[AHEAD][2], up[AHEAD][2];
        of_x.fetch(x, 0);
        of_y.fetch(up, 0);
        of_x.add(x, v);
        of_y.add(up, y);
        cut(v, k < a.K);
        cut(y, k < a.K);
    }
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
    if constexpr (INPUT == ROWMM_SWIGLU) {
        if constexpr (!PARTS) {
            load_values(y, a.y + row * a.y_row, k, a.K);
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            v[i] = silu(v[i]) * y[i];
        }
    }
    if constexpr (INPUT == ROWMM_HEAD_RMS) {
        load_values(y, a.y + row * a.y_row, k, a.K);
        gate_head(v, w, y, a.head, a.eps);
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
        if ((a.input != ROWMM_RMS && a.input != ROWMM_SWIGLU) || a.parts->n_weights != n ||
            a.parts->T != a.T || a.K % OWN != 0) {
            return false;
        }
        for (int i = 0; i < n; i++) {
            if (a.parts->weights[i].N != a.K) {
                return false;
            }
        }
    }
    switch (a.input) {
        case ROWMM_PLAIN: return true;
        case ROWMM_SWIGLU: return a.y != nullptr || a.parts != nullptr;
        case ROWMM_RMS: return a.w != nullptr;
        case ROWMM_HEAD_RMS:
            return a.w != nullptr && a.y != nullptr && a.head >= 16 && a.head <= CHUNK &&
                   CHUNK % a.head == 0 && a.K % a.head == 0;
        default: return false;
    }
}

template <int INPUT, int AHEAD>
cudaError_t launch(const RowmmPackArgs &a, const RowmmParts &parts, cudaStream_t stream) {
    const RowsLayout layout(a.T, rowmm_has_wgmma());
    const dim3 grid(unsigned((chunks_of(a.K) + WARPS - 1) / WARPS), unsigned(a.T));
    return launch_kernel(pack_kernel<INPUT, AHEAD>, grid, WARPS * WARP, 0, stream, a.overlap != 0, a, layout,
                         parts);
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
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    RowmmParts parts = {};
    if (args.parts != nullptr) {
        if (const cudaError_t error = rowmm_parts_of(*args.parts, parts); error != cudaSuccess) {
            return int(error);
        }
        if (args.input == ROWMM_RMS) {
            return int(launch<ROWMM_RMS, 8>(args, parts, st));
        }
        // Gate and up have few parts. Of many rows, fewer registers let all warps run at once.
        return int(args.T > 32 ? launch<ROWMM_SWIGLU, 2>(args, parts, st)
                               : launch<ROWMM_SWIGLU, 4>(args, parts, st));
    }
    switch (args.input) {
        case ROWMM_PLAIN: return int(launch<ROWMM_PLAIN, 0>(args, parts, st));
        case ROWMM_RMS: return int(launch<ROWMM_RMS, 0>(args, parts, st));
        case ROWMM_SWIGLU: return int(launch<ROWMM_SWIGLU, 0>(args, parts, st));
        default: return int(launch<ROWMM_HEAD_RMS, 0>(args, parts, st));
    }
}

} // namespace luce
