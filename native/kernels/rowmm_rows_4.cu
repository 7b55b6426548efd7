// Compiles rowmm for 4 rows, with mma.sync.
#include "rowmm_kernel.cuh"

luce::RowmmKernel luce::rowmm_kernel_4() {
    return rowmm_kernel_of<1, false, 4>();
}
