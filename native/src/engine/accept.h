// The accept rule. It is the reason why speculation cannot change a token.
#pragma once

#include <cstdint>

namespace luce {

// Fails with E_ARG unless row 0 has the parent -1 and every other row has a parent that comes before it.
void check_parents(const int32_t *parents, uint32_t n);

// Writes the accepted rows to path (n) and returns their number. From row 0 (the anchor) it steps to the child
// whose token equals the target's choice after the current row, and stops where there is none. So the target
// itself chose every row on the path. It also chose *next, which follows the last row. The caller has checked
// the parents. Of twin children, the lowest row is taken.
uint32_t accept(const int32_t *tokens, const int32_t *parents, const int32_t *choices, uint32_t n,
                int32_t *path, int32_t *next);

} // namespace luce
