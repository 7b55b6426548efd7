// Says what a kernel knows of the matrices that each expert has one of, and how a launcher finds it.
#pragma once

#include "common/pointers.h"
#include "matmul/layout.h"
#include "moe/moe.h"

namespace luce {

struct Matrix {
    const uint8_t *packed; // it is expert 0's
    int64_t expert_bytes;
    const int64_t *offsets; // MoeMatrix::offsets
    uint32_t scales; // the outputs' powers of two begin at this offset; it is 0 where there are none
    int32_t type, units, unit_bytes; // a chunk has `units` units, a fragment has `unit_bytes` bytes
};

// Sets out, which is a Matrix or has its fields, to matrices {K, N}, of which there may be but `one`, and returns whether they
// can be multiplied.
template <typename Out> bool set_matrix(Out &out, const MoeMatrix &m, int64_t K, int64_t N, bool one) {
    const int64_t bytes = rowmm_packed_bytes(m.type, K, N);
    out.packed = static_cast<const uint8_t *>(m.packed);
    out.expert_bytes = m.expert_bytes;
    out.offsets = m.offsets;
    out.type = m.type;
    out.units = units_of_chunk(m.type);
    out.unit_bytes = fragment_bytes(m.type);
    out.scales = has_output_scale(m.type) ? uint32_t(output_scale_offset(m.type, K, N)) : 0;
    return bytes > 0 && given(m.packed) && (one || (m.expert_bytes >= bytes && m.expert_bytes % 16 == 0));
}

} // namespace luce
