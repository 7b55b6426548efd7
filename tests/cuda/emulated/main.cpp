// Runs a kernel check on a CPU: CHECK is its call. Launches run when they are made, also those that a graph
// would record, which replays nothing.
#include "harness.h"

const char *luce::cuda::error_text(int error) {
    return error == 1 ? "an argument is not valid" : "an error of the emulation";
}
int luce::cuda::device_limits(DeviceLimits &limits) {
    limits = emulated::kind->limits;
    return 0;
}
int luce::cuda::capture_begin(void *) {
    return 0;
}
int luce::cuda::capture_end(void *, void **) {
    return 0;
}
int luce::cuda::capture_launch(void *, void *) {
    return 0;
}
void luce::cuda::capture_free(void *) {}
bool luce::cuda::is_pinned(void *) {
    return true;
}
// A check that has the kernels of long prefills brings them.
__attribute__((weak)) int64_t luce::deltanet_chunks_scratch(const DeltaShape &) {
    return 0;
}
__attribute__((weak)) int luce::cuda::deltanet_chunks(const DeltaArgs &, void *, void *) {
    return 1;
}

// Each is in a file of its name.
void lay_out_products(), lay_out_experts(), lay_out_deltanet(), lay_out_norms(), lay_out_packs();

int main() {
    CHECK;
    printf("%d checks, %d failed\n", n_checks, n_failed);
    return n_failed == 0 ? 0 : 1;
}
