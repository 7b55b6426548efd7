// Plans what a step's attention has to do, and which block does it. The plan is the same in all layers of a kind, so that a
// kernel of its own makes it once a step for them (attention_plan.cu); where there is none, each block reads the control
// block and makes the same plan in shared memory. The plan has units of work by kind. Each kind is
// shared out among the blocks so that the work of all kinds up to it is even, or where there is much, blocks take units one by
// one. Who does a unit does not change what it computes. How a block goes from unit to unit is in attention_units.cuh.
//
// A unit is one chunk of keys, a group of query heads that read one KV head, and a tile of M (row, query head) pairs.
// A segment is many units, and is one of these two:
//   committed chunks of a sequence, for all its rows;
//   the chunks from that of n_past on, for one path: rows that each follow the one before.
// In depth-first order a new path begins where a row's parent is not the row before it. What the path's rows see is
// in logical order the committed positions and then the ancestors of its last row.
#pragma once

#include "attention/chunks.h"
#include "attention/layout.h"
#include "attention/partials.h"

#include <cuda_runtime.h>
#include <stddef.h>

namespace luce {
namespace {

constexpr int TILE_KEYS = 64; // work is measured in tiles, and windows are cut to multiples of them
constexpr int MAX_SEGMENTS = 2 * MAX_ROWS;
// The kinds are committed chunks of the regions from the last to the first, then paths. A block does its units in this
// order, so that what the step itself writes is read last. Paths are shared out first, since they may be as long as the
// longest chunks: so the small units even out what the large ones leave uneven.
constexpr int UNIT_KINDS = CHUNK_REGIONS + 1, PATHS = CHUNK_REGIONS;
// Where blocks have so many units each, or more, they take them one by one instead, from the largest to the smallest. So all
// end at about the same time, also where some read slower than others: on an H200 eight sequences of one row take 3 to 5% less,
// of four rows 4 to 7%, and 64 rows of one sequence 8 to 12%. With 5 units a block, of one sequence at 100k, they take 1% more:
// who has units in a row loads queries and page tables less often.
constexpr int TICKET_UNITS = 8;
// Costs are in quarters of a tile. A unit leaves partial results beside its tiles, whose time shows where there are many
// rows. The cells of a path are looked up.
constexpr int TILE_COST = 4, PATH_COST = 2 * TILE_COST;
__device__ inline int unit_cost(int rows) {
    return min(1 + rows / 8, TILE_COST);
}

__device__ constexpr int region_of_kind(int kind) {
    return CHUNK_REGIONS - 1 - kind;
}

struct AttentionParams : AttentionParts {
    int32_t G; // a group has so many query heads: those of a KV head, or where these are many, a part of them
    int32_t groups, groups_of_head; // all heads have `groups` groups, a KV head has `groups_of_head`
    int32_t per_G; // it is 2^16 / G rounded up: pair * per_G >> 16 is pair / G
    // These turn scores into units of log2: score * score_scale, or tanh(score * score_scale) * score_cap.
    float score_scale, score_cap;
    int32_t workers; // so many blocks share the work
    int32_t *taken; // null, or the number of units that the layer's blocks have taken one by one

    // Returns the row and the head of the step that a unit's pair stands for.
    __device__ int row_of(int first_row, int pair) const { return first_row + (pair * per_G >> 16); }
    __device__ int head_of(int group, int pair) const { return group * G + pair - (pair * per_G >> 16) * G; }
    __device__ int kv_head(int group) const { return groups_of_head == 1 ? group : group / groups_of_head; }
};

struct Segment {
    uint8_t seq, row, n_rows; // its rows are counted in the step
    uint8_t n_tiles, tile_rows;
    uint8_t tail; // it is 1 for one path
    uint16_t chunk0, chunk1; // there are no chunks where there are no rows

    // Returns its chunks of a kind, and the first of them in `begin`.
    __device__ int32_t chunks(int kind, int32_t &begin) const {
        begin = chunk0;
        int32_t end = chunk1;
        if (kind != PATHS) {
            const int region = region_of_kind(kind);
            begin = max(begin, chunk_region(region).index);
            end = region + 1 < CHUNK_REGIONS ? min(end, chunk_region(region + 1).index) : end;
        }
        return n_rows == 0 ? 0 : max(end - begin, 0);
    }
};

struct MadePlan;

struct alignas(16) Plan {
    // First the committed chunks of each sequence; entry i may be the path that begins at row i - MAX_ROWS.
    Segment segment[MAX_SEGMENTS];
    // The units of a kind up to the i-th segment's last, among chunks or paths.
    int32_t ends[UNIT_KINDS][MAX_ROWS];
    // By warp: those of all, and of the longest unit.
    int32_t chunks[MAX_SEGMENTS / WARP], path_tiles[MAX_SEGMENTS / WARP];
    int32_t most_rows[MAX_SEGMENTS / WARP]; // of a unit, by warp
    // A warp's entry counts the units of a kind that its workers and those before have. Kinds use both rows by turns.
    int32_t done[2][MAX_WORKERS / WARP];
    // A bit says that a path begins at the row, or that it is of no sequence.
    uint32_t begins[MAX_ROWS / WARP];
    int32_t position[MAX_ROWS]; // a row's token is at this position
    int8_t parent[MAX_ROWS], seq[MAX_ROWS];
    uint8_t path[MAX_ROWS]; // it is the first row of the row's path
    int32_t n_past[MAX_ROWS], pages[MAX_ROWS]; // these are by sequence
    uint16_t written[MAX_ROWS]; // the step may write so many of the sequence's last cells below n_past
    uint8_t row0[MAX_ROWS], n_rows[MAX_ROWS];
    int32_t ticketed; // it is 1 where blocks take units one by one
    int32_t first[UNIT_KINDS],
        last[UNIT_KINDS]; // this block has units first .. last - 1, where it does not take them one by one

    // Returns the rows of the unit that has most.
    __device__ int rows_of_unit() const {
        return max(max(most_rows[0], most_rows[1]), max(most_rows[2], most_rows[3]));
    }
    // Returns the row at a position of `row`'s path, from n_past to the row's own. Rows of a path follow each
    // other.
    __device__ int ancestor(int row, int32_t at) const {
        int first = path[row];
        while (at < position[first]) {
            first = path[parent[first]];
        }
        return first + at - position[first];
    }
    __device__ void read(const AttentionParams &a);
    __device__ Segment find(const AttentionParams &a, int i) const;
    __device__ int longest(const AttentionParams &a, const Segment &s) const;
    __device__ void count(const AttentionParams &a, int most_rows);
    __device__ void share_out(const AttentionParams &a, int32_t *ends_of_workers);
    __device__ void make(const AttentionParams &a, int most_pairs, int32_t *ends_of_workers);
    __device__ void take(const MadePlan &made);
    __device__ void have(const AttentionParams &a, int most_pairs);
    // Says whether this block has to stay: it has units, or is the one that waits for the kernels ahead where none has. The
    // others end at once, and leave their multiprocessors to the kernels behind, which bring weights meanwhile.
    __device__ bool stays() const {
        bool any = blockIdx.x == 0 || ticketed != 0;
#pragma unroll
        for (int k = 0; k < UNIT_KINDS; k++) {
            any = any || first[k] < last[k];
        }
        return any;
    }
};

static_assert(sizeof(Plan) == PLAN_BYTES);

// Reads rows and sequences into shared memory. Rows that see committed positions alone are as one path, all at the last of these,
// which has K and V in a cell as all before it; without any there are no rows.
__device__ void Plan::read(const AttentionParams &a) {
    const int i = threadIdx.x;
    if (i >= MAX_ROWS) {
        return;
    }
    const RowCtl row = a.ctl->rows[i];
    const SeqCtl &s = a.ctl->seqs[i];
    const int32_t past = s.n_past - a.committed, first = s.row0, rows = past < 0 ? 0 : s.n_rows,
                  table = s.pages, n_seqs = a.ctl->n_seqs;
    bool used = i < a.T && row.seq >= 0, begin = row.parent < 0 || row.parent != i - 1;
    int32_t at = row.position;
    if (a.committed != 0 && used) {
        const SeqCtl &own = a.ctl->seqs[row.seq];
        at = own.n_past - 1;
        used = at >= 0;
        begin = i == own.row0;
    }
    seq[i] = int8_t(used ? row.seq : -1);
    parent[i] = int8_t(used ? row.parent : -1);
    position[i] = used ? at : -1;
    n_past[i] = past;
    written[i] = uint16_t(s.n_new);
    pages[i] = table;
    row0[i] = uint8_t(i < n_seqs ? first : 0);
    n_rows[i] = uint8_t(i < n_seqs ? rows : 0);
    const uint32_t mask = __ballot_sync(~0u, !used || begin);
    if (i % WARP == 0) {
        begins[i / WARP] = mask;
    }
}

// Returns segment i, of one tile.
__device__ Segment Plan::find(const AttentionParams &a, int i) const {
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
    s.chunk0 = uint16_t(chunk_at(low));
    s.chunk1 = uint16_t(shared);
    if (tail) {
        const uint64_t after = first == MAX_ROWS - 1 ? 0 : begin_bits >> (first + 1);
        n = after == 0 ? MAX_ROWS - first : __ffsll(int64_t(after));
        s.chunk0 = uint16_t(max(shared, int32_t(s.chunk0)));
        s.chunk1 = uint16_t(chunk_at(position[first + n - 1]) + 1);
    }
    if (s.chunk0 < s.chunk1) {
        s.n_rows = uint8_t(n);
    }
    return s;
}

// Returns how many tiles the longest unit of a path has.
__device__ int Plan::longest(const AttentionParams &a, const Segment &s) const {
    const int32_t begin = max(chunk_begin(s.chunk0), lowest_visible(n_past[s.seq], a.first, a.window));
    const int32_t end = min(chunk_begin(s.chunk0 + 1), position[s.row + s.n_rows - 1] + 1);
    const int32_t next =
        s.chunk1 - s.chunk0 > 1 ? position[s.row + s.n_rows - 1] + 1 - chunk_begin(s.chunk0 + 1) : 0;
    return (max(end - begin, min(next, MAX_ROWS)) + TILE_KEYS - 1) / TILE_KEYS;
}

// Counts segments and their units. Rows of a segment are cut to tiles where a unit can not have all, and
// where blocks would have nothing to do otherwise.
__device__ void Plan::count(const AttentionParams &a, int most_rows) {
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP;
    Segment mine{};
    if (tid < MAX_SEGMENTS) { // two warps are for committed chunks, two for paths
        mine = find(a, tid);
        const int32_t all = __reduce_add_sync(~0u, mine.n_rows > 0 ? mine.chunk1 - mine.chunk0 : 0);
        const int32_t tiles =
            __reduce_max_sync(~0u, tid >= MAX_ROWS && mine.n_rows > 0 ? longest(a, mine) : 0);
        if (lane == 0) {
            chunks[warp] = all;
            path_tiles[warp] = tiles;
        }
    }
    __syncthreads();
    if (tid >= MAX_SEGMENTS) {
        return;
    }
    const int32_t units = (chunks[0] + chunks[1] + chunks[2] + chunks[3]) * a.groups;
    const int rows = mine.n_rows, parts = max((rows + most_rows - 1) / most_rows, 1);
    const int tiles = max(min(a.workers / max(units, 1), rows), parts);
    mine.tile_rows = uint8_t((rows + tiles - 1) / tiles);
    mine.n_tiles = uint8_t(rows == 0 ? 0 : (rows + mine.tile_rows - 1) / mine.tile_rows);
    segment[tid] = mine;
    const int32_t most = __reduce_max_sync(~0u, rows == 0 ? 0 : int32_t(mine.tile_rows));
    if (lane == 0) {
        this->most_rows[warp] = most;
    }
#pragma unroll
    for (int k = 0; k < UNIT_KINDS; k++) {
        if ((k == PATHS) != (tid >= MAX_ROWS)) {
            continue;
        }
        int32_t begin, sum = mine.chunks(k, begin) * a.groups * mine.n_tiles;
#pragma unroll
        for (int d = 1; d < WARP; d *= 2) {
            const int32_t before = __shfl_up_sync(~0u, sum, d);
            sum += lane >= d ? before : 0;
        }
        ends[k][tid % MAX_ROWS] = sum;
    }
}

// Shares out the units. Worker j has of each kind as many units as bring the work of workers 0 .. j, so far,
// closest to their share of it from below, and none where a larger unit is more than that. Thread j is worker
// j. Where there are no more units than workers, the first ones have one each, since these blocks come up
// first. Where a worker's units end goes to ends_of_workers, unless this is null.
__device__ void Plan::share_out(const AttentionParams &a, int32_t *ends_of_workers) {
    const int j = threadIdx.x, lane = j % WARP, warp = j / WARP, workers = a.workers, me = int(blockIdx.x);
    int32_t total = 0;
#pragma unroll
    for (int k = 0; k < UNIT_KINDS; k++) {
        total += ends[k][MAX_ROWS - 1];
    }
    if (j == 0) {
        ticketed = a.taken != nullptr && total >= TICKET_UNITS * workers;
    }
    if (total <= workers) {
        int32_t before = 0;
        for (int k = 0; k < UNIT_KINDS; k++) {
            const int32_t units = ends[k][MAX_ROWS - 1];
            if (j == 0) {
                first[k] = min(max(me - before, 0), units);
                last[k] = min(max(me + 1 - before, 0), units);
            }
            if (ends_of_workers != nullptr && j < workers) {
                ends_of_workers[k * MAX_WORKERS + j] = min(max(j + 1 - before, 0), units);
            }
            before += units;
        }
        return;
    }
    int turn = 0;
    uint64_t all = 0, mine = 0; // they are the work of all workers, and of workers 0 .. j
    for (int i = 0; i < UNIT_KINDS; i++) {
        const int k = (PATHS + i) % UNIT_KINDS;
        const int32_t units = ends[k][MAX_ROWS - 1];
        if (j == 0) {
            first[k] = last[k] = 0;
        }
        if (units == 0) {
            if (ends_of_workers != nullptr && j < workers) {
                ends_of_workers[k * MAX_WORKERS + j] = 0;
            }
            continue;
        }
        const int region = region_of_kind(k);
        const int tiles =
            k == PATHS ? max(path_tiles[2], path_tiles[3]) : (1 << chunk_region(region).shift) / TILE_KEYS;
        const uint32_t cost = uint32_t(tiles * TILE_COST + unit_cost(a.T) + (k == PATHS ? PATH_COST : 0));
        all += uint64_t(units) * cost;
        int32_t n = units;
        if (j < workers - 1) {
            const uint64_t share = all * uint32_t(j + 1), has = mine * uint32_t(workers);
            // in F32, which is exact up to 2^24 and short: beyond it some worker has a unit more
            n = share > has ? min(units, int32_t(float(share - has) / float(cost * workers))) : 0;
        }
#pragma unroll
        for (int d = 1; d < WARP; d *= 2) {
            const int32_t before = __shfl_up_sync(~0u, n, d);
            n = lane >= d ? max(n, before) : n;
        }
        if (lane == WARP - 1 && warp < MAX_WORKERS / WARP) {
            done[turn][warp] = n;
        }
        __syncthreads();
        for (int w = 0; w < min(warp, MAX_WORKERS / WARP); w++) {
            n = max(n, done[turn][w]);
        }
        turn ^= 1;
        mine += uint64_t(n) * cost;
        if (j + 1 == me) {
            first[k] = n;
        }
        if (j == me) {
            last[k] = n;
        }
        if (ends_of_workers != nullptr && j < workers) {
            ends_of_workers[k * MAX_WORKERS + j] = n;
        }
    }
}

// Makes the plan with all threads of a block, which are MAX_WORKERS at least. A unit has at most most_pairs
// pairs.
__device__ void Plan::make(const AttentionParams &a, int most_pairs, int32_t *ends_of_workers) {
    const int tid = threadIdx.x;
    read(a);
    __syncthreads();
    if (tid < MAX_ROWS) {
        const uint64_t bits = (uint64_t(begins[1]) << 32 | begins[0]) << (MAX_ROWS - 1 - tid);
        path[tid] = uint8_t(bits == 0 ? 0 : tid - __clzll(int64_t(bits)));
    }
    count(a, a.row_of(0, most_pairs));
    __syncthreads();
    for (int u = tid; u < UNIT_KINDS * WARP;
         u += int(blockDim.x)) { // the second warp's sums go on from the first's
        ends[u / WARP][WARP + u % WARP] += ends[u / WARP][WARP - 1];
    }
    __syncthreads();
    share_out(a, ends_of_workers);
    __syncthreads();
}

// MadePlan is a plan that all blocks of a layer take.
struct alignas(16) MadePlan {
    Plan plan; // its first and last are not used
    // Worker i's units of a kind end at its entry, and those of worker i + 1 begin there.
    int32_t ends_of_workers[UNIT_KINDS][MAX_WORKERS];
    int32_t taken[PLAN_LAYERS]; // it counts the units that the blocks of a layer have taken one by one
};

// Copies a plan. It is read past the caches of a multiprocessor, which may have an earlier step's.
__device__ void Plan::take(const MadePlan &made) {
    constexpr int WORDS = int(offsetof(Plan, first) + 15) / 16;
    static_assert(sizeof(Plan) % 16 == 0 && alignof(MadePlan) == 16, "it is copied in words of 16 bytes");
    const int me = int(blockIdx.x);
    const int k = int(threadIdx.x) - int(blockDim.x) + UNIT_KINDS; // the last threads take shares
    int32_t begin = 0, end = 0;
    if (k >= 0) {
        begin = me > 0 ? __ldcg(&made.ends_of_workers[k][me - 1]) : 0;
        end = __ldcg(&made.ends_of_workers[k][me]);
    }
    for (int i = int(threadIdx.x); i < WORDS; i += int(blockDim.x)) {
        reinterpret_cast<uint4 *>(this)[i] = __ldcg(reinterpret_cast<const uint4 *>(&made.plan) + i);
    }
    __syncthreads();
    if (k >= 0) {
        first[k] = begin;
        last[k] = end;
    }
    __syncthreads();
}

// Takes the step's plan, or makes it.
__device__ void Plan::have(const AttentionParams &a, int most_pairs) {
    if (a.plan != nullptr) {
        take(*static_cast<const MadePlan *>(a.plan));
    } else {
        make(a, most_pairs, nullptr);
    }
}

} // namespace
} // namespace luce
