// Has what the kernel checks and the timings share: device memory, a DeltaNet layer on the device, random
// inputs.
#pragma once

#include "common/kernels.h"
#include "reference.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <cuda_runtime.h>

using namespace luce;
using Ints = std::vector<int>;

inline cudaStream_t stream;

// These are in *_check.cu and *_time.cu. They do less without `all`, for a sanitizer.
void check_deltanet(bool all);
void check_deltanet_rows(); // it checks what needs no products, no tensor cores and no captures
void check_deltanet_prompts();
void check_deltanet_chunks(); // a small prompt
void check_attention(bool all);
void check_attention_units(bool all);
void check_attention_block(bool all);
void check_attention_prefill(bool all);
void check_attention_prompts();
void check_attention_heads(bool all);
void check_kv_pages(bool all);
void check_image_rows(bool all);
void check_copies(bool all);
void check_exchange(bool all);
void check_row_scores(bool all);
void check_nextn(bool all);
void check_attention_plan(bool all);
void check_attention_f32(); // it checks what needs no tensor cores
void check_attention_tiles(); // it checks a little of what needs those of before Hopper
void time_kernels();
void check_pack(bool all);
void check_pack_kind(); // it checks what depends on the kind of device
void check_deltanet_layer(bool all);
void time_deltanet_layer();
void check_rowmm(bool all);
void check_rowmm_norm(bool all);
void check_rowmm_ranges(); // it checks what a few multiprocessors cut anywhere
void check_rowmm_kind(); // it checks what depends on the kind of device
void check_gemm_kernels(bool all);
void check_choose(bool all);
void time_choose();
void time_attention(bool all);
void time_rowmm();
void check_topk(bool all);
void check_draft_block(bool all);
void check_clusters(bool all);
void time_topk();
void check_moe(bool all);
void check_items_of_fewer_rows(); // not by code for sm_90a, which knows that there are 8
bool moe_gives_up(); // it says whether the device stops what waits for ever, and ends what this process can do on it
void time_moe();

// Kernels share their work out among so many multiprocessors at most, where this is not 0 (launches.cu). The fewer there are,
// the more work has each block, and the sooner is a tool through that watches every access.
inline int multiprocessors_told = 0;
inline bool watched() { // A tool looks at what runs, so that it takes a thousand times as long.
    return multiprocessors_told > 0;
}
void print_kernels(bool all); // it names those that were launched, or all there are

inline bool device_lost = false; // a check has made the device stop all that this process has on it

inline void must(int error, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    if (error != 0) {
        printf("CUDA error at %s:%d: %s\n", file, line, luce::cuda::error_text(error));
        exit(1);
    }
}

// ---- checks ----

inline int n_checks = 0, n_failed = 0;

inline void expect(bool good, const std::string &what) {
    n_checks++;
    if (!good) {
        n_failed++;
        printf("FAILED %s\n", what.c_str());
    }
}

inline bool same_bits(const float *a, const float *b, size_t n) {
    return memcmp(a, b, n * sizeof(float)) == 0;
}
template <class T> bool same_bits(const std::vector<T> &a, const std::vector<T> &b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
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
    ~Device() {
        const int error = int(cudaFree(p));
        must(device_lost ? 0 : error);
    }
    void resize(size_t count) { // what it held is gone
        must(cudaFree(p));
        n = count;
        must(cudaMalloc(reinterpret_cast<void **>(&p), std::max<size_t>(n, 1) * sizeof(T)));
        poison();
    }
    void poison() { must(cudaMemset(p, 0xff, n * sizeof(T))); } // floats become NaN, integers -1
    void set(const std::vector<T> &host) {
        if (!host.empty()) {
            must(cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
        }
    }
    std::vector<T> get() const {
        std::vector<T> host(n);
        must(cudaMemcpy(host.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }
};

// ---- a step ----

// A Part is one sequence's part of a verify. Parents are counted from its own first row. There may be no
// rows.
struct Part {
    int slot;
    Rows rows;
    Ints parents;
};

// Returns where the parts' rows begin in the step, and after the last how many rows there are.
inline Ints first_rows(const std::vector<Part> &parts) {
    Ints first{0};
    for (const Part &part : parts) {
        first.push_back(first.back() + part.rows.T);
    }
    return first;
}

// Puts out of any range what nothing may rely on.
inline StepCtl blank_ctl() {
    StepCtl ctl;
    std::fill_n(reinterpret_cast<int32_t *>(&ctl), sizeof(ctl) / sizeof(int32_t), -777777);
    for (RowCtl &row : ctl.rows) {
        row.seq = row.keep = -1;
    }
    return ctl;
}

// Runs what `enqueue` puts on the stream, and waits: once as it is, or several times from a captured graph.
inline void run_times(int times, const std::function<void()> &enqueue) {
    if (times == 1) {
        enqueue();
    } else {
        void *graph = nullptr;
        must(cuda::capture_begin(stream));
        enqueue();
        must(cuda::capture_end(stream, &graph));
        for (int i = 0; i < times; i++) {
            must(cuda::capture_launch(graph, stream));
        }
        must(cudaStreamSynchronize(stream));
        cuda::capture_free(graph);
    }
    must(cudaStreamSynchronize(stream));
}

// ---- timings ----

// Returns the median of a captured graph's replays, in us. The first few warm up. A replay is so many calls, which follow each
// other without a wait.
inline double median_us(const std::function<void()> &enqueue, int replays, int calls = 1) {
    void *graph = nullptr;
    must(cuda::capture_begin(stream));
    enqueue();
    must(cuda::capture_end(stream, &graph));
    cudaEvent_t begin, end;
    must(cudaEventCreate(&begin));
    must(cudaEventCreate(&end));
    constexpr int WARM_UP = 3;
    Floats us;
    for (int i = 0; i < replays + WARM_UP; i++) {
        must(cudaEventRecord(begin, stream));
        for (int call = 0; call < calls; call++) {
            must(cuda::capture_launch(graph, stream));
        }
        must(cudaEventRecord(end, stream));
        must(cudaEventSynchronize(end));
        float ms = 0;
        must(cudaEventElapsedTime(&ms, begin, end));
        if (i >= WARM_UP) {
            us.push_back(ms * 1000 / calls);
        }
    }
    cuda::capture_free(graph);
    must(cudaEventDestroy(begin));
    must(cudaEventDestroy(end));
    std::nth_element(us.begin(), us.begin() + us.size() / 2, us.end());
    return us[us.size() / 2];
}

// Returns the median of one op among `layers` that follow each other. Each runs once before that, so that
// kernels are loaded.
inline double median_us(const std::function<void(int)> &enqueue, int replays, int layers, int calls = 1) {
    enqueue(0);
    const auto all = [&] {
        for (int i = 0; i < layers; i++) {
            enqueue(i);
        }
    };
    return median_us(all, replays, calls) / layers;
}

// ---- one DeltaNet layer on the device ----

struct Output {
    Floats conv, out;
};

// A Timeline is what the host keeps of a slot's sequence.
struct Timeline {
    Ints pending; // these rows of its last verify were accepted
    int bank = 0; // their keys are in this bank
    bool fresh = false;
};

struct Snapshot {
    Floats window, state, log;
    std::vector<Timeline> timelines;
};

struct Layer {
    Shape s;
    int R, n_slots;
    Device<float> w, dt, a, window, state, log;
    Device<StepCtl> ctl{1};
    std::vector<Timeline> timelines; // they are by slot

    // The log is poison until a verify writes it.
    Layer(const Shape &shape, int n_rows, const Weights &weights, const Floats &windows, const Floats &states)
        : s(shape), R(n_rows), n_slots(int(windows.size() / window_size())), w(weights.conv), dt(weights.dt),
          a(weights.a), window(windows), state(states), log(n_slots * log_size()), timelines(n_slots) {}

    DeltaShape delta_shape(int T, int mode, int n_prompts = 1) const {
        return {T, R, n_slots, s.Hk, s.Hv, s.S, mode, n_prompts};
    }
    size_t window_size() const { return size_t(3) * s.C(); }
    size_t state_size() const { return size_t(s.Hv) * s.S * s.S; }
    size_t log_size() const { return size_t(delta_shape(1, DELTA_VERIFY).log_size()); }

    void set_ctl(const std::vector<Part> &parts) {
        StepCtl host = blank_ctl();
        const Ints first = first_rows(parts);
        host.n_seqs = int(parts.size());
        host.n_rows = first.back();
        for (size_t i = 0; i < parts.size(); i++) {
            const Part &part = parts[i];
            const Timeline &timeline = timelines[part.slot];
            SeqCtl &seq = host.seqs[i];
            seq.slot = part.slot;
            seq.fresh = timeline.fresh;
            seq.row0 = first[i];
            seq.n_rows = part.rows.T;
            seq.bank = timeline.bank;
            seq.n_replay = int(timeline.pending.size());
            std::copy(timeline.pending.begin(), timeline.pending.end(), seq.pending);
            for (size_t r = 0; r < part.parents.size(); r++) { // an append has none
                host.rows[first[i] + r].seq = int(i);
                host.rows[first[i] + r].parent = part.parents[r] < 0 ? -1 : first[i] + part.parents[r];
            }
        }
        ctl.set({host});
    }

    void enqueue_conv(DeltaMode mode, int T, const Device<float> &x, const Device<float> &out,
                      int n_prompts = 1) const {
        must(cuda::conv({delta_shape(T, mode, n_prompts), x.p, w.p, window.p, log.p, ctl.p, out.p}, stream));
    }
    DeltaArgs delta_args(const DeltaShape &shape, const Device<float> &conv, const Device<float> &alpha,
                         const Device<float> &beta, const Device<float> &out) const {
        return {shape, conv.p, alpha.p, beta.p, dt.p, a.p, state.p, log.p, ctl.p, out.p};
    }
    void enqueue_delta(DeltaMode mode, int T, const Device<float> &conv, const Device<float> &alpha,
                       const Device<float> &beta, const Device<float> &out, int n_prompts = 1) const {
        must(cuda::deltanet(delta_args(delta_shape(T, mode, n_prompts), conv, alpha, beta, out), stream));
    }
    void enqueue_chunks(int T, const Device<float> &conv, const Device<float> &alpha,
                        const Device<float> &beta, const Device<uint8_t> &scratch, const Device<float> &out,
                        int n_prompts = 1) const {
        const DeltaShape shape = delta_shape(T, DELTA_APPEND, n_prompts);
        must(cuda::deltanet_chunks(delta_args(shape, conv, alpha, beta, out), scratch.p, stream));
    }

    // Runs a step of T rows, where those that no part fills are NaN. Afterwards no row of its sequences is
    // pending, and after a verify the caller accepts some. With `chunks` it runs the kernels of long
    // prefills.
    Output run(DeltaMode mode, const std::vector<Part> &parts, int T, bool chunks = false) {
        set_ctl(parts);
        Floats x, alpha, beta;
        for (const Part &part : parts) {
            x.insert(x.end(), part.rows.x.begin(), part.rows.x.end());
            alpha.insert(alpha.end(), part.rows.alpha.begin(), part.rows.alpha.end());
            beta.insert(beta.end(), part.rows.beta.begin(), part.rows.beta.end());
        }
        x.resize(size_t(T) * s.C(), NAN);
        alpha.resize(size_t(T) * s.Hv, NAN);
        beta.resize(size_t(T) * s.Hv, NAN);
        Device<float> dx(x), dalpha(alpha), dbeta(beta), conv(x.size()), out(size_t(T) * s.Hv * s.S);
        const int n_prompts = int(parts.size());
        enqueue_conv(mode, T, dx, conv, n_prompts);
        Device<uint8_t> scratch(chunks ? size_t(deltanet_chunks_scratch(delta_shape(T, mode, n_prompts)))
                                       : 0);
        if (chunks) {
            enqueue_chunks(T, conv, dalpha, dbeta, scratch, out, n_prompts);
        } else {
            enqueue_delta(mode, T, conv, dalpha, dbeta, out, n_prompts);
        }
        must(cudaStreamSynchronize(stream));
        for (const Part &part : parts) {
            Timeline &timeline = timelines[part.slot];
            timeline.pending.clear();
            timeline.fresh = false;
            timeline.bank ^= mode == DELTA_VERIFY && part.rows.T > 0;
        }
        return {conv.get(), out.get()};
    }
    Output append(int slot, const Rows &rows, bool chunks = false) {
        return run(DELTA_APPEND, {{slot, rows, {}}}, rows.T, chunks);
    }
    void flush(int slot) { run(DELTA_VERIFY, {{slot, {0, {}, {}, {}}, {}}}, 1); }

    Snapshot snapshot() const { return {window.get(), state.get(), log.get(), timelines}; }
    void restore(const Snapshot &from) {
        window.set(from.window);
        state.set(from.state);
        log.set(from.log);
        timelines = from.timelines;
    }
    // Makes slot `to` what slot `from` is.
    void copy_slot(Snapshot &in, int from, int to) const {
        const auto copy = [&](Floats &x, size_t n) { std::copy_n(&x[from * n], n, &x[to * n]); };
        copy(in.window, window_size());
        copy(in.state, state_size());
        copy(in.log, log_size());
        in.timelines[to] = in.timelines[from];
    }
};

// ---- inputs ----

constexpr unsigned SEED = 20260101;
inline std::mt19937 rng(SEED);
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

// Returns a random tree in depth-first order: a row's parent is on the path of the row before it. `forest`
// also starts rows at -1.
inline Ints random_tree(int T, int max_depth, bool forest) {
    Ints parents(T), path;
    for (int t = 0; t < T; t++) {
        int keep = int(path.size()); // as much of the path stays
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

// Returns an order where parents come before children, and nothing more.
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
