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

void lay_out_deltanet() {
    on_each_kind(deltanet_layers);
}
