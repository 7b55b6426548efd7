// What architectures read of a file's keys alike.
#pragma once

#include "model/gguf_file.h"

#include <string>
#include <vector>

namespace luce {

// Returns what stands before the names of an architecture's own keys: "NAME.".
std::string prefix_of(const GgufFile &file);

// Returns a number in [lo, hi] for each of n blocks, of which a key has one for all, or an array. Bools count as 0 and 1.
std::vector<uint32_t> per_block(const GgufFile &file, const std::string &key, uint32_t n, int64_t lo,
                                int64_t hi);

// E_UNSUPPORTED: the file stretches RoPE.
void check_rope_scaling(const GgufFile &file);

} // namespace luce
