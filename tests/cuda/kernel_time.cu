// Times the kernels on the 27B's shapes. One CUDA graph runs an op for all of its 48 DeltaNet layers, and the
// median of its replays is shown per layer. Uploads, capture and warm-up are outside the timing. The layers
// share x, alpha and beta, which so stay in L2, as in a step. State and log are each layer's own, more than
// L2 holds. GB/s counts each byte once.
#include "harness.h"

#include <functional>
#include <memory>

static const Shape S27{16, 48, 128};
constexpr int LAYERS = 48, R = MAX_ROWS, SLOTS = 16, REPLAYS = 40;

// Returns a spine of up to 16 rows, then branches of 4 from its deeper end upwards, in depth-first order.
static Ints draft_tree(int T) {
    const int spine = std::min(16, T / 2);
    Ints parents = chain(spine);
    for (int at = spine - 2; int(parents.size()) < T; at--) {
        for (int i = 0; i < 4 && int(parents.size()) < T; i++) {
            parents.push_back(i == 0 ? at : int(parents.size()) - 1);
        }
    }
    return parents;
}

// Times n_seqs sequences of T rows each, with n_pending pending rows each.
static void time_layers(std::vector<std::unique_ptr<Layer>> &layers, DeltaMode mode, int n_seqs, int T,
                        int n_pending, const Ints &parents, const char *what) {
    const Rows rows = random_rows(S27, T);
    const int width = n_seqs * T;
    std::vector<Part> parts;
    for (int i = 0; i < n_seqs; i++) {
        parts.push_back({i, rows, parents});
    }
    const Rows all = random_rows(S27, width);
    Device<float> x(all.x), alpha(all.alpha), beta(all.beta), conv(all.x.size()),
        out(size_t(width) * S27.Hv * S27.S);
    for (auto &layer : layers) {
        for (Timeline &timeline : layer->timelines) {
            timeline.pending = chain(n_pending + 1);
            timeline.pending.erase(timeline.pending.begin());
        }
        layer->set_ctl(parts);
    }
    const double conv_us = median_us([&](int i) { layers[i]->enqueue_conv(mode, width, x, conv); }, REPLAYS, LAYERS);
    const double delta_us =
        median_us([&](int i) { layers[i]->enqueue_delta(mode, width, conv, alpha, beta, out); }, REPLAYS, LAYERS);
    const bool append = mode == DELTA_APPEND;
    const double row_bytes = 4.0 * S27.C(), state_bytes = 4.0 * S27.Hv * S27.S * S27.S;
    const double log_bytes = 4.0 * (S27.Hv + S27.Hk) * S27.S;
    const double bytes =
        n_seqs * (state_bytes * (append || n_pending > 0 ? 2 : 1) + T * (row_bytes + 4.0 * S27.Hv * S27.S) +
                  log_bytes * (n_pending + (append ? 0 : T)));
    printf("%-6s %3d rows x %2d sequences, %d pending %6.2f us conv %7.2f us deltanet %5.0f GB/s\n", what, T,
           n_seqs, n_pending, conv_us, delta_us, bytes / delta_us / 1e3);
}

static void time_deltanet() {
    const Weights w = random_weights(S27);
    const Floats windows(size_t(SLOTS) * 3 * S27.C()),
        states = normals(size_t(SLOTS) * S27.Hv * S27.S * S27.S, 0.3f);
    std::vector<std::unique_ptr<Layer>> layers;
    Floats log; // it holds numbers, since pending rows are read
    for (int i = 0; i < LAYERS; i++) {
        layers.push_back(std::make_unique<Layer>(S27, R, w, windows, states));
        if (log.empty()) {
            log = normals(layers[0]->log.n, 0.3f);
        }
        layers[i]->log.set(log);
    }
    const int pending[][2] = {{1, 1}, {2, 2}, {4, 3}, {8, 4}, {16, 5}, {64, 8}};
    for (const auto &[T, n] : pending) {
        time_layers(layers, DELTA_VERIFY, 1, T, n, chain(T), "chain");
    }
    for (int T : {16, 64}) {
        time_layers(layers, DELTA_VERIFY, 1, T, T == 16 ? 5 : 8, draft_tree(T), "tree");
    }
    for (int n_seqs : {2, 4, 8, 16}) {
        time_layers(layers, DELTA_VERIFY, n_seqs, 1, 1, chain(1), "chain");
        time_layers(layers, DELTA_VERIFY, n_seqs, 4, 3, chain(4), "chain");
    }
    time_layers(layers, DELTA_APPEND, 1, 1, 0, {}, "append");
    time_layers(layers, DELTA_APPEND, 1, 512, 0, {}, "append");
}

void time_kernels() {
    cudaDeviceProp device;
    must(cudaGetDeviceProperties(&device, 0));
    printf("%s, %d SMs, L2 %d MB; per layer (27B: Hk 16, Hv 48, S 128), %d slots\n", device.name,
           device.multiProcessorCount, device.l2CacheSize >> 20, SLOTS);
    time_deltanet();
}
