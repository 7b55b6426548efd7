// Says of the code that is being compiled whether its multiprocessors have 100 KB of shared memory, as those of 8.6, 8.9 and 12.0
// do. No device below 12.0 runs code for 12.0, so a build that pretends to be one compiles code for 9.0 and says it itself.
#pragma once

#if defined(__CUDA_ARCH__) && !defined(SMALL_SHARED)
#define SMALL_SHARED (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
#elif !defined(__CUDA_ARCH__)
#undef SMALL_SHARED
#define SMALL_SHARED 0 // the host's
#endif
