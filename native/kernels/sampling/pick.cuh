// Has the last part of choose.cu: the choice among what the bins leave open, or among the few ids that top-k may keep.
#pragma once

#include "sampling/choose.cuh"

namespace luce {
namespace {

// Returns an id's place in the order. A better one has a larger place, and all are below 2^56.
__device__ uint64_t place_of(float x, int32_t id) {
    return uint64_t(order_key(x)) << 24 | uint32_t(CHOICE_MAX_IDS - 1 - id);
}

struct Pick {
    Bins<PICK_THREADS> bins;
    uint64_t place[CHOICE_LIST], mass[CHOICE_LIST];
    int32_t bin[CHOICE_LIST];
    unsigned long long digits[256], total;
    uint64_t found; // it is the place of the last id that is kept
    uint64_t rest; // it is what the search still needs
};

// Picks from the list in shared memory, where a thread has an id and counts its rank.
__device__ void pick_short(Pick &s, const Row &row, const Cut &cut, uint32_t n, float x_max, Best &best) {
    const uint32_t i = threadIdx.x;
    const bool mine = i < n;
    const ChoicePart entry = mine ? row.out->list[i] : ChoicePart{0, -INFINITY};
    const float z = z_of(half_gap(entry.value, x_max), row.c.scale);
    const int bin = mine ? bin_of(z) : -1;
    s.place[i] = place_of(entry.value, entry.id);
    s.mass[i] = mine ? mass_of(z) : 0;
    s.bin[i] = bin;
    if (i == 0) {
        s.total = cut.k_open ? s.bins.mass_below(cut.k_bin) : s.bins.mass[cut.k_bin];
    }
    __syncthreads();
    bool kept = mine;
    if (cut.k_open && bin == cut.k_bin) {
        uint32_t rank = s.bins.count_below(bin);
        for (uint32_t other = 0; other < n; other++) {
            rank += s.bin[other] == bin && s.place[other] > s.place[i];
        }
        kept = rank < uint32_t(row.c.top_k);
        if (kept) {
            atomicAdd(&s.total, static_cast<unsigned long long>(s.mass[i]));
        }
    }
    __syncthreads();
    if (mine && !kept) {
        s.bin[i] = -1;
    }
    __syncthreads();
    if (row.c.top_p < TOP_P_ONE && kept) {
        const uint64_t need = needed_mass(s.total, row.c.top_p);
        const int last = s.bins.reaches(s.bins.mass, need);
        uint64_t before = s.bins.mass_below(last);
        for (uint32_t other = 0; bin == last && other < n; other++) {
            before += s.bin[other] == bin && s.place[other] > s.place[i] ? s.mass[other] : 0;
        }
        kept = bin < last || (bin == last && before < need);
    }
    if (kept) {
        row.see(best, entry.value, x_max, entry.id);
    }
}

// Searches the ids of one bin from place `least` on, in order, for the last one of the first whose weights
// (masses, or 1 each) reach `need`. Every thread gets its place. It goes digit by digit, best first.
__device__ uint64_t search(Pick &s, const Row &row, int64_t n, float x_max, int bin, uint64_t least,
                           bool masses, uint64_t need) {
    if (threadIdx.x == 0) {
        s.found = 0;
        s.rest = need;
    }
    for (int shift = 48; shift >= 0; shift -= 8) {
        __syncthreads();
        if (threadIdx.x < 256) {
            s.digits[threadIdx.x] = 0;
        }
        __syncthreads();
        const uint64_t above = s.found >> (shift + 8);
        each<false, PICK_THREADS>(row.x, {0, int32_t(n)}, [&](const float (&v)[4], int32_t id) {
            for (int j = 0; j < 4; j++) {
                const float z = z_of(half_gap(v[j], x_max), row.c.scale);
                const uint64_t place = place_of(v[j], id + j);
                const bool there =
                    z >= Z_MIN && bin_of(z) == bin && place >= least && place >> (shift + 8) == above;
                add_by_warp(there ? int(place >> shift & 255) : -1,
                            !there   ? 0
                            : masses ? mass_of(z)
                                     : 1,
                            nullptr, s.digits);
            }
        });
        __syncthreads();
        const uint64_t rest = s.rest, mine = threadIdx.x < 256 ? s.digits[255 - threadIdx.x] : 0;
        const uint64_t reached = block_scan<PICK_THREADS>(mine, s.bins.scratch);
        if (reached >= rest && reached - mine < rest) {
            s.found |= uint64_t(255 - threadIdx.x) << shift;
            s.rest = rest - (reached - mine);
        }
    }
    __syncthreads();
    return s.found;
}

// Does the same as pick_short over the row itself.
__device__ void pick_long(Pick &s, const Row &row, const Cut &cut, int64_t n, float x_max, Best &best) {
    uint64_t k_least = 0, p_least = 0;
    int last = cut.k_bin;
    if (threadIdx.x == 0) {
        s.total = cut.k_open ? s.bins.mass_below(cut.k_bin) : s.bins.mass[cut.k_bin];
    }
    if (cut.k_open) {
        k_least = search(s, row, n, x_max, cut.k_bin, 0, false,
                         uint64_t(row.c.top_k) - s.bins.count_below(cut.k_bin));
    }
    const auto in_top_k = [&](int bin, uint64_t place) {
        return bin < cut.k_bin || (bin == cut.k_bin && place >= k_least);
    };
    if (row.c.top_p < TOP_P_ONE) {
        if (cut.k_open) {
            each<false, PICK_THREADS>(row.x, {0, int32_t(n)}, [&](const float (&v)[4], int32_t id) {
                for (int j = 0; j < 4; j++) {
                    const float z = z_of(half_gap(v[j], x_max), row.c.scale);
                    const bool there =
                        z >= Z_MIN && bin_of(z) == cut.k_bin && place_of(v[j], id + j) >= k_least;
                    add_by_warp(there ? 0 : -1, there ? mass_of(z) : 0, nullptr, &s.total);
                }
            });
        }
        __syncthreads();
        const uint64_t need = needed_mass(s.total, row.c.top_p);
        last = s.bins.reaches(s.bins.mass, need);
        p_least = search(s, row, n, x_max, last, last == cut.k_bin ? k_least : 0, true,
                         need - s.bins.mass_below(last));
    }
    each<false, PICK_THREADS>(row.x, {0, int32_t(n)}, [&](const float (&v)[4], int32_t id) {
        for (int j = 0; j < 4; j++) {
            const float z = z_of(half_gap(v[j], x_max), row.c.scale);
            if (!(z >= Z_MIN)) {
                continue;
            }
            const int bin = bin_of(z);
            const uint64_t place = place_of(v[j], id + j);
            if (bin >= cut.sure && bin <= last && in_top_k(bin, place) && (bin < last || place >= p_least)) {
                row.see(best, v[j], x_max, id + j);
            }
        }
    });
}

// Picks from the few ids in shared memory that have all among them that top-k keeps.
__device__ void pick_few(Pick &s, const Row &row, uint32_t n, float x_max, Best &best) {
    const uint32_t i = threadIdx.x, k = uint32_t(row.c.top_k);
    const bool mine = i < n;
    const ChoicePart entry = mine ? row.out->list[i] : ChoicePart{0, -INFINITY};
    const float z = z_of(half_gap(entry.value, x_max), row.c.scale);
    s.place[i] = place_of(entry.value, entry.id);
    s.mass[i] = mine ? mass_of(z) : 0;
    __syncthreads();
    uint32_t rank = 0;
    uint64_t before = 0;
    for (uint32_t other = 0; mine && other < n; other++) {
        const bool better = s.place[other] > s.place[i];
        rank += better;
        before += better ? s.mass[other] : 0;
    }
    if (mine && rank == min(k, n) - 1) { // it is the last one
        s.total = before + s.mass[i];
    }
    __syncthreads();
    const bool kept = mine && rank < k && z >= Z_MIN;
    if (kept && (row.c.top_p == TOP_P_ONE || before < needed_mass(s.total, row.c.top_p))) {
        row.see(best, entry.value, x_max, entry.id);
    }
}

// Picks of a row where those few were too many for the list, as all but equal logits are: it counts all that
// was not counted.
__device__ void pick_many(Pick &s, const Row &row, int64_t n, float x_max, Best &best) {
    each<false, PICK_THREADS>(row.x, {0, int32_t(n)}, [&](const float (&v)[4], int32_t) {
        for (int j = 0; j < 4; j++) {
            const float z = z_of(half_gap(v[j], x_max), row.c.scale);
            const int bin = z >= Z_MIN ? bin_of(z) : -1;
            add_by_warp(bin, bin >= 0 ? mass_of(z) : 0, row.out->count,
                        reinterpret_cast<unsigned long long *>(row.out->mass));
        }
    });
    __threadfence();
    __syncthreads();
    s.bins.sum(*row.out);
    Cut cut = s.bins.cut(row.c);
    cut.sure = 0;
    pick_long(s, row, cut, n, x_max, best);
}

// Picks what the bins left open of a row with filters, into each thread's best of it; of a row that keeps few
// ids, all of it.
__device__ void pick_listed(const Row &row, int64_t n, float x_max, Best &best) {
    __shared__ Pick s;
    const uint32_t n_listed = row.out->n_listed;
    if (row.few(n)) {
        if (n_listed <= CHOICE_LIST) {
            pick_few(s, row, n_listed, x_max, best);
        } else {
            pick_many(s, row, n, x_max, best);
        }
        return;
    }
    s.bins.sum(*row.out);
    const Cut cut = s.bins.cut(row.c);
    if (n_listed == 0) {
        return;
    }
    if (n_listed <= CHOICE_LIST) {
        pick_short(s, row, cut, n_listed, x_max, best);
    } else {
        pick_long(s, row, cut, n, x_max, best);
    }
}

} // namespace
} // namespace luce
