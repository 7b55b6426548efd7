// Has the rings of a block of two teams (matmul/schedule.cuh). Behind the teams' warps one warp fills each team's
// half of the slots, and one fills the stages, which both teams share.
#pragma once

#include "matmul/rings.cuh"
#include "matmul/schedule.cuh"

namespace luce {

// Takes a team's units in order, as Taker does. A team has half of the slots, and leaves a slot as soon as its
// weights are in registers.
template <typename S> struct TeamTaker {
    Rings<S> rings;
    int first_slot;
    int skips; // so many units are followed by a stage of the other team
    Place slot, stage; // `slot` counts in the team's half

    __device__ TeamTaker(const Rings<S> &r, const Schedule &plan, int team)
        : rings(r), first_slot(team * (r.slots >> 1)), skips(plan.apart >= 0 ? 0 : plan.both - team) {
        for (int i = plan.units[team] == 0 ? 0 : plan.stage_of({team, 0}); i > 0; i--) {
            skip();
        }
    }
    __device__ int slot_place() const { return first_slot + slot.i; }

    __device__ const uint8_t *weights() const { return rings.slot(slot_place()); }
    __device__ const uint8_t *rows() const { return rings.stage(stage.i); }
    __device__ void wait_rows() const { barrier_wait(rings.stage_full(stage.i), stage.parity); }
    __device__ void wait() const {
        barrier_wait(rings.slot_full(slot_place()), slot.parity);
        wait_rows();
    }
    __device__ void skip() {
        wait_rows();
        leave_stage(threadIdx.x % WARP);
    }
    __device__ void leave_stage(int lane) {
        __syncwarp();
        warp_arrive(rings.stage_free(stage.i), lane);
        stage.next(S::STAGES);
    }
    __device__ void release_weights(int lane) {
        __syncwarp();
        warp_arrive(rings.slot_free(slot_place()), lane);
        slot.next(rings.slots >> 1);
    }
    // Leaves the unit in hand and goes to the next.
    __device__ void release(int lane) {
        leave_stage(lane);
        if (skips > 0) {
            skips--;
            skip();
        }
    }
    // Goes through the stages that are left to the other team.
    __device__ void finish(const Schedule &plan, int team) {
        for (int left = plan.stages - plan.gone(team); left > 0; left--) {
            skip();
        }
    }
};

// Does what one lane of a filling warp does.
template <typename S> struct TeamFiller {
    const RowmmParams &p;
    const Rings<S> &rings;
    const Schedule &plan; // it lies in shared memory

    // Fills a team's slots.
    __device__ void fill_weights(int team) const {
        const int half = rings.slots >> 1, from = plan.first[team], units = plan.units[team];
        WeightsWalk walk(p, from, units);
        Place slot;
        for (int i = 0; i < units; i++) {
            const int place = team * half + slot.i;
            if (i >= half) {
                barrier_wait(rings.slot_free(place), slot.parity ^ 1);
            }
            walk.copy(rings.slot_full(place), rings.slot(place));
            slot.next(half);
        }
    }
    __device__ Rows rows_of_stage(int i) const {
        if (i >= plan.stages) {
            return {};
        }
        const TeamUnit u = plan.of_stage(i);
        const int from = plan.first[u.team] + u.unit;
        const RowmmSegment &s = p.segments[segment_at(p, from)];
        return rows_at(p, (from - s.first_unit) % s.units_k, unit_shift(s.type), rings.columns);
    }
    // Lane i < STAGES announces the rows of stage i, and copies them when they are there.
    __device__ void fill_first_rows(int i) const {
        const Rows r = rows_of_stage(i);
        announce(r, rings.stage_full(i), rings.columns);
        wait_for_previous();
        copy(r, rings.stage_full(i), rings.stage(i), rings.columns);
    }
    __device__ void fill_more_rows() const {
        Place stage;
        for (int i = S::STAGES; i < plan.stages; i++) {
            const Rows r = rows_of_stage(i); // finding them takes a while
            barrier_wait(rings.stage_free(stage.i), stage.parity);
            announce(r, rings.stage_full(stage.i), rings.columns);
            copy(r, rings.stage_full(stage.i), rings.stage(stage.i), rings.columns);
            stage.next(S::STAGES);
        }
    }
};

} // namespace luce
