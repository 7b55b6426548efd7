// Has the last launch of a mixture that stands beside a dense layer (moe.h): both are summed up and normed, their sum is normed
// ahead of the residual, and that is packed for the product behind. A block has a row, and a warp a chunk of it.
#include "common/pointers.h"
#include "matmul/end_row.cuh"
#include "matmul/partials.cuh"
#include "moe/launch_plan.h"
#include "moe/ranks.cuh"

namespace luce {
namespace {

constexpr int BESIDE_WARPS = int(MOE_POST_E / CHUNK);

struct PostParams {
    MoePostArgs a;
    RoutedLayout at;
    RowsLayout layout;
    RowmmPackArgs end;
};

// The grid is rows. Where the dense layer is the shared EXPERT, what up and those ahead of it have left is read before the wait, as
// moe/sum.cu does: down lets this start when up has ended.
template <bool EXPERT>
__global__ void __launch_bounds__(BESIDE_WARPS *WARP, 1)
    moe_post_kernel(const __grid_constant__ PostParams p, const __grid_constant__ RowmmParts parts) {
    __shared__ float of_dense[BESIDE_WARPS], of_experts[BESIDE_WARPS], of_both[BESIDE_WARPS];
    const MoePostArgs &a = p.a;
    const int lane = threadIdx.x % WARP, chunk = threadIdx.x / WARP, chunks = int(blockDim.x) / WARP,
              E = int(a.dims.E), n_used = a.dims.n_used, k = chunk * CHUNK + lane * OWN;
    const int64_t row = blockIdx.x;
    const bool there = k < E; // E is a multiple of 8
    const int at = there ? k : 0;
    let_next_start();
    LaneParts<2> of;
    if (!EXPERT) {
        of = LaneParts<2>(parts, 0, int(row), at);
    }
    for (const float *norm : {a.dense_post, a.experts_post, a.post, a.norm}) {
        prefetch_line(norm != nullptr ? norm + at : a.post);
    }
    const float *weights =
        reinterpret_cast<const float *>(static_cast<const uint8_t *>(a.routed) + p.at.weights) + row * n_used;
    const auto weight = [&](int rank) {
        return rank_weight(weights, a.routed, p.at, a.scales, row, n_used, rank);
    };
    float early[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        early[i] = EXPERT && i < n_used ? weight(i) : 0.0f;
    }
    wait_for_previous();
    float dense[OWN] = {};
    Own sum = {};
    if (EXPERT) {
        if (a.counts != nullptr && int(threadIdx.x) < n_used) {
            const auto *ids =
                reinterpret_cast<const int32_t *>(static_cast<const uint8_t *>(a.routed) + p.at.ids);
            atomicAdd(a.counts + __ldcg(ids + row * n_used + threadIdx.x), 1);
        }
        const Own shared = own_values(a.y + (int64_t(a.dims.T) * n_used + row) * E, k, E);
        add_ranks(sum, 0, a.y, row, n_used, k, E, early, weight);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            dense[i] = reinterpret_cast<const float *>(shared.v)[i];
        }
    } else {
        float4 first[2][2];
        of.fetch(first, 0);
        sum = own_values(a.y + row * E, k, E);
        of.add(first, dense);
    }
    const float *experts = reinterpret_cast<const float *>(sum.v);
    float v[OWN], x[OWN], w[OWN], by_dense[OWN], by_experts[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        dense[i] = there ? dense[i] : 0.0f;
        v[i] = experts[i];
    }
    const float dense_sum = warp_sum(squares(dense), WARP), experts_sum = warp_sum(squares(v), WARP);
    if (lane == 0) {
        of_dense[chunk] = dense_sum;
        of_experts[chunk] = experts_sum;
    }
    fetch_values(x, a.residual + row * E + at);
    load_values(w, a.post, at, E);
    load_values(by_dense, a.dense_post, at, E);
    load_values(by_experts, a.experts_post, at, E);
    __syncthreads();
    const float dense_scale = post_norm(of_dense, chunks, E, a.eps),
                experts_scale = post_norm(of_experts, chunks, E, a.eps);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        v[i] = there ? dense[i] * dense_scale * by_dense[i] + v[i] * experts_scale * by_experts[i] : 0.0f;
    }
    end_row(p.end, p.layout, int(row), v, x, w, of_both);
}

} // namespace

int cuda::moe_post(const MoePostArgs &args, void *stream) {
    const MoeDims &d = args.dims;
    const RowmmArgs *dense = args.parts;
    const bool in_parts =
        dense != nullptr && dense->n_weights == 1 && dense->T == d.T && dense->weights[0].N == d.E;
    if (!moe_has(d) || d.E > MOE_POST_E || d.T > ROWMM_MAX_ROWS || !rowmm_adds_up(d.E) ||
        (args.routed != nullptr ? d.dense == 0 || !given(args.routed) : d.shared() || !in_parts) ||
        !given(args.y) || !given(args.residual) || !given(args.dense_post) || !given(args.experts_post) ||
        !given(args.post) || !given(args.out) ||
        (args.packed != nullptr && (!given(args.packed) || !given(args.norm)))) {
        return int(cudaErrorInvalidValue);
    }
    if (d.T == 0) {
        return 0;
    }
    DeviceLimits device;
    RowmmParts parts = {};
    const bool expert = args.routed != nullptr;
    for (const int error : {device_limits(device), expert ? 0 : rowmm_parts_of(*dense, parts)}) {
        if (error != 0) {
            return error;
        }
    }
    RowmmPackArgs end = {};
    end.T = d.T;
    end.K = d.E;
    end.out = args.packed;
    end.w = args.norm;
    end.eps = args.eps;
    end.copy = args.out;
    end.post_scale = args.post_scale;
    const PostParams p = {args, RoutedLayout(d), RowsLayout(d.T, device.wgmma), end};
    const auto kernel = expert ? moe_post_kernel<true> : moe_post_kernel<false>;
    return int(launch_kernel(kernel, plan_moe_post(d), static_cast<cudaStream_t>(stream), args.overlap != 0,
                             p, parts));
}

} // namespace luce
