// Compiles rowmm for 3 rows, with mma.sync.
#include "rowmm_kernel.cuh"

luce::RowmmKernel luce::rowmm_kernel_3() {
    return rowmm_kernel_of<1, false, 3>();
}
