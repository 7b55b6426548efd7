// Takes tensors out of a file one by one. The presence, shape and type of each are checked, and a tensor that
// nobody took is refused by name.
#pragma once

#include "model/model.h"
#include "model/split.h"

#include <map>
#include <set>

namespace luce {

class WeightReader {
public:
    // With loading false, tensors are only checked, and null is returned.
    WeightReader(Model &model, const GgufFile &file, bool loading = true);

    // Where a model has several ranks, what is taken from now on is of this one: shapes are those of its parts, which `cut` says.
    // It is whole, and lies behind the trunk, from take_whole() on.
    uint32_t n_ranks() const { return loading_ && &file_ == m_.file_.get() ? m_.n_ranks_ : 1; }
    void take_rank(uint32_t rank) { rank_ = n_ranks() > 1 ? int32_t(rank) : -1; }
    void take_whole() { rank_ = -1; }

    // Takes a matrix {a, b} of any weight type.
    ggml_tensor *matrix(const std::string &name, int64_t a, int64_t b, Cut cut = WHOLE) {
        return take(name, {a, b}, Kind::matrix, true, cut);
    }
    // Takes the same where the file has it, else returns null.
    ggml_tensor *matrix_or_none(const std::string &name, int64_t a, int64_t b, Cut cut = WHOLE) {
        return take(name, {a, b}, Kind::matrix, false, cut);
    }
    // Takes a matrix {a, b} of each of n experts, which lie one behind the other in one tensor. With in_ram
    // it stays in host memory on any device.
    ggml_tensor *experts(const std::string &name, int64_t a, int64_t b, int64_t n, bool in_ram, Cut cut,
                         int32_t parts = 1) {
        return take(name, {a, b, n}, in_ram ? Kind::ram_experts : Kind::experts, true, cut, parts);
    }
    // Takes the same with "NAME.scale" {n}: a factor of each expert's products (scales_of).
    ggml_tensor *scaled_experts(const std::string &name, int64_t a, int64_t b, int64_t n, bool in_ram,
                                Cut cut);
    // Says whether the experts of a layer of the trunk are to stay there.
    bool in_ram(uint32_t layer) const;
    // Takes a matrix {a, b} that a GPU multiplies in F32.
    ggml_tensor *router(const std::string &name, int64_t a, int64_t b) {
        return take(name, {a, b}, Kind::router, true);
    }
    // Takes a matrix of which rows are looked up.
    ggml_tensor *table(const std::string &name, int64_t a, int64_t b, bool required = true) {
        return take(name, {a, b}, Kind::table, required);
    }
    // Takes the norm and the matrix that make logits {V} of what the trunk puts out: "output.weight", or that of the table which
    // the file ties to it. Ranks share its rows (output_rows). Where the model has drafters, which multiply with all of it, the
    // last rank has it whole.
    void output(Weights &w, int64_t E, int64_t V);
    // Returns the matrix of a table that the file ties to it, or a part. That is the table itself, but for what
    // is_packed() says.
    ggml_tensor *tied(const std::string &name, ggml_tensor *table, Cut cut = WHOLE);
    // Takes a list of ids {n}, I64, which are checked to lie in [0, end).
    ggml_tensor *ids(const std::string &name, int64_t n, int64_t end);
    // Takes an order of n things, I32 {n}, in which each of 0 .. n - 1 has to be once.
    ggml_tensor *order(const std::string &name, int64_t n);
    // Takes a vector or small table that the graph reads as F32.
    ggml_tensor *f32(const std::string &name, std::vector<int64_t> shape, bool required = true,
                     Cut cut = WHOLE) {
        return take(name, std::move(shape), Kind::f32, required, cut);
    }

    // Takes the same where layers share it, for one of them: each stage has its own.
    ggml_tensor *f32_of_layers(const std::string &name, std::vector<int64_t> shape, uint32_t layer);

    // Takes a tensor of one value, F32, and returns that.
    float scalar(const std::string &name);

    bool has(const std::string &name) const { return file_.tensor(name) != nullptr; }
    const GgufFile &file() const { return file_; }
    // Makes another reader of the same file, for checks alone.
    WeightReader checking() const { return WeightReader(m_, file_, false); }

    // Leaves out tensors that another reader takes, or that are not needed: those whose names begin with
    // `prefix`.
    void forget(const std::string &prefix);
    // Fails with E_UNSUPPORTED and the name of a tensor that is left, of those whose names begin with
    // `prefix`. `what` says what was read.
    void finish(const std::string &prefix = "", const char *what = nullptr) const;

private:
    enum class Kind { matrix, table, experts, ram_experts, router, f32, ids, order };
    ggml_tensor *take(const std::string &name, std::vector<int64_t> shape, Kind kind, bool required,
                      Cut cut = WHOLE, int32_t parts = 1, const uint32_t *where = nullptr);
    bool shares_output(int64_t V) const;
    Slice slice_of(const GgufTensor &whole, const std::vector<int64_t> &part, Cut cut) const;

    bool packs(ggml_type type) const;
    uint32_t trunk_layer(const std::string &name) const;
    bool is_at_home(const std::string &experts) const;
    uint32_t stage_of(const std::string &name, Kind kind) const;
    const float *take_scales(const std::string &weight, int64_t n);

    Model &m_;
    const GgufFile &file_;
    std::set<std::string> left_;
    std::map<std::pair<std::string, uint32_t>, ggml_tensor *> shared_; // by name and stage
    const bool loading_;
    int32_t rank_ = -1; // -1: what is taken is whole
};

// Returns what each of n ranks has of the trunk's heads and widths. E_UNSUPPORTED names what does not divide.
HParams rank_hparams(const GgufFile &file, const HParams &whole, uint32_t n);
// Returns what each has of one number. `what` names it: "heads".
uint32_t rank_part(const GgufFile &file, uint32_t n, const char *what, uint32_t whole);

// A tensor's matrices {K, N}, one behind the other: one, or those of its experts.
struct Matrices {
    int64_t n, N;
};
Matrices matrices_of(const ggml_tensor *weight);

bool is_in_ram(const ggml_tensor *weight); // it stays in the mapping, whatever device the model is on
bool is_at_home(const ggml_tensor *weight); // it lies in pinned host memory, as the device reads it
uint64_t packed_bytes(const ggml_tensor *weight); // of one that is packed
// The bytes of a weight on its device, or where weights are not copied there (`holds`) in the mapping.
uint64_t bytes_of(const ggml_tensor *weight, bool holds);
uint64_t nbytes_or_0(const ggml_tensor *tensor); // 0 of null

} // namespace luce
