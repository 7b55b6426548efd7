// Permutes weights from ggml's layout to rowmm's, once at load, and from there to F16 rows for a prefill's
// cuBLAS. A warp has a fragment: 16 outputs x 256 k (of float types a quarter or an eighth of that). Its
// lanes hold what they hold in the product (matmul/fields.cuh). Reading ggml's blocks byte by byte costs a few
// ms a GB, which is less than any disk takes.
#include "common/lanes.cuh"
#include "matmul/dequantise.cuh"
#include "matmul/file_blocks.cuh"

#include <algorithm>

namespace luce {
namespace {

constexpr int WARPS = 4;

// ---- one fragment of quants ----

// blocks[r] are 256 values of outputs g and g + 8, or null where there are none. n_k says how many of the 256
// there are.
template <int TYPE>
__device__ void store_quants(uint8_t *out, const uint8_t *const (&blocks)[2], int n_k, int lane) {
    constexpr int BITS = bits_of(TYPE);
    for (int v = 0; v < 4; v++) {
        const uint8_t *b = blocks[v % 2];
        const int k = lane % 4 * 64 + v / 2 * 32;
        Fields<BITS> f = {};
        if (b != nullptr && k < n_k) {
#pragma unroll
            for (int p = 0; p < 16; p++) {
                const uint32_t low = quant<TYPE>(b, k + 2 * p), high = quant<TYPE>(b, k + 2 * p + 1);
                if constexpr (TYPE == TYPE_IQ4_XS || TYPE == TYPE_IQ4_NL) {
                    iq4_put(f, p, low, high);
                } else {
                    f.put(p, low, high);
                }
            }
        }
        f.store(out, v, lane);
    }
}

template <typename T> __device__ void put(uint8_t *p, T x) {
    *reinterpret_cast<T *>(p) = x;
}

template <int TYPE>
__device__ void store_scales(uint8_t *out, const uint8_t *const (&blocks)[2], int n_k, int lane) {
    const int g = lane / 4, t = lane % 4;
    uint8_t *p = out + scales_at(TYPE), *super = out + super_at(TYPE);
    uint64_t packed = 0;
    for (int r = 0; r < 2; r++) {
        const uint8_t *b = blocks[r];
        const auto scale = [&](int j) { return b == nullptr ? 0u : block_scale<TYPE>(b, j); };
        if constexpr (TYPE == TYPE_Q4_K || TYPE == TYPE_Q5_K) {
            // Output r's scales go with block 2 t + r's minimums.
            const auto minimum = [&](const uint8_t *x) {
                return x == nullptr ? 0u : block_scale<TYPE>(x, 2 * t + r) >> 8;
            };
            const uint32_t mn = minimum(blocks[0]);
            put(p + lane * 4 + 2 * r,
                uint16_t((scale(2 * t) & 63) | (scale(2 * t + 1) & 63) << 6 | (mn & 15) << 12));
            p[128 + lane * 2 + r] = uint8_t(minimum(blocks[1]) | mn >> 4 << 6);
        } else if constexpr (TYPE == TYPE_Q6_K) {
            for (int i = 0; i < 4; i++) {
                p[lane * 8 + i / 2 * 4 + 2 * r + i % 2] = uint8_t(scale(4 * t + i) ^ 0x80);
            }
        } else if constexpr (TYPE == TYPE_Q2_K) {
            for (int i = 0; i < 4; i++) {
                p[lane * 8 + 4 * r + i] = uint8_t(scale(4 * t + i));
            }
        } else if constexpr (TYPE == TYPE_Q3_K) {
            for (int i = 0; i < 4; i++) {
                packed |= uint64_t(scale(4 * t + i)) << (24 * r + 6 * i);
            }
        } else if constexpr (TYPE == TYPE_IQ4_XS) {
            packed |= uint64_t(scale(2 * t) | scale(2 * t + 1) << 6) << 12 * r;
        } else {
            // these are d, and m where there is one, of 32-blocks 2 t and 2 t + 1
            for (int i = 0; i < 2; i++) {
                const uint8_t *block = b + (2 * t + i) * (chunk_weight_bytes(TYPE) / 8);
                const bool there = b != nullptr && (2 * t + i) * 32 < n_k;
                put(p + lane * 8 + 4 * i + 2 * r, uint16_t(there ? u16_at(block) : 0));
                if (TYPE == TYPE_Q4_1 || TYPE == TYPE_Q5_1) {
                    put(p + 256 + lane * 8 + 4 * i + 2 * r, uint16_t(there ? u16_at(block + 2) : 0));
                }
            }
        }
        if (has_super(TYPE) && t == 0) {
            constexpr bool TWO = has_minimum(TYPE) || TYPE == TYPE_Q2_K;
            const uint8_t *d = b + super_scale_at(TYPE);
            put(super + g * (TWO ? 8 : 4) + 2 * r, uint16_t(b == nullptr ? 0 : u16_at(d)));
            if (TWO) {
                put(super + g * 8 + 4 + 2 * r, uint16_t(b == nullptr ? 0 : u16_at(d + 2)));
            }
        }
    }
    if (TYPE == TYPE_Q3_K) {
        put(p + lane * 4, uint32_t(packed));
        put(p + 128 + lane * 2, uint16_t(packed >> 32));
    }
    if (TYPE == TYPE_IQ4_XS) {
        put(p + lane * 2, uint16_t(packed));
        p[64 + lane] = uint8_t(packed >> 16);
    }
}

// The grid can have any size, since a warp takes every so many-th fragment.
template <int TYPE> __global__ void permute_kernel(RowmmPermuteArgs a) {
    const int lane = threadIdx.x % WARP;
    const int64_t chunks = chunks_of(a.K), n16s = fragments_of(a.N);
    const int64_t row_bytes =
        a.K / block_values(TYPE) * (chunk_weight_bytes(TYPE) * block_values(TYPE) / CHUNK);
    for (int64_t i = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP; i < n16s * chunks;
         i += gridDim.x * WARPS) {
        const int64_t n16 = i / chunks, chunk = i % chunks;
        const uint8_t *blocks[2];
        for (int r = 0; r < 2; r++) {
            const int64_t n = n16 * FRAGMENT + lane / 4 + 8 * r;
            blocks[r] = n >= a.N ? nullptr
                                 : static_cast<const uint8_t *>(a.src) + n * row_bytes +
                                       chunk * chunk_weight_bytes(TYPE);
        }
        const int n_k = int(min(a.K - chunk * CHUNK, int64_t(CHUNK)));
        uint8_t *out = static_cast<uint8_t *>(a.dst) + fragment_offset(TYPE, chunks, a.N, n16, chunk);
        store_quants<TYPE>(out, blocks, n_k, lane);
        store_scales<TYPE>(out, blocks, n_k, lane);
    }
}

// ---- float types ----

// Finds the power of two that an output's weights are divided by, so that the largest is below 2^15. The F16
// of BF16 weights is then exact down to 2^-31 of it, and F32 weights become the sum of two F16. The grid can
// have any size, and a warp has an output.
template <int TYPE> __global__ void output_scale_kernel(RowmmPermuteArgs a) {
    float *scales =
        reinterpret_cast<float *>(static_cast<uint8_t *>(a.dst) + output_scale_offset(TYPE, a.K, a.N));
    const int lane = threadIdx.x % WARP;
    for (int64_t n = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP; n < fragments_of(a.N) * FRAGMENT;
         n += gridDim.x * WARPS) {
        float most = 0;
        for (int64_t k = lane; n < a.N && k < a.K; k += WARP) {
            const float x = fabsf(float_at<TYPE>(a.src, n * a.K + k));
            most = isfinite(x) ? fmaxf(most, x) : most;
        }
        most = warp_max(most);
        if (lane == 0) {
            const uint32_t exponent = max(__float_as_uint(most) >> 23, 20u);
            scales[n] = most == 0 ? 1.0f : __uint_as_float((exponent - 14) << 23);
        }
    }
}

// Writes fragments. Those of F16 and BF16 are [4 steps][lane][g, g + 8, g, g + 8 with the next two k], and
// those of F32 are [2 steps][hi, lo] of these.
template <int TYPE> __global__ void permute_float_kernel(RowmmPermuteArgs a) {
    constexpr int UNITS = units_of_chunk(TYPE), STEPS = 16 / UNITS;
    const int lane = threadIdx.x % WARP;
    const int64_t units = chunks_of(a.K) * UNITS, n16s = fragments_of(a.N);
    uint8_t *packed = static_cast<uint8_t *>(a.dst);
    const float *scales = reinterpret_cast<const float *>(packed + output_scale_offset(TYPE, a.K, a.N));
    for (int64_t i = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP; i < n16s * units;
         i += gridDim.x * WARPS) {
        const int64_t n16 = i / units, unit = i % units;
        __half *out = reinterpret_cast<__half *>(packed + fragment_offset(TYPE, units, a.N, n16, unit));
        for (int e = 0; e < STEPS * 8; e++) { // this is value e % 2 of register e / 2 % 4 of step e / 8
            const int64_t n = n16 * FRAGMENT + lane / 4 + e / 2 % 2 * 8;
            const int64_t k = unit / UNITS * CHUNK + lane % 4 * 64 + unit % UNITS * STEPS * 4 + e / 8 * 4 +
                              e / 4 % 2 * 2 + e % 2;
            float x = n < a.N && k < a.K ? float_at<TYPE>(a.src, n * a.K + k) : 0.0f;
            if (has_output_scale(TYPE)) {
                x = __fdiv_rn(x, scales[n]);
            }
            const __half high = __float2half_rn(x);
            if (TYPE == TYPE_F32) {
                out[(e / 8 * 2 * WARP + lane) * 8 + e % 8] = high;
                const float rest = isinf(__half2float(high)) ? 0.0f : x - __half2float(high);
                out[((e / 8 * 2 + 1) * WARP + lane) * 8 + e % 8] = __float2half_rn(rest);
            } else {
                out[(e / 8 * WARP + lane) * 8 + e % 8] = high;
            }
        }
    }
}

// ---- back to rows of F16 ----

// Says what a quant of one 16 is worth: (q - bias) * scale + offset, with each step rounded to F32 as ggml
// does.
struct Worth {
    float scale, offset;
};
template <int TYPE> __device__ Worth worth(const Lane<TYPE> &x, int h, int i, int r) {
    if constexpr (has_minimum(TYPE)) {
        const float d = half_bits(x.super >> 16 * r & 0xffff),
                    d_min = half_bits(x.super_min >> 16 * r & 0xffff);
        return {d * float(x.u >> (16 * r + 6 * h) & 63), -(d_min * float(x.minimum(r) >> 16 * h & 0xffff))};
    } else if constexpr (TYPE == TYPE_Q6_K) {
        const int stored = x.packed[h] >> (16 * r + 8 * i) & 0xff;
        return {half_bits(x.super >> 16 * r & 0xffff) * float(stored - 128), 0};
    } else if constexpr (TYPE == TYPE_Q3_K) {
        const int stored = x.packed[r] >> 8 * (2 * h + i) & 0xff;
        return {half_bits(x.super >> 16 * r & 0xffff) * float(stored - 32), 0};
    } else if constexpr (TYPE == TYPE_Q2_K) {
        const uint32_t stored = x.packed[r] >> 8 * (2 * h + i);
        return {x.d[r] * float(stored & 15), -(x.d_min[r] * float(stored >> 4 & 15))};
    } else if constexpr (TYPE == TYPE_IQ4_XS) {
        return {half_bits(x.super >> 16 * r & 0xffff) * (float(x.u >> (12 * r + 6 * h) & 63) - 32), 0};
    } else {
        float m = 0;
        if constexpr (TYPE == TYPE_Q4_1 || TYPE == TYPE_Q5_1) {
            m = __low2float(x.m[r]);
        }
        return {__low2float(x.d[r]), m};
    }
}
// Returns the 32 values of half h of output g + 8 r, as 16 pairs of F16.
template <int TYPE>
__device__ void dequantise(uint32_t (&out)[16], const Lane<TYPE> &x, const uint8_t *fragment, int h, int r,
                           int lane) {
    constexpr bool TABLE = TYPE == TYPE_IQ4_NL || TYPE == TYPE_IQ4_XS;
    Fields<bits_of(TYPE)> f;
    f.load(fragment, 2 * h + r, lane);
#pragma unroll
    for (int p = 0; p < 16; p++) {
        uint32_t q = f.get(p);
        if constexpr (TABLE) {
            const uint32_t bytes = iq4_values(f.w[p / 4] >> (p % 4 < 2 ? 0 : 16)) >> p % 2 * 16;
            q = (bytes & 0xff) | (bytes & 0xff00) << 8;
        }
        const Worth w = worth<TYPE>(x, h, p / 8, r);
        const float low = float(int(q & 0xffff) - bias_of(TYPE)), high = float(int(q >> 16) - bias_of(TYPE));
        out[p] = word_of(__floats2half2_rn(low * w.scale + w.offset, high * w.scale + w.offset));
    }
}

// Does the same for float types: it takes k = 64 t + 32 h .. + 31 of output g + 8 r from the units that hold
// them.
template <int TYPE>
__device__ void read_floats(uint32_t (&out)[16], const uint8_t *packed, int64_t units, int64_t N, int64_t n16,
                            int64_t chunk, int h, int r, int lane, float scale) {
    constexpr int UNITS = units_of_chunk(TYPE), STEPS = 16 / UNITS;
#pragma unroll
    for (int p = 0; p < 16; p++) {
        const int step = 8 * h + p / 2; // this is the step of the 16 in a chunk
        const int64_t unit = chunk * UNITS + step / STEPS;
        const __half2 *f =
            reinterpret_cast<const __half2 *>(packed + fragment_offset(TYPE, units, N, n16, unit));
        const int reg = p % 2 * 2 + r, at = step % STEPS;
        if (TYPE == TYPE_F32) {
            const float2 hi = __half22float2(f[(at * 2 * WARP + lane) * 4 + reg]);
            const float2 lo = __half22float2(f[((at * 2 + 1) * WARP + lane) * 4 + reg]);
            out[p] = word_of(__floats2half2_rn((hi.x + lo.x) * scale, (hi.y + lo.y) * scale));
        } else {
            const float2 x = __half22float2(f[(at * WARP + lane) * 4 + reg]);
            out[p] = word_of(__floats2half2_rn(x.x * scale, x.y * scale));
        }
    }
}

// A warp turns 16 outputs x 256 k around in shared memory, so that it writes 512 bytes of a row at once.
template <int TYPE> __global__ void __launch_bounds__(WARPS *WARP) unpack_kernel(RowmmPermuteArgs a) {
    __shared__ uint4 turn[WARPS][FRAGMENT][CHUNK / 8];
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    uint4(&mine)[FRAGMENT][CHUNK / 8] = turn[threadIdx.x / WARP];
    const int64_t chunks = chunks_of(a.K), units = chunks * units_of_chunk(TYPE), n16s = fragments_of(a.N);
    const uint8_t *packed = static_cast<const uint8_t *>(a.src);
    __half *out = static_cast<__half *>(a.dst);
    for (int64_t i = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP; i < n16s * chunks;
         i += gridDim.x * WARPS) {
        const int64_t n16 = i / chunks, chunk = i % chunks;
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint32_t x[16];
                if constexpr (is_float_type(TYPE)) {
                    const float *scales =
                        reinterpret_cast<const float *>(packed + output_scale_offset(TYPE, a.K, a.N));
                    const float scale = has_output_scale(TYPE) ? scales[n16 * FRAGMENT + g + 8 * r] : 1.0f;
                    read_floats<TYPE>(x, packed, units, a.N, n16, chunk, h, r, lane, scale);
                } else {
                    const uint8_t *fragment = packed + fragment_offset(TYPE, units, a.N, n16, chunk);
                    Lane<TYPE> scales;
                    scales.load(fragment, lane);
                    scales.half(h);
                    dequantise<TYPE>(x, scales, fragment, h, r, lane);
                }
#pragma unroll
                // each has 8 values, and the columns are turned so that banks differ
                for (int c = 0; c < 4; c++) {
                    const int column = t * 8 + h * 4 + c;
                    mine[g + 8 * r][column ^ (g & 7)] = {x[4 * c], x[4 * c + 1], x[4 * c + 2], x[4 * c + 3]};
                }
            }
        }
        __syncwarp();
        for (int row = 0; row < FRAGMENT && n16 * FRAGMENT + row < a.N; row++) {
            const uint4 x = mine[row][lane ^ (row & 7)];
            const int64_t k = chunk * CHUNK + lane * 8;
            __half *to = out + (n16 * FRAGMENT + row) * a.K + k;
            if (a.K % 8 == 0) {
                if (k < a.K) {
                    *reinterpret_cast<uint4 *>(to) = x;
                }
            } else {
                const __half *values = reinterpret_cast<const __half *>(&x);
                for (int e = 0; e < 8 && k + e < a.K; e++) {
                    to[e] = values[e];
                }
            }
        }
        __syncwarp();
    }
}

// ---- launches ----

int blocks_for(int64_t warps) {
    return int(std::min<int64_t>((warps + WARPS - 1) / WARPS, 4096));
}

template <int TYPE> int permute(const RowmmPermuteArgs &a, cudaStream_t stream) {
    const int64_t fragments = fragments_of(a.N) * chunks_of(a.K);
    if constexpr (is_float_type(TYPE)) {
        if constexpr (has_output_scale(TYPE)) {
            output_scale_kernel<TYPE><<<blocks_for(a.N), WARPS * WARP, 0, stream>>>(a);
        }
        permute_float_kernel<TYPE>
            <<<blocks_for(fragments * units_of_chunk(TYPE)), WARPS * WARP, 0, stream>>>(a);
    } else {
        permute_kernel<TYPE><<<blocks_for(fragments), WARPS * WARP, 0, stream>>>(a);
    }
    return int(cudaGetLastError());
}
template <int TYPE> int unpack(const RowmmPermuteArgs &a, cudaStream_t stream) {
    unpack_kernel<TYPE><<<blocks_for(fragments_of(a.N) * chunks_of(a.K)), WARPS * WARP, 0, stream>>>(a);
    return int(cudaGetLastError());
}

using Launch = int (*)(const RowmmPermuteArgs &, cudaStream_t);
struct Launches {
    Launch permute = nullptr, unpack = nullptr;
};
template <int TYPE> constexpr Launches launches_of() {
    return {permute<TYPE>, unpack<TYPE>};
}
Launches launches(int type) {
    switch (type) {
        case TYPE_F32: return launches_of<TYPE_F32>();
        case TYPE_F16: return launches_of<TYPE_F16>();
        case TYPE_BF16: return launches_of<TYPE_BF16>();
        case TYPE_Q4_0: return launches_of<TYPE_Q4_0>();
        case TYPE_Q4_1: return launches_of<TYPE_Q4_1>();
        case TYPE_Q5_0: return launches_of<TYPE_Q5_0>();
        case TYPE_Q5_1: return launches_of<TYPE_Q5_1>();
        case TYPE_Q8_0: return launches_of<TYPE_Q8_0>();
        case TYPE_Q2_K: return launches_of<TYPE_Q2_K>();
        case TYPE_Q3_K: return launches_of<TYPE_Q3_K>();
        case TYPE_Q4_K: return launches_of<TYPE_Q4_K>();
        case TYPE_Q5_K: return launches_of<TYPE_Q5_K>();
        case TYPE_Q6_K: return launches_of<TYPE_Q6_K>();
        case TYPE_IQ4_NL: return launches_of<TYPE_IQ4_NL>();
        case TYPE_IQ4_XS: return launches_of<TYPE_IQ4_XS>();
        default: return {};
    }
}

bool valid(const RowmmPermuteArgs &a) {
    return a.N >= 0 && rowmm_packed_bytes(a.type, a.K, std::max<int64_t>(a.N, 1)) > 0;
}

} // namespace

bool rowmm_has_type(int32_t type) {
    return chunk_weight_bytes(type) != 0;
}

int64_t rowmm_packed_bytes(int32_t type, int64_t K, int64_t N) {
    if (!rowmm_has_type(type) || K <= 0 || N <= 0 || K % block_values(type) != 0) {
        return 0;
    }
    return output_scale_offset(type, K, N) + (has_output_scale(type) ? fragments_of(N) * FRAGMENT * 4 : 0);
}

int cuda::rowmm_permute(const RowmmPermuteArgs &args, void *stream) {
    if (!valid(args)) {
        return int(cudaErrorInvalidValue);
    }
    return args.N == 0 ? 0 : launches(args.type).permute(args, static_cast<cudaStream_t>(stream));
}

int cuda::rowmm_unpack(const RowmmPermuteArgs &args, void *stream) {
    if (!valid(args)) {
        return int(cudaErrorInvalidValue);
    }
    return args.N == 0 ? 0 : launches(args.type).unpack(args, static_cast<cudaStream_t>(stream));
}

} // namespace luce
