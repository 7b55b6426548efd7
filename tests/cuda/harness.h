// What the kernel checks and the timings share: device memory, a DeltaNet layer on the device, random inputs.
#pragma once

#include "kernels.h"
#include "reference.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include <cuda_runtime.h>

using namespace luce;
using Ints = std::vector<int>;

inline cudaStream_t stream;

void time_kernels();

inline void must(int error) {
    if (error != 0) {
        printf("CUDA error: %s\n", luce::cuda::error_text(error));
        exit(1);
    }
}

// ---- device memory ----

template <typename T> struct Device {
    T *p = nullptr;
    size_t n = 0;

    explicit Device(size_t count) : n(count) {
        must(cudaMalloc(reinterpret_cast<void **>(&p), std::max<size_t>(n, 1) * sizeof(T)));
        poison();
    }
    explicit Device(const std::vector<T> &host) : Device(host.size()) { set(host); }
    Device(const Device &) = delete;
    ~Device() { cudaFree(p); }
    void poison() { must(cudaMemset(p, 0xff, n * sizeof(T))); } // NaN, -1
    void set(const std::vector<T> &host) {
        must(cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    std::vector<T> get() const {
        std::vector<T> host(n);
        must(cudaMemcpy(host.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }
};

// ---- one DeltaNet layer on the device ----

struct Output {
    Floats conv, out;
};

struct Snapshot {
    Floats window, state, log;
    Ints pending;
    int bank;
};

struct Layer {
    Shape s;
    int R;
    Device<float> w, dt, a, window, state, log;
    Device<int32_t> ctl{CTL_SIZE};
    Ints pending; // accepted rows of the last verify
    int bank = 0; // where their keys are

    Layer(const Shape &shape, int n_rows, const Weights &weights, const Floats &first_window,
          const Floats &first_state)
        : s(shape), R(n_rows), w(weights.conv), dt(weights.dt), a(weights.a), window(first_window),
          state(first_state), log(size_t(delta_shape(0, DELTA_VERIFY).log_size())) {}

    DeltaShape delta_shape(int T, int mode) const { return {T, R, s.Hk, s.Hv, s.S, mode}; }

    void set_ctl(const Ints &parents) {
        std::vector<int32_t> host(CTL_SIZE, -7);
        host[CTL_BANK] = bank;
        host[CTL_N_PENDING] = int32_t(pending.size());
        std::copy(pending.begin(), pending.end(), host.begin() + CTL_PENDING);
        std::copy(parents.begin(), parents.begin() + std::min<size_t>(parents.size(), MAX_ROWS),
                  host.begin() + CTL_PARENT);
        ctl.set(host);
    }

    // Enqueues the two ops as they follow each other in a step.
    void enqueue(DeltaMode mode, const Device<float> &x, const Device<float> &alpha,
                 const Device<float> &beta, int T, const Device<float> &conv, const Device<float> &out) {
        must(cuda::conv({delta_shape(T, mode), x.p, w.p, window.p, log.p, ctl.p, conv.p}, stream));
        must(cuda::deltanet(
            {delta_shape(T, mode), conv.p, alpha.p, beta.p, dt.p, a.p, state.p, log.p, ctl.p, out.p},
            stream));
    }

    // Afterwards no row is pending; after a verify the caller accepts some.
    Output run(DeltaMode mode, const Rows &rows, const Ints &parents) {
        set_ctl(parents);
        Device<float> x(rows.x), alpha(rows.alpha), beta(rows.beta);
        Device<float> conv(rows.x.size()), out(size_t(rows.T) * s.Hv * s.S);
        enqueue(mode, x, alpha, beta, rows.T, conv, out);
        must(cudaStreamSynchronize(stream));
        pending.clear();
        bank ^= mode == DELTA_VERIFY;
        return {conv.get(), out.get()};
    }
    void flush() { run(DELTA_FLUSH, {0, {}, {}, {}}, {}); }

    Snapshot snapshot() const { return {window.get(), state.get(), log.get(), pending, bank}; }
    void restore(const Snapshot &from) {
        window.set(from.window);
        state.set(from.state);
        log.set(from.log);
        pending = from.pending;
        bank = from.bank;
    }
};

// ---- inputs ----

inline std::mt19937 rng(20260101);
inline int pick(int n) {
    return int(rng() % unsigned(n));
}
inline Floats normals(size_t n, float scale = 1.0f) {
    std::normal_distribution<float> dist(0.0f, scale);
    Floats x(n);
    for (float &v : x) {
        v = dist(rng);
    }
    return x;
}

inline Weights random_weights(const Shape &s) {
    Weights w{normals(size_t(s.C()) * 4, 0.5f), normals(s.Hv), normals(s.Hv)};
    for (float &a : w.a) {
        a = -std::exp(a);
    }
    return w;
}

inline Rows random_rows(const Shape &s, int T) {
    return {T, normals(size_t(T) * s.C()), normals(size_t(T) * s.Hv, 2.0f), normals(size_t(T) * s.Hv)};
}

inline Rows take(const Shape &s, const Rows &rows, const Ints &which) {
    Rows out{int(which.size()), {}, {}, {}};
    for (int t : which) {
        out.x.insert(out.x.end(), &rows.x[size_t(t) * s.C()], &rows.x[size_t(t) * s.C()] + s.C());
        out.alpha.insert(out.alpha.end(), &rows.alpha[size_t(t) * s.Hv],
                         &rows.alpha[size_t(t) * s.Hv] + s.Hv);
        out.beta.insert(out.beta.end(), &rows.beta[size_t(t) * s.Hv], &rows.beta[size_t(t) * s.Hv] + s.Hv);
    }
    return out;
}

inline Ints chain(int T) {
    Ints parents(T);
    for (int t = 0; t < T; t++) {
        parents[t] = t - 1;
    }
    return parents;
}

// Depth-first: a row's parent is on the path of the row before it. `forest` also starts rows at -1.
inline Ints random_tree(int T, int max_depth, bool forest) {
    Ints parents(T), path;
    for (int t = 0; t < T; t++) {
        int keep = int(path.size()); // how much of the path stays
        if (pick(3) == 0 || keep >= max_depth) {
            keep = keep == 0 ? 0 : pick(std::min(keep, max_depth));
        }
        keep = t > 0 && !forest ? std::max(keep, 1) : keep;
        path.resize(keep);
        parents[t] = path.empty() ? -1 : path.back();
        path.push_back(t);
    }
    return parents;
}

// Parents come before children, and nothing more.
inline Ints random_order(int T) {
    Ints parents(T, -1);
    for (int t = 1; t < T; t++) {
        parents[t] = pick(t + 1) - 1;
    }
    return parents;
}

inline Ints path_to(const Ints &parents, int row) {
    Ints path;
    for (; row >= 0; row = parents[row]) {
        path.insert(path.begin(), row);
    }
    return path;
}
