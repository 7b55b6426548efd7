#include "accept.h"

namespace luce {

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
