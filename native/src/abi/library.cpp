// The ABI of files, models and pure functions. It checks arguments and handles, and has no logic.
// abi/engine.cpp has the ABI of engines.
#include "luce.h"

#include "abi/abi.h"
#include "cpu/sampler.h"
#include "engine/accept.h"
#include "engine/engine.h"
#include "engine/tree.h"
#include "graph/architecture.h"
#include "graph/drafter.h"
#include "graph/vision.h"
#include "model/quantize.h"

#include <algorithm>
#include <cstdio>
#include <thread>

using namespace luce;

namespace {

struct OpenFile {
    std::shared_ptr<GgufFile> gguf;
};

auto &g_files = Handles<luce_file, OpenFile>::table("file", uintptr_t(1) << 28);
auto &g_towers = Handles<luce_tower, VisionTower>::table("tower", uintptr_t(6) << 28);

template <size_t N> void copy_text(char (&dst)[N], const std::string &text) {
    snprintf(dst, N, "%s", text.c_str());
}

std::shared_ptr<Model> describe(const OpenFile &file, const luce_model_params *params) {
    std::vector<DrafterFile> drafters;
    const uint32_t n = params == nullptr ? 0 : params->n_drafters;
    if (n > 0) {
        need(params->drafters, "drafters");
    }
    for (uint32_t i = 0; i < std::min(n, uint32_t(LUCE_MAX_DRAFTERS) + 1); i++) { // more are refused there
        drafters.push_back({g_files.get(params->drafters[i].file)->gguf, params->drafters[i].kind});
    }
    std::string names = params == nullptr || params->device == nullptr ? "auto" : params->device;
    const bool tensors = names.find('+') != std::string::npos;
    if (tensors && names.find(',') != std::string::npos) {
        fail(LUCE_E_ARG,
             "%s: a model's devices have layers each (a,b), or all have a part of each matrix (a+b)",
             names.c_str());
    }
    std::replace(names.begin(), names.end(), '+', ',');
    Split split(find_devices(names.c_str()), {});
    split.tensors = tensors;
    std::vector<const Device *> all = split.devices;
    if (params != nullptr && params->draft_device != nullptr) {
        all.push_back(split.drafts_on = &find_device(params->draft_device));
    }
    if (all.size() > LUCE_MAX_DEVICES) {
        fail(LUCE_E_ARG, "a model lies on at most %d devices, got %zu", LUCE_MAX_DEVICES, all.size());
    }
    for (size_t i = 0; i < all.size(); i++) { // a CPU may come twice, for tests
        if (all[i]->gpu && std::count(all.begin(), all.begin() + long(i), all[i]) > 0) {
            fail(LUCE_E_ARG, "%s is named twice: name each GPU once", all[i]->name.c_str());
        }
    }
    if (params != nullptr && params->n_layers > 0) {
        need(params->layers, "layers");
        split.layers.assign(params->layers, params->layers + params->n_layers);
    }
    return Model::describe(file.gguf, drafters, split, params == nullptr ? 0 : params->n_cpu_experts,
                           params == nullptr ? 0 : params->copy_bytes,
                           params != nullptr && params->experts_at_home != 0);
}

void check_tower(const VisionTower &tower, const Model &model) {
    const char *path = tower.file().path().c_str();
    if (tower.shape().E != model.hparams().n_embd) {
        fail(LUCE_E_FILE, "%s makes rows of width %u, and %s has width %u: the tower is of another model",
             path, tower.shape().E, model.file().path().c_str(), model.hparams().n_embd);
    }
    if (!model.takes_images()) {
        fail(LUCE_E_UNSUPPORTED, "%s: %s", model.file().path().c_str(), NO_IMAGES);
    }
}

} // namespace

Handles<luce_model, Model> &luce::model_handles() {
    static auto &handles = Handles<luce_model, Model>::table("model", uintptr_t(2) << 28);
    return handles;
}

int32_t luce_abi_version(void) {
    return LUCE_ABI_VERSION;
}

const char *luce_version(void) {
    return LUCE_VERSION_STRING;
}

const char *luce_last_error(void) {
    return last_error();
}

luce_status luce_set_log(luce_log_fn fn, void *user) {
    return guarded([&] { set_log(fn, user); });
}

luce_status luce_device_count(int32_t *count) {
    return guarded([&] {
        need(count, "count");
        *count = int32_t(devices().size());
    });
}

static const Device &device_at(int32_t index) {
    if (index < 0 || size_t(index) >= devices().size()) {
        fail(LUCE_E_ARG, "device %d: there are %zu", index, devices().size());
    }
    return devices()[size_t(index)];
}

luce_status luce_device_get(int32_t index, luce_device_info *out) {
    return guarded([&] {
        check_struct(out, "out");
        const Device &device = device_at(index);
        luce_device_info info{};
        copy_text(info.name, device.name);
        copy_text(info.description, device.description());
        device.memory(&info.memory_free, &info.memory_total);
        info.is_gpu = device.gpu;
        put(out, info);
    });
}

luce_status luce_device_gpu(int32_t index, luce_gpu_info *out) {
    return guarded([&] {
        check_struct(out, "out");
        put(out, gpu_info(device_at(index)));
    });
}

luce_status luce_device_bandwidth(int32_t index, uint32_t n_threads, uint64_t *bytes_per_second) {
    return guarded([&] {
        need(bytes_per_second, "bytes_per_second");
        if (n_threads < 1 || n_threads > 512) {
            fail(LUCE_E_ARG, "n_threads is %u, expected 1 to 512", n_threads);
        }
        *bytes_per_second = bandwidth_of(device_at(index), int(n_threads));
    });
}

const char *luce_device_missing(void) {
    try {
        return no_gpu().c_str();
    } catch (...) {
        return "";
    }
}

luce_status luce_file_open(luce_file **out, const char *path) {
    return guarded([&] {
        need(out, "out");
        need(path, "path");
        *out = g_files.add(std::make_shared<OpenFile>(OpenFile{GgufFile::open(path)}));
    });
}

luce_status luce_file_close(luce_file *file) {
    return guarded([&] { g_files.remove(file); });
}

luce_status luce_file_get_info(luce_file *file, luce_file_info *out) {
    return guarded([&] {
        const auto f = g_files.get(file);
        check_struct(out, "out");
        luce_file_info info{};
        info.size_bytes = f->gguf->size_bytes();
        info.n_kv = f->gguf->kvs().size();
        info.n_tensors = f->gguf->tensors().size();
        info.version = f->gguf->version();
        info.n_parts = uint32_t(f->gguf->parts().size());
        put(out, info);
    });
}

static const GgufKv &kv_at(const OpenFile &file, uint64_t index) {
    if (index >= file.gguf->kvs().size()) {
        fail(LUCE_E_ARG, "key %llu: the file has %zu", (unsigned long long) index, file.gguf->kvs().size());
    }
    return file.gguf->kvs()[index];
}

luce_status luce_file_get_kv(luce_file *file, uint64_t index, luce_kv *out) {
    return guarded([&] {
        const auto f = g_files.get(file);
        check_struct(out, "out");
        const GgufKv &kv = kv_at(*f, index);
        put(out, luce_kv{0, kv.name.c_str(), kv.data, kv.count, kv.type, kv.elem_type});
    });
}

luce_status luce_file_get_strings(luce_file *file, uint64_t index, const char **data, uint64_t *lengths) {
    return guarded([&] {
        const auto f = g_files.get(file);
        need(data, "data");
        need(lengths, "lengths");
        for (const std::string_view s : f->gguf->strings(kv_at(*f, index))) {
            *data++ = s.data();
            *lengths++ = s.size();
        }
    });
}

luce_status luce_file_get_tensor(luce_file *file, uint64_t index, luce_tensor_info *out) {
    return guarded([&] {
        const auto f = g_files.get(file);
        check_struct(out, "out");
        if (index >= f->gguf->tensors().size()) {
            fail(LUCE_E_ARG, "tensor %llu: the file has %zu", (unsigned long long) index,
                 f->gguf->tensors().size());
        }
        const GgufTensor &t = f->gguf->tensors()[index];
        luce_tensor_info info{};
        info.name = t.name.c_str();
        info.type_name = type_name(t.type);
        info.data = t.data;
        std::copy(t.ne, t.ne + LUCE_MAX_DIMS, info.ne);
        info.size_bytes = t.size;
        info.type = t.type;
        info.n_dims = t.n_dims;
        put(out, info);
    });
}

luce_status luce_plan_memory(luce_file *file, const luce_model_params *model,
                             const luce_engine_params *engine, luce_memory *out) {
    return guarded([&] {
        const auto f = g_files.get(file);
        check_optional(model, "model");
        check_optional(engine, "engine");
        check_struct(out, "out");
        auto m = describe(*f, model);
        m->stand_in();
        const EngineParams params = Engine::resolve(*m, engine);
        if (m->n_with_layers() > 1 && m->n_ranks() == 1 && model->n_layers == 0) {
            const std::vector<uint32_t> layers = Engine::share_layers(*m, params);
            luce_model_params with = *model;
            with.layers = layers.data();
            with.n_layers = uint32_t(layers.size());
            m = describe(*f, &with);
            m->stand_in();
        }
        put(out, Engine::plan(*m, params));
    });
}

luce_status luce_model_open(luce_model **out, luce_file *file, const luce_model_params *params) {
    return guarded([&] {
        need(out, "out");
        const auto f = g_files.get(file);
        check_optional(params, "params");
        const auto model = describe(*f, params);
        model->load([&](float part) {
            return params == nullptr || params->progress == nullptr ||
                   params->progress(part, params->progress_user) == 0;
        });
        *out = model_handles().add(model);
    });
}

luce_status luce_model_close(luce_model *model) {
    return guarded([&] { model_handles().remove(model); });
}

luce_status luce_model_get_info(luce_model *model, luce_model_info *out) {
    return guarded([&] {
        const auto m = model_handles().get(model);
        check_struct(out, "out");
        const HParams &hp = m->hparams();
        luce_model_info info{};
        copy_text(info.architecture, m->architecture().name);
        copy_text(info.device, m->device_names());
        info.n_params = m->n_params();
        info.weight_bytes = m->weight_bytes();
        info.n_vocab = hp.n_vocab;
        info.n_embd = hp.n_embd;
        info.n_layer = hp.n_layer;
        info.n_nextn = hp.n_nextn;
        info.n_ctx_train = hp.n_ctx_train;
        info.n_drafters = uint32_t(m->weights().drafters.size());
        put(out, info);
    });
}

luce_drafter_info luce::drafter_info(const Model &model, uint32_t index) {
    const Drafter &drafter = *model.weights().drafters[index];
    luce_drafter_info info{};
    copy_text(info.kind, drafter.kind->name);
    info.form = int32_t(drafter.form);
    info.n_draft = drafter.n_draft;
    info.n_block = drafter.n_block;
    info.n_list = drafter.n_list;
    info.drafter = index;
    info.has_kv = !drafter.kv.empty();
    return info;
}

luce_status luce_model_get_drafter(luce_model *model, uint32_t index, luce_drafter_info *out) {
    return guarded([&] {
        const auto m = model_handles().get(model);
        check_struct(out, "out");
        if (index >= m->weights().drafters.size()) {
            fail(LUCE_E_ARG, "drafter %u: the model was opened with %zu", index,
                 m->weights().drafters.size());
        }
        put(out, drafter_info(*m, index));
    });
}

luce_status luce_tower_open(luce_tower **out, luce_file *file, const luce_tower_params *params) {
    return guarded([&] {
        need(out, "out");
        check_optional(params, "params");
        const luce_tower_params asked = params == nullptr ? luce_tower_params{} : *params;
        if (asked.max_rows != 0 && (asked.max_rows < FEWEST_IMAGE_ROWS || asked.max_rows > MOST_IMAGE_ROWS)) {
            fail(LUCE_E_ARG, "max_rows is %u, expected 0 or %u to %u", asked.max_rows, FEWEST_IMAGE_ROWS,
                 MOST_IMAGE_ROWS);
        }
        const Device &device = find_device(asked.device == nullptr ? "cpu" : asked.device);
        *out = g_towers.add(open_tower(g_files.get(file)->gguf, device, asked.max_rows));
    });
}

luce_status luce_tower_check(luce_tower *tower, luce_model *model) {
    return guarded([&] { check_tower(*g_towers.get(tower), *model_handles().get(model)); });
}

luce_status luce_tower_close(luce_tower *tower) {
    return guarded([&] { g_towers.remove(tower); });
}

luce_status luce_tower_get_info(luce_tower *tower, luce_tower_info *out) {
    return guarded([&] {
        const auto t = g_towers.get(tower);
        check_struct(out, "out");
        const VisionTower::Shape &s = t->shape();
        put(out, luce_tower_info{0, t->weight_bytes(), t->identity(), t->scratch_bytes(), t->max_rows(), s.E,
                                 s.D, s.n_layer, s.patch, s.merge});
    });
}

luce_status luce_tower_encode(luce_tower *tower, const float *patches, uint32_t rows, uint32_t columns,
                              uint32_t n_threads, luce_progress_fn progress, void *progress_user, float *out,
                              uint64_t n) {
    return guarded([&] {
        const auto t = g_towers.get(tower);
        need(patches, "patches");
        need(out, "out");
        const VisionTower::Shape &s = t->shape();
        constexpr uint32_t MOST = 1 << 16; // of a side
        if (rows < 1 || columns < 1 || rows > MOST || columns > MOST || rows % s.merge != 0 ||
            columns % s.merge != 0) {
            fail(LUCE_E_ARG, "an image has %u x %u patches, expected multiples of %u up to %u", rows, columns,
                 s.merge, MOST);
        }
        const uint64_t expected = uint64_t(rows) * columns / (s.merge * s.merge) * s.E;
        if (n != expected) {
            fail(LUCE_E_ARG, "n is %llu, the rows of %u x %u patches have %llu values",
                 (unsigned long long) n, rows, columns, (unsigned long long) expected);
        }
        if (n_threads > 512) {
            fail(LUCE_E_ARG, "n_threads is %u, expected up to 512", n_threads);
        }
        const uint32_t cores = std::max(std::thread::hardware_concurrency(), 1u);
        t->encode(
            patches, rows, columns, int(n_threads == 0 ? std::min(cores, 16u) : n_threads),
            [&](float part) { return progress == nullptr || progress(part, progress_user) == 0; }, out);
    });
}

luce_status luce_sample(const float *logits, uint32_t n, const luce_sampling *sampling, uint64_t position,
                        int32_t *token) {
    return guarded([&] {
        need(logits, "logits");
        need(token, "token");
        check_struct(sampling, "sampling");
        check_sampling(*sampling);
        if (n == 0 || n > uint32_t(INT32_MAX)) {
            fail(LUCE_E_ARG, "there are %u logits", n);
        }
        *token = sample(logits, n, *sampling, position);
    });
}

luce_status luce_accept(const int32_t *tokens, const int32_t *parents, const int32_t *choices, uint32_t n,
                        int32_t *path, uint32_t *n_path, int32_t *next) {
    return guarded([&] {
        need(tokens, "tokens");
        need(choices, "choices");
        need(path, "path");
        need(n_path, "n_path");
        need(next, "next");
        if (n < 1 || n > LUCE_MAX_ROWS) {
            fail(LUCE_E_ARG, "a step has 1 to %d rows, got %u", LUCE_MAX_ROWS, n);
        }
        int32_t chain[LUCE_MAX_ROWS];
        for (uint32_t i = 0; i < n; i++) {
            chain[i] = int32_t(i) - 1;
        }
        parents = parents == nullptr ? chain : parents;
        check_parents(parents, n);
        *n_path = accept(tokens, parents, choices, n, path, next);
    });
}

luce_status luce_tree(int32_t anchor, const luce_lists *lists, uint32_t budget, int32_t *tokens,
                      int32_t *parents, uint32_t *n) {
    return guarded([&] {
        check_struct(lists, "lists");
        need(lists->ids, "lists->ids");
        need(lists->scores, "lists->scores");
        need(tokens, "tokens");
        need(parents, "parents");
        need(n, "n");
        if (budget >= LUCE_MAX_ROWS) {
            fail(LUCE_E_ARG, "a step has %d rows at most: an anchor and a tree of %u are more", LUCE_MAX_ROWS,
                 budget);
        }
        const Tree tree = make_tree(anchor, tree_lists(*lists), budget);
        std::copy(tree.tokens.begin(), tree.tokens.end(), tokens);
        std::copy(tree.parents.begin(), tree.parents.end(), parents);
        *n = uint32_t(tree.tokens.size());
    });
}

luce_status luce_type_get(int32_t type, luce_type_info *out) {
    return guarded([&] {
        check_struct(out, "out");
        luce_type_info info{};
        describe_type(type, &info);
        put(out, info);
    });
}

luce_status luce_quantize(int32_t type, const float *src, uint64_t n_rows, uint64_t n_per_row, void *dst,
                          uint64_t dst_size) {
    return guarded([&] {
        need(src, "src");
        need(dst, "dst");
        quantize(type, src, n_rows, n_per_row, dst, dst_size);
    });
}
