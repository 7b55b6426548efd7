// Computes attention of prompts' rows over the cells before them and their own, on the tensor cores (sm_80 and later).
//
// A row's bits depend on its position and on what its cells hold, and on nothing else: not on how many rows a call has,
// where they begin, or how many blocks share the work. Keys are taken in tiles of KEYS that begin at multiples of it, in
// order, and a key that a row does not see has weight 0, which changes no bit. The sums of each RANGE of positions begin
// anew, and are added to those of the ranges before in order: by the block that has the row, or where few rows have many keys,
// by another kernel from what a block for each range has left.
#include "attention/prefill_rows.cuh"
#include "attention/sizes.h"
#include "attention/sm90/prefill.cuh"

#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace luce {
namespace {

template <int D, int WARPS> struct PrefillLayout {
    static constexpr int SHARES =
        prefill_shares(D); // so many warps share a row's columns, and each has all of its scores
    static constexpr int ROW_WARPS = WARPS / SHARES;
    static constexpr int KEYS = prefill_keys(D), ROWS = 16 * ROW_WARPS, THREADS = WARP * WARPS, ROW = 2 * D;
    static_assert(ROWS == prefill_rows(D));
    static_assert(GATHER_CELLS % KEYS == 0, "no tile has cells that were not gathered and others");
    static constexpr int Q = 0, K = ROWS * ROW, V = K + KEYS * ROW, BYTES = V + KEYS * ROW;
    static_assert(BYTES <= 101376, "a block's shared memory on GPUs of compute capability 8.6");
};

// A block has ROWS rows of one head.
template <int D, int WARPS>
struct PrefillBlock : PrefillRows<D, PrefillLayout<D, WARPS>::ROWS, PrefillLayout<D, WARPS>::KEYS,
                                  PrefillLayout<D, WARPS>::SHARES> {
    using L = PrefillLayout<D, WARPS>;
    using Rows = PrefillRows<D, L::ROWS, L::KEYS, L::SHARES>;
    using Rows::a, Rows::C, Rows::end, Rows::lane, Rows::N, Rows::o, Rows::seq, Rows::share, Rows::warp;
    uint8_t *const shared;
    const uint32_t base = shared_address(shared);
    const int32_t last = Rows::keys().y; // of the keys, not included

    __device__ PrefillBlock(const PrefillAttentionArgs &args, uint8_t *block)
        : Rows(args, blockIdx.y, threadIdx.x / WARP % L::ROW_WARPS, threadIdx.x / WARP / L::ROW_WARPS),
          shared(block) {}

    // Copies a tile of keys or values, and zeros for cells that no row of the block sees.
    __device__ void load(const uint16_t *cells, uint32_t to, int32_t first) const {
        const int kv_head = Rows::kv_head();
        for (int i = threadIdx.x; i < L::KEYS * (D / 8); i += L::THREADS) {
            const int key = i / (D / 8), word = i % (D / 8);
            const uint16_t *from =
                cells + (int64_t(seq.cells + min(first + key, end - 1)) * a.Hkv + kv_head) * D + word * 8;
            copy_async<16>(base + to + swizzle<L::ROW>(key, word), from, first + key < end);
        }
        copies_commit();
    }

    __device__ void score(float (&s)[N][4]) const {
        const uint32_t q = base + L::Q + swizzle<L::ROW>(warp * 16 + lane % 16, lane / 16);
        const uint32_t k = base + L::K + swizzle<L::ROW>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
        for (int n = 0; n < N; n++) {
            s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
        }
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            uint32_t rows[4];
            load_matrices(rows, at_word(q, d * 2));
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                uint32_t keys[4];
                load_matrices(keys, at_word(k, d * 2) + n * 8 * L::ROW);
                multiply(s[n], rows, keys[0], keys[1]);
                multiply(s[n + 1], rows, keys[2], keys[3]);
            }
        }
    }

    __device__ void add_values(const uint32_t (&weights)[N][2]) {
        const uint32_t v = base + L::V + swizzle<L::ROW>(lane % 16, share * C + lane / 16);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            const uint32_t rows[4] = {weights[n][0], weights[n][1], weights[n + 1][0], weights[n + 1][1]};
#pragma unroll
            for (int c = 0; c < C; c += 2) {
                uint32_t values[4];
                load_transposed(values, at_word(v, c) + n * 8 * L::ROW);
                multiply(o[c], rows, values[0], values[1]);
                multiply(o[c + 1], rows, values[2], values[3]);
            }
        }
    }

    // Adds the keys from `first`, a multiple of KEYS, to `stop`.
    __device__ void add_keys(int32_t first, int32_t stop) {
        for (; first < stop; first += L::KEYS) {
            copies_wait<0>();
            __syncthreads(); // the keys are there, and the values before are done with
            load(a.v, L::V, first);
            float s[N][4];
            score(s);
            __syncthreads();
            if (first + L::KEYS < last) {
                load(a.k, L::K, first + L::KEYS);
            } else {
                copies_commit();
            }
            uint32_t weights[N][2];
            Rows::weigh(s, first, weights);
            copies_wait<1>();
            __syncthreads();
            add_values(weights);
        }
    }
    __device__ void run() {
        Rows::each_query(threadIdx.x, L::THREADS, [&](int row, int word, const uint4 &words) {
            *reinterpret_cast<uint4 *>(shared + L::Q + swizzle<L::ROW>(row, word)) = words;
        });
        if (const int2 keys = Rows::keys(); keys.x < keys.y) {
            load(a.k, L::K, keys.x);
        }
        Rows::run([&](int32_t first, int32_t stop) { add_keys(first, stop); });
    }
};

// Says whether no row of the block sees a key of its range.
template <typename Block> __device__ bool idle(const Block &block) {
    return block.n_rows <= 0 || int32_t(blockIdx.z) * PREFILL_RANGE >= block.end;
}

// The grid is groups of rows, heads, and the ranges there are where each has a block of its own. Those that no row of a group
// sees are not there.
template <int D, int WARPS>
__global__ void __launch_bounds__(WARP *WARPS, WARPS == 4 ? 2 : 1)
    prefill_attention_kernel(const __grid_constant__ PrefillAttentionArgs a) {
    extern __shared__ __align__(1024) uint8_t shared[];
    PrefillBlock<D, WARPS> block(a, shared);
    if (!idle(block)) {
        block.run();
    }
}

// The same with blocks of several heads (attention/sm90/prefill.cuh).
template <int D>
__global__ void __launch_bounds__(WgmmaPrefillLayout<D>::THREADS, 1)
    prefill_wgmma_kernel(const __grid_constant__ PrefillAttentionArgs a) {
#if ROWMM_WGMMA
    extern __shared__ __align__(1024) uint8_t shared[];
    WgmmaPrefillBlock<D> block(a, shared);
    if (!idle(block)) {
        block.run();
    }
#endif
}

// The grid is rows, heads, with a thread for each column.
__global__ void add_ranges_kernel(const __grid_constant__ PrefillAttentionArgs a) {
    const int row = blockIdx.x, head = blockIdx.y, c = threadIdx.x;
    const SeqCtl &seq = a.ctl->seqs[seq_of_row(*a.ctl, row)];
    const int n = (prefill_row_end(a, row, seq.n_past + row - seq.row0) - 1) / PREFILL_RANGE + 1;
    const float *range = prefill_range(a, 0, row, head);
    Sum sum = {range[0], range[1]};
    float x = range[2 + c];
    for (int i = 1; i < n; i++) {
        range = prefill_range(a, i, row, head);
        const float2 factors = add_up(sum, {range[0], range[1]});
        x = x * factors.x + range[2 + c] * factors.y;
    }
    a.out[(int64_t(row) * a.H + head) * a.D + c] = x / sum.weights;
}

// Enqueues blocks of so many threads and heads.
template <int D, typename Kernel>
int run(Kernel kernel, const PrefillAttentionArgs &a, const PrefillBlocks &blocks, cudaStream_t stream) {
    if (const cudaError_t error = allow_shared(kernel, int(blocks.bytes)); error != cudaSuccess) {
        return int(error);
    }
    const unsigned ranges = a.apart ? unsigned(prefill_ranges(a)) : 1;
    const dim3 grid(unsigned(groups_of(a.T, a.n_prompts, prefill_rows(D))), unsigned(a.H / blocks.heads),
                    ranges);
    kernel<<<grid, blocks.threads, blocks.bytes, stream>>>(a);
    if (a.apart) {
        add_ranges_kernel<<<dim3(unsigned(a.T), unsigned(a.H)), unsigned(D), 0, stream>>>(a);
    }
    return int(cudaGetLastError());
}

template <int D> int run(const PrefillAttentionArgs &a, const DeviceLimits &device, cudaStream_t stream) {
    using L = PrefillLayout<D, 4>;
    static_assert(L::BYTES == prefill_block_bytes(D));
    const PrefillBlocks blocks = prefill_blocks(a, device);
    if constexpr (D <= PREFILL_WGMMA_D) {
        static_assert(WgmmaPrefillLayout<D>::BYTES == prefill_wgmma_bytes(D));
        if (blocks.heads > 1) {
            return run<D>(prefill_wgmma_kernel<D>, a, blocks, stream);
        }
    }
    return run<D>(prefill_attention_kernel<D, 4>, a, blocks, stream);
}

} // namespace

int cuda::prefill_attention(const PrefillAttentionArgs &args, void *stream) {
    if (args.T < 0 || args.Hkv <= 0 || args.H % args.Hkv != 0 || args.n_prompts < 1) {
        return int(cudaErrorInvalidValue);
    }
    if (args.T == 0) {
        return 0;
    }
    DeviceLimits device;
    if (const int error = device_limits(device); error != 0) {
        return error;
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    return HeadSizes::with(args.D, int(cudaErrorInvalidValue),
                           [&](auto D) { return run<D()>(args, device, st); });
}

} // namespace luce
