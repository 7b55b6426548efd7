// Activations of a step into rowmm's order (rowmm_layout.h), with the norm or gate before it. A warp has 256 values of
// one row, a lane 8 in sequence: 16 bytes of F16. A row's values depend on that row alone.
#include "rowmm_pack.cuh"
#include "rowmm_plan.h"
#include "rowmm_ptx.cuh"

namespace luce {
namespace {

constexpr int CHUNK_WARPS = 4; // warps of a block without a row's mean
constexpr int ROW_WARPS = 32; // most warps of a block that has a row
constexpr int ROW_CHUNKS =
    4; // most chunks of such a warp: the fewer warps, the sooner there is room for them

__device__ float silu(float x) {
    return x / (1 + expf(-x));
}
__device__ void store(const RowmmPackArgs &a, const RowsLayout &layout, const float (&v)[OWN], int row,
                      int64_t chunk, int lane) {
    const int C = layout.columns;
    uint8_t *out =
        static_cast<uint8_t *>(a.out) + (row / layout.set * chunks_of(a.K) + chunk) * chunk_bytes(C);
    const int64_t k = chunk * CHUNK + lane * OWN;
    float most = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        most = fmaxf(most, fabsf(v[i]));
        if (a.copy != nullptr && k + i < a.K) {
            a.copy[int64_t(row) * a.K + k + i] = v[i];
        }
    }
    pack_chunk(out, C, row % layout.set, layout.wide, v, most, lane);
}

// grid: chunks / CHUNK_WARPS, rows.
__global__ void __launch_bounds__(CHUNK_WARPS *WARP) pack_chunks_kernel(RowmmPackArgs a, RowsLayout layout) {
    let_next_start();
    const int lane = threadIdx.x % WARP, row = blockIdx.y;
    const int64_t chunk = int64_t(blockIdx.x) * CHUNK_WARPS + threadIdx.x / WARP,
                  k = chunk * CHUNK + lane * OWN;
    float v[OWN], y[OWN], w[OWN];
    if (a.input == ROWMM_HEAD_RMS) {
        load_values(w, a.w, k % a.head, a.head);
    }
    wait_for_previous();
    if (chunk >= chunks_of(a.K)) { // a whole warp
        return;
    }
    load_values(v, a.x + row * a.x_row, k, a.K);
    if (a.input != ROWMM_PLAIN) {
        load_values(y, a.y + row * a.y_row, k, a.K);
    }
    if (a.input == ROWMM_SWIGLU) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            v[i] = silu(v[i]) * y[i];
        }
    }
    if (a.input == ROWMM_HEAD_RMS) {
        const float scale = rsqrtf(warp_sum(squares(v), a.head / OWN) / a.head + a.eps);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            v[i] = v[i] * scale * w[i] * silu(y[i]);
        }
    }
    store(a, layout, v, row, chunk, lane);
}

// grid: rows. A block has a row, warp w its chunks w, w + warps, ...
template <int CHUNKS>
__global__ void __launch_bounds__(CHUNKS == 2 ? ROW_WARPS / 2 * WARP : ROW_WARPS * WARP, CHUNKS == 2 ? 3 : 1)
    pack_rows_kernel(RowmmPackArgs a, RowsLayout layout) {
    __shared__ float sums[ROW_WARPS];
    let_next_start();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP,
              row = blockIdx.x;
    float v[CHUNKS][OWN], w[OWN], sum = 0;
    load_values(w, a.w, warp * CHUNK + lane * OWN, a.K); // of the first chunk
    wait_for_previous();
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        load_values(v[c], a.x + row * a.x_row, int64_t(warp + c * warps) * CHUNK + lane * OWN, a.K);
        sum += squares(v[c]);
    }
    sum = warp_sum(sum, WARP);
    if (lane == 0) {
        sums[warp] = sum;
    }
    __syncthreads();
    sum = warp_sum(lane < warps ? sums[lane] : 0.0f, WARP);
    const float scale = rsqrtf(sum / float(a.K) + a.eps);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int64_t chunk = warp + c * warps;
        if (chunk < chunks_of(a.K)) {
            if (c > 0) {
                load_values(w, a.w, chunk * CHUNK + lane * OWN, a.K);
            }
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                v[c][i] = v[c][i] * scale * w[i];
            }
            store(a, layout, v[c], row, chunk, lane);
        }
    }
}

bool valid(const RowmmPackArgs &a) {
    if (a.T < 0 || a.T > ROWMM_MAX_ROWS || a.K <= 0 || reinterpret_cast<uintptr_t>(a.out) % 16 != 0) {
        return false;
    }
    switch (a.input) {
        case ROWMM_PLAIN: return true;
        case ROWMM_SWIGLU: return a.y != nullptr;
        case ROWMM_RMS: return a.w != nullptr && chunks_of(a.K) <= ROW_WARPS * ROW_CHUNKS;
        case ROWMM_HEAD_RMS:
            return a.w != nullptr && a.y != nullptr && a.head >= 32 && a.head <= CHUNK &&
                   CHUNK % a.head == 0 && a.K % a.head == 0;
        default: return false;
    }
}

} // namespace

int64_t rowmm_x_bytes(int32_t T, int64_t K) {
    return T <= 0 ? 0
                  : (T + SET - 1) / SET * chunks_of(K) *
                        chunk_bytes(RowsLayout(T, false).columns); // wide: the same
}

int cuda::rowmm_pack(const RowmmPackArgs &args, void *stream) {
    if (!valid(args)) {
        return int(cudaErrorInvalidValue);
    }
    if (args.T == 0) {
        return 0;
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    const int chunks = int(chunks_of(args.K)), rows = args.T;
    const bool overlap = args.overlap != 0;
    const RowsLayout layout(args.T, rowmm_has_wgmma());
    if (args.input != ROWMM_RMS) {
        const dim3 grid((chunks + CHUNK_WARPS - 1) / CHUNK_WARPS, rows);
        return int(launch_kernel(pack_chunks_kernel, grid, CHUNK_WARPS * WARP, 0, st, overlap, args, layout));
    }
    if (chunks <= ROW_WARPS) {
        const int warps = (chunks + 1) / 2;
        return int(
            launch_kernel(pack_rows_kernel<2>, dim3(rows), warps * WARP, 0, st, overlap, args, layout));
    }
    return int(launch_kernel(pack_rows_kernel<ROW_CHUNKS>, dim3(rows), ROW_WARPS * WARP, 0, st, overlap, args,
                             layout));
}

} // namespace luce
