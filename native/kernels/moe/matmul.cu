// Computes the products of a mixture of experts (moe.h): up and down. A task is an item (an expert and up to 8
// of its rows) and a few sixteenths of the outputs. A warp has 16 outputs of one matrix, and one
// part of K, or two, or all of them, where there are tasks enough.
//
// A launch has as many blocks as run at once, and each goes through its tasks, which it lists ahead. A warp
// brings its own units into shared memory, ahead and across its tasks; the rows of the next task come
// while one is multiplied. The parts of K are then added by pairs (moe/plan.h). In up, gate and up are two warps
// of the same block, which go through f(gate) * up together. Down packs its rows, which are up's F32
// results, itself. A step of few rows has a kernel of its own (moe/few.cuh), and so have up of one row (moe/one.cuh) and many
// rows (moe/many.cuh, and by wgmma moe/sm90/wide.cuh).
#include "matmul/pack.cuh"
#include "moe/block.cuh"
#include "moe/few.cuh"
#include "moe/launch_plan.h"
#include "moe/many.cuh"
#include "moe/one.cuh"
#include "moe/sm90/wide.cuh"

namespace luce {
namespace {

// The rows of tasks lie in shared memory from row `at` onwards.
struct Rows {
    uint8_t *rows;
    uint32_t barrier; // it is the first of two: tasks have them in turn
    int at, next; // `next` is where the next task's rows begin, or -1 where they do not fit

    // Finds where the next task's rows go while those of this one are read.
    __device__ void place(const MatmulParams &p, int count, int next_count) {
        next = at + count + next_count <= p.capacity ? at + count : next_count <= at ? 0 : -1;
    }
    // Copies what route packed, or packs F32.
    __device__ void fill(const MatmulParams &p, const Task &t, const int *places, int task, int to) const {
        const Group &g = group_of(p, t.expert);
        uint8_t *out = rows + to * p.row_bytes;
        if (p.h == nullptr) {
            if (threadIdx.x < COPY_LANES) {
                const uint32_t bar = barrier + task % 2 * 8;
                copies_begin(bar, t.count * g.record);
                for (int r = 0; r < t.count; r++) {
                    const bool of_shared = t.expert == SHARED;
                    const int row = of_shared ? places[r] - p.T * p.n_used : places[r] / p.n_used;
                    copy_to_shared(shared_address(out + r * p.row_bytes),
                                   p.routed + p.at.rows + (first_row(p.dims, of_shared) + row) * g.record,
                                   g.record, bar, true);
                }
                copies_end(bar);
            }
            return;
        }
        const int lane = threadIdx.x % WARP;
        for (int i = threadIdx.x / WARP; i < t.count * g.chunks; i += ITEM_WARPS) {
            const int column = i / g.chunks, chunk = i - column * g.chunks;
            float v[OWN];
            load_values(v, p.h + places[column] * p.h_row, chunk * CHUNK + lane * OWN, g.K);
            pack_chunk(out + column * p.row_bytes + chunk * chunk_bytes(1), 1, 0, false, v, largest(v), lane);
        }
    }
};

struct alignas(16) BlockShared {
    Parts<MAX_ITEM_ROWS> parts[2]; // steps have them in turn
    Task tasks[MAX_TASKS];
    int places[MAX_TASKS][MAX_ITEM_ROWS];
};

// Lists the block's tasks, and returns how many there are. The first one's units are fetched if they were not early.
__device__ int list_tasks(const MatmulParams &p, BlockShared &s, UnitRing &ring, int early) {
    const MoeItem *items = reinterpret_cast<const MoeItem *>(p.routed + p.at.items);
    const auto [first, x] = TaskAt(p, blockIdx.x); // of the first task
    const int own = threadIdx.x / MAX_ITEM_ROWS, at = blockIdx.x + own * gridDim.x; // this thread lists it
    const TaskAt listed_at(p, at);
    const int item = listed_at.item;
    int4 listed = {SHARED, p.T * p.n_used, 0, 0}, of_first = {SHARED, 0, 0, 0};
    if (item >= 0 && item < p.max_items) {
        listed = __ldcg(reinterpret_cast<const int4 *>(items + item));
    } else {
        const int row = (item + p.n_shared) * p.item_rows;
        listed.y += row;
        listed.z = min(p.T - row, p.item_rows);
    }
    if (first >= 0) {
        of_first = __ldcg(reinterpret_cast<const int4 *>(items + first));
    }
    const int n_items = __ldcg(reinterpret_cast<const int32_t *>(p.routed + p.at.head));
    if (first >= n_items || of_first.x != early) {
        if (ring.filled > 0) {
            ring.skip_filled();
            ring.units.begin(p, NONE, x);
        }
        if (first >= n_items) {
            return 0;
        }
        ring.units.from += expert_offset(p.experts.matrices[Work(p, p.experts).matrix], of_first.x);
        ring.fill(p);
    }
    const int left = p.tasks_of(n_items) - int(blockIdx.x);
    const int n_tasks = (left + int(gridDim.x) - 1) / int(gridDim.x);
    if (own < n_tasks) {
        const int r = threadIdx.x % MAX_ITEM_ROWS;
        if (r == 0) {
            s.tasks[own] = {listed.x, listed_at.x, listed.z, 0};
        }
        if (r < listed.z) {
            const int32_t *list = reinterpret_cast<const int32_t *>(p.routed + p.at.places);
            s.places[own][r] = item < 0 ? listed.y + r : __ldcg(list + listed.y + r);
        }
    }
    return n_tasks;
}

__device__ __forceinline__ void do_tasks(const MatmulParams &p, BlockShared &s, UnitRing &ring, Rows &rows,
                                         int n_tasks) {
    int turn = 0;
    for (int i = 0; i < n_tasks; i++) {
        const Task t = s.tasks[i];
        const Group &g = group_of(p, t.expert);
        const Work w(p, g);
        const bool more = i + 1 < n_tasks;
        if (more) {
            rows.place(p, t.count, s.tasks[i + 1].count);
            if (rows.next >= 0) {
                rows.fill(p, s.tasks[i + 1], s.places[i + 1], i + 1, rows.next);
            }
        }
        if (p.h == nullptr) {
            barrier_wait(rows.barrier + i % 2 * 8, i / 2 % 2);
        }
        const int column = min(int(threadIdx.x) % WARP / 4, t.count - 1);
        const uint8_t *row = rows.rows + (rows.at + column) * p.row_bytes;
        for (int step = 0; step < p.steps; step++, turn ^= 1) {
            if (const int fragment = w.fragment_at(p, g, t.x, step); fragment < g.fragments) {
                multiply_step<MAX_ITEM_ROWS, false>(p, s.tasks, ring, w, t, fragment, row, n_tasks, t.count,
                                                    s.parts[turn]);
            }
            __syncthreads();
            write_out<MAX_ITEM_ROWS>(p, g, s.parts[turn], s.places[i], t.count, t.x, step);
        }
        if (more && rows.next < 0) {
            rows.fill(p, s.tasks[i + 1], s.places[i + 1], i + 1, 0);
            if (p.h != nullptr) {
                __syncthreads();
            }
        }
        rows.at = max(rows.next, 0);
    }
}

// Returns the block's rows, and makes the barriers of all ready.
__device__ Rows rows_of(const MatmulParams &p, uint8_t *shared) {
    const Rows rows = {shared + BARRIER_BYTES + ITEM_WARPS * p.slots * p.slot_bytes,
                       shared_address(shared) + ITEM_WARPS * MAX_SLOTS * 8, 0, 0};
    if (threadIdx.x == 0) {
        barrier_init(rows.barrier, COPY_LANES);
        barrier_init(rows.barrier + 8, COPY_LANES);
    }
    barrier_init_done();
    return rows;
}

// Items of the shared expert come first, and their weights are read while the launch waits for what is ahead.
// Down fetches the others' first weights while up runs. The list that it sees then may be an old one, whose
// weights are not used.
__global__ void __launch_bounds__(ITEM_THREADS, BLOCKS_SM)
    moe_matmul_kernel(const __grid_constant__ MatmulParams p) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ BlockShared s;
    UnitRing ring(p, shared);
    Rows rows = rows_of(p, shared);
    const auto [first, x] = TaskAt(p, blockIdx.x);
    int early = first < 0 ? SHARED : NONE;
    if (first >= 0 && p.h != nullptr) {
        const int listed = __ldcg(&reinterpret_cast<const MoeItem *>(p.routed + p.at.items)[first].expert);
        early = listed >= 0 && listed < p.n_expert ? listed : NONE;
    }
    __syncthreads();
    ring.units.begin(p, early, x);
    if (early != NONE) {
        ring.fill(p);
    }
    wait_for_previous();
    let_next_start(); // this comes only now, so that the launch behind sees what the one ahead has written.
    const int n_tasks = list_tasks(p, s, ring, early);
    if (n_tasks == 0) {
        return;
    }
    __syncthreads();
    while (ring.filled < p.slots && ring.units.find(p, s.tasks, n_tasks)) {
        ring.fill(p);
    }
    rows.fill(p, s.tasks[0], s.places[0], 0, 0);
    __syncthreads();
    do_tasks(p, s, ring, rows, n_tasks);
}

// ---- launches ----

static_assert(sizeof(BlockShared) == BLOCK_OWN && BLOCK_OWN + BARRIER_BYTES <= MATMUL_BESIDES);
static_assert(sizeof(FewShared<FEW_ROWS>) <= BLOCK_OWN && sizeof(FewShared<FEWEST_ROWS>) == FEWEST_OWN);
static_assert(sizeof(OneShared) == ONE_OWN && sizeof(ManyShared) == MANY_OWN);
static_assert(sizeof(WideShared<WIDE_ROWS>) == WideShape<WIDE_ROWS>::OWN);

int multiply(const MoeMatmulArgs &a, bool up, cudaStream_t stream) {
    const MoeDims &d = a.dims;
    MatmulParams p = {};
    if (!moe_has(d) || !given(a.routed) || !given(a.out) || (!up && !given(a.h)) || !set_params(p, a, up)) {
        return int(cudaErrorInvalidValue);
    }
    if (d.T == 0) {
        return 0;
    }
    DeviceLimits device;
    if (const int error = cuda::device_limits(device); error != 0) {
        return error;
    }
    LaunchPlan plan;
    if (many_rows(d)) {
        if (d.wide != 0 && (!device.wgmma || d.wide != WIDE_ROWS)) {
            return int(cudaErrorInvalidValue);
        }
        if (!up) {
            if (!given(a.records)) {
                return int(cudaErrorInvalidValue);
            }
            p.records = static_cast<const uint8_t *>(a.records);
            const int64_t blocks = (d.places() * chunks_of(d.h_row()) + ITEM_WARPS - 1) / ITEM_WARPS;
            const cudaError_t error =
                launch_kernel(pack_places_kernel, dim3(unsigned(blocks)), ITEM_THREADS, 0, stream,
                              a.overlap != 0, a.h, static_cast<uint8_t *>(a.records), d.places(),
                              int64_t(d.T) * d.n_used, d.FF, d.FF_shared, d.h_row(), wide_rows(d));
            if (error != cudaSuccess) {
                return int(error);
            }
        }
        if (wide_rows(d)) {
            plan = plan_wide(device, p);
            return int(launch_kernel(moe_wide_kernel<WIDE_ROWS>, plan, stream, a.overlap != 0, p));
        }
        plan = plan_many(device, p);
        return int(launch_kernel(moe_many_kernel, plan, stream, a.overlap != 0, p));
    }
    const bool one = up && d.T == 1 && plan_up_one(device, p, plan);
    if (!one) {
        plan = plan_experts(device, p);
    }
    const auto kernel = one              ? moe_up_one_kernel
                        : fewest_rows(d) ? moe_few_kernel<FEWEST_ROWS>
                        : few_rows(d)    ? moe_few_kernel<FEW_ROWS>
                                         : moe_matmul_kernel;
    return int(launch_kernel(kernel, plan, stream, a.overlap != 0, p));
}

} // namespace

int cuda::moe_up(const MoeMatmulArgs &args, void *stream) {
    return multiply(args, true, static_cast<cudaStream_t>(stream));
}

int cuda::moe_down(const MoeMatmulArgs &args, void *stream) {
    return multiply(args, false, static_cast<cudaStream_t>(stream));
}

} // namespace luce
