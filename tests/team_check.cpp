// Says whether a team's helpers all have a place from the beginning, and keep it through jobs of long and unequal parts,
// as a prefill's are. Parts sleep, so that what else the machine does changes little.
#include "team.h"

#include <chrono>
#include <cstdio>
#include <mutex>
#include <set>
#include <thread>

// Runs a job whose part i takes `times[i % 3]` milliseconds, and returns whether all threads had a part in it.
static bool all_took_part(luce::Team &team, int n_parts, const int *times) {
    std::mutex mutex;
    std::set<std::thread::id> seen;
    team.run(n_parts, [&](int part) {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            seen.insert(std::this_thread::get_id());
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(times[part % 3]));
    });
    return int(seen.size()) == team.n_threads();
}

// A helper may come late to a job or two, but one without a place never comes. There are many, so that some start before
// the others are made.
static bool all_have_places() {
    constexpr int THREADS = 48, JOBS = 10, TIMES[] = {10, 10, 10};
    luce::Team team(THREADS);
    bool all = false;
    for (int job = 0; job < JOBS && !all; job++) {
        all = all_took_part(team, THREADS, TIMES);
    }
    return all;
}

static bool all_stay() {
    constexpr int THREADS = 4, JOBS = 40, COUNTED = 20, TIMES[] = {3, 5, 7};
    luce::Team team(THREADS);
    int full = 0;
    for (int job = 0; job < JOBS; job++) {
        const bool all = all_took_part(team, 4 * THREADS, TIMES);
        full += job >= JOBS - COUNTED && all;
    }
    printf("all had a part in %d of %d jobs\n", full, COUNTED);
    return full > COUNTED / 2;
}

int main() {
    constexpr int TEAMS = 10;
    for (int i = 0; i < TEAMS; i++) {
        if (!all_have_places()) {
            printf("not all had a part in the first jobs of team %d\n", i);
            return 1;
        }
    }
    // Where the machine keeps a thread from running for long, a team is right to let helpers go. So one of a few has to
    // keep them.
    for (int i = 0; i < TEAMS / 2; i++) {
        if (all_stay()) {
            return 0;
        }
    }
    return 1;
}
