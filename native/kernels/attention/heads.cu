// Takes the heads of a step's rows from the parts of a product to attention: queries normed and rotated, gates as they
// are, and K and V in their cells. A block has one head of q, gate, k or v, and a warp has a row of it.
#include "attention/kv_types.cuh"
#include "attention/launch_plan.h"
#include "attention/norm_rope.cuh"
#include "common/kernels.h"
#include "common/overlap.cuh"
#include "common/pointers.h"
#include "matmul/partials.cuh"
#include "matmul/quantised.h"

namespace luce {
namespace {

constexpr int LANES = 32;
constexpr int WARPS = HEADS_WARPS;

// Params are the arguments that a kernel takes, with the parts apart.
struct Params : AttentionHeadsArgs {
    int32_t k_weight, v_weight; // of the launch's weights

    // Returns which row of the pool the first head of a position is.
    __device__ int64_t row(const SeqCtl &seq, int32_t position) const {
        return pool.row(pages[seq.pages + position / PAGE], position, 0);
    }
};

enum class Heads { q, gate, k, v };

// Writes a head's values to a cell. `room` is D values of shared memory.
template <int TYPE, int D>
__device__ void write_head(const float (&v)[D / LANES], uint8_t *to, float *room, int lane) {
    constexpr int OWN = D / LANES;
    if constexpr (TYPE == KV_F32) {
#pragma unroll
        for (int i = 0; i < OWN; i += 4) {
            reinterpret_cast<float4 *>(to)[(lane * OWN + i) / 4] = {v[i], v[i + 1], v[i + 2], v[i + 3]};
        }
    } else if constexpr (TYPE == KV_F16) {
        struct alignas(2 * OWN) Halves {
            __half2 x[OWN / 2];
        } halves;
#pragma unroll
        for (int i = 0; i < OWN / 2; i++) {
            halves.x[i] = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
        }
        reinterpret_cast<Halves *>(to)[lane] = halves;
    } else {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            room[lane * OWN + i] = v[i];
        }
        __syncwarp();
        using Kv = KvType<TYPE>;
        if (lane < D / Kv::VALUES) {
            float values[Kv::VALUES];
#pragma unroll
            for (int i = 0; i < Kv::VALUES; i++) {
                values[i] = room[lane * Kv::VALUES + i];
            }
            uint16_t words[Kv::BYTES / 2];
            quantize_block<TYPE>(values, words);
#pragma unroll
            for (int i = 0; i < Kv::BYTES / 2; i++) {
                reinterpret_cast<uint16_t *>(to + lane * Kv::BYTES)[i] = words[i];
            }
        }
        __syncwarp(); // the room is free
    }
}

// Returns what is the same in all lanes, so that nvcc knows it.
__device__ int warp_index() {
    return __shfl_sync(~0u, threadIdx.x / LANES, 0);
}

// Has one row of a head, from parts to where it belongs.
template <int TYPE, int D> struct Head {
    // A lane has OWN values, a head of a cell BYTES bytes.
    static constexpr int OWN = D / LANES, BYTES = kv_bytes<TYPE>(D);
    const Params &a;
    Heads kind;
    int head, lane;
    float norm[OWN];
    uint8_t *base; // it is where k or v has the head's first row

    __device__ Head(const Params &args, int unit)
        : a(args), lane(threadIdx.x % LANES), norm{}, base(nullptr) {
        const int H = a.H, Hkv = a.pool.Hkv, k0 = a.gated != 0 ? 2 * H : H;
        kind = unit < H ? Heads::q : unit < k0 ? Heads::gate : unit < k0 + Hkv ? Heads::k : Heads::v;
        head = kind == Heads::q      ? unit
               : kind == Heads::gate ? unit - H
               : kind == Heads::k    ? unit - k0
                                     : unit - k0 - Hkv;
        if (normed()) {
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                norm[i] = kind == Heads::v ? 1.0f : (kind == Heads::q ? a.q_norm : a.k_norm)[lane * OWN + i];
            }
        }
        if (in_cells()) {
            base = (kind == Heads::k ? a.pool.k : a.pool.v) + a.pool.row(0, 0, head) * BYTES;
        }
    }
    __device__ bool in_cells() const { return kind == Heads::k || kind == Heads::v; }
    __device__ bool rotated() const { return kind == Heads::q || kind == Heads::k; }
    __device__ bool normed() const { return rotated() || (kind == Heads::v && a.unit_v != 0); }
    // Returns which of the launch's weights it is of, and the first of its values there.
    __device__ int weight() const {
        return kind == Heads::k ? a.k_weight : kind == Heads::v ? a.v_weight : 0;
    }
    __device__ int64_t first_value() const {
        return int64_t(head) * (in_cells() || a.gated == 0 ? D : 2 * D) + (kind == Heads::gate ? D : 0);
    }

    // Returns the place of a row's head, which is null where the row is of no sequence.
    __device__ uint8_t *cell_of(int row) const {
        const int32_t s = a.ctl->rows[row].seq;
        if (s < 0) {
            return nullptr;
        }
        const SeqCtl &seq = a.ctl->seqs[s];
        return base + a.row(seq, seq.n_past + row - seq.row0) * BYTES;
    }

    __device__ void run(const RowmmParts &parts, int row, RopeRoom<D> &room) {
        const LaneParts<OWN / 4> of(parts, weight(), row, first_value() + lane * OWN);
        const int rope_dim = rotated() ? a.rope_dim : 0;
        if (rotated()) {
            LaneRope<D>::find(a.positions[row], rope_dim, a.base, a.rope_factors, room, lane);
        }
        uint8_t *cell = in_cells() ? cell_of(row) : nullptr;
        wait_for_previous();
        float4 x[OWN > 8 ? 4 : 8][OWN / 4];
        float v[OWN] = {};
        of.fetch(x, 0);
        of.add(x, v);
        if (normed()) {
            LaneRope<D>::apply(v, norm, a.eps, rope_dim, room, lane);
        }
        if (in_cells()) {
            if (cell != nullptr) {
                write_head<TYPE, D>(v, cell, room.head, lane);
            }
            return;
        }
        float4 *out = reinterpret_cast<float4 *>((kind == Heads::q ? a.q : a.gate) +
                                                 (int64_t(row) * a.H + head) * D + lane * OWN);
#pragma unroll
        for (int i = 0; i < OWN; i += 4) {
            out[i / 4] = {v[i], v[i + 1], v[i + 2], v[i + 3]};
        }
    }
};

// The grid is {heads of q, of gates, of k, of v; rows by a block's warps}.
template <int TYPE, int D>
__global__ void __launch_bounds__(WARPS *LANES, 1)
    heads_kernel(const __grid_constant__ Params a, const __grid_constant__ RowmmParts parts) {
    __shared__ RopeRoom<D> room[WARPS];
    let_next_start();
    const int warp = warp_index(), n_warps = int(blockDim.x) / LANES;
    Head<TYPE, D> head(a, int(blockIdx.x));
    if (const int row = int(blockIdx.y) * n_warps + warp; row < a.T) {
        head.run(parts, row, room[warp]);
    }
    wait_for_previous();
}

template <int TYPE, int D> cudaError_t launch(const Params &a, const RowmmParts &parts, cudaStream_t stream) {
    return launch_kernel(heads_kernel<TYPE, D>, plan_heads(a), stream, true, a, parts);
}

template <int TYPE> cudaError_t launch(const Params &a, const RowmmParts &parts, cudaStream_t stream) {
    return SummedHeadSizes::with(a.pool.D, cudaErrorInvalidValue,
                                 [&](auto D) { return launch<TYPE, D()>(a, parts, stream); });
}

bool valid(const AttentionHeadsArgs &a) {
    const KvPool &pool = a.pool;
    const RowmmArgs *parts = a.parts;
    if (parts == nullptr || parts->T != a.T || a.T <= 0 || a.T > MAX_ROWS || pool.Hkv < 0 || a.rope_dim < 0 ||
        a.rope_dim > pool.D || a.rope_dim % 2 != 0) {
        return false;
    }
    const int queries = a.H > 0 ? 1 : 0, cells = parts->n_weights - queries; // weights of each
    const int64_t of_q = int64_t(a.gated != 0 ? 2 : 1) * a.H * pool.D, of_k = int64_t(pool.Hkv) * pool.D;
    if (queries != 0 && (parts->weights[0].N != of_q || !aligned(a.q) || !aligned(a.gate))) {
        return false;
    }
    if (pool.Hkv == 0) {
        return queries != 0 && cells == 0;
    }
    return (cells == 1 || cells == 2) && aligned(pool.k) && aligned(pool.v) &&
           parts->weights[queries].N == of_k && parts->weights[queries + cells - 1].N == of_k;
}

} // namespace

int cuda::attention_heads(const AttentionHeadsArgs &args, void *stream) {
    if (!valid(args)) {
        return int(cudaErrorInvalidValue);
    }
    RowmmParts parts = {};
    if (const int error = rowmm_parts_of(*args.parts, parts); error != 0) {
        return error;
    }
    Params a{};
    static_cast<AttentionHeadsArgs &>(a) = args;
    a.k_weight = args.H > 0 ? 1 : 0;
    a.v_weight = args.parts->n_weights - 1;
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    return KvTypes::with(a.pool.type, int(cudaErrorInvalidValue),
                         [&](auto type) { return int(launch<type()>(a, parts, st)); });
}

} // namespace luce
