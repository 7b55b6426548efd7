#include "lay_out.h"

static void products() {
    for (const int type : TYPES) {
        for (int T = 1; T <= ROWMM_MAX_ROWS; T++) {
            for (const int64_t K : {256, 5120, 17408}) {
                RowmmArgs a = {};
                a.T = T;
                a.K = K;
                a.x = a.scratch = NOWHERE;
                for (const auto &[other, N] : {std::pair<int, int64_t>{type, 17408}, {TYPE_Q8_0, 48}, {TYPE_F32, 248320}}) {
                    a.weights[a.n_weights++] = {other, N, NOWHERE, reinterpret_cast<float *>(NOWHERE), N, nullptr, 0};
                    expect(cuda::rowmm(a, stream) == 0, at("a launch", type, T));
                }
            }
        }
    }
}

// Where a small device has room for one slot of weights, the ring has one.
void lay_out_products() {
    for (emulated::DeviceKind kind : emulated::KINDS) {
        kind.limits.bulk_copies = true; // the code that runs here has them; with them 8.6 is as 12.0
        emulated::kind = &kind;
        check_rowmm_kind();
    }
    on_each_kind(products);
}
