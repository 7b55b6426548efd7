// Compiles rowmm for rows that a block gates and packs itself, with mma.sync.
#include "rowmm_kernel.cuh"

luce::RowmmKernel luce::rowmm_kernel_gated() {
    static_assert(Shape<1, false>::STAGES == ROWMM_GATED_UNITS);
    return rowmm_kernel_of<1, false, luce::GATED>();
}
