#include "model/recode.h"

#include "model/model.h"

#define GGML_COMMON_DECL_CPP
#include <ggml-common.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace luce {
namespace {

constexpr uint16_t ONE = 0x3c00; // F16
constexpr uint8_t E8M0_TWO = 128; // the values of E2M1 times two are integers

// A block whose scale is 1 has integers, which are the quants.

template <typename Block> void ternary_to_q4_0(ggml_type type, const uint8_t *src, uint8_t *dst) {
    Block block;
    memcpy(&block, src, sizeof(block));
    const ggml_half d = block.d;
    block.d = ONE;
    float q[QK_K]; // -1, 0 or 1
    ggml_get_type_traits(type)->to_float(&block, q, QK_K);
    for (int b = 0; b < QK_K / QK4_0; b++) {
        block_q4_0 out{};
        out.d = d;
        for (int i = 0; i < QK4_0 / 2; i++) {
            const float *at = q + b * QK4_0 + i;
            out.qs[i] = uint8_t(int(at[0]) + 8) | uint8_t((int(at[QK4_0 / 2]) + 8) << 4);
        }
        memcpy(dst + size_t(b) * sizeof(out), &out, sizeof(out));
    }
}

void mxfp4_to_q5_0(const uint8_t *src, uint8_t *dst) {
    block_mxfp4 block;
    memcpy(&block, src, sizeof(block));
    // A weight is q * 2^power, with q of -12 .. 12. The least that F16 holds is 2^-24.
    const int power = int(block.e) - E8M0_TWO, held = std::max(power, -24);
    block.e = E8M0_TWO;
    float q[QK_MXFP4];
    ggml_get_type_traits(GGML_TYPE_MXFP4)->to_float(&block, q, QK_MXFP4);
    block_q5_0 out{};
    out.d = ggml_fp32_to_fp16(std::ldexp(1.0f, held));
    uint32_t fifth = 0;
    for (int i = 0; i < QK5_0; i++) {
        const uint32_t bits = uint32_t(std::lrint(std::ldexp(q[i], power - held)) + 16);
        out.qs[i % 16] |= uint8_t((bits & 15) << (i / 16 * 4));
        fifth |= bits >> 4 << i;
    }
    memcpy(out.qh, &fifth, sizeof(fifth));
    memcpy(dst, &out, sizeof(out));
}

// Writes F32, or F16 by way of it.
void to_floats(const Recoding &how, const uint8_t *src, uint8_t *dst, size_t n) {
    constexpr size_t AT_ONCE = 64;
    std::vector<float> values(AT_ONCE * size_t(how.values()));
    for (size_t i = 0; i < n; i += AT_ONCE) {
        const size_t units = std::min(AT_ONCE, n - i);
        const int64_t count = int64_t(units) * how.values();
        ggml_get_type_traits(how.from)->to_float(src + i * how.bytes_from(), values.data(), count);
        uint8_t *out = dst + i * how.bytes_to();
        if (how.to == GGML_TYPE_F32) {
            memcpy(out, values.data(), units * how.bytes_to());
        } else {
            ggml_fp32_to_fp16_row(values.data(), reinterpret_cast<ggml_fp16_t *>(out), count);
        }
    }
}

} // namespace

ggml_type recoded_matrix(ggml_type type) {
    switch (type) {
        case GGML_TYPE_MXFP4: return GGML_TYPE_Q5_0;
        case GGML_TYPE_TQ1_0:
        case GGML_TYPE_TQ2_0: return GGML_TYPE_Q4_0;
        default: return type;
    }
}

// CUDA cannot look rows up in IQ4_NL of every width, nor in NVFP4.
ggml_type recoded_table(ggml_type type) {
    switch (type) {
        case GGML_TYPE_IQ4_NL: return GGML_TYPE_F32;
        case GGML_TYPE_NVFP4: return GGML_TYPE_F16;
        default: return recoded_matrix(type);
    }
}

void recode(const Recoding &how, const uint8_t *src, uint8_t *dst, size_t n) {
    if (how.from == how.to) {
        memcpy(dst, src, n * how.bytes_from());
        return;
    }
    if (how.to == GGML_TYPE_F32 || how.to == GGML_TYPE_F16) {
        to_floats(how, src, dst, n);
        return;
    }
    if (how.to != recoded_matrix(how.from)) {
        fail(LUCE_E_ARG, "%s is not recoded as %s", type_name(how.from), type_name(how.to));
    }
    for (size_t i = 0; i < n; i++, src += how.bytes_from(), dst += how.bytes_to()) {
        switch (how.from) {
            case GGML_TYPE_TQ1_0: ternary_to_q4_0<block_tq1_0>(how.from, src, dst); break;
            case GGML_TYPE_TQ2_0: ternary_to_q4_0<block_tq2_0>(how.from, src, dst); break;
            default: mxfp4_to_q5_0(src, dst);
        }
    }
}

} // namespace luce
