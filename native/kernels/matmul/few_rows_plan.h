// Plans a prompt's products by luce's own tiles (matmul/sm90/few_rows.cuh), as a pure function of a device's limits and the shapes.
#pragma once

#include "common/device_limits.h"
#include "common/launch_plan.h"

#include <algorithm>
#include <vector>

namespace luce {

// A tile has so many rows, and so many rows of weights as its columns.
struct FewForm {
    int rows, columns;
};
constexpr FewForm FEW_FORMS[] = {{64, 8},   {64, 16},  {128, 40},  {128, 48},
                                 {128, 80}, {128, 96}, {128, 112}, {128, 136}};
constexpr int N_FEW_FORMS = sizeof(FEW_FORMS) / sizeof(FEW_FORMS[0]);
constexpr int FEW_PROMPT_ROWS = 128; // of x
constexpr int64_t FEW_WEIGHTS = 64; // rows of them

// Returns the form of tiles of a product of T rows by matrices of N rows of weights, or -1: cuBLAS multiplies. It is the smallest
// of which one wave is enough for all matrices: cuBLAS's tiles are often too many or too few there. On an H200 they were as fast or
// faster for 128 rows, and for more where N is below what a tile of cuBLAS has; else cuBLAS was. Where K is no multiple of 64 an
// H200's cuBLAS had other bits.
inline int few_form(const DeviceLimits &device, int64_t T, int64_t K, const std::vector<int64_t> &sizes) {
    const bool few = T <= FEW_PROMPT_ROWS ||
                     std::all_of(sizes.begin(), sizes.end(), [](int64_t N) { return N <= FEW_WEIGHTS; });
    for (int form = 0; device.wgmma && K % 64 == 0 && few && form < N_FEW_FORMS; form++) {
        int64_t tiles = 0;
        for (const int64_t N : sizes) {
            tiles += divided(N, FEW_FORMS[form].columns);
        }
        if (tiles * divided(T, FEW_FORMS[form].rows) <= device.multiprocessors) {
            return form;
        }
    }
    return -1;
}

} // namespace luce
