// The chain of kernels that a step launches, as a shared library of one build, for bench/builds_by_turns.cu. A dense step is the
// 27b's: 64 layers of products, packs, conv, delta rule and attention, the vocabulary and the choice, behind any context. A
// mixture's is the experts of the 35b-a3b's 40 layers. Values are random, and all products have weights of their own, of which
// L2 finds none from the replay before. Builds share the weights and cells in `memory`, which the first one fills.
//
//   tools/build_checks.sh FOLDER chains       (FOLDER/step_chains.so)
#include "harness.h"
#include "moe/launch_plan.h"
#include "rowmm_reference.h"

#include <memory>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t E = 5120, FF = 17408, QKV = 10240, Z = 6144, V = 248320;
constexpr int H = 24, HKV = 4, D = 256, LAYERS = 64, SLOTS = 8, LONGEST = 102400;
constexpr int Q8 = 8, Q4 = 12, Q5 = 13, Q6 = 14;
const ::Shape DELTA{16, 48, 128};
constexpr int64_t PAGES = SLOTS * ((LONGEST + MAX_ROWS) / PAGE + 1),
                  CELLS = PAGES * PAGE * HKV * D * 2; // of K or V of a layer

// Matrices of a type follow each other in a region of `memory`, and begin anew at its end.
struct Region {
    int type;
    int64_t bytes, begin = 0, used = 0;
};
Region regions[] = {{Q4, 9800000000}, {Q5, 1800000000}, {Q6, 3500000000}, {Q8, 800000000}};
uint8_t *memory = nullptr;

const uint8_t *next_matrix(int type, int64_t bytes) {
    Region &r = *std::find_if(std::begin(regions), std::end(regions),
                              [&](const Region &x) { return x.type == type; });
    r.used = r.used + bytes > r.bytes ? bytes : r.used + bytes;
    return memory + r.begin + r.used - bytes;
}
uint8_t *cells(int layer, int of_v) {
    return memory + regions[3].begin + regions[3].bytes + (layer / 4 * 2 + of_v) * CELLS;
}

struct Part27 {
    int type;
    int64_t N;
};

// What a chain's launches take, for steps of any case. It stays as long as the chain may be replayed.
struct Chain {
    const int seqs, rows, T, context, kv_type;
    Device<float> x{normals(size_t(T) * E)}, h{size_t(T) * E}, wide{size_t(2) * T * FF}, norm{normals(FF)},
        logits{size_t(T) * V}, parts{size_t(T) * 1000 * 128}, o{size_t(T) * Z};
    Device<uint8_t> packed{size_t(rowmm_x_bytes(T, FF))}, scratch{size_t(cuda::rowmm_scratch_bytes())};
    Device<uint32_t> turns{DELTA_TURN_BYTES / sizeof(uint32_t)};
    Device<int32_t> positions{size_t(T)}, pages{size_t(PAGES)};
    Device<StepCtl> ctl{1};
    Device<uint8_t> plan{size_t(attention_plan_bytes())};
    Device<ChoiceRow> choices{size_t(T)};
    std::unique_ptr<Device<float>> of_attention;
    std::vector<std::unique_ptr<Layer>> deltas;

    Chain(int n_seqs, int n_rows, int n_past, int type)
        : seqs(n_seqs), rows(n_rows), T(n_seqs * n_rows), context(n_past), kv_type(type) {
        turns.set(std::vector<uint32_t>(turns.n));
        Ints order(PAGES), at;
        for (int i = 0; i < int(PAGES); i++) {
            order[i] = i;
        }
        std::shuffle(order.begin(), order.end(), rng);
        pages.set(order);
        StepCtl host = blank_ctl();
        host.n_seqs = seqs;
        host.n_rows = T;
        for (int i = 0; i < seqs; i++) {
            SeqCtl &seq = host.seqs[i] = {};
            seq.slot = i, seq.row0 = i * rows, seq.n_rows = rows, seq.n_past = context;
            seq.n_replay = 1, seq.pages = i * int(PAGES / SLOTS);
            for (int r = 0; r < rows; r++) {
                host.rows[at.size()] = {i, r > 0 ? int(at.size()) - 1 : -1, context + r, -1};
                at.push_back(context + r);
            }
        }
        positions.set(at);
        ctl.set({host});
        const ::Weights w = random_weights(DELTA);
        const Floats windows(size_t(seqs) * 3 * DELTA.C()),
            states(size_t(seqs) * DELTA.Hv * DELTA.S * DELTA.S);
        for (int i = 0; i < LAYERS * 3 / 4; i++) {
            deltas.emplace_back(new Layer(DELTA, rows, w, windows, states));
            must(cudaMemset(deltas[i]->log.p, 0, deltas[i]->log.n * sizeof(float)));
        }
        of_attention.reset(new Device<float>(size_t(attention_scratch(attention(3)))));
    }

    RowmmPackArgs pack(int64_t K, int input, const float *from, const RowmmArgs *of) {
        RowmmPackArgs a = {};
        a.x = from, a.x_row = K, a.T = T, a.K = K, a.out = packed.p, a.input = input, a.parts = of;
        a.head = DELTA.S, a.eps = 1e-6f, a.w = norm.p, a.overlap = 1;
        return a;
    }
    RowmmArgs product(int64_t K, const std::vector<Part27> &matrices, bool normed, float *out) {
        RowmmArgs a = {};
        a.T = T, a.K = K, a.x = packed.p, a.normed = normed, a.eps = 1e-6f, a.scratch = scratch.p,
        a.overlap = 1;
        a.parts = out == nullptr ? parts.p : nullptr;
        for (const Part27 &m : matrices) {
            a.weights[a.n_weights++] = {
                m.type, m.N, next_matrix(m.type, rowmm_packed_bytes(m.type, K, m.N)), out, m.N, nullptr, 0};
        }
        return a;
    }
    AttentionArgs attention(int layer) {
        AttentionArgs a = {};
        a.pool = {cells(layer, 0), cells(layer, 1), kv_type, HKV, D};
        a.T = T, a.H = H, a.scale = 1 / std::sqrt(float(D)), a.max_pages = int(PAGES / SLOTS),
        a.layer = layer / 4;
        a.q = wide.p, a.gate = wide.p + T * H * D, a.gate_row = H * D, a.gate_head = D;
        a.ctl = ctl.p, a.pages = pages.p, a.packed = packed.p, a.plan = plan.p;
        a.scratch = of_attention == nullptr ? nullptr : of_attention->p;
        return a;
    }
    void attend(int layer, const RowmmArgs &in) {
        const AttentionArgs a = attention(layer);
        must(cuda::attention_heads({&in, a.pool, T, H, D / 4, 1e7f, 1e-6f, positions.p, norm.p, norm.p, ctl.p,
                                    pages.p, wide.p, wide.p + T * H * D, 1},
                                   stream));
        must(cuda::attention(a, stream));
    }
    // Leaves z behind what the conv gives.
    void recur(int layer, const RowmmArgs &in) {
        const Layer &d = *deltas[size_t(layer - layer / 4)];
        const DeltaShape shape = d.delta_shape(T, DELTA_VERIFY);
        float *z = wide.p + T * QKV, *beta = z + T * Z, *alpha = beta + T * DELTA.Hv;
        must(cuda::deltanet_layer(
            {{{shape, nullptr, d.w.p, d.window.p, d.log.p, ctl.p, wide.p}, &in, {z, beta, alpha}},
             {shape, wide.p, alpha, beta, d.dt.p, d.a.p, d.state.p, d.log.p, ctl.p, o.p},
             turns.p},
            stream));
    }
    void enqueue() {
        for (Region &r : regions) {
            r.used = 0;
        }
        must(cuda::attention_plan(attention(3), plan.p, stream));
        RowmmArgs last = {};
        const auto norm_rows =
            [&](bool first) { // of the sums of what the last product left and the rows so far
                RowmmPackArgs a = pack(E, ROWMM_RMS, first ? x.p : h.p, first ? nullptr : &last);
                a.copy = h.p;
                must(cuda::rowmm_pack(a, stream));
            };
        for (int layer = 0; layer < LAYERS; layer++) {
            const bool attends = layer % 4 == 3;
            norm_rows(layer == 0);
            last = attends ? product(E, {{Q4, 2 * H * D}, {Q4, HKV * D}, {Q6, HKV * D}}, true, nullptr)
                           : product(E, {{Q5, QKV}, {Q4, Z}, {Q8, 48}, {Q8, 48}}, true, nullptr);
            must(cuda::rowmm(last, stream));
            if (attends) {
                attend(layer, last);
            } else {
                recur(layer, last);
                RowmmPackArgs heads = pack(Z, ROWMM_HEAD_RMS, o.p, nullptr);
                heads.y = wide.p + T * QKV;
                heads.y_row = Z;
                must(cuda::rowmm_pack(heads, stream));
            }
            last = product(Z, {{Q4, E}}, false, nullptr);
            must(cuda::rowmm(last, stream));
            norm_rows(false);
            last = product(E, {{Q4, FF}, {Q4, FF}}, true, nullptr);
            must(cuda::rowmm(last, stream));
            must(cuda::rowmm_pack(pack(FF, ROWMM_GLU, nullptr, &last), stream));
            last = product(FF, {{layer % 2 == 0 ? Q4 : Q6, E}}, false, nullptr);
            must(cuda::rowmm(last, stream));
        }
        norm_rows(false);
        must(cuda::rowmm(product(E, {{Q6, V}}, true, logits.p), stream));
        ChooseArgs c = {};
        c.logits = logits.p, c.n = V, c.T = T, c.ctl = ctl.p, c.ahead = 1, c.out = choices.p;
        must(cuda::choose(c, stream));
    }
};

// The same of a mixture's experts.
struct Mixture {
    static constexpr int N = 256, USED = 8, MIXTURES = 40;
    static constexpr int64_t WIDTH = 2048, F = 512;
    const MoeDims d;
    Device<float> x{normals(size_t(d.T) * WIDTH)}, out{x.n}, norm{normals(WIDTH)},
        router{normals(N * WIDTH, 0.05f)}, gate{normals(WIDTH, 0.05f)}, h{size_t(d.places() * F)},
        y{size_t(d.places() * WIDTH)};
    Device<uint8_t> counters{size_t(MOE_COUNTER_BYTES)}, routed{size_t(moe_routed_bytes(d))},
        packed{size_t(rowmm_x_bytes(d.T, WIDTH))};

    explicit Mixture(int T) : d{T, N, USED, WIDTH, F, F} { must(cudaMemset(counters.p, 0, counters.n)); }
    MoeMatrix matrix(int64_t K, int64_t rows, int n) {
        const int64_t bytes = rowmm_packed_bytes(Q4, K, rows);
        return {Q4, next_matrix(Q4, n * bytes), bytes};
    }
    void enqueue() {
        for (int i = 0; i < MIXTURES; i++) {
            const MoeMatrix first = matrix(WIDTH, F, N), second = matrix(WIDTH, F, N),
                            down = matrix(F, WIDTH, N);
            const MoeMatrix s1 = matrix(WIDTH, F, 1), s2 = matrix(WIDTH, F, 1), s3 = matrix(F, WIDTH, 1);
            const float *rows = i == 0 ? x.p : out.p;
            must(cuda::moe_route({d, rows, norm.p, 1e-6f, router.p, gate.p, counters.p, routed.p, nullptr, 1},
                                 stream));
            must(cuda::moe_up({d, first, second, s1, s2, routed.p, nullptr, h.p, 1}, stream));
            if (moe_ends_at_once(d, Q4, Q4)) {
                must(cuda::moe_end({d, down, s3, routed.p, h.p, rows, out.p, 1}, stream));
            } else {
                must(cuda::moe_down({d, down, {}, s3, {}, routed.p, h.p, y.p, 1}, stream));
                must(cuda::moe_sum({d, routed.p, y.p, nullptr, rows, out.p, norm.p, packed.p, 1}, stream));
            }
        }
    }
};

// Those of the case in hand.
std::unique_ptr<Chain> dense;
std::unique_ptr<Mixture> mixture;

} // namespace

EXPORT int64_t chains_bytes() {
    int64_t bytes = 2 * LAYERS / 4 * CELLS;
    for (const Region &r : regions) {
        bytes += r.bytes;
    }
    return bytes;
}
EXPORT void chains_open(void *of_all, void *on, bool fill) {
    memory = static_cast<uint8_t *>(of_all);
    stream = static_cast<cudaStream_t>(on);
    int64_t begin = 0;
    for (Region &r : regions) {
        r.begin = begin;
        begin += r.bytes;
        const int64_t one = rowmm_packed_bytes(r.type, E, 1024);
        Device<uint8_t> source(rowmm_test::random_weights(r.type, E, 1024, 7)), packed((size_t(one)));
        must(cuda::rowmm_permute({r.type, E, 1024, source.p, packed.p}, stream));
        for (int64_t at = 0; fill && at < r.bytes; at += one) {
            must(cudaMemcpyAsync(memory + r.begin + at, packed.p, size_t(std::min(one, r.bytes - at)),
                                 cudaMemcpyDeviceToDevice, stream));
        }
        must(cudaStreamSynchronize(stream));
    }
    if (fill) { // zeros are numbers in all types of cells, and are read as fast as others
        must(cudaMemset(memory + begin, 0, size_t(chains_bytes() - begin)));
    }
}
// Returns the recorded chain of a step of `rows` rows each of so many sequences; of a mixture where seqs is 0.
EXPORT void *chain_make(int seqs, int rows, int context, int kv_type) {
    rng.seed(1);
    dense.reset();
    mixture.reset();
    if (seqs > 0) {
        dense.reset(new Chain(seqs, rows, context, kv_type));
    } else {
        mixture.reset(new Mixture(rows));
    }
    const auto enqueue = [] { dense != nullptr ? dense->enqueue() : mixture->enqueue(); };
    enqueue(); // so that kernels are loaded
    void *graph = nullptr;
    must(cuda::capture_begin(stream));
    enqueue();
    must(cuda::capture_end(stream, &graph));
    return graph;
}
EXPORT void chain_launch(void *graph) {
    must(cuda::capture_launch(graph, stream));
}
EXPORT void chain_free(void *graph) {
    cuda::capture_free(graph);
}
// Copies what the last replay left: logits, or a mixture's rows.
EXPORT void chain_result(std::vector<float> *out) {
    *out = dense != nullptr ? dense->logits.get() : mixture->out.get();
}
