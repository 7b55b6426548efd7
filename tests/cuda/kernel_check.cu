// Checks luce's CUDA kernels, then times them. Needs a GPU and nvcc, no ggml:
//   nvcc -std=c++17 -O3 -fmad=false -arch=native -I native/kernels -o kernel_check
//       tests/cuda/*.cu native/kernels/*.cu -lcublas -Xlinker
//       --wrap=_ZN4luce4cuda13device_limitsERNS_12DeviceLimitsE,--wrap=cudaLaunchKernelExC,--wrap=__cudaGetKernel,--wrap=__cudaRegisterFunction
//   ./kernel_check          # or: ./kernel_check check, ./kernel_check time, ./kernel_check few rowmm topk
// `few` runs a tenth of the checks, for compute-sanitizer, and names the kernels that they launched, where `kernels` names
// all; `brief` times less of attention. Parts that are named run alone. `broken` breaks what blocks rely on, for a few seconds:
// the device has to stop them.
#include "harness.h"

// ---- captures ----

// Checks that a recording that failed, or is not wanted any more, leaves a stream that works.
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

namespace {

struct KernelPart {
    const char *name;
    void (*check)(bool all);
    void (*time)(bool all); // null says that there is nothing to time
};

const KernelPart PARTS[] = {
    {"deltanet", check_deltanet, [](bool) { time_kernels(); }},
    {"deltanet_layer", check_deltanet_layer, [](bool) { time_deltanet_layer(); }},
    {"attention", check_attention, time_attention},
    {"attention_units", check_attention_units, nullptr},
    {"attention_block", check_attention_block, nullptr},
    {"attention_prefill", check_attention_prefill, nullptr},
    {"attention_heads", check_attention_heads, nullptr},
    {"attention_plan", check_attention_plan, nullptr},
    {"kv_pages", check_kv_pages, nullptr},
    {"image_rows", check_image_rows, nullptr},
    {"copies", check_copies, nullptr},
    {"exchange", check_exchange, nullptr},
    {"row_scores", check_row_scores, nullptr},
    {"nextn", check_nextn, nullptr},
    {"rowmm", check_rowmm, [](bool) { time_rowmm(); }},
    {"rowmm_norm", check_rowmm_norm, nullptr},
    {"gemm", check_gemm_kernels, nullptr},
    {"topk", check_topk, [](bool) { time_topk(); }},
    {"draft_block", check_draft_block, nullptr},
    {"clusters", check_clusters, nullptr},
    {"choose", check_choose, [](bool) { time_choose(); }},
    {"moe", check_moe, [](bool) { time_moe(); }},
    {"capture", [](bool) { check_abandon(); }, nullptr},
    {"pack", check_pack, nullptr},
};

int usage() {
    printf("usage: kernel_check [check|few|time|brief|kernels|broken] [part ...], of these parts:");
    for (const KernelPart &part : PARTS) {
        printf(" %s", part.name);
    }
    printf("\n");
    return 2;
}

} // namespace

int main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0); // a run that is cut short has then said what it did
    const std::string what = argc > 1 ? argv[1] : "";
    const bool timings = what == "time" || what == "brief", checks = what == "check" || what == "few";
    const std::vector<std::string> wanted(argv + std::min(argc, 2), argv + argc);
    const auto known = [](const std::string &name) {
        return std::any_of(std::begin(PARTS), std::end(PARTS),
                           [&](const KernelPart &p) { return name == p.name; });
    };
    if (what == "kernels") {
        print_kernels(true);
        return 0;
    }
    const bool broken = what == "broken";
    if ((!what.empty() && !timings && !checks && !broken) ||
        !std::all_of(wanted.begin(), wanted.end(), known)) {
        return usage();
    }
    const auto wants = [&](const KernelPart &part) {
        return wanted.empty() || std::find(wanted.begin(), wanted.end(), part.name) != wanted.end();
    };
    constexpr int FEW_MULTIPROCESSORS =
        5; // blocks have several units of small shapes too, as on the emulated device
    const auto begin = [&] { // a part does the same whatever others the process runs
        rng.seed(SEED);
        multiprocessors_told = what == "few" ? FEW_MULTIPROCESSORS : 0;
    };
    must(cuda::set_device(0));
    must(cudaStreamCreate(&stream));
    if (broken) {
        expect(moe_gives_up(), "a block that waits for an expert that never comes");
        printf("%d checks, %d failed\n", n_checks, n_failed);
        return n_failed == 0 ? 0 : 1;
    }
    for (const KernelPart &part : PARTS) {
        if (!timings && wants(part)) {
            const int before = n_checks;
            begin();
            part.check(what != "few");
            const cudaError_t left = cudaGetLastError(); // a launch of the next part would report it
            expect(left == cudaSuccess,
                   std::string(part.name) + " leaves an error: " + cudaGetErrorString(left));
            printf("%s: %d checks\n", part.name, n_checks - before);
        }
    }
    if (what == "few") {
        print_kernels(false);
    }
    if (!timings) {
        printf("%d checks, %d failed\n", n_checks, n_failed);
    }
    for (const KernelPart &part : PARTS) {
        if (!checks && part.time != nullptr && wants(part)) {
            begin();
            part.time(what != "brief");
            must(int(cudaGetLastError()));
        }
    }
    return n_failed == 0 ? 0 : 1;
}
