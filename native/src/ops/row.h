// luce has ops of its own in ggml graphs. A row says of an op all that there is to say: its struct of arguments
// (common/kernels.h and others), which the CPU reference and the CUDA launcher both take, and for the struct's fields
// which tensor, extent, param or result each stands for. Of that follow the checks of an op's tensors, the shape of its
// node, what its params hold, and how the struct is filled when it runs. A new op is a struct, a row in its chapter
// (ops/attention.h and others), a CPU reference and a kernel.
//
//   inline const auto &row_tokens = row<TokensArgs>("row_tokens", [](auto &op, auto &a) {
//       op.in(FIELD(tokens), {T});              a tensor, of one extent, which is called T
//       op.in(FIELD(drafts), {2, entries});
//       op.dims(a.T, T);                        the field T gets that extent
//       op.params(FIELD(n_vocab));              the builder gives it, and the node keeps it
//       op.out(FIELD(out), {T});                the result
//       op.runs(cpu_row_tokens, LUCE_CUDA(row_tokens));
//   });
//
//   TokensArgs a{};
//   a.n_vocab = 1000;
//   ggml_tensor *found = ops::row_tokens(ctx, {tokens, drafts}, a);
//
// A tensor's type is that of the field that points to it, and an op writes to those whose field is not const. In a graph
// the node is a ggml_custom_4d that ggml itself never runs: step.cpp cuts the graph at it.
#pragma once

#include "abi/status.h"
#include "common/kernels.h"
#include "matmul/quantised.h"

#include <ggml.h>

#include <functional>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

namespace luce {

// ---- extents ----

struct Symbol {
    int id;
    const char *name;
};
// An extent of a tensor is a number, a symbol, which stands for one value throughout a row, or a product of them.
struct Extent {
    int64_t times = 1;
    Symbol of[3] = {};
    int n = 0;
    bool any = false;

    constexpr Extent(int64_t number) : times(number) {}
    constexpr Extent(int number) : times(number) {}
    constexpr Extent(Symbol symbol) : of{symbol}, n(1) {}
    std::string text() const; // "2*D*H"
};
constexpr Extent operator*(Extent a, const Extent &b) {
    a.times *= b.times;
    for (int i = 0; i < b.n; i++) {
        a.of[a.n++] = b.of[i];
    }
    return a;
}

// What rows call extents.
namespace extents {
constexpr Symbol T{0, "T"}, K{1, "K"}, N{2, "N"}, E{3, "E"}, D{4, "D"}, H{5, "H"}, Hkv{6, "Hkv"}, S{7, "S"},
    Hv{8, "Hv"}, C{9, "C"}, FF{10, "FF"}, V{11, "V"}, pages{12, "pages"}, slots{13, "slots"},
    seqs{14, "seqs"}, log_size{15, "log_size"}, entries{16, "entries"}, experts{17, "experts"},
    used{18, "used"}, cells{19, "cells"}, width{20, "width"}, sums{21, "sums"}, gates{22, "gates"},
    ends{23, "ends"};
inline const Extent ANY = [] { // not the same from tensor to tensor
    Extent any(1);
    any.any = true;
    return any;
}();
} // namespace extents
constexpr int N_SYMBOLS = 24;
struct Extents {
    int64_t value[N_SYMBOLS] = {}; // 0 where it is not known
    int64_t of(const Extent &extent) const;
};

// ---- an op ----

// Forms of a tensor's values: a matrix has any type of weights, and rows are F32 or packed, which is I8.
enum class ArgForm { f32, i32, i64, matrix, rows, any };

// A field of a struct of arguments, which holds a number.
struct NumberField {
    int offset = -1, size = 0;

    NumberField() = default;
    template <class V>
    NumberField(const void *base, const V *field)
        : offset(int(reinterpret_cast<const char *>(field) - static_cast<const char *>(base))),
          size(sizeof(V)) {}
    explicit operator bool() const { return size > 0; }
    int64_t get(const void *args) const;
    void set(void *args, int64_t value) const;
};

// Room for an op's struct of arguments, and for those of the launches which left its parts.
struct OpCall {
    alignas(16) unsigned char args[1024];
    struct alignas(16) {
        unsigned char args[sizeof(RowmmArgs)];
    } sources[2];
};

// An op in a graph, and its results as tensors: y[0], y[1] .. in the row's order.
struct OpNode {
    struct Result {
        size_t offset, bytes;
        int64_t ne[2]; // ne[1] is 0 of one that has no shape
    };
    ggml_context *ctx;
    ggml_tensor *node;
    Result results[8];
    int n;

    ggml_tensor *operator[](int i) const;
    operator ggml_tensor *() const { return n == 0 ? node : (*this)[0]; }
};

class CustomOp {
public:
    const char *const name;

    // Adds the op to a graph over tensors in the row's order, with null for one that is left out; `args` has the params.
    // It fails with E_ARG, naming the tensor, where shapes and types do not fit the row, and with E_UNSUPPORTED where they
    // fit and no kernel takes them.
    OpNode add(ggml_context *ctx, const std::vector<ggml_tensor *> &tensors, const void *args) const;
    // The same, where params are the bits of numbers in the row's order.
    OpNode add(ggml_context *ctx, const std::vector<ggml_tensor *> &tensors, const int32_t *params,
               size_t n) const;

    // Says whether a node has the params of `args`.
    bool same(const ggml_tensor *node, const void *args) const;

    // Fills the struct of arguments that a node stands for.
    void bind(const ggml_tensor *node, OpCall &call) const;
    virtual bool on_cpu() const = 0;
    virtual bool on_cuda() const = 0;
    virtual void cpu(const OpCall &call, int ith, int nth) const = 0; // it does part ith of nth, in any order
    virtual int cuda(const OpCall &call, void *stream) const = 0; // it returns a cudaError_t

    // Says how it is called: "row_tokens takes tokens{T} drafts{2,entries}, n_vocab".
    std::string usage() const;
    bool writes(size_t i) const { return arg_of(i).written; } // it says so of a tensor

    // Any number of parts costs the CPU the same, so more parts than threads spread the work better.
    bool even = false;
    bool on_team = false; // the CPU's threads run it, whatever device the step is on (step/host_experts.h)
    bool to_team = false; // on a GPU it copies rows to the host, for an op that is on_team

protected:
    explicit CustomOp(const char *op_name) : name(op_name) { all().push_back(this); }
    CustomOp(const CustomOp &) = delete;
    ~CustomOp() = default;

    struct Arg {
        const char *field;
        int offset; // of the pointer to it; -1 where `set` does all
        ArgForm form;
        std::vector<Extent> shape;
        bool written;
        const unsigned char *base;
        bool optional = false, launch = false;
        int most = 1;
        NumberField type_field = {}, row_field = {}, plane_field = {};
        std::function<void(void *, const ggml_tensor &, uint8_t *)> set = nullptr; // with its address

        Arg &maybe() { return optional = true, *this; } // it may be left out
        Arg &up_to(int n) { return most = n, *this; } // of the last one, there may be so many
        // A field gets ggml's number of its type, or how far one row is from the next: in values where it
        // points to floats, in bytes where it is a matrix of any type.
        template <class V> Arg &type(V &number) { return type_field = {base, &number}, *this; }
        template <class V> Arg &row(V &number) { return row_field = {base, &number}, *this; }
        // A field gets how many bytes one matrix is from the next.
        template <class V> Arg &plane(V &number) { return plane_field = {base, &number}, *this; }
    };
    struct Result {
        int offset; // of the pointer to it
        ggml_type type;
        std::vector<Extent>
            shape; // it is empty where `bytes` says how many there are; with 0 the pointer is null
        std::function<int64_t(const void *)> bytes = nullptr;
        NumberField type_field = {};
        // Where they are the products of all weights, it sets the i-th's pointer, and returns its rows or -1.
        std::function<int64_t(void *, int i, void *at)> weight = nullptr;
        Result &typed(NumberField field) { return type_field = field, *this; }
    };

    std::vector<Arg> args_;
    std::vector<std::pair<NumberField, Extent>> dims_;
    std::vector<std::pair<const char *, NumberField>> params_;
    std::vector<std::pair<Symbol, std::function<int64_t(const void *)>>> known_;
    std::vector<Result> results_;
    std::function<void(void *)> derive_;
    std::function<std::string(const void *)> lacks_;

private:
    friend const CustomOp *find_op(const char *name);
    static std::vector<const CustomOp *> &all();
    const Arg &arg_of(size_t i) const { return args_[i < args_.size() ? i : args_.size() - 1]; }
    size_t n_most() const { return args_.size() - 1 + size_t(args_.back().most); }
    void check(const Arg &arg, const ggml_tensor *tensor) const;
    Extents solve(ggml_tensor *const *tensors) const;
    Extents fill(ggml_tensor *const *tensors, OpCall &call) const;
    OpNode lay_out(void *args, const Extents &known, uint8_t *at) const;
};

#ifdef LUCE_USE_CUDA
#define LUCE_CUDA(launcher) cuda::launcher
#else
#define LUCE_CUDA(launcher) nullptr
#endif
#define FIELD(field) #field, a.field // the name of a field of the struct `a`, and itself

// The row of an op whose struct of arguments is A.
template <class A> class OpRow : public CustomOp {
public:
    using Cpu = void (*)(const A &, int ith, int nth);
    using Cuda = int (*)(const A &, void *stream);

    template <class Describe> OpRow(const char *op_name, const Describe &describe) : CustomOp(op_name) {
        static_assert(sizeof(A) <= sizeof(OpCall::args) && std::is_trivially_copyable_v<A>);
        A a{};
        base_ = reinterpret_cast<const unsigned char *>(&a);
        describe(*this, a);
        base_ = nullptr;
    }

    OpNode operator()(ggml_context *ctx, const std::vector<ggml_tensor *> &tensors,
                      const A &params = {}) const {
        return add(ctx, tensors, &params);
    }
    bool same(const ggml_tensor *node, const A &params) const { return CustomOp::same(node, &params); }
    // Returns what a node of this op stands for. What a source left is not there.
    A args(const ggml_tensor *node) const {
        OpCall call;
        bind(node, call);
        return of(call);
    }

    // ---- what a row says ----

    // A tensor of these extents, fastest first.
    template <class V> Arg &in(const char *field, V *&pointer, std::initializer_list<Extent> shape) {
        return arg(field, pointer, form_of<std::remove_const_t<V>>(), shape);
    }
    Arg &in(const char *field, const StepCtl *&pointer) {
        return arg(field, pointer, ArgForm::i32, {int64_t(sizeof(StepCtl) / sizeof(int32_t))});
    }
    // A matrix of weights of any type.
    template <class V> Arg &matrix(const char *field, V *&pointer, std::initializer_list<Extent> shape) {
        return arg(field, pointer, ArgForm::matrix, shape);
    }
    // Weights, of which the field's take(field, tensor, address) takes what it wants.
    template <class F> Arg &in(const char *field, F &weights, std::initializer_list<Extent> shape) {
        const int at = offset(weights);
        args_.push_back({field, -1, ArgForm::matrix, shape, false, base_});
        args_.back().set = [at](void *args, const ggml_tensor &t, uint8_t *address) {
            take(*reinterpret_cast<F *>(static_cast<uint8_t *>(args) + at), t, address);
        };
        return args_.back();
    }
    // A tensor of which set(a, tensor, address) takes what the struct wants.
    template <class Set>
    Arg &in(const char *field, ArgForm form, std::initializer_list<Extent> shape, const Set &set) {
        args_.push_back({field, -1, form, shape, false, base_});
        args_.back().set = [set](void *args, const ggml_tensor &t, uint8_t *at) {
            set(*static_cast<A *>(args), t, at);
        };
        return args_.back();
    }
    // A node of an op of RowmmArgs that has left parts: the field points to its launch.
    Arg &launch(const char *field, const RowmmArgs *&pointer) {
        Arg &made = arg(field, pointer, ArgForm::f32, {extents::ANY});
        made.launch = true;
        return made;
    }
    // Fields that get extents: dims(a.T, T, a.K, K).
    template <class V, class... Rest> void dims(V &field, const Extent &extent, Rest &&...rest) {
        dims_.push_back({{base_, &field}, extent});
        if constexpr (sizeof...(rest) > 0) {
            dims(rest...);
        }
    }
    // Fields that the builder sets: params(FIELD(base), FIELD(eps)).
    template <class V, class... Rest> void params(const char *named, V &field, Rest &&...rest) {
        params_.push_back({named, {base_, &field}});
        if constexpr (sizeof...(rest) > 0) {
            params(rest...);
        }
    }
    // A symbol that is a field, or what a function makes of the struct.
    template <class Of> void known(Symbol symbol, const Of &of) {
        if constexpr (std::is_arithmetic_v<Of>) {
            const NumberField field(base_, &of);
            known_.push_back({symbol, [field](const void *args) { return field.get(args); }});
        } else {
            known_.push_back(
                {symbol, [of](const void *args) { return int64_t(of(*static_cast<const A *>(args))); }});
        }
    }
    // Sets fields that follow from others, pointers to tensors among them, before there are results.
    template <class Derive> void derive(const Derive &derive) {
        derive_ = [derive](void *args) { derive(*static_cast<A *>(args)); };
    }
    // What the op has no kernel for: lacks(a) says what, or "". Then a graph that asks for it is refused.
    template <class Lacks> void lacks(const Lacks &lacks) {
        lacks_ = [lacks](const void *args) { return lacks(*static_cast<const A *>(args)); };
    }
    // A result of these extents; where one of them is not known, it is not there.
    template <class V> Result &out(const char *, V *&pointer, std::initializer_list<Extent> shape) {
        results_.push_back({offset(pointer), type_of<V>(), shape});
        return results_.back();
    }
    // A result of so many bytes, or room for the launch alone.
    template <class V, class Bytes> void room(const char *, V *&pointer, const Bytes &bytes) {
        results_.push_back({offset(pointer), type_of<V>(), {}});
        results_.back().bytes = [bytes](const void *args) {
            return int64_t(bytes(*static_cast<const A *>(args)));
        };
    }
    // Room behind the results, which the launcher finds itself.
    template <class Bytes> void room(const Bytes &bytes) {
        results_.push_back({-1, GGML_TYPE_I8, {}});
        results_.back().bytes = [bytes](const void *args) {
            return int64_t(bytes(*static_cast<const A *>(args)));
        };
    }
    // Results {N, T} of each of the weights.
    void out_of_weights() {
        results_.push_back({-1, GGML_TYPE_F32, {extents::N, extents::T}});
        results_.back().weight = [](void *args, int i, void *at) -> int64_t {
            A &a = *static_cast<A *>(args);
            if (i >= a.n_weights) {
                return -1;
            }
            a.weights[i].out = static_cast<float *>(at);
            return a.weights[i].N;
        };
    }
    template <class V> NumberField number(V &field) const { return {base_, &field}; }
    void runs(Cpu reference, Cuda launcher) { cpu_ = reference, cuda_ = launcher; }

    bool on_cpu() const override { return cpu_ != nullptr; }
    bool on_cuda() const override { return cuda_ != nullptr; }
    void cpu(const OpCall &call, int ith, int nth) const override { cpu_(of(call), ith, nth); }
    int cuda(const OpCall &call, void *stream) const override { return cuda_(of(call), stream); }

private:
    static const A &of(const OpCall &call) { return *reinterpret_cast<const A *>(call.args); }
    template <class V> int offset(V &field) const {
        return int(reinterpret_cast<const unsigned char *>(&field) - base_);
    }
    template <class V>
    Arg &arg(const char *field, V *&pointer, ArgForm form, std::initializer_list<Extent> shape) {
        args_.push_back({field, offset(pointer), form, shape, !std::is_const_v<V>, base_});
        return args_.back();
    }
    template <class V> static constexpr ArgForm form_of() {
        return std::is_same_v<V, float>     ? ArgForm::f32
               : std::is_same_v<V, int32_t> ? ArgForm::i32
               : std::is_same_v<V, int64_t> ? ArgForm::i64
               : std::is_same_v<V, uint8_t> ? ArgForm::matrix
                                            : ArgForm::rows;
    }
    template <class V> static constexpr ggml_type type_of() {
        return std::is_same_v<V, float>                                     ? GGML_TYPE_F32
               : std::is_same_v<V, int32_t> || std::is_same_v<V, ChoiceRow> ? GGML_TYPE_I32
               : std::is_same_v<V, uint16_t>                                ? GGML_TYPE_F16
                                                                            : GGML_TYPE_I8;
    }

    const unsigned char *base_ = nullptr; // while it is described
    Cpu cpu_ = nullptr;
    Cuda cuda_ = nullptr;
};

// Makes a row. It is never destroyed: an engine that is left open at exit still has its ops.
template <class A, class Describe> const OpRow<A> &row(const char *name, const Describe &describe) {
    return *new OpRow<A>(name, describe);
}

const CustomOp *find_op(const char *name); // it returns nullptr when there is none

// Returns the op that `node` stands for, and nullptr for ggml's own nodes.
const CustomOp *custom_op(const ggml_tensor *node);

} // namespace luce
