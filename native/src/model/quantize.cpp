#include "model/quantize.h"

#include "model/model.h"

#include <cmath>
#include <cstdio>
#include <limits>

namespace luce {

static ggml_type known_type(int32_t type) {
    if (type < 0 || type >= GGML_TYPE_COUNT || ggml_type_size(ggml_type(type)) == 0) {
        fail(LUCE_E_ARG, "ggml has no type %d", type);
    }
    return ggml_type(type);
}

void describe_type(int32_t type, luce_type_info *out) {
    const ggml_type t = known_type(type);
    snprintf(out->name, sizeof(out->name), "%s", type_name(t));
    out->block_size = uint32_t(ggml_blck_size(t));
    out->type_size = uint32_t(ggml_type_size(t));
    out->is_weight = is_weight_type(t);
}

void quantize(int32_t type, const float *src, uint64_t n_rows, uint64_t n_per_row, void *dst,
              uint64_t dst_size) {
    const ggml_type t = known_type(type);
    if (!is_weight_type(t)) {
        fail(LUCE_E_ARG, "luce does not quantize to %s", type_name(t));
    }
    const uint64_t max = uint64_t(std::numeric_limits<int64_t>::max()) / 8;
    if (n_rows == 0 || n_per_row == 0 || n_rows > max / n_per_row ||
        n_per_row % uint64_t(ggml_blck_size(t)) != 0) {
        fail(LUCE_E_ARG, "%llu rows of %llu: rows must be a multiple of %s's block of %lld",
             (unsigned long long) n_rows, (unsigned long long) n_per_row, type_name(t),
             (long long) ggml_blck_size(t));
    }
    const uint64_t size = n_rows * ggml_row_size(t, int64_t(n_per_row));
    if (dst_size != size) {
        fail(LUCE_E_ARG, "the result takes %llu bytes, dst_size is %llu", (unsigned long long) size,
             (unsigned long long) dst_size);
    }
    for (uint64_t i = 0; i < n_rows * n_per_row; i++) {
        if (!std::isfinite(src[i])) {
            fail(LUCE_E_ARG, "value %llu is not finite", (unsigned long long) i);
        }
    }
    const std::vector<float> uniform(ggml_quantize_requires_imatrix(t) ? n_per_row : 0, 1.0f);
    ggml_quantize_chunk(t, src, dst, 0, int64_t(n_rows), int64_t(n_per_row),
                        uniform.empty() ? nullptr : uniform.data());
}

} // namespace luce
