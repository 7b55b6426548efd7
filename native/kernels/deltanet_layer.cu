// Does the conv and the gated delta rule of a DeltaNet layer in one launch, for steps of few rows of one sequence. The conv
// reads the parts that the product ahead has left. Each value is computed as the two kernels compute it that wider steps
// have (deltanet_conv.cu, deltanet.cu), with the same code, so its bits are the same.
//
// A block has W columns of one v head, as in deltanet.cu. It makes the q and k that it needs itself, from parts that lie in
// L2: a warp has all rows of q, another those of k, the third those of its columns of v, and the fourth the gates, and its
// columns of z. So a k head's raw rows are known in all blocks that share it. Each of them counts itself once it has read
// what the caches hold of them, and the last one replaces that. All layers count in the same place: each counts behind its
// wait, and the last count of a layer leaves 0.
#include "deltanet_row.cuh"
#include "deltanet_run.cuh"
#include "deltanet_worker.cuh"
#include "rowmm_parts.cuh"

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
        n_saves = 0; // rows are so few that a replay from the committed state is short enough
    }
};

// Has what one warp does of the conv. A lane has 4 channels, and holds all rows of them. Of v, whose channels are few, four
// lanes do the same.
template <int ROWS> struct ConvWarp {
    static constexpr int AHEAD = ROWS == 1 ? 8 : 4; // so many parts are fetched at once
    static constexpr int V_LANES = L::W / 4;
    static_assert(ROWS <= WARP / V_LANES, "of the lanes that do the same each stores a row");
    using LayerWorker = Worker<S, false, ROWS>;
    using Four = Channels<S>;
    const LayerParams &a;
    const LayerWorker &worker;
    const int warp; // 0 has q, 1 k, and 2 v
    const bool of_v;
    const int lane, copy; // `copy` says which of the lanes it is that do the same
    const int channel; // it counts in a row of the step
    Weights<S> weights;
    LaneParts<1> parts; // of the sequence's first row
    Four committed[WINDOW], row[ROWS] = {}; // before the conv; the oldest comes first
    uint32_t turn = 0;

    // This reads nothing that the control block says.
    __device__ ConvWarp(const LayerParams &params, const LayerWorker &w, int index)
        : a(params), worker(w), warp(index), of_v(warp == 2), lane(of_v ? w.lane % V_LANES : w.lane),
          copy(of_v ? w.lane / V_LANES : 0),
          channel(((of_v ? 2 * a.shape.Hk + w.h : warp * a.shape.Hk + w.kh) * S + (of_v ? w.j0 : 0)) +
                  lane * 4),
          parts(a.parts, 0, 0, channel) {
        weights.load(a.w, channel - lane * 4, lane);
    }

    // Reads the committed rows: those of the window, followed by the pending rows.
    __device__ void read_committed() {
        parts.skip_rows(worker.row0);
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
    // Replaces what the caches hold of these channels: the window, and the rows of the log.
    __device__ void write_back() const {
        if (copy == 0 && (worker.sh.ctl.seq.fresh || worker.n_pending > 0)) {
            float *window = a.window + worker.sh.ctl.seq.slot * WINDOW * a.C + channel;
#pragma unroll
            for (int i = 0; i < WINDOW; i++) {
                committed[i].store(window + i * a.C, 0);
            }
        }
#pragma unroll
        for (int t = 0; t < ROWS; t++) {
            if (t < worker.n_rows && (!of_v || copy == t)) {
                row[t].store(worker.log + t * a.C + channel, 0);
            }
        }
    }

    // Adds up the parts of the step's rows. What `meanwhile` does hides behind their way.
    template <typename F> __device__ void add_up(const F &meanwhile) {
        float4 x[ROWS][AHEAD][1];
#pragma unroll
        for (int t = 0; t < ROWS; t++) {
            if (t < worker.n_rows) {
                parts_of(t).fetch(x[t], 0);
            }
        }
        meanwhile();
#pragma unroll
        for (int t = 0; t < ROWS; t++) {
            if (t < worker.n_rows) {
                float v[4] = {};
                parts_of(t).add(x[t], v);
                row[t] = {v[0], v[1], v[2], v[3]};
            }
        }
    }
    __device__ LaneParts<1> parts_of(int t) const {
        LaneParts<1> other = parts;
        other.skip_rows(t);
        return other;
    }

    // Returns row t, where -1 stands for the newest committed one.
    __device__ const Four &row_at(int t) const { return t < 0 ? committed[WINDOW + t] : row[t]; }
    // Does so without an address, of a row that nvcc does not know.
    __device__ Four find_row(int t) const {
        Four found = committed[0];
#pragma unroll
        for (int i = 1 - WINDOW; i < ROWS; i++) {
#pragma unroll
            for (int c = 0; c < Four::N; c++) {
                found.x[c] = pick(t == i, row_at(i).x[c], found.x[c]);
            }
        }
        return found;
    }
    // Computes all rows at once. What comes of rows that the step does not have is not read.
    template <bool TREE> __device__ void convolve() const {
        Four taps[ROWS][TAPS];
        float *out[ROWS];
#pragma unroll
        for (int t = 0; t < ROWS; t++) {
            int from = t < worker.n_rows ? t : -1;
#pragma unroll
            for (int i = WINDOW; i >= 0; i--) {
                if constexpr (TREE) {
                    taps[t][i] = find_row(from);
                    from = from >= 0 ? worker.sh.parent[from] : from - 1;
                } else {
                    taps[t][i] = row_at(t - WINDOW + i);
                }
            }
            auto &tile = worker.sh.tile[0];
            out[t] = of_v ? tile.v[t] : warp == 0 ? tile.q[t] : tile.k[t];
        }
        conv_rows<S, ROWS>(weights, taps, !of_v, out, lane);
    }
};

// Has what the fourth warp does: the gates of the block's head, of which lane t has beta of row t, and lane ALPHA + t alpha,
// and the block's columns of z, of which a lane has 4 of one row.
template <int ROWS> struct GateWarp {
    static constexpr int ALPHA = WARP / 2, Z_LANES = L::W / 4, AHEAD = 4;
    static_assert(ROWS <= ALPHA && ROWS * Z_LANES <= WARP);
    using LayerWorker = Worker<S, false, ROWS>;
    const LayerParams &a;
    LayerWorker &worker;
    LaneParts<1> gates, of_z;
    float dt, rate;

    __device__ GateWarp(const LayerParams &params, LayerWorker &wk) : a(params), worker(wk) {}
    // This reads nothing that the control block says.
    __device__ void begin() {
        gates = LaneParts<1>(a.parts, worker.lane < ALPHA ? 2 : 3, 0, worker.h / 4 * 4);
        of_z = LaneParts<1>(a.parts, 1, 0, worker.h * S + column_of_z());
        of_z.skip_rows(has_z() ? row_of_z() : 0);
        dt = a.dt[worker.h];
        rate = a.a[worker.h];
    }
    __device__ int column_of_z() const { return worker.j0 + worker.lane % Z_LANES * 4; }
    __device__ int row_of_z() const { return worker.lane / Z_LANES; }
    __device__ bool has_z() const { return row_of_z() < a.shape.T; }
    __device__ void find_rows() {
        const int t = worker.lane % ALPHA;
        gates.skip_rows(t < worker.n_rows ? worker.row0 + t : 0); // the others read what is there
    }
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
            worker.set_gates(worker.lane, alpha, gate, dt, rate);
        }
        of_z.add(y, z);
        if (has_z()) {
            float *to = a.z + (int64_t(row_of_z()) * a.shape.Hv + worker.h) * S + column_of_z();
            *reinterpret_cast<float4 *>(to) = {z[0], z[1], z[2], z[3]};
        }
    }
};

// What a block does before the launch ahead has ended. All that the caches hold is asked for before any of it is waited for.
// It returns whether the rows are no chain.
template <int ROWS>
__device__ bool prepare(Worker<S, false, ROWS> &worker, ConvWarp<ROWS> &conv, GateWarp<ROWS> &gates,
                        int warp) {
    worker.begin();
    // So many are on their way at once: a step of as many rows has left no more. With 4, registers would spill.
    typename Worker<S, false, ROWS>::Pending pending[ROWS + 1];
    worker.read_pending(pending, 0);
    if (warp < 3) {
        conv.read_committed();
    } else {
        gates.find_rows();
    }
    bool tree = false;
    if constexpr (ROWS > 1) {
        const bool follows = worker.tid >= worker.n_rows || worker.read_parent(worker.tid);
        tree = uniform(__syncthreads_or(!follows));
        if (tree) {
            worker.find_ancestors();
        }
    }
    worker.replay_pending(pending);
    if (warp < 2) {
        __threadfence(); // the warp has read before it counts itself
        __syncwarp();
    }
    return tree;
}

// The grid is blocks of all v heads. ROWS is as many as the step has.
template <int ROWS>
__global__ void __launch_bounds__(L::THREADS, 3)
    deltanet_layer_kernel(const __grid_constant__ LayerParams a) {
    __shared__ Shared<S, false, ROWS> sh;
    let_next_start();
    Worker<S, false, ROWS> worker(a, sh, nullptr, Item{0, int(blockIdx.x)});
    const auto control = worker.load_control(0); // on its way while what follows is found
    const int warp = uniform(worker.tid / WARP);
    ConvWarp<ROWS> conv(a, worker, min(warp, 2));
    GateWarp<ROWS> gates(a, worker);
    if (warp == 3) {
        gates.begin();
    }
    if (!worker.take_control(control, 0)) {
        wait_for_previous();
        return;
    }
    const bool tree = prepare(worker, conv, gates, warp);
    wait_for_previous();
    if (warp < 3) {
        conv.add_up([&] {
            conv.count();
            worker.store_committed();
        });
        if (tree) {
            conv.template convolve<true>();
        } else {
            conv.template convolve<false>();
        }
    } else {
        gates.run([&] { worker.store_committed(); });
    }
    __syncthreads();
    if (tree) {
        worker.run_trees();
        worker.emit_last();
    } else {
        worker.run_chains();
    }
    if (warp < 3 && conv.is_last()) {
        conv.write_back(); // a device stores nothing ahead of a branch that it hangs on, so this needs no fence
    }
}

} // namespace

bool cuda::deltanet_with_conv(const DeltaShape &s) {
    return s.mode == DELTA_VERIFY && s.S == S && s.T >= 1 && s.T <= DELTA_LAYER_ROWS && s.max_seqs() == 1 &&
           s.Hv % 4 == 0 && s.Hv % s.Hk == 0 && 2 * s.Hk * int64_t(sizeof(uint32_t)) <= DELTA_TURN_BYTES;
}

int cuda::deltanet_layer(const DeltaLayerArgs &args, void *stream) {
    const DeltaShape &s = args.delta.shape;
    if (!deltanet_with_conv(s)) {
        const int error = conv_parts(args.conv, stream);
        return error != 0 ? error : deltanet(args.delta, stream);
    }
    RowmmParts parts = {};
    if (const cudaError_t error = rowmm_parts_of(*args.conv.parts, parts); error != cudaSuccess) {
        return int(error);
    }
    static_assert(DELTA_LAYER_ROWS == 2);
    const auto kernel = s.T == 1 ? deltanet_layer_kernel<1> : deltanet_layer_kernel<2>;
    return int(launch_kernel(kernel, dim3(unsigned(s.Hv * L::BLOCKS)), L::THREADS, 0,
                             static_cast<cudaStream_t>(stream), true, LayerParams(args, parts)));
}

} // namespace luce
