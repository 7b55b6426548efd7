#include "lay_out.h"

static void deltanet_layers() {
    for (int T = 1; T <= MAX_ROWS; T++) {
        for (const int S : {16, 32, 64, 128}) {
            DeltaArgs a = {};
            a.shape = {T, MAX_ROWS, 16, 16, 48, S, DELTA_VERIFY};
            expect(cuda::deltanet(a, stream) == 0, at("the delta rule", S, T));
            a.shape.mode = DELTA_APPEND;
            expect(cuda::deltanet(a, stream) == 0, at("the delta rule of a prefill", S, T));
        }
    }
}

// Of the eight blocks that one sequence has here, none of five multiprocessors has room for three.
static void spread_layers() {
    const auto &limits = emulated::kind->attributes;
    for (int T = 5; T <= MAX_ROWS; T++) {
        DeltaArgs a = {};
        a.shape = {T, MAX_ROWS, 1, 2, 2, 128, DELTA_VERIFY};
        expect(cuda::deltanet(a, stream) == 0, at("the delta rule of one sequence", 128, T));
        expect(3 * (emulated::laid_out + size_t(limits[cudaDevAttrReservedSharedMemoryPerBlock])) >
                   size_t(limits[cudaDevAttrMaxSharedMemoryPerMultiprocessor]),
               at("three blocks of one sequence on a multiprocessor", 128, T));
    }
}

void lay_out_deltanet() {
    on_each_kind(deltanet_layers);
    on_each_kind(spread_layers);
}
