// Does the conv and the gated delta rule of a DeltaNet layer in one launch, for steps of one row: 2% of one of the 27b on an H200
// (f206363). The conv reads the parts that the product ahead has left. Each value is computed as the two kernels compute it that
// wider steps have (deltanet/conv.cu, deltanet.cu), with the same code, so its bits are the same.
//
// A block has W columns of one v head, as in deltanet.cu. It makes the q and k that it needs itself, from parts that lie in
// L2: a warp has q, another k, the third its columns of v, and the fourth the gates, and its columns of z. So a k head's raw
// row is known in all blocks that share it. Each of them counts itself once it has read what the caches hold of it, and the
// last one replaces that. All layers count in the same place: each counts behind its
// wait, and the last count of a layer leaves 0.
#include "deltanet/launch_plan.h"
#include "deltanet/row.cuh"
#include "deltanet/run.cuh"
#include "deltanet/worker.cuh"
#include "matmul/partials.cuh"

namespace luce {
namespace {

constexpr int S = 128;
using L = Layout<S>;

struct LayerParams : Params {
    const float *w; // of the conv
    float *window;
    float *z; // [T][Hv*S], the product's results
    uint32_t *turns; // [2 * Hk] of q and k heads
    uint32_t last_turn; // so many others read what the caches hold of such a head
    RowmmParts parts;

    LayerParams(const DeltaLayerArgs &args, const RowmmParts &of)
        : Params(args.delta), w(args.conv.w), window(args.conv.window), z(args.conv.others[0]),
          turns(static_cast<uint32_t *>(args.turns)),
          last_turn(uint32_t(shape.Hv / shape.Hk * L::BLOCKS - 1)), parts(of) {
        n_saves = 0; // one row is no tree
    }
};

using LayerWorker = Worker<S, false, true>;

// Has what one warp does of the conv. A lane has 4 channels. Of v, whose channels are few, four lanes do the same.
struct ConvWarp {
    static constexpr int AHEAD = 8; // so many parts are fetched at once
    static constexpr int V_LANES = L::W / 4;
    using Four = Channels<S>;
    const LayerParams &a;
    const LayerWorker &worker;
    const int warp; // 0 has q, 1 k, and 2 v
    const bool of_v;
    const int lane;
    const bool stores; // of the lanes that do the same one stores
    const int channel; // it counts in a row of the step
    Weights<S> weights;
    LaneParts<1> parts;
    Four committed[WINDOW], row = {}; // before the conv; the oldest comes first
    uint32_t turn = 0;

    // This reads nothing that the control block says.
    __device__ ConvWarp(const LayerParams &params, const LayerWorker &w, int index)
        : a(params), worker(w), warp(index), of_v(warp == 2), lane(of_v ? w.lane % V_LANES : w.lane),
          stores(lane == w.lane),
          channel(((of_v ? 2 * a.shape.Hk + w.h : warp * a.shape.Hk + w.kh) * S + (of_v ? w.j0 : 0)) +
                  lane * 4),
          parts(a.parts, 0, 0, channel) {
        weights.load(a.w, channel - lane * 4, lane);
    }

    // Reads the committed rows: those of the window, followed by the pending rows.
    __device__ void read_committed() {
        const SeqCtl &seq = worker.sh.ctl.seq;
        const float *window = a.window + seq.slot * WINDOW * a.C + channel;
#pragma unroll
        for (int i = 0; i < WINDOW; i++) {
            const int n = worker.n_pending + i - WINDOW;
            const float *from =
                n >= 0 ? worker.log + seq.pending[max(n, 0)] * a.C + channel : window + (n + WINDOW) * a.C;
            committed[i] = {};
            if (n >= 0 || !seq.fresh) {
                committed[i].load(from, 0);
            }
        }
    }

    // Counts this warp among those that have read what the caches hold of the same head of q or k.
    __device__ void count() {
        if (!of_v && lane == 0) {
            turn = atomicInc(a.turns + unsigned(channel) / S, a.last_turn);
        }
    }
    __device__ bool is_last() const { return of_v || __shfl_sync(~0u, turn, 0) == a.last_turn; }
    // Replaces what the caches hold of these channels: the window, and the row of the log.
    __device__ void write_back() const {
        if (stores && (worker.sh.ctl.seq.fresh || worker.n_pending > 0)) {
            float *window = a.window + worker.sh.ctl.seq.slot * WINDOW * a.C + channel;
#pragma unroll
            for (int i = 0; i < WINDOW; i++) {
                committed[i].store(window + i * a.C, 0);
            }
        }
        if (stores && worker.n_rows > 0) {
            row.store(worker.log + channel, 0);
        }
    }

    // Adds up the row's parts. What `meanwhile` does hides behind their way.
    template <typename F> __device__ void add_up(const F &meanwhile) {
        float4 x[AHEAD][1];
        if (worker.n_rows > 0) {
            parts.fetch(x, 0);
        }
        meanwhile();
        if (worker.n_rows > 0) {
            float v[4] = {};
            parts.add(x, v);
            row = {v[0], v[1], v[2], v[3]};
        }
    }
    // What comes of a row that the step does not have is not read.
    __device__ void convolve() const {
        const Four taps[1][TAPS] = {{committed[0], committed[1], committed[2], row}};
        auto &tile = worker.sh.tile[0];
        conv_rows<S, 1>(weights, taps, !of_v, {of_v ? tile.v[0] : warp == 0 ? tile.q[0] : tile.k[0]}, lane);
    }
};

// Has what the fourth warp does: the gates of the block's head, of which lane 0 has beta and lane ALPHA alpha, and the block's
// columns of z, of which a lane has 4.
struct GateWarp {
    static constexpr int ALPHA = WARP / 2, Z_LANES = L::W / 4, AHEAD = 4;
    const LayerParams &a;
    LayerWorker &worker;
    LaneParts<1> gates, of_z;
    float dt, rate;

    __device__ GateWarp(const LayerParams &params, LayerWorker &wk) : a(params), worker(wk) {}
    // This reads nothing that the control block says.
    __device__ void begin() {
        gates = LaneParts<1>(a.parts, worker.lane < ALPHA ? 2 : 3, 0, worker.h / 4 * 4);
        of_z = LaneParts<1>(a.parts, 1, 0, z_at());
        dt = a.dt[worker.h];
        rate = a.a[worker.h];
    }
    __device__ int z_at() const { return worker.h * S + worker.j0 + worker.lane % Z_LANES * 4; }
    template <typename F> __device__ void run(const F &meanwhile) {
        float4 x[AHEAD][1], y[AHEAD][1];
        gates.fetch(x, 0);
        of_z.fetch(y, 0);
        meanwhile();
        float sum[4] = {}, z[4] = {};
        gates.add(x, sum);
        const int i = worker.h % 4;
        const float gate = pick(i & 2, pick(i & 1, sum[3], sum[2]), pick(i & 1, sum[1], sum[0]));
        const float alpha = __shfl_xor_sync(~0u, gate, ALPHA);
        if (worker.lane < worker.n_rows) {
            worker.set_gates(0, alpha, gate, dt, rate);
        }
        of_z.add(y, z);
        if (worker.lane < Z_LANES) {
            *reinterpret_cast<float4 *>(a.z + z_at()) = {z[0], z[1], z[2], z[3]};
        }
    }
};

// What a block does before the launch ahead has ended. All that the caches hold is asked for before any of it is waited for.
__device__ void prepare(LayerWorker &worker, ConvWarp &conv, int warp) {
    worker.begin();
    LayerWorker::Pending pending[2]; // so many are on their way at once; with 4, registers would spill
    worker.read_pending(pending, 0);
    if (warp < 3) {
        conv.read_committed();
    }
    worker.replay_pending(pending);
    if (warp < 2) {
        __threadfence(); // the warp has read before it counts itself
        __syncwarp();
    }
}

// The grid is blocks of all v heads.
__global__ void __launch_bounds__(L::THREADS, 3)
    deltanet_layer_kernel(const __grid_constant__ LayerParams a) {
    __shared__ Shared<S, false, true> sh;
    let_next_start();
    LayerWorker worker(a, sh, nullptr, Item{0, int(blockIdx.x)});
    const auto control = worker.load_control(0); // on its way while what follows is found
    const int warp = uniform(worker.tid / WARP);
    ConvWarp conv(a, worker, min(warp, 2));
    GateWarp gates(a, worker);
    if (warp == 3) {
        gates.begin();
    }
    if (!worker.take_control(control, 0)) {
        wait_for_previous();
        return;
    }
    prepare(worker, conv, warp);
    wait_for_previous();
    if (warp < 3) {
        conv.add_up([&] {
            conv.count();
            worker.store_committed();
        });
        conv.convolve();
    } else {
        gates.run([&] { worker.store_committed(); });
    }
    __syncthreads();
    worker.run_chains();
    if (warp < 3 && conv.is_last()) {
        conv.write_back(); // a device stores nothing ahead of a branch that it hangs on, so this needs no fence
    }
}

} // namespace

bool cuda::deltanet_with_conv(const DeltaShape &s) {
    return s.mode == DELTA_VERIFY && s.S == S && s.T == 1 && s.Hv % 4 == 0 && s.Hv % s.Hk == 0 &&
           2 * s.Hk * int64_t(sizeof(uint32_t)) <= DELTA_TURN_BYTES;
}

int cuda::deltanet_layer(const DeltaLayerArgs &args, void *stream) {
    const DeltaShape &s = args.delta.shape;
    if (!deltanet_with_conv(s)) {
        const int error = conv_parts(args.conv, stream);
        return error != 0 ? error : deltanet(args.delta, stream);
    }
    RowmmParts parts = {};
    if (const int error = rowmm_parts_of(*args.conv.parts, parts); error != 0) {
        return error;
    }
    return int(launch_kernel(deltanet_layer_kernel, plan_delta_layer(s), static_cast<cudaStream_t>(stream),
                             true, LayerParams(args, parts)));
}

} // namespace luce
