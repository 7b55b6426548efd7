// Checks luce's CUDA kernels, then times them. Needs a GPU and nvcc, no ggml:
//   nvcc -std=c++17 -O3 -fmad=false -arch=native -I native/kernels -o kernel_check
//       tests/cuda/*.cu native/kernels/*.cu -lcublas
//   ./kernel_check          # or: ./kernel_check check, ./kernel_check time
// `few` runs a tenth of the checks, for compute-sanitizer; `brief` times less of attention; `choose`, `moe`: of
// choices or of the mixture of experts alone.
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

int main(int argc, char **argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    const bool timings = what == "time" || what == "brief", checks = what == "check" || what == "few";
    const bool choose = what == "choose", moe = what == "moe";
    if (argc > 2 || (!what.empty() && !timings && !checks && !choose && !moe)) {
        printf("usage: kernel_check [check|few|time|brief|choose|moe]\n");
        return 2;
    }
    must(cuda::set_device(0));
    must(cudaStreamCreate(&stream));
    if (choose || moe) {
        (choose ? check_choose : check_moe)(true);
        printf("%d checks, %d failed\n", n_checks, n_failed);
        (choose ? time_choose : time_moe)();
        return n_failed == 0 ? 0 : 1;
    }
    if (!timings) {
        const bool all = what != "few";
        check_deltanet(all);
        check_attention(all);
        check_rowmm(all);
        check_gemm_kernels(all);
        check_topk(all);
        check_choose(all);
        check_moe(all);
        if (all) {
            check_abandon();
        }
        printf("%d checks, %d failed\n", n_checks, n_failed);
    }
    if (!checks) {
        time_kernels();
        time_attention(what != "brief");
        time_rowmm();
        time_topk();
        time_choose();
        time_moe();
    }
    return n_failed == 0 ? 0 : 1;
}
