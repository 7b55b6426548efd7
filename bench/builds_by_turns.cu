// Times the chains of two builds (bench/step_chains.cu) by turns in one process, over the same weights and cells: two processes
// differ by 3% where the kernels are the same. A turn is, of each build, some rest, a replay to warm up and one that is timed;
// which build is first alternates. The last columns are the median of a turn's quotient, its quartiles, and whether the results of
// both have the same bits. Builds of the same code have differed by up to 15 us.
//
//   tools/build_checks.sh OLD chains && tools/build_checks.sh NEW chains       (in a tree of each)
//   nvcc -std=c++17 -O2 -o builds_by_turns bench/builds_by_turns.cu -ldl
//   ./builds_by_turns OLD/step_chains.so NEW/step_chains.so [TURNS]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <unistd.h>

namespace {

constexpr int REST_US = 6000;

void must(cudaError_t error) {
    if (error != cudaSuccess) {
        printf("CUDA error: %s\n", cudaGetErrorString(error));
        exit(1);
    }
}

// A case is a step of `rows` rows each of so many sequences behind a context; without sequences, of a mixture's experts.
struct Case {
    const char *name;
    int seqs, rows, context, kv_type;
};
constexpr Case CASES[] = {
    {"1 row", 1, 1, 0, 1},
    {"2 rows", 1, 2, 0, 1},
    {"3 rows", 1, 3, 0, 1},
    {"4 rows", 1, 4, 0, 1},
    {"6 rows", 1, 6, 0, 1},
    {"8 rows", 1, 8, 0, 1},
    {"16 rows", 1, 16, 0, 1},
    {"32 rows", 1, 32, 0, 1},
    {"64 rows", 1, 64, 0, 1},
    {"8 sequences", 8, 1, 0, 1},
    {"1 row, 4k", 1, 1, 4096, 1},
    {"16 rows, 4k", 1, 16, 4096, 1},
    {"1 row, 100k", 1, 1, 102400, 1},
    {"4 rows, 100k", 1, 4, 102400, 1},
    {"1 row, 100k, q8_0", 1, 1, 102400, 8},
    {"8 sequences, 100k", 8, 1, 100000, 1},
    {"experts, 1 row", 0, 1, 0, 0},
    {"experts, 2 rows", 0, 2, 0, 0},
    {"experts, 4 rows", 0, 4, 0, 0},
    {"experts, 8 rows", 0, 8, 0, 0},
};

struct Build {
    int64_t (*bytes)();
    void (*open)(void *memory, void *stream, bool fill);
    void *(*make)(int seqs, int rows, int context, int kv_type);
    void (*launch)(void *graph);
    void (*free)(void *graph);
    void (*result)(std::vector<float> *out);

    explicit Build(const char *path) {
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) {
            printf("%s\n", dlerror());
            exit(1);
        }
        const auto find = [&](auto &function, const char *name) {
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
        };
        find(bytes, "chains_bytes");
        find(open, "chains_open");
        find(make, "chain_make");
        find(launch, "chain_launch");
        find(free, "chain_free");
        find(result, "chain_result");
    }
};

double quantile(std::vector<double> x, double q) {
    std::sort(x.begin(), x.end());
    return x[size_t(q * double(x.size() - 1) + 0.5)];
}

} // namespace

int main(int argc, char **argv) {
    if (argc < 3) {
        printf("usage: builds_by_turns OLD.so NEW.so [TURNS]\n");
        return 2;
    }
    const Build builds[2] = {Build(argv[1]), Build(argv[2])};
    const int turns = argc > 3 ? atoi(argv[3]) : 20;
    void *memory = nullptr;
    cudaStream_t stream;
    cudaEvent_t begin, end;
    must(cudaMalloc(&memory, size_t(std::max(builds[0].bytes(), builds[1].bytes()))));
    must(cudaStreamCreate(&stream));
    must(cudaEventCreate(&begin));
    must(cudaEventCreate(&end));
    builds[0].open(memory, stream, true);
    builds[1].open(memory, stream, false);
    std::string table;
    for (const Case &c : CASES) {
        void *graphs[2];
        for (int b : {0, 1}) {
            graphs[b] = builds[b].make(c.seqs, c.rows, c.context, c.kv_type);
        }
        std::vector<double> us[2], quotients;
        for (int turn = 0; turn < turns; turn++) {
            for (int i : {0, 1}) {
                const int b = (turn + i) % 2;
                usleep(REST_US);
                builds[b].launch(graphs[b]);
                must(cudaEventRecord(begin, stream));
                builds[b].launch(graphs[b]);
                must(cudaEventRecord(end, stream));
                must(cudaEventSynchronize(end));
                float ms = 0;
                must(cudaEventElapsedTime(&ms, begin, end));
                us[b].push_back(ms * 1000);
            }
            quotients.push_back(us[1].back() / us[0].back());
        }
        std::vector<float> results[2];
        for (int b : {0, 1}) {
            builds[b].result(&results[b]);
            builds[b].free(graphs[b]);
        }
        const bool same =
            results[0].size() == results[1].size() &&
            memcmp(results[0].data(), results[1].data(), results[0].size() * sizeof(float)) == 0;
        char line[160];
        snprintf(line, sizeof(line), "%-18s %9.1f %9.1f   %.4f  %.4f %.4f   %s\n", c.name,
                 quantile(us[0], 0.5), quantile(us[1], 0.5), quantile(quotients, 0.5),
                 quantile(quotients, 0.25), quantile(quotients, 0.75), same ? "same" : "DIFFER");
        fputs(line, stdout);
        fflush(stdout);
        table += line;
    }
    printf("\n%-18s %9s %9s   %-6s  %-13s   %s\n%s", "us of a step", "old", "new", "new/old", "quartiles",
           "bits", table.c_str());
    return 0;
}
