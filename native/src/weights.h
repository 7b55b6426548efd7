// Takes tensors out of a file one by one: presence, shape and type of each are checked, and what nobody took is
// refused by name.
#pragma once

#include "model.h"

#include <set>

namespace luce {

class WeightReader {
public:
    // loading false: tensors are checked only, and null is returned.
    WeightReader(Model &model, const GgufFile &file, bool loading = true);

    // A matrix {a, b} of any weight type.
    ggml_tensor *matrix(const std::string &name, int64_t a, int64_t b, bool required = true) {
        return take(name, {a, b}, false, required);
    }
    // The same, of which rows are looked up.
    ggml_tensor *table(const std::string &name, int64_t a, int64_t b, bool required = true) {
        return take(name, {a, b}, false, required, true);
    }
    // The matrix of a table that the file ties to it: the table itself, but for what is_packed() says.
    ggml_tensor *tied(const std::string &name, ggml_tensor *table);
    // A vector or small table that the graph reads as F32.
    ggml_tensor *f32(const std::string &name, std::vector<int64_t> shape, bool required = true) {
        return take(name, std::move(shape), true, required);
    }

    const GgufFile &file() const { return file_; }
    // Another reader of the same file, for checks alone.
    WeightReader checking() const { return WeightReader(m_, file_, false); }

    // Tensors that another reader takes, or that are not needed: those whose names begin with `prefix`.
    void forget(const std::string &prefix);
    // E_UNSUPPORTED names a tensor that is left, of those whose names begin with `prefix`.
    void finish(const std::string &prefix = "") const;

private:
    ggml_tensor *take(const std::string &name, std::vector<int64_t> shape, bool f32_only, bool required,
                      bool rows = false);

    bool packs(ggml_type type) const;

    Model &m_;
    const GgufFile &file_;
    std::set<std::string> left_;
    const bool loading_;
};

} // namespace luce
