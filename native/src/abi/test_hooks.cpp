#include "abi/test_hooks.h"

#include "abi/abi.h"
#include "cpu/sampler.h"
#include "engine/checkpoint.h"
#include "engine/lookup.h"
#include "engine/penalties.h"
#include "graph/rules.h"
#include "graph/vision.h"
#include "model/model.h"
#include "model/recode.h"
#include "ops/row.h"
#include "step/faults.h"
#include "step/step.h"
#include "step/threads.h"

#ifdef LUCE_USE_CUDA
extern "C" void *luce_cuda_stream(ggml_backend_t backend); // cuda_stream.cu defines it
#endif

namespace luce {
namespace {

constexpr int N_THREADS = 2; // a CPU has two, so that parts of an op meet each other

ggml_tensor *make_tensor(ggml_context *ctx, const luce_array &array) {
    if (array.type != GGML_TYPE_I32 && array.type != GGML_TYPE_I8 && !is_weight_type(ggml_type(array.type))) {
        fail(LUCE_E_ARG, "an op's arrays are I32, I8 or of a weight type, got type %d", array.type);
    }
    int64_t ne[GGML_MAX_DIMS], elements = 1;
    for (int d = 0; d < GGML_MAX_DIMS; d++) {
        ne[d] = int64_t(array.ne[d]);
        if (ne[d] < 1 || ne[d] > (int64_t(1) << 32) || (elements *= ne[d]) > (int64_t(1) << 32)) {
            fail(LUCE_E_ARG, "dimension %d of an array is %llu", d, (unsigned long long) array.ne[d]);
        }
    }
    if (ne[0] % ggml_blck_size(ggml_type(array.type)) != 0) {
        fail(LUCE_E_ARG, "rows of %lld values are no whole blocks of %s", (long long) ne[0],
             ggml_type_name(ggml_type(array.type)));
    }
    return ggml_new_tensor(ctx, ggml_type(array.type), GGML_MAX_DIMS, ne);
}

void run_op(const char *device_name, const char *name, luce_array *args, uint32_t n_args,
            const int32_t *params, uint32_t n_params, luce_array *out) {
    const Device &device = find_device(device_name);
    const CustomOp *op = find_op(name);
    if (op == nullptr) {
        fail(LUCE_E_ARG, "there is no op %s", name);
    }
    if (device.gpu ? !op->on_cuda() : !op->on_cpu()) {
        fail(LUCE_E_UNSUPPORTED, "%s has no op %s", device.name.c_str(), name);
    }
    const Context context = new_context(ggml_tensor_overhead() * (n_args + 2));
    ggml_context *ctx = context.get();
    std::vector<ggml_tensor *> tensors;
    for (uint32_t i = 0; i < n_args; i++) {
        tensors.push_back(args[i].data == nullptr ? nullptr : make_tensor(ctx, args[i]));
    }
    ggml_tensor *result = op->add(ctx, tensors, params, n_params).node;
    const ggml_tensor *given = make_tensor(ctx, *out);
    if (given->type != result->type) {
        fail(LUCE_E_ARG, "%s: the result has type %s, expected %s", name, ggml_type_name(given->type),
             ggml_type_name(result->type));
    }
    if (ggml_nelements(given) < ggml_nelements(result)) {
        fail(LUCE_E_ARG, "%s: the result has %lld values, expected %lld or more", name,
             (long long) ggml_nelements(given), (long long) ggml_nelements(result));
    }
    Backend backend = make_backend(device, N_THREADS);
    Buffer buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx, device.buffer_type()));
    if (!buffer) {
        fail(LUCE_E_MEMORY, "%s: allocating the op's arrays failed", device.name.c_str());
    }
    for (uint32_t i = 0; i < n_args; i++) {
        if (tensors[i] != nullptr) {
            ggml_backend_tensor_set(tensors[i], args[i].data, 0, ggml_nbytes(tensors[i]));
        }
    }
    ggml_backend_tensor_set(result, out->data, 0, ggml_nbytes(result)); // tests poison it
    make_current(device);
    check_current(device);
    OpCall call;
    op->bind(result, call);
    if (device.gpu) {
#ifdef LUCE_USE_CUDA
        if (const int error = op->cuda(call, luce_cuda_stream(backend.get())); error != 0) {
            fail(LUCE_E_DEVICE, "%s: %s: %s", device.name.c_str(), name, cuda::error_text(error));
        }
#endif
    } else {
        Team team(N_THREADS);
        team.run(N_THREADS, [&](int part) { op->cpu(call, part, N_THREADS); });
    }
    ggml_backend_synchronize(backend.get());
    for (uint32_t i = 0; i < n_args; i++) {
        if (tensors[i] != nullptr && op->writes(i)) {
            ggml_backend_tensor_get(tensors[i], args[i].data, 0, ggml_nbytes(tensors[i]));
        }
    }
    ggml_backend_tensor_get(result, out->data, 0, ggml_nbytes(result));
}

} // namespace
} // namespace luce

luce_status luce_op_run(const char *device, const char *op, luce_array *args, uint32_t n_args,
                        const int32_t *params, uint32_t n_params, luce_array *out) {
    using namespace luce;
    return guarded([&] {
        need(op, "op");
        need(args, "args");
        need(out, "out");
        need(out->data, "out->data");
        if (n_params > 0) {
            need(params, "params");
        }
        run_op(device, op, args, n_args, params, n_params, out);
    });
}

luce_status luce_fault(int32_t fault, uint64_t after) {
    using namespace luce;
    return guarded([&] {
        if (fault < int32_t(Fault::none) || fault > int32_t(Fault::leave)) {
            fail(LUCE_E_ARG, "there is no fault %d", fault);
        }
        ask_for(Fault(fault), after);
    });
}

static const luce::Rule &rule_of(uint32_t index) {
    if (index >= luce::rules().size()) {
        luce::fail(LUCE_E_ARG, "there are %zu rules, no rule %u", luce::rules().size(), index);
    }
    return luce::rules()[index];
}

luce_status luce_rule(uint32_t index, const char **name, int32_t *same, uint64_t *uses) {
    using namespace luce;
    return guarded([&] {
        need(name, "name");
        need(same, "same");
        need(uses, "uses");
        *name = rule_of(index).name;
        *same = rule_of(index).bits == Bits::same;
        *uses = uses_of_rule(index);
    });
}

luce_status luce_switch_rule(uint32_t index, int32_t on) {
    using namespace luce;
    return guarded([&] {
        rule_of(index);
        switch_rule(index, on != 0);
    });
}

luce_status luce_pretend_device(const char *name, uint64_t memory) {
    using namespace luce;
    return guarded([&] {
        need(name, "name");
        pretend_device(name, memory);
    });
}

luce_status luce_part_devices(int32_t on) {
    using namespace luce;
    return guarded([&] { part_devices(on != 0); });
}

luce_status luce_thread_stages(int32_t on, uint32_t slow) {
    using namespace luce;
    return guarded([&] { thread_stages(on != 0, slow); });
}

luce_status luce_hold_copies(int32_t at) {
    using namespace luce;
    return guarded([&] { hold_copies(at); });
}

luce_status luce_time_steps(int32_t on) {
    using namespace luce;
    return guarded([&] { time_steps(on != 0); });
}

luce_status luce_leave_device(int32_t index) {
    using namespace luce;
    return guarded([&] { leave_current(index); });
}

luce_status luce_sampling_run(const uint32_t *words, const float *z, uint64_t n, float *minus_log,
                              float *gumbel, float *bound, uint64_t *mass) {
    using namespace luce;
    return guarded([&] {
        for (const void *array : {(const void *) words, (const void *) z, (const void *) minus_log,
                                  (const void *) gumbel, (const void *) bound, (const void *) mass}) {
            need(array, "an array");
        }
        for (uint64_t i = 0; i < n; i++) {
            minus_log[i] = minus_log_uniform(words[i]);
            gumbel[i] = luce::gumbel(words[i]);
            bound[i] = gumbel_bound(words[i]);
            mass[i] = mass_of(z[i]);
        }
    });
}

luce_status luce_penalise(float *logits, uint32_t n, const luce_penalties *penalties, const int32_t *tokens,
                          uint32_t n_tokens) {
    using namespace luce;
    return guarded([&] {
        need(logits, "logits");
        check_struct(penalties, "penalties");
        const Penalties checked = check_penalties(*penalties, n);
        std::vector<int32_t> before;
        for (uint32_t i = 0; i < n_tokens; i++) {
            need(tokens, "tokens");
            if (tokens[i] < 0 || uint32_t(tokens[i]) >= n) {
                fail(LUCE_E_ARG, "token %u is %d, there are %u logits", i, tokens[i], n);
            }
            before.push_back(tokens[i]);
        }
        penalise(logits, n, checked, before);
    });
}

luce_status luce_recode(int32_t from, const uint8_t *src, uint64_t n, int32_t table, int32_t *to,
                        uint8_t *dst, uint64_t dst_size) {
    using namespace luce;
    return guarded([&] {
        need(src, "src");
        need(to, "to");
        need(dst, "dst");
        if (from < 0 || from >= GGML_TYPE_COUNT || !is_weight_type(ggml_type(from))) {
            fail(LUCE_E_ARG, "%d is no type of weights", from);
        }
        const auto type = ggml_type(from);
        const Recoding how = {type, table != 0 ? recoded_table(type) : recoded_matrix(type)};
        const uint64_t units = n / uint64_t(how.values());
        if (units * how.bytes_to() > dst_size) {
            fail(LUCE_E_ARG, "dst_size is %llu, %llu are needed", (unsigned long long) dst_size,
                 (unsigned long long) (units * how.bytes_to()));
        }
        *to = how.to;
        recode(how, src, dst, units);
    });
}

luce_status luce_lookup(const int32_t *tokens, uint32_t n_tokens, int32_t *draft, uint32_t *n,
                        uint32_t *matched) {
    using namespace luce;
    return guarded([&] {
        need(tokens, "tokens");
        need(draft, "draft");
        need(n, "n");
        need(matched, "matched");
        if (n_tokens < 1) {
            fail(LUCE_E_ARG, "there are no tokens to look at");
        }
        const std::vector<int32_t> text(tokens, tokens + n_tokens - 1);
        *n = Lookup(n_tokens).find(text, tokens[n_tokens - 1], draft, *n, matched);
    });
}

luce_status luce_block_towers(uint64_t bytes) {
    return luce::guarded([&] { luce::VisionTower::block_bytes_on_cpu = bytes; });
}
