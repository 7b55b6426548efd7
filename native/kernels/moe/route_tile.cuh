// Has what kernels of route do with a tile of rows: the norm of its rows, what is packed of them, and the list of work.
#pragma once

#include "moe/router.cuh"

namespace luce {
namespace {

// Holds a thread's share of a row, or of as many rows as a tile has.
struct Norm {
    const float *weights;
    float4 w[VALUES];

    __device__ explicit Norm(const float *norm, const MoeRouteArgs &a) : weights(norm) {
        const int n = int(a.dims.E / 4);
        load(threadIdx.x, n);
        for (int i = threadIdx.x + VALUES * THREADS; i < n; i += THREADS) {
            prefetch_line(norm + 4 * i);
        }
    }
    __device__ void load(int first, int n) {
#pragma unroll
        for (int j = 0; j < VALUES; j++) {
            const int i = first + j * THREADS;
            w[j] = i < n ? reinterpret_cast<const float4 *>(weights)[i] : float4{};
        }
    }
};

// Leaves x * norm of the tile's rows in v [rows][E], and each warp's sums of squares of x. `norm` has the
// weights of the first values. There are ROWS rows or less.
template <int ROWS>
__device__ void weigh(const MoeRouteArgs &a, Norm &norm, int row0, int rows, float *v,
                      float (*squares_of)[WARPS]) {
    const int n = int(a.dims.E / 4), lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const float4 *x = reinterpret_cast<const float4 *>(a.x) + int64_t(row0) * n;
    float4 *out = reinterpret_cast<float4 *>(v);
    float sums[ROWS] = {};
    for (int first = threadIdx.x; first < n; first += VALUES * THREADS) {
        if (first >= VALUES * THREADS) {
            norm.load(first, n);
        }
        float4 q[ROWS][VALUES];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int j = 0; j < VALUES; j++) {
                const int i = first + j * THREADS;
                q[r][j] = r < rows && i < n ? __ldcg(x + r * n + i) : float4{};
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int j = 0; j < VALUES; j++) {
                const int i = first + j * THREADS;
                const float4 y = q[r][j], w = norm.w[j];
                sums[r] = fmaf(y.w, y.w, fmaf(y.z, y.z, fmaf(y.y, y.y, fmaf(y.x, y.x, sums[r]))));
                if (r < rows && i < n) {
                    out[r * n + i] = {y.x * w.x, y.y * w.y, y.z * w.z, y.w * w.w};
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (r < rows) {
            const float sum = warp_sum(sums[r], WARP);
            if (lane == 0) {
                squares_of[r][warp] = sum;
            }
        }
    }
}

// Returns the inclusive sum over a warp's lanes.
__device__ int scan(int x, int lane) {
    for (int step = 1; step < WARP; step *= 2) {
        const int before = __shfl_up_sync(~0u, x, step);
        x += lane >= step ? before : 0;
    }
    return x;
}

struct ListShared {
    int warp_rows[WARPS], warp_items[WARPS];
};

// Lists the places of each expert, rising, and its items, by one block. `ids` has the experts of all places. LISTERS warps have a
// part of the places each: they count each expert's in `rows`, which then says where its next place goes.
template <int LISTERS>
__device__ void make_list(const RouteParams &p, ListShared &s, const uint16_t *ids,
                          int (*rows)[MOE_MAX_EXPERTS]) {
    const MoeDims &d = p.a.dims;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, pairs = d.T * d.n_used;
    const int each = (pairs + LISTERS * WARP - 1) / (LISTERS * WARP) * WARP; // places of a lister
    for (int e = threadIdx.x; e < LISTERS * MOE_MAX_EXPERTS; e += THREADS) {
        rows[e / MOE_MAX_EXPERTS][e % MOE_MAX_EXPERTS] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
        atomicAdd(&rows[i / each][ids[i]], 1);
    }
    __syncthreads();
    int all_rows = 0, items = 0, of_expert[PER_THREAD];
    for (int j = 0; j < PER_THREAD; j++) {
        of_expert[j] = 0;
        for (int l = 0; l < LISTERS; l++) {
            of_expert[j] += rows[l][threadIdx.x * PER_THREAD + j];
        }
        all_rows += of_expert[j];
        items += items_of(d, of_expert[j]);
    }
    const int rows_to = scan(all_rows, lane), items_to = scan(items, lane);
    if (lane == WARP - 1) {
        s.warp_rows[warp] = rows_to;
        s.warp_items[warp] = items_to;
    }
    __syncthreads();
    int row = rows_to - all_rows, item = items_to - items;
    for (int w = 0; w < warp; w++) {
        row += s.warp_rows[w];
        item += s.warp_items[w];
    }
    MoeItem *list = p.of<MoeItem>(p.at.items);
    for (int j = 0; j < PER_THREAD; j++) {
        const int expert = threadIdx.x * PER_THREAD + j;
        for (int k = 0; k < items_of(d, of_expert[j]); k++) {
            list[item++] = item_of(d, expert, row, of_expert[j], k);
        }
        for (int l = 0; l < LISTERS; l++) {
            const int counted = rows[l][expert];
            rows[l][expert] = row;
            row += counted;
        }
    }
    if (threadIdx.x == THREADS - 1) {
        *p.of<int32_t>(p.at.head) = item;
    }
    __syncthreads();
    const int end = min(pairs, (warp + 1) * each);
    for (int i = warp * each + lane; warp < LISTERS && i - lane < end; i += WARP) { // 32 places at a time
        const int id = i < end ? ids[i] : -1;
        const uint32_t same = __match_any_sync(~0u, id), before = same & ((1u << lane) - 1);
        const int at = i < end ? rows[warp][id] : 0;
        __syncwarp();
        if (i < end && before == 0) {
            rows[warp][id] = at + __popc(same);
        }
        __syncwarp();
        if (i < end) {
            p.of<int32_t>(p.at.places)[at + __popc(before)] = i;
        }
    }
}

// Returns whether this block is the last of n to come here. If so, it sees what the others' first warps have written.
__device__ bool is_last(uint32_t *counter, int n, bool &last) {
    if (threadIdx.x < WARP) {
        __syncwarp();
        if (threadIdx.x == 0) {
            last = int(count_arrival(counter)) == n - 1;
            if (last) {
                *counter = 0; // this readies it for the next launch
            }
        }
    }
    __syncthreads();
    return last;
}

// Packs a chunk of row `row` of a launch, a dense layer's or the experts', with a warp: the values times a scale.
__device__ __forceinline__ void pack_values(const RouteParams &p, int row, int64_t chunk, float (&own)[OWN],
                                            float scale, bool dense, bool wide) {
    const int64_t E = p.a.dims.E;
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        own[i] *= scale;
    }
    uint8_t *record = p.of<uint8_t>(p.at.rows) + (first_row(p.a.dims, dense) + row) * row_record(E);
    pack_chunk(record + chunk * chunk_bytes(1), 1, 0, wide, own, largest(own), lane);
    for (int i = 0; p.a.values != nullptr && !dense && i < OWN; i++) {
        if (const int64_t k = chunk * CHUNK + lane * OWN + i; k < E) {
            p.a.values[row * E + k] = own[i];
        }
    }
}

// Packs row `row` of a launch, which is v [E] times a scale, with a warp: the blocks of a tile share its chunks.
__device__ __forceinline__ void pack_row(const RouteParams &p, int row, const float *v, float scale,
                                         bool wide = false) {
    const int64_t E = p.a.dims.E;
    for (int64_t chunk = gridDim.x - 1 - blockIdx.x; chunk < chunks_of(E); chunk += gridDim.x) {
        float own[OWN];
        load_values(own, v, chunk * CHUNK + threadIdx.x % WARP * OWN, E);
        pack_values(p, row, chunk, own, scale, false, wide);
    }
}

} // namespace
} // namespace luce
