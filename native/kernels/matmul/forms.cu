// Compiles the product's kernel (matmul/kernel.cuh) in all forms that there are. A build that compiles them side by side gives each
// a file of its own, which defines ROWMM_FORM as one of the list's and includes this one (CMakeLists.txt, tools/build_checks.sh).
#include "matmul/kernel.cuh"

namespace luce {

#ifdef ROWMM_FORM
template RowmmKernel rowmm_kernel_of<ROWMM_FORM>();
#else
template RowmmKernel rowmm_kernel_of<1, false, 1>();
template RowmmKernel rowmm_kernel_of<1, false, 2>();
template RowmmKernel rowmm_kernel_of<1, false, 4>();
template RowmmKernel rowmm_kernel_of<1, false, 8>();
template RowmmKernel rowmm_kernel_of<2, false, ANY>();
template RowmmKernel rowmm_kernel_of<4, false, ANY>();
template RowmmKernel rowmm_kernel_of<4, true, ANY>();
template RowmmKernel rowmm_kernel_of<8, true, ANY>();
#endif

} // namespace luce
