// CPU reference of the DeltaNet ops. The order of every sum is fixed and does not depend on how many rows
// there are, so a row's bits are the same in plain decoding, in any verify step and in a replay.
#include "custom_op.h"

#include <cmath>
#include <cstring>

namespace luce {
namespace {

constexpr int TAPS = 4;

float silu(float x) {
    return x / (1.0f + std::exp(-x));
}

float sigmoid(float x) {
    return 1.0f / (1.0f + std::exp(-x));
}

float softplus(float x) {
    return x > 20.0f ? x : std::log1p(std::exp(x));
}

// The raw rows before row t along its ancestors: prev[0] = its parent, ... ; nullptr where the committed
// window takes over, *n_window rows from whose end are still needed.
int ancestors(const ConvArgs &a, int t, const float *prev[TAPS - 1]) {
    const int64_t C = a.shape.conv_dim();
    int found = 0;
    for (int row = t; found < TAPS - 1; found++) {
        row = a.shape.mode == DELTA_APPEND ? row - 1 : a.ctl[CTL_PARENT + row];
        if (row < 0) {
            break;
        }
        prev[found] = a.x + row * C;
    }
    return found;
}

// Channels [c0, c0 + n) of one head: S channels of q, k or v.
void conv_head(const ConvArgs &a, int64_t c0, bool normalise) {
    const DeltaShape &s = a.shape;
    const int64_t C = s.conv_dim(), n = s.S;
    float window[TAPS - 1][128]; // S <= 128
    for (int i = 0; i < TAPS - 1; i++) {
        memcpy(window[i], a.window + i * C + c0, size_t(n) * sizeof(float));
    }
    for (int p = 0; p < a.ctl[CTL_N_PENDING]; p++) {
        const float *row = a.log + s.log_qkv(a.ctl[CTL_PENDING + p]) + c0;
        memmove(window[0], window[1], sizeof(window[0]) * (TAPS - 2));
        memcpy(window[TAPS - 2], row, size_t(n) * sizeof(float));
    }
    const int T = s.mode == DELTA_FLUSH ? 0 : s.T;
    for (int t = 0; t < T; t++) {
        const float *prev[TAPS - 1];
        const int found = ancestors(a, t, prev);
        const float *taps[TAPS]; // oldest first
        taps[TAPS - 1] = a.x + t * C + c0;
        for (int i = 1; i < TAPS; i++) {
            taps[TAPS - 1 - i] = i <= found ? prev[i - 1] + c0 : window[TAPS - 1 - (i - found)];
        }
        float *out = a.out + t * C + c0;
        float sum = 0;
        for (int64_t c = 0; c < n; c++) {
            const float *w = a.w + (c0 + c) * TAPS;
            float y = w[0] * taps[0][c];
            for (int i = 1; i < TAPS; i++) {
                y = std::fma(w[i], taps[i][c], y);
            }
            out[c] = silu(y);
            sum = std::fma(out[c], out[c], sum);
        }
        if (normalise) {
            const float scale = 1.0f / std::sqrt(sum + 1e-6f);
            for (int64_t c = 0; c < n; c++) {
                out[c] *= scale;
            }
        }
    }
    if (s.mode == DELTA_VERIFY) {
        for (int t = 0; t < T; t++) {
            memcpy(a.log + s.log_qkv(t) + c0, a.x + t * C + c0, size_t(n) * sizeof(float));
        }
    } else if (s.mode == DELTA_APPEND) {
        for (int t = T > TAPS - 1 ? T - (TAPS - 1) : 0; t < T; t++) {
            memmove(window[0], window[1], sizeof(window[0]) * (TAPS - 2));
            memcpy(window[TAPS - 2], a.x + t * C + c0, size_t(n) * sizeof(float));
        }
    }
    for (int i = 0; i < TAPS - 1; i++) {
        memcpy(a.window + i * C + c0, window[i], size_t(n) * sizeof(float));
    }
}

// W columns (v dimensions) of one head's state: the unit of work of the recurrence.
template <int W> struct Columns {
    const DeltaArgs &a;
    int h;          // v head
    int j0;         // first column
    float S[128][W]; // [k][v]; filled by load()

    Columns(const DeltaArgs &args, int head, int column) : a(args), h(head), j0(column) { load(); }

    float *state(int i) const { return a.state + (int64_t(h) * a.shape.S + i) * a.shape.S + j0; }

    void load() {
        for (int i = 0; i < a.shape.S; i++) {
            memcpy(S[i], state(i), sizeof(S[i]));
        }
    }
    void store() const {
        for (int i = 0; i < a.shape.S; i++) {
            memcpy(state(i), S[i], sizeof(S[i]));
        }
    }

    // S = fma(k, delta, exp(g)*S): a logged row again
    void replay(const float *k, float decay, const float *delta) {
        for (int i = 0; i < a.shape.S; i++) {
            for (int j = 0; j < W; j++) {
                S[i][j] = std::fma(k[i], delta[j], decay * S[i][j]);
            }
        }
    }

    // D = exp(g)*S; delta = beta*(v - D^T k); S = fma(k, delta, D); o = S^T q
    void update(const float *q, const float *k, const float *v, float decay, float beta, float *delta,
                float *o) {
        float acc[W] = {};
        for (int i = 0; i < a.shape.S; i++) {
            for (int j = 0; j < W; j++) {
                S[i][j] *= decay;
                acc[j] = std::fma(S[i][j], k[i], acc[j]);
            }
        }
        for (int j = 0; j < W; j++) {
            delta[j] = beta * (v[j] - acc[j]);
            acc[j] = 0;
        }
        for (int i = 0; i < a.shape.S; i++) {
            for (int j = 0; j < W; j++) {
                S[i][j] = std::fma(k[i], delta[j], S[i][j]);
                acc[j] = std::fma(S[i][j], q[i], acc[j]);
            }
        }
        memcpy(o, acc, sizeof(acc));
    }
};

float row_decay(const DeltaArgs &a, int t, int h) {
    return std::exp(a.a[h] * softplus(a.alpha[int64_t(t) * a.shape.Hv + h] + a.dt[h]));
}

// Rows in order; where a row does not follow the one before it, its parent's state is rebuilt from the
// committed state by replaying its ancestors.
template <int W> void run_rows(Columns<W> &cols, int new_bank) {
    const DeltaArgs &a = cols.a;
    const DeltaShape &s = a.shape;
    const int h = cols.h, kh = h % s.Hk;
    const int64_t C = s.conv_dim();
    const float scale = 1.0f / std::sqrt(float(s.S));
    for (int t = 0; t < s.T; t++) {
        const int parent = s.mode == DELTA_APPEND ? t - 1 : a.ctl[CTL_PARENT + t];
        if (parent != t - 1) {
            int path[MAX_ROWS], n = 0;
            for (int row = parent; row >= 0; row = a.ctl[CTL_PARENT + row]) {
                path[n++] = row;
            }
            cols.load();
            while (n-- > 0) {
                cols.replay(a.x + path[n] * C + (s.Hk + kh) * s.S, row_decay(a, path[n], h),
                            a.log + s.log_delta(path[n]) + h * s.S + cols.j0);
            }
        }
        const float *row = a.x + t * C;
        const float *q = row + kh * s.S, *k = q + s.Hk * s.S, *v = row + (2 * s.Hk + h) * s.S + cols.j0;
        const float decay = row_decay(a, t, h), beta = sigmoid(a.beta[int64_t(t) * s.Hv + h]);
        float delta[W], o[W];
        cols.update(q, k, v, decay, beta, delta, o);
        float *out = a.out + (int64_t(t) * s.Hv + h) * s.S + cols.j0;
        for (int j = 0; j < W; j++) {
            out[j] = o[j] * scale;
        }
        if (s.mode == DELTA_VERIFY) {
            memcpy(a.log + s.log_delta(t) + h * s.S + cols.j0, delta, sizeof(delta));
            if (cols.j0 == 0) {
                a.log[s.log_decay(new_bank, t) + h] = decay;
                if (h < s.Hk) {
                    memcpy(a.log + s.log_key(new_bank, t) + kh * s.S, k, size_t(s.S) * sizeof(float));
                }
            }
        }
    }
}

template <int W> void deltanet_head(const DeltaArgs &a, int h) {
    const DeltaShape &s = a.shape;
    const int bank = a.ctl[CTL_BANK], n_pending = a.ctl[CTL_N_PENDING];
    for (int j0 = 0; j0 < s.S; j0 += W) {
        Columns<W> cols(a, h, j0);
        for (int p = 0; p < n_pending; p++) {
            const int row = a.ctl[CTL_PENDING + p];
            cols.replay(a.log + s.log_key(bank, row) + (h % s.Hk) * s.S, a.log[s.log_decay(bank, row) + h],
                        a.log + s.log_delta(row) + h * s.S + j0);
        }
        if (n_pending > 0 && s.mode != DELTA_APPEND) {
            cols.store();
        }
        if (s.mode != DELTA_FLUSH) {
            run_rows(cols, bank ^ 1);
        }
        if (s.mode == DELTA_APPEND) {
            cols.store();
        }
    }
}

} // namespace

void cpu_conv(const ConvArgs &a, int ith, int nth) {
    const int64_t n_heads = a.shape.conv_dim() / a.shape.S;
    for (int64_t head = ith; head < n_heads; head += nth) {
        conv_head(a, head * a.shape.S, head < 2 * a.shape.Hk);
    }
}

void cpu_deltanet(const DeltaArgs &a, int ith, int nth) {
    for (int h = ith; h < a.shape.Hv; h += nth) {
        if (a.shape.S >= 64) {
            deltanet_head<64>(a, h);
        } else if (a.shape.S == 32) {
            deltanet_head<32>(a, h);
        } else {
            deltanet_head<16>(a, h);
        }
    }
}

} // namespace luce
