// Launches rowmm: says what its blocks are to do (matmul/plan.h), and picks the kernel that does it
// (matmul/kernel.cuh).
#include "common/device_limits.h"
#include "common/pointers.h"
#include "matmul/results.cuh"
#include "matmul/sm90/wgmma.cuh"

#include <algorithm>
#include <tuple>

namespace luce {
namespace {

int ranges_of(const DeviceLimits &device) {
    return std::min(BLOCKS_PER_SM * device.multiprocessors, ROWMM_MAX_RANGES);
}

bool valid(const RowmmArgs &a) {
    if (a.T < 0 || a.T > ROWMM_MAX_ROWS || a.n_weights < 1 || a.n_weights > ROWMM_MAX_WEIGHTS ||
        !aligned(a.x) || !aligned(a.scratch) || !aligned(a.parts)) {
        return false;
    }
    if (a.row != nullptr && (a.T > 1 || a.normed == 0 || a.norm == nullptr)) {
        return false;
    }
    int64_t units = 0;
    for (int i = 0; i < a.n_weights; i++) {
        const RowmmWeights &w = a.weights[i];
        if (rowmm_packed_bytes(w.type, a.K, w.N) == 0 || w.N > INT32_MAX - TILE || !aligned(w.packed)) {
            return false;
        }
        units += tiles_of(w.N) * chunks_of(a.K) * units_of_chunk(w.type);
    }
    return units <= INT32_MAX;
}

// These are units of one size in a row: those of the whole tiles of a matrix, or of its last tile.
struct Span {
    int units;
    int64_t cost;
};

// Says where each range begins. The units' bytes, and a little for each unit, are divided evenly.
void cut(RowmmParams &p, const Span *spans, int n_spans) {
    int64_t total = 0;
    for (int i = 0; i < n_spans; i++) {
        total += spans[i].units * spans[i].cost;
    }
    int64_t before = 0; // the spans ahead of span i cost so much
    int units = 0, i = 0;
    for (int r = 0; r < p.ranges; r++) {
        const int64_t target = total * r / p.ranges;
        while (i + 1 < n_spans && before + spans[i].units * spans[i].cost <= target) {
            before += spans[i].units * spans[i].cost;
            units += spans[i++].units;
        }
        p.first[r] = units + int((target - before + spans[i].cost / 2) / spans[i].cost);
    }
    for (; i < n_spans; i++) {
        units += spans[i].units;
    }
    p.first[p.ranges] = units;
    for (int r = 1; r < p.ranges; r++) { // no range is empty
        p.first[r] = std::min(std::max(p.first[r], p.first[r - 1] + 1), units - (p.ranges - r));
    }
}

// Says at which chunk of K a range begins, and whether all its units are whole chunks.
struct Beginning {
    int chunk, range;
    bool whole;
    bool operator<(const Beginning &o) const {
        return std::make_tuple(!whole, chunk, range) < std::make_tuple(!o.whole, o.chunk, o.range);
    }
};

// Pairs ranges that begin at neighbouring chunks, for blocks of two teams. It changes no sum.
void pair(RowmmParams &p) {
    // It counts stages. The first team waits for the second with so many in hand.
    constexpr int MOST_APART = 2;
    Beginning all[ROWMM_MAX_RANGES];
    for (int r = 0, segment = 0; r < p.ranges; r++) {
        while (segment + 1 < p.n_segments && p.segments[segment + 1].first_unit <= p.first[r]) {
            segment++;
        }
        const RowmmSegment &s = p.segments[segment];
        const int units = units_of_chunk(s.type);
        all[r] = {(p.first[r] - s.first_unit) % s.units_k / units, r, units == 1};
        for (int i = segment + 1; i < p.n_segments && p.segments[i].first_unit < p.first[r + 1]; i++) {
            all[r].whole = all[r].whole && units_of_chunk(p.segments[i].type) == 1;
        }
    }
    std::sort(all, all + p.ranges);
    for (int r = 0; r < p.ranges; r += 2) {
        const Beginning &a = all[r], &b = all[std::min(r + 1, p.ranges - 1)];
        const int apart = b.chunk - a.chunk, length = p.first[a.range + 1] - p.first[a.range];
        const bool shares = a.whole && b.whole && apart <= std::min(MOST_APART, length);
        p.pairs[r / 2] = {{uint16_t(a.range), uint16_t(r + 1 < p.ranges ? b.range : p.ranges)},
                          int16_t(shares ? apart : -1)};
    }
}

void plan(RowmmParams &p, const RowmmArgs &a, const DeviceLimits &device) {
    // This cost is in bytes. It is large since a unit takes nearly as long whatever its type is.
    constexpr int64_t UNIT_COST = 49152;
    Span spans[2 * ROWMM_MAX_WEIGHTS];
    int n_spans = 0, units = 0, tiles = 0;
    p.n_segments = a.n_weights;
    for (int i = 0; i < a.n_weights; i++) {
        const RowmmWeights &w = a.weights[i];
        RowmmSegment &s = p.segments[i];
        s.packed = static_cast<const uint8_t *>(w.packed);
        s.output_scale = nullptr;
        if (has_output_scale(w.type)) {
            s.output_scale =
                reinterpret_cast<const float *>(s.packed + output_scale_offset(w.type, a.K, w.N));
        }
        s.out = w.out;
        s.out_row = w.out_row;
        s.residual = w.residual;
        s.residual_row = w.residual_row;
        s.N = int32_t(w.N);
        s.type = w.type;
        s.units_k = int32_t(chunks_of(a.K) * units_of_chunk(w.type));
        s.n_units = int32_t(tiles_of(w.N) * s.units_k);
        s.whole_units = int32_t(fragments_of(w.N) / FRAGMENTS * s.units_k);
        s.last_fragments = int32_t(fragments_of(w.N) % FRAGMENTS);
        s.fragment_bytes = fragment_bytes(w.type);
        s.vectors = w.N % 4 == 0 && w.out_row % 4 == 0 && aligned(w.out) && w.residual_row % 4 == 0 &&
                    aligned(w.residual);
        s.first_unit = units;
        units += s.n_units;
        s.first_tile = tiles;
        tiles += int(tiles_of(w.N));
        if (s.whole_units > 0) {
            spans[n_spans++] = {s.whole_units, int64_t(FRAGMENTS) * s.fragment_bytes + UNIT_COST};
        }
        if (s.n_units > s.whole_units) {
            spans[n_spans++] = {s.n_units - s.whole_units,
                                int64_t(s.last_fragments) * s.fragment_bytes + UNIT_COST};
        }
        // A warpgroup reads four fragments where one of them is there.
        const int largest = s.whole_units > 0 ? FRAGMENTS : (s.last_fragments + 3) / 4 * 4;
        p.slot_bytes = std::max(p.slot_bytes, largest * s.fragment_bytes);
    }
    p.ranges = std::min(ranges_of(device), units);
    cut(p, spans, n_spans);
    pair(p);
}

// Adds the parts of the tile that begins in a range and does not end there. The grid is {ranges, rows}, and a
// thread has 4 outputs.
constexpr int SUM_THREADS = 256;
__global__ void __launch_bounds__(SUM_THREADS) sum_kernel(const __grid_constant__ RowmmParams p) {
    let_next_start();
    const int range = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    const OpenTile tile(p, range);
    wait_for_previous();
    if (tile.from == range && tile.to > range && i < p.rows * (TILE / 4)) {
        add_parts(p, tile, i);
    }
}

// Adds up the parts of tiles that no range has whole.
cudaError_t launch_sum(const RowmmParams &p, cudaStream_t stream, bool overlap) {
    const int threads = std::min(p.rows * (TILE / 4), SUM_THREADS);
    const dim3 sums(p.ranges, (p.rows * (TILE / 4) + threads - 1) / threads);
    return launch_kernel(sum_kernel, sums, threads, 0, stream, overlap, p);
}

RowmmKernel kernel_of(const RowmmParams &p, bool wide) {
    switch (p.columns) {
        case 1: return rowmm_kernel_of<1, false, 1>();
        case 2: return rowmm_kernel_of<1, false, 2>();
        case 3: return rowmm_kernel_of<1, false, 3>();
        case 4: return rowmm_kernel_of<1, false, 4>();
        case 5: return rowmm_kernel_of<1, false, 5>();
        case 6: return rowmm_kernel_of<1, false, 6>();
        case 7: return rowmm_kernel_of<1, false, 7>();
        case 8: return rowmm_kernel_of<1, false, 8>();
        case 16: return rowmm_kernel_of<2, false, ANY>();
        case 32: return wide ? rowmm_kernel_of<4, true, ANY>() : rowmm_kernel_of<4, false, ANY>();
        default: return rowmm_kernel_of<8, true, ANY>();
    }
}

// There are as many slots of weights as leave room for the blocks of a multiprocessor, and at least two.
cudaError_t launch(RowmmParams &p, bool wide, const DeviceLimits &device, cudaStream_t stream, bool overlap) {
    const RowmmKernel k = kernel_of(p, wide);
    // The kernel has at most 512 besides, and some is for blocks of the launches behind, which wait beside it.
    const int besides = k.teams == 1 ? 2560 : 512;
    const int share = device.shared_sm / (BLOCKS_PER_SM / k.teams) - device.shared_reserved - besides;
    const int row_bytes = k.row_bytes(p.columns);
    p.slots = std::min((share - row_bytes) / p.slot_bytes, ROWMM_MAX_SLOTS);
    if (p.slots < 2) {
        p.slots = std::min((device.shared_block - besides - row_bytes) / p.slot_bytes, 2);
    }
    if (p.slots < k.teams) {
        return cudaErrorInvalidConfiguration;
    }
    const int bytes = row_bytes + p.slots * p.slot_bytes;
    const dim3 grid((p.ranges + k.teams - 1) / k.teams);
    const cudaError_t launched = launch_kernel(k.kernel, grid, k.threads, bytes, stream, overlap, p);
    if (launched != cudaSuccess || p.parts != nullptr) {
        return launched;
    }
    return launch_sum(p, stream, overlap);
}

// What that kernel has of shared memory besides its row and its slots takes less than this.
constexpr int NORM_BESIDES = 512;

// Launches the kernel that norms and packs its row itself. A range's units have a slot each where there is room for the
// blocks of a multiprocessor.
cudaError_t launch_norm(RowmmParams &p, const RowmmArgs &a, const DeviceLimits &device, cudaStream_t stream) {
    const RowmmKernel k = rowmm_kernel_norm();
    const int row_bytes = rowmm_norm_row_bytes(a.K);
    int units = 0;
    for (int r = 0; r < p.ranges; r++) {
        units = std::max(units, p.first[r + 1] - p.first[r]);
    }
    const int share = device.shared_sm / BLOCKS_PER_SM - device.shared_reserved - NORM_BESIDES;
    p.slots = std::min({(share - row_bytes) / p.slot_bytes, ROWMM_MAX_SLOTS, units});
    if (p.slots < 2) {
        p.slots = std::min((device.shared_block - NORM_BESIDES - row_bytes) / p.slot_bytes, 2);
    }
    if (p.slots < 1) {
        return cudaErrorInvalidConfiguration;
    }
    const cudaError_t launched = launch_kernel(k.kernel, dim3(p.ranges), k.threads,
                                               row_bytes + p.slots * p.slot_bytes, stream, a.overlap != 0, p);
    return launched != cudaSuccess || p.parts != nullptr ? launched : launch_sum(p, stream, a.overlap != 0);
}

// Launches the kernel whose blocks have all of K, where it serves this launch.
bool launch_whole(const RowmmParams &p, const RowmmArgs &a, const DeviceLimits &device, cudaStream_t stream,
                  cudaError_t &error) {
    if (a.T > ROWMM_WHOLE_ROWS || p.n_segments != 1 || p.parts != nullptr || p.squares != nullptr) {
        return false;
    }
    const RowmmWholeKernel k = rowmm_kernel_whole(p);
    // All blocks run at once, one on a multiprocessor (its registers allow no second), beside those of the launches ahead
    // and behind.
    if (k.shared > device.shared_sm / 2 - device.shared_reserved || k.blocks > device.multiprocessors) {
        return false;
    }
    error = launch_kernel(k.kernel, dim3(k.blocks), k.threads, k.shared, stream, a.overlap != 0, p);
    return true;
}

// The kernel's attributes say what it was compiled for.
__global__ void __launch_bounds__(ROWMM_WGMMA ? 64 : 32) has_wgmma_kernel() {}

} // namespace

bool rowmm_has_wgmma() {
    cudaFuncAttributes attributes = {};
    return cudaFuncGetAttributes(&attributes, has_wgmma_kernel) == cudaSuccess &&
           attributes.maxThreadsPerBlock == 64;
}

int64_t rowmm_norm_shared(int64_t K, int32_t type) {
    return NORM_BESIDES + rowmm_norm_row_bytes(K) + FRAGMENTS * fragment_bytes(type);
}

static int64_t tiles_of_all(const RowmmArgs &args) {
    int64_t tiles = 0;
    for (int i = 0; i < args.n_weights; i++) {
        tiles += tiles_of(args.weights[i].N);
    }
    return tiles;
}

int64_t rowmm_parts_bytes(const RowmmArgs &args) {
    // at least the rows of any layout
    const int64_t rows = args.T <= SET ? args.T : (args.T + SET - 1) / SET * SET;
    return (ROWMM_MAX_RANGES + tiles_of_all(args)) * rows * TILE * int64_t(sizeof(float));
}

cudaError_t rowmm_parts_of(const RowmmArgs &args, RowmmParts &parts) {
    DeviceLimits device;
    if (!valid(args) || args.parts == nullptr || args.n_weights > 4) {
        return cudaErrorInvalidValue;
    }
    const cudaError_t error = device.read();
    if (error != cudaSuccess) {
        return error;
    }
    RowmmParams p = {};
    plan(p, args, device);
    const RowsLayout layout(args.T, rowmm_has_wgmma());
    parts.parts = args.parts;
    parts.set = layout.set;
    parts.rows = std::min(args.T, layout.set);
    parts.set_size = (p.ranges + tiles_of_all(args)) * parts.rows * TILE;
    parts.ranges = p.ranges;
    for (int i = 0; i < args.n_weights; i++) {
        const RowmmSegment &s = p.segments[i];
        parts.weights[i] = {s.first_unit, s.first_tile, s.units_k};
    }
    std::copy(p.first, p.first + p.ranges + 1, parts.first);
    return cudaSuccess;
}

int64_t cuda::rowmm_scratch_bytes() {
    DeviceLimits device;
    if (device.read() != cudaSuccess) {
        return 0;
    }
    return int64_t(ranges_of(device)) * 2 * ROWMM_MAX_ROWS * TILE * int64_t(sizeof(float));
}

int cuda::rowmm(const RowmmArgs &args, void *stream) {
    DeviceLimits device;
    if (!valid(args)) {
        return int(cudaErrorInvalidValue);
    }
    if (args.T == 0) {
        return 0;
    }
    const cudaError_t error = device.read();
    if (error != cudaSuccess) {
        return int(error);
    }
    RowmmParams p = {};
    plan(p, args, device);
    p.partial = static_cast<float *>(args.scratch);
    p.parts = args.parts;
    const RowsLayout layout(args.T, rowmm_has_wgmma());
    p.columns = layout.columns;
    p.part_rows = std::min(args.T, layout.set);
    if (args.normed != 0) {
        p.n_squares = int32_t(chunks_of(args.K));
        p.K = float(args.K);
        p.eps = args.eps;
        p.squares = reinterpret_cast<const float *>(static_cast<const uint8_t *>(args.x) +
                                                    squares_offset(args.T, args.K));
    }
    p.rows = std::min(args.T, layout.set);
    if (args.row != nullptr) {
        p.row = args.row;
        p.norm = args.norm;
        p.squares = nullptr;
        return int(launch_norm(p, args, device, static_cast<cudaStream_t>(stream)));
    }
    p.x = static_cast<const uint8_t *>(args.x);
    if (cudaError_t launched; launch_whole(p, args, device, static_cast<cudaStream_t>(stream), launched)) {
        return int(launched);
    }
    for (int row = 0; row < args.T; row += layout.set) {
        p.rows = std::min(args.T - row, layout.set);
        p.x = static_cast<const uint8_t *>(args.x) +
              row / layout.set * chunks_of(args.K) * chunk_bytes(p.columns);
        const cudaError_t launched =
            launch(p, layout.wide, device, static_cast<cudaStream_t>(stream), args.overlap != 0);
        if (launched != cudaSuccess) {
            return int(launched);
        }
        p.squares += p.squares == nullptr ? 0 : int64_t(layout.set) * p.n_squares;
        p.parts += p.parts == nullptr ? 0 : (p.ranges + tiles_of_all(args)) * int64_t(p.part_rows) * TILE;
        for (int i = 0; i < p.n_segments; i++) {
            RowmmSegment &s = p.segments[i];
            s.out += layout.set * s.out_row;
            s.residual += s.residual == nullptr ? 0 : layout.set * s.residual_row;
        }
    }
    return 0;
}

} // namespace luce
