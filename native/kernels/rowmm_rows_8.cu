// Compiles rowmm for 8 rows, with mma.sync.
#include "rowmm_kernel.cuh"

luce::RowmmKernel luce::rowmm_kernel_8() {
    return rowmm_kernel_of<1, false, 8>();
}
