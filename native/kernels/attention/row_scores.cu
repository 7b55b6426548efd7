// Says how much of the attention of a verify's rows each position has (RowScoresArgs). A block has a page of one KV head,
// and a thread one of its cells. Scores are computed twice: for each row's largest and sum, page by page, and, once these are
// known, for the shares themselves; kept, the scores of 64 rows and 100,000 cells would take 200 MB a layer. Everything is
// added in an order of its own, without atomics.
#include "attention/kv_types.cuh"
#include "common/kernels.h"
#include "common/pointers.h"

#include <cuda_runtime.h>

namespace luce {
namespace {

constexpr int THREADS = PAGE;
constexpr int WARPS = THREADS / 32;
constexpr int ROWS = 16; // so many rows of a head are in shared memory at once
constexpr int MOST_D = 512;

// A row's largest score, and the sum of e^(score - largest); of all pages together, 1 / the sum / the number of rows.
struct Sum {
    float most, sum;
};

__device__ Sum joined(Sum a, Sum b) {
    const float most = fmaxf(a.most, b.most);
    if (most == -INFINITY) {
        return a;
    }
    return {most, fmaf(a.sum, expf(a.most - most), b.sum * expf(b.most - most))};
}

// Returns where a head's sums of a page are, one a row: behind those of all pages are the whole ones.
__device__ Sum *sums_of(const RowScoresArgs &a, int page, int head) {
    return reinterpret_cast<Sum *>(a.partials) + (int64_t(page) * a.H + head) * a.T;
}

// What rows 0 .. n_rows - 1 of a sequence see of its own step's rows, in bits.
struct Ancestors {
    uint64_t of[MAX_ROWS];

    __device__ void find(const RowScoresArgs &a, const SeqCtl &seq, int thread) {
        if (thread < seq.n_rows) {
            uint64_t bits = 0;
            for (int row = seq.row0 + thread; row >= 0; row = a.ctl->rows[row].parent) {
                bits |= uint64_t(1) << (row - seq.row0);
            }
            of[thread] = bits;
        }
    }
};

// Computes a cell's scores of ROWS rows of head h, from row `first` on. What a row does not see is -inf.
template <int TYPE>
__device__ void score(const RowScoresArgs &a, const SeqCtl &seq, const Ancestors &seen,
                      float (&q)[ROWS][MOST_D], int first, int h, int cell, const uint8_t *k,
                      float (&x)[ROWS]) {
    const int D = a.pool.D, n = min(ROWS, seq.n_rows - first);
    __syncthreads(); // the rows before these were read
    for (int i = threadIdx.x; i < n * D; i += THREADS) {
        q[i / D][i % D] = a.q[(int64_t(seq.row0 + first + i / D) * a.H + h) * D + i % D];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        x[r] = 0;
    }
    if (k != nullptr) {
        for (int d = 0; d < D; d += 8) {
            float values[8];
            load_row<TYPE>(k, d, values);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    x[r] = fmaf(q[r][d + i], values[i], x[r]);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        x[r] *= a.scale;
        if (a.softcap > 0) {
            x[r] = a.softcap * tanhf(x[r] / a.softcap);
        }
        const bool sees = k != nullptr && r < n &&
                          (cell < seq.n_past || (seen.of[first + r] >> (cell - seq.n_past) & 1) != 0);
        x[r] = sees ? x[r] : -INFINITY;
    }
}

// Returns a thread's cell of the block's page, or null where there is none.
template <int TYPE> __device__ const uint8_t *cell_of(const RowScoresArgs &a, const SeqCtl &seq, int cell) {
    if (cell >= seq.n_past + seq.n_rows || cell >= a.n) {
        return nullptr;
    }
    return a.pool.k +
           a.pool.row(a.pages[seq.pages + cell / PAGE], cell, blockIdx.y) * kv_bytes<TYPE>(a.pool.D);
}

// The grid is pages, KV heads.
template <int TYPE> __global__ void __launch_bounds__(THREADS) sums_kernel(RowScoresArgs a) {
    __shared__ float q[ROWS][MOST_D];
    __shared__ Ancestors seen;
    __shared__ Sum warps[ROWS][WARPS];
    const SeqCtl &seq = a.ctl->seqs[0];
    const int page = blockIdx.x, cell = page * PAGE + threadIdx.x, lane = threadIdx.x % 32,
              warp = threadIdx.x / 32;
    if (a.ctl->n_seqs == 0 || page * PAGE >= seq.n_past + seq.n_rows) {
        return;
    }
    seen.find(a, seq, threadIdx.x);
    const uint8_t *k = cell_of<TYPE>(a, seq, cell);
    const int G = a.H / a.pool.Hkv;
    for (int h = blockIdx.y * G; h < int(blockIdx.y + 1) * G; h++) {
        for (int first = 0; first < seq.n_rows; first += ROWS) {
            float x[ROWS];
            score<TYPE>(a, seq, seen, q, first, h, cell, k, x);
            for (int r = 0; r < ROWS; r++) {
                Sum sum = {x[r], x[r] == -INFINITY ? 0.0f : 1.0f};
                for (int apart = 16; apart > 0; apart /= 2) {
                    sum = joined(sum, {__shfl_xor_sync(0xffffffff, sum.most, apart),
                                       __shfl_xor_sync(0xffffffff, sum.sum, apart)});
                }
                if (lane == 0) {
                    warps[r][warp] = sum;
                }
            }
            __syncthreads();
            if (threadIdx.x < ROWS && first + int(threadIdx.x) < seq.n_rows) {
                Sum sum = warps[threadIdx.x][0];
                for (int w = 1; w < WARPS; w++) {
                    sum = joined(sum, warps[threadIdx.x][w]);
                }
                sums_of(a, page, h)[first + threadIdx.x] = {sum.most, sum.sum};
            }
            __syncthreads();
        }
    }
}

// Adds the pages' sums up. A warp has a row of a head; the grid is rows, heads.
__global__ void __launch_bounds__(32) join_kernel(RowScoresArgs a) {
    const SeqCtl &seq = a.ctl->seqs[0];
    const int row = blockIdx.x, h = blockIdx.y, lane = threadIdx.x;
    if (a.ctl->n_seqs == 0 || row >= seq.n_rows) {
        return;
    }
    const int n_pages = int(min(int64_t(seq.n_past + seq.n_rows + PAGE - 1), a.n) / PAGE);
    Sum sum = {-INFINITY, 0.0f};
    for (int page = lane; page < n_pages; page += 32) {
        const Sum part = sums_of(a, page, h)[row];
        sum = joined(sum, part);
    }
    for (int apart = 16; apart > 0; apart /= 2) {
        sum = joined(
            sum, {__shfl_xor_sync(0xffffffff, sum.most, apart), __shfl_xor_sync(0xffffffff, sum.sum, apart)});
    }
    if (lane == 0) {
        sums_of(a, int(a.n / PAGE), h)[row] = {sum.most, 1.0f / (sum.sum * float(seq.n_rows))};
    }
}

// The grid is pages, KV heads.
template <int TYPE> __global__ void __launch_bounds__(THREADS) shares_kernel(RowScoresArgs a) {
    __shared__ float q[ROWS][MOST_D];
    __shared__ Ancestors seen;
    const SeqCtl &seq = a.ctl->seqs[0];
    const int page = blockIdx.x, cell = page * PAGE + threadIdx.x;
    if (a.ctl->n_seqs == 0 || page * PAGE >= seq.n_past + seq.n_rows) {
        return;
    }
    seen.find(a, seq, threadIdx.x);
    const uint8_t *k = cell_of<TYPE>(a, seq, cell);
    const int G = a.H / a.pool.Hkv;
    for (int h = blockIdx.y * G; h < int(blockIdx.y + 1) * G; h++) {
        const Sum *whole = sums_of(a, int(a.n / PAGE), h);
        float share = 0;
        for (int first = 0; first < seq.n_rows; first += ROWS) {
            float x[ROWS];
            score<TYPE>(a, seq, seen, q, first, h, cell, k, x);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (x[r] != -INFINITY) {
                    share = fmaf(expf(x[r] - whole[first + r].most), whole[first + r].sum, share);
                }
            }
        }
        if (k != nullptr) {
            a.scores[h * a.n + cell] = share;
        }
    }
}

template <int TYPE> int run(const RowScoresArgs &a, cudaStream_t stream) {
    const dim3 pages(unsigned(a.n / PAGE), unsigned(a.pool.Hkv)), rows(unsigned(a.T), unsigned(a.H));
    sums_kernel<TYPE><<<pages, THREADS, 0, stream>>>(a);
    join_kernel<<<rows, 32, 0, stream>>>(a);
    shares_kernel<TYPE><<<pages, THREADS, 0, stream>>>(a);
    return int(cudaGetLastError());
}

} // namespace

int cuda::row_scores(const RowScoresArgs &a, void *stream) {
    if (a.T < 1 || a.T > MAX_ROWS || a.pool.D < 8 || a.pool.D > MOST_D || a.pool.D % 32 != 0 ||
        a.pool.Hkv < 1 || a.H % a.pool.Hkv != 0 || a.n < PAGE || a.n % PAGE != 0 || !aligned(a.pool.k) ||
        !aligned(a.partials)) {
        return int(cudaErrorInvalidValue);
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    return KvTypes::with(a.pool.type, int(cudaErrorInvalidValue),
                         [&](auto type) { return run<type()>(a, st); });
}

} // namespace luce
