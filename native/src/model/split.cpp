#include "model/split.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace luce {

void copy_slice(const Slice &slice, const uint8_t *whole, uint64_t begin, uint64_t n, uint8_t *to) {
    const uint64_t piece = slice.piece == 0 ? begin + n : slice.piece;
    for (uint64_t at = begin, end = begin + n; at < end;) {
        const uint64_t some = std::min(end - at, piece - at % piece);
        memcpy(to, whole + slice.first + at / piece * slice.step + at % piece, size_t(some));
        to += some;
        at += some;
    }
}

// Gives each device, from the first on, as many layers as fill it up to a part of what is free. Returns whether that is enough
// for all of them.
static bool fills(const Shares &s, double part, std::vector<uint32_t> &layers) {
    const size_t n = s.free.size();
    size_t layer = 0;
    layers.assign(n, 0);
    for (size_t i = 0; i < n; i++) {
        double used = double((i == 0 ? s.first : 0) + (i + 1 == n ? s.last : 0));
        const size_t left_for_others = n - 1 - i;
        while (layer + left_for_others < s.layers.size() &&
               (layers[i] == 0 || used + double(s.layers[layer]) <= part * double(s.free[i]))) {
            used += double(s.layers[layer++]);
            layers[i]++;
        }
        if (used > part * double(s.free[i])) {
            return false;
        }
    }
    return layer == s.layers.size();
}

static std::vector<uint32_t> share_out_each(const Shares &s) {
    std::vector<uint32_t> layers, best;
    double low = 0, high = 1;
    while (!fills(s, high, best) &&
           high < 1e18) { // beyond 1 it does not fit, and then each lacks a like part
        low = high;
        high *= 2;
    }
    if (high >= 1e18) { // a device has nothing free
        best.assign(s.free.size(), uint32_t(s.layers.size() / s.free.size()));
        best.back() += uint32_t(s.layers.size() % s.free.size());
        return best;
    }
    for (int i = 0; i < 50; i++) {
        const double middle = (low + high) / 2;
        if (fills(s, middle, layers)) {
            high = middle;
            best = layers;
        } else {
            low = middle;
        }
    }
    return best;
}

std::vector<uint32_t> share_out(const Shares &s) {
    Shares parts = s;
    parts.layers.clear();
    std::vector<uint32_t> sizes; // of each part, in layers
    for (size_t il = 0; il < s.layers.size(); il++) {
        if (il > 0 && !s.joined.empty() && s.joined[il]) {
            parts.layers.back() += s.layers[il];
            sizes.back()++;
        } else {
            parts.layers.push_back(s.layers[il]);
            sizes.push_back(1);
        }
    }
    std::vector<uint32_t> layers;
    auto next = sizes.begin();
    for (const uint32_t n : share_out_each(parts)) {
        layers.push_back(std::accumulate(next, next + n, 0u));
        next += n;
    }
    return layers;
}

std::vector<bool> joined_layers(uint32_t n_layer, const std::vector<uint32_t> &cells_of,
                                uint32_t read_at_end) {
    std::vector<bool> joined(n_layer, false);
    for (uint32_t il = 0; il < cells_of.size(); il++) {
        std::fill(joined.begin() + cells_of[il] + 1, joined.begin() + il + 1, true);
    }
    std::fill(joined.begin() + std::min(read_at_end + 1, n_layer), joined.end(), true);
    return joined;
}

} // namespace luce
