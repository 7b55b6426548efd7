// The ABI's files share what is here: the exception barrier, argument checks and the handles of models.
#pragma once

#include "abi/handles.h"
#include "model/model.h"

#include <new>

namespace luce {

// The handles of models: abi/library.cpp hands them out, and abi/engine.cpp takes them.
Handles<luce_model, Model> &model_handles();

// What luce.h says of a drafter of the model's list.
luce_drafter_info drafter_info(const Model &model, uint32_t index);

// Runs f. What it throws becomes a status and the thread's last error.
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

} // namespace luce
