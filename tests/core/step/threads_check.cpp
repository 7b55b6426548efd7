// Says whether a team runs each part of a job once, whether its helpers sleep when there is none, and whether they all have
// a place from the beginning, and keep it through jobs of long and unequal parts, as a prefill's are. Those parts sleep, so that what else the machine does
// changes little.
#include "step/threads.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

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

// Jobs follow each other at once, and after times in which helpers fall asleep. In some of them a part throws.
static bool each_part_runs_once(int n_threads) {
    constexpr int JOBS = 3000, PAUSES = 500, MOST = 70;
    luce::Team team(n_threads);
    std::vector<std::atomic<int>> runs(MOST);
    for (int job = 0; job < JOBS; job++) {
        const int n_parts = job * 7 % MOST + 1, throws = job % 5 == 0 ? job % n_parts : -1;
        for (std::atomic<int> &run : runs) {
            run = 0;
        }
        bool threw = false;
        try {
            team.run(n_parts, [&](int part) {
                runs[size_t(part)]++;
                if (part == throws) {
                    throw std::runtime_error("a part that throws");
                }
            });
        } catch (const std::runtime_error &) {
            threw = true;
        }
        bool right = threw == (throws >= 0);
        for (int part = 0; part < MOST; part++) {
            // Where nobody helps, what comes behind a part that throws is not run.
            const bool left_out = threw && part > throws && runs[size_t(part)] == 0;
            right = right && (left_out || runs[size_t(part)] == (part < n_parts ? 1 : 0));
        }
        if (!right) {
            printf("job %d of %d parts on %d threads went wrong\n", job, n_parts, n_threads);
            return false;
        }
        if (job % PAUSES == 0) {
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
    }
    return true;
}

// Helpers wait for a job with their eyes open, but not for long.
static bool all_sleep_at_last() {
    constexpr int THREADS = 4;
    luce::Team team(THREADS);
    for (int job = 0; job < 100; job++) {
        team.run(THREADS, [](int) {});
    }
    const std::clock_t before = std::clock();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const double ran = double(std::clock() - before) / CLOCKS_PER_SEC;
    printf("helpers without a job ran for %.1f ms\n", 1000 * ran);
    return ran < 0.02;
}

int main() {
    for (const int n_threads : {1, 2, 3, 8, 20}) {
        if (!each_part_runs_once(n_threads)) {
            return 1;
        }
    }
    constexpr int TEAMS = 10;
    if (!all_sleep_at_last()) {
        return 1;
    }
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
