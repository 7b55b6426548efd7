// Computes the DeltaNet ops in double precision, by the formulas and not as the kernels do. It has one
// sequence's committed state, verify steps on it, and commits of accepted rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

struct Shape {
    int Hk, Hv, S;
    int C() const { return (2 * Hk + Hv) * S; }
};

struct Weights {
    Floats conv; // [C][4]
    Floats dt, a; // [Hv]
};

struct Rows {
    int T;
    Floats x;           // [T][C]
    Floats alpha, beta; // [T][Hv]
};

struct Result {
    Doubles conv; // [T][C]
    Doubles out;  // [T][Hv*S]
};

class Reference {
public:
    Reference(const Shape &shape, const Weights &weights, const Floats &window, const Floats &state)
        : window(window.begin(), window.end()), state(state.begin(), state.end()), s(shape), w(weights) {}

    Doubles window, state; // [3][C], [Hv][S][S]

    // Forgets what is committed.
    void clear() {
        std::fill(window.begin(), window.end(), 0.0);
        std::fill(state.begin(), state.end(), 0.0);
    }

    Result verify(const Rows &rows, const std::vector<int> &parents) {
        const int C = s.C();
        Result r{Doubles(size_t(rows.T) * C), Doubles(size_t(rows.T) * s.Hv * s.S)};
        raw.assign(rows.x.begin(), rows.x.end());
        for (int t = 0; t < rows.T; t++) {
            conv(t, parents, &r.conv[size_t(t) * C]);
        }
        key.assign(size_t(rows.T) * s.Hk * s.S, 0);
        delta.assign(size_t(rows.T) * s.Hv * s.S, 0);
        decay.assign(size_t(rows.T) * s.Hv, 0);
        for (int t = 0; t < rows.T; t++) {
            for (int i = 0; i < s.Hk * s.S; i++) {
                key[size_t(t) * s.Hk * s.S + i] = r.conv[size_t(t) * C + s.Hk * s.S + i];
            }
        }
        for (int h = 0; h < s.Hv; h++) {
            head(h, rows, parents, r);
        }
        return r;
    }

    // Commits rows of the last verify, each the child of the one before it.
    void commit(const std::vector<int> &path) {
        const int S = s.S, C = s.C();
        for (int row : path) {
            for (int c = 0; c < C; c++) {
                window[c] = window[C + c];
                window[C + c] = window[2 * C + c];
                window[2 * C + c] = raw[size_t(row) * C + c];
            }
            for (int h = 0; h < s.Hv; h++) {
                update(&state[size_t(h) * S * S], &key[(size_t(row) * s.Hk + h % s.Hk) * S],
                       &delta[(size_t(row) * s.Hv + h) * S], decay[size_t(row) * s.Hv + h]);
            }
        }
    }

private:
    Shape s;
    Weights w;
    Doubles raw, key, delta, decay; // those of the last verify

    static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

    void update(double *D, const double *k, const double *d, double g) const {
        for (int i = 0; i < s.S; i++) {
            for (int j = 0; j < s.S; j++) {
                D[i * s.S + j] = g * D[i * s.S + j] + k[i] * d[j];
            }
        }
    }

    void conv(int t, const std::vector<int> &parents, double *out) const {
        const int C = s.C();
        const double *taps[4];
        int row = t, from_window = 3;
        for (int i = 3; i >= 0; i--) {
            taps[i] = row >= 0 ? &raw[size_t(row) * C] : &window[size_t(--from_window) * C];
            row = row >= 0 ? parents[row] : -1;
        }
        for (int c = 0; c < C; c++) {
            double y = 0;
            for (int i = 0; i < 4; i++) {
                y += double(w.conv[size_t(c) * 4 + i]) * taps[i][c];
            }
            out[c] = y * sigmoid(y);
        }
        for (int head = 0; head < 2 * s.Hk; head++) {
            double sum = 0;
            for (int i = 0; i < s.S; i++) {
                sum += out[head * s.S + i] * out[head * s.S + i];
            }
            for (int i = 0; i < s.S; i++) {
                out[head * s.S + i] /= std::sqrt(sum + 1e-6);
            }
        }
    }

    void head(int h, const Rows &rows, const std::vector<int> &parents, Result &r) {
        // Of a chain only the last state is needed, of a tree of up to 64 all are.
        const int S = s.S, KEEP = 64;
        std::vector<Doubles> states(rows.T < KEEP ? rows.T : KEEP);
        for (int t = 0; t < rows.T; t++) {
            const double *x = &r.conv[size_t(t) * s.C()];
            const double *q = x + h % s.Hk * S, *k = q + s.Hk * S, *v = x + (2 * s.Hk + h) * S;
            const size_t at = size_t(t) * s.Hv + h;
            const double gate = double(rows.alpha[at]) + w.dt[h];
            const double g = std::exp(w.a[h] * (gate > 20 ? gate : std::log1p(std::exp(gate))));
            Doubles D = parents[t] < 0 ? Doubles(&state[size_t(h) * S * S], &state[size_t(h) * S * S] + S * S)
                                       : states[parents[t] % KEEP];
            double *d = &delta[at * S], *o = &r.out[at * S];
            for (int j = 0; j < S; j++) {
                double predicted = 0;
                for (int i = 0; i < S; i++) {
                    predicted += g * D[i * S + j] * k[i];
                }
                d[j] = sigmoid(rows.beta[at]) * (v[j] - predicted);
            }
            update(D.data(), k, d, g);
            for (int j = 0; j < S; j++) {
                double sum = 0;
                for (int i = 0; i < S; i++) {
                    sum += D[i * S + j] * q[i];
                }
                o[j] = sum / std::sqrt(double(S));
            }
            decay[at] = g;
            states[t % KEEP] = std::move(D);
        }
    }
};
