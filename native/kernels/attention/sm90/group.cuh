// Has what both forms of attention on Hopper's tensor cores share: a warpgroup's instructions, and its way
// through the tiles of a unit. A unit of many pairs is computed with pairs as rows (attention/sm90/wgmma.cuh), and
// one of few pairs with keys as rows (attention/sm90/few.cuh). Both give a pair the same bits.
#pragma once

#include "attention/load.cuh"
#include "attention/sm90/instructions.cuh"

namespace luce {
namespace {

// A pair's weights are exp2(score - origin). The origin is the largest score of a tile that passed the origin before by more
// than this, so that it seldom moves. No weight is above 2^SLACK.
constexpr float SLACK = 8;

// That of the first group is also barrier_of(GROUP_THREADS): the same threads meet there.
__device__ void group_barrier(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(3 + group), "n"(GROUP_THREADS) : "memory");
}

// A GroupUnit is a warpgroup's share of a unit, and takes its tiles from the ring.
template <int D, int TYPE, bool AHEAD> struct GroupUnit {
    using L = Layout<D, TYPE, true, AHEAD>;
    using Source = Taker<L, AHEAD>;
    static constexpr int KEYS = L::KEYS, PANELS = D / 64;
    static_assert(KEYS == 64, "a tile of scores is a panel");

    const AttentionParams &a;
    const Plan &plan;
    Source &ring;
    const UnitInfo unit;
    const int group = threadIdx.x / GROUP_THREADS, tid = threadIdx.x % GROUP_THREADS, lane = tid % WARP;
    const int threads; // these compute the unit: of both groups, or of this one alone
    const int alone = threads == GROUP_THREADS ? group : 0; // it says whose barrier and marks are used
    uint8_t *const shared = ring.shared;
    const uint32_t base = shared_address(shared);
    uint32_t turn = 0; // here the group says that the other one may begin with the next unit

    __device__ GroupUnit(const AttentionParams &args, const Plan &p, Source &taker, const UnitInfo &u)
        : a(args), plan(p), ring(taker), unit(u),
          threads(!AHEAD && u.n_rows * args.G > GROUP_PAIRS ? 2 * GROUP_THREADS : GROUP_THREADS) {}

    // Returns the first and the last key that a pair sees.
    __device__ int2 seen(int pair) const {
        const int32_t to = plan.position[min(a.row_of(unit.row, pair), MAX_ROWS - 1)];
        return {lowest_visible(to, a.first, a.window), to};
    }
    // Says whether a row may not see all of a tile.
    __device__ bool hides(int32_t first) const {
        return a.window > 0 || first < a.first || first + KEYS > unit.past;
    }
    __device__ float cap(float score) const { // this is tanh, to 2^-22 absolutely
        const float power = exp2_fast(score * a.score_scale * 2.88539008f);
        return (1.0f - __fdividef(2.0f, power + 1.0f)) * a.score_cap;
    }
    // Returns what brings scores to units of log2.
    __device__ float scale() const { return a.softcap > 0 ? 1.0f : a.score_scale; }
    __device__ static float origin(float most) { return most == -INFINITY ? 0.0f : most; }

    // Returns the next slot's K (0) or V (1) as F16, where it is. A packed slot is left.
    __device__ int take(int which) {
        ring.wait();
        if constexpr (AHEAD) {
            return ring.at();
        } else if constexpr (!L::PACKED) {
            show_to_wgmma();
            return ring.at();
        } else {
            const int at = L::UNPACKED + which * L::TILE;
            barrier(threads); // all have left the tile before
            unpack<TYPE, L>(shared + ring.at(), shared + at, group * GROUP_THREADS + tid, threads);
            show_to_wgmma();
            ring.leave();
            barrier(threads);
            return at;
        }
    }
    __device__ void leave() {
        if (!L::PACKED || AHEAD) {
            ring.leave();
        }
    }
    // Lets the other group begin as soon as the K of the unit's last tile is there: its own first slot comes next but one.
    __device__ void pass_on(int32_t first) const {
        if (turn != 0 && first + KEYS >= unit.end) {
            __syncwarp();
            warp_arrive(turn, lane);
        }
    }
    // Calls see() where V has values that are not finite: it looks who sees their keys.
    template <typename See> __device__ void clean(int values_at, See see) {
        if (L::clean_values(shared, values_at, (threads > GROUP_THREADS ? group * GROUP_THREADS : 0) + tid,
                            threads, alone)) {
            see();
            barrier(threads, alone); // all have read the marks
        }
    }
    template <int N> __device__ static void pin(float (&sum)[1][4], float (&o)[PANELS][N][4]) {
        wgmma_pin(sum);
#pragma unroll
        for (int i = 0; i < PANELS; i++) {
            wgmma_pin(o[i]);
        }
    }
    // Runs either form's unit, whose base this is.
    template <typename Unit> __device__ void run(Unit &form, uint32_t handed_over_at) {
        turn = handed_over_at;
#pragma unroll 1
        for (int32_t first = unit.begin; first < unit.end; first += KEYS) {
            form.run_tile(first);
        }
        if (L::PACKED && threads > GROUP_THREADS) {
            barrier(threads); // the next unit may be one group's, which unpacks where the other still reads
        }
        form.store();
    }
};

} // namespace
} // namespace luce
