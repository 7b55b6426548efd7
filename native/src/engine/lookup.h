// The lookup drafter proposes what followed the last time that the text stood where it stands now.
//
// Every four tokens of a text are hashed to the newest position where they end, and each position to the one before
// it with the same hash. The positions whose last four tokens are the text's own are extended backwards; the longest
// match wins, and of equals the newest. What followed there is the draft. Where that runs into the present, it goes
// on with the draft itself, so that a text that repeats is continued periodically.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace luce {

class Lookup {
public:
    static constexpr uint32_t GRAM = 4; // as many tokens have to match
    // As many positions are compared, newest first, which bounds the time.
    static constexpr uint32_t TRIALS = 32;
    static constexpr uint32_t LONGEST = 256; // as many tokens are compared; longer matches count as equal

    explicit Lookup(uint32_t most); // `most` is the length of the longest text

    // Writes a continuation of `text` and then `anchor`, of `most` tokens, to `out`. It returns their number,
    // or 0. text has to begin with the text of the call before, and what it has more is indexed first.
    // matched gets the number of tokens that the two places have in common: 0 where there is no such place,
    // else GRAM to LONGEST.
    uint32_t find(const std::vector<int32_t> &text, int32_t anchor, int32_t *out, uint32_t most,
                  uint32_t *matched);

private:
    uint32_t &newest(int32_t a, int32_t b, int32_t c, int32_t d);
    void index(const std::vector<int32_t> &text);

    // By hash: one more than the position where its newest four tokens end; 0 means none.
    std::vector<uint32_t> newest_;
    // By such a position: the one before it with the same hash, in the same way.
    std::vector<uint32_t> before_;
};

} // namespace luce
