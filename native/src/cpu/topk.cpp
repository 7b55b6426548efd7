// Lists the best candidates of a row's logits on the CPU (TopkArgs).
#include "cpu/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

namespace luce {

static void list_row(const TopkArgs &a, const float *x, int32_t *list) {
    std::vector<int32_t> ids(size_t(a.n));
    std::iota(ids.begin(), ids.end(), 0);
    const auto better = [x](int32_t i, int32_t j) { return x[i] > x[j] || (x[i] == x[j] && i < j); };
    const size_t found = std::min(size_t(a.k), ids.size());
    std::nth_element(ids.begin(), ids.begin() + long(found - 1), ids.end(), better);
    std::sort(ids.begin(), ids.begin() + long(found), better);
    const double largest = x[ids[0]];
    double sum = 0;
    for (int64_t i = 0; i < a.n; i++) {
        sum += std::exp(double(x[i]) - largest);
    }
    const double log_sum = largest + std::log(sum);
    for (size_t i = 0; i < size_t(a.k); i++) {
        const bool there = i < found && x[ids[i]] > -INFINITY;
        const float score = there ? float(double(x[ids[i]]) - log_sum) : -INFINITY;
        list[i] = there ? ids[i] : -1;
        memcpy(&list[size_t(a.k) + i], &score, sizeof(score));
    }
}

void cpu_topk(const TopkArgs &a, int ith, int nth) {
    for (int t = ith; t < a.T; t += nth) {
        const float *x = a.logits + t * a.n;
        const int32_t keep = a.ctl->rows[t].keep;
        // with NaN nth_element's order is none: such rows are marked in `drafts`
        if (keep >= 0 && std::none_of(x, x + a.n, [](float v) { return std::isnan(v); })) {
            list_row(a, x, a.lists + int64_t(keep) * a.entry);
        }
    }
}

} // namespace luce
