// What a step's attention has to do, and who does it. Each block reads the control block and makes the same plan in
// shared memory: segments of units of work, laid out on a line, long chunks first. Worker w takes the units that begin
// in the w-th stretch of the line. A unit's length is its share of a worker: where the busiest worker has time for n
// chunks of a size, one of them is a n-th of a stretch. Who does a unit does not change what it computes.
//
// A unit is one chunk of keys, one KV head and a tile of M (row, query head) pairs. A segment is many units:
//   committed chunks of a sequence, for all its rows;
//   the chunks from that of n_past on, for one path: rows that each follow the one before. In depth-first order a
//   new path begins where a row's parent is not the row before it, and what the path's rows see is in logical order
//   the committed positions and then the ancestors of its last row.
#pragma once

#include "attention_chunks.h"
#include "kernels.h"

#include <cuda_runtime.h>

namespace luce {
namespace {

constexpr int WARP = 32;
constexpr int TILE_KEYS = 64; // the measure of work; windows are cut to multiples of it
constexpr int STRETCH = 1 << 16;
constexpr int MAX_SEGMENTS = 2 * MAX_ROWS;
constexpr int UNIT_KINDS = CHUNK_REGIONS + 1; // committed chunks of each region, and those of paths
constexpr int UNIT_COST = 1,
              PATH_COST = 3; // what a unit costs beside its tiles, in tiles: committed chunks, paths

struct AttentionParams : AttentionArgs {
    int32_t G; // query heads of a KV head
    int32_t per_G; // 2^16 / G rounded up: pair * per_G >> 16 is pair / G
    int32_t chunks; // most of a sequence
    // To units of log2: score * score_scale, or tanh(score * score_scale) * score_cap.
    float score_scale, score_cap;
    float *partial; // [T][H][chunks][D] sums of weight * v
    float2 *sums; // [T][H][chunks] {maximum, sum of weights}, of scores in units of log2

    // A pair of a unit: row and head of the step.
    __device__ int row_of(int first_row, int pair) const { return first_row + (pair * per_G >> 16); }
    __device__ int head_of(int kv_head, int pair) const {
        return kv_head * G + pair - (pair * per_G >> 16) * G;
    }
};

struct Segment {
    uint8_t seq, row, n_rows; // its rows, of the step
    uint8_t n_tiles, tile_rows;
    uint8_t tail; // 1: one path
    int32_t chunk0, chunk1;

    __device__ int kind(int region) const { return tail ? CHUNK_REGIONS : region; }
};

struct Plan {
    Segment segment[MAX_SEGMENTS];
    int32_t start[MAX_SEGMENTS + 1]; // on the line; [n_segments] is its length
    int32_t n_segments;
    int32_t unit_length[UNIT_KINDS];
    int32_t counts[MAX_SEGMENTS / WARP][UNIT_KINDS + 1]; // by warp: units of each kind, segments
    int32_t tail_tiles[MAX_SEGMENTS / WARP]; // by warp: of the longest unit of a path
    uint32_t begins[MAX_ROWS / WARP]; // bit: a path begins at the row, or it is of no sequence
    int32_t position[MAX_ROWS]; // of a row
    int8_t parent[MAX_ROWS], seq[MAX_ROWS];
    uint8_t path[MAX_ROWS]; // first row of the row's path
    int32_t n_past[MAX_ROWS], pages[MAX_ROWS]; // of a sequence
    uint8_t row0[MAX_ROWS], n_rows[MAX_ROWS];

    __device__ int64_t cell(const int32_t *table, int seq_index, int32_t at) const {
        return int64_t(table[pages[seq_index] + at / PAGE]) * PAGE + at % PAGE;
    }
    // The row at a position of `row`'s path, from n_past to the row's own. Rows of a path follow each other.
    __device__ int ancestor(int row, int32_t at) const {
        int first = path[row];
        while (at < position[first]) {
            first = path[parent[first]];
        }
        return first + at - position[first];
    }
    // Chunks of a region in a segment end before this one; from it down there are so many.
    __device__ static int32_t region_end(const Segment &s, int region) {
        return region + 1 < CHUNK_REGIONS ? min(s.chunk1, chunk_region(region + 1).index) : s.chunk1;
    }
    __device__ static int32_t region_chunks(const Segment &s, int region) {
        return max(region_end(s, region) - max(s.chunk0, chunk_region(region).index), 0);
    }

    __device__ void read(const AttentionParams &a);
    __device__ Segment find(const AttentionParams &a, int i, int tile_rows) const;
    __device__ int longest(const AttentionParams &a, const Segment &s) const;
    __device__ void measure();
    __device__ void add_up();
    __device__ void make(const AttentionParams &a, int most_pairs);
};

// Rows and sequences into shared memory.
__device__ void Plan::read(const AttentionParams &a) {
    const int i = threadIdx.x;
    if (i >= MAX_ROWS) {
        return;
    }
    const RowCtl row = a.ctl->rows[i];
    const SeqCtl &s = a.ctl->seqs[i];
    const int32_t past = s.n_past, first = s.row0, rows = s.n_rows, table = s.pages, n_seqs = a.ctl->n_seqs;
    const bool used = i < a.T && row.seq >= 0;
    seq[i] = int8_t(used ? row.seq : -1);
    parent[i] = int8_t(used ? row.parent : -1);
    position[i] = used ? row.position : -1;
    n_past[i] = past;
    pages[i] = table;
    row0[i] = uint8_t(i < n_seqs ? first : 0);
    n_rows[i] = uint8_t(i < n_seqs ? rows : 0);
    const uint32_t mask = __ballot_sync(~0u, !used || row.parent < 0 || row.parent != i - 1);
    if (i % WARP == 0) {
        begins[i / WARP] = mask;
    }
}

// Segment i before the empty ones are left out: committed chunks of sequence i, or the path that begins at row
// i - MAX_ROWS.
__device__ Segment Plan::find(const AttentionParams &a, int i, int tile_rows) const {
    Segment s{};
    const uint64_t begin_bits = uint64_t(begins[1]) << 32 | begins[0];
    const bool tail = i >= MAX_ROWS;
    const int first = tail ? i - MAX_ROWS : row0[i];
    if (tail ? seq[first] < 0 || (begin_bits >> first & 1) == 0 : n_rows[i] == 0) {
        return s;
    }
    s.seq = uint8_t(tail ? seq[first] : i);
    s.row = uint8_t(first);
    s.tail = tail;
    const int32_t low = lowest_visible(n_past[s.seq], a.first, a.window), shared = chunk_at(n_past[s.seq]);
    int n = n_rows[s.seq];
    s.chunk0 = chunk_at(low);
    s.chunk1 = shared;
    if (tail) {
        const uint64_t after = first == MAX_ROWS - 1 ? 0 : begin_bits >> (first + 1);
        n = after == 0 ? MAX_ROWS - first : __ffsll(int64_t(after));
        s.chunk0 = max(shared, s.chunk0);
        s.chunk1 = chunk_at(position[first + n - 1]) + 1;
    }
    if (s.chunk0 < s.chunk1) {
        s.n_rows = uint8_t(n);
        s.n_tiles = uint8_t(n <= tile_rows ? 1 : (n + tile_rows - 1) / tile_rows);
        s.tile_rows = uint8_t(s.n_tiles == 1 ? n : (n + s.n_tiles - 1) / s.n_tiles);
    }
    return s;
}

// Tiles of the longest unit of a path.
__device__ int Plan::longest(const AttentionParams &a, const Segment &s) const {
    const int32_t begin = max(chunk_begin(s.chunk0), lowest_visible(n_past[s.seq], a.first, a.window));
    const int32_t end = min(chunk_begin(s.chunk0 + 1), position[s.row + s.n_rows - 1] + 1);
    const int32_t next =
        s.chunk1 - s.chunk0 > 1 ? position[s.row + s.n_rows - 1] + 1 - chunk_begin(s.chunk0 + 1) : 0;
    return (max(end - begin, min(next, MAX_ROWS)) + TILE_KEYS - 1) / TILE_KEYS;
}

// How long units are, by one warp: lane i tries the work L + 1 + i for the busiest worker, L being the average.
__device__ void Plan::measure() {
    const int workers = int(gridDim.x);
    int32_t units[UNIT_KINDS], tiles[UNIT_KINDS], length[UNIT_KINDS], all = 0, work = 0;
    int64_t line = 0;
#pragma unroll
    for (int k = 0; k < UNIT_KINDS; k++) {
        units[k] = counts[0][k] + counts[1][k] + counts[2][k] + counts[3][k];
        tiles[k] =
            k < CHUNK_REGIONS ? (1 << chunk_region(k).shift) / TILE_KEYS : max(tail_tiles[2], tail_tiles[3]);
        tiles[k] += k < CHUNK_REGIONS ? UNIT_COST : PATH_COST;
        length[k] = STRETCH; // one for each worker
        all += units[k];
        work += units[k] * tiles[k];
    }
    if (all > workers) {
        const int32_t most = work / workers + 1 + int(threadIdx.x);
#pragma unroll
        for (int k = 0; k < UNIT_KINDS; k++) {
            if (units[k] > 0) {
                const int32_t fit = max(most / tiles[k], 1);
                length[k] = (STRETCH + fit - 1) / fit;
                line += int64_t(units[k]) * length[k];
            }
        }
    }
    const uint32_t enough = __ballot_sync(~0u, line <= int64_t(workers) * STRETCH);
    if (int(threadIdx.x) == (enough == 0 ? WARP - 1 : __ffs(int(enough)) - 1)) {
#pragma unroll
        for (int k = 0; k < UNIT_KINDS; k++) {
            unit_length[k] = length[k];
        }
    }
}

// start[1 ..] from lengths to sums of lengths, by one warp.
__device__ void Plan::add_up() {
    constexpr int EACH = MAX_SEGMENTS / WARP;
    const int lane = threadIdx.x;
    int32_t sum[EACH], total = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = lane * EACH + i;
        total += at < n_segments ? start[at + 1] : 0;
        sum[i] = total;
    }
    int32_t before = total;
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
        const int32_t other = __shfl_up_sync(~0u, before, d);
        before += lane >= d ? other : 0;
    }
    before -= total;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        start[lane * EACH + i + 1] = before + sum[i];
    }
    if (lane == 0) {
        start[0] = 0;
    }
}

// All threads of a block, MAX_SEGMENTS at least. A unit has at most so many pairs.
__device__ void Plan::make(const AttentionParams &a, int most_pairs) {
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP;
    read(a);
    __syncthreads();
    Segment mine{};
    uint32_t used = 0;
    int32_t units[CHUNK_REGIONS] = {};
    if (tid < MAX_ROWS) {
        const uint64_t bits = (uint64_t(begins[1]) << 32 | begins[0]) << (MAX_ROWS - 1 - tid);
        path[tid] = uint8_t(bits == 0 ? 0 : tid - __clzll(int64_t(bits)));
    }
    if (tid < MAX_SEGMENTS) { // two warps for committed chunks, two for paths
        mine = find(a, tid, a.row_of(0, most_pairs));
        used = __ballot_sync(~0u, mine.n_rows > 0);
        const bool tail = tid >= MAX_ROWS;
        int32_t all = 0;
#pragma unroll
        for (int r = 0; r < CHUNK_REGIONS; r++) {
            units[r] = mine.n_rows > 0 ? region_chunks(mine, r) * a.pool.Hkv * mine.n_tiles : 0;
            const int32_t of_region = __reduce_add_sync(~0u, units[r]);
            all += of_region;
            if (lane == 0) {
                counts[warp][r] = tail ? 0 : of_region;
            }
        }
        const int32_t tiles = __reduce_max_sync(~0u, tail && mine.n_rows > 0 ? longest(a, mine) : 0);
        if (lane == 0) {
            counts[warp][CHUNK_REGIONS] = tail ? all : 0;
            counts[warp][UNIT_KINDS] = __popc(used);
            tail_tiles[warp] = tiles;
        }
    }
    __syncthreads();
    if (tid < WARP) {
        measure();
    }
    __syncthreads();
    if (mine.n_rows > 0) {
        int at = __popc(used & ((1u << lane) - 1));
        for (int w = 0; w < warp; w++) {
            at += counts[w][UNIT_KINDS];
        }
        segment[at] = mine;
        int32_t length = 0;
#pragma unroll
        for (int r = 0; r < CHUNK_REGIONS; r++) {
            length += units[r] * unit_length[mine.kind(r)];
        }
        start[at + 1] = length;
    }
    __syncthreads();
    if (tid < WARP) {
        n_segments =
            counts[0][UNIT_KINDS] + counts[1][UNIT_KINDS] + counts[2][UNIT_KINDS] + counts[3][UNIT_KINDS];
        __syncwarp();
        add_up();
    }
    __syncthreads();
}

// What there is to do for a unit.
struct UnitInfo {
    int32_t row, n_rows, head, chunk;
    int32_t begin, end; // keys
    int32_t past; // the sequence's n_past
    int32_t hides; // 1: a row may not see what another does

    // Whether cells of the tile at `first` may be loaded that some row of the unit does not see.
    __device__ bool mixed(int32_t first, int keys, int32_t window) const {
        return hides != 0 && (first + keys > past || (window > 0 && first < past + MAX_ROWS - window));
    }
};

// A walk over one worker's units: a segment's regions from the last to the first, in each KV head by KV head the chunks
// in order, so that a worker's units mostly share their queries and follow each other in memory. Tiles of one chunk
// are next to each other, so that one reads what the other has brought into L2.
struct Cursor {
    const AttentionParams &a;
    const Plan &plan;
    int32_t at, stop, length; // on the line; of the unit
    int seg, region, chunks; // chunks: of the segment in the region
    int32_t i, n; // units of them
    // the unit:
    int row, n_rows, head;
    int32_t chunk, begin, end, low; // keys; those below `low` no row sees

    __device__ Cursor(const AttentionParams &args, const Plan &p) : a(args), plan(p) {
        const int32_t all = p.start[p.n_segments], from = min(int32_t(blockIdx.x) * STRETCH, all);
        at = from;
        stop = blockIdx.x + 1 == gridDim.x ? all : min(from + STRETCH, all);
        if (at >= stop) {
            return;
        }
        seg = 0;
        while (p.start[seg + 1] <= from) {
            seg++;
        }
        at = p.start[seg];
        open(CHUNK_REGIONS - 1);
        for (;;) { // to the first unit that begins at `from` or later
            i = min((from - at + length - 1) / length, n);
            at += i * length;
            if (i < n || region == 0) {
                break;
            }
            open(region - 1);
        }
        settle();
    }
    __device__ bool valid() const { return at < stop; }
    __device__ void open(int r) {
        region = r;
        chunks = plan.region_chunks(segment(), r);
        n = chunks * a.pool.Hkv * segment().n_tiles;
        i = 0;
        length = plan.unit_length[segment().kind(r)];
    }
    __device__ void next() {
        at += length;
        i++;
        settle();
    }
    // Unit i, or the first after it that has keys.
    __device__ void settle() {
        for (; at < stop; at += length, i++) {
            while (i == n) {
                if (region == 0 && ++seg == plan.n_segments) {
                    at = stop;
                    return;
                }
                open(region == 0 ? CHUNK_REGIONS - 1 : region - 1);
            }
            const Segment &s = segment();
            const int of_tiles = i / s.n_tiles, tile = i - of_tiles * s.n_tiles;
            head = of_tiles / chunks;
            chunk = max(s.chunk0, chunk_region(region).index) + of_tiles - head * chunks;
            row = s.row + tile * s.tile_rows;
            n_rows = min(int(s.tile_rows), s.row + s.n_rows - row);
            begin = chunk_begin(chunk);
            end = chunk_begin(chunk + 1);
            low = lowest_visible(plan.n_past[s.seq], a.first, a.window);
            if (s.tail && n_rows > 0) {
                end = min(end, plan.position[row + n_rows - 1] + 1);
            }
            begin += max(low - begin, 0) / TILE_KEYS * TILE_KEYS;
            if (n_rows > 0 && begin < end) {
                return;
            }
        }
    }
    __device__ const Segment &segment() const { return plan.segment[seg]; }
    __device__ int seq() const { return segment().seq; }
    __device__ int last_row() const { return row + n_rows - 1; }
    __device__ UnitInfo info() const {
        const int hides = (segment().tail != 0 && n_rows > 1) || a.window > 0;
        return {row, n_rows, head, chunk, begin, end, plan.n_past[seq()], hides};
    }
    // Cell of a key of the unit: below n_past as it was committed, from there on by the ancestors of the last row.
    __device__ int64_t cell(int32_t key) const {
        const int s = seq();
        const int32_t past = plan.n_past[s];
        return plan.cell(a.pages, s, key < past ? key : past + plan.ancestor(last_row(), key) - plan.row0[s]);
    }
};

} // namespace
} // namespace luce
