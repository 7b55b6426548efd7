// Exits with all handles open: `left_open LIBRARY MODEL DEVICE`. On a CPU it compares the process's
// threads after exit() has destroyed the library's variables with those of before: an engine's helpers are there as long
// as the engine is. Exit status 0: they are all there.
#include "luce.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <filesystem>

static long threads() {
    long n = 0;
    for ([[maybe_unused]] const auto &thread : std::filesystem::directory_iterator("/proc/self/task")) {
        n++;
    }
    return n;
}

static long before; // it stays 0 on a GPU, where an engine has no helpers

static void compare() {
    const long now = threads();
    if (now < before) {
        fprintf(stderr, "%ld threads of %ld are left\n", now, before);
    }
    _Exit(now < before ? 1 : 0);
}

template <typename F> static F *found(void *library, const char *name) {
    return reinterpret_cast<F *>(dlsym(library, name));
}

static void must(luce_status status) {
    if (status != LUCE_OK) {
        _Exit(2);
    }
}

int main(int, char **argv) {
    atexit(compare); // it is registered ahead of what the library registers, and so runs last
    void *library = dlopen(argv[1], RTLD_NOW);
    if (library == nullptr) {
        fprintf(stderr, "%s\n", dlerror());
        _Exit(2);
    }
#define LUCE(name) found<decltype(name)>(library, #name)
    luce_file *file = nullptr;
    luce_model *model = nullptr;
    luce_engine *engine = nullptr;
    luce_sequence *sequence = nullptr;
    must(LUCE(luce_file_open)(&file, argv[2]));
    luce_model_params on = {};
    on.struct_size = sizeof(on);
    on.device = argv[3];
    must(LUCE(luce_model_open)(&model, file, &on));
    luce_engine_params params = {};
    params.struct_size = sizeof(params);
    params.n_ctx = 64;
    params.n_threads = 3;
    must(LUCE(luce_engine_open)(&engine, model, &params));
    must(LUCE(luce_sequence_open)(&sequence, engine));
    const int32_t token = 1;
    must(LUCE(luce_sequence_prefill)(sequence, &token, 1, nullptr));
    before = strcmp(argv[3], "cpu") == 0 ? threads() : 0;
    return before == 1 ? 3 : 0;
}
