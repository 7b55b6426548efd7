// Computes the products of a mixture of experts (moe.h): up and down. A block has an item (an expert and up
// to 8 of its rows) and a few sixteenths of the outputs. A warp has 16 outputs and one part of K, of one
// matrix.
//
// All that a block reads is under way at once. Each warp copies its own fragments into shared memory, two
// units ahead, and the block copies the item's rows. The parts of K are then added in their order. In up,
// gate and up are two warps of the same block, which go through silu(gate) * up together. Down packs its
// rows, which are up's F32 results, itself.
#include "moe_plan.h"
#include "rowmm_multiply.cuh"
#include "rowmm_pack.cuh"

#include <algorithm>

namespace luce {
namespace {

constexpr int THREADS = ITEM_WARPS * WARP;
constexpr int SLOTS = 2; // a warp has so many units in shared memory
constexpr int PART_ROW = FRAGMENT + 4; // the padding makes banks differ

struct Matrix {
    const uint8_t *packed; // it is expert 0's
    int64_t expert_bytes;
    int64_t scales; // the outputs' powers of two begin at this offset; it is 0 where there are none
    int32_t type, units, unit_bytes; // a chunk has `units` units, a fragment has `unit_bytes` bytes
};

struct Group { // it is for the experts, or for the shared expert
    Matrix matrices[2];
    int32_t K, N;
};

struct MatmulParams {
    MoeDims dims;
    RoutedLayout at;
    const uint8_t *routed;
    const float *h; // it is null where the rows are those that route packed
    float *out;
    int64_t out_row;
    int32_t n_matrices, slot_bytes, row_bytes; // `row_bytes` counts all rows in shared memory
    Group experts, shared;
};

// Brings a warp's fragments, unit after unit, through SLOTS slots of shared memory.
struct Fragments {
    const uint8_t *from; // the next unit is fetched from here
    int64_t step;
    uint8_t *slots;
    int slot_bytes, bytes, left, turn, lane;

    __device__ void fetch() {
        if (left > 0) {
            for (int i = lane * 16; i < bytes; i += WARP * 16) {
                copy_16(slots + turn * slot_bytes + i, from + i);
            }
            from += step;
            left--;
        }
        copies_commit();
        turn = turn + 1 == SLOTS ? 0 : turn + 1;
    }
    // Returns the oldest unit, which is here. After it has been used, the next one is fetched in its place.
    __device__ const uint8_t *take() const {
        copies_wait<SLOTS - 1>();
        __syncwarp();
        return slots + turn * slot_bytes;
    }
    __device__ void next() {
        __syncwarp();
        fetch();
    }
};

// Says what a warp does.
struct Work {
    WarpPart part;
    int fragment; // this counts among all fragments
    bool present;
    int first, last; // the warp has units first .. last - 1

    __device__ Work(const Group &g, int n_matrices, int warp)
        : part(warp, g.K, n_matrices),
          fragment(blockIdx.x * block_fragments(g.K, n_matrices) + part.fragment),
          present(fragment < fragments_of(g.N)) {
        const int units = g.matrices[part.matrix].units;
        first = first_chunk(g.K, part.part) * units;
        last = first_chunk(g.K, part.part + 1) * units;
    }
    __device__ Fragments fragments(const Group &g, int expert, uint8_t *slots, int slot_bytes,
                                   int lane) const {
        const Matrix &m = g.matrices[part.matrix];
        const int64_t units_k = chunks_of(g.K) * m.units;
        const uint8_t *matrix = m.packed + expert * m.expert_bytes;
        const int64_t at = fragment_offset(m.type, units_k, g.N, fragment, first);
        const int64_t step = fragment_offset(m.type, units_k, g.N, fragment, first + 1) - at;
        return {matrix + at, step, slots, slot_bytes, m.unit_bytes, present ? last - first : 0, 0, lane};
    }
};

// Adds a unit's products with a chunk of activations, which is the lane's own column's, to acc.
template <int TYPE>
__device__ __forceinline__ void multiply_item(Sums<1> &acc, const uint8_t *fragment, const uint8_t *chunk,
                                              int unit, int lane) {
    constexpr int VALUES = 8 / units_of_chunk(TYPE) * 64; // a unit's activations have so many bytes
    const uint8_t *tail = chunk + chunk_sums(1);
    const float own = word_at<float>(tail + 32);
    const float down[2] = {__shfl_sync(~0u, own, lane % 4 * 8), __shfl_sync(~0u, own, lane % 4 * 8 + 4)};
    Sums<1> c = {};
    float minimums[4] = {}, factor[2] = {1, 1}, minimum_factor[2] = {};
    if constexpr (is_float_type(TYPE)) {
        multiply_floats<TYPE, 1>(c, fragment, chunk + unit * VALUES, 1, lane);
    } else {
        Lane<TYPE> weights;
        weights.load(fragment, lane);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            Fields<bits_of(TYPE)> f[2];
            f[0].load(fragment, 2 * h, lane);
            f[1].load(fragment, 2 * h + 1, lane);
            weights.half(h);
            multiply_half<TYPE, 1>(c, weights, f, chunk, h, 1, lane);
        }
        factor[0] = weights.factor(0), factor[1] = weights.factor(1);
        if constexpr (has_minimum(TYPE)) {
            const uint2 sums = word_at<uint2>(tail + lane % 4 * 8);
            const uint32_t m0 = weights.minimum(0), m1 = weights.minimum(1);
            mma(minimums, m0, m1, m0, m1, sums.x, sums.y);
            minimum_factor[0] = weights.minimum_factor(0), minimum_factor[1] = weights.minimum_factor(1);
        }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float x = c[0][k];
        if constexpr (has_super(TYPE)) {
            x *= factor[k / 2];
        }
        if constexpr (has_minimum(TYPE)) {
            x = fmaf(-minimum_factor[k / 2], minimums[k], x);
        }
        acc[0][k] = fmaf(x, down[k % 2], acc[0][k]);
    }
}

template <int TYPE>
__device__ __forceinline__ void multiply_part(Sums<1> &acc, Fragments &f, const uint8_t *row, int first,
                                              int last, int lane) {
    constexpr int UNITS = units_of_chunk(TYPE);
    for (int u = first; u < last; u++) {
        const uint8_t *fragment = f.take();
        multiply_item<TYPE>(acc, fragment, row + u / UNITS * chunk_bytes(1), u % UNITS, lane);
        f.next();
    }
}

__device__ __forceinline__ void multiply_any(int type, Sums<1> &acc, Fragments &f, const uint8_t *row,
                                             int first, int last, int lane) {
    switch (type) {
        case TYPE_F32: multiply_part<TYPE_F32>(acc, f, row, first, last, lane); break;
        case TYPE_F16:
        case TYPE_BF16: multiply_part<TYPE_F16>(acc, f, row, first, last, lane); break;
        case TYPE_Q4_0: multiply_part<TYPE_Q4_0>(acc, f, row, first, last, lane); break;
        case TYPE_Q4_1: multiply_part<TYPE_Q4_1>(acc, f, row, first, last, lane); break;
        case TYPE_Q5_0: multiply_part<TYPE_Q5_0>(acc, f, row, first, last, lane); break;
        case TYPE_Q5_1: multiply_part<TYPE_Q5_1>(acc, f, row, first, last, lane); break;
        case TYPE_Q8_0: multiply_part<TYPE_Q8_0>(acc, f, row, first, last, lane); break;
        case TYPE_Q2_K: multiply_part<TYPE_Q2_K>(acc, f, row, first, last, lane); break;
        case TYPE_Q3_K: multiply_part<TYPE_Q3_K>(acc, f, row, first, last, lane); break;
        case TYPE_Q4_K: multiply_part<TYPE_Q4_K>(acc, f, row, first, last, lane); break;
        case TYPE_Q5_K: multiply_part<TYPE_Q5_K>(acc, f, row, first, last, lane); break;
        case TYPE_Q6_K: multiply_part<TYPE_Q6_K>(acc, f, row, first, last, lane); break;
        case TYPE_IQ4_NL: multiply_part<TYPE_IQ4_NL>(acc, f, row, first, last, lane); break;
        default: multiply_part<TYPE_IQ4_XS>(acc, f, row, first, last, lane); break;
    }
}

// Brings the item's rows into shared memory. They are copies of what route packed, or are packed here from
// F32.
__device__ void fill_rows(const MatmulParams &p, const Group &g, const int *places, int count,
                          uint8_t *rows) {
    const int lane = threadIdx.x % WARP, to = shared_row(g.K);
    if (p.h == nullptr) {
        const int vectors = int(row_record(g.K) / 16);
        for (int i = threadIdx.x; i < count * vectors; i += THREADS) {
            const int column = i / vectors, at = i % vectors * 16;
            const uint8_t *record =
                p.routed + p.at.rows + row_of_place(p.dims, places[column]) * row_record(g.K);
            copy_16(rows + column * to + at, record + at);
        }
        copies_commit();
        return;
    }
    const int chunks = int(chunks_of(g.K));
    for (int i = threadIdx.x / WARP; i < count * chunks; i += ITEM_WARPS) {
        const int column = i / chunks, chunk = i % chunks;
        float v[OWN];
        load_values(v, p.h + places[column] * p.dims.h_row(), chunk * CHUNK + lane * OWN, g.K);
        pack_chunk(rows + column * to + chunk * chunk_bytes(1), 1, 0, false, v, largest(v), lane);
    }
}

using Parts = float[ITEM_WARPS][ITEM_ROWS][PART_ROW]; // [warp][column][output]

__device__ void leave_part(Parts &parts, const Group &g, const Work &w, int expert, const Sums<1> &acc) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const Matrix &m = g.matrices[w.part.matrix];
    const float *scales = reinterpret_cast<const float *>(m.packed + expert * m.expert_bytes + m.scales);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int o = lane / 4 + k / 2 * 8;
        const float scale = m.scales > 0 ? scales[w.fragment * FRAGMENT + o] : 1.0f;
        parts[warp][lane % 4 * 2 + k % 2][o] = acc[0][k] * scale;
    }
}

// Adds the parts of K in order, and makes silu(gate) * up of two matrices.
__device__ void write_out(const MatmulParams &p, const Group &g, const Parts &parts, const int *places,
                          int count) {
    const int n_parts = k_parts(g.K), fragments = block_fragments(g.K, p.n_matrices);
    for (int i = threadIdx.x; i < fragments * ITEM_ROWS * FRAGMENT; i += THREADS) {
        const int f = i / (ITEM_ROWS * FRAGMENT), column = i / FRAGMENT % ITEM_ROWS, o = i % FRAGMENT;
        const int n = (blockIdx.x * fragments + f) * FRAGMENT + o;
        if (column >= count || n >= g.N) {
            continue;
        }
        float sums[2] = {};
#pragma unroll
        for (int m = 0; m < 2; m++) {
            for (int part = 0; m < p.n_matrices && part < n_parts; part++) {
                const float x = parts[warp_of(g.K, p.n_matrices, f, part, m)][column][o];
                sums[m] = part == 0 ? x : sums[m] + x;
            }
        }
        const float x = sums[0];
        p.out[places[column] * p.out_row + n] = p.n_matrices == 1 ? x : x / (1 + expf(-x)) * sums[1];
    }
}

// The grid is {blocks of outputs, items}. Items of the shared expert come first, and their weights are read
// while the launch waits for what is ahead. Down fetches the others' weights while up runs. The list that it sees
// then may be an old one, whose weights are overwritten.
__global__ void __launch_bounds__(THREADS, 3) moe_matmul_kernel(const __grid_constant__ MatmulParams p) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Parts parts;
    __shared__ int places[ITEM_ROWS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int n_shared = shared_items(p.dims), index = int(blockIdx.y) - n_shared;
    const Group &g = index < 0 ? p.shared : p.experts;
    const MoeItem *items = reinterpret_cast<const MoeItem *>(p.routed + p.at.items);
    uint8_t *slots = shared + p.row_bytes + warp * SLOTS * p.slot_bytes;
    const Work w(g, p.n_matrices, warp);
    if (int64_t(blockIdx.x) >= blocks_of(g.K, g.N, p.n_matrices)) {
        return;
    }
    MoeItem item = {};
    int early = -1; // this expert's fragments are on their way before the wait
    Fragments f = w.fragments(g, 0, slots, p.slot_bytes, lane);
    if (index < 0) {
        const int row = int(blockIdx.y) * ITEM_ROWS;
        item = {0, p.dims.T * p.dims.n_used + row, min(p.dims.T - row, ITEM_ROWS), 0};
        f.fetch();
        f.fetch();
    } else if (p.h != nullptr) {
        early = __ldcg(&items[index].expert);
        if (early >= 0 && early < p.dims.n_expert) {
            f = w.fragments(g, early, slots, p.slot_bytes, lane);
            f.fetch();
            f.fetch();
        }
    }
    wait_for_previous();
    let_next_start(); // this comes only now, so that the launch behind sees what the one ahead has written.
    if (index >= 0) {
        // Both are on their way at once.
        const int4 listed = __ldcg(reinterpret_cast<const int4 *>(items + index));
        const int n_items = __ldcg(reinterpret_cast<const int32_t *>(p.routed + p.at.head));
        if (index >= n_items) {
            copies_wait<0>();
            return;
        }
        item = {listed.x, listed.y, listed.z, listed.w};
        if (item.expert != early) {
            copies_wait<0>(); // what came early is overwritten
            __syncwarp();
            f = w.fragments(g, item.expert, slots, p.slot_bytes, lane);
            f.fetch();
            f.fetch();
        }
    }
    if (threadIdx.x < item.count) {
        const int32_t *list = reinterpret_cast<const int32_t *>(p.routed + p.at.places);
        places[threadIdx.x] = index < 0 ? item.first + int(threadIdx.x) : list[item.first + threadIdx.x];
    }
    __syncthreads();
    fill_rows(p, g, places, item.count, shared);
    copies_wait<0>();
    __syncthreads();
    Sums<1> acc = {};
    if (w.present) {
        const uint8_t *row = shared + min(lane / 4, item.count - 1) * shared_row(g.K);
        multiply_any(g.matrices[w.part.matrix].type, acc, f, row, w.first, w.last, lane);
        leave_part(parts, g, w, item.expert, acc);
    }
    __syncthreads();
    write_out(p, g, parts, places, item.count);
}

// ---- launches ----

bool aligned(const void *p) {
    return p != nullptr && reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

bool set(Matrix &out, const MoeMatrix &m, int64_t K, int64_t N, bool one) {
    const int64_t bytes = rowmm_packed_bytes(m.type, K, N);
    out.packed = static_cast<const uint8_t *>(m.packed);
    out.expert_bytes = m.expert_bytes;
    out.type = m.type;
    out.units = units_of_chunk(m.type);
    out.unit_bytes = fragment_bytes(m.type);
    out.scales = has_output_scale(m.type) ? output_scale_offset(m.type, K, N) : 0;
    return bytes > 0 && aligned(m.packed) && (one || (m.expert_bytes >= bytes && m.expert_bytes % 16 == 0));
}

bool set(Group &out, const MoeMatrix &first, const MoeMatrix &second, int64_t K, int64_t N, bool two,
         bool one) {
    out.K = int32_t(K);
    out.N = int32_t(N);
    return set(out.matrices[0], first, K, N, one) && (!two || set(out.matrices[1], second, K, N, one));
}

int multiply(const MoeMatmulArgs &a, bool up, cudaStream_t stream) {
    const MoeDims &d = a.dims;
    MatmulParams p = {a.dims, RoutedLayout(d)};
    p.routed = static_cast<const uint8_t *>(a.routed);
    p.h = up ? nullptr : a.h;
    p.out = a.out;
    p.out_row = up ? d.h_row() : d.E;
    p.n_matrices = up ? 2 : 1;
    const int64_t E = d.E, FF = d.FF, FFs = d.FF_shared;
    if (!moe_has(d) || !aligned(a.routed) || !aligned(a.out) || (!up && !aligned(a.h)) ||
        !set(p.experts, a.first, a.second, up ? E : FF, up ? FF : E, up, false) ||
        (d.shared() &&
         !set(p.shared, a.shared_first, a.shared_second, up ? E : FFs, up ? FFs : E, up, true))) {
        return int(cudaErrorInvalidValue);
    }
    if (d.T == 0) {
        return 0;
    }
    int64_t blocks = 0, row = 0;
    for (const Group *g : {&p.experts, &p.shared}) {
        if (g == &p.experts || d.shared()) {
            blocks = std::max(blocks, blocks_of(g->K, g->N, p.n_matrices));
            row = std::max<int64_t>(row, shared_row(g->K));
            for (int m = 0; m < p.n_matrices; m++) {
                p.slot_bytes = std::max(p.slot_bytes, g->matrices[m].unit_bytes);
            }
        }
    }
    p.row_bytes = int32_t(std::min(d.T, ITEM_ROWS) * row);
    const int bytes = p.row_bytes + ITEM_WARPS * SLOTS * p.slot_bytes;
    const dim3 grid(unsigned(blocks), unsigned(shared_items(d) + max_items(d)));
    return int(launch_kernel(moe_matmul_kernel, grid, THREADS, size_t(bytes), stream, a.overlap != 0, p));
}

} // namespace

int cuda::moe_up(const MoeMatmulArgs &args, void *stream) {
    return multiply(args, true, static_cast<cudaStream_t>(stream));
}

int cuda::moe_down(const MoeMatmulArgs &args, void *stream) {
    return multiply(args, false, static_cast<cudaStream_t>(stream));
}

} // namespace luce
