// Checks how attention's work is shared out (native/kernels/attention/plan.cuh): every tile of every group is some
// block's once, and no block has much more than its share. And when a prompt's ranges of positions get blocks of their own.
#include "attention/prefill.h"
#include "attention/units.cuh"
#include "harness.h"

namespace luce {
namespace {

constexpr int PAIRS = 96, BLOCKS = 132, THREADS = 256; // an H200 has these

// Has what blocks have found: tiles by block, and for each unit of {group, chunk, first row} how many have it.
struct Found {
    int32_t *tiles; // [BLOCKS]
    int32_t *units; // [MAX_ROWS][groups][chunks]
};

__global__ void plan_kernel(AttentionParams a, Found found) {
    __shared__ Plan plan;
    plan.make(a, PAIRS, nullptr);
    if (threadIdx.x == 0) {
        int32_t tiles = 0;
        for (Cursor unit(a, plan); unit.next();) {
            tiles += (unit.end - unit.begin + TILE_KEYS - 1) / TILE_KEYS;
            atomicAdd(&found.units[(unit.row * a.groups + unit.head) * a.chunks + unit.chunk],
                      int32_t(unit.n_rows));
        }
        found.tiles[blockIdx.x] = tiles;
    }
}

// Makes the plan for all blocks, as attention's own kernel does. Blocks may take units one by one.
__global__ void make_kernel(AttentionParams a, MadePlan *to) {
    __shared__ MadePlan made;
    made.plan.make(a, PAIRS, &made.ends_of_workers[0][0]);
    if (threadIdx.x < PLAN_LAYERS) {
        made.taken[threadIdx.x] = 0;
    }
    __syncthreads();
    for (int i = int(threadIdx.x); i < int(sizeof(MadePlan) / 4); i += THREADS) {
        reinterpret_cast<uint32_t *>(to)[i] = reinterpret_cast<const uint32_t *>(&made)[i];
    }
}
// Counts the blocks to whom that plan says something else than their own one.
__global__ void take_kernel(AttentionParams a, const MadePlan *made, int32_t *differ) {
    __shared__ Plan own, taken;
    own.make(a, PAIRS, nullptr);
    taken.take(*made);
    if (threadIdx.x == 0) {
        bool same = own.rows_of_unit() == taken.rows_of_unit();
        for (int k = 0; k < UNIT_KINDS; k++) {
            same = same && own.first[k] == taken.first[k] && own.last[k] == taken.last[k];
        }
        Cursor x(a, own), y(a, taken);
        bool more = true;
        while (same && more) {
            more = x.next();
            same =
                more == y.next() &&
                (!more || (x.row == y.row && x.n_rows == y.n_rows && x.head == y.head && x.chunk == y.chunk &&
                           x.begin == y.begin && x.end == y.end && x.low == y.low && x.seq() == y.seq()));
        }
        if (!same) {
            atomicAdd(differ, 1);
        }
    }
}

// Counts units that blocks take one by one, and sets `ticketed` where they do.
__global__ void ticket_kernel(AttentionParams a, MadePlan *made, Found found, int32_t *ticketed) {
    __shared__ Plan plan;
    plan.take(*made);
    if (threadIdx.x > 0 || !plan.ticketed) {
        return;
    }
    *ticketed = 1;
    int32_t *taken = &made->taken[PLAN_LAYERS - 1];
    for (Cursor unit(a, plan); unit.go_to(atomicAdd(taken, 1));) {
        if (unit.begin < unit.end) {
            atomicAdd(&found.units[(unit.row * a.groups + unit.head) * a.chunks + unit.chunk],
                      int32_t(unit.n_rows));
        }
    }
}

struct Load {
    double mean;
    int32_t most;
    bool one_by_one;
};

// Lets blocks take units one by one, where the plan says so, and expects that they are these. Returns whether it says so.
bool take_units(const AttentionParams &a, const Device<MadePlan> &made, const Ints &expected) {
    Device<int32_t> units(expected.size()), ticketed(1);
    units.set(Ints(units.n, 0));
    ticketed.set({0});
    ticket_kernel<<<BLOCKS, THREADS, 0, stream>>>(a, made.p, Found{nullptr, units.p}, ticketed.p);
    must(cudaStreamSynchronize(stream));
    const bool one_by_one = ticketed.get()[0] != 0;
    expect(!one_by_one || units.get() == expected,
           "attention's plan: what blocks take one by one are the units that they share");
    return one_by_one;
}

// Expects that units have each chunk of each group once for all rows that see it.
void expect_once(const AttentionParams &a, const Ints &past, int rows, const Ints &rows_of_units) {
    const std::string what = std::to_string(past.size()) + " sequences of " + std::to_string(past[0]) +
                             " .., " + std::to_string(rows) + " rows";
    Ints of_chunk(size_t(a.groups) * a.chunks); // it counts the rows of all units of a chunk
    for (size_t i = 0; i < rows_of_units.size(); i++) {
        of_chunk[i % of_chunk.size()] += rows_of_units[i];
    }
    bool once = true;
    for (int c = 0; c < a.chunks; c++) {
        int expected = 0;
        for (const int n : past) {
            for (int r = 0; r < rows; r++) {
                expected += c <= chunk_at(n + r);
            }
        }
        for (int g = 0; g < a.groups;
             g++) { // a path's rows share its chunks, and an early one sees no later chunk
            once = once && of_chunk[size_t(g) * a.chunks + c] >= expected &&
                   (of_chunk[size_t(g) * a.chunks + c] == expected || rows > 1);
        }
    }
    expect(once, "attention's plan: each chunk of each group is done once for " + what);
}

// Plans sequences of `past` committed positions each, with a chain of `rows` rows behind them.
Load load_of(const Ints &past, int rows) {
    AttentionParams a{};
    StepCtl host = blank_ctl();
    a.T = rows * int(past.size());
    a.H = 24;
    a.pool.Hkv = a.groups = 4;
    a.groups_of_head = 1;
    a.G = 6;
    a.per_G = (65536 + a.G - 1) / a.G;
    a.workers = BLOCKS;
    int longest = 0;
    host.n_seqs = int(past.size());
    host.n_rows = a.T;
    for (size_t i = 0; i < past.size(); i++) {
        SeqCtl &seq = host.seqs[i];
        seq.row0 = int(i) * rows;
        seq.n_rows = rows;
        seq.n_past = past[i];
        longest = std::max(longest, past[i] + rows);
        for (int r = 0; r < rows; r++) {
            RowCtl &row = host.rows[seq.row0 + r];
            row.seq = int(i);
            row.parent = r == 0 ? -1 : seq.row0 + r - 1;
            row.position = past[i] + r;
        }
    }
    a.chunks = chunk_at(longest) + 1;
    Device<StepCtl> ctl(1);
    ctl.set({host});
    a.ctl = ctl.p;
    Device<int32_t> tiles(BLOCKS), units(size_t(MAX_ROWS) * a.groups * a.chunks);
    units.set(Ints(units.n, 0));
    plan_kernel<<<BLOCKS, THREADS, 0, stream>>>(a, Found{tiles.p, units.p});
    must(cudaStreamSynchronize(stream));
    Device<MadePlan> made(1);
    Device<int32_t> differ(1);
    differ.set({0});
    a.taken = made.p->taken; // it is not read
    make_kernel<<<1, THREADS, 0, stream>>>(a, made.p);
    take_kernel<<<BLOCKS, THREADS, 0, stream>>>(a, made.p, differ.p);
    must(cudaStreamSynchronize(stream));
    expect(differ.get()[0] == 0,
           "attention's plan: blocks take other units of one made for all than of their own");
    const Ints found = tiles.get(), rows_of_units = units.get();
    const bool one_by_one = take_units(a, made, rows_of_units);
    expect_once(a, past, rows, rows_of_units);
    Load load{0, 0, one_by_one};
    for (const int32_t n : found) {
        load.mean += double(n) / BLOCKS;
        load.most = std::max(load.most, n);
    }
    return load;
}

} // namespace
} // namespace luce

// A block's load is even to about its smallest unit, which has two tiles, whatever is left behind the last whole chunk.
void check_prefill_apart() {
    const auto apart = [](int T, int64_t n_kv, int multiprocessors) {
        luce::PrefillAttentionArgs a{};
        a.T = T;
        a.H = 24;
        a.Hkv = 4;
        a.D = 256;
        a.n_kv = n_kv;
        luce::DeviceLimits device;
        device.multiprocessors = multiprocessors;
        return luce::prefill_apart(a, device);
    };
    // 24 blocks of a 3090's 164 at once, and of an H200's 264, have all keys of 16 rows; 768 fill three rounds with 2048 rows.
    expect(apart(16, 8448, 132) && apart(16, 8448, 82) && apart(256, 8448, 132),
           "few rows of many keys have ranges apart");
    expect(!apart(2048, 8448, 132) && !apart(16, 2048, 132), "rows that fill a GPU, or few keys, have none");
    expect(!apart(2048, 262144, 132), "ranges leave no more than there is room for");
}

void check_attention_plan(bool all) {
    check_prefill_apart();
    double worst = 0;
    int at = 0;
    for (int n = 0; n <= 262000; n += 1 + pick(all ? 2000 : 16000)) {
        const luce::Load load = luce::load_of({n}, 1);
        if (n >= 12000 &&
            load.most - load.mean > worst) { // fewer tiles than that leave nothing to even out with
            worst = load.most - load.mean;
            at = n;
        }
    }
    for (const int n : {100000, 102400, 131000, 241599}) {
        const luce::Load load = luce::load_of({n}, 1);
        expect(load.most <= load.mean + 2.5, "attention's plan: " + std::to_string(load.most) +
                                                 " tiles of a block, " + std::to_string(load.mean) +
                                                 " on average, at " + std::to_string(n));
    }
    expect(luce::load_of(Ints(8, 4096), 1).one_by_one && luce::load_of({300000}, 64).one_by_one &&
               !luce::load_of({102400}, 1).one_by_one,
           "attention's plan: blocks take units one by one where they have many");
    expect(worst <= 2.5, "attention's plan: a block has " + std::to_string(worst) + " tiles too many at " +
                             std::to_string(at));
    for (const int rows : {2, 8, 16}) {
        const luce::Load load = luce::load_of({100000, 3000, 40000, 777}, rows);
        expect(load.most <= load.mean * 1.15, "attention's plan: " + std::to_string(load.most) + " tiles, " +
                                                  std::to_string(load.mean) +
                                                  " on average, of four sequences");
    }
}
