// Plans a prompt's products by luce's own tiles (matmul/sm90/few_rows.cuh), as a pure function of a device's limits and the shapes.
#pragma once

#include "common/device_limits.h"
#include "common/launch_plan.h"

#include <algorithm>
#include <vector>

namespace luce {

// A tile has so many rows of x, and as its columns so many rows of weights.
struct FewForm {
    int rows, columns;
};
constexpr FewForm FEW_FORMS[] = {{64, 8},   {64, 16},  {128, 40},  {128, 48},
                                 {128, 80}, {128, 96}, {128, 112}, {128, 136}};
constexpr int N_FEW_FORMS = sizeof(FEW_FORMS) / sizeof(FEW_FORMS[0]);
constexpr int FEW_PROMPT_ROWS = 128; // tiles multiply so many rows of x,
constexpr int64_t FEW_WEIGHTS = 64; // and more of them by matrices of so many rows of weights

// Returns the form of the tiles that multiply T rows by matrices of so many rows of weights each, or -1 where cuBLAS multiplies. It
// is the smallest form of which all tiles run at once, one on a multiprocessor. Up to the limits above an H200 was as fast with
// them as with cuBLAS, whose tiles are often too many or too few there, or faster; beyond them cuBLAS was. Where K is no multiple
// of 64 an H200's cuBLAS had other bits.
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
