#include "engine/accept.h"

#include "abi/status.h"

namespace luce {

void check_parents(const int32_t *parents, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        if (i == 0 ? parents[i] != -1 : (parents[i] < 0 || parents[i] >= int32_t(i))) {
            fail(LUCE_E_ARG, "row %u has parent %d, expected %s", i, parents[i],
                 i == 0 ? "-1" : "an earlier row");
        }
    }
}

std::vector<int32_t> accept(const int32_t *tokens, const int32_t *parents, const int32_t *choices, uint32_t n,
                            int32_t *next) {
    std::vector<int32_t> path = {0};
    for (uint32_t row = 1; row < n; row++) { // children come after their parents
        if (parents[row] == path.back() && tokens[row] == choices[path.back()]) {
            path.push_back(int32_t(row));
        }
    }
    *next = choices[path.back()];
    return path;
}

} // namespace luce
