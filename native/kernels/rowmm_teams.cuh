// Has the rings of a block of two teams (rowmm_schedule.cuh). No warp is there to fill them: of the warps that
// take from a place in a ring, the last one to be done with it fills it again.
#pragma once

#include "rowmm_rings.cuh"
#include "rowmm_schedule.cuh"

namespace luce {

// Takes a team's units in order, as Taker does, and fills what it leaves free. A team has half of the slots.
template <typename S> struct TeamTaker {
    const RowmmParams &p;
    Rings<S> rings;
    const Schedule &plan; // it lies in shared memory
    int team, unit = 0, at = 0; // the unit in hand counts in the team's range, and `at` is the stage in hand
    Place slot, stage; // `slot` counts in the team's half

    __device__ TeamTaker(const RowmmParams &params, const Rings<S> &r, const Schedule &s, int t)
        : p(params), rings(r), plan(s), team(t) {}
    __device__ int half() const { return rings.slots / 2; }
    __device__ int slot_place() const { return team * half() + slot.i; }
    __device__ int lane() const { return threadIdx.x % WARP; }

    __device__ const uint8_t *weights() const { return rings.slot(slot_place()); }
    __device__ const uint8_t *rows() const { return rings.stage(stage.i); }
    __device__ void wait_weights() const { barrier_wait(rings.slot_full(slot_place()), slot.parity); }
    __device__ void wait_rows() {
        for (const int own = plan.stage_of({team, unit}); at < own;) {
            barrier_wait(rings.stage_full(stage.i), stage.parity);
            leave(false);
        }
        barrier_wait(rings.stage_full(stage.i), stage.parity);
    }

    __device__ void fetch_weights(int of_unit, int place) const {
        if (of_unit >= plan.units[team]) {
            return;
        }
        const int from = plan.first[team] + of_unit;
        const RowmmSegment &s = p.segments[segment_at(p, from)];
        copy_unit(s, from - s.first_unit, rings.slot_full(place), rings.slot(place));
    }
    __device__ void fetch_rows(int i, int place) const {
        if (i >= plan.stages) {
            return;
        }
        const TeamUnit u = plan.of_stage(i);
        const int from = plan.first[u.team] + u.unit;
        const RowmmSegment &s = p.segments[segment_at(p, from)];
        copy_rows(p, s, from - s.first_unit, rings.stage_full(place), rings.stage(place), rings.columns);
    }
    // Fetch what comes first. Each warp has some of it.
    __device__ void fetch_first_weights() const {
        for (int i = fragment_of_warp(); i < half(); i += FRAGMENTS) {
            fetch_weights(i, team * half() + i);
        }
    }
    __device__ void fetch_first_rows() const {
        for (int i = int(threadIdx.x) / WARP; i < S::STAGES; i += S::WARPS) {
            fetch_rows(i, i);
        }
    }
    // Leaves the stage in hand, and with `whole` the unit. The last of all warps that leave a place fills it
    // again, and none of them comes back to it before.
    __device__ void leave(bool whole) {
        const int takers = at < plan.together ? S::WARPS : FRAGMENTS;
        __syncwarp();
        if (lane() == 0) {
            uint32_t *slot_left = rings.slot_left(slot_place()), *stage_left = rings.stage_left(stage.i);
            order_in_block(); // this comes behind what the warp has read
            const bool last_of_slot = whole && int(count_in_block(slot_left)) + 1 == FRAGMENTS;
            const bool last_of_stage = int(count_in_block(stage_left)) + 1 == takers;
            if (last_of_slot || last_of_stage) {
                order_in_block(); // this comes ahead of the copies
                if (last_of_slot) {
                    *slot_left = 0;
                    fetch_weights(unit + half(), slot_place());
                }
                if (last_of_stage) {
                    *stage_left = 0;
                    fetch_rows(at + S::STAGES, stage.i);
                }
            }
        }
        at++;
        stage.next(S::STAGES);
    }
    // Leaves the unit in hand and goes to the next.
    __device__ void release(int) {
        leave(true);
        unit++;
        slot.next(half());
    }
};

} // namespace luce
