#include "engine/lookup.h"

#include <algorithm>

namespace luce {

static uint32_t table_size(uint32_t most) {
    uint32_t size = 1u << 10;
    while (size < most && size < (1u << 31)) {
        size *= 2;
    }
    return size;
}

Lookup::Lookup(uint32_t most) : newest_(table_size(most), 0) {
    before_.reserve(most);
}

uint32_t &Lookup::newest(int32_t a, int32_t b, int32_t c, int32_t d) {
    uint64_t hash = uint32_t(a);
    for (const int32_t token : {b, c, d}) {
        hash = (hash ^ hash >> 29) * 0x9E3779B97F4A7C15u + uint32_t(token);
    }
    hash *= 0x9E3779B97F4A7C15u;
    return newest_[size_t(hash >> 32) & (newest_.size() - 1)];
}

// Nothing is matched by rows of images, and none is drafted.
static bool is_image(int32_t token) {
    return token < 0;
}

void Lookup::index(const std::vector<int32_t> &text) {
    for (size_t end = before_.size(); end < text.size(); end++) {
        if (end + 1 < GRAM || std::any_of(&text[end + 1 - GRAM], &text[end] + 1, is_image)) {
            before_.push_back(0);
            continue;
        }
        uint32_t &at = newest(text[end - 3], text[end - 2], text[end - 1], text[end]);
        before_.push_back(at);
        at = uint32_t(end) + 1;
    }
}

uint32_t Lookup::find(const std::vector<int32_t> &text, int32_t anchor, int32_t *out, uint32_t most,
                      uint32_t *matched) {
    index(text);
    *matched = 0;
    const size_t n = text.size();
    if (n + 1 < GRAM || std::any_of(text.end() - (GRAM - 1), text.end(), is_image)) {
        return 0;
    }
    size_t best = 0; // the best match ends here
    uint32_t at = newest(text[n - 3], text[n - 2], text[n - 1], anchor);
    for (uint32_t trial = 0; trial < TRIALS && at != 0; trial++, at = before_[at - 1]) {
        const size_t end = at - 1;
        if (text[end] != anchor) {
            continue; // these are another four tokens with the same hash
        }
        uint32_t length = 1;
        while (length < LONGEST && length <= end && text[end - length] == text[n - length] &&
               !is_image(text[n - length])) {
            length++;
        }
        if (length > *matched) {
            *matched = length;
            best = end;
        }
        if (length == LONGEST) {
            break;
        }
    }
    if (*matched < GRAM) {
        *matched = 0;
        return 0;
    }
    // Each is the text's token after the match, the anchor, or the draft itself.
    for (uint32_t i = 0; i < most; i++) {
        const size_t from = best + 1 + i;
        out[i] = from < n ? text[from] : from == n ? anchor : out[from - n - 1];
        if (is_image(out[i])) {
            *matched = 0;
            return 0;
        }
    }
    return most;
}

} // namespace luce
