// Compiles rowmm for just 4 rows, with mma.sync.
#include "rowmm_kernel.cuh"

luce::RowmmKernel luce::rowmm_kernel_just_4() {
    return rowmm_kernel_of<1, false, 4>();
}
