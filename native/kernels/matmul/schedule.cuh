// Says in which order the two teams of a block take their units. Each team of eight warps has a range of its
// own (matmul/plan.h), and both ranges begin at about the same k. A stage of activations is one unit's k, and
// serves the units of both teams, where team 1 begins `apart` stages after team 0. Teams that do not share
// stages take turns: each unit has a stage of its own.
//
// Both teams go through all stages, also those that have nothing for them. A barrier tells two phases apart and
// no more, so that no warp may miss one.
#pragma once

#include "matmul/plan.h"

namespace luce {

struct TeamUnit {
    int team, unit; // `unit` counts in the team's range
};

struct Schedule {
    int first[2], units[2]; // a team's range begins at unit `first` and has `units`
    int apart; // -1 says that the teams take turns
    int both; // so many turns do both have
    int stages; // it counts all

    Schedule() = default;
    __device__ Schedule(const RowmmParams &p, const RowmmPair &pair) : apart(pair.apart) {
        for (int team = 0; team < 2; team++) {
            const int range = pair.range[team];
            first[team] = range < p.ranges ? p.first[range] : 0;
            units[team] = range < p.ranges ? p.first[range + 1] - first[team] : 0;
        }
        find_stages();
    }
    __device__ void find_stages() {
        both = min(units[0], units[1]);
        stages = max(end_of(0), end_of(1));
    }

    __device__ int stage_of(TeamUnit u) const {
        return apart >= 0 ? u.unit + u.team * apart : u.unit < both ? 2 * u.unit + u.team : u.unit + both;
    }
    // Returns the stage after a team's last.
    __device__ int end_of(int team) const {
        return units[team] == 0 ? 0 : stage_of({team, units[team] - 1}) + 1;
    }
    // Returns how many stages a team has gone through with its last unit. Where both teams take turns to the end,
    // the first goes through the second's last stage too.
    __device__ int gone(int team) const {
        return end_of(team) + (apart < 0 && team == 0 && units[0] > 0 && units[0] == both ? 1 : 0);
    }
    // Returns a unit whose activations a stage has.
    __device__ TeamUnit of_stage(int i) const {
        if (apart >= 0) {
            return i < units[0] ? TeamUnit{0, i} : TeamUnit{1, i - apart};
        }
        return i < 2 * both ? TeamUnit{i % 2, i / 2} : TeamUnit{units[0] > both ? 0 : 1, i - both};
    }
};

} // namespace luce
