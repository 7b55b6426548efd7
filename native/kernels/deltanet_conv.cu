// Causal conv of 4 taps, SiLU, and the l2 norm of q and k heads.
// A warp computes one row of one head: a lane holds S / 32 neighbouring channels, so a row is one coalesced
// load and the norm is one butterfly sum, in the same order for every row.
//   verify, flush: one block a head, which alone reads and then replaces that head's window and logged rows.
//   append: rows are split over blocks too; a second kernel moves the window once all have read it.
#include "kernels.h"

#include <cuda_runtime.h>

namespace luce {
namespace {

constexpr int TAPS = 4;
constexpr int WINDOW = TAPS - 1;
constexpr int WARP = 32;
constexpr int APPEND_WARPS = 4;
constexpr int APPEND_RUN = 16; // neighbouring rows of one warp, which slides the taps in registers

// What a kernel takes: the arguments and, since DeltaShape's layout is for the host, its strides.
struct Params : ConvArgs {
    int64_t C;       // channels of a row
    int64_t log_row; // from one logged row to the next
    int n_rows;      // 0 in a flush

    explicit Params(const ConvArgs &args) : ConvArgs(args), C(shape.conv_dim()) {
        log_row = shape.log_qkv(1);
        n_rows = shape.mode == DELTA_FLUSH ? 0 : shape.T;
    }
};

// The channels of one lane of a head, moved in one access. Of a head of 16, half the lanes hold nothing.
template <int S> struct alignas(S < WARP ? 4 : S / WARP * 4) Channels {
    static constexpr int N = S < WARP ? 1 : S / WARP;
    float x[N];

    __device__ static bool active(int lane) { return lane * N < S; }
    __device__ void load(const float *head, int lane) {
        *this = active(lane) ? reinterpret_cast<const Channels *>(head)[lane] : Channels{};
    }
    __device__ void store(float *head, int lane) const {
        if (active(lane)) {
            reinterpret_cast<Channels *>(head)[lane] = *this;
        }
    }
};

template <int S> struct Weights {
    float4 tap[Channels<S>::N]; // x is the oldest

    __device__ void load(const float *w, int64_t c0, int lane) {
#pragma unroll
        for (int c = 0; c < Channels<S>::N; c++) {
            const int channel = Channels<S>::active(lane) ? lane * Channels<S>::N + c : 0;
            tap[c] = reinterpret_cast<const float4 *>(w)[c0 + channel];
        }
    }
};

__device__ float silu(float x) {
    return x / (1.0f + expf(-x));
}

// One row from its four taps, oldest first.
template <int S>
__device__ void conv_row(const Weights<S> &w, const Channels<S> (&taps)[TAPS], bool normalise, float *out,
                         int lane) {
    Channels<S> y;
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < Channels<S>::N; c++) {
        float acc = w.tap[c].x * taps[0].x[c];
        acc = fmaf(w.tap[c].y, taps[1].x[c], acc);
        acc = fmaf(w.tap[c].z, taps[2].x[c], acc);
        acc = fmaf(w.tap[c].w, taps[3].x[c], acc);
        y.x[c] = silu(acc);
        sum = fmaf(y.x[c], y.x[c], sum);
    }
    if (normalise) {
#pragma unroll
        for (int mask = WARP / 2; mask > 0; mask /= 2) {
            sum += __shfl_xor_sync(~0u, sum, mask);
        }
        const float scale = 1.0f / sqrtf(sum + 1e-6f);
#pragma unroll
        for (int c = 0; c < Channels<S>::N; c++) {
            y.x[c] *= scale;
        }
    }
    y.store(out, lane);
}

// Row i of the last three committed rows, oldest first: of the window followed by the pending rows.
__device__ const float *committed_row(const Params &a, const int32_t *ctl, int i) {
    const int at = ctl[CTL_N_PENDING] + i;
    return at < WINDOW ? a.window + at * a.C : a.log + ctl[CTL_PENDING + at - WINDOW] * a.log_row;
}

// grid: heads. Rows -1, -2, -3 are the committed ones, newest first, each the parent of the one before it.
template <int S> __global__ void conv_verify_kernel(const __grid_constant__ Params a) {
    __shared__ int32_t ctl[CTL_SIZE];
    __shared__ alignas(16) float committed[WINDOW][S];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = blockDim.x / WARP, T = a.n_rows;
    const int64_t C = a.C, c0 = int64_t(blockIdx.x) * S;
    const bool normalise = blockIdx.x < 2 * a.shape.Hk;

    Channels<S> row;
    if (warp < T) {
        row.load(a.x + warp * C + c0, lane);
    }
    Weights<S> w;
    w.load(a.w, c0, lane);
    for (int i = threadIdx.x; i < CTL_SIZE; i += blockDim.x) {
        ctl[i] = a.ctl[i];
    }
    __syncthreads();
    if (warp < WINDOW) {
        Channels<S> old;
        old.load(committed_row(a, ctl, warp) + c0, lane);
        old.store(committed[warp], lane);
    }
    __syncthreads(); // from here the window and the log may be written
    if (warp < WINDOW && ctl[CTL_N_PENDING] > 0) {
        Channels<S> old;
        old.load(committed[warp], lane);
        old.store(a.window + warp * C + c0, lane);
    }
    for (int t = warp; t < T; t += n_warps) {
        Channels<S> taps[TAPS];
        if (t != warp) {
            row.load(a.x + t * C + c0, lane);
        }
        taps[TAPS - 1] = row;
        int from = t;
#pragma unroll
        for (int i = WINDOW - 1; i >= 0; i--) {
            from = from >= 0 ? ctl[CTL_PARENT + from] : from - 1;
            if (from >= 0) {
                taps[i].load(a.x + from * C + c0, lane);
            } else {
                taps[i].load(committed[WINDOW + from], lane);
            }
        }
        conv_row<S>(w, taps, normalise, a.out + t * C + c0, lane);
        row.store(a.log + t * a.log_row + c0, lane);
    }
}

// grid: heads, runs of APPEND_WARPS * APPEND_RUN rows.
template <int S>
__global__ void __launch_bounds__(APPEND_WARPS *WARP) conv_append_kernel(const __grid_constant__ Params a) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t C = a.C, c0 = int64_t(blockIdx.x) * S;
    const bool normalise = blockIdx.x < 2 * a.shape.Hk;
    const int begin = (blockIdx.y * APPEND_WARPS + warp) * APPEND_RUN;
    const int end = min(begin + APPEND_RUN, a.shape.T);
    if (begin >= end) {
        return;
    }
    Weights<S> w;
    w.load(a.w, c0, lane);
    Channels<S> taps[TAPS], next;
#pragma unroll
    for (int i = 0; i < WINDOW; i++) {
        const int t = begin - WINDOW + i; // begin is 0 or at least WINDOW
        taps[i].load((t >= 0 ? a.x + t * C : committed_row(a, a.ctl, WINDOW + t)) + c0, lane);
    }
    next.load(a.x + begin * C + c0, lane);
#pragma unroll 4
    for (int t = begin; t < end; t++) {
        taps[TAPS - 1] = next;
        if (t + 1 < end) {
            next.load(a.x + (t + 1) * C + c0, lane);
        }
        conv_row<S>(w, taps, normalise, a.out + t * C + c0, lane);
#pragma unroll
        for (int i = 0; i < WINDOW; i++) {
            taps[i] = taps[i + 1];
        }
    }
}

// The window after an append: the last three of the committed rows and the T new ones. One thread a channel.
__global__ void conv_window_kernel(const __grid_constant__ Params a) {
    const int64_t C = a.C, c = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (c >= C) {
        return;
    }
    float row[WINDOW];
#pragma unroll
    for (int i = 0; i < WINDOW; i++) {
        const int at = a.shape.T + i;
        row[i] = at < WINDOW ? committed_row(a, a.ctl, at)[c] : a.x[(at - WINDOW) * C + c];
    }
#pragma unroll
    for (int i = 0; i < WINDOW; i++) {
        a.window[i * C + c] = row[i];
    }
}

template <int S> int launch(const ConvArgs &args, cudaStream_t stream) {
    const Params a(args);
    const int heads = 2 * a.shape.Hk + a.shape.Hv, T = a.n_rows;
    if (a.shape.mode == DELTA_APPEND) {
        const int rows = APPEND_WARPS * APPEND_RUN;
        if (T > 0) {
            conv_append_kernel<S><<<dim3(heads, (T + rows - 1) / rows), APPEND_WARPS * WARP, 0, stream>>>(a);
        }
        conv_window_kernel<<<unsigned((a.C + 255) / 256), 256, 0, stream>>>(a);
    } else {
        const int warps = T < 4 ? 4 : T < 16 ? T : 16; // at least WINDOW
        conv_verify_kernel<S><<<heads, warps * WARP, 0, stream>>>(a);
    }
    return int(cudaGetLastError());
}

} // namespace

int cuda::conv(const ConvArgs &args, void *stream) {
    const DeltaShape &s = args.shape;
    if (s.T < 0 || (s.mode == DELTA_VERIFY && (s.T > s.R || s.T > MAX_ROWS))) {
        return int(cudaErrorInvalidValue);
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    switch (s.S) {
        case 16: return launch<16>(args, st);
        case 32: return launch<32>(args, st);
        case 64: return launch<64>(args, st);
        case 128: return launch<128>(args, st);
        default: return int(cudaErrorInvalidValue);
    }
}

} // namespace luce
