// Works on cells of the paged KV: it moves accepted rows down, writes new ones, and hands a prefill's to
// ggml's attention. A thread moves the same values (one block, or 16 bytes) of a sequence's cells at all positions, so none
// waits for another. A source is never a cell that an earlier move has filled (pending[i] >= i), so a batch may be read
// before any of it is written. Batches run in order, since a later move may fill an earlier one's source.
#include "attention/chunks.h"
#include "attention/kv_types.cuh"
#include "common/kernels.h"
#include "common/overlap.cuh"
#include "common/pointers.h"

#include <algorithm>
#include <cuda_runtime.h>

namespace luce {
namespace {

constexpr int THREADS = 128;
constexpr int BATCH = 8; // so many moves are done at once
constexpr int SPREAD = 16; // as many blocks share a sequence's rows
constexpr int PREFILL_ROWS = 4; // a block has so many rows in a prefill

template <int TYPE> __device__ void write_values(const float *x, uint8_t *to) {
    using Kv = KvType<TYPE>;
    float values[Kv::VALUES];
#pragma unroll
    for (int i = 0; i < Kv::VALUES; i += 4) {
        const float4 part = *reinterpret_cast<const float4 *>(x + i);
        values[i] = part.x, values[i + 1] = part.y, values[i + 2] = part.z, values[i + 3] = part.w;
    }
    if constexpr (TYPE == KV_F32) {
        *reinterpret_cast<float4 *>(to) = {values[0], values[1], values[2], values[3]};
    } else if constexpr (TYPE == KV_F16) {
        __half2 halves[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            halves[i] = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
        }
        *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(halves);
    } else {
        uint16_t words[Kv::BYTES / 2];
        quantize_block<TYPE>(values, words);
#pragma unroll
        for (int i = 0; i < Kv::BYTES / 2; i++) {
            reinterpret_cast<uint16_t *>(to)[i] = words[i];
        }
    }
}

template <int BYTES> struct Words { // a move carries words of this type
    using Word = uint16_t;
};
template <> struct Words<16> {
    using Word = uint4;
};

// A Column is a thread's values of all cells of k or v: block `at` of a cell's heads.
template <int TYPE> struct Column {
    const KvPool &pool;
    const int32_t *pages;
    uint8_t *first; // it is where they are in the pool's first cell
    int64_t row_bytes;

    __device__ Column(const KvPool &of, uint8_t *rows, int at, const int32_t *table)
        : pool(of), pages(table), row_bytes(kv_bytes<TYPE>(of.D)) {
        const int blocks = pool.D / KvType<TYPE>::VALUES, head = at / blocks;
        first = rows + pool.row(0, 0, head) * row_bytes + (at - head * blocks) * KvType<TYPE>::BYTES;
    }
    // Returns where they are at a position of the sequence.
    __device__ uint8_t *at(int32_t position) const {
        return first + pool.row(pages[position / PAGE], position, 0) * row_bytes;
    }
};

// Moves a column's values of the pending rows of a sequence.
template <int TYPE> __device__ void move_rows(const Column<TYPE> &column, const SeqCtl &seq, int32_t n) {
    constexpr int BYTES = KvType<TYPE>::BYTES;
    using Word = typename Words<BYTES>::Word;
    constexpr int N = BYTES / int(sizeof(Word));
    const int32_t first = seq.n_past - n;
    for (int32_t i0 = 0; i0 < n; i0 += BATCH) {
        Word words[BATCH][N];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (i0 + i < n) {
                const uint8_t *from = column.at(first + seq.pending[i0 + i]);
#pragma unroll
                for (int w = 0; w < N; w++) {
                    words[i][w] = reinterpret_cast<const Word *>(from)[w];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (i0 + i < n) {
                uint8_t *to = column.at(first + i0 + i);
#pragma unroll
                for (int w = 0; w < N; w++) {
                    reinterpret_cast<Word *>(to)[w] = words[i][w];
                }
            }
        }
    }
}

// Moves pending rows. The grid is a cell's blocks of k and v of the widest pool, sequences, pools.
template <int TYPE>
__global__ void __launch_bounds__(THREADS) kv_move_kernel(const __grid_constant__ KvMoveArgs a) {
    const KvPool &pool = a.pools[blockIdx.z];
    const int columns = pool.Hkv * pool.D / KvType<TYPE>::VALUES;
    const int column = blockIdx.x * THREADS + threadIdx.x, s = blockIdx.y;
    if (column >= 2 * columns || s >= a.ctl->n_seqs || a.ctl->seqs[s].moves == 0) {
        return;
    }
    const SeqCtl &seq = a.ctl->seqs[s];
    const bool value = column >= columns;
    const int at = value ? column - columns : column;
    move_rows(Column<TYPE>(pool, value ? pool.v : pool.k, at, a.pages + seq.pages), seq, seq.n_replay);
}

template <int TYPE> int move(const KvMoveArgs &a, cudaStream_t stream) {
    int32_t columns = 0;
    for (int i = 0; i < a.n_pools; i++) {
        columns = std::max(columns, a.pools[i].Hkv * a.pools[i].D / KvType<TYPE>::VALUES);
    }
    const dim3 grid(unsigned((2 * columns + THREADS - 1) / THREADS), MAX_ROWS, unsigned(a.n_pools));
    kv_move_kernel<TYPE><<<grid, THREADS, 0, stream>>>(a);
    return int(cudaGetLastError());
}

// Writes rows row0 .. of `n_rows`. The grid is a cell's blocks of k and v, sequences, SPREAD.
template <int TYPE>
__global__ void __launch_bounds__(THREADS) kv_store_kernel(KvStoreArgs a, int32_t columns) {
    using Kv = KvType<TYPE>;
    let_next_start();
    wait_for_previous();
    const int column = blockIdx.x * THREADS + threadIdx.x, s = blockIdx.y;
    if (column >= 2 * columns || s >= a.ctl->n_seqs) {
        return;
    }
    const SeqCtl &seq = a.ctl->seqs[s];
    const bool value = column >= columns;
    const int at = value ? column - columns : column;
    const Column<TYPE> cells(a.pool, value ? a.pool.v : a.pool.k, at, a.pages + seq.pages);
    const float *x = (value ? a.v : a.k) + int64_t(at) * Kv::VALUES;
    const int64_t row_size = int64_t(a.pool.Hkv) * a.pool.D;
    for (int r = int(blockIdx.z); r < seq.n_rows; r += int(gridDim.z)) {
        write_values<TYPE>(x + (seq.row0 + r) * row_size, cells.at(seq.n_past + r));
    }
}

// Writes a prefill's rows, of any of its sequences. The grid is a cell's blocks of k and v, rows.
template <int TYPE>
__global__ void __launch_bounds__(THREADS) kv_append_kernel(KvStoreArgs a, int32_t columns) {
    using Kv = KvType<TYPE>;
    const int column = blockIdx.x * THREADS + threadIdx.x;
    if (column >= 2 * columns) {
        return;
    }
    const bool value = column >= columns;
    const int at = value ? column - columns : column;
    const float *x = (value ? a.v : a.k) + int64_t(at) * Kv::VALUES;
    const int64_t row_size = int64_t(a.pool.Hkv) * a.pool.D;
    const int end = min(a.T, int(blockIdx.y + 1) * PREFILL_ROWS);
    for (int r = int(blockIdx.y) * PREFILL_ROWS; r < end; r++) {
        const SeqCtl &seq = a.ctl->seqs[seq_of_row(*a.ctl, r)];
        const Column<TYPE> cells(a.pool, value ? a.pool.v : a.pool.k, at, a.pages + seq.pages);
        write_values<TYPE>(x + r * row_size, cells.at(seq.n_past + r - seq.row0));
    }
}

template <int TYPE> int store(const KvStoreArgs &a, cudaStream_t stream) {
    const int32_t columns = a.pool.Hkv * a.pool.D / KvType<TYPE>::VALUES;
    const unsigned x = unsigned((2 * columns + THREADS - 1) / THREADS);
    if (a.T == 0) {
        return 0;
    }
    if (a.append != 0) {
        const unsigned rows = unsigned((a.T + PREFILL_ROWS - 1) / PREFILL_ROWS);
        return int(
            launch_kernel(kv_append_kernel<TYPE>, dim3(x, rows), THREADS, 0, stream, false, a, columns));
    }
    const dim3 grid(x, MAX_ROWS, unsigned(std::min(a.T, SPREAD)));
    return int(launch_kernel(kv_store_kernel<TYPE>, grid, THREADS, 0, stream, true, a, columns));
}

// ---- for attention over cells side by side ----

// The grid gives each thread 8 values, over all cells of the result.
template <int TYPE> __global__ void __launch_bounds__(THREADS) kv_gather_kernel(KvGatherArgs a) {
    const int words = a.pool.Hkv * a.pool.D / 8;
    const int64_t u = int64_t(blockIdx.x) * THREADS + threadIdx.x, c = u / words;
    const int i = int(u % words) * 8;
    if (c >= a.n_kv) {
        return;
    }
    const SeqCtl &seq = a.ctl->seqs[seq_of_cell(*a.ctl, int32_t(c))];
    const int32_t position = int32_t(c) - seq.cells;
    if (a.window > 0 && position < lowest_visible(seq.n_past, 0, a.window) / GATHER_CELLS * GATHER_CELLS) {
        return;
    }
    float x[8] = {};
    const int32_t page = position < seq.n_past + seq.n_rows ? a.pages[seq.pages + position / PAGE] : -1;
    if (page >= 0) { // one that no row sees may be gone
        const uint8_t *rows = a.which == 0 ? a.pool.k : a.pool.v;
        const int64_t row = a.pool.row(page, position, i / a.pool.D);
        load_row<TYPE>(rows + row * kv_bytes<TYPE>(a.pool.D), i % a.pool.D, x);
    }
    __half2 h[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        h[j] = __floats2half2_rn(x[2 * j], x[2 * j + 1]);
    }
    *reinterpret_cast<uint4 *>(static_cast<__half *>(a.out) + c * words * 8 + i) =
        *reinterpret_cast<const uint4 *>(h);
}

template <int TYPE> int gather(const KvGatherArgs &a, cudaStream_t stream) {
    const int64_t threads = a.n_kv * (a.pool.Hkv * a.pool.D / 8);
    const unsigned blocks = unsigned((threads + THREADS - 1) / THREADS);
    kv_gather_kernel<TYPE><<<blocks, THREADS, 0, stream>>>(a);
    return int(cudaGetLastError());
}

bool good(const KvPool &pool) {
    return pool.Hkv > 0 && pool.D > 0 && pool.D % 32 == 0 && aligned(pool.k) && aligned(pool.v);
}

} // namespace

int cuda::kv_move(const KvMoveArgs &args, void *stream) {
    if (args.n_pools < 1 || args.n_pools > MAX_POOLS ||
        !std::all_of(args.pools, args.pools + args.n_pools, good)) {
        return int(cudaErrorInvalidValue);
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    return KvTypes::with(args.pools[0].type, int(cudaErrorInvalidValue),
                         [&](auto type) { return move<type()>(args, st); });
}

int cuda::kv_store(const KvStoreArgs &args, void *stream) {
    if (args.T < 0 || !good(args.pool) || !aligned(args.k) || !aligned(args.v)) {
        return int(cudaErrorInvalidValue);
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    return KvTypes::with(args.pool.type, int(cudaErrorInvalidValue),
                         [&](auto type) { return store<type()>(args, st); });
}

int cuda::kv_gather(const KvGatherArgs &args, void *stream) {
    if (!good(args.pool) || !aligned(args.out) || args.out_type != KV_F16) {
        return int(cudaErrorInvalidValue);
    }
    if (args.n_kv <= 0) {
        return 0;
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    return KvTypes::with(args.pool.type, int(cudaErrorInvalidValue),
                         [&](auto type) { return gather<type()>(args, st); });
}

} // namespace luce
