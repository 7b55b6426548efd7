// Has the kernels of layer_floor.cu.
#pragma once

#include "matmul/ptx.cuh"

using namespace luce;

constexpr int WARP = 32, TAKERS = 16, THREADS = TAKERS * WARP, LAYERS = 40, STEPS = 5, RUNS = 5;
constexpr int PIECE = 4096, DENSE_SLOTS = 28, EXPERT_SLOTS = 20, MOST_STAGES = 10;
constexpr int OWN = 30, MOST_BLOCKS = 132, VALUES = OWN * MOST_BLOCKS, BUFFERS = 4;
constexpr int USED = 8, EXPERTS = 256, EXPERT_ROOM = 512; // an expert has room for so many pieces
constexpr int64_t DENSE_PIECES = int64_t(LAYERS) * 48 * MOST_BLOCKS, EXPERT_PIECES = 1 << 20;
constexpr int MOST_POLLS = 1 << 19; // a wait of more ends the program
constexpr int HEAVY = 36; // so many instructions are added to each 16 bytes
enum Form { COUNTER, CARRIED, ALONE };

struct Stage {
    int dense, experts; // a block has so many pieces
};
struct Plan {
    int n, up, dense_layer; // experts are known in stage `up`; a layer has so many dense pieces of a block
    Stage stages[MOST_STAGES];
};
struct Chain {
    Plan plan;
    const uint8_t *dense, *experts;
    float *values; // [BUFFERS][VALUES]
    uint4 *carried; // [BUFFERS][VALUES / 3]
    uint32_t *counter;
    uint64_t *stamps; // when block 0 had its values of a stage, and when it had added up
};
__device__ void stamp(const Chain &c, int e, int which) {
    if (threadIdx.x == 0 && blockIdx.x == 0) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(c.stamps[e * 2 + which])::"memory");
    }
}

__device__ void consumers_meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}
__device__ void wait_phase(uint32_t barrier, uint32_t parity) {
    for (int polls = 0; !phase_ended(barrier, parity); polls++) {
        if (polls > MOST_POLLS) {
            __trap();
        }
    }
}
__device__ void wait_until(const uint32_t *p, uint32_t least) {
    for (int polls = 0;; polls++) {
        uint32_t x;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
        if (int(x - least) >= 0) {
            return;
        }
        if (polls > MOST_POLLS) {
            __trap();
        }
    }
}
__device__ uint4 load_at_once(const uint4 *p) {
    uint64_t a, b;
    asm volatile("{\n.reg .b128 q;\nld.relaxed.gpu.global.b128 q, [%2];\nmov.b128 {%0, %1}, q;\n}"
                 : "=l"(a), "=l"(b)
                 : "l"(p)
                 : "memory");
    return {uint32_t(a), uint32_t(a >> 32), uint32_t(b), uint32_t(b >> 32)};
}
__device__ void store_at_once(uint4 *p, const uint4 &x) {
    const uint64_t a = uint64_t(x.y) << 32 | x.x, b = uint64_t(x.w) << 32 | x.z;
    asm volatile("{\n.reg .b128 q;\nmov.b128 q, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], q;\n}" ::"l"(p),
                 "l"(a), "l"(b)
                 : "memory");
}

// Returns a value of 0.5 to 1 that follows from all bits of x.
__device__ float stir(uint32_t x) {
    return __uint_as_float((x * 2654435761u >> 9) | 0x3f000000);
}

__device__ const uint8_t *dense_piece(const Chain &c, int layer, int index) {
    return c.dense + ((int64_t(layer) * c.plan.dense_layer + index) * gridDim.x + blockIdx.x) * PIECE;
}
__device__ const uint8_t *expert_piece(const Chain &c, int layer, int s, int i, const int *chosen) {
    const int n = c.plan.stages[s].experts * int(gridDim.x),
              at = int(blockIdx.x) * c.plan.stages[s].experts + i;
    const int rank = at * USED / n,
              within = at - rank * n / USED + (s == c.plan.up ? 0 : EXPERT_ROOM * 3 / 5);
    const int64_t index = (int64_t(layer) * EXPERTS + chosen[rank]) * EXPERT_ROOM + within;
    return c.experts + index % EXPERT_PIECES * PIECE;
}
__device__ void fetch(uint8_t *slot, const uint8_t *from, uint32_t full) {
    copies_begin(full, PIECE);
    copy_to_shared(shared_address(slot), from, PIECE, full, false);
    copies_end(full);
}

// A warp chooses the eight greatest of 256 values.
__device__ void choose(const float (&x)[EXPERTS / WARP], int *chosen) {
    const int lane = threadIdx.x % WARP;
    uint32_t key[EXPERTS / WARP];
#pragma unroll
    for (int j = 0; j < EXPERTS / WARP; j++) {
        key[j] = (__float_as_uint(x[j]) & 0x7fffff) << 8 | uint32_t(j * WARP + lane);
    }
#pragma unroll
    for (int r = 0; r < USED; r++) {
        uint32_t most = 0;
#pragma unroll
        for (int j = 0; j < EXPERTS / WARP; j++) {
            most = max(most, key[j]);
        }
        most = __reduce_max_sync(~0u, most);
#pragma unroll
        for (int j = 0; j < EXPERTS / WARP; j++) {
            key[j] = key[j] == most ? 0 : key[j];
        }
        if (lane == r) {
            chosen[r] = int(most % EXPERTS);
        }
    }
    __syncwarp();
}

template <int EXTRA>
__device__ void take_piece(const uint8_t *slot, int piece, const float *x, float (&acc)[4]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll 4
    for (int i = 0; i < PIECE / 16 / WARP; i++) {
        const uint4 q = reinterpret_cast<const uint4 *>(slot)[i * WARP + lane];
        const float4 v = reinterpret_cast<const float4 *>(x)[(piece * 256 + i * WARP + lane) % 512];
        const float w[4] = {
            __uint_as_float((q.x & 0x7fffff) | 0x3f000000), __uint_as_float((q.y & 0x7fffff) | 0x3f000000),
            __uint_as_float((q.z & 0x7fffff) | 0x3f000000), __uint_as_float((q.w & 0x7fffff) | 0x3f000000)};
        acc[0] = fmaf(w[0], v.x, acc[0]), acc[1] = fmaf(w[1], v.y, acc[1]);
        acc[2] = fmaf(w[2], v.z, acc[2]), acc[3] = fmaf(w[3], v.w, acc[3]);
#pragma unroll
        for (int e = 0; e < EXTRA; e++) {
            acc[e % 4] = fmaf(acc[e % 4], 0.9375f, w[e / 4 % 4]);
        }
    }
}

struct Ring {
    uint8_t *slots;
    uint32_t full, free;
    int n;

    __device__ uint8_t *slot(int i) const { return slots + i % n * PIECE; }
    __device__ uint32_t filled(int i) const { return full + i % n * 8; }
    __device__ uint32_t left(int i) const { return free + i % n * 8; }
    // One thread puts piece i of the ring into its slot, if that is free.
    __device__ bool try_put(int i, const uint8_t *from) const {
        uint32_t is_free = 1;
        if (i >= n) {
            asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, "
                         "1, 0, p;\n}"
                         : "=r"(is_free)
                         : "r"(left(i)), "r"((i / n - 1) % 2)
                         : "memory");
        }
        if (is_free != 0) {
            fetch(slot(i), from, filled(i));
        }
        return is_free != 0;
    }
    // Does so once it is free.
    __device__ void put(int i, const uint8_t *from) const {
        if (i >= n) {
            wait_phase(left(i), (i / n - 1) % 2);
        }
        fetch(slot(i), from, filled(i));
    }
};

struct ChainShared {
    alignas(16) float x[VALUES];
    float sums[TAKERS][WARP];
    uint64_t full[DENSE_SLOTS + EXPERT_SLOTS], free[DENSE_SLOTS + EXPERT_SLOTS], known;
    int chosen[USED];
};

// Reads what stage e - 1 of all blocks has left.
template <Form FORM> __device__ void read_values(const Chain &c, ChainShared &s, int e) {
    const int t = threadIdx.x, n = OWN * int(gridDim.x), buffer = (e + BUFFERS - 1) % BUFFERS;
    if (FORM == CARRIED && e > 0) {
        constexpr int EACH = (VALUES / 3 + THREADS - 1) / THREADS;
        const uint4 *from = c.carried + buffer * (VALUES / 3);
        uint4 v[EACH];
        bool waits = true;
        for (int polls = 0; waits; polls++) {
            waits = false;
#pragma unroll
            for (int r = 0; r < EACH; r++) {
                v[r] = load_at_once(from + min(t + r * THREADS, n / 3 - 1));
            }
#pragma unroll
            for (int r = 0; r < EACH; r++) {
                waits = waits || v[r].w != uint32_t(e);
            }
            if (polls > MOST_POLLS) {
                __trap();
            }
        }
#pragma unroll
        for (int r = 0; r < EACH; r++) {
            if (const int i = t + r * THREADS; i < n / 3) {
                s.x[3 * i] = __uint_as_float(v[r].x);
                s.x[3 * i + 1] = __uint_as_float(v[r].y);
                s.x[3 * i + 2] = __uint_as_float(v[r].z);
            }
        }
        consumers_meet();
        return;
    }
    if (FORM == COUNTER && e > 0 && t == 0) {
        wait_until(c.counter, uint32_t(e) * gridDim.x);
    }
    consumers_meet();
    const float4 *from = reinterpret_cast<const float4 *>(c.values + buffer * VALUES);
    for (int i = t; i < n / 4; i += THREADS) {
        reinterpret_cast<float4 *>(s.x)[i] = __ldcg(from + i);
    }
    consumers_meet();
}

// Adds up the warps' sums and leaves the block's values of stage e. One warp does so.
template <Form FORM> __device__ void leave_values(const Chain &c, ChainShared &s, int e) {
    const int lane = threadIdx.x % WARP, block = blockIdx.x, buffer = e % BUFFERS;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < TAKERS; w++) {
        sum += s.sums[w][lane];
    }
    const uint32_t value = __float_as_uint(stir(__float_as_uint(sum) + uint32_t(lane)));
    if (FORM == CARRIED) {
        const uint32_t a = __shfl_sync(~0u, value, lane * 3 % WARP),
                       b = __shfl_sync(~0u, value, (lane * 3 + 1) % WARP),
                       d = __shfl_sync(~0u, value, (lane * 3 + 2) % WARP);
        if (lane < OWN / 3) {
            store_at_once(c.carried + buffer * (VALUES / 3) + block * (OWN / 3) + lane,
                          {a, b, d, uint32_t(e + 1)});
        }
        return;
    }
    if (lane < OWN) {
        __stcg(c.values + buffer * VALUES + block * OWN + lane, __uint_as_float(value));
    }
    __syncwarp();
    if (FORM == COUNTER && lane == 0) {
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(c.counter) : "memory");
    }
}

template <Form FORM, int EXTRA>
__device__ void take_all(const Chain &c, ChainShared &s, const Ring &dense, const Ring &experts) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int e = 0, of_dense = 0, of_experts = 0;
    float acc[4] = {};
    if (FORM == ALONE) {
        read_values<FORM>(c, s, 0);
    }
    for (int i = 0; i < STEPS * LAYERS; i++) {
        for (int stage = 0; stage < c.plan.n; stage++, e++) {
            if (FORM != ALONE) {
                read_values<FORM>(c, s, e);
                stamp(c, e, 0);
                acc[0] = acc[1] = acc[2] = acc[3] = 0;
            }
            if (FORM != ALONE && stage == c.plan.up && warp == 0) {
                float x[EXPERTS / WARP];
                for (int j = 0; j < EXPERTS / WARP; j++) {
                    x[j] = s.x[j * WARP + lane];
                }
                choose(x, s.chosen);
                if (lane == 0) {
                    barrier_arrive(shared_address(&s.known));
                }
            }
            const Stage &now = c.plan.stages[stage];
            for (int p = warp; p < now.dense + now.experts; p += TAKERS) {
                const bool expert = p >= now.dense;
                const Ring &ring = expert ? experts : dense;
                const int at = expert ? of_experts + p - now.dense : of_dense + p;
                wait_phase(ring.filled(at), at / ring.n % 2);
                take_piece<EXTRA>(ring.slot(at), p, s.x, acc);
                __syncwarp();
                if (lane == 0) {
                    barrier_arrive(ring.left(at));
                }
            }
            of_dense += now.dense;
            of_experts += now.experts;
            if (FORM == ALONE) {
                consumers_meet(); // a warp that were a ring ahead would take one piece for another
            } else {
                s.sums[warp][lane] = (acc[0] + acc[1]) + (acc[2] + acc[3]) + s.x[warp * WARP + lane];
                consumers_meet();
                stamp(c, e, 1);
                if (warp == 0) {
                    leave_values<FORM>(c, s, e);
                }
            }
        }
    }
    if (FORM == ALONE) {
        s.sums[warp][lane] = (acc[0] + acc[1]) + (acc[2] + acc[3]);
    }
    consumers_meet();
    if (warp == 0) { // all forms leave the last values in the same place
        if (FORM == CARRIED) {
            float sum = 0;
            for (int w = 0; w < TAKERS; w++) {
                sum += s.sums[w][lane];
            }
            if (lane < OWN) {
                c.values[(e - 1) % BUFFERS * VALUES + blockIdx.x * OWN + lane] =
                    stir(__float_as_uint(sum) + uint32_t(lane));
            }
        } else if (FORM == ALONE) {
            leave_values<FORM>(c, s, e - 1);
        }
    }
}

// Two warps behind those that take fill the two rings.
template <Form FORM, int EXTRA>
__global__ void __launch_bounds__(THREADS + 2 * WARP, 1) chain_kernel(const __grid_constant__ Chain c) {
    extern __shared__ __align__(128) uint8_t slots[];
    __shared__ ChainShared s;
    const Ring dense = {slots, shared_address(s.full), shared_address(s.free), DENSE_SLOTS};
    const Ring experts = {slots + DENSE_SLOTS * PIECE, shared_address(s.full + DENSE_SLOTS),
                          shared_address(s.free + DENSE_SLOTS), EXPERT_SLOTS};
    if (threadIdx.x == 0) {
        for (int i = 0; i < DENSE_SLOTS + EXPERT_SLOTS; i++) {
            barrier_init(shared_address(&s.full[i]), 1);
            barrier_init(shared_address(&s.free[i]), 1);
        }
        barrier_init(shared_address(&s.known), 1);
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x < THREADS) {
        take_all<FORM, EXTRA>(c, s, dense, experts);
        return;
    }
    const int lane = threadIdx.x % WARP;
    int n = 0;
    if (threadIdx.x / WARP == TAKERS) {
        for (int i = 0; lane == 0 && i < STEPS * LAYERS; i++) {
            for (int p = 0; p < c.plan.dense_layer; p++) {
                dense.put(n++, dense_piece(c, i % LAYERS, p));
            }
        }
        return;
    }
    for (int i = 0; c.plan.stages[c.plan.up].experts > 0 && i < STEPS * LAYERS; i++) {
        if (FORM == ALONE && lane < USED) {
            s.chosen[lane] = (i * 37 + lane * 29) % EXPERTS;
        } else if (FORM != ALONE) {
            wait_phase(shared_address(&s.known), i % 2);
        }
        __syncwarp();
        for (int stage = c.plan.up; stage < c.plan.n; stage++) {
            const int pieces = c.plan.stages[stage].experts;
            const uint8_t *from =
                lane < pieces ? expert_piece(c, i % LAYERS, stage, lane, s.chosen) : nullptr;
            uint32_t waits = __ballot_sync(~0u, lane < pieces && !experts.try_put(n + lane, from));
            for (; waits != 0; waits &= waits - 1) {
                if (lane == __ffs(waits) - 1) {
                    experts.put(n + lane, from);
                }
                __syncwarp();
            }
            n += pieces;
        }
    }
}

// Is one stage. Its dense pieces are fetched ahead of the wait. `up` lets the next start only behind its own wait, so that the
// stage behind it may choose the experts ahead of its own.
template <int EXTRA>
__global__ void __launch_bounds__(THREADS)
    stage_kernel(const __grid_constant__ Chain c, int layer, int stage, int first, int e) {
    extern __shared__ __align__(128) uint8_t slots[];
    __shared__ ChainShared s;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const Stage now = c.plan.stages[stage];
    const uint32_t full = shared_address(s.full);
    const bool is_up = stage == c.plan.up;
    if (!is_up) {
        let_next_start();
    }
    if (warp == 0) {
        if (lane == 0) {
            for (int i = 0; i < now.dense + now.experts; i++) {
                barrier_init(full + i * 8, 1);
            }
            barrier_init_done();
            for (int p = 0; p < now.dense; p++) {
                fetch(slots + p * PIECE, dense_piece(c, layer, first + p), full + p * 8);
            }
        }
        __syncwarp();
    }
    if (is_up) {
        wait_for_previous();
        let_next_start();
    }
    if (now.experts > 0 && warp == 0) {
        const float *from = c.values + (e - 1 - (stage - c.plan.up) + BUFFERS) % BUFFERS * VALUES;
        float x[EXPERTS / WARP];
#pragma unroll
        for (int j = 0; j < EXPERTS / WARP; j++) {
            x[j] = __ldcg(from + j * WARP + lane);
        }
        choose(x, s.chosen);
        if (lane < now.experts) {
            const int p = now.dense + lane;
            fetch(slots + p * PIECE, expert_piece(c, layer, stage, lane, s.chosen), full + p * 8);
        }
    }
    wait_for_previous();
    read_values<ALONE>(c, s, e);
    stamp(c, e, 0);
    float acc[4] = {};
    for (int p = warp; p < now.dense + now.experts; p += TAKERS) {
        wait_phase(full + p * 8, 0);
        take_piece<EXTRA>(slots + p * PIECE, p, s.x, acc);
    }
    s.sums[warp][lane] = (acc[0] + acc[1]) + (acc[2] + acc[3]) + s.x[warp * WARP + lane];
    __syncthreads();
    stamp(c, e, 1);
    if (warp == 0) {
        leave_values<ALONE>(c, s, e);
    }
}
