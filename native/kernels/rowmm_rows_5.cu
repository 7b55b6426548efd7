// Compiles rowmm for 5 rows, with mma.sync.
#include "rowmm_kernel.cuh"

luce::RowmmKernel luce::rowmm_kernel_5() {
    return rowmm_kernel_of<1, false, 5>();
}
