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

uint32_t accept(const int32_t *tokens, const int32_t *parents, const int32_t *choices, uint32_t n,
                int32_t *path, int32_t *next) {
    int32_t last = 0; // of the path
    uint32_t accepted = 0;
    path[accepted++] = last;
    for (uint32_t row = 1; row < n; row++) { // children come after their parents
        if (parents[row] == last && tokens[row] == choices[last]) {
            last = int32_t(row);
            path[accepted++] = last;
        }
    }
    *next = choices[last];
    return accepted;
}

} // namespace luce
