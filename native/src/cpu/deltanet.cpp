// Computes the DeltaNet ops on the CPU, as their reference. The order of every sum is fixed and does not depend on how
// many rows or sequences there are, so a row's bits are the same in plain decoding, in any verify step and in a replay.
#include "cpu/deltanet.h"
#include "cpu/exponential.h"
#include "cpu/simd.h"

#include "deltanet/sizes.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace luce {
namespace {

using lanes::all;
using lanes::Floats;
using lanes::fma;
using lanes::LANES;

constexpr int TAPS = CONV_TAPS;
constexpr int MAX_S = 128;

float softplus(float x) {
    return x > 20.0f ? x : std::log1p(std::exp(x));
}

// What both ops know of a sequence's part of the step.
struct SeqPart {
    const SeqCtl &seq;
    const RowCtl *rows; // it is null in an append, whose rows are a chain
    int row0, n_rows; // these are rows of the step
    bool
        write_back; // the stored state and window change: rows are replayed, or a new timeline begins with zeros

    SeqPart(const DeltaShape &s, const StepCtl &ctl, int i)
        : seq(ctl.seqs[i]), rows(s.mode == DELTA_APPEND ? nullptr : ctl.rows), row0(seq.row0),
          n_rows(seq.n_rows), write_back(seq.fresh || seq.n_replay > 0) {}

    int parent(int t) const { return rows ? rows[t].parent : t > row0 ? t - 1 : -1; }
};

// ---- conv ----

// A window is the last three committed raw rows of one head, oldest first.
struct Window {
    float row[TAPS - 1][MAX_S];

    void push(const float *x, int64_t n) {
        memmove(row[0], row[1], sizeof(row[0]) * (TAPS - 2));
        memcpy(row[TAPS - 2], x, size_t(n) * sizeof(float));
    }
};

// Computes out[t] from row t and its ancestors. Those that lie before the step are taken from `window`.
void conv_row(const ConvArgs &a, const SeqPart &part, const Window &window, int t, int64_t c0,
              bool normalise) {
    const int64_t C = a.shape.conv_dim(), n = a.shape.S;
    const float *taps[TAPS]; // the oldest comes first
    int row = t, from_window = TAPS - 1;
    for (int i = TAPS - 1; i >= 0; i--) {
        taps[i] = row >= 0 ? a.x + row * C + c0 : window.row[--from_window];
        row = row >= 0 ? part.parent(row) : -1;
    }
    float *out = a.out + t * C + c0, y[MAX_S];
    const float *w = a.w + c0 * TAPS;
    for (int64_t c = 0; c < n; c++) {
        y[c] = w[c * TAPS] * taps[0][c];
        for (int i = 1; i < TAPS; i++) {
            y[c] = std::fma(w[c * TAPS + i], taps[i][c], y[c]);
        }
    }
    for (int64_t c = 0; c < n; c++) {
        out[c] = silu(y[c]);
    }
    if (normalise) {
        float sum = 0;
        for (int64_t c = 0; c < n; c++) {
            sum = std::fma(out[c], out[c], sum);
        }
        const float scale = 1.0f / std::sqrt(sum + 1e-6f);
        for (int64_t c = 0; c < n; c++) {
            out[c] *= scale;
        }
    }
}

// Computes channels c0 .. c0 + S - 1, which are one head of q, k or v.
void conv_head(const ConvArgs &a, const SeqPart &part, int64_t c0, bool normalise) {
    const DeltaShape &s = a.shape;
    const int64_t C = s.conv_dim(), n = s.S;
    const size_t bytes = size_t(n) * sizeof(float);
    float *log = a.log + part.seq.slot * s.log_size();
    float *stored = a.window + part.seq.slot * (TAPS - 1) * C + c0;
    Window window;
    for (int i = 0; i < TAPS - 1; i++) {
        if (part.seq.fresh) {
            memset(window.row[i], 0, bytes);
        } else {
            memcpy(window.row[i], stored + i * C, bytes);
        }
    }
    for (int p = 0; p < part.seq.n_replay; p++) {
        window.push(log + s.log_qkv(part.seq.pending[p]) + c0, n);
    }
    for (int i = 0; i < part.n_rows; i++) {
        conv_row(a, part, window, part.row0 + i, c0, normalise);
    }
    if (s.mode == DELTA_VERIFY) {
        for (int i = 0; i < part.n_rows; i++) {
            memcpy(log + s.log_qkv(i) + c0, a.x + (part.row0 + i) * C + c0, bytes);
        }
    } else {
        for (int i = std::max(part.n_rows - (TAPS - 1), 0); i < part.n_rows; i++) {
            window.push(a.x + (part.row0 + i) * C + c0, n);
        }
    }
    if (s.mode == DELTA_APPEND || part.write_back) {
        for (int i = 0; i < TAPS - 1; i++) {
            memcpy(stored + i * C, window.row[i], bytes);
        }
    }
}

// ---- the recurrence ----

float *state_of(const DeltaArgs &a, const SeqCtl &seq, int head) {
    return a.state + (int64_t(seq.slot) * a.shape.Hv + head) * a.shape.S * a.shape.S;
}

// Columns are W columns (v dimensions) of one head's state. They are the unit of work of the recurrence.
template <int W> struct Columns {
    static constexpr int N = W / LANES; // a row of the columns is so many vectors
    const DeltaArgs &a;
    const SeqPart &part;
    int h; // it is the v head
    int j0; // it is the first column
    const float *next; // it is the state of this thread's next unit, or null
    float *log; // it is the log of the sequence's slot
    float *committed; // it is the head's state from the first column on, whose rows are S apart
    Floats S[MAX_S][N]; // [k][v]

    Columns(const DeltaArgs &args, const SeqPart &sequence, int head, int column, const float *following)
        : a(args), part(sequence), h(head), j0(column), next(following),
          log(a.log + part.seq.slot * a.shape.log_size()), committed(state_of(a, part.seq, h) + j0) {}

    // Row i of the next unit's state comes while this one is computed: together the states of many sequences are too
    // many for a near cache.
    void fetch_next(int i) const {
        for (int j = 0; j < W && next != nullptr; j += 16) {
            __builtin_prefetch(next + i * a.shape.S + j0 + j, 0, 2);
        }
    }

    void load() {
        for (int i = 0; i < a.shape.S; i++) {
            memcpy(S[i], committed + i * a.shape.S, sizeof(S[i]));
        }
    }
    void store() const {
        for (int i = 0; i < a.shape.S; i++) {
            memcpy(committed + i * a.shape.S, S[i], sizeof(S[i]));
        }
    }

    // Applies a logged row again: S = fma(k, delta, exp(g)*S). S is taken from memory, or is the one that is here.
    void replay(const float *k, float decay, const float *delta, bool from_memory) {
        Floats change[N];
        memcpy(change, delta, sizeof(change));
        const float *from = from_memory ? committed : reinterpret_cast<const float *>(S);
        const int64_t pitch = from_memory ? a.shape.S : W;
        for (int i = 0; i < a.shape.S; i++) {
            for (int n = 0; n < N; n++) {
                S[i][n] =
                    fma(all(k[i]), change[n], all(decay) * lanes::load<Floats>(from + i * pitch + n * LANES));
            }
        }
    }

    // Applies a row: D = exp(g)*S; delta = beta*(v - D^T k); S = fma(k, delta, D); o = S^T q.
    void update(const float *q, const float *k, const float *v, float decay, float beta, float *delta,
                float *o) {
        Floats acc[N] = {}, change[N];
        for (int i = 0; i < a.shape.S; i++) {
            fetch_next(i);
            for (int n = 0; n < N; n++) {
                S[i][n] *= all(decay);
                acc[n] = fma(S[i][n], all(k[i]), acc[n]);
            }
        }
        for (int n = 0; n < N; n++) {
            change[n] = all(beta) * (lanes::load<Floats>(v + n * LANES) - acc[n]);
            acc[n] = Floats{};
        }
        for (int i = 0; i < a.shape.S; i++) {
            for (int n = 0; n < N; n++) {
                S[i][n] = fma(all(k[i]), change[n], S[i][n]);
                acc[n] = fma(S[i][n], all(q[i]), acc[n]);
            }
        }
        memcpy(delta, change, sizeof(change));
        memcpy(o, acc, sizeof(acc));
    }
};

float row_decay(const DeltaArgs &a, int t, int h) {
    return std::exp(a.a[h] * softplus(a.alpha[int64_t(t) * a.shape.Hv + h] + a.dt[h]));
}

// Makes `parent`'s state the one in cols, by applying its ancestors' deltas again onto the committed state.
template <int W> void rebuild_state(Columns<W> &cols, int parent) {
    const DeltaArgs &a = cols.a;
    const DeltaShape &s = a.shape;
    int path[MAX_ROWS], n = 0;
    for (int row = parent; row >= 0; row = cols.part.parent(row)) {
        path[n++] = row;
    }
    if (n == 0) {
        cols.load();
    }
    for (bool first = true; n-- > 0; first = false) {
        const int t = path[n];
        cols.replay(a.x + t * s.conv_dim() + (s.Hk + cols.h % s.Hk) * s.S, row_decay(a, t, cols.h),
                    cols.log + s.log_delta(t - cols.part.row0) + cols.h * s.S + cols.j0, first);
    }
}

// Runs the rows in order. A row that does not follow the one before it starts from its parent's state, which
// is rebuilt.
template <int W> void run_rows(Columns<W> &cols) {
    const DeltaArgs &a = cols.a;
    const DeltaShape &s = a.shape;
    const SeqPart &part = cols.part;
    const int h = cols.h, kh = h % s.Hk, bank = part.seq.bank ^ 1;
    const float scale = 1.0f / std::sqrt(float(s.S));
    for (int i = 0; i < part.n_rows; i++) {
        const int t = part.row0 + i;
        if (part.parent(t) != (i > 0 ? t - 1 : -1)) {
            rebuild_state(cols, part.parent(t));
        }
        const float *row = a.x + t * s.conv_dim();
        const float *q = row + kh * s.S, *k = q + s.Hk * s.S, *v = row + (2 * s.Hk + h) * s.S + cols.j0;
        const float decay = row_decay(a, t, h), beta = sigmoid(a.beta[int64_t(t) * s.Hv + h]);
        float delta[W], o[W];
        cols.update(q, k, v, decay, beta, delta, o);
        float *out = a.out + (int64_t(t) * s.Hv + h) * s.S + cols.j0;
        for (int j = 0; j < W; j++) {
            out[j] = o[j] * scale;
        }
        if (s.mode == DELTA_VERIFY) {
            memcpy(cols.log + s.log_delta(i) + h * s.S + cols.j0, delta, sizeof(delta));
            if (cols.j0 == 0) {
                cols.log[s.log_decay(bank, i) + h] = decay;
                if (h < s.Hk) {
                    memcpy(cols.log + s.log_key(bank, i) + kh * s.S, k, size_t(s.S) * sizeof(float));
                }
            }
        }
    }
}

template <int W> void deltanet_head(const DeltaArgs &a, const SeqPart &part, int h, const float *next) {
    const DeltaShape &s = a.shape;
    const SeqCtl &seq = part.seq;
    for (int j0 = 0; j0 < s.S; j0 += W) {
        Columns<W> cols(a, part, h, j0, next);
        if (seq.fresh) {
            memset(cols.S, 0, sizeof(cols.S));
        } else if (seq.n_replay == 0) {
            cols.load();
        }
        for (int p = 0; p < seq.n_replay; p++) {
            const int row = seq.pending[p];
            cols.replay(cols.log + s.log_key(seq.bank, row) + (h % s.Hk) * s.S,
                        cols.log[s.log_decay(seq.bank, row) + h], cols.log + s.log_delta(row) + h * s.S + j0,
                        p == 0 && seq.fresh == 0);
        }
        if (s.mode == DELTA_VERIFY && part.write_back) {
            cols.store();
        }
        run_rows(cols);
        if (s.mode == DELTA_APPEND) {
            cols.store();
        }
    }
}

} // namespace

// One unit of work is one head of one sequence.
void cpu_conv(const ConvArgs &a, int ith, int nth) {
    const int64_t n_heads = a.shape.conv_dim() / a.shape.S, n = a.ctl->n_seqs * n_heads;
    for (int64_t i = ith; i < n; i += nth) {
        const int64_t head = i % n_heads;
        conv_head(a, SeqPart(a.shape, *a.ctl, int(i / n_heads)), head * a.shape.S, head < 2 * a.shape.Hk);
    }
}

void cpu_deltanet(const DeltaArgs &a, int ith, int nth) {
    const int n_heads = a.shape.Hv, n = a.ctl->n_seqs * n_heads;
    for (int i = ith; i < n; i += nth) {
        const SeqPart part(a.shape, *a.ctl, i / n_heads);
        const int following = i + nth;
        const float *next =
            following < n ? state_of(a, a.ctl->seqs[following / n_heads], following % n_heads) : nullptr;
        if (a.shape.S >= 64) {
            deltanet_head<64>(a, part, i % n_heads, next);
        } else if (a.shape.S == 32) {
            deltanet_head<32>(a, part, i % n_heads, next);
        } else {
            deltanet_head<16>(a, part, i % n_heads, next);
        }
    }
}

} // namespace luce
