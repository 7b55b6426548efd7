// Norms and rotates query and key heads. A warp has a head of a row.
#include "attention/norm_rope.cuh"

#include "attention/sizes.h"
#include "common/kernels.h"
#include "common/overlap.cuh"

namespace luce {
namespace {

constexpr int WARPS = 4; // a block has so many

// The grid is the heads of k and q in blocks of WARPS, rows.
template <int D> __global__ void __launch_bounds__(WARPS *WARP) norm_rope_kernel(NormRopeArgs a) {
    constexpr int OWN = D / WARP;
    __shared__ RopeRoom<D> room[WARPS];
    let_next_start();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, at = blockIdx.x * WARPS + warp;
    const bool is_q = at >= a.k.n_heads;
    const RopeHeads &heads = is_q ? a.q : a.k;
    const int head = is_q ? at - a.k.n_heads : at;
    const int64_t row = blockIdx.y;
    if (head < heads.n_heads) {
        LaneRope<D>::find_by([&](int pair) { return rope_position(a, row, pair); }, a.rope_dim, a.base,
                             nullptr, room[warp], lane);
    }
    wait_for_previous();
    if (head >= heads.n_heads) { // a whole warp leaves
        return;
    }
    const float *x = heads.x + row * heads.x_row + head * heads.x_head + lane * OWN;
    float v[OWN], norm[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        v[i] = x[i];
        norm[i] = heads.norm[lane * OWN + i];
    }
    LaneRope<D>::apply(v, norm, a.eps, a.rope_dim, room[warp], lane);
    float *out = heads.out + (row * heads.n_heads + head) * D + lane * OWN;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        out[i] = v[i];
    }
}

template <int D> int launch(const NormRopeArgs &a, cudaStream_t stream) {
    const dim3 grid((a.k.n_heads + a.q.n_heads + WARPS - 1) / WARPS, a.T);
    return int(launch_kernel(norm_rope_kernel<D>, grid, WARPS * WARP, 0, stream, true, a));
}

} // namespace

int cuda::norm_rope(const NormRopeArgs &args, void *stream) {
    if (args.T == 0) {
        return 0;
    }
    if (args.T < 0 || args.T > 65535 || args.rope_dim < 0 || args.rope_dim > args.D ||
        args.rope_dim % 2 != 0) {
        return int(cudaErrorInvalidValue);
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    return HeadSizes::with(args.D, int(cudaErrorInvalidValue), [&](auto D) { return launch<D()>(args, st); });
}

} // namespace luce
