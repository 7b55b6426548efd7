// The ABI: argument checks, handles and the exception barrier. No logic.
#include "luce.h"

#include "accept.h"
#include "handles.h"
#include "op_run.h"
#include "quantize.h"
#include "sampler.h"
#include "session.h"

#include <cstdio>
#include <cstring>
#include <new>

using namespace luce;

namespace {

struct OpenFile {
    std::shared_ptr<GgufFile> gguf;
};

Handles<luce_file, OpenFile> g_files("file", uintptr_t(1) << 28);
Handles<luce_model, Model> g_models("model", uintptr_t(2) << 28);
Handles<luce_session, Session> g_sessions("session", uintptr_t(3) << 28);

// Runs f; what it throws becomes a status and the thread's last error.
template <typename F> luce_status guarded(F &&f) noexcept {
    try {
        f();
        return LUCE_OK;
    } catch (const Error &e) {
        set_last_error(e.what());
        return e.code();
    } catch (const std::bad_alloc &) {
        set_last_error("out of host memory");
        return LUCE_E_MEMORY;
    } catch (const std::exception &e) {
        set_last_error(e.what());
        return LUCE_E_INTERNAL;
    } catch (...) {
        set_last_error("unknown exception");
        return LUCE_E_INTERNAL;
    }
}

template <typename T> void need(const T *pointer, const char *name) {
    if (pointer == nullptr) {
        fail(LUCE_E_ARG, "%s is null", name);
    }
}

template <typename T> void check_struct(const T *s, const char *name) {
    need(s, name);
    if (s->struct_size != sizeof(T)) {
        fail(LUCE_E_ARG, "%s->struct_size is %llu, this library's is %zu", name,
             (unsigned long long) s->struct_size, sizeof(T));
    }
}

template <typename T> void check_optional(const T *s, const char *name) {
    if (s != nullptr) {
        check_struct(s, name);
    }
}

// Writes *out as a whole, keeping its struct_size.
template <typename T> void put(T *out, T value) {
    value.struct_size = sizeof(T);
    *out = value;
}

template <size_t N> void copy_text(char (&dst)[N], const std::string &text) {
    snprintf(dst, N, "%s", text.c_str());
}

void check_rows(const int32_t *parents, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        if (i == 0 ? parents[i] != -1 : (parents[i] < 0 || parents[i] >= int32_t(i))) {
            fail(LUCE_E_ARG, "row %u has parent %d, expected %s", i, parents[i],
                 i == 0 ? "-1" : "an earlier row");
        }
    }
}

std::shared_ptr<Model> describe(const OpenFile &file, const luce_model_params *params) {
    std::shared_ptr<GgufFile> head;
    if (params != nullptr && params->head != nullptr) {
        head = g_files.get(params->head)->gguf;
    }
    return Model::describe(file.gguf, head, find_device(params == nullptr ? nullptr : params->device));
}

} // namespace

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

luce_status luce_device_get(int32_t index, luce_device_info *out) {
    return guarded([&] {
        check_struct(out, "out");
        if (index < 0 || size_t(index) >= devices().size()) {
            fail(LUCE_E_ARG, "device %d: there are %zu", index, devices().size());
        }
        const Device &device = devices()[size_t(index)];
        luce_device_info info{};
        copy_text(info.name, device.name);
        copy_text(info.description, device.description());
        device.memory(&info.memory_free, &info.memory_total);
        info.is_gpu = device.gpu;
        put(out, info);
    });
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
                             const luce_session_params *session, luce_memory *out) {
    return guarded([&] {
        const auto f = g_files.get(file);
        check_optional(model, "model");
        check_optional(session, "session");
        check_struct(out, "out");
        const auto m = describe(*f, model);
        m->stand_in();
        put(out, Session::plan(*m, Session::resolve(*m, session)));
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
        *out = g_models.add(model);
    });
}

luce_status luce_model_close(luce_model *model) {
    return guarded([&] { g_models.remove(model); });
}

luce_status luce_model_get_info(luce_model *model, luce_model_info *out) {
    return guarded([&] {
        const auto m = g_models.get(model);
        check_struct(out, "out");
        const HParams &hp = m->hparams();
        luce_model_info info{};
        copy_text(info.architecture, m->architecture());
        copy_text(info.device, m->device().name);
        info.n_params = m->n_params();
        info.weight_bytes = m->weight_bytes();
        info.n_vocab = hp.n_vocab;
        info.n_embd = hp.n_embd;
        info.n_layer = hp.n_layer;
        info.n_nextn = hp.n_nextn;
        info.n_ctx_train = hp.n_ctx_train;
        info.has_head = m->weights().head != nullptr;
        put(out, info);
    });
}

luce_status luce_session_open(luce_session **out, luce_model *model, const luce_session_params *params) {
    return guarded([&] {
        need(out, "out");
        const auto m = g_models.get(model);
        check_optional(params, "params");
        *out = g_sessions.add(std::make_shared<Session>(m, Session::resolve(*m, params)));
    });
}

luce_status luce_session_close(luce_session *session) {
    return guarded([&] { g_sessions.remove(session); });
}

luce_status luce_session_reset(luce_session *session) {
    return guarded([&] { g_sessions.get(session)->reset(); });
}

luce_status luce_session_get_info(luce_session *session, luce_session_info *out) {
    return guarded([&] {
        const auto s = g_sessions.get(session);
        check_struct(out, "out");
        put(out, s->info());
    });
}

luce_status luce_session_set_sampling(luce_session *session, const luce_sampling *sampling) {
    return guarded([&] {
        const auto s = g_sessions.get(session);
        check_optional(sampling, "sampling");
        const luce_sampling greedy{};
        check_sampling(sampling == nullptr ? greedy : *sampling);
        s->set_sampling(sampling == nullptr ? greedy : *sampling);
    });
}

luce_status luce_session_prefill(luce_session *session, const int32_t *tokens, uint32_t n, int32_t *choice) {
    return guarded([&] {
        const auto s = g_sessions.get(session);
        need(tokens, "tokens");
        if (n == 0) {
            fail(LUCE_E_ARG, "prefill needs at least one token");
        }
        const int32_t chosen = s->prefill(tokens, n);
        if (choice != nullptr) {
            *choice = chosen;
        }
    });
}

luce_status luce_session_draft(luce_session *session, int32_t anchor, uint32_t n) {
    return guarded([&] { g_sessions.get(session)->draft(anchor, n); });
}

luce_status luce_session_get_draft(luce_session *session, int32_t *tokens, uint32_t n) {
    return guarded([&] {
        const auto s = g_sessions.get(session);
        need(tokens, "tokens");
        s->get_draft(tokens, n);
    });
}

luce_status luce_session_save(luce_session *session, void *data, uint64_t *size) {
    return guarded([&] {
        const auto s = g_sessions.get(session);
        need(size, "size");
        const uint64_t needed = s->save_size();
        if (data != nullptr && *size < needed) {
            fail(LUCE_E_ARG, "size is %llu, the session takes %llu bytes", (unsigned long long) *size,
                 (unsigned long long) needed);
        }
        if (data != nullptr) {
            s->save(static_cast<uint8_t *>(data));
        }
        *size = needed;
    });
}

luce_status luce_session_restore(luce_session *session, const void *data, uint64_t size) {
    return guarded([&] {
        const auto s = g_sessions.get(session);
        need(data, "data");
        s->restore(static_cast<const uint8_t *>(data), size);
    });
}

luce_status luce_session_verify(luce_session *session, const int32_t *tokens, const int32_t *parents,
                                uint32_t n, int32_t *choices) {
    return guarded([&] {
        const auto s = g_sessions.get(session);
        need(choices, "choices");
        s->verify(tokens, parents, n, choices);
    });
}

luce_status luce_session_commit(luce_session *session, const int32_t *path, uint32_t n) {
    return guarded([&] {
        const auto s = g_sessions.get(session);
        need(path, "path");
        s->commit(path, n);
    });
}

luce_status luce_session_get_logits(luce_session *session, uint32_t row, float *out, uint32_t n) {
    return guarded([&] {
        const auto s = g_sessions.get(session);
        need(out, "out");
        if (n != s->n_vocab()) {
            fail(LUCE_E_ARG, "n is %u, the vocabulary has %u", n, s->n_vocab());
        }
        s->read_logits(row, out);
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
        check_rows(parents, n);
        const std::vector<int32_t> accepted = accept(tokens, parents, choices, n, next);
        std::copy(accepted.begin(), accepted.end(), path);
        *n_path = uint32_t(accepted.size());
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

luce_status luce_op_run(const char *device, const char *op, luce_array *args, uint32_t n_args,
                        const int32_t *params, uint32_t n_params, luce_array *out) {
    return guarded([&] {
        need(op, "op");
        need(args, "args");
        need(out, "out");
        need(out->data, "out->data");
        for (uint32_t i = 0; i < n_args; i++) {
            need(args[i].data, "args[i].data");
        }
        if (n_params > 0) {
            need(params, "params");
        }
        run_op(device, op, args, n_args, params, n_params, out);
    });
}
