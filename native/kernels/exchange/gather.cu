// Brings what several devices have of rows' logits to the last one, which chooses tokens (exchange.h).
#include "common/overlap.cuh"
#include "common/pointers.h"
#include "exchange/meeting.cuh"

namespace luce {
namespace {

constexpr int THREADS = 256;

__global__ void __launch_bounds__(THREADS) gather_kernel(const __grid_constant__ GatherArgs a) {
    let_next_start();
    const int last = a.ranks.n_ranks - 1;
    const int64_t begin = int64_t(blockIdx.x) * THREADS + threadIdx.x, step = int64_t(gridDim.x) * THREADS;
    const Meeting meeting(a.ranks, int(blockIdx.x));
    const float4 *part = reinterpret_cast<const float4 *>(a.part);
    wait_for_previous();
    const uint32_t number = meeting.next();
    if (a.ranks.rank != last) {
        for (int64_t i = begin; i < a.T * a.E / 4; i += step) {
            __stcg(meeting.values(last, a.ranks.rank) + i, __ldcg(part + i));
        }
    }
    meeting.meet(number);
    if (threadIdx.x == 0) {
        meeting.reached(number);
    }
    if (a.ranks.rank != last) {
        return;
    }
    for (int sender = 0; sender <= last; sender++) {
        const OutputRows rows = output_rows(a.V, a.ranks.n_ranks, sender);
        float4 *to = reinterpret_cast<float4 *>(a.out + rows.first);
        for (int64_t i = begin, n = rows.n / 4; i < a.T * n; i += step) {
            to[i / n * (a.V / 4) + i % n] =
                sender == last ? __ldcg(part + i) : __ldcv(meeting.values(last, sender) + i);
        }
    }
}

} // namespace

int cuda::gather(const GatherArgs &a, void *stream) {
    const int64_t n_ranks = a.ranks.n_ranks;
    if (n_ranks < 2 || n_ranks > MAX_RANKS || a.T < 0 || !has_output_rows(a.V, n_ranks) ||
        a.E != output_rows(a.V, n_ranks, a.ranks.rank).n || !given(a.part) ||
        (a.ranks.rank == n_ranks - 1 && !given(a.out))) {
        return int(cudaErrorInvalidValue);
    }
    // One grid for all ranks: a block meets those that have the same number.
    const int64_t most = a.T * most_output_rows(a.V, n_ranks), all = (most / 4 + THREADS - 1) / THREADS,
                  blocks = all < EXCHANGE_BLOCKS ? all : EXCHANGE_BLOCKS;
    if (most > a.ranks.values || !can_meet(a.ranks)) {
        return int(cudaErrorInvalidValue);
    }
    if (a.T == 0) {
        return 0;
    }
    return int(launch_kernel(gather_kernel, dim3(unsigned(blocks)), THREADS, 0,
                             static_cast<cudaStream_t>(stream), true, a));
}

} // namespace luce
