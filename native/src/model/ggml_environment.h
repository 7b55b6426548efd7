/* Stands ahead of all sources of ggml-cpu and ggml-cuda (CMakeLists.txt): they get settings from here, and not from the
 * environment, which a library neither reads nor writes. Some of ggml's variables change what is computed. */
#ifndef LUCE_GGML_ENVIRONMENT_H
#define LUCE_GGML_ENVIRONMENT_H

/* The standard headers come first, since they use the names. */
#ifdef __cplusplus
#include <cstdlib>
#endif
#include <stdlib.h>
#include <string.h>

static inline char *luce_ggml_setting(const char *name) {
    /* ggml's programmatic dependent launches lose a dependency around F16 attention on Hopper: logits were off by 1.6 and
     * differed between runs (ggml 0.25.3; tests/core/graph/test_model.py compares the bits of two runs). */
    static char off[] = "0";
    return strcmp(name, "GGML_CUDA_PDL") == 0 ? off : NULL;
}

#define getenv luce_ggml_setting
#define setenv(name, value, overwrite) ((void) 0)

#endif
