// Has the kernel of up and down for many rows, which prompts have. An item has up to MANY_ROWS rows of an expert, so that a
// fragment is made into the tensor core's operands once for all of them. A warp has 16 outputs of one matrix and all of K. The
// rows lie as records (moe/plan.h), and come to shared memory a chunk at a time for the whole block; each warp brings its own
// units (moe/units.cuh). The parts of K and the order of their sums are those of the other kernels, so the bits are the same.
#pragma once

#include "matmul/pack.cuh"
#include "moe/units.cuh"

namespace luce {

constexpr int MANY_TILES = MANY_ROWS / 8;

struct ManyShared {
    float up[ITEM_WARPS / 2][MANY_ROWS]
            [FRAGMENT + 1]; // of up, for the warp that has gate; the padding makes banks differ
    // Of each row its place, and the number of its record. With pointers units of Q8_0 had no room for two blocks (params.h).
    uint16_t places[MANY_ROWS], records[MANY_ROWS];
};
static_assert(MOE_MAX_PAIRS + MOE_MAX_ROWS <= 1 << 16, "places in 16 bits");

// Rows that lie side by side, each a chunk of its own (read_rows and what else asks for columns takes it).
struct Apart {};
template <int NT>
__device__ __forceinline__ uint4 read_rows(const uint8_t *stage, int group, int n, Apart, int lane) {
    return word_at<uint4>(stage + (n * 8 + lane / 4) * chunk_bytes(1) + (group * 4 + lane % 4) * 16);
}
template <int NT> __device__ __forceinline__ int sums_place(Apart, int n, int lane) {
    return (n * 8 + lane / 4) * chunk_bytes(1) + lane % 4 * 8;
}
struct ApartDowns {
    __device__ __forceinline__ float2 operator()(const uint8_t *tail, Apart, int n, int lane) const {
        const uint8_t *p = tail + (n * 8 + lane % 4 * 2) * chunk_bytes(1) + 32;
        return {word_at<float>(p), word_at<float>(p + chunk_bytes(1))};
    }
};

// Adds the products of a unit, which is the i-th of a chunk, with the rows of a stage to acc.
__device__ __forceinline__ void multiply_many(int type, Sums<MANY_TILES> &acc, const uint8_t *unit,
                                              const uint8_t *stage, int i, int lane) {
    with_type(
        type,
        [](auto known, Sums<MANY_TILES> &to, const uint8_t *fragment, const uint8_t *rows, int of_chunk,
           int own) {
            constexpr int TYPE = known.value, VALUES = 8 / units_of_chunk(TYPE) * 64;
            multiply_unit<TYPE, MANY_TILES, false>(to, fragment, rows + of_chunk * VALUES,
                                                   rows + chunk_sums(1), Apart(), own, ApartDowns(), [] {});
        },
        acc, unit, stage, i, lane);
}

// Rows' activations: what route has packed, or what up left.
struct Records {
    const uint8_t *first;
    int64_t bytes; // of a row

    __device__ Records(const MatmulParams &p, const Group &g)
        : first(p.records != nullptr ? p.records : p.routed + p.at.rows),
          bytes(p.records != nullptr ? row_record(p.h_row) : g.record) {}
    __device__ const uint8_t *at(int record) const { return first + record * bytes; }
};

// Brings a chunk of an item's rows to a stage, each warp some of them. What lies in the place of rows that are not there meets no
// others.
__device__ __forceinline__ void bring_rows(const ManyShared &s, const Records &from, uint8_t *stage,
                                           uint32_t full, int count, int chunk) {
    constexpr int BYTES = chunk_bytes(1);
    const int warp = threadIdx.x / WARP;
    if (threadIdx.x % WARP < COPY_LANES) {
        copies_begin(full, max(count - warp + ITEM_WARPS - 1, 0) / ITEM_WARPS * BYTES);
        for (int r = warp; r < count; r += ITEM_WARPS) {
            copy_to_shared(shared_address(stage) + r * BYTES, from.at(s.records[r]) + chunk * BYTES, BYTES,
                           full, true);
        }
        copies_end(full);
    }
}

// Returns an item by its number, of which the shared expert's are below zero, or one of no rows.
__device__ __forceinline__ MoeItem many_item(const MatmulParams &p, int number) {
    if (number < 0) {
        const int first = (number + p.n_shared) * p.item_rows;
        return {SHARED, p.T * p.n_used + first, min(p.T - first, p.item_rows), 0};
    }
    if (number >= __ldcg(reinterpret_cast<const int32_t *>(p.routed + p.at.head))) {
        return {SHARED, 0, 0, 0};
    }
    const int4 listed = __ldcg(reinterpret_cast<const int4 *>(p.routed + p.at.items) + number);
    return {listed.x, listed.y, listed.z, 0};
}
// Returns the place of an item's row, and the number of its record.
__device__ __forceinline__ int many_place(const MatmulParams &p, const MoeItem &item, int row) {
    return item.expert == SHARED
               ? item.first + row
               : __ldcg(reinterpret_cast<const int32_t *>(p.routed + p.at.places) + item.first + row);
}
__device__ __forceinline__ int many_record(const MatmulParams &p, const MoeItem &item, int place) {
    return p.records != nullptr ? place : item.expert == SHARED ? place - p.T * p.n_used : place / p.n_used;
}

// Leaves a warp's sums of a fragment in the rows' places: down's as they are, and f(gate) * up, whose two fragments are of two warps.
template <int NT, class Shared>
__device__ __forceinline__ void leave_fragment(const MatmulParams &p, const Group &g, const Work &w,
                                               Shared &s, const Sums<NT> &total, int fragment, int count) {
    const int lane = threadIdx.x % WARP;
    const auto each = [&](auto &&use) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int row = n * 8 + lane % 4 * 2 + k % 2, o = lane / 4 + k / 2 * 8;
                if (row < count && fragment * FRAGMENT + o < g.N) {
                    use(total[n][k], row, o);
                }
            }
        }
    };
    const auto write = [&](float v, int row, int o) {
        p.out[s.places[row] * p.out_row + fragment * FRAGMENT + o] = v;
    };
    if (p.log_matrices == 0) {
        each(write);
        return;
    }
    if (w.matrix == 1) {
        each([&](float v, int row, int o) { s.up[w.fragment][row][o] = v; });
    }
    __syncthreads();
    if (w.matrix == 0) {
        each([&](float v, int row, int o) {
            write(activated(p.activation, v) * s.up[w.fragment][row][o], row, o);
        });
    }
    __syncthreads();
}

// The grid is items, the shared expert's first, times the tasks of one.
__global__ void __launch_bounds__(ITEM_THREADS, MANY_BLOCKS)
    moe_many_kernel(const __grid_constant__ MatmulParams p) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ ManyShared s;
    const int lane = threadIdx.x % WARP;
    const auto [number, x] = TaskAt(p, blockIdx.x);
    UnitRing ring(p, shared);
    const uint32_t full = shared_address(shared) + ITEM_WARPS * MAX_SLOTS * 8; // a barrier for each stage
    if (threadIdx.x == 0) {
        for (int i = 0; i < MANY_STAGES; i++) {
            barrier_init(full + i * 8, ITEM_WARPS * COPY_LANES);
        }
    }
    barrier_init_done();
    uint8_t *const stages = shared + BARRIER_BYTES + ITEM_WARPS * p.slots * p.slot_bytes;
    wait_for_previous();
    let_next_start();
    const MoeItem item = many_item(p, number);
    if (item.count == 0) {
        return;
    }
    const Group &g = group_of(p, item.expert);
    const Records records(p, g);
    const Work w(p, g);
    const Matrix &m = g.matrices[w.matrix];
    const Task task = {item.expert, x, item.count, 0};
    if (int(threadIdx.x) < item.count) {
        const int place = many_place(p, item, threadIdx.x);
        s.places[threadIdx.x] = uint16_t(place);
        s.records[threadIdx.x] = uint16_t(many_record(p, item, place));
    }
    __syncthreads();
    ring.units.begin(p, item.expert, x);
    while (ring.filled < p.slots && ring.units.find(p, &task, 1)) {
        ring.fill(p);
    }
    const int sequence = p.steps * g.chunks; // of chunks, step after step
    bring_rows(s, records, stages, full, item.count, 0);
    Sums<MANY_TILES> total, pair, acc;
    for (int i = 0; i < sequence; i++) {
        const int step = i / g.chunks, chunk = i - step * g.chunks, fragment = w.fragment_at(p, g, x, step);
        barrier_wait(full + i % MANY_STAGES * 8, i / MANY_STAGES % 2);
        __syncthreads(); // rows of the chunk before are done with
        if (i + 1 < sequence) {
            const int next = (i + 1) % MANY_STAGES;
            bring_rows(s, records, stages + next * MANY_STAGE, full + next * 8, item.count,
                       chunk + 1 == g.chunks ? 0 : chunk + 1);
        }
        int part = 0; // the chunk is of this part of K
        while (g.begin(part + 1, 1) <= chunk) {
            part++;
        }
        if (chunk == g.begin(part, 1)) {
#pragma unroll
            for (int n = 0; n < MANY_TILES; n++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    acc[n][k] = 0;
                }
            }
        }
        if (fragment < g.fragments) {
            for (int u = 0; u < m.units; u++) {
                const uint8_t *unit = ring.take(p);
                multiply_many(m.type, acc, unit, stages + i % MANY_STAGES * MANY_STAGE, u, lane);
                ring.next(p, &task, 1);
            }
        }
        if (chunk + 1 == g.begin(part + 1, 1)) { // parts are added by pairs
            const bool last = part + 1 == 1 << g.log_parts;
            const float *scales =
                m.scales > 0
                    ? reinterpret_cast<const float *>(m.packed + expert_offset(m, item.expert) + m.scales)
                    : nullptr;
#pragma unroll
            for (int n = 0; n < MANY_TILES; n++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    float v = acc[n][k];
                    if (scales != nullptr && fragment < g.fragments) {
                        v *= scales[fragment * FRAGMENT + lane / 4 + k / 2 * 8];
                    }
                    pair[n][k] = part % 2 == 0 ? v : pair[n][k] + v;
                    if (last || part % 2 == 1) {
                        total[n][k] = part < 2 ? pair[n][k] : total[n][k] + pair[n][k];
                    }
                }
            }
        }
        if (chunk + 1 < g.chunks) {
            continue;
        }
        leave_fragment(p, g, w, s, total, fragment, item.count);
    }
}

// Packs what up left, a warp for a chunk of a row. Places of the shared expert have its width.
__global__ void __launch_bounds__(ITEM_THREADS)
    pack_places_kernel(const float *h, uint8_t *records, int64_t places, int64_t routed, int64_t FF,
                       int64_t FF_shared, int64_t h_row, bool wide) {
    wait_for_previous();
    let_next_start();
    const int64_t chunks = chunks_of(h_row), at = int64_t(blockIdx.x) * ITEM_WARPS + threadIdx.x / WARP;
    const int64_t place = at / chunks, chunk = at - place * chunks, K = place < routed ? FF : FF_shared;
    const int lane = threadIdx.x % WARP;
    if (place >= places || chunk * CHUNK >= K) {
        return;
    }
    float v[OWN];
    load_values(v, h + place * h_row, chunk * CHUNK + lane * OWN, K);
    pack_chunk(records + place * row_record(h_row) + chunk * chunk_bytes(1), 1, 0, wide, v, largest(v), lane);
}

} // namespace luce
