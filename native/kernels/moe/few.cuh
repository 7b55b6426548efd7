// Has the products of a step of few rows (moe/plan.h), whose blocks choose the experts themselves. Of very few rows down's take
// the experts that up has left: to choose them anew beside up's blocks takes instructions from these.
//
// Each expert that a row chose is one item, which has a column for each row of the step, chosen or not. So up brings the
// step's rows into shared memory once, before it knows who chose what.
#pragma once

#include "matmul/pack.cuh"
#include "moe/block.cuh"
#include "moe/choice.cuh"

namespace luce {

template <int ROWS> struct FewShared {
    union {
        Parts<ROWS> parts[2]; // steps have them in turn
        struct {
            Candidates candidates[ROWS];
            int experts[FEW_PAIRS]; // those of all pairs
            uint32_t rows[MOE_MAX_EXPERTS / 4]; // a byte has a bit for each row that chose the expert
        };
    };
    Task tasks[MAX_TASKS];
    int places[MAX_TASKS][ROWS]; // each row's, or -1
};

// A lane knows of N pairs, 32 apart, whether each is the first with its expert, and which item that makes. Items follow
// each other as their first pairs do.
template <int N> struct Items {
    int row[N]; // that of the lane's pair, or FEW_ROWS
    int expert[N], index[N];
    bool first[N];
    int count;

    // This may run before the experts are chosen.
    __device__ __forceinline__ Items(const MatmulParams &p, int lane) {
#pragma unroll
        for (int w = 0; w < N; w++) {
            const int own = lane + w * WARP;
            row[w] = own < p.T * p.n_used ? own / p.n_used : FEW_ROWS;
        }
    }
    // `rows` has a bit for each row that chose an expert, by expert.
    __device__ __forceinline__ void find(const int *experts, const uint8_t *rows, int lane) {
        count = 0;
#pragma unroll
        for (int w = 0; w < N; w++) {
            const bool present = row[w] < FEW_ROWS;
            expert[w] = present ? experts[lane + w * WARP] : SHARED;
            first[w] = present && (rows[present ? expert[w] : 0] & ((1 << row[w]) - 1)) == 0;
            const uint32_t firsts = __ballot_sync(~0u, first[w]);
            index[w] = count + __popc(firsts & ((1u << lane) - 1));
            count += __popc(firsts);
        }
    }
    // Returns the pairs of an expert.
    __device__ __forceinline__ uint64_t pairs_of(int id) const {
        uint64_t pairs = 0;
#pragma unroll
        for (int w = 0; w < N; w++) {
            pairs |= uint64_t(__ballot_sync(~0u, expert[w] == id)) << w * WARP;
        }
        return pairs;
    }
    // Returns the first pair of an item, or -1 where there is no such item.
    __device__ __forceinline__ int pair_of(int item) const {
        int pair = -1;
#pragma unroll
        for (int w = 0; w < N; w++) {
            const int lane = __ffs(int(__ballot_sync(~0u, first[w] && index[w] == item))) - 1;
            pair = lane < 0 ? pair : lane + w * WARP;
        }
        return pair;
    }
    __device__ __forceinline__ int expert_of(int pair) const {
        int found = __shfl_sync(~0u, expert[0], pair % WARP);
#pragma unroll
        for (int w = 1; w < N; w++) {
            const int other = __shfl_sync(~0u, expert[w], pair % WARP);
            found = pair / WARP == w ? other : found;
        }
        return found;
    }
};

// Says which place of an item each row has, by the lane of its number.
__device__ __forceinline__ int place_of(const MatmulParams &p, bool shared, uint64_t pairs, int row) {
    const int rank =
        __ffs(int(uint32_t(pairs >> row * p.n_used) & uint32_t((uint64_t(1) << p.n_used) - 1))) - 1;
    return shared ? p.T * p.n_used + row : rank < 0 ? -1 : row * p.n_used + rank;
}

// Lists the block's tasks, of which a warp has every ITEM_WARPS-th, and returns how many there are. The first's item begins
// with `pair`.
template <int ROWS, int N>
__device__ __forceinline__ int list_few(const MatmulParams &p, FewShared<ROWS> &s, const Items<N> &items,
                                        int pair, int lane) {
    const int end = p.tasks_of(items.count);
    int n = 0;
    for (int at = blockIdx.x; at < end; at += gridDim.x, n++) {
        if (n % ITEM_WARPS != int(threadIdx.x) / WARP) {
            continue;
        }
        const auto [item, x] = TaskAt(p, at);
        pair = n == 0 ? pair : items.pair_of(item);
        const int expert = items.expert_of(max(pair, 0));
        const uint64_t pairs = items.pairs_of(expert);
        if (lane == 0) {
            s.tasks[n] = {item < 0 ? SHARED : expert, x, p.T, 0};
        }
        if (lane < p.T) {
            s.places[n][lane] = place_of(p, item < 0, pairs, lane);
        }
    }
    return n;
}

// Copies the step's rows, which route packed for the shared expert or for the others.
__device__ __forceinline__ void copy_rows(const MatmulParams &p, uint8_t *rows, uint32_t barrier,
                                          bool for_shared) {
    if (threadIdx.x / WARP == ITEM_WARPS - 1 && threadIdx.x % WARP < COPY_LANES) {
        const int record = p.experts.record;
        copies_begin(barrier, p.T * record);
#pragma unroll 1
        for (int r = 0; r < p.T; r++) {
            copy_to_shared(shared_address(rows + r * p.row_bytes),
                           p.routed + p.at.rows + (first_row(p.dims, for_shared) + r) * record, record,
                           barrier, true);
        }
        copies_end(barrier);
    }
}

// Packs the rows of h of a task.
__device__ __forceinline__ void pack_h(const MatmulParams &p, const Group &g, uint8_t *rows,
                                       const int *places) {
    const int lane = threadIdx.x % WARP;
    for (int i = threadIdx.x / WARP; i < p.T * g.chunks; i += ITEM_WARPS) {
        const int row = i / g.chunks, chunk = i - row * g.chunks;
        if (places[row] >= 0) {
            float v[OWN];
            load_values(v, p.h + places[row] * p.h_row, chunk * CHUNK + lane * OWN, g.K);
            pack_chunk(rows + row * p.row_bytes + chunk * chunk_bytes(1), 1, 0, false, v, largest(v), lane);
        }
    }
}

template <int ROWS>
__device__ __forceinline__ void do_few(const MatmulParams &p, FewShared<ROWS> &s, UnitRing &ring,
                                       uint8_t *rows, uint32_t barrier, int n_tasks) {
    const uint8_t *row = rows + min(int(threadIdx.x) % WARP / 4, p.T - 1) * p.row_bytes;
    int turn = 0;
    for (int i = 0; i < n_tasks; i++) {
        const Task t = s.tasks[i];
        const Group &g = group_of(p, t.expert);
        const Work w(p, g);
        if (p.h != nullptr) { // the last task's rows were read before its last barrier
            pack_h(p, g, rows, s.places[i]);
            __syncthreads();
        } else if (i == 0) {
            barrier_wait(barrier, 0);
        } else if (p.dims.dense != 0 && t.expert != SHARED && s.tasks[i - 1].expert == SHARED) {
            copy_rows(p, rows, barrier, false); // once in a block: the shared expert's tasks come first
            barrier_wait(barrier, 1);
        }
        for (int step = 0; step < p.steps; step++, turn ^= 1) {
            if (const int fragment = w.fragment_at(p, g, t.x, step); fragment < g.fragments) {
                multiply_step<ROWS, true>(p, s.tasks, ring, w, t, fragment, row, n_tasks, p.T, s.parts[turn]);
            }
            __syncthreads();
            write_out<ROWS>(p, g, s.parts[turn], s.places[i], p.T, t.x, step);
        }
    }
}

// The shared expert's tasks come first. Their weights are fetched before the launch waits, and in down the others' too:
// up has waited for the logits, or leaves the experts while down polls. The last block of up leaves them, to all launches behind.
template <int ROWS>
__global__ void __launch_bounds__(ITEM_THREADS, ROWS == FEWEST_ROWS ? FEWEST_BLOCKS : BLOCKS_SM)
    moe_few_kernel(const __grid_constant__ MatmulParams p) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ FewShared<ROWS> own;
    FewShared<ROWS> &s =
        *reinterpret_cast<FewShared<ROWS> *>(held_address(reinterpret_cast<uint8_t *>(&own)));
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    UnitRing ring(p, shared);
    uint8_t *rows = shared + BARRIER_BYTES + ITEM_WARPS * p.slots * p.slot_bytes;
    const uint32_t barrier = shared_address(shared) + ITEM_WARPS * MAX_SLOTS * 8;
    if (threadIdx.x == 0) {
        barrier_init(barrier, COPY_LANES);
    }
    barrier_init_done();
    for (int i = threadIdx.x; i < MOE_MAX_EXPERTS / 4; i += ITEM_THREADS) {
        s.rows[i] = 0;
    }
    Items<ROWS == FEW_ROWS ? 2 : 1> items(p, lane);
    __syncthreads();
    const bool up = p.h == nullptr, keeps = up && blockIdx.x == gridDim.x - 1;
    const auto [item, x] = TaskAt(p, blockIdx.x);
    ring.units.begin(p, item < 0 ? SHARED : NONE, x);
    if (item < 0) {
        ring.fill(p);
    }
    if (up) {
        wait_for_previous();
        let_next_start(); // not ahead of the wait: down polls for what this launch leaves
        copy_rows(p, rows, barrier, item < 0); // ahead of the weights, which would delay it
    }
    if (const int pairs = up ? 0 : polled_pairs(p.dims); pairs > 0) {
        if (const int pair = threadIdx.x; pair < pairs) {
            const int expert = chosen_expert(p.routed, p.at, pair);
            s.experts[pair] = expert;
            atomicOr(&s.rows[expert / 4], 1u << (expert % 4 * 8 + pair / p.n_used));
        }
    } else if (warp < p.T) {
        const float *logits =
            reinterpret_cast<const float *>(p.routed + p.at.logits) + warp * logits_row(p.dims);
        const Choice choice = choose_experts(p.dims, logits, s.candidates[warp], keeps, lane);
        if (lane < p.n_used) {
            s.experts[warp * p.n_used + lane] = choice.expert;
            atomicOr(&s.rows[choice.expert / 4], 1u << (choice.expert % 4 * 8 + warp));
        }
        if (keeps) {
            keep_choice(p.dims, p.at, p.routed, warp, choice, lane);
        }
    }
    __syncthreads();
    items.find(s.experts, reinterpret_cast<const uint8_t *>(s.rows), lane);
    const int pair = items.pair_of(item);
    if (item >= 0 && pair >= 0) {
        const int expert = items.expert_of(pair);
        ring.units.from += expert_offset(p.experts.matrices[Work(p, p.experts).matrix], expert);
        ring.fill(p);
    }
    const int n_tasks = list_few(p, s, items, pair, lane);
    __syncthreads();
    while (n_tasks > 0 && ring.filled < p.slots && ring.units.find(p, s.tasks, n_tasks)) {
        ring.fill(p);
    }
    if (!up) {
        wait_for_previous();
        let_next_start();
    }
    if (n_tasks == 0) {
        if (up) { // the copy has to have ended when the block does
            barrier_wait(barrier, 0);
        }
        return;
    }
    do_few(p, s, ring, rows, barrier, n_tasks);
}

} // namespace luce
