// Norms and rotates query and key heads on the CPU.
#include "cpu/attention.h"

#include <cmath>
#include <vector>

namespace luce {
namespace {

// Norms and rotates one head x into out.
void rotate_head(const NormRopeArgs &a, const RopeHeads &heads, const float *x, const float *angles,
                 float *out) {
    const int half = a.rope_dim / 2;
    float sum = 0;
    for (int i = 0; i < a.D; i++) {
        sum = std::fma(x[i], x[i], sum);
    }
    const float scale = 1.0f / std::sqrt(sum / float(a.D) + a.eps);
    for (int i = 0; i < a.D; i++) {
        out[i] = x[i] * scale * heads.norm[i];
    }
    for (int i = 0; i < half; i++) {
        const float c = angles[2 * i], s = angles[2 * i + 1], low = out[i], high = out[i + half];
        out[i] = std::fma(high, -s, low * c);
        out[i + half] = std::fma(low, s, high * c);
    }
}

} // namespace

// One unit of work is a row.
void cpu_norm_rope(const NormRopeArgs &a, int ith, int nth) {
    std::vector<float> angles(size_t(a.rope_dim)); // it has the cosine and sine of each pair
    for (int row = ith; row < a.T; row += nth) {
        for (int i = 0; i < a.rope_dim / 2; i++) {
            const float angle =
                float(rope_position(a, row, i)) * std::pow(a.base, float(-2 * i) / float(a.rope_dim));
            angles[2 * size_t(i)] = std::cos(angle);
            angles[2 * size_t(i) + 1] = std::sin(angle);
        }
        for (const RopeHeads *heads : {&a.k, &a.q}) {
            for (int h = 0; h < heads->n_heads; h++) {
                rotate_head(a, *heads, heads->x + row * heads->x_row + h * heads->x_head, angles.data(),
                            heads->out + (int64_t(row) * heads->n_heads + h) * a.D);
            }
        }
    }
}

} // namespace luce
