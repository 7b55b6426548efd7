// Says what the tensor core does with one unit of weights and its stage of activations. mma.sync has the
// activations in registers, and wgmma has them in shared memory. The products and the order of their sums are
// the same.
#pragma once

#include "matmul/dequantise.cuh"
#include "matmul/rings.cuh"
#include "matmul/sm90/wgmma.cuh"

#include <type_traits>

namespace luce {

template <int TYPE> using Known = std::integral_constant<int, TYPE>;

// Calls `multiply` with a type of weights as a constant, so that there is code of its own for each type, and with `args`. A
// lambda that captured these would change the code. A unit of BF16 weights is one of F16.
template <typename Multiply, typename... Args>
__device__ __forceinline__ void with_type(int type, Multiply &&multiply, Args &&...args) {
    switch (type) {
        case TYPE_F32: multiply(Known<TYPE_F32>(), args...); break;
        case TYPE_F16:
        case TYPE_BF16: multiply(Known<TYPE_F16>(), args...); break;
        case TYPE_Q4_0: multiply(Known<TYPE_Q4_0>(), args...); break;
        case TYPE_Q4_1: multiply(Known<TYPE_Q4_1>(), args...); break;
        case TYPE_Q5_0: multiply(Known<TYPE_Q5_0>(), args...); break;
        case TYPE_Q5_1: multiply(Known<TYPE_Q5_1>(), args...); break;
        case TYPE_Q8_0: multiply(Known<TYPE_Q8_0>(), args...); break;
        case TYPE_Q2_K: multiply(Known<TYPE_Q2_K>(), args...); break;
        case TYPE_Q3_K: multiply(Known<TYPE_Q3_K>(), args...); break;
        case TYPE_Q4_K: multiply(Known<TYPE_Q4_K>(), args...); break;
        case TYPE_Q5_K: multiply(Known<TYPE_Q5_K>(), args...); break;
        case TYPE_Q6_K: multiply(Known<TYPE_Q6_K>(), args...); break;
        case TYPE_IQ4_NL: multiply(Known<TYPE_IQ4_NL>(), args...); break;
        default: multiply(Known<TYPE_IQ4_XS>(), args...); break;
    }
}

// A number of columns that is known when a kernel is compiled.
template <int N> struct Exactly {
    int place = 0; // lane_place(), held in a register while a tile is multiplied
    __device__ __forceinline__ operator int() const { return N; }
};

// Returns a lane's column of eight. Where there are fewer rows than eight, the last one stands for those that
// are missing.
template <int NT> __device__ __forceinline__ int lane_column(int C, int lane) {
    return NT == 1 ? min(lane / 4, C - 1) : lane / 4;
}

// Returns how many bytes into eight columns of two steps' activations a lane's begin.
template <int NT> __device__ __forceinline__ int lane_place(int C, int lane) {
    return (lane_column<NT>(C, lane) * 4 + lane % 4) * 16;
}
template <int NT, int N> __device__ __forceinline__ int lane_place(const Exactly<N> &C, int) {
    return C.place;
}

// Reads two steps' activations of rows 8 n .. 8 n + 7. Where the number of columns is known (Exactly, and all of more than
// eight rows) a lane's lie at fixed offsets from its first, which the compiler has to be told.
template <int NT, typename Columns>
__device__ __forceinline__ uint4 read_rows(const uint8_t *stage, int group, int n, Columns C, int lane) {
    if constexpr (NT == 1 && std::is_same_v<Columns, int>) {
        return reinterpret_cast<const uint4 *>(stage)[(group * C + lane_column<NT>(C, lane)) * 4 + lane % 4];
    } else {
        return word_at<uint4>(stage + lane_place<NT>(C, lane) + (group * C + n * 8) * 64);
    }
}

// Returns how many bytes into the sums of eight columns' activations a lane's begin.
template <int NT, typename Columns> __device__ __forceinline__ int sums_place(Columns C, int n, int lane) {
    return NT == 1 ? lane_place<NT>(C, lane) / 2 : (n * WARP + lane) * 8;
}

// ---- mma.sync ----

// Multiplies half h of a unit of quants, which is 8 steps, two at a time.
template <int TYPE, int NT, typename Columns>
__device__ __forceinline__ void multiply_half(Sums<NT> &c, const Lane<TYPE> &weights,
                                              const Fields<bits_of(TYPE)> (&f)[2], const uint8_t *stage,
                                              int h, Columns C, int lane) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t a[8];
#pragma unroll
        for (int e = 0; e < 8; e++) {
            a[e] = weights.pair(f[e % 2], 4 * j + e / 2, e % 2);
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint4 b = read_rows<NT>(stage, 4 * h + j, n, C, lane);
            mma(c[n], a[0], a[1], a[2], a[3], b.x, b.y);
            mma(c[n], a[4], a[5], a[6], a[7], b.z, b.w);
        }
    }
}

// Multiplies a unit of F16 fragments. Of F32 weights each step has a high and a low part.
template <int TYPE, int NT, typename Columns>
__device__ __forceinline__ void multiply_floats(Sums<NT> &c, const uint8_t *fragment, const uint8_t *stage,
                                                Columns C, int lane) {
    constexpr int PARTS = TYPE == TYPE_F32 ? 2 : 1, STEPS = 16 / units_of_chunk(TYPE);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint4 b = read_rows<NT>(stage, step / 2, n, C, lane);
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const uint4 a = word_at<uint4>(fragment + ((step * PARTS + part) * WARP + lane) * 16);
                mma(c[n], a.x, a.y, a.z, a.w, step % 2 == 0 ? b.x : b.z, step % 2 == 0 ? b.y : b.w);
            }
        }
    }
}

// ---- wgmma ----

// So many steps are in flight while as many are made. With four, ptxas takes an instruction more for each
// descriptor, and most registers that there are.
constexpr int IN_GROUP = 2;

// Does the same with IN_GROUP steps in flight.
template <int TYPE, int NT>
__device__ __forceinline__ void multiply_half_wide(Sums<NT> &c, const Lane<TYPE> &weights,
                                                   const Fields<bits_of(TYPE)> (&f)[2],
                                                   uint32_t (&a)[2][4 * IN_GROUP], uint32_t stage, int h) {
    constexpr int N = IN_GROUP;
#pragma unroll
    for (int j = 0; j < 8 / N; j++) {
#pragma unroll
        for (int e = 0; e < 4 * N; e++) {
            a[j % 2][e] = weights.pair(f[e % 2], 2 * N * j + e / 2, e % 2);
        }
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < N; i++) {
            wgmma(c, a[j % 2] + 4 * i, wgmma_rows<NT>(stage, 8 * h + N * j + i), h + j + i > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (NT == 8) { // else all of the half's operands are made first, in as many registers
            wgmma_part(stage);
        }
    }
}

template <int TYPE, int NT, typename Loaded>
__device__ __forceinline__ void multiply_floats_wide(Sums<NT> &c, const uint8_t *fragment, uint32_t stage,
                                                     int lane, Loaded loaded) {
    constexpr int PARTS = TYPE == TYPE_F32 ? 2 : 1, STEPS = 16 / units_of_chunk(TYPE);
    uint32_t a[STEPS * PARTS][4];
#pragma unroll
    for (int i = 0; i < STEPS * PARTS; i++) {
        *reinterpret_cast<uint4 *>(a[i]) = word_at<uint4>(fragment + (i * WARP + lane) * 16);
    }
    loaded();
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < STEPS * PARTS; i++) {
        wgmma(c, a[i], wgmma_rows<NT>(stage, i / PARTS), i > 0);
    }
    wgmma_commit();
}

// ---- a unit ----

// The powers of two of a lane's two columns among 8 n .. 8 n + 7 of C rows that lie together.
struct Downs {
    __device__ __forceinline__ float2 operator()(const uint8_t *tail, int C, int n, int lane) const {
        return word_at<float2>(tail + 32 * C + (n * 8 + lane % 4 * 2) * 4);
    }
};

// Adds (what a unit gave) * (the unit's factors) / (the columns' powers of two) to acc. `zero` is 0. Where the
// compiler does not know that, the minimums are one operand and are not copied for each multiplication.
template <int TYPE, int NT, typename Columns, typename Down>
__device__ __forceinline__ void add_unit(Sums<NT> &acc, const Sums<NT> &c, const Lane<TYPE> &weights,
                                         const uint8_t *tail, Columns C, int lane, Down downs,
                                         uint32_t zero) {
    uint32_t m[4];
    if constexpr (has_minimum(TYPE)) {
        m[0] = weights.minimum(0);
        m[1] = weights.minimum(1);
        m[2] = m[0] ^ zero;
        m[3] = m[1] ^ zero;
    }
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float2 down = downs(tail, C, n, lane);
        float e[4] = {};
        if constexpr (has_minimum(TYPE)) {
            const uint2 sums = word_at<uint2>(tail + sums_place<NT>(C, n, lane));
            mma(e, m[0], m[1], m[2], m[3], sums.x, sums.y);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float x = c[n][k];
            if constexpr (has_super(TYPE)) {
                x *= weights.factor(k / 2);
            }
            if constexpr (has_minimum(TYPE)) {
                x = fmaf(-weights.minimum_factor(k / 2), e[k], x);
            }
            acc[n][k] = fmaf(x, k % 2 == 0 ? down.x : down.y, acc[n][k]);
        }
    }
}
template <int NT, typename Columns, typename Down>
__device__ __forceinline__ void add_floats(Sums<NT> &acc, const Sums<NT> &c, const uint8_t *tail, Columns C,
                                           int lane, Down downs) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float2 down = downs(tail, C, n, lane);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            acc[n][k] = fmaf(c[n][k], k % 2 == 0 ? down.x : down.y, acc[n][k]);
        }
    }
}

// `stage` has the unit's activations, and `tail` what comes after all of its chunk's. downs gives the columns' powers of
// two. `loaded` is called when all of a wide fragment is in registers.
template <int TYPE, int NT, bool WIDE, typename Columns, typename Down, typename Loaded>
__device__ __forceinline__ void multiply_unit(Sums<NT> &acc, const uint8_t *fragment, const uint8_t *stage,
                                              const uint8_t *tail, Columns C, int lane, Down downs,
                                              Loaded loaded) {
    const uint32_t rows =
        WIDE ? __shfl_sync(~0u, shared_address(stage), 0) : 0; // this is the warp's address, not each lane's
    Sums<NT> c = {};
    if constexpr (is_float_type(TYPE)) {
        if constexpr (WIDE) {
            multiply_floats_wide<TYPE, NT>(c, fragment, rows, lane, loaded);
            wgmma_wait<0>();
            wgmma_pin(c);
        } else {
            multiply_floats<TYPE, NT>(c, fragment, stage, C, lane);
        }
        add_floats<NT>(acc, c, tail, C, lane, downs);
    } else {
        Lane<TYPE> weights;
        uint32_t a[2][4 * IN_GROUP];
        weights.load(fragment, lane);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            Fields<bits_of(TYPE)> f[2];
            f[0].load(fragment, 2 * h, lane);
            f[1].load(fragment, 2 * h + 1, lane);
            if (WIDE && h == 1) {
                loaded();
            }
            weights.half(h);
            if constexpr (WIDE) {
                multiply_half_wide<TYPE, NT>(c, weights, f, a, rows, h);
            } else {
                multiply_half<TYPE, NT>(c, weights, f, stage, h, C, lane);
            }
        }
        if constexpr (WIDE) {
            wgmma_wait<0>();
            wgmma_pin(c);
        }
        add_unit<TYPE, NT>(acc, c, weights, tail, C, lane, downs,
                           WIDE && NT == 8 ? rows ^ shared_address(stage) : 0);
    }
}

// Multiplies `units` units of one tile. A warp whose outputs are not there only keeps step, since wgmma needs
// all of a warpgroup. With up to 16 rows it is not called for one: the units are shorter without a test.
template <int TYPE, int NT, bool WIDE, typename Ring, typename Columns>
__device__ __forceinline__ void multiply(Sums<NT> &acc, Ring &ring, int units, Columns C, bool present) {
    int of_warp = fragment_of_warp();
    if constexpr (
        !ROWMM_BULK) { // else what all types make of it is found ahead of the switch, and kept in memory
        hold(of_warp);
    }
    const int offset = of_warp * fragment_bytes(TYPE);
    int held = threadIdx.x % WARP;
    if constexpr (NT == 1) {
        C.place = lane_place<NT>(int(C), held);
    }
    for (; units > 0; units--) {
        if constexpr (NT == 1) {
            // A unit finds its addresses of these two: if all were kept, some would have to go to memory.
            hold(held);
            hold(C.place);
        }
        const int lane = NT == 1 ? held & (WARP - 1) : held;
        ring.wait();
        if (NT <= 2 || present) {
            const uint8_t *fragment = ring.weights() + offset, *stage = ring.rows();
            multiply_unit<TYPE, NT, WIDE>(acc, fragment, stage, stage + chunk_sums(C), C, lane, Downs(),
                                          [&] { ring.release_weights(lane); });
        } else {
            ring.release_weights(lane);
        }
        ring.release(lane);
    }
}

// Passes by `units` units of a tile that has no outputs of this warp.
template <typename Ring> __device__ __forceinline__ void pass_units(Ring &ring, int units) {
    for (; units > 0; units--) {
        ring.wait();
        ring.release(threadIdx.x % WARP);
    }
}

// Multiplies `units` units of a tile of weights of this type.
template <int NT, bool WIDE, typename Ring, typename Columns>
__device__ __forceinline__ void multiply_tile(Sums<NT> &acc, Ring &ring, int type, int units, Columns C,
                                              bool present) {
    if (NT <= 2 && !present) {
        pass_units(ring, units);
    } else {
        with_type(
            type, [](auto known, auto &...to) { multiply<known.value, NT, WIDE>(to...); }, acc, ring, units,
            C, present);
    }
}

} // namespace luce
