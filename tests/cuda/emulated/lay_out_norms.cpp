#include "lay_out.h"

// A device runs a launch that norms its row itself where a block has as much shared memory as rowmm_norms_row says, and
// refuses it elsewhere: there whoever asks has to pack the row first.
static void norms() {
    for (const int type : TYPES) {
        int taken = 0, refused = 0;
        for (int64_t K = 1024; K <= 128 * 1024; K += 1024) {
            RowmmArgs a = {};
            a.T = a.normed = 1;
            a.K = K;
            a.row = a.norm = reinterpret_cast<float *>(NOWHERE);
            a.scratch = NOWHERE;
            float *out = reinterpret_cast<float *>(NOWHERE);
            a.weights[a.n_weights++] = {type, 1024, NOWHERE, out, 1024, nullptr, 0};
            const bool fits = rowmm_norms_row(emulated::kind->limits, K, type);
            expect((cuda::rowmm(a, stream) == 0) == fits, at("a row that is normed", type, int(K)));
            (fits ? taken : refused)++;
        }
        expect(taken > 16 && refused > 0, at("rows of both kinds", type, 1));
    }
}

void lay_out_norms() {
    on_each_kind(norms);
}
