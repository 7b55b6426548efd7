// Compiles rowmm for up to 32 rows, with wgmma.
#include "rowmm_kernel.cuh"

luce::RowmmKernel luce::rowmm_kernel_32_wide() {
    return rowmm_kernel_of<4, true>();
}
