// Checks luce's CUDA kernels, then times them. Needs a GPU and nvcc, no ggml:
//   nvcc -std=c++17 -O3 -fmad=false -arch=native -I native/kernels -o kernel_check
//       tests/cuda/*.cu native/kernels/*.cu -lcublas
//   ./kernel_check          # or: ./kernel_check check, ./kernel_check time
// `few` runs a tenth of the checks, for compute-sanitizer; `brief` times less of attention.
#include "harness.h"

// ---- captures ----

// A recording that failed, or is not wanted any more, leaves a stream that works.
static void check_abandon() {
    Device<int32_t> word(1);
    const auto works = [&](const char *when) {
        int error = int(cudaMemsetAsync(word.p, 0x11, sizeof(int32_t), stream));
        error = error != 0 ? error : int(cudaStreamSynchronize(stream));
        error = error != 0 ? error : int(cudaGetLastError());
        expect(error == 0 && word.get()[0] == 0x11111111, std::string("capture_abandon ") + when);
        word.poison();
    };
    cuda::capture_abandon(stream);
    works("of nothing");
    must(cuda::capture_begin(stream));
    must(int(cudaMemsetAsync(word.p, 0x22, sizeof(int32_t), stream)));
    cuda::capture_abandon(stream);
    works("of a good recording");
    must(cuda::capture_begin(stream));
    expect(cudaStreamSynchronize(stream) != cudaSuccess, "a recording stream can not be waited for");
    cuda::capture_abandon(stream);
    works("of an invalid recording");
    must(cuda::capture_begin(stream));
    cudaStreamSynchronize(stream);
    void *step = nullptr;
    expect(cuda::capture_end(stream, &step) != 0 && step == nullptr, "an invalid recording ends in an error");
    cuda::capture_abandon(stream);
    works("after a failed end");
}

// ---- argmax ----

static void check_argmax(int64_t n, int T) {
    Floats logits = normals(size_t(n) * T, 3.0f);
    for (int t = 0; t < T; t++) {
        float *x = &logits[size_t(t) * n];
        for (int64_t i = 0; t % 4 == 1 && i < n; i++) {
            x[i] = std::nearbyint(x[i] / 4); // ties, -0 and +0
        }
        if (t % 4 == 2) {
            std::fill(x, x + n, -INFINITY);
        }
        if (t % 4 == 3) {
            x[pick(int(n))] = t % 8 == 3 ? NAN : INFINITY;
        }
    }
    Device<float> in(logits);
    Device<int32_t> out(size_t(T) * ARGMAX_WIDTH);
    for (int run = 0; run < 2; run++) { // the second over what the first left
        must(cuda::argmax({in.p, n, T, out.p}, stream));
        must(cudaStreamSynchronize(stream));
        const std::vector<int32_t> got = out.get();
        bool good = true;
        for (int t = 0; t < T; t++) {
            const float *x = &logits[size_t(t) * n];
            int64_t best = -1;
            bool finite = true;
            for (int64_t i = 0; i < n; i++) {
                finite = finite && std::isfinite(x[i]);
                best = !std::isnan(x[i]) && (best < 0 || x[i] > x[best]) ? i : best;
            }
            const int32_t *row = &got[size_t(t) * ARGMAX_WIDTH];
            good = good && row[0] == std::max<int64_t>(best, 0) && row[1] == (finite ? 0 : 1);
        }
        expect(good, "argmax n " + std::to_string(n) + " T " + std::to_string(T));
    }
}

int main(int argc, char **argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    const bool timings = what == "time" || what == "brief", checks = what == "check" || what == "few";
    if (argc > 2 || (!what.empty() && !timings && !checks)) {
        printf("usage: kernel_check [check|few|time|brief]\n");
        return 2;
    }
    must(cuda::set_device(0));
    must(cudaStreamCreate(&stream));
    if (!timings) {
        const bool all = what != "few";
        check_deltanet(all);
        check_attention(all);
        check_rowmm(all);
        check_gemm_kernels(all);
        check_topk(all);
        if (all) {
            check_abandon();
        }
        for (int64_t n : {1, 5, 62, 100, 1001, 4096, 248320}) {
            check_argmax(n, 1);
            check_argmax(n, all ? 17 : 2);
        }
        printf("%d checks, %d failed\n", n_checks, n_failed);
    }
    if (!checks) {
        time_kernels();
        time_attention(what != "brief");
        time_rowmm();
        time_topk();
    }
    return n_failed == 0 ? 0 : 1;
}
