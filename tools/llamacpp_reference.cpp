// What llama.cpp makes of three things that its programs do not tell: a model's logits, what drafts, and a tower's rows.
//
//     llamacpp_reference logits MODEL                  of the tokens on stdin: F32 logits behind each on stdout
//     llamacpp_reference KIND TARGET DRAFTER N         of each line of tokens on stdin: N drafts behind the last of them, by
//                                                      an assistant (KIND is draft-mtp), DFlash2 (draft-dflash) or DSpark
//                                                      (draft-dspark)
//     llamacpp_reference rows MMPROJ WIDTH HEIGHT      of F32 pixels on stdin (height, width, 3): F32 rows on stdout
//
// tools/make_llamacpp_reference.py builds it against the libraries of the archive and runs it.

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "common.h"
#include "llama.h"
#include "speculative.h"

#include "clip-impl.h" // It leaves out what common.h has, if that comes first.

namespace {

void require(bool holds, const char *what) {
    if (!holds) {
        std::fprintf(stderr, "%s failed\n", what);
        std::exit(1);
    }
}

llama_model *load(const char *path) {
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 0;
    llama_model *model = llama_model_load_from_file(path, params);
    require(model != nullptr, "llama_model_load_from_file");
    return model;
}

llama_context_params context_params(uint32_t n_ctx) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = n_ctx;
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    return params;
}

int logits(const char *path) {
    llama_model *model = load(path);
    llama_context *ctx = llama_init_from_model(model, context_params(1024));
    require(ctx != nullptr, "the context");
    common_batch batch(ctx);
    int n = 0;
    for (llama_token token; std::cin >> token; ++n) {
        batch.add(token, static_cast<llama_pos>(n), 0, true);
    }
    require(llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get()) == 0, "the tokens");
    const size_t n_vocab = static_cast<size_t>(llama_vocab_n_tokens(llama_model_get_vocab(model)));
    for (int i = 0; i < n; ++i) {
        require(std::fwrite(llama_get_logits_ith(ctx, i), sizeof(float), n_vocab, stdout) == n_vocab,
                "writing logits");
    }
    return 0;
}

int drafts(const std::string &kind, const char *target, const char *file, int n) {
    const common_speculative_type type = common_speculative_type_from_name(kind);
    llama_context_params params = context_params(512);
    llama_context *ctx = llama_init_from_model(load(target), params);
    require(ctx != nullptr, "the target's context");
    if (type == COMMON_SPECULATIVE_TYPE_DRAFT_MTP) {
        params.ctx_type = LLAMA_CONTEXT_TYPE_MTP;
    }
    params.ctx_other = ctx;
    llama_context *drafter = llama_init_from_model(load(file), params);
    require(drafter != nullptr, "the drafter's context");

    common_params_speculative how;
    how.types = {type};
    how.draft.n_max = n;
    how.draft.backend_sampling = false; // of a context that a server would have made for it
    how.draft.ctx_tgt = ctx;
    how.draft.ctx_dft = drafter;
    common_speculative *speculative = common_speculative_init(how, 1);
    require(speculative != nullptr, "common_speculative_init");

    common_batch batch(ctx);
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        llama_tokens prompt, made;
        for (llama_token token; words >> token;) {
            prompt.push_back(token);
        }
        const llama_token last = prompt.back();
        prompt.pop_back();
        llama_memory_clear(llama_get_memory(ctx), true);
        if (type != COMMON_SPECULATIVE_TYPE_DRAFT_MTP) { // It has a memory of its own.
            llama_memory_clear(llama_get_memory(drafter), true);
        }
        batch.clear();
        for (size_t i = 0; i < prompt.size(); ++i) {
            batch.add(prompt[i], static_cast<llama_pos>(i), 0, true);
        }
        require(llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get()) == 0, "the prompt");
        common_speculative_begin(speculative, 0, prompt);
        require(common_speculative_process(speculative, batch), "common_speculative_process");
        auto &asked = common_speculative_get_draft_params(speculative, 0);
        asked.drafting = true;
        asked.pos0 = static_cast<llama_pos>(prompt.size());
        asked.id_last = last;
        asked.prompt = &prompt;
        asked.result = &made;
        common_speculative_draft(speculative);
        for (llama_token token : made) {
            std::cout << token << ' ';
        }
        std::cout << std::endl;
    }
    return 0;
}

int rows(const char *mmproj, int width, int height) {
    clip_context_params params = {};
    params.flash_attn_type = CLIP_FLASH_ATTN_TYPE_DISABLED;
    params.image_min_tokens = params.image_max_tokens = -1;
    clip_ctx *ctx = clip_init(mmproj, params).ctx_v;
    require(ctx != nullptr, "clip_init");
    std::vector<float> pixels(static_cast<size_t>(width) * height * 3), found;
    require(std::fread(pixels.data(), sizeof(float), pixels.size(), stdin) == pixels.size(),
            "reading pixels");
    clip_image_f32 image;
    image.set_size({width, height}, false, false);
    image.cpy_buf(pixels);
    found.resize(static_cast<size_t>(clip_n_output_tokens(ctx, &image)) * clip_n_mmproj_embd(ctx));
    require(clip_image_encode(ctx, 1, &image, found), "clip_image_encode");
    require(std::fwrite(found.data(), sizeof(float), found.size(), stdout) == found.size(), "writing rows");
    return 0;
}

} // namespace

int main(int argc, char **argv) {
    llama_backend_init();
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "logits" && argc == 3) {
        return logits(argv[2]);
    }
    require(argc == 5, "reading the arguments");
    if (what == "rows") {
        return rows(argv[2], std::atoi(argv[3]), std::atoi(argv[4]));
    }
    return drafts(what, argv[2], argv[3], std::atoi(argv[4]));
}
