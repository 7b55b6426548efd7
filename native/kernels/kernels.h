// luce's own ops as plain arguments: what both the CPU reference (custom_op.cpp, deltanet.cpp) and the CUDA
// launchers (*.cu) take. No ggml here: a kernel compiles and is tested alone.
// Launchers enqueue on `stream` (a cudaStream_t) and return a cudaError_t as int, 0 for success.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace luce {

constexpr int MAX_ROWS = 64;

// How a DeltaNet op treats the session's state. In every mode it first replays the pending rows: those of
// the previous verify that were accepted, from the log onto the state.
enum DeltaMode : int32_t {
    DELTA_VERIFY = 0, // rows have parents; the log is written; the state holds what is committed
    DELTA_APPEND = 1, // rows are a chain that is committed at once: the state moves to its end; no log
    DELTA_FLUSH = 2,  // pending rows only; input rows are ignored
};

// The control block of a step, i32[CTL_SIZE]: written by the host, read by the DeltaNet ops.
// Two banks of the log alternate: pending rows are read from ctl[CTL_BANK], new ones go to the other.
enum CtlIndex : int32_t {
    CTL_BANK = 0,
    CTL_N_PENDING = 1,
    CTL_PENDING = 2,                     // MAX_ROWS rows of the log, in commit order
    CTL_PARENT = CTL_PENDING + MAX_ROWS, // MAX_ROWS parents, -1 = the committed state
    CTL_SIZE = CTL_PARENT + MAX_ROWS,
};

struct DeltaShape {
    int32_t T;  // rows of this call
    int32_t R;  // rows of the log (the session's n_rows)
    int32_t Hk, Hv, S;
    int32_t mode;

    int64_t conv_dim() const { return int64_t(2 * Hk + Hv) * S; }
    // The log of one layer, F32: raw attn_qkv rows and deltas once (a channel's or column's owner reads its
    // old rows before it writes new ones), keys and decays in two banks (they have many readers).
    int64_t log_qkv(int row) const { return row * conv_dim(); }
    int64_t log_delta(int row) const { return R * conv_dim() + int64_t(row) * Hv * S; }
    int64_t log_key(int bank, int row) const { return log_delta(R) + (int64_t(bank) * R + row) * Hk * S; }
    int64_t log_decay(int bank, int row) const { return log_key(2, 0) + (int64_t(bank) * R + row) * Hv; }
    int64_t log_size() const { return log_decay(2, 0); }
};

// Causal conv of 4 taps over a row's ancestors, SiLU, then q and k l2-normalised per head:
// x * rsqrt(sum(x^2) + 1e-6). Row order of channels: q(Hk*S), k(Hk*S), v(Hv*S).
struct ConvArgs {
    DeltaShape shape;
    const float *x;   // [T][C] raw attn_qkv rows
    const float *w;   // [C][4], tap 0 is the oldest
    float *window;    // [3][C] the last three committed raw rows, oldest first; in/out
    float *log;       // [log_size]; in/out
    const int32_t *ctl;
    float *out;       // [T][C]
};

// The gated delta rule, one v head h with k head h % Hk:
//   D = exp(g)*S; delta = beta*(v - D^T k); S = fma(k, delta, D); o = (S^T q)/sqrt(S)
// with g = a*softplus(alpha + dt), beta = sigmoid(b).
struct DeltaArgs {
    DeltaShape shape;
    const float *x;     // [T][C] from ConvArgs.out
    const float *alpha; // [T][Hv]
    const float *beta;  // [T][Hv], before the sigmoid
    const float *dt;    // [Hv]
    const float *a;     // [Hv]
    float *state;       // [Hv][S (k)][S (v)]; in/out
    float *log;
    const int32_t *ctl;
    float *out;         // [T][Hv*S]
};

// The greedy choice of each row, lowest id on a tie, and whether a logit is not finite.
struct ArgmaxArgs {
    const float *logits; // [T][n]
    int64_t n;
    int32_t T;
    int32_t *out; // [T][ARGMAX_WIDTH]: token id, 1 if a logit is not finite, then room for partial results
};
constexpr int ARGMAX_PARTS = 62;
constexpr int ARGMAX_WIDTH = 2 + 2 * ARGMAX_PARTS;

// Moves cache rows down after an accept that was not a prefix: row `base + rows[i]` to `base + i`,
// i = 0, 1, ... in order. rows[i] >= i.
struct KvMoveArgs {
    uint8_t *k, *v;
    int64_t k_row, v_row; // bytes of a cell; multiples of 4
    const int32_t *path; // [2 + MAX_ROWS]: base, n, rows
};

namespace cuda {
int conv(const ConvArgs &args, void *stream);
int deltanet(const DeltaArgs &args, void *stream);
int argmax(const ArgmaxArgs &args, void *stream);
int kv_move(const KvMoveArgs &args, void *stream);
const char *error_text(int error);

// A step captured once and replayed: begin, enqueue the step, end; then launch any number of times.
int capture_begin(void *stream);
int capture_end(void *stream, void **executable);
int capture_launch(void *executable, void *stream);
void capture_free(void *executable);
} // namespace cuda

} // namespace luce
