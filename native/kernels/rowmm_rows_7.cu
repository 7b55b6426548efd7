// Compiles rowmm for 7 rows, with mma.sync.
#include "rowmm_kernel.cuh"

luce::RowmmKernel luce::rowmm_kernel_7() {
    return rowmm_kernel_of<1, false, 7>();
}
