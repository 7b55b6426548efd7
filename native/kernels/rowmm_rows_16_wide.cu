// Compiles rowmm for up to 16 rows, with wgmma.
#include "rowmm_kernel.cuh"

luce::RowmmKernel luce::rowmm_kernel_16_wide() {
    return rowmm_kernel_of<2, true>();
}
