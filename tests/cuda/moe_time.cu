// Times the mixture of experts of the 35b-a3b: 40 layers of 256 experts of 512, 8 of them used, and a shared
// one. Each layer has weights and a router of its own, 20 GB in all, so that nothing is found in L2. TB/s
// counts once the weights of the experts that were chosen, the shared one's and the router's. Permuting,
// capture and warm-up stay outside the timing.
#include "harness.h"
#include "moe/launch_plan.h"
#include "rowmm_reference.h"

#include <memory>
#include <set>

namespace {

constexpr int LAYERS = 40, Q4 = 12, Q6 = 14;
constexpr int64_t E = 2048, FF = 512, MOST = 2048;
constexpr int N_EXPERT = 256, N_USED = 8;

// Holds one expert's matrix over and over.
struct Experts {
    int type;
    int64_t bytes, n;
    Device<uint8_t> packed;

    Experts(int type, int64_t K, int64_t N, int64_t n)
        : type(type), bytes(rowmm_packed_bytes(type, K, N)), n(n), packed(size_t(n * bytes)) {
        Device<uint8_t> src(rowmm_test::random_weights(type, K, N, uint32_t(type)));
        must(cuda::rowmm_permute({type, K, N, src.p, packed.p}, stream));
        for (int64_t e = 1; e < n; e++) {
            must(cudaMemcpyAsync(packed.p + e * bytes, packed.p, size_t(bytes), cudaMemcpyDeviceToDevice, stream));
        }
        must(cudaStreamSynchronize(stream));
    }
    MoeMatrix matrix() const { return {type, packed.p, bytes}; }
};

struct TimedLayer {
    Device<float> router;
    Experts gate, up, down, gate_s, up_s, down_s;

    explicit TimedLayer(int down_type)
        : router(normals(size_t(N_EXPERT * E), 0.05f)), gate(Q4, E, FF, N_EXPERT), up(Q4, E, FF, N_EXPERT),
          down(down_type, FF, E, N_EXPERT), gate_s(Q4, E, FF, 1), up_s(Q4, E, FF, 1), down_s(down_type, FF, E, 1) {}
};

struct MoeBench {
    std::vector<std::unique_ptr<TimedLayer>> layers;
    Device<float> x{normals(MOST * E)}, norm{Floats(size_t(E), 1.0f)}, gate{normals(size_t(E), 0.05f)};
    Device<float> h{MOST * (N_USED + 1) * FF}, y{MOST * (N_USED + 1) * E}, out{MOST * E};
    Device<uint8_t> counters{size_t(MOE_COUNTER_BYTES)}, routed{size_t(moe_routed_bytes(dims_of(MOST)))}, packed{size_t(rowmm_x_bytes(64, E))},
        records{size_t(moe_record_bytes(dims_of(MOST)))};

    static MoeDims dims_of(int T) {
        MoeDims dims = {T, N_EXPERT, N_USED, E, FF, FF};
        DeviceLimits device;
        must(cuda::device_limits(device));
        dims.wide = moe_wide_rows(device, dims);
        return dims;
    }

    MoeBench() {
        must(cudaMemset(counters.p, 0, counters.n));
        for (int i = 0; i < LAYERS; i++) {
            layers.emplace_back(new TimedLayer(i % 2 == 0 ? Q4 : Q6));
        }
    }
    // Runs launches `from` to `to` of route, up, down, sum, end.
    void enqueue(int T, int layer, int from, int to, bool overlap) {
        const MoeDims d = dims_of(T);
        const TimedLayer &l = *layers[size_t(layer)];
        for (int i = from; i < to; i++) {
            if (i == 0) {
                must(cuda::moe_route({d, x.p, norm.p, 1e-6f, l.router.p, gate.p, counters.p, routed.p,
                                      nullptr, overlap}, stream));
            } else if (i == 1) {
                must(cuda::moe_up({d, l.gate.matrix(), l.up.matrix(), l.gate_s.matrix(), l.up_s.matrix(), routed.p, nullptr,
                                   h.p, overlap}, stream));
            } else if (i == 2) {
                must(cuda::moe_down({d, l.down.matrix(), {}, l.down_s.matrix(), {}, routed.p, h.p, y.p, overlap, records.p}, stream));
            } else if (i == 3) {
                must(cuda::moe_sum({d, routed.p, y.p, nullptr, x.p, out.p, norm.p, T <= 64 ? packed.p : nullptr, overlap}, stream));
            } else {
                must(cuda::moe_end({d, l.down.matrix(), l.down_s.matrix(), routed.p, h.p, x.p, out.p, overlap}, stream));
            }
        }
    }
    // Returns the bytes of weights that a layer's rows need.
    int64_t bytes(int T, int layer) {
        enqueue(T, layer, 0, 2, false); // the experts of a step's only row are chosen by up
        must(cudaStreamSynchronize(stream));
        const std::vector<uint8_t> blob = routed.get();
        std::vector<int32_t> ids(size_t(T * N_USED));
        memcpy(ids.data(), &blob[size_t(moe_ids_offset(dims_of(T)))], ids.size() * 4);
        const TimedLayer &l = *layers[size_t(layer)];
        const int64_t n = int64_t(std::set<int32_t>(ids.begin(), ids.end()).size()) + 1; // the shared one is read too
        return n * (l.gate.bytes + l.up.bytes + l.down.bytes) + (N_EXPERT + 1) * E * 4;
    }
};

} // namespace

void time_moe() {
    MoeBench b;
    const char *names[] = {"route", "up", "down", "sum"};
    for (int overlap = 1; overlap >= 0; overlap--) {
        printf("moe of the 35b-a3b, %s launches, us of a layer:\n", overlap ? "overlapping" : "plain");
        for (int T : {1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 512, 2048}) {
            int64_t bytes = 0;
            for (int i = 0; i < LAYERS; i++) {
                bytes += b.bytes(T, i);
            }
            const double us = median_us([&](int i) { b.enqueue(T, i, 0, 4, overlap != 0); }, 9, LAYERS);
            printf("  %2d rows: %6.2f (%4.2f TB/s)", T, us, double(bytes) / LAYERS / us * 1e-6);
            for (int i = 0; i < 4; i++) { // this goes over the list that was left last
                printf("  %s %.2f", names[i], median_us([&](int layer) { b.enqueue(T, layer, i, i + 1, overlap != 0); }, 9, LAYERS));
            }
            if (T == 1) { // of one row, end does what down and sum do
                const auto layer = [&](int i) {
                    b.enqueue(T, i, 0, 2, overlap != 0);
                    b.enqueue(T, i, 4, 5, overlap != 0);
                };
                printf("  end %.2f, of all with it %.2f", median_us([&](int i) { b.enqueue(T, i, 4, 5, overlap != 0); }, 9, LAYERS),
                       median_us(layer, 9, LAYERS));
            }
            printf("\n");
        }
    }
}
