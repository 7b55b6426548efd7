// Goes from unit to unit of a plan (attention/plan.cuh). Those who load a block's cells walk over its units, and tell those who
// compute, who may be some tiles behind.
#pragma once

#include "attention/plan.cuh"
#include "common/ring.cuh"

namespace luce {
namespace {

// UnitInfo says what there is to do for a unit.
struct alignas(16) UnitInfo {
    int32_t row, n_rows, head,
        chunk; // `head` is the group of query heads; there is no unit where n_rows is 0
    int32_t begin, end; // the unit has keys begin .. end - 1
    int32_t past; // it is the sequence's n_past
    int32_t hides; // it is 1 where a row may not see what another does

    // Says whether cells of the tile at `first` may be loaded that some row of the unit does not see.
    __device__ bool mixed(int32_t first, int keys, int32_t window) const {
        return hides != 0 && (first + keys > past || (window > 0 && first < past + MAX_ROWS - window));
    }
};

// A cursor walks over units: kind by kind, and in each segment group by group the chunks in order. So a
// worker's own units mostly share their queries and follow each other in memory. Where blocks take units one by one, it walks
// chunk by chunk over the groups, so that several blocks read the heads of one page at a time, which lie beside each other.
// Tiles of one chunk are next to each other, so that one reads what the other has brought into L2.
struct Cursor {
    const AttentionParams &a;
    const Plan &plan;
    int kind = 0, seg = 0; // seg counts among those of the kind
    int32_t i, stop; // they count units of the kind
    // These say which unit it is.
    int row, n_rows, head; // `head` is the group of query heads
    int32_t chunk, begin, end, low; // the last three are keys; no row sees those below `low`

    // It is ahead of the worker's first unit.
    __device__ Cursor(const AttentionParams &args, const Plan &p)
        : a(args), plan(p), i(p.first[0] - 1), stop(p.last[0]) {}
    // Goes to the worker's next unit. It returns false where there is none.
    __device__ bool next() {
        i++;
        while (!find()) {
            if (kind == UNIT_KINDS - 1) {
                return false;
            }
            kind++;
            seg = 0;
            i = plan.first[kind];
            stop = plan.last[kind];
        }
        return true;
    }
    // Goes to the unit of this number among all, which is larger than the one before. It returns false where there is none.
    // The unit may have no keys: then begin is end.
    __device__ bool go_to(int32_t number) {
        for (int k = 0; k < UNIT_KINDS; k++) {
            const int32_t units = plan.ends[k][MAX_ROWS - 1];
            if (number < units) {
                seg = k == kind ? seg : 0;
                kind = k;
                i = number;
                stop = i + 1;
                find();
                return true;
            }
            number -= units;
        }
        return false;
    }
    // Goes to unit i, or to the first one after it that has keys. It returns false where there is none up to `stop`.
    __device__ bool find() {
        for (; i < stop; i++) {
            while (plan.ends[kind][seg] <= i) {
                seg++;
            }
            const Segment &s = segment();
            int32_t first_chunk;
            const int32_t chunks = s.chunks(kind, first_chunk),
                          at = i - (seg > 0 ? plan.ends[kind][seg - 1] : 0);
            const int32_t of_tiles = at / s.n_tiles, tile = at - of_tiles * s.n_tiles;
            const bool heads_first = plan.ticketed != 0;
            const int32_t inner = heads_first ? a.groups : chunks, of_outer = of_tiles / inner,
                          of_inner = of_tiles - of_outer * inner;
            head = heads_first ? of_inner : of_outer;
            chunk = first_chunk + (heads_first ? of_outer : of_inner);
            row = s.row + tile * s.tile_rows;
            n_rows = min(int(s.tile_rows), s.row + s.n_rows - row);
            begin = chunk_begin(chunk);
            end = chunk_begin(chunk + 1);
            low = lowest_visible(plan.n_past[s.seq], a.first, a.window);
            if (s.tail) {
                end = min(end, plan.position[row + n_rows - 1] + 1);
            }
            begin += max(low - begin, 0) / TILE_KEYS * TILE_KEYS;
            if (begin < end) {
                return true;
            }
            end = begin;
        }
        return false;
    }
    __device__ const Segment &segment() const { return plan.segment[kind == PATHS ? MAX_ROWS + seg : seg]; }
    __device__ int seq() const { return segment().seq; }
    __device__ int last_row() const { return row + n_rows - 1; }
    __device__ UnitInfo info() const {
        const int hides = (segment().tail != 0 && n_rows > 1) || a.window > 0;
        return {row, n_rows, head, chunk, begin, end, plan.n_past[seq()], hides};
    }
    // Returns the pool's row of a key of the unit. Below n_past it is where it was committed, and from there on it
    // is found by the ancestors of the last row.
    __device__ int64_t pool_row(int32_t key) const {
        const int s = seq();
        const int32_t past = plan.n_past[s];
        const int32_t at = key < past ? key : past + plan.ancestor(last_row(), key) - plan.row0[s];
        return a.pool.row(a.pages[plan.pages[s] + at / PAGE], at, a.kv_head(head));
    }
};

// Told is how those who compute hear of a block's units from those who load, who walk over them: through a ring in shared
// memory. A unit is told when the one before has all its slots, and has a tile at least. So those who compute have read the
// first of five when the last is told, also a warpgroup whose turn is not the first's, and where cells are unpacked ahead.
struct Told {
    static constexpr int N = TOLD_UNITS;
    struct Ring {
        UnitInfo unit[N];
        uint64_t there[N]; // a barrier says that the unit is there
    };
    Ring *ring;
    Place place = {};

    __device__ static void init(Ring *ring) {
        if (threadIdx.x < N) {
            barrier_init(shared_address(&ring->there[threadIdx.x]), 1);
        }
    }
    // One thread tells.
    __device__ void tell(const UnitInfo &unit) {
        ring->unit[place.i] = unit;
        barrier_arrive(shared_address(&ring->there[place.i]));
        place.next(N);
    }
    // Returns the next unit, which stays where it is until the last slot of the one after it was left.
    __device__ const UnitInfo &next() {
        const UnitInfo &unit = ring->unit[place.i];
        barrier_wait(shared_address(&ring->there[place.i]), place.parity);
        place.next(N);
        return unit;
    }
};
static_assert(sizeof(Told::Ring) == TOLD_BYTES);

} // namespace
} // namespace luce
