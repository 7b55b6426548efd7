// Compiles rowmm for up to 32 rows, with mma.sync.
#include "rowmm_kernel.cuh"

luce::RowmmKernel luce::rowmm_kernel_32() {
    return rowmm_kernel_of<4, false>();
}
