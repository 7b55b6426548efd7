// Adds up attention's partial results (attention/partials.h) in the order of chunks and then the head's sink, applies the gate,
// and leaves the values or packs them as the product with the output's weights takes them, which spares a kernel. A warp has 256
// neighbouring values of a row, of one head or several, and a lane has 8. A few chunks are added one after the other, by one
// warp without a barrier.
// Many chunks are in GROUPS groups, of every GROUPS-th chunk each, which warps share, and the groups' sums are added in
// order. A row's position decides how many chunks it has.
#include "attention/chunks.h"
#include "attention/kv_types.cuh"
#include "attention/launch_plan.h"
#include "attention/partials.h"
#include "common/overlap.cuh"
#include "matmul/pack.cuh"
#include "matmul/ptx.cuh"

namespace luce {
namespace {

constexpr int GROUPS = COMBINE_GROUPS, FEW_CHUNKS = 8;
constexpr int BATCH = 5; // so many chunks are added at once
static_assert(COMBINE_VALUES == CHUNK);

// So many lanes have values of one head, since a head has 64 or more. They share what is the same for a head's values.
constexpr int OCTET = 8;
static_assert(BATCH <= OCTET && GROUPS == 2 * OCTET, "a lane finds the weights of a chunk, or of two groups");
__device__ float octet_max(float x) {
#pragma unroll
    for (int mask = 1; mask < OCTET; mask *= 2) {
        x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
    }
    return x;
}

// A lane reads 8 values of a chunk's mean, and at the end puts those of its sum into the order of columns.
struct F32Means {
    float4 x[2];
    __device__ void load(const void *means, uint32_t at) {
        const float4 *from = static_cast<const float4 *>(means) + int64_t(at) * 2;
        x[0] = from[0];
        x[1] = from[1];
    }
    __device__ static void discard(const void *means, uint32_t at) {
        const float4 *from = static_cast<const float4 *>(means) + int64_t(at) * 2;
        discard_line(from);
        discard_line(from + OCTET);
    }
    __device__ void get(float (&v)[OWN]) const {
        const float values[OWN] = {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w};
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            v[i] = values[i];
        }
    }
    __device__ static void order(float (&)[OWN], int) {}
};
struct F16Means {
    uint4 x;
    __device__ void load(const void *means, uint32_t at) { x = static_cast<const uint4 *>(means)[at]; }
    __device__ static void discard(const void *means, uint32_t at) {
        discard_line(static_cast<const uint4 *>(means) + at);
    }
    __device__ void get(float (&v)[OWN]) const {
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 both = __half22float2(reinterpret_cast<const __half2 &>(words[i]));
            v[2 * i] = both.x;
            v[2 * i + 1] = both.y;
        }
    }
    // Four lanes have two columns of each of four tiles. Lane i of them gets those of tile i.
    __device__ static void order(float (&v)[OWN], int lane) {
#pragma unroll
        for (int bit = 1; bit < 4; bit *= 2) {
            const bool upper = (lane & bit) != 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if ((i & bit) != 0) {
                    continue;
                }
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &low = v[2 * i + e], &high = v[2 * (i + bit) + e];
                    const float other = __shfl_xor_sync(~0u, upper ? low : high, bit);
                    (upper ? low : high) = other;
                }
            }
        }
    }
};

// A Sum is what a lane has of its values, in units of the largest maximum so far.
struct Sum {
    float most = -INFINITY, weight = 0, v[OWN] = {};

    __device__ void scale(float factor) {
        weight *= factor;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            v[i] *= factor;
        }
    }
    __device__ void add(const float (&x)[OWN], float w) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            v[i] = fmaf(x[i], w, v[i]);
        }
    }
    // Adds a score without a value.
    __device__ void add_sink(float score) {
        const float before = most;
        most = fmaxf(most, score);
        const float origin = most == -INFINITY ? 0.0f : most;
        scale(exp2f(before - origin));
        weight += exp2f(score - origin);
    }
    // Adds chunks c, c + step .. last, whose first results are at `sums` and at value OWN * first of `means`. The means of a lane
    // that `owns` them are not read again, so its octet's first lane discards their line: else L2 would write it to memory for
    // nothing.
    template <typename Means>
    __device__ void add_chunks(const float2 *sums, const void *means, uint32_t first, int H, int D, int c,
                               int step, int last, int lane, bool owns) {
        const uint32_t next = step * (H * D / OWN);
        uint32_t from = first + c * (H * D / OWN);
        const bool discards = owns && lane % OCTET == 0 && reinterpret_cast<uintptr_t>(means) % 128 == 0;
        for (; c <= last; c += BATCH * step) {
            const int mine = c + lane % OCTET * step; // the lane finds this chunk's weight
            const float2 s = lane % OCTET < BATCH && mine <= last ? sums[mine * H] : float2{-INFINITY, 0};
            Means x[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++, from += next) { // the reads are on their way together
                if (c + i * step <= last) {
                    x[i].load(means, from);
                }
            }
            __syncwarp(); // all lanes read ahead of what discards
            const float before = most;
            most = fmaxf(most, octet_max(s.x));
            const float origin = most == -INFINITY ? 0.0f : most;
            const float w = s.y * exp2f(s.x - origin);
            scale(exp2f(before - origin));
            float of_chunk[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                of_chunk[i] = __shfl_sync(~0u, w, i, OCTET);
            }
#pragma unroll
            for (int i = 0; i < BATCH && (i == 0 || c + i * step <= last); i++) {
                float values[OWN];
                x[i].get(values);
                weight += of_chunk[i];
                add(values, of_chunk[i]);
                if (discards) {
                    Means::discard(means, from - (BATCH - i) * next);
                }
            }
        }
    }
};

// Groups holds the sums of the groups.
struct Groups {
    float4 v[GROUPS][2][WARP];
    float2 most[GROUPS][WARP]; // {maximum, sum of weights}

    __device__ void put(int group, int lane, const Sum &sum) {
        v[group][0][lane] = {sum.v[0], sum.v[1], sum.v[2], sum.v[3]};
        v[group][1][lane] = {sum.v[4], sum.v[5], sum.v[6], sum.v[7]};
        most[group][lane] = {sum.most, sum.weight};
    }
    __device__ Sum total(int lane) const {
        const float low = most[lane % OCTET][lane].x, high = most[OCTET + lane % OCTET][lane].x;
        Sum sum;
        sum.most = octet_max(fmaxf(low, high));
        const float origin = sum.most == -INFINITY ? 0.0f : sum.most;
        const float of_low = exp2f(low - origin), of_high = exp2f(high - origin);
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const float w = __shfl_sync(~0u, g < OCTET ? of_low : of_high, g % OCTET, OCTET);
            const float4 a = v[g][0][lane], b = v[g][1][lane];
            const float x[OWN] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
            sum.weight = fmaf(most[g][lane].y, w, sum.weight);
            sum.add(x, w);
        }
        return sum;
    }
};

// The grid is {chunks of 256 values, rows}.
template <typename Means, int BLOCKS>
__global__ void __launch_bounds__(GROUPS *WARP, BLOCKS)
    combine_kernel(const __grid_constant__ AttentionParts a, RowsLayout layout) {
    __shared__ Groups groups;
    let_next_start();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, D = a.pool.D, row = blockIdx.y;
    const int64_t K = int64_t(a.H) * D, k = int64_t(blockIdx.x) * CHUNK + lane * OWN, n = k < K ? k : 0;
    const int head = int(n / D), column = int(n % D);
    const RowCtl ctl = a.ctl->rows[row];
    const int position = a.committed != 0 && ctl.seq >= 0 ? a.ctl->seqs[ctl.seq].n_past - 1 : ctl.position;
    const int first = chunk_at(lowest_visible(position, a.first, a.window));
    // It is below `first` where the row sees nothing.
    const int last = ctl.seq < 0 ? -1 : chunk_at(position);
    const bool few = last - first < FEW_CHUNKS;
    const float2 *sums = a.sums + a.place(row, 0, head);
    const uint32_t at = uint32_t((a.place(row, 0, head) * D + column) / OWN);
    wait_for_previous(); // all that attention_kernel wrote is in memory
    if (few && warp > 0) {
        return;
    }
    float gate[OWN] = {};
    if (warp == 0 && a.gate != nullptr && first <= last && k < K) {
        load_values(gate, a.gate + row * a.gate_row + head * a.gate_head, column, D);
    }
    Sum sum;
    for (int g = warp; g < (few ? 1 : GROUPS); g += int(blockDim.x) / WARP) {
        const int begin = few ? first : first + (g + GROUPS - first % GROUPS) % GROUPS;
        sum = Sum();
        sum.add_chunks<Means>(sums, a.means, at, a.H, D, begin, few ? 1 : GROUPS, last, lane, k < K);
        if (!few) {
            groups.put(g, lane, sum);
        }
    }
    if (!few) {
        __syncthreads();
        if (warp > 0) {
            return;
        }
        sum = groups.total(lane);
    }
    Means::order(sum.v, lane);
    if (a.sinks != nullptr) {
        sum.add_sink(a.sinks[head] * LOG2E);
    }
    const float scale = sum.weight == 0 ? 0.0f : 1.0f / sum.weight;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        sum.v[i] = k < K ? sum.v[i] * scale : 0.0f;
    }
    if (a.gate != nullptr) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            sum.v[i] *= __fdividef(1.0f, 1.0f + expf(-gate[i]));
        }
    }
    if (a.packed != nullptr) {
        const int C = layout.columns;
        uint8_t *out = static_cast<uint8_t *>(a.packed) +
                       (row / layout.set * chunks_of(K) + int64_t(blockIdx.x)) * chunk_bytes(C);
        pack_chunk(out, C, row % layout.set, layout.wide, sum.v, largest(sum.v), lane);
    } else if (k < K) {
        float4 *out = reinterpret_cast<float4 *>(a.out + row * K + k);
        out[0] = {sum.v[0], sum.v[1], sum.v[2], sum.v[3]};
        out[1] = {sum.v[4], sum.v[5], sum.v[6], sum.v[7]};
    }
}

} // namespace

int attention_combine(const AttentionParts &parts, const DeviceLimits &device, cudaStream_t stream) {
    const RowsLayout layout(parts.T, parts.packed != nullptr && device.wgmma);
    const CombinePlan plan = plan_combine(device, parts);
    const auto kernel = parts.pool.type == KV_F32 ? combine_kernel<F32Means, 1>
                        : plan.blocks == 1        ? combine_kernel<F16Means, 1>
                                                  : combine_kernel<F16Means, 2>;
    return int(launch_kernel(kernel, plan.launch, stream, true, parts, layout));
}

} // namespace luce
