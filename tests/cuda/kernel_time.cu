// Times the kernels on the 27B's shapes: one CUDA graph runs an op for all of its 48 DeltaNet layers, and the
// median of its replays is shown per layer.
// Outside the timing: uploads, capture, warm-up. x, alpha and beta are shared by the layers and so stay in
// L2, as in a step; state and log are each layer's own, more than L2 holds. GB/s counts each byte once.
#include "harness.h"

#include <functional>
#include <memory>
#include <string>

static const Shape S27{16, 48, 128};
constexpr int LAYERS = 48, R = MAX_ROWS, REPLAYS = 40;

// of one op among LAYERS that follow each other
static double median_us(const std::function<void(int)> &enqueue) {
    void *graph = nullptr;
    enqueue(0);
    must(cuda::capture_begin(stream));
    for (int i = 0; i < LAYERS; i++) {
        enqueue(i);
    }
    must(cuda::capture_end(stream, &graph));
    cudaEvent_t begin, end;
    must(cudaEventCreate(&begin));
    must(cudaEventCreate(&end));
    Floats us;
    for (int i = 0; i < REPLAYS + 5; i++) {
        must(cudaEventRecord(begin, stream));
        must(cuda::capture_launch(graph, stream));
        must(cudaEventRecord(end, stream));
        must(cudaEventSynchronize(end));
        float ms = 0;
        must(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 5) { // warm
            us.push_back(ms * 1000);
        }
    }
    cuda::capture_free(graph);
    must(cudaEventDestroy(begin));
    must(cudaEventDestroy(end));
    std::nth_element(us.begin(), us.begin() + us.size() / 2, us.end());
    return us[us.size() / 2] / LAYERS;
}

static void report(const char *name, double us, double bytes) {
    printf("%-34s %8.2f us %8.0f GB/s\n", name, us, bytes / us / 1e3);
}

// A spine of up to 16 rows, then branches of 4 from its deeper end upwards, in depth-first order.
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

static void time_layers(std::vector<std::unique_ptr<Layer>> &layers, const char *name, DeltaMode mode, int T,
                        int n_pending, const Ints &parents) {
    const Rows rows = random_rows(S27, T);
    Device<float> x(rows.x), alpha(rows.alpha), beta(rows.beta), conv(rows.x.size()),
        out(size_t(T) * S27.Hv * S27.S);
    for (auto &layer : layers) {
        layer->pending = chain(n_pending + 1);
        layer->pending.erase(layer->pending.begin());
        layer->set_ctl(parents);
    }
    const double row_bytes = 4.0 * S27.C(), state_bytes = 4.0 * S27.Hv * S27.S * S27.S;
    const double log_bytes = 4.0 * (S27.Hv + S27.Hk) * S27.S;
    const bool append = mode == DELTA_APPEND;
    const double conv_us = median_us([&](int i) {
        const Layer &l = *layers[i];
        must(cuda::conv({l.delta_shape(T, mode), x.p, l.w.p, l.window.p, l.log.p, l.ctl.p, conv.p}, stream));
    });
    report((std::string("conv ") + name).c_str(), conv_us,
           row_bytes * (2 * T + 4 + 3 + (append ? 3 : T + (n_pending > 0 ? 3 : 0))));
    const double delta_us = median_us([&](int i) {
        const Layer &l = *layers[i];
        must(cuda::deltanet({l.delta_shape(T, mode), conv.p, alpha.p, beta.p, l.dt.p, l.a.p, l.state.p,
                             l.log.p, l.ctl.p, out.p},
                            stream));
    });
    report((std::string("deltanet ") + name).c_str(), delta_us,
           state_bytes * (append || n_pending > 0 ? 2 : 1) + T * (row_bytes + 4.0 * S27.Hv * S27.S) +
               log_bytes * (n_pending + (append ? 0 : T)));
}

void time_kernels() {
    cudaDeviceProp device;
    must(cudaGetDeviceProperties(&device, 0));
    printf("%s, %d SMs, L2 %d MB; per layer (27B: Hk 16, Hv 48, S 128)\n", device.name,
           device.multiProcessorCount, device.l2CacheSize >> 20);
    const Weights w = random_weights(S27);
    const Floats window(size_t(3) * S27.C()), state = normals(size_t(S27.Hv) * S27.S * S27.S, 0.3f);
    const Rows logged = random_rows(S27, R);
    std::vector<std::unique_ptr<Layer>> layers;
    for (int i = 0; i < LAYERS; i++) {
        layers.push_back(std::make_unique<Layer>(S27, R, w, window, state));
        for (int bank = 0; bank < 2; bank++) { // pending rows are numbers in either
            layers.back()->run(DELTA_VERIFY, logged, chain(R));
        }
    }
    time_layers(layers, "verify 1, 1 pending", DELTA_VERIFY, 1, 1, chain(1));
    time_layers(layers, "verify 4, 3 pending", DELTA_VERIFY, 4, 3, chain(4));
    time_layers(layers, "verify 16, 5 pending", DELTA_VERIFY, 16, 5, chain(16));
    time_layers(layers, "verify 64, 8 pending", DELTA_VERIFY, 64, 8, chain(64));
    time_layers(layers, "verify tree 16, 5 pending", DELTA_VERIFY, 16, 5, draft_tree(16));
    time_layers(layers, "verify tree 64, 8 pending", DELTA_VERIFY, 64, 8, draft_tree(64));
    time_layers(layers, "append 1", DELTA_APPEND, 1, 0, {});
    time_layers(layers, "append 512", DELTA_APPEND, 512, 0, {});

    const int64_t n = 248320;
    Device<float> logits(normals(size_t(n) * 16));
    Device<int32_t> picks(size_t(16) * ARGMAX_WIDTH);
    for (int T : {1, 16}) {
        const double us = median_us([&](int) { must(cuda::argmax({logits.p, n, T, picks.p}, stream)); });
        report(T == 1 ? "argmax 1 (logits in L2)" : "argmax 16 (logits in L2)", us, 4.0 * n * T);
    }
    const int row = 2048, rows = 16;
    Device<uint8_t> k(size_t(256) * row), v(size_t(256) * row);
    std::vector<int32_t> path(2 + MAX_ROWS);
    path[1] = rows;
    for (int i = 0; i < rows; i++) {
        path[2 + i] = 2 * i;
    }
    Device<int32_t> dpath(path);
    report("kv_move 16 rows of 2048 bytes",
           median_us([&](int) { must(cuda::kv_move({k.p, v.p, row, row, dpath.p}, stream)); }),
           4.0 * rows * row);
}
