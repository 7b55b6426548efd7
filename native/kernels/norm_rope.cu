// Norms and rotates query and key heads. A warp has a head of a row, and a lane has D / 32 neighbouring
// values. A head's bits depend on that head alone.
#include "kernels.h"
#include "overlap.cuh"

namespace luce {
namespace {

constexpr int WARP = 32;
constexpr int WARPS = 4; // warps of a block

// The grid is the heads of k and q in blocks of WARPS, rows.
template <int D> __global__ void __launch_bounds__(WARPS *WARP) norm_rope_kernel(NormRopeArgs a) {
    constexpr int OWN = D / WARP;
    __shared__ float shared[WARPS][D];
    let_next_start();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, at = blockIdx.x * WARPS + warp;
    const bool is_q = at >= a.k.n_heads;
    const RopeHeads &heads = is_q ? a.q : a.k;
    const int head = is_q ? at - a.k.n_heads : at, half = a.rope_dim / 2;
    const int64_t row = blockIdx.y;
    float cosine[OWN], sine[OWN]; // those of values lane * OWN + i
    if (head < heads.n_heads) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int j = lane * OWN + i, pair = j < half ? j : j - half;
            cosine[i] = 1;
            sine[i] = 0;
            if (j < a.rope_dim) {
                const float angle =
                    float(a.positions[row]) * powf(a.base, float(-2 * pair) / float(a.rope_dim));
                sincosf(angle, &sine[i], &cosine[i]);
                sine[i] = j < half ? -sine[i] : sine[i];
            }
        }
    }
    wait_for_previous();
    if (head >= heads.n_heads) { // a whole warp leaves
        return;
    }
    const float *x = heads.x + row * heads.x_row + head * heads.x_head + lane * OWN;
    float v[OWN], sum = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        v[i] = x[i];
        sum = fmaf(v[i], v[i], sum);
    }
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) {
        sum += __shfl_xor_sync(~0u, sum, mask);
    }
    const float scale = 1.0f / sqrtf(sum / float(D) + a.eps);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        v[i] = v[i] * scale * heads.norm[lane * OWN + i];
        shared[warp][lane * OWN + i] = v[i];
    }
    __syncwarp();
    float *out = heads.out + (row * heads.n_heads + head) * D + lane * OWN;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int j = lane * OWN + i;
        const float other = j < a.rope_dim ? shared[warp][j < half ? j + half : j - half] : 0.0f;
        out[i] = fmaf(other, sine[i], v[i] * cosine[i]);
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
    switch (args.D) {
        case 32: return launch<32>(args, st);
        case 64: return launch<64>(args, st);
        case 128: return launch<128>(args, st);
        case 256: return launch<256>(args, st);
        default: return int(cudaErrorInvalidValue);
    }
}

} // namespace luce
