// Has rowmm's kernel for one row that nobody has packed: each block norms and packs all of it itself, by the arithmetic of
// rowmm_pack, which spares a launch. Ranges, parts and the order of sums are those of the other kernels, so the bits are the
// same.
#include "matmul/kernel.cuh"
#include "matmul/pack.cuh"

namespace luce {
namespace {

using S = NormShape;
constexpr int WARPS = S::WARPS;

// A block has in shared memory its barriers, all chunks of the row, their sums of squares, and the slots of weights.
struct NormBlock {
    const RowmmParams &p;
    uint8_t *shared;
    int chunks;

    __device__ uint32_t slot_full(int i) const { return shared_address(shared) + 8 * i; }
    __device__ uint32_t slot_free(int i) const { return slot_full(ROWMM_MAX_SLOTS + i); }
    __device__ uint32_t row_full() const { return slot_full(2 * ROWMM_MAX_SLOTS); }
    __device__ uint8_t *chunk(int i) const { return shared + S::X + i * chunk_bytes(1); }
    __device__ float *sums() const { return reinterpret_cast<float *>(chunk(chunks)); }
    __device__ uint8_t *slot(int i) const { return shared + S::row_bytes_of(chunks) + i * p.slot_bytes; }

    __device__ void init() const {
        for (int i = 0; i < p.slots; i++) {
            barrier_init(slot_full(i), COPY_LANES);
            barrier_init_warps(slot_free(i), WARPS);
        }
        barrier_init_warps(row_full(), WARPS);
        barrier_init_done();
    }
};

// Brings the weights of a range's units into the slots.
__device__ void fill(const NormBlock &b, int range) {
    const RowmmParams &p = b.p;
    const int units = p.first[range + 1] - p.first[range];
    WeightsWalk walk(p, p.first[range], units);
    Place slot;
    for (int i = 0; i < units; i++) {
        if (i >= p.slots) {
            barrier_wait(b.slot_free(slot.i), slot.parity ^ 1);
        } else if (COPY_LANES == 1 && i >= IN_FLIGHT) {
            barrier_wait(b.slot_full(i - IN_FLIGHT), 0);
        }
        walk.copy(b.slot_full(slot.i), b.slot(slot.i));
        slot.next(p.slots);
    }
}

// Packs the row, by the warps that multiply.
__device__ void pack_row(const NormBlock &b) {
    const RowmmParams &p = b.p;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t K = int64_t(p.K);
    float w[OWN], v[OWN];
    load_values(w, p.norm, warp * CHUNK + lane * OWN, K);
    wait_for_previous();
    let_next_start(); // sooner, the launch behind would take from the one ahead
    for (int chunk = warp; chunk < b.chunks; chunk += WARPS) {
        const int64_t k = chunk * CHUNK + lane * OWN;
        load_values(v, p.row, k, K);
        if (chunk != warp) {
            load_values(w, p.norm, k, K);
        }
        const float sum = warp_sum(squares(v), WARP);
        if (lane == 0) {
            b.sums()[chunk] = sum;
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            v[i] *= w[i];
        }
        pack_chunk(b.chunk(chunk), 1, 0, false, v, largest(v), lane);
    }
    __syncwarp();
    warp_arrive(b.row_full(), lane);
    barrier_wait(b.row_full(), 0);
}

// Returns what results are multiplied with, as find_scales finds it.
__device__ float scale_of_row(const NormBlock &b) {
    float sum = 0;
    for (int i = threadIdx.x % WARP; i < b.chunks; i += WARP) {
        sum += b.sums()[i];
    }
    return rsqrtf(warp_sum(sum, WARP) / b.p.K + b.p.eps);
}

template <int TYPE>
__device__ __forceinline__ void multiply_run(Sums<1> &acc, const NormBlock &b, Place &slot, int unit,
                                             int end) {
    constexpr int UNITS = units_of_chunk(TYPE);
    const int lane = threadIdx.x % WARP;
    for (; unit < end; unit++) {
        barrier_wait(b.slot_full(slot.i), slot.parity);
        const uint8_t *chunk = b.chunk(unit / UNITS);
        multiply_unit<TYPE, 1, false>(acc, b.slot(slot.i) + fragment_of_warp() * fragment_bytes(TYPE),
                                      chunk + unit % UNITS * (8 / UNITS * 64), chunk + chunk_sums(1), 1, lane,
                                      Downs(), [] {});
        __syncwarp();
        warp_arrive(b.slot_free(slot.i), lane);
        slot.next(b.p.slots);
    }
}
__device__ __forceinline__ void multiply_some(int type, Sums<1> &acc, const NormBlock &b, Place &slot,
                                              int unit, int end) {
    with_type(
        type, [](auto known, auto &...to) { multiply_run<known.value>(to...); }, acc, b, slot, unit, end);
}

// Multiplies a range's units, of which the first is of tile `of_launch` of the launch. `scales` has room for a tile's rows.
__device__ void multiply_range(const NormBlock &b, int range, int of_launch, float *scales) {
    const RowmmParams &p = b.p;
    const int lane = threadIdx.x % WARP, end = p.first[range + 1];
    Place slot;
    for (int at = p.first[range], first = at; at < end; of_launch++) {
        const TilePart part(p, range, of_launch);
        const RowmmSegment &s = p.segments[part.segment];
        const int unit = (at - s.first_unit) % s.units_k;
        const bool has = fragment_of_warp() < part.fragments;
        Sums<1> acc = {};
        if (has) {
            multiply_some(s.type, acc, b, slot, unit, unit + part.units);
        }
        for (int i = 0; !has && i < part.units; i++) { // a narrow tile has no outputs of this warp
            barrier_wait(b.slot_full(slot.i), slot.parity);
            __syncwarp();
            warp_arrive(b.slot_free(slot.i), lane);
            slot.next(p.slots);
        }
        if (at == first) { // no product waits for it
            const float scale = scale_of_row(b);
            if (lane < S::COLUMNS) {
                scales[lane] = scale;
            }
            __syncwarp();
        }
        at += part.units;
        float *to = p.parts != nullptr ? p.parts + (range + of_launch) * int64_t(p.part_rows) * TILE
                    : part.whole       ? nullptr
                                       : part_of(p, range, part.begun);
        if (has) {
            write_tile<1>(p, s, acc, part.tile, to, scales);
        }
    }
}

__global__ void __launch_bounds__(S::THREADS, (launch_blocks<1, false>()))
    rowmm_norm_kernel(const __grid_constant__ RowmmParams p) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ float scales[WARPS][S::COLUMNS];
    const int range = range_of_block(p), warp = threadIdx.x / WARP;
    const NormBlock b{p, held_address(shared), int(chunks_of(int64_t(p.K)))};
    if (threadIdx.x == 0) {
        b.init();
    }
    __syncthreads();
    if (warp == WARPS) {
        if (threadIdx.x % WARP < COPY_LANES) {
            fill(b, range);
        }
        return;
    }
    int tile = first_tile(p, range);
    hold(tile); // it is found while the launch ahead has not ended
    pack_row(b);
    multiply_range(b, range, tile, scales[warp]);
}

} // namespace

RowmmKernel rowmm_kernel_norm() {
    return rowmm_norm_kernel;
}

} // namespace luce
