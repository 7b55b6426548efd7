// Computes the gated delta rule over long chains of rows, in chunks of a sequence (deltanet/chunks.cuh). What does not
// depend on the state is done for all chunks at once, and the state passes through a chunk in four products
// on the tensor core.
//
// T is made in F32 by forward substitution. The products are mma_bf16.cuh's, with F32 sums. Beside the row by
// row kernel o and the state are off by some 1e-5 of their size. A row's bits depend on its place among the
// call's rows of its sequence, so that a prompt's prefill is a function of its chunks. What is not finite shows in its whole
// chunk and in all that follow.
#include "common/overlap.cuh"
#include "deltanet/chunks.cuh"
#include "deltanet/launch_plan.h"

namespace luce {
namespace {

// ---- the first kernel: a block has a chunk of one k head ----

constexpr int A_ROW = ROWS + 4;

template <int S> struct PrepareShared {
    static constexpr int ROW = S + 4, ROW_VALUES = 2 * ROWS * ROW;
    // So many v heads are done at once, each by a warp.
    static constexpr int HEADS = ROW_VALUES / (ROWS * A_ROW);
    static_assert(HEADS * WARP <= PREPARE_THREADS, "a v head has a warp");
    alignas(16) float values[ROW_VALUES]; // it holds keys, then queries, and later A of each warp
    float kk[ROWS][ROWS + 1], qk[ROWS][ROWS + 1];
};

// Loads keys and queries into shared memory, and splits them into scratch.
template <int S>
__device__ void split_rows(const ChunkParams &a, float *values, int chunk, const ChunkRows &rows, int kh) {
    using C = Chunk<S>;
    uint8_t *out = a.keys + (int64_t(chunk) * a.shape.Hk + kh) * C::KEYS;
    for (int i = threadIdx.x; i < 2 * ROWS * S / 4; i += PREPARE_THREADS) {
        const int query = i / (ROWS * S / 4), row = i / (S / 4) % ROWS, c = i % (S / 4);
        const int64_t t = rows.first + row;
        float4 x = {0, 0, 0, 0};
        if (row < rows.n) {
            x = reinterpret_cast<const float4 *>(a.x + t * a.C + ((query ? 0 : a.shape.Hk) + kh) * S)[c];
        }
        reinterpret_cast<float4 *>(values + (query * ROWS + row) * PrepareShared<S>::ROW)[c] = x;
        const Split first = split(x.x, x.y), second = split(x.z, x.w);
        uint8_t *at = out + query * C::QUERY_HIGH + C::at(row, c / 2) + c % 2 * 8;
        *reinterpret_cast<uint2 *>(at) = {first.high, second.high};
        *reinterpret_cast<uint2 *>(at + C::KEY_LOW) = {first.low, second.low};
    }
}

// Computes k_i . k_j and q_i . k_j, where a thread has rows i and i + 16 of columns j and j + 16.
template <int S> __device__ void multiply_rows(PrepareShared<S> &sh) {
    constexpr int ROW = PrepareShared<S>::ROW, HALF = ROWS / 2;
    static_assert(HALF * HALF == PREPARE_THREADS, "a thread for each four products");
    const int i = threadIdx.x / HALF, j = threadIdx.x % HALF;
    const auto row = [&](int r, int c) { return reinterpret_cast<const float4 *>(sh.values + r * ROW)[c]; };
    float kk[2][2] = {}, qk[2][2] = {};
    const auto add = [](float &sum, const float4 &x, const float4 &y) {
        sum = fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
    };
    for (int c = 0; c < S / 4; c++) {
        const float4 right[2] = {row(j, c), row(j + HALF, c)};
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const float4 k = row(i + m * HALF, c), q = row(ROWS + i + m * HALF, c);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                add(kk[m][n], k, right[n]);
                add(qk[m][n], q, right[n]);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            sh.kk[i + m * HALF][j + n * HALF] = kk[m][n];
            sh.qk[i + m * HALF][j + n * HALF] = qk[m][n];
        }
    }
}

__device__ void store_split(uint8_t *high, int square, int row, int lane, float x) {
    const Split s = split(x, 0.0f);
    uint8_t *at = high + square_at(row, lane / 8) + lane % 8 * 2;
    *reinterpret_cast<uint16_t *>(at) = uint16_t(s.high);
    *reinterpret_cast<uint16_t *>(at + square) = uint16_t(s.low);
}

// Prepares one v head with a warp: lane j has column j of A, T and P, and row j's gate.
template <int S>
__device__ void prepare_head(const ChunkParams &a, PrepareShared<S> &sh, float *A, int chunk,
                             const ChunkRows &rows, int h) {
    using C = Chunk<S>;
    const int lane = threadIdx.x % WARP;
    const int64_t t = rows.first + lane;
    uint8_t *out = a.heads + (int64_t(chunk) * a.shape.Hv + h) * C::HEAD;
    float gate = 0, beta = 0;
    if (lane < rows.n) {
        gate = a.a[h] * softplus(a.alpha[t * a.shape.Hv + h] + a.dt[h]);
        beta = 1.0f / (1.0f + expf(-a.beta[t * a.shape.Hv + h]));
    }
    // Sums of gates start at each column anew, so that what came before does not cost their digits.
    float before = 0, since = 0, decay = 1;
#pragma unroll 4
    for (int i = 0; i < ROWS; i++) {
        const float g = __shfl_sync(~0u, gate, i), b = __shfl_sync(~0u, beta, i);
        before += i <= lane ? g : 0.0f;
        since += i > lane ? g : 0.0f;
        decay = expf(since);
        A[i * A_ROW + lane] = i > lane ? b * decay * sh.kk[i][lane] : 0.0f;
        store_split(out + C::P_HIGH, C::SQUARE, i, lane, i >= lane ? decay * sh.qk[i][lane] : 0.0f);
    }
    reinterpret_cast<float *>(out + C::GROWN)[lane] = expf(before);
    reinterpret_cast<float *>(out + C::LEFT)[lane] = decay;
    __syncwarp();
    float column[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float sum[2] = {i == lane ? 1.0f : 0.0f, 0.0f};
#pragma unroll
        for (int l = 0; l < i; l++) {
            sum[l % 2] = fmaf(-A[i * A_ROW + l], column[l], sum[l % 2]);
        }
        column[i] = sum[0] + sum[1];
        store_split(out + C::T_HIGH, C::SQUARE, i, lane, column[i] * beta);
    }
}

template <int S>
__global__ void __launch_bounds__(PREPARE_THREADS) prepare_kernel(const __grid_constant__ ChunkParams a) {
    __shared__ PrepareShared<S> sh;
    wait_for_previous();
    let_next_start();
    const int chunk = blockIdx.x, kh = blockIdx.y, warp = threadIdx.x / WARP;
    const ChunkRows rows(*a.ctl, chunk);
    if (rows.n <= 0) {
        return;
    }
    split_rows<S>(a, sh.values, chunk, rows, kh);
    __syncthreads();
    multiply_rows<S>(sh);
    __syncthreads();
    constexpr int HEADS = PrepareShared<S>::HEADS;
    for (int h = kh + warp * a.shape.Hk; warp < HEADS && h < a.shape.Hv; h += HEADS * a.shape.Hk) {
        prepare_head<S>(a, sh, sh.values + warp * ROWS * A_ROW, chunk, rows, h);
        __syncwarp();
    }
}

// ---- the second kernel: a block has 64 columns (v dimensions) of one v head's state of a sequence, a warp 16 ----

// A walker holds the state transposed, as accumulators of tiles of 16 v x 8 k. Lane 4 g + t has v = g and g +
// 8, k = 2 t and 2 t + 1. So it is with what follows from it, with rows of the chunk in place of k. Each
// product's result is the next one's left side as it is.
template <int S> struct Walker {
    using C = Chunk<S>;
    const ChunkParams &a;
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, warp = threadIdx.x / WARP;
    const int h, kh, v0; // v0 is the block's first v dimension
    const SeqCtl &seq;
    // Its rows begin at row0, and its chunks have the numbers from `first` on. The compiler loads what it can load again rather
    // than keep it, here once for each value that is stored, which waits for the store: what comes of a shuffle it keeps.
    const int slot, row0, n_rows, first;
    float s[S / 8][4];

    __device__ Walker(const ChunkParams &args)
        : a(args), h(blockIdx.x / (S / SPAN)), kh(h % args.shape.Hk), v0(blockIdx.x % (S / SPAN) * SPAN),
          seq(args.ctl->seqs[blockIdx.y]), slot(__shfl_sync(~0u, seq.slot, 0)),
          row0(__shfl_sync(~0u, seq.row0, 0)), n_rows(__shfl_sync(~0u, seq.n_rows, 0)),
          first(first_group(seq, blockIdx.y, ROWS)) {}

    static __device__ int part(int e) { return e / 2 * 8; } // it returns the v of element e of a tile
    __device__ int v_of(int e) const { return v0 + warp * 16 + g + part(e); }
    __device__ int k_of(int tile, int e) const { return tile * 8 + 2 * t + e % 2; }

    __device__ float *state_at(int tile, int e) const {
        return a.state + slot * a.state_size + (int64_t(h) * S + k_of(tile, e)) * S + v_of(e);
    }
    __device__ void load() {
#pragma unroll
        for (int n = 0; n < S / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[n][e] = seq.fresh ? 0.0f : *state_at(n, e);
            }
        }
        const float *log = a.log + slot * a.log_size;
        for (int p = 0; p < seq.n_replay; p++) { // the bits are those of the row by row kernel
            const int64_t row = seq.pending[p];
            const float *key = log + a.key[seq.bank] + row * a.key_row + kh * S;
            const float *delta = log + a.delta + row * a.row_values + h * S;
            const float decay = log[a.decay[seq.bank] + row * a.decay_row + h];
#pragma unroll
            for (int n = 0; n < S / 8; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    s[n][e] = fmaf(key[k_of(n, e)], delta[v_of(e)], decay * s[n][e]);
                }
            }
        }
    }
    __device__ void store() const {
#pragma unroll
        for (int n = 0; n < S / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                *state_at(n, e) = s[n][e];
            }
        }
    }

    // Asks for a chunk of the sequence.
    __device__ void fetch(uint8_t *stage, int chunk) const {
        const uint8_t *keys = a.keys + (int64_t(first + chunk) * a.shape.Hk + kh) * C::KEYS;
        const uint8_t *head = a.heads + (int64_t(first + chunk) * a.shape.Hv + h) * C::HEAD;
        for (int i = threadIdx.x * 16; i < C::KEYS; i += SPAN_WARPS * WARP * 16) {
            copy_16(stage + i, keys + i, true);
        }
        for (int i = threadIdx.x * 16; i < C::HEAD; i += SPAN_WARPS * WARP * 16) {
            copy_16(stage + C::HEAD_AT + i, head + i, true);
        }
        for (int i = threadIdx.x; i < ROWS * SPAN / 4; i += SPAN_WARPS * WARP) {
            const int row = i / (SPAN / 4), c = i % (SPAN / 4) * 4;
            const int at = chunk * ROWS + row;
            const bool there = at < n_rows;
            const float *v = a.x + (there ? int64_t(row0 + at) : 0) * a.C + (2 * a.shape.Hk + h) * S + v0 + c;
            copy_16(stage + C::V_AT + (row * C::V_ROW + c) * 4, v, there);
        }
    }

    // Returns where this lane's row of a group of matrices is: rows 16 p .. + 15, groups 2 c and 2 c + 1 of a
    // row.
    __device__ int rows_at(int p, int c) const {
        return C::at(p * 16 + lane / 16 * 8 + lane % 8, 2 * c + lane / 8 % 2);
    }
    __device__ int square_rows_at(int p, int c) const {
        return square_at(p * 16 + lane / 16 * 8 + lane % 8, 2 * c + lane / 8 % 2);
    }
    // Returns the same for matrices that are to be transposed: rows 16 c .. + 15, groups 2 p and 2 p + 1.
    __device__ int columns_at(int c, int p) const {
        return C::at(c * 16 + lane / 8 % 2 * 8 + lane % 8, 2 * p + lane / 16);
    }

    // Computes c[0 .. 3] += S^T K^T and c[4 .. 7] += S^T Q^T.
    __device__ void meet_state(const uint8_t *stage, float (*c)[4]) const {
#pragma unroll
        for (int k = 0; k < S / 16; k++) {
            Right right[4];
#pragma unroll
            for (int p = 0; p < 4; p++) {
                const uint8_t *at = stage + (p < 2 ? C::KEY_HIGH : C::QUERY_HIGH) + rows_at(p % 2, k);
                load_matrices(right[p].high, at);
                load_matrices(right[p].low, at + C::KEY_LOW);
            }
            multiply(c, Left(s[2 * k], s[2 * k + 1]), right);
        }
    }
    // Computes c += x M^T, where M is T or P, which have nothing above their diagonals.
    __device__ void meet_square(const uint8_t *high_at, const float (*x)[4], float (*c)[4]) const {
        Right first[2], second[1]; // `first` is for the left 16 columns, `second` for the others
        for (int p = 0; p < 2; p++) {
            load_matrices(first[p].high, high_at + square_rows_at(p, 0));
            load_matrices(first[p].low, high_at + C::SQUARE + square_rows_at(p, 0));
        }
        load_matrices(second[0].high, high_at + square_rows_at(1, 1));
        load_matrices(second[0].low, high_at + C::SQUARE + square_rows_at(1, 1));
        multiply(c, Left(x[0], x[1]), first);
        multiply(c + 2, Left(x[2], x[3]), second);
    }
    // Computes S^T += x K.
    __device__ void advance(const uint8_t *stage, const float (*x)[4]) {
#pragma unroll
        for (int r = 0; r < ROWS / 16; r++) {
            const Left left(x[2 * r], x[2 * r + 1]);
#pragma unroll
            for (int n = 0; n < S / 64; n++) {
                Right right[4];
#pragma unroll
                for (int p = 0; p < 4; p++) {
                    const uint8_t *at = stage + C::KEY_HIGH + columns_at(r, 4 * n + p);
                    load_transposed(right[p].high, at);
                    load_transposed(right[p].low, at + C::KEY_LOW);
                }
                multiply(s + 8 * n, left, right);
            }
        }
    }

    __device__ void emit(int chunk, const float (*out)[4]) const {
        const float scale = 1.0f / sqrtf(float(S));
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int at = chunk * ROWS + k_of(n, e);
                if (at < n_rows) {
                    a.out[(int64_t(row0 + at) * a.shape.Hv + h) * S + v_of(e)] = out[n][e] * scale;
                }
            }
        }
    }

    __device__ void run(const uint8_t *stage, int chunk) {
        const uint8_t *head = stage + C::HEAD_AT;
        const float *grown = reinterpret_cast<const float *>(head + C::GROWN);
        const float *left = reinterpret_cast<const float *>(head + C::LEFT);
        const float *v = reinterpret_cast<const float *>(stage + C::V_AT) + warp * 16 + g;
        float met[2 * ROWS / 8][4] = {}, delta[ROWS / 8][4] = {};
        float (*x)[4] = met, (*out)[4] = met + ROWS / 8;
        meet_state(stage, met);
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = k_of(n, e);
                x[n][e] = fmaf(-grown[row], x[n][e], v[row * C::V_ROW + part(e)]);
                out[n][e] *= grown[row];
            }
        }
        meet_square(head + C::T_HIGH, x, delta);
        meet_square(head + C::P_HIGH, delta, out);
        emit(chunk, out);
        const float all = grown[ROWS - 1];
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                delta[n][e] *= left[k_of(n, e)];
            }
        }
#pragma unroll
        for (int n = 0; n < S / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[n][e] *= all;
            }
        }
        advance(stage, delta);
    }
};

// The grid is spans of v dimensions of a head, then v heads; sequences.
template <int S>
__global__ void __launch_bounds__(SPAN_WARPS *WARP) walk_kernel(const __grid_constant__ ChunkParams a) {
    extern __shared__ uint8_t stages[];
    let_next_start();
    Walker<S> walker(a);
    const int n_chunks = (walker.n_rows + ROWS - 1) / ROWS;
    walker.load(); // the state is as the step before has left it
    wait_for_previous();
    walker.fetch(stages, 0);
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        copies_wait();
        __syncthreads(); // the chunk is here; all have left the one before
        if (chunk + 1 < n_chunks) {
            walker.fetch(stages + (chunk + 1) % 2 * Chunk<S>::STAGE, chunk + 1);
        }
        walker.run(stages + chunk % 2 * Chunk<S>::STAGE, chunk);
    }
    walker.store();
}

// ---- launches ----

template <int S> int64_t scratch_bytes(const DeltaShape &s) {
    return int64_t(delta_chunks(s)) * (s.Hk * Chunk<S>::KEYS + s.Hv * Chunk<S>::HEAD);
}

template <int S> int launch(const DeltaArgs &args, void *scratch, cudaStream_t stream) {
    ChunkParams a{Params(args), static_cast<uint8_t *>(scratch), nullptr};
    a.heads = a.keys + int64_t(delta_chunks(args.shape)) * a.shape.Hk * Chunk<S>::KEYS;
    static_assert(2 * Chunk<S>::STAGE <= 101376, "a block's shared memory on GPUs of compute capability 8.6");
    cudaError_t error = launch_kernel(prepare_kernel<S>, plan_prepare(args.shape), stream, true, a);
    if (error == cudaSuccess) {
        error = launch_kernel(walk_kernel<S>, plan_walk(args.shape), stream, true, a);
    }
    return int(error);
}

} // namespace

int64_t deltanet_chunks_scratch(const DeltaShape &s) {
    return ChunkedStateSizes::with(s.S, int64_t(0), [&](auto S) { return scratch_bytes<S()>(s); });
}

int cuda::deltanet_chunks(const DeltaArgs &args, void *scratch, void *stream) {
    const DeltaShape &s = args.shape;
    if (s.T < 1 || s.n_slots < 1 || s.Hk < 1 || s.Hv % s.Hk != 0 || s.mode != DELTA_APPEND ||
        s.n_prompts < 1 || deltanet_chunks_scratch(s) == 0 ||
        reinterpret_cast<uintptr_t>(scratch) % 16 != 0) {
        return int(cudaErrorInvalidValue);
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    return ChunkedStateSizes::with(s.S, int(cudaErrorInvalidValue),
                                   [&](auto S) { return launch<S()>(args, scratch, st); });
}

} // namespace luce
