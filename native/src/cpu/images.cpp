#include "cpu/images.h"

#include <algorithm>

namespace luce {

void cpu_image_rows(const ImageRowsArgs &a, int ith, int nth) {
    for (int64_t t = ith; t < a.T; t += nth) {
        const float *row = reinterpret_cast<const float *>(uintptr_t(a.rows[t]));
        std::copy_n(row == nullptr ? a.x + t * a.E : row, a.E, a.out + t * a.E);
    }
}

} // namespace luce
