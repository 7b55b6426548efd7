#include "ops/row.h"

#include "model/model.h"

#include <algorithm>
#include <cstring>

namespace luce {
namespace {

// In op_params, an op's params follow ggml's own {function, n_tasks, userdata}.
constexpr size_t PARAMS_AT = 6, MOST_PARAMS = GGML_MAX_OP_PARAMS / sizeof(int32_t) - PARAMS_AT;

// Stands for the address of a tensor that has none yet: what is there and what is left out can be told apart.
uint8_t *const NOT_PLACED = reinterpret_cast<uint8_t *>(uintptr_t(256));

uint8_t *address(const ggml_tensor *t) {
    return t->data == nullptr ? NOT_PLACED : static_cast<uint8_t *>(t->data);
}

void set_pointer(void *args, int offset, const void *value) {
    memcpy(static_cast<uint8_t *>(args) + offset, &value, sizeof(value));
}

void not_run_by_ggml(ggml_tensor *, int, int, void *) {
    GGML_ABORT("ggml was to run an op of luce's");
}

} // namespace

std::string Extent::text() const {
    std::string text = any ? "any" : times != 1 || n == 0 ? std::to_string(times) : "";
    for (int i = 0; i < n; i++) {
        text += (text.empty() ? "" : "*") + std::string(of[i].name);
    }
    return text;
}

int64_t Extents::of(const Extent &extent) const {
    int64_t product = extent.times;
    for (int i = 0; i < extent.n; i++) {
        product *= value[extent.of[i].id];
    }
    return product;
}

void NumberField::set(void *args, int64_t value) const {
    uint8_t *field = static_cast<uint8_t *>(args) + offset;
    const int32_t low = int32_t(value);
    if (size == sizeof(int64_t)) {
        memcpy(field, &value, sizeof(value));
    } else if (size == sizeof(int32_t)) {
        memcpy(field, &low, sizeof(low));
    } else {
        *field = value != 0; // it is a bool
    }
}

int64_t NumberField::get(const void *args) const {
    const uint8_t *field = static_cast<const uint8_t *>(args) + offset;
    int64_t value = 0;
    int32_t low = 0;
    if (size == sizeof(int64_t)) {
        memcpy(&value, field, sizeof(value));
        return value;
    }
    if (size == sizeof(int32_t)) {
        memcpy(&low, field, sizeof(low));
        return low;
    }
    return *field;
}

ggml_tensor *OpNode::operator[](int i) const {
    const Result &r = results[i];
    if (n == 1 && r.bytes == ggml_nbytes(node)) {
        return node;
    }
    // Values of the node, which are F32 where there are several results.
    const size_t rows = r.ne[1] == 0 ? 1 : size_t(r.ne[1]), row = r.bytes / rows;
    const int64_t n_values = int64_t(row / ggml_type_size(node->type));
    return r.ne[1] == 0 ? ggml_view_1d(ctx, node, n_values, r.offset)
                        : ggml_view_2d(ctx, node, n_values, r.ne[1], row, r.offset);
}

std::vector<const CustomOp *> &CustomOp::all() {
    static auto &list = *new std::vector<const CustomOp *>;
    return list;
}

const CustomOp *find_op(const char *name) {
    for (const CustomOp *op : CustomOp::all()) {
        if (strcmp(op->name, name) == 0) {
            return op;
        }
    }
    return nullptr;
}

const CustomOp *custom_op(const ggml_tensor *node) {
    if (node->op != GGML_OP_CUSTOM) {
        return nullptr;
    }
    struct { // ggml_custom_4d writes this layout
        ggml_custom_op_t fun;
        int n_tasks;
        void *userdata;
    } header;
    static_assert(sizeof(header) <= PARAMS_AT * sizeof(int32_t), "our params must not overlap ggml's");
    memcpy(&header, node->op_params, sizeof(header));
    return static_cast<const CustomOp *>(header.userdata);
}

std::string CustomOp::usage() const {
    std::string text = std::string(name) + " takes";
    for (const Arg &arg : args_) {
        text += " " + std::string(arg.field) + "{";
        for (size_t d = 0; d < arg.shape.size(); d++) {
            text += (d == 0 ? "" : ",") + arg.shape[d].text();
        }
        text += std::string("}") + (arg.optional ? "?" : "") + (arg.most > 1 ? ".." : "");
    }
    for (size_t i = 0; i < params_.size(); i++) {
        text += (i == 0 ? "; params " : " ") + std::string(params_[i].first);
    }
    return text;
}

// ---- from tensors to a struct of arguments ----

void CustomOp::check(const Arg &arg, const ggml_tensor *t) const {
    const bool fits = arg.form == ArgForm::any   ? true
                      : arg.form == ArgForm::f32 ? t->type == GGML_TYPE_F32
                      : arg.form == ArgForm::i32 ? t->type == GGML_TYPE_I32
                      : arg.form == ArgForm::i64 ? t->type == GGML_TYPE_I64
                      : arg.form == ArgForm::rows
                          ? t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_I8
                          : t->type != GGML_TYPE_I32 && t->type != GGML_TYPE_I64 && t->type != GGML_TYPE_I8;
    if (!fits) {
        fail(LUCE_E_ARG, "%s: %s has type %s", name, arg.field, type_name(t->type));
    }
    if (!arg.row_field && arg.offset >= 0 && !ggml_is_contiguous(t)) {
        fail(LUCE_E_ARG, "%s: rows of %s do not follow each other", name, arg.field);
    }
}

// Returns what the symbols of the row stand for. Products are known when other extents are.
Extents CustomOp::solve(ggml_tensor *const *tensors) const {
    Extents known;
    const auto misfit = [&](const Arg &arg, size_t d, int64_t found, const Extent &extent) {
        const int64_t expected = known.of(extent);
        fail(LUCE_E_ARG, "%s: dimension %zu of %s is %lld, expected %lld%s", name, d, arg.field,
             (long long) found, (long long) expected,
             extent.n == 0 ? "" : (" (" + extent.text() + ")").c_str());
    };
    static const Extent ONE(1);
    bool has_products = false;
    for (const bool products : {false, true}) {
        if (products && !has_products) {
            break;
        }
        for (size_t i = 0; i < n_most(); i++) {
            const Arg &arg = arg_of(i);
            for (size_t d = 0; tensors[i] != nullptr && d < GGML_MAX_DIMS; d++) {
                const int64_t found = tensors[i]->ne[d];
                const Extent &extent = d < arg.shape.size() ? arg.shape[d] : ONE;
                const bool product = extent.n > 1 || (extent.n == 1 && extent.times > 1);
                has_products = has_products || product;
                if (extent.any || products != product) {
                    continue;
                }
                int64_t rest = extent.times, *unknown = nullptr;
                for (int s = 0; s < extent.n; s++) {
                    int64_t &value = known.value[extent.of[s].id];
                    if (value == 0 && unknown == nullptr) {
                        unknown = &value;
                    } else {
                        rest *= value;
                    }
                }
                if (unknown != nullptr && rest > 0 && found % rest == 0) {
                    *unknown = found / rest;
                } else if (unknown != nullptr || known.of(extent) != found) {
                    misfit(arg, d, found, extent);
                }
            }
        }
    }
    return known;
}

// Fills a struct that has the params.
Extents CustomOp::fill(ggml_tensor *const *tensors, OpCall &call) const {
    Extents known = solve(tensors);
    for (const auto &[field, extent] : dims_) {
        field.set(call.args, known.of(extent));
    }
    unsigned char *room = call.sources[0].args; // of the next launch
    for (size_t i = 0; i < n_most(); i++) {
        const ggml_tensor *t = tensors[i];
        const Arg &arg = arg_of(i);
        if (t == nullptr) {
            continue;
        }
        if (arg.launch) {
            OpCall source;
            custom_op(t)->bind(t, source);
            memcpy(room, source.args, sizeof(RowmmArgs));
        }
        if (arg.offset >= 0) {
            set_pointer(call.args, arg.offset, arg.launch ? room : address(t));
        }
        room += arg.launch ? sizeof(call.sources[0]) : 0;
        if (arg.type_field) {
            arg.type_field.set(call.args, t->type);
        }
        if (arg.row_field) {
            // of floats in values, of a matrix of any type in bytes
            const size_t unit = arg.form == ArgForm::f32 ? sizeof(float) : 1;
            arg.row_field.set(call.args, int64_t(t->nb[1] / unit));
        }
        if (arg.plane_field) {
            arg.plane_field.set(call.args, int64_t(t->nb[2]));
        }
        if (arg.set) {
            arg.set(call.args, *t, address(t));
        }
    }
    if (derive_) {
        derive_(call.args);
    }
    for (const auto &[symbol, of] : known_) {
        known.value[symbol.id] = of(call.args);
    }
    return known;
}

// Gives the results their places from `at` on.
OpNode CustomOp::lay_out(void *args, const Extents &known, uint8_t *at) const {
    OpNode made{};
    size_t offset = 0;
    const auto place = [&](size_t bytes, int64_t ne0, int64_t ne1) {
        made.results[made.n++] = {offset, bytes, {ne0, ne1}};
        offset += bytes;
    };
    for (const Result &r : results_) {
        const size_t value = ggml_type_size(r.type_field ? ggml_type(r.type_field.get(args)) : r.type);
        if (r.weight) {
            const int64_t T = known.value[extents::T.id];
            for (int64_t i = 0, N; (N = r.weight(args, int(i), at + offset)) >= 0; i++) {
                place(size_t(N * T) * value, N, T);
            }
            continue;
        }
        const int64_t ne0 = r.bytes ? r.bytes(args) : known.of(r.shape[0]);
        const int64_t ne1 = r.bytes ? 0 : r.shape.size() > 1 ? known.of(r.shape[1]) : 1;
        const size_t bytes = r.bytes ? size_t(ne0) : size_t(ne0 * ne1) * value;
        if (r.offset >= 0) {
            set_pointer(args, r.offset, bytes == 0 ? nullptr : at + offset);
        }
        place(bytes, ne0, ne1);
    }
    return made;
}

bool CustomOp::same(const ggml_tensor *node, const void *args) const {
    size_t i = 0;
    return std::all_of(params_.begin(), params_.end(), [&](const auto &param) {
        return node->op_params[PARAMS_AT + i++] == int32_t(param.second.get(args));
    });
}

void CustomOp::bind(const ggml_tensor *node, OpCall &call) const {
    memset(call.args, 0, sizeof(call.args));
    for (size_t i = 0; i < params_.size(); i++) {
        params_[i].second.set(call.args, node->op_params[PARAMS_AT + i]);
    }
    const Extents known = fill(node->src, call);
    lay_out(call.args, known, address(node));
}

// ---- in a graph ----

OpNode CustomOp::add(ggml_context *ctx, const std::vector<ggml_tensor *> &tensors, const void *args) const {
    std::vector<int32_t> params;
    for (const auto &[field, number] : params_) {
        params.push_back(int32_t(number.get(args)));
    }
    return add(ctx, tensors, params.data(), params.size());
}

OpNode CustomOp::add(ggml_context *ctx, const std::vector<ggml_tensor *> &tensors, const int32_t *params,
                     size_t n) const {
    if (tensors.size() > n_most() || n != params_.size() || n > MOST_PARAMS) {
        fail(LUCE_E_ARG, "%s, got %zu tensors and %zu params", usage().c_str(), tensors.size(), n);
    }
    ggml_tensor *sources[GGML_MAX_SRC] = {};
    for (size_t i = 0; i < n_most(); i++) {
        sources[i] = i < tensors.size() ? tensors[i] : nullptr;
        if (sources[i] != nullptr) {
            check(arg_of(i), sources[i]);
        } else if (i < args_.size() && !args_[i].optional) {
            fail(LUCE_E_ARG, "%s, got no %s", usage().c_str(), args_[i].field);
        }
    }
    OpCall call{};
    for (size_t i = 0; i < n; i++) {
        params_[i].second.set(call.args, params[i]);
    }
    const Extents known = fill(sources, call);
    if (const std::string lack = lacks_ ? lacks_(call.args) : ""; !lack.empty()) {
        fail(LUCE_E_UNSUPPORTED, "%s: %s", name, lack.c_str());
    }
    OpNode made = lay_out(call.args, known, NOT_PLACED);
    // One result has its own type and shape. Several, or one with room behind it, are F32.
    ggml_type type = results_.size() > 1 ? GGML_TYPE_F32 : GGML_TYPE_I32;
    int64_t ne[2] = {1, 1};
    if (results_.size() == 1) {
        const Result &r = results_[0];
        type = r.type_field ? ggml_type(r.type_field.get(call.args)) : r.type;
    }
    if (results_.size() == 1 && made.n == 1 && made.results[0].ne[1] > 0) {
        ne[0] = made.results[0].ne[0], ne[1] = made.results[0].ne[1];
    } else if (made.n > 0) {
        const auto &last = made.results[made.n - 1];
        ne[0] = std::max(int64_t((last.offset + last.bytes) / ggml_type_size(type)), int64_t(1));
    }
    made.ctx = ctx;
    made.node = ggml_custom_4d(ctx, type, ne[0], ne[1], 1, 1, sources, int(n_most()), not_run_by_ggml,
                               GGML_N_TASKS_MAX, const_cast<CustomOp *>(this));
    for (size_t i = 0; i < n; i++) {
        made.node->op_params[PARAMS_AT + i] = params[i];
    }
    return made;
}

} // namespace luce
