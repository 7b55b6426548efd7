// Compiles rowmm for 2 rows, with mma.sync.
#include "rowmm_kernel.cuh"

luce::RowmmKernel luce::rowmm_kernel_2() {
    return rowmm_kernel_of<1, false, 2>();
}
