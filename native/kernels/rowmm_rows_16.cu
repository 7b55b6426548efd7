// Compiles rowmm for up to 16 rows, with mma.sync.
#include "rowmm_kernel.cuh"

luce::RowmmKernel luce::rowmm_kernel_16() {
    return rowmm_kernel_of<2, false>();
}
