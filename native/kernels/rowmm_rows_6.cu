// Compiles rowmm for 6 rows, with mma.sync.
#include "rowmm_kernel.cuh"

luce::RowmmKernel luce::rowmm_kernel_6() {
    return rowmm_kernel_of<1, false, 6>();
}
