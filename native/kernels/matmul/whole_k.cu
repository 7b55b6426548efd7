// Has rowmm's kernel for few rows of one weight. A block has 16 outputs and all of K, so that it adds up the parts itself,
// and the results are whole without a kernel behind. The parts and the order of their sum are those of the other kernels
// (matmul/plan.h), so the bits are the same.
#include "matmul/multiply.cuh"

namespace luce {
namespace {

constexpr int WARPS = WHOLE_WARPS, THREADS = WARPS * WARP, BARRIERS = WHOLE_BARRIERS;

// Says which units of a tile a part has. Units count in the tile.
struct Part {
    int range, unit, end;
};

// Finds the range that has a unit of the launch. Ranges are about equally long.
__device__ int range_of(const RowmmParams &p, int unit) {
    int r = min(int(int64_t(unit) * p.ranges / p.first[p.ranges]), p.ranges - 1);
    while (p.first[r] > unit) {
        r--;
    }
    while (p.first[r + 1] <= unit) {
        r++;
    }
    return r;
}
__device__ Part part_of_range(const RowmmParams &p, int begin, int range) {
    const int end = begin + p.segments[0].units_k;
    return {range, max(p.first[range], begin) - begin, min(p.first[range + 1], end) - begin};
}

// Multiplies a unit with the rows x, all of K.
template <int TYPE>
__device__ __forceinline__ void multiply_rows(Sums<1> &acc, const uint8_t *fragment, const uint8_t *x, int C,
                                              int unit, int lane) {
    constexpr int UNITS = units_of_chunk(TYPE);
    const uint8_t *chunk = x + unit / UNITS * chunk_bytes(C);
    multiply_unit<TYPE, 1, false>(acc, fragment, chunk + unit % UNITS * (8 / UNITS * C * 64),
                                  chunk + chunk_sums(C), C, lane, Downs(), [] {});
}
template <int TYPE>
__device__ __forceinline__ void multiply_part(Sums<1> &acc, const uint8_t *weights, const uint8_t *x, int C,
                                              const Part &part, int lane) {
    for (int unit = part.unit; unit < part.end; unit++) {
        const uint8_t *fragment = weights + unit * fragment_bytes(TYPE);
        if (C == 1) { // one row's addresses are known when this is compiled
            multiply_rows<TYPE>(acc, fragment, x, 1, unit, lane);
        } else {
            multiply_rows<TYPE>(acc, fragment, x, C, unit, lane);
        }
    }
}
__device__ __forceinline__ void multiply_any(int type, Sums<1> &acc, const uint8_t *weights, const uint8_t *x,
                                             int C, const Part &part, int lane) {
    with_type(
        type, [](auto known, auto &...to) { multiply_part<known.value>(to...); }, acc, weights, x, C, part,
        lane);
}

// Leaves a part's sums in [column][16 outputs].
__device__ void leave_sums(const RowmmSegment &s, const Sums<1> &acc, int fragment, int rows, float *to) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int column = lane % 4 * 2 + k % 2, o = lane / 4 + k / 2 * 8, n = fragment * FRAGMENT + o;
        if (column < rows) {
            const float scale = s.output_scale != nullptr && n < s.N ? s.output_scale[n] : 1.0f;
            to[column * FRAGMENT + o] = acc[0][k] * scale;
        }
    }
}

// The grid is {fragments}.
__global__ void __launch_bounds__(THREADS, 1) rowmm_whole_kernel(const __grid_constant__ RowmmParams p) {
    extern __shared__ __align__(128) uint8_t shared[];
    const RowmmSegment &s = p.segments[0];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, fragment = blockIdx.x, C = p.columns;
    const int units_k = s.units_k, tile = fragment / FRAGMENTS;
    const int begin = tile * units_k, first = range_of(p, begin),
              parts = range_of(p, begin + units_k - 1) - first + 1;
    const int row_bytes = units_k / units_of_chunk(s.type) * chunk_bytes(C);
    uint8_t *weights = shared + BARRIERS, *x = weights + units_k * s.fragment_bytes;
    float *sums = reinterpret_cast<float *>(x + row_bytes);
    const uint32_t own = shared_address(shared) + warp * 8, rows = shared_address(shared) + WARPS * 8;
    let_next_start();
    if (threadIdx.x == 0) {
        barrier_init(rows, COPY_LANES);
        barrier_init_done();
    }
    // A warp fetches the weights of its parts.
    const bool copies = lane < COPY_LANES;
    if (lane == 0) {
        barrier_init(own, COPY_LANES);
        barrier_init_done();
    }
    __syncwarp();
    if (copies) {
        int units = 0;
        for (int i = warp; i < parts; i += WARPS) {
            const Part part = part_of_range(p, begin, first + i);
            units += part.end - part.unit;
        }
        copies_begin(own, units * s.fragment_bytes);
        for (int i = warp; i < parts; i += WARPS) {
            const Part part = part_of_range(p, begin, first + i);
            for (int unit = part.unit; unit < part.end; unit++) {
                copy_to_shared(shared_address(weights) + unit * s.fragment_bytes,
                               s.packed + fragment_offset(s.type, units_k, s.N, fragment, unit),
                               s.fragment_bytes, own, false);
            }
        }
        copies_end(own);
    }
    __syncthreads();
    wait_for_previous();
    if (threadIdx.x < COPY_LANES) {
        copies_begin(rows, row_bytes);
        copy_to_shared(shared_address(x), p.x, row_bytes, rows, true);
        copies_end(rows);
    }
    // The residual is asked for ahead of the product.
    const int o = threadIdx.x % FRAGMENT, column = threadIdx.x / FRAGMENT, n = fragment * FRAGMENT + o;
    const bool writes = column < p.rows && n < s.N;
    const float residual =
        writes && s.residual != nullptr ? __ldcg(s.residual + column * s.residual_row + n) : 0.0f;
    barrier_wait(own, 0);
    barrier_wait(rows, 0);
    for (int i = warp; i < parts; i += WARPS) {
        Sums<1> acc = {};
        multiply_any(s.type, acc, weights, x, C, part_of_range(p, begin, first + i), lane);
        leave_sums(s, acc, fragment, p.rows, sums + i * p.rows * FRAGMENT);
    }
    __syncthreads();
    if (writes) {
        const float *part = sums + column * FRAGMENT + o;
        float sum = part[0]; // and not 0, which would make +0 of -0
#pragma unroll 8
        for (int i = 1; i < parts; i++) {
            sum += part[i * p.rows * FRAGMENT];
        }
        s.out[column * s.out_row + n] = s.residual != nullptr ? sum + residual : sum;
    }
}

} // namespace

RowmmKernel rowmm_kernel_whole() {
    return rowmm_whole_kernel;
}

} // namespace luce
