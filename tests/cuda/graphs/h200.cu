// Tells the emulation (tests/cuda/emulated) which device is pretended.
#include <cuda_runtime.h>

static const emulated::DeviceKind H200 = {"H200", {132, 9, 233472, 232448, 1024}, true};
static const bool TOLD = [] {
    emulated::kind = &H200;
    return true;
}();
