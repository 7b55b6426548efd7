#include "graph/keys.h"

namespace luce {

std::string prefix_of(const GgufFile &file) {
    return file.string("general.architecture") + ".";
}

std::vector<uint32_t> per_block(const GgufFile &file, const std::string &key, uint32_t n, int64_t lo,
                                int64_t hi) {
    const GgufKv *kv = file.find(key);
    if (kv == nullptr || kv->type != GGUF_ARR) {
        return std::vector<uint32_t>(n, uint32_t(file.integer(key, lo, hi)));
    }
    const std::vector<int64_t> values = file.integers(key);
    if (values.size() != n) {
        fail(LUCE_E_FILE, "%s: key %s has %zu entries, expected %u (one for each block)", file.path().c_str(),
             key.c_str(), values.size(), n);
    }
    for (const int64_t value : values) {
        if (value < lo || value > hi) {
            fail(LUCE_E_FILE, "%s: key %s has %lld, expected %lld to %lld", file.path().c_str(), key.c_str(),
                 (long long) value, (long long) lo, (long long) hi);
        }
    }
    return std::vector<uint32_t>(values.begin(), values.end());
}

void check_rope_scaling(const GgufFile &file) {
    const std::string key = prefix_of(file) + "rope.scaling.type";
    if (file.find(key) != nullptr && file.string(key) != "none") {
        fail(LUCE_E_UNSUPPORTED, "%s: key %s is '%s': luce has no RoPE scaling", file.path().c_str(),
             key.c_str(), file.string(key).c_str());
    }
}

} // namespace luce
