#include "model/gguf_file.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace luce {
namespace {

// Returns the bytes of a scalar value type, and 0 for strings, arrays and unknown types.
size_t value_size(int32_t type) {
    switch (type) {
        case GGUF_U8:
        case GGUF_I8:
        case GGUF_BOOL: return 1;
        case GGUF_U16:
        case GGUF_I16: return 2;
        case GGUF_U32:
        case GGUF_I32:
        case GGUF_F32: return 4;
        case GGUF_U64:
        case GGUF_I64:
        case GGUF_F64: return 8;
        default: return 0;
    }
}

template <typename T> T load(const uint8_t *p) {
    T v;
    memcpy(&v, p, sizeof(v));
    return v;
}

// A Reader is a cursor that cannot leave the file.
class Reader {
public:
    Reader(const std::string &path, const Mapping &map) : path_(path), data_(map.data()), size_(map.size()) {}

    uint64_t pos() const { return pos_; }
    uint64_t left() const { return size_ - pos_; }

    const uint8_t *bytes(uint64_t n, const char *what) {
        if (n > left()) {
            fail(LUCE_E_FILE,
                 "%s: truncated or damaged: %s at byte %llu needs %llu bytes, the file ends after %llu",
                 path_.c_str(), what, (unsigned long long) pos_, (unsigned long long) n,
                 (unsigned long long) left());
        }
        const uint8_t *p = data_ + pos_;
        pos_ += n;
        return p;
    }
    template <typename T> T value(const char *what) { return load<T>(bytes(sizeof(T), what)); }

    // Reads a u64 length, then that many bytes.
    std::string_view string(const char *what) {
        const uint64_t n = value<uint64_t>(what);
        return {reinterpret_cast<const char *>(bytes(n, what)), size_t(n)};
    }

    [[noreturn]] void damaged(const std::string &what) {
        fail(LUCE_E_FILE, "%s: damaged at byte %llu: %s", path_.c_str(), (unsigned long long) pos_,
             what.c_str());
    }

private:
    const std::string &path_;
    const uint8_t *data_;
    uint64_t size_;
    uint64_t pos_ = 0;
};

GgufKv read_kv(Reader &in) {
    GgufKv kv;
    kv.name = std::string(in.string("a key"));
    if (kv.name.empty() || kv.name.size() > 65535 || kv.name.find('\0') != std::string::npos) {
        in.damaged("a key's name is empty, too long or holds a zero byte");
    }
    kv.type = kv.elem_type = in.value<int32_t>("a value's type");
    if (kv.type == GGUF_ARR) {
        kv.elem_type = in.value<int32_t>("an array's type");
        kv.count = in.value<uint64_t>("an array's length");
    }
    const char *what = kv.name.c_str();
    if (kv.elem_type == GGUF_STR) {
        if (kv.type == GGUF_STR) {
            const std::string_view s = in.string(what);
            kv.data = reinterpret_cast<const uint8_t *>(s.data());
            kv.count = s.size();
            return kv;
        }
        if (kv.count > in.left() / 8) {
            in.damaged(
                format("key %s: %llu strings do not fit into the file", what, (unsigned long long) kv.count));
        }
        kv.data = in.bytes(0, what);
        for (uint64_t i = 0; i < kv.count; i++) {
            in.string(what);
        }
        return kv;
    }
    const size_t size = value_size(kv.elem_type);
    if (size == 0) {
        in.damaged(format("key %s has unknown value type %d", what, kv.elem_type));
    }
    if (kv.count > in.left() / size) {
        in.damaged(
            format("key %s: %llu values do not fit into the file", what, (unsigned long long) kv.count));
    }
    kv.data = in.bytes(kv.count * size, what);
    return kv;
}

// Reads a tensor's description. `data` holds its offset into the data section until the header has ended.
GgufTensor read_tensor(Reader &in, uint64_t *offset) {
    GgufTensor t;
    t.name = std::string(in.string("a tensor's name"));
    if (t.name.empty() || t.name.size() >= GGML_MAX_NAME || t.name.find('\0') != std::string::npos) {
        in.damaged(format("a tensor's name must have 1 to %d bytes and no zero byte", GGML_MAX_NAME - 1));
    }
    const char *what = t.name.c_str();
    t.n_dims = in.value<uint32_t>(what);
    if (t.n_dims < 1 || t.n_dims > GGML_MAX_DIMS) {
        in.damaged(format("tensor %s has %u dimensions, expected 1 to %d", what, t.n_dims, GGML_MAX_DIMS));
    }
    uint64_t elements = 1;
    for (uint32_t d = 0; d < t.n_dims; d++) {
        const uint64_t n = in.value<uint64_t>(what);
        if (n == 0 || n > uint64_t(std::numeric_limits<int64_t>::max()) / elements) {
            in.damaged(format("tensor %s: dimension %u is %llu", what, d, (unsigned long long) n));
        }
        elements *= n;
        t.ne[d] = int64_t(n);
    }
    const int32_t type = in.value<int32_t>(what);
    if (type < 0 || type >= GGML_TYPE_COUNT || ggml_blck_size(ggml_type(type)) <= 0 ||
        ggml_type_size(ggml_type(type)) == 0) {
        fail(LUCE_E_UNSUPPORTED, "tensor %s has type id %d, which this ggml does not know", what, type);
    }
    t.type = ggml_type(type);
    const uint64_t block = uint64_t(ggml_blck_size(t.type));
    if (uint64_t(t.ne[0]) % block != 0) {
        in.damaged(format("tensor %s: rows of %lld are not a multiple of %s's block of %llu", what,
                          (long long) t.ne[0], ggml_type_name(t.type), (unsigned long long) block));
    }
    const uint64_t blocks = elements / block, type_size = ggml_type_size(t.type);
    if (blocks > std::numeric_limits<uint64_t>::max() / type_size) {
        in.damaged(format("tensor %s is too large", what));
    }
    t.size = blocks * type_size;
    *offset = in.value<uint64_t>(what);
    return t;
}

bool is_integer(int32_t type) {
    return value_size(type) != 0 && type != GGUF_F32 && type != GGUF_F64;
}

// Reads a u64 above int64's range as its maximum, which no range check lets pass.
int64_t read_integer(int32_t type, const uint8_t *p) {
    switch (type) {
        case GGUF_U8: return load<uint8_t>(p);
        case GGUF_I8: return load<int8_t>(p);
        case GGUF_BOOL: return load<uint8_t>(p) != 0;
        case GGUF_U16: return load<uint16_t>(p);
        case GGUF_I16: return load<int16_t>(p);
        case GGUF_U32: return load<uint32_t>(p);
        case GGUF_I32: return load<int32_t>(p);
        case GGUF_I64: return load<int64_t>(p);
        default: {
            const uint64_t v = load<uint64_t>(p);
            const uint64_t max = uint64_t(std::numeric_limits<int64_t>::max());
            return int64_t(v < max ? v : max);
        }
    }
}

} // namespace

const char *gguf_value_type_name(int32_t type) {
    static const char *const names[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                        "bool", "string", "array", "u64", "i64", "f64"};
    return type >= 0 && type <= GGUF_F64 ? names[type] : "unknown";
}

Mapping::Mapping(const std::string &path) {
    if (path.empty()) {
        fail(LUCE_E_FILE, "the path of the file is empty");
    }
    // Without O_NONBLOCK a FIFO would wait for its writer.
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        fail(LUCE_E_FILE, "%s: %s", path.c_str(), strerror(errno));
    }
    struct stat st{};
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        ::close(fd);
        fail(LUCE_E_FILE, "%s: %s, not a GGUF file", path.c_str(),
             S_ISDIR(st.st_mode) ? "a folder" : "a device or a pipe");
    }
    size_ = uint64_t(st.st_size);
    if (size_ == 0) {
        ::close(fd);
        fail(LUCE_E_FILE, "%s: the file is empty", path.c_str());
    }
    void *p = mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
    const int error = errno;
    ::close(fd);
    if (p == MAP_FAILED) {
        fail(LUCE_E_FILE, "%s: cannot map %s: %s", path.c_str(), human_bytes(size_).c_str(), strerror(error));
    }
    data_ = static_cast<const uint8_t *>(p);
}

Mapping::~Mapping() {
    if (data_ != nullptr) {
        munmap(const_cast<uint8_t *>(data_), size_);
    }
}

std::shared_ptr<GgufFile> GgufFile::open(const std::string &path) {
    auto file = std::make_shared<GgufFile>();
    file->path_ = path;
    file->read_part(path, 0);
    file->open_splits();
    return file;
}

// Reads a part. Part 0 is the first, whose keys are the file's. Later parts say only which part they are.
void GgufFile::read_part(const std::string &path, int64_t part) {
    const bool first = part == 0;
    parts_.push_back(std::make_unique<Mapping>(path));
    const Mapping &map = *parts_.back();
    Reader in(path, map);
    if (map.size() < 4 || memcmp(map.data(), "GGUF", 4) != 0) {
        fail(LUCE_E_FILE, "%s: not a GGUF file (it does not begin with \"GGUF\")", path.c_str());
    }
    in.bytes(4, "the magic");
    const uint32_t version = in.value<uint32_t>("the version");
    if (version != 2 && version != 3) {
        fail(LUCE_E_FILE, "%s: GGUF version %u%s; luce reads versions 2 and 3", path.c_str(), version,
             (version & 0xffff) == 0 ? " (a big-endian file?)" : "");
    }
    const uint64_t n_tensors = in.value<uint64_t>("the tensor count");
    const uint64_t n_kv = in.value<uint64_t>("the key count");
    // The smallest key takes 8 + 1 + 4 + 1 bytes, and the smallest tensor 8 + 1 + 4 + 8 + 4 + 8.
    if (n_kv > in.left() / 14 || n_tensors > in.left() / 33) {
        in.damaged(format("%llu keys and %llu tensors do not fit into the file", (unsigned long long) n_kv,
                          (unsigned long long) n_tensors));
    }
    uint64_t alignment = 32;
    for (uint64_t i = 0; i < n_kv; i++) {
        GgufKv kv = read_kv(in);
        if (kv.name == "general.alignment") {
            if (kv.type != GGUF_U32 || load<uint32_t>(kv.data) < 8 ||
                (load<uint32_t>(kv.data) & (load<uint32_t>(kv.data) - 1)) != 0) {
                in.damaged("general.alignment must be a u32 power of two, at least 8");
            }
            alignment = load<uint32_t>(kv.data);
        }
        if (kv.name == "split.no" && is_integer(kv.type) && !first &&
            read_integer(kv.type, kv.data) != part) {
            in.damaged(format("split.no is %lld, expected %lld", (long long) read_integer(kv.type, kv.data),
                              (long long) part));
        }
        if (first) {
            if (!kv_index_.emplace(kv.name, kvs_.size()).second) {
                in.damaged(format("key %s appears twice", kv.name.c_str()));
            }
            kvs_.push_back(std::move(kv));
        }
    }
    const size_t first_tensor = tensors_.size();
    std::vector<uint64_t> offsets(n_tensors);
    for (uint64_t i = 0; i < n_tensors; i++) {
        tensors_.push_back(read_tensor(in, &offsets[i]));
        if (!tensor_index_.emplace(tensors_.back().name, tensors_.size() - 1).second) {
            in.damaged(format("tensor %s appears twice", tensors_.back().name.c_str()));
        }
    }
    const uint64_t header = in.pos();
    const uint64_t pad = (alignment - header % alignment) % alignment;
    const uint64_t room = map.size() - header > pad ? map.size() - header - pad : 0;
    for (uint64_t i = 0; i < n_tensors; i++) {
        GgufTensor &t = tensors_[first_tensor + i];
        if (offsets[i] % alignment != 0) {
            fail(LUCE_E_FILE, "%s: tensor %s starts at offset %llu, which is not a multiple of %llu",
                 path.c_str(), t.name.c_str(), (unsigned long long) offsets[i],
                 (unsigned long long) alignment);
        }
        if (offsets[i] > room || t.size > room - offsets[i]) {
            fail(LUCE_E_FILE, "%s: truncated: tensor %s ends at byte %llu of the data, the file holds %llu",
                 path.c_str(), t.name.c_str(), (unsigned long long) (offsets[i] + t.size),
                 (unsigned long long) room);
        }
        t.data = map.data() + header + pad + offsets[i];
    }
    version_ = first ? version : version_;
}

void GgufFile::open_splits() {
    const int64_t count = integer_or("split.count", 1, 0, 65535);
    if (count <= 1) {
        return;
    }
    if (integer_or("split.no", 0, 0, 65535) != 0) {
        fail(LUCE_E_FILE, "%s is part %lld of a split file: open its first part (-00001-of-...)",
             path_.c_str(), (long long) integer("split.no", 0, 65535) + 1);
    }
    const std::string suffix = format("-00001-of-%05lld.gguf", (long long) count);
    if (path_.size() < suffix.size() ||
        path_.compare(path_.size() - suffix.size(), suffix.size(), suffix) != 0) {
        fail(LUCE_E_FILE, "%s says it is the first of %lld parts: its name must end in %s", path_.c_str(),
             (long long) count, suffix.c_str());
    }
    const std::string prefix = path_.substr(0, path_.size() - suffix.size());
    for (int64_t i = 1; i < count; i++) {
        read_part(prefix + format("-%05lld-of-%05lld.gguf", (long long) i + 1, (long long) count), i);
    }
    const int64_t expected = integer_or("split.tensors.count", int64_t(tensors_.size()), 0, 1 << 30);
    if (expected != int64_t(tensors_.size())) {
        fail(LUCE_E_FILE, "%s: split.tensors.count is %lld, the %lld parts hold %zu tensors", path_.c_str(),
             (long long) expected, (long long) count, tensors_.size());
    }
}

uint64_t GgufFile::size_bytes() const {
    uint64_t total = 0;
    for (const auto &part : parts_) {
        total += part->size();
    }
    return total;
}

const GgufKv *GgufFile::find(const std::string &key) const {
    const auto it = kv_index_.find(key);
    return it == kv_index_.end() ? nullptr : &kvs_[it->second];
}

const GgufTensor *GgufFile::tensor(const std::string &name) const {
    const auto it = tensor_index_.find(name);
    return it == tensor_index_.end() ? nullptr : &tensors_[it->second];
}

int64_t GgufFile::integer(const std::string &key, int64_t lo, int64_t hi) const {
    const GgufKv *kv = find(key);
    if (kv == nullptr) {
        fail(LUCE_E_FILE, "%s: key %s is missing", path_.c_str(), key.c_str());
    }
    if (!is_integer(kv->type)) {
        fail(LUCE_E_FILE, "%s: key %s is a %s, expected an integer", path_.c_str(), key.c_str(),
             gguf_value_type_name(kv->type));
    }
    const int64_t value = read_integer(kv->type, kv->data);
    if (value < lo || value > hi) {
        fail(LUCE_E_FILE, "%s: key %s is %lld, expected %lld to %lld", path_.c_str(), key.c_str(),
             (long long) value, (long long) lo, (long long) hi);
    }
    return value;
}

int64_t GgufFile::integer_or(const std::string &key, int64_t fallback, int64_t lo, int64_t hi) const {
    return find(key) == nullptr ? fallback : integer(key, lo, hi);
}

double GgufFile::number(const std::string &key) const {
    const GgufKv *kv = find(key);
    if (kv == nullptr) {
        fail(LUCE_E_FILE, "%s: key %s is missing", path_.c_str(), key.c_str());
    }
    if (kv->type != GGUF_F32 && kv->type != GGUF_F64) {
        fail(LUCE_E_FILE, "%s: key %s is a %s, expected f32", path_.c_str(), key.c_str(),
             gguf_value_type_name(kv->type));
    }
    const double value = kv->type == GGUF_F32 ? double(load<float>(kv->data)) : load<double>(kv->data);
    if (!std::isfinite(float(value))) {
        fail(LUCE_E_FILE, "%s: key %s is not finite", path_.c_str(), key.c_str());
    }
    return value;
}

std::string GgufFile::string(const std::string &key) const {
    const GgufKv *kv = find(key);
    if (kv == nullptr || kv->type != GGUF_STR) {
        fail(LUCE_E_FILE, "%s: key %s is %s, expected a string", path_.c_str(), key.c_str(),
             kv == nullptr ? "missing" : gguf_value_type_name(kv->type));
    }
    return {reinterpret_cast<const char *>(kv->data), size_t(kv->count)};
}

std::vector<int64_t> GgufFile::integers(const std::string &key) const {
    const GgufKv *kv = find(key);
    if (kv == nullptr || kv->type != GGUF_ARR || !is_integer(kv->elem_type)) {
        fail(LUCE_E_FILE, "%s: key %s is %s, expected an array of integers or bools", path_.c_str(),
             key.c_str(), kv == nullptr ? "missing" : gguf_value_type_name(kv->type));
    }
    std::vector<int64_t> values(kv->count);
    for (size_t i = 0; i < values.size(); i++) {
        values[i] = read_integer(kv->elem_type, kv->data + i * value_size(kv->elem_type));
    }
    return values;
}

std::vector<std::string_view> GgufFile::strings(const GgufKv &kv) const {
    if (kv.type != GGUF_ARR || kv.elem_type != GGUF_STR) {
        fail(LUCE_E_ARG, "key %s is not an array of strings", kv.name.c_str());
    }
    std::vector<std::string_view> out(kv.count);
    const uint8_t *p = kv.data; // it was scanned when the file was opened
    for (auto &s : out) {
        const uint64_t n = load<uint64_t>(p);
        s = {reinterpret_cast<const char *>(p + 8), size_t(n)};
        p += 8 + n;
    }
    return out;
}

} // namespace luce
