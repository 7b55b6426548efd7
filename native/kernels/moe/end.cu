// Has the end of a mixture of experts (moe.h) of a step of one row in one launch: down and sum. A block has 16 outputs of
// all of the row's experts, so that it adds them up itself. The parts of K, and the order of all sums, are those of the two
// launches, so the bits are the same.
//
// A warp has an expert's outputs, or half of its K. Its weights are fetched before the launch waits, as soon as up has left
// its choice.
#include "matmul/pack.cuh"
#include "moe/choice.cuh"
#include "moe/item.cuh"
#include "moe/launch_plan.h"
#include "moe/matrix.h"

#include <algorithm>

namespace luce {
namespace {

// These are the experts', or the shared one's.
struct EndGroup { // Its first fields are Matrix's; to have one in it would change how they are read.
    const uint8_t *packed;
    int64_t expert_bytes;
    const int64_t *offsets;
    uint32_t scales;
    int32_t type, units, unit_bytes;
    int32_t K, chunks, log_parts; // K has so many parts

    // Returns the chunk with which a part begins.
    __device__ int begin(int part) const { return chunks * part >> log_parts; }
};

struct EndParams {
    MoeDims dims;
    RoutedLayout at;
    const uint8_t *routed;
    const float *h, *residual;
    float *out;
    int32_t *counts;
    int32_t places; // the row has so many
    int32_t weights_bytes, row_bytes; // a place has so many in shared memory
    EndGroup experts, shared;
};

// An item is a place of the row and some parts of its K.
struct EndItem {
    int place, part, last;

    __device__ EndItem(const EndParams &p, int i) {
        const int own = i % END_ACROSS;
        place = i / END_ACROSS;
        const int log_parts = of(p).log_parts;
        part = (own << log_parts) / END_ACROSS;
        last = ((own + 1) << log_parts) / END_ACROSS;
    }
    __device__ bool shared(const EndParams &p) const { return place == p.dims.n_used; }
    __device__ const EndGroup &of(const EndParams &p) const { return shared(p) ? p.shared : p.experts; }
};

struct EndBlock {
    const EndParams &p;
    uint8_t *shared;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = int(blockDim.x) / WARP;

    __device__ int items() const { return p.places * END_ACROSS; }
    __device__ uint32_t barrier(int item) const { return shared_address(shared) + item * 8; }
    __device__ uint8_t *weights(int place) const {
        return shared + align16(items() * 8) + place * p.weights_bytes;
    }
    __device__ uint8_t *row(int place) const { return weights(p.places) + place * p.row_bytes; }
    __device__ float *sums(int place) const {
        return reinterpret_cast<float *>(row(p.places)) + place * (MAX_PARTS * FRAGMENT);
    }

    // Begins to bring the weights of an item.
    __device__ void fetch(int i, const EndItem &item, int expert) const {
        if (lane >= COPY_LANES) {
            return;
        }
        const EndGroup &g = item.of(p);
        const int first = g.begin(item.part) * g.units, end = g.begin(item.last) * g.units;
        const int units_k = g.chunks * g.units, fragment = blockIdx.x;
        const uint8_t *matrix = g.packed + expert_offset(g, expert);
        copies_begin(barrier(i), (end - first) * g.unit_bytes);
#pragma unroll 1
        for (int u = first; u < end; u++) {
            copy_to_shared(shared_address(weights(item.place)) + u * g.unit_bytes,
                           matrix + fragment_offset(g.type, units_k, p.dims.E, fragment, u), g.unit_bytes,
                           barrier(i), false);
        }
        copies_end(barrier(i));
    }
    // Packs what an item needs of its place of h.
    __device__ void pack(const EndItem &item) const {
        const EndGroup &g = item.of(p);
        const float *h = p.h + item.place * p.dims.h_row();
        const int end = g.begin(item.last);
#pragma unroll 1
        for (int chunk = g.begin(item.part); chunk < end; chunk += 2) {
            float v[OWN], next[OWN];
            load_values(v, h, chunk * CHUNK + lane * OWN, g.K);
            if (chunk + 1 < end) {
                load_values(next, h, (chunk + 1) * CHUNK + lane * OWN, g.K);
            }
            uint8_t *to = row(item.place) + chunk * chunk_bytes(1);
            pack_chunk(to, 1, 0, false, v, largest(v), lane);
            if (chunk + 1 < end) {
                pack_chunk(to + chunk_bytes(1), 1, 0, false, next, largest(next), lane);
            }
        }
    }
    // Leaves the sums of an item's parts.
    __device__ void multiply(const EndItem &item, int expert) const {
        const EndGroup &g = item.of(p);
        const uint8_t *own = weights(item.place);
        int u = g.begin(item.part) * g.units;
#pragma unroll 1
        for (int part = item.part; part < item.last; part++) {
            Sums<1> acc = {};
#pragma unroll 1
            for (const int end = g.begin(part + 1) * g.units; u < end; u++) {
                multiply_any(g.type, acc, own + u * g.unit_bytes, row(item.place), u, lane);
            }
            if (lane % 4 == 0) { // these lanes have the row's column
                float *to = sums(item.place) + part * FRAGMENT + lane / 4;
                const float *scales =
                    reinterpret_cast<const float *>(g.packed + expert_offset(g, expert) + g.scales) +
                    blockIdx.x * FRAGMENT + lane / 4;
                to[0] = g.scales > 0 ? acc[0][0] * scales[0] : acc[0][0];
                to[8] = g.scales > 0 ? acc[0][2] * scales[8] : acc[0][2];
            }
        }
    }
    // Returns y of a place, whose parts are added by pairs.
    __device__ float y_of(int place, int log_parts, int o) const {
        const float *of_part = sums(place) + o;
        float sum = of_part[0];
        if (log_parts > 0) {
            sum += of_part[FRAGMENT];
        }
        if (log_parts > 1) {
            sum += of_part[2 * FRAGMENT] + of_part[3 * FRAGMENT];
        }
        return sum;
    }
    // Does what sum does of many rows, by one warp. A lane has the weight of its rank.
    __device__ void add_up(float weight, float open, float residual) const {
        constexpr int AT_ONCE = 8;
        const int o = lane % FRAGMENT, n = blockIdx.x * FRAGMENT + o, used = p.dims.n_used;
        float sum = 0;
#pragma unroll 1
        for (int first = 0; first < used; first += AT_ONCE) {
            float y[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                y[i] = first + i < used ? y_of(first + i, p.experts.log_parts, o) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const float w = __shfl_sync(~0u, weight, (first + i) % WARP);
                sum = first + i < used ? fmaf(w, y[i], sum) : sum;
            }
        }
        if (p.dims.shared()) {
            sum = sum + y_of(used, p.shared.log_parts, o) * open;
        }
        if (lane < FRAGMENT && n < p.dims.E) {
            p.out[n] = sum + residual;
        }
    }
};

// The grid is {sixteenths of the outputs}.
__global__ void __launch_bounds__(END_WARPS *WARP, 1) moe_end_kernel(const __grid_constant__ EndParams p) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ int experts[END_ACROSS * (MOE_MAX_USED + 1)]; // each item's
    const EndBlock b = {p, shared};
    const int lane = b.lane, items = b.items();
#pragma unroll 1
    for (int i = b.warp; i < items; i += b.n_warps) {
        if (lane == 0) {
            barrier_init(b.barrier(i), COPY_LANES);
        }
        barrier_init_done();
        __syncwarp();
        const EndItem item(p, i);
        const int expert = item.shared(p) ? 0 : chosen_expert(p.routed, p.at, item.place);
        b.fetch(i, item, expert);
        if (lane == 0) {
            experts[i] = expert;
        }
    }
    wait_for_previous();
    let_next_start(); // sooner, the launch behind would take from up
    if (p.counts != nullptr && blockIdx.x == 0 && int(threadIdx.x) < p.dims.n_used) {
        atomicAdd(p.counts + __ldcg(reinterpret_cast<const int32_t *>(p.routed + p.at.ids) + threadIdx.x), 1);
    }
    float weight = 0, open = 0, residual = 0;
    if (b.warp == 0) {
        const int n = blockIdx.x * FRAGMENT + lane % FRAGMENT;
        weight = lane < p.dims.n_used ? reinterpret_cast<const float *>(p.routed + p.at.weights)[lane] : 0.0f;
        open = p.dims.shared() ? *reinterpret_cast<const float *>(p.routed + p.at.open) : 0.0f;
        residual = n < p.dims.E ? p.residual[n] : 0.0f;
    }
#pragma unroll 1
    for (int i = b.warp; i < items; i += b.n_warps) {
        const EndItem item(p, i);
        b.pack(item);
        __syncwarp();
        barrier_wait(b.barrier(i), 0);
        b.multiply(item, experts[i]);
    }
    __syncthreads();
    if (b.warp == 0) {
        b.add_up(weight, open, residual);
    }
}

bool set(EndGroup &g, const MoeMatrix &m, int64_t K, int64_t N, bool one) {
    g.K = int32_t(K);
    g.chunks = int32_t(chunks_of(K));
    g.log_parts = log2_of(k_parts(K));
    return set_matrix(g, m, K, N, one);
}

} // namespace

int cuda::moe_end(const MoeEndArgs &a, void *stream) {
    const MoeDims &d = a.dims;
    EndParams p = {};
    if (!moe_ends_at_once(d, a.down.type, a.shared_down.type) || !given(a.routed) || !given(a.h) ||
        !given(a.residual) || !given(a.out) || !set(p.experts, a.down, d.FF, d.E, false) ||
        (d.shared() && !set(p.shared, a.shared_down, d.FF_shared, d.E, true))) {
        return int(cudaErrorInvalidValue);
    }
    if (!d.shared()) {
        p.shared = p.experts;
    }
    p.dims = d;
    p.at = RoutedLayout(d);
    p.routed = static_cast<const uint8_t *>(a.routed);
    p.h = a.h;
    p.residual = a.residual;
    p.out = a.out;
    p.counts = a.counts;
    p.places = int32_t(d.places());
    p.weights_bytes =
        std::max(end_weights(p.experts.chunks, p.experts.type), end_weights(p.shared.chunks, p.shared.type));
    p.row_bytes = shared_row(d.h_row());
    return int(launch_kernel(moe_end_kernel, plan_end(d, p.experts.type, p.shared.type),
                             static_cast<cudaStream_t>(stream), a.overlap != 0, p));
}

} // namespace luce
