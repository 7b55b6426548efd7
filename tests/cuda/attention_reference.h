// Computes attention and the cells of the KV in double precision, by the formulas of kernels.h and ggml's
// blocks.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <cuda_fp16.h>

struct KvShape {
    int H, Hkv, D, type; // type is ggml's number: F32 0, F16 1, Q4_0 2, Q8_0 8
    int first = 0, window = 0;
    float softcap = 0;
    bool gated = true;
    bool sinks = false;

    // A sink of each head, from far below scores to far above.
    float sink(int head) const { return H == 1 ? 1.5f : -6 + 14.0f * float(head) / float(H - 1); }
    int width() const { return Hkv * D; }
    size_t cell_bytes() const {
        const int blocks = width() / 32;
        return type == 0 ? 4 * width() : type == 1 ? 2 * width() : type == 2 ? 18 * blocks : 34 * blocks;
    }
};

// Writes one cell as ggml's reference quantiser does.
inline void write_cell(const KvShape &s, const float *x, uint8_t *out) {
    if (s.type == 0) {
        memcpy(out, x, size_t(s.width()) * 4);
        return;
    }
    if (s.type == 1) {
        for (int i = 0; i < s.width(); i++) {
            const __half h = __float2half_rn(x[i]);
            memcpy(out + 2 * i, &h, 2);
        }
        return;
    }
    for (int b = 0; b < s.width() / 32; b++, x += 32) {
        float most = 0, signed_most = 0;
        for (int i = 0; i < 32; i++) {
            if (std::fabs(x[i]) > most) {
                most = std::fabs(x[i]);
                signed_most = x[i];
            }
        }
        const float d = s.type == 8 ? most / 127 : signed_most / -8, inverse = d != 0 ? 1 / d : 0;
        const __half h = __float2half_rn(d);
        memcpy(out, &h, 2);
        for (int i = 0; i < (s.type == 8 ? 32 : 16); i++) {
            const auto nibble = [&](int j) {
                const float scaled = x[j] * inverse;
                return std::min(15, int(int8_t(scaled + 8.5f)));
            };
            out[2 + i] = s.type == 8 ? uint8_t(int8_t(std::round(x[i] * inverse)))
                                     : uint8_t(nibble(i) | nibble(i + 16) << 4);
        }
        out += s.type == 8 ? 34 : 18;
    }
}

inline std::vector<double> read_cell(const KvShape &s, const uint8_t *cell) {
    std::vector<double> x(s.width());
    for (int i = 0; i < s.width(); i++) {
        if (s.type == 0) {
            float f;
            memcpy(&f, cell + 4 * i, 4);
            x[i] = f;
            continue;
        }
        const uint8_t *block = s.type == 1 ? cell + 2 * i : cell + i / 32 * (s.type == 8 ? 34 : 18);
        __half h;
        memcpy(&h, block, 2);
        const int at = i % 32, byte = s.type == 2 ? block[2 + at % 16] : 0;
        x[i] = s.type == 1   ? double(__half2float(h))
               : s.type == 8 ? double(__half2float(h)) * int8_t(block[2 + at])
                             : double(__half2float(h)) * ((at < 16 ? byte & 15 : byte >> 4) - 8);
    }
    return x;
}

// Computes one row's output {H, D} over the cells that it sees, in any order. q is {H, D}, and gate is {H, D}
// or null.
inline std::vector<double> attend_row(const KvShape &s, const float *q, const float *gate, int64_t gate_head,
                                      const std::vector<const uint8_t *> &k,
                                      const std::vector<const uint8_t *> &v) {
    std::vector<double> out(size_t(s.H) * s.D), score(k.size() * s.H);
    const double scale = 1 / std::sqrt(double(s.D));
    for (size_t n = 0; n < k.size(); n++) {
        const std::vector<double> key = read_cell(s, k[n]);
        for (int h = 0; h < s.H; h++) {
            const double *head = &key[size_t(h / (s.H / s.Hkv)) * s.D];
            double x = 0;
            for (int d = 0; d < s.D; d++) {
                x += head[d] * q[h * s.D + d];
            }
            x *= scale;
            score[n * s.H + h] = s.softcap > 0 ? s.softcap * std::tanh(x / s.softcap) : x;
        }
    }
    std::vector<double> most(s.H, -INFINITY), sum(s.H);
    for (size_t i = 0; i < score.size(); i++) {
        most[i % s.H] = std::fmax(most[i % s.H], score[i]);
    }
    for (int h = 0; s.sinks && h < s.H; h++) {
        most[h] = std::fmax(most[h], double(s.sink(h)));
        sum[h] = std::exp(s.sink(h) - most[h]);
    }
    for (size_t n = 0; n < v.size(); n++) {
        const std::vector<double> value = read_cell(s, v[n]);
        for (int h = 0; h < s.H; h++) {
            const double w = std::exp(score[n * s.H + h] - most[h]);
            sum[h] += w;
            for (int d = 0; d < s.D; d++) {
                out[h * s.D + d] += w * value[size_t(h / (s.H / s.Hkv)) * s.D + d];
            }
        }
    }
    for (int i = 0; i < s.H * s.D && !k.empty(); i++) {
        out[i] /= sum[i / s.D];
        if (gate != nullptr) {
            out[i] /= 1 + std::exp(-double(gate[i / s.D * gate_head + i % s.D]));
        }
    }
    return out;
}
