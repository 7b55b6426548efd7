// The accept rule: why speculation cannot change a token.
#pragma once

#include <cstdint>
#include <vector>

namespace luce {

// From row 0 (the anchor) step to the child whose token equals the target's choice after the current row;
// stop where there is none. Every row on the path was chosen by the target itself, and so is *next, its
// choice after the last row. parents: -1 for row 0, else a smaller row. Ties (twin children): lowest row.
std::vector<int32_t> accept(const int32_t *tokens, const int32_t *parents, const int32_t *choices, uint32_t n,
                            int32_t *next);

} // namespace luce
