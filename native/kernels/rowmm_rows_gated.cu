// Compiles rowmm for rows that a block gates and packs itself, with mma.sync.
#include "rowmm_kernel.cuh"

luce::RowmmKernel luce::rowmm_kernel_gated(int rows) {
    static_assert(Shape<1, false>::STAGES == ROWMM_GATED_UNITS);
    static_assert(ROWMM_GATED_ROWS == 2);
    return rows == 1 ? rowmm_kernel_of<1, false, -1>() : rowmm_kernel_of<1, false, -2>();
}
