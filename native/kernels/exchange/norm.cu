// Adds what several devices have of the sums of a step's rows, and packs them for the product behind, as pack_norm_kernel does
// with the parts of one device (matmul/pack_pairs.cuh). A block has a chunk of one row.
#include "common/overlap.cuh"
#include "common/pointers.h"
#include "exchange/meeting.cuh"
#include "matmul/launch_plan.h"
#include "matmul/pairs.cuh"

namespace luce {
namespace {

__global__ void __launch_bounds__(PAIR_THREADS)
    exchange_norm_kernel(const __grid_constant__ RowmmPackArgs a, RowsLayout layout,
                         const __grid_constant__ RowmmParts parts,
                         const __grid_constant__ ExchangeRanks ranks) {
    constexpr int AHEAD = 8;
    let_next_start();
    const PairPlace place(a, layout);
    const PairParts<AHEAD> of(parts, 0, place.row, place.at);
    const Meeting meeting(ranks);
    const float *residual = a.x + place.row * a.x_row + place.at;
    const int64_t at = (place.row * a.K + place.at) / 2;
    float *square = place.square(a);
    const float2 w = *reinterpret_cast<const float2 *>(a.w + place.at);
    found(of.bits() | address_bits(square) | address_bits(residual) | place.bits());
    wait_for_previous();
    float2 x[AHEAD];
    of.fetch(x);
    const float2 y = fetch_pair(residual), own = of.sum(x, {of.zero(y.x), of.zero(y.y)});
    float2 v = {};
    if (place.there) {
        meeting.send(at, own);
        v = meeting.sum(at, own);
        v.x = y.x + v.x;
        v.y = y.y + v.y;
    }
    place.pack_normed(v, w, square);
}

} // namespace

int cuda::exchange_norm(const ExchangeNormArgs &args, void *stream) {
    const RowmmPackArgs &a = args.pack;
    if (a.T < 0 || a.T > ROWMM_MAX_ROWS || a.K <= 0 || a.parts == nullptr || a.parts->n_weights != 1 ||
        a.parts->T != a.T || a.parts->weights[0].N != a.K || !rowmm_adds_up(a.K) || !given(a.out) ||
        !given(a.copy) || !given(a.w) || !given(a.x) || a.x_row % 4 != 0 ||
        a.T * a.K > args.ranks.step_values || !can_meet(args.ranks)) {
        return int(cudaErrorInvalidValue);
    }
    if (a.T == 0) {
        return 0;
    }
    DeviceLimits device;
    RowmmParts parts = {};
    if (const int error = device_limits(device); error != 0) {
        return error;
    }
    if (const int error = rowmm_parts_of(*a.parts, parts); error != 0) {
        return error;
    }
    return int(launch_kernel(exchange_norm_kernel, plan_pack(device, a).launch,
                             static_cast<cudaStream_t>(stream), true, a, RowsLayout(a.T, device.wgmma), parts,
                             args.ranks));
}

} // namespace luce
