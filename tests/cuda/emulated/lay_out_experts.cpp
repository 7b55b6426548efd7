#include "lay_out.h"
#include "moe/launch_plan.h"

// What lacks nothing (moe/launch_plan.h) is launched at any T, and what does is refused at some.
static void experts() {
    int fit = 0, shapes = 0;
    for (const int type : TYPES) {
        for (const auto &[E, FF] : {std::pair<int64_t, int64_t>{2048, 512}, {3072, 1024}, {4096, 1024}, {6144, 6144}}) {
            MoeDims dims = {1, 256, 8, E, FF, FF};
            const int unit = fragment_bytes(type);
            dims.most = moe_item_rows(emulated::kind->limits, dims, unit, unit);
            const bool fits = moe_lacks(emulated::kind->limits, "it", dims, unit, unit).empty();
            bool launched = true;
            for (int T = 1; T <= MOE_MAX_ROWS; T += T < 300 ? 1 : 92) {
                dims.T = T;
                dims.wide = moe_wide_rows(emulated::kind->limits, dims);
                float *const f = reinterpret_cast<float *>(NOWHERE);
                const MoeMatrix w = {type, NOWHERE, rowmm_packed_bytes(type, E, FF)};
                const MoeMatrix down = {type, NOWHERE, rowmm_packed_bytes(type, FF, E)};
                launched = launched && cuda::moe_route({dims, f, f, 1e-6f, f, f, NOWHERE, NOWHERE, nullptr, 0}, stream) == 0;
                launched = launched && cuda::moe_up({dims, w, w, w, w, NOWHERE, nullptr, f, 0, nullptr}, stream) == 0;
                launched = launched && cuda::moe_down({dims, down, {}, down, {}, NOWHERE, f, f, 0, NOWHERE}, stream) == 0;
                if (moe_ends_at_once(dims, type, type)) {
                    launched = launched && cuda::moe_end({dims, down, down, NOWHERE, f, f, f, 0}, stream) == 0;
                }
            }
            expect(launched || !fits, at("a layer that fits", type, int(E)));
            expect(!launched || fits, at("a layer that is refused", type, int(E)));
            expect(fits || E > 2048, at("the 35b-a3b's layer", type, int(E)));
            fit += fits;
            shapes++;
        }
    }
    printf("%d of %d shapes of experts fit %s\n", fit, shapes, emulated::kind->name);
}

void lay_out_experts() {
    on_each_kind(experts);
}
