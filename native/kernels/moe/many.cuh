// Has the kernel of up and down for many rows, which prompts have. An item has up to MANY_ROWS rows of an expert, or WIDE_ROWS by
// wgmma, so that a fragment is made into the tensor core's operands once for all of them. A warp has 16 outputs of one matrix and
// all of K. The rows lie as records (moe/plan.h), and come to shared memory a chunk at a time for the whole block; each warp brings
// its own units (moe/units.cuh). The parts of K and the order of their sums are those of the other kernels, so the bits are the same.
#pragma once

#include "matmul/pack.cuh"
#include "moe/units.cuh"

#include <cuda_pipeline.h>

namespace luce {

// A block's own; `up` is of up, for the warp that has gate. The padding makes banks differ.
template <int ROWS> struct ManyShared {
    float up[ITEM_WARPS / 2][ROWS][FRAGMENT + 1];
    const uint8_t *records[ROWS];
    int places[ROWS];
};

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
template <int ROWS>
__device__ __forceinline__ void multiply_many(int type, Sums<ROWS / 8> &acc, const uint8_t *unit,
                                              const uint8_t *stage, int i, int lane) {
    with_type(
        type,
        [](auto known, Sums<ROWS / 8> &to, const uint8_t *fragment, const uint8_t *rows, int of_chunk,
           int own) {
            constexpr int TYPE = known.value, NT = ROWS / 8;
            constexpr int VALUES = 8 / units_of_chunk(TYPE) * 64; // of a row
            if constexpr (ManyShape<ROWS>::WIDE) {
                multiply_unit<TYPE, NT, true>(to, fragment, rows + of_chunk * VALUES * ROWS,
                                              rows + chunk_sums(ROWS), ROWS, own, Downs(), [] {});
            } else {
                multiply_unit<TYPE, NT, false>(to, fragment, rows + of_chunk * VALUES, rows + chunk_sums(1),
                                               Apart(), own, ApartDowns(), [] {});
            }
        },
        acc, unit, stage, i, lane);
}

// Brings chunks of an item's rows to stages, each warp some of the rows. What lies in the place of rows that are not there meets
// no others.
template <int ROWS> struct RowsBringer;

// A row is copied as it lies, and a barrier of each stage tells when it is there.
template <> struct RowsBringer<MANY_ROWS> {
    const uint8_t *const *records;
    uint32_t full;
    int count;

    __device__ RowsBringer(const ManyShared<MANY_ROWS> &s, uint8_t *shared, int count)
        : records(s.records), full(shared_address(shared) + ITEM_WARPS * MAX_SLOTS * 8), count(count) {}
    static __device__ void init(uint8_t *shared) {
        for (int i = 0; threadIdx.x == 0 && i < ManyShape<MANY_ROWS>::STAGES; i++) {
            barrier_init(shared_address(shared) + (ITEM_WARPS * MAX_SLOTS + i) * 8, ITEM_WARPS * COPY_LANES);
        }
    }
    __device__ void bring(uint8_t *stage, int i, int chunk) const {
        constexpr int BYTES = chunk_bytes(1);
        const int warp = threadIdx.x / WARP;
        const uint32_t barrier = full + i * 8;
        if (threadIdx.x % WARP < COPY_LANES) {
            copies_begin(barrier, max(count - warp + ITEM_WARPS - 1, 0) / ITEM_WARPS * BYTES);
            for (int r = warp; r < count; r += ITEM_WARPS) {
                copy_to_shared(shared_address(stage) + r * BYTES, records[r] + chunk * BYTES, BYTES, barrier,
                               true);
            }
            copies_end(barrier);
        }
    }
    __device__ void close() const {}
    __device__ void wait(int i, int parity) const { barrier_wait(full + i * 8, parity); }
};

// A row's eighths of a step go each to its column of a matrix of eight (matmul/layout.h). A warp has four of them, of all rows:
// eight lanes beside each other fill a matrix, and four lanes that read one row read 64 bytes of it.
template <int ROWS> struct RowsBringer {
    const uint8_t *const *records;
    int count;

    __device__ RowsBringer(const ManyShared<ROWS> &s, uint8_t *, int count) : records(s.records), count(count) {}
    static __device__ void init(uint8_t *) {}
    __device__ void bring(uint8_t *stage, int, int chunk) const {
        constexpr int EACH = 16;
        const int at = int(threadIdx.x) / WARP * 4 + int(threadIdx.x) % WARP / 8, own = threadIdx.x;
#pragma unroll
        for (int first = 0; first < ROWS; first += 8) {
            if (const int row = first + int(threadIdx.x) % 8; row < count) {
                __pipeline_memcpy_async(stage + (at * ROWS + row) * EACH,
                                        records[row] + chunk * chunk_bytes(1) + at * EACH, EACH);
            }
        }
        if (own < count) { // the sums of the row's values, and its power of two
            const uint8_t *from = records[own] + chunk * chunk_bytes(1) + chunk_sums(1);
            uint8_t *tail = stage + chunk_sums(ROWS);
            __pipeline_memcpy_async(tail + own * 32, from, EACH);
            __pipeline_memcpy_async(tail + own * 32 + EACH, from + EACH, EACH);
            __pipeline_memcpy_async(tail + 32 * ROWS + own * 4, from + 32, 4);
        }
    }
    __device__ void close() const { __pipeline_commit(); }
    __device__ void wait(int, int) const {
        __pipeline_wait_prior(ManyShape<ROWS>::STAGES - 2);
        wgmma_show();
    }
};

// The grid is items, the shared expert's first, times the tasks of one.
template <int ROWS>
__global__ void __launch_bounds__(ITEM_THREADS, ManyShape<ROWS>::BLOCKS)
    moe_many_kernel(const __grid_constant__ MatmulParams p) {
#if !ROWMM_WGMMA
    if (ManyShape<ROWS>::WIDE) {
        return; // this is never launched here
    }
#endif
    using S = ManyShape<ROWS>;
    constexpr int TILES = S::TILES;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ ManyShared<ROWS> s;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int index = int(blockIdx.x) / p.tasks, x = int(blockIdx.x) % p.tasks;
    WarpRing<true> ring(p, shared);
    RowsBringer<ROWS>::init(shared);
    barrier_init_done();
    uint8_t *const stages = shared + BARRIER_BYTES + ITEM_WARPS * p.slots * p.slot_bytes;
    wait_for_previous();
    let_next_start();
    MoeItem item = {SHARED, p.T * p.n_used + index * p.item_rows, min(p.T - index * p.item_rows, p.item_rows),
                    0};
    if (index >= p.n_shared) {
        if (index - p.n_shared >= __ldcg(reinterpret_cast<const int32_t *>(p.routed + p.at.head))) {
            return;
        }
        const int4 listed =
            __ldcg(reinterpret_cast<const int4 *>(p.routed + p.at.items) + (index - p.n_shared));
        item = {listed.x, listed.y, listed.z, 0};
    }
    const Group &g = group_of(p, item.expert);
    const Work w(p, g, own_warp<true>(p));
    const Matrix &m = g.matrices[w.matrix];
    const Task task = {item.expert, x, item.count, 0};
    if (int(threadIdx.x) < item.count) {
        const int32_t *list = reinterpret_cast<const int32_t *>(p.routed + p.at.places);
        const int place =
            item.expert == SHARED ? item.first + int(threadIdx.x) : __ldcg(list + item.first + threadIdx.x);
        s.places[threadIdx.x] = place;
        const int64_t row = p.records != nullptr    ? place
                            : item.expert == SHARED ? place - p.T * p.n_used
                                                    : place / p.n_used;
        s.records[threadIdx.x] = (p.records != nullptr ? p.records + row * row_record(p.h_row)
                                                       : p.routed + p.at.rows + row * g.record);
    }
    __syncthreads();
    const RowsBringer<ROWS> rows(s, shared, item.count);
    const int sequence = p.steps * g.chunks; // of chunks, step after step
    // Where all chunks of the rows have stages they stay there.
    const bool stay = S::WIDE && g.chunks <= S::STAGES;
    const auto bring = [&](int i) {
        if (i < (stay ? g.chunks : sequence)) {
            rows.bring(stages + i % S::STAGES * S::STAGE, i % S::STAGES, i % g.chunks);
        }
        rows.close();
    };
    for (int i = 0; i < S::STAGES - 1; i++) {
        bring(i);
    }
    ring.units.begin(p, item.expert, x);
    while (ring.filled < p.slots && ring.units.find(p, &task, 1)) {
        ring.fill(p);
    }
    Sums<TILES> total, pair, acc;
    for (int i = 0; i < sequence; i++) {
        const int step = i / g.chunks, chunk = i - step * g.chunks, fragment = w.fragment_at(p, g, x, step);
        const int at = stay ? chunk : i % S::STAGES;
        if (!stay || i < g.chunks) {
            rows.wait(at, i / S::STAGES % 2);
            __syncthreads(); // rows of the chunk before are done with
            bring(i + S::STAGES - 1);
        }
        int part = 0; // the chunk is of this part of K
        while (g.begin(part + 1, 1) <= chunk) {
            part++;
        }
        if (chunk == g.begin(part, 1)) {
#pragma unroll
            for (int n = 0; n < TILES; n++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    acc[n][k] = 0;
                }
            }
        }
        // wgmma needs all of a warpgroup: a warp whose outputs are not there multiplies what lies in its place.
        const bool own = fragment < g.fragments;
        if (S::WIDE ? fragment - warp % 4 < g.fragments : own) {
            for (int u = 0; u < m.units; u++) {
                const uint8_t *unit = own ? ring.take(p) : ring.slots;
                multiply_many<ROWS>(m.type, acc, unit, stages + at * S::STAGE, u, lane);
                if (own) {
                    ring.next(p, &task, 1);
                }
            }
        }
        if (chunk + 1 == g.begin(part + 1, 1)) { // parts are added by pairs
            const bool last = part + 1 == 1 << g.log_parts;
            const float *scales =
                m.scales > 0
                    ? reinterpret_cast<const float *>(m.packed + expert_offset(m, item.expert) + m.scales)
                    : nullptr;
#pragma unroll
            for (int n = 0; n < TILES; n++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    float v = acc[n][k];
                    if (scales != nullptr && own) {
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
        const auto each = [&](auto &&use) {
#pragma unroll
            for (int n = 0; n < TILES; n++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const int row = n * 8 + lane % 4 * 2 + k % 2, o = lane / 4 + k / 2 * 8;
                    if (row < item.count && fragment * FRAGMENT + o < g.N) {
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
            continue;
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
