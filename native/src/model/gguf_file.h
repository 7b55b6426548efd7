// Maps a GGUF file and checks it. The getters are typed, check their bounds, and throw instead of aborting. v2, v3 and
// split files are read in place: nothing is copied, so a 248k vocabulary costs one scan.
#pragma once

#include "abi/status.h"

#include <ggml.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace luce {

enum GgufType : int32_t {
    GGUF_U8 = 0,
    GGUF_I8 = 1,
    GGUF_U16 = 2,
    GGUF_I16 = 3,
    GGUF_U32 = 4,
    GGUF_I32 = 5,
    GGUF_F32 = 6,
    GGUF_BOOL = 7,
    GGUF_STR = 8,
    GGUF_ARR = 9,
    GGUF_U64 = 10,
    GGUF_I64 = 11,
    GGUF_F64 = 12,
};
const char *gguf_value_type_name(int32_t type);

struct GgufKv {
    std::string name;
    int32_t type = 0;
    int32_t elem_type = 0; // an array's elements have this type; for the rest it is the same as type
    uint64_t count = 1; // it counts an array's elements or a string's bytes, else it is 1
    const uint8_t *data = nullptr; // it points at the first byte of the value, which is unaligned
};

struct GgufTensor {
    std::string name;
    ggml_type type = GGML_TYPE_F32;
    uint32_t n_dims = 0;
    int64_t ne[GGML_MAX_DIMS] = {1, 1, 1, 1};
    uint64_t size = 0; // bytes
    const uint8_t *data = nullptr; // it points into the mapping
};

// A mapping makes the bytes of a whole file readable.
class Mapping {
public:
    explicit Mapping(const std::string &path);
    ~Mapping();
    Mapping(const Mapping &) = delete;
    Mapping &operator=(const Mapping &) = delete;
    const uint8_t *data() const { return data_; }
    uint64_t size() const { return size_; }

private:
    const uint8_t *data_ = nullptr;
    uint64_t size_ = 0;
};

class GgufFile {
public:
    static std::shared_ptr<GgufFile> open(const std::string &path);

    const std::string &path() const { return path_; }
    uint32_t version() const { return version_; }
    uint64_t size_bytes() const;
    const std::vector<GgufKv> &kvs() const { return kvs_; }
    const std::vector<GgufTensor> &tensors() const { return tensors_; }
    const std::vector<std::unique_ptr<Mapping>> &parts() const { return parts_; }

    // returns nullptr when it is absent
    const GgufKv *find(const std::string &key) const;
    const GgufTensor *tensor(const std::string &name) const;

    // These read integers and bools of any width as int64. A wrong type, or a value outside [lo, hi], is
    // E_FILE naming the key. The forms without a default require the key.
    int64_t integer(const std::string &key, int64_t lo, int64_t hi) const;
    int64_t integer_or(const std::string &key, int64_t fallback, int64_t lo, int64_t hi) const;
    double number(const std::string &key) const; // it takes f32, and f64 that is finite as f32 too
    std::string string(const std::string &key) const;
    std::vector<int64_t> integers(const std::string &key) const; // it takes an array of integers or bools
    std::vector<std::string_view> strings(const GgufKv &kv) const;

private:
    void read_part(const std::string &path, int64_t part);
    void open_splits();

    std::string path_;
    uint32_t version_ = 0;
    std::vector<std::unique_ptr<Mapping>> parts_;
    std::vector<GgufKv> kvs_;
    std::vector<GgufTensor> tensors_;
    std::unordered_map<std::string, size_t> kv_index_, tensor_index_;
};

} // namespace luce
