// Compiles rowmm for up to 64 rows, with wgmma.
#include "rowmm_kernel.cuh"

luce::RowmmKernel luce::rowmm_kernel_64_wide() {
    return rowmm_kernel_of<8, true>();
}
