// Does the conv of a verify of few rows, of the parts that the product ahead has left. It is short, so that what lies between the
// end of that product and its own counts: places are found, and all that the caches hold is read, ahead of the wait.
#pragma once

#include "deltanet_committed.cuh"
#include "overlap.cuh"
#include "rowmm_parts.cuh"
#include "rowmm_ptx.cuh"

namespace luce {
namespace {

constexpr int SUM_TILE = 128;

// What a kernel needs to add up parts: how many values z, beta and alpha have, and where they go.
struct Summed {
    RowmmParts parts;
    int32_t N[3];
    float *out[3];
};

// Has a lane's parts of 4 values of one row, whose places are found while the launch ahead has not ended.
struct RowParts {
    static constexpr int AHEAD = 4; // so many are asked for at once
    LaneParts<1> of;
    const float4 *from[AHEAD]; // the last part stands for those that there are not

    __device__ RowParts(const RowmmParts &parts, int weight, int row, int64_t n)
        : of(parts, weight, row, n), from{of.first} {
#pragma unroll
        for (int i = 1; i < AHEAD; i++) {
            from[i] = from[i - 1] + (i < of.count ? of.step : 0);
        }
    }
    __device__ uint32_t bits() const {
        uint32_t all = uint32_t(of.count) | uint32_t(of.step);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            all |= address_bits(from[i]);
        }
        return all & 0x7fffffff;
    }
    __device__ __forceinline__ Channels<SUM_TILE> sum() const {
        float4 x[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            x[i] = __ldcg(from[i]);
        }
        Channels<SUM_TILE> v = {};
        const auto add = [&](const float4 &y) { v.x[0] += y.x, v.x[1] += y.y, v.x[2] += y.z, v.x[3] += y.w; };
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (i < of.count) {
                add(x[i]);
            }
        }
#pragma unroll 1
        for (int i = AHEAD; i < of.count; i++) {
            add(__ldcg(of.first + i * of.step));
        }
        return v;
    }
};

// What blocks behind the heads' do in steps of few rows, of which a warp has one.
__device__ void sum_others_of_few(const Summed &sums, int tile, int row) {
    int i = 0;
    for (; i < 2 && tile >= (sums.N[i] + SUM_TILE - 1) / SUM_TILE; i++) {
        tile -= (sums.N[i] + SUM_TILE - 1) / SUM_TILE;
    }
    const int lane = threadIdx.x % WARP, N = sums.N[i], n = tile * SUM_TILE + lane * 4;
    const RowParts of(sums.parts, i + 1, row, n < N ? n : 0);
    float *out = sums.out[i] + int64_t(row) * N + n;
    found(of.bits() | address_bits(out));
    wait_for_previous();
    const Channels<SUM_TILE> v = of.sum();
    if (n < N) {
        *reinterpret_cast<float4 *>(out) = {v.x[0], v.x[1], v.x[2], v.x[3]};
    }
}

// The same for a step of up to GROUP rows of one group of sequences, of parts. A warp has a row, and a sequence's committed rows
// where there is one for it. Behind the wait comes only what takes the row's parts: all else is found, and the window is moved,
// ahead of it.
__global__ void __launch_bounds__(GROUP *WARP, 1)
    conv_few_kernel(const __grid_constant__ Params a, const __grid_constant__ Summed sums) {
    constexpr int S = SUM_TILE;
    // It has committed rows [group][WINDOW][S], then summed ones [T][S].
    extern __shared__ __align__(16) float space[];
    const int lane = threadIdx.x % WARP, t = warp_index(), T = a.shape.T;
    const int summed = a.group * WINDOW * S;
    const int64_t c0 = int64_t(blockIdx.x) * S;

    let_next_start();
    if (const int behind = int(blockIdx.x) - 2 * a.shape.Hk - a.shape.Hv; behind >= 0) {
        sum_others_of_few(sums, behind, t);
        return;
    }
    Control ctl;
    ctl.load(*a.ctl, t, lane);
    RowCtl rows = {};
    if (lane < T) {
        rows = a.ctl->rows[lane];
    }
    Weights<S> w;
    w.load(a.w, c0, lane);
    const RowParts of(sums.parts, 0, t, c0 + lane * 4);
    Committed<S> committed(a, ctl, c0);
    if (t < ctl.n_seqs()) {
        committed.load(lane);
        committed.store(space + t * WINDOW * S, S, lane);
        if (committed.moved) { // no other launch of a step reads or writes it (overlap.cuh)
            committed.store(committed.window, a.C, lane);
        }
    }
    const int i = __shfl_sync(~0u, rows.seq, t);
    int tap_at[WINDOW]; // these count in `space`
    int from = t;
#pragma unroll
    for (int tap = WINDOW - 1; tap >= 0; tap--) {
        const int parent = __shfl_sync(~0u, rows.parent, max(from, 0));
        from = from >= 0 && i >= 0 ? parent : from - 1; // a row of no sequence may say anything
        tap_at[tap] = (from >= 0 ? summed + from * S : (max(i, 0) * WINDOW + WINDOW + from) * S) + lane * 4;
    }
    const SeqCtl &seq = a.ctl->seqs[max(i, 0)];
    float *out = a.out + t * a.C + c0, *log = a.log + seq.slot * a.log_size + (t - seq.row0) * a.log_row + c0;
    found(of.bits() | address_bits(out) | address_bits(log) | tap_at[0] | tap_at[1] | tap_at[2]);
    wait_for_previous();
    Channels<S> taps[1][TAPS];
    taps[0][TAPS - 1] = of.sum();
    taps[0][TAPS - 1].store(space + summed + t * S, lane);
    __syncthreads(); // all have read the log too
    if (i < 0) { // the row is of no sequence
        return;
    }
#pragma unroll
    for (int tap = 0; tap < WINDOW; tap++) {
        taps[0][tap].load(space + tap_at[tap], 0);
    }
    conv_rows<S, 1>(w, taps, blockIdx.x < 2 * a.shape.Hk, {out}, lane);
    taps[0][TAPS - 1].store(log, lane);
}

} // namespace
} // namespace luce
