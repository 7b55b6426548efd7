// Compiles rowmm for one row, with mma.sync.
#include "rowmm_kernel.cuh"

luce::RowmmKernel luce::rowmm_kernel_1() {
    return rowmm_kernel_of<1, false, 1>();
}
