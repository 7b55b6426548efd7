// Computes attention on the CPU. A row's sums have one order, key by key in logical order and chunk by chunk,
// whatever rows are beside it. A tile of K or V is dequantised once for all rows and heads that share it, but
// each row reads only its own keys of it.
#include "cpu/attention.h"

#include "cpu/exponential.h"
#include "cpu/simd.h"

#include "attention/chunks.h"

#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace luce {
namespace {

constexpr int SUMS = 16; // a dot product has as many partial sums
constexpr int TILE = 64; // as many keys are dequantised at once
constexpr int KEYS = 4; // as many keys are added to an accumulator at once

// ---- cells -------------------------------------------------------------------------------------------

// The rows of k (0) or v (1) that one head of a sequence has, one a position. They follow each other within a page.
struct HeadRows {
    const KvPool &pool;
    uint8_t *base;
    const int32_t *pages;
    int head;
    int64_t bytes; // a row has so many

    HeadRows(const KvPool &of, int which, const int32_t *table, const SeqCtl &seq, int head_index)
        : pool(of), base(which == 0 ? of.k : of.v), pages(table + seq.pages), head(head_index),
          bytes(int64_t(ggml_row_size(ggml_type(of.type), of.D))) {}
    uint8_t *at(int32_t position) const {
        return base + pool.row(pages[position / PAGE], position, head) * bytes;
    }
};

void to_float(ggml_type type, const void *from, float *to, int64_t n) {
    if (type == GGML_TYPE_F32) {
        memcpy(to, from, size_t(n) * sizeof(float));
    } else if (type == GGML_TYPE_F16) {
        ggml_cpu_fp16_to_fp32(static_cast<const ggml_fp16_t *>(from), to, n);
    } else {
        ggml_get_type_traits(type)->to_float(from, to, n);
    }
}

void from_float(ggml_type type, const float *from, void *to, int64_t n) {
    if (type == GGML_TYPE_F32) {
        memcpy(to, from, size_t(n) * sizeof(float));
    } else if (type == GGML_TYPE_F16) {
        ggml_cpu_fp32_to_fp16(from, static_cast<ggml_fp16_t *>(to), n);
    } else {
        ggml_get_type_traits(type)->from_float_ref(from, to, n);
    }
}

// Moves one KV head of k or v.
void move_head(const KvMoveArgs &a, const KvPool &pool, int which, int head) {
    for (const SeqCtl *seq = a.ctl->seqs; seq < a.ctl->seqs + a.ctl->n_seqs; seq++) {
        const HeadRows rows(pool, which, a.pages, *seq, head);
        const int32_t n = seq->moves != 0 ? seq->n_replay : 0, first = seq->n_past - n;
        for (int32_t i = 0; i < n; i++) {
            memmove(rows.at(first + i), rows.at(first + seq->pending[i]), size_t(rows.bytes));
        }
    }
}

// Stores one KV head of k or v.
void store_head(const KvStoreArgs &a, int which, int head) {
    const KvPool &pool = a.pool;
    const float *x = which == 0 ? a.k : a.v;
    for (int s = 0; s < a.ctl->n_seqs; s++) {
        const SeqCtl &seq = a.ctl->seqs[s];
        const HeadRows rows(pool, which, a.pages, seq, head);
        for (int r = 0; r < seq.n_rows; r++) {
            const float *row = x + (int64_t(seq.row0 + r) * pool.Hkv + head) * pool.D;
            from_float(ggml_type(pool.type), row, rows.at(seq.n_past + r), pool.D);
        }
    }
}

// ---- arithmetic --------------------------------------------------------------------------------------

// Adds SUMS values pairwise: those 8 apart, then those 4, 2 and 1 apart.
float total(const void *sums) {
    typedef float Four __attribute__((vector_size(16)));
    Four part[SUMS / 4];
    memcpy(part, sums, sizeof(part));
    const Four s = (part[0] + part[2]) + (part[1] + part[3]);
    return (s[0] + s[2]) + (s[1] + s[3]);
}

// Computes out[n * stride + i] = q[n] . k[i] for N rows of q and K of k. As many sums at once hide how long each step of one
// takes.
template <int N, int K> void dots(const float *q, const float *k, int D, float *out, int stride) {
    constexpr int PARTS = SUMS / lanes::LANES; // a dot product's partial sums are so many vectors
    using lanes::Floats;
    Floats sums[N][K][PARTS] = {};
    for (int at = 0; at < D; at += SUMS) {
        for (int p = 0; p < PARTS; p++) {
            for (int i = 0; i < K; i++) {
                const Floats values = lanes::load<Floats>(k + i * D + at + p * lanes::LANES);
                for (int n = 0; n < N; n++) {
                    const Floats row = lanes::load<Floats>(q + n * D + at + p * lanes::LANES);
                    sums[n][i][p] = lanes::fma(row, values, sums[n][i][p]);
                }
            }
        }
    }
    for (int n = 0; n < N; n++) {
        for (int i = 0; i < K; i++) {
            out[n * stride + i] = total(sums[n][i]);
        }
    }
}

// Computes the same for n of k.
template <int N> void dots_of(const float *q, const float *k, int n, int D, float *out, int stride) {
    constexpr int AT_ONCE = N == 1 ? 8 : 4;
    int i = 0;
    for (; i + AT_ONCE <= n; i += AT_ONCE) {
        dots<N, AT_ONCE>(q, k + int64_t(i) * D, D, out + i, stride);
    }
    for (; i < n; i++) {
        dots<N, 1>(q, k + int64_t(i) * D, D, out + i, stride);
    }
}

// Computes acc += p[0] * v[0] + p[1] * v[1] .. in this order, over n rows of v.
void add_values(float *__restrict acc, const float *__restrict v, const float *p, int n, int D) {
    int i = 0;
    for (; i + KEYS <= n; i += KEYS) {
        const float *v0 = v + int64_t(i) * D, *v1 = v0 + D, *v2 = v1 + D, *v3 = v2 + D;
        const float p0 = p[i], p1 = p[i + 1], p2 = p[i + 2], p3 = p[i + 3];
        for (int d = 0; d < D; d++) {
            acc[d] =
                std::fma(p3, v3[d], std::fma(p2, v2[d], std::fma(p1, v1[d], std::fma(p0, v0[d], acc[d]))));
        }
    }
    for (; i < n; i++) {
        for (int d = 0; d < D; d++) {
            acc[d] = std::fma(p[i], v[int64_t(i) * D + d], acc[d]);
        }
    }
}

// ---- attention ---------------------------------------------------------------------------------------

// Sums are the largest score, and the sum of e^(score - max). The sum of e^(score - max) * v (D values) lies
// elsewhere.
struct Sums {
    float max = -INFINITY, sum = 0;
};

// A group is rows `first` to `last` of one sequence that lie on one path: each follows the one before it.
struct Group {
    int first, last;
};

// A unit is one thread's work: one sequence's query heads of one KV head, or some of their (row, head) pairs.
struct Unit {
    const AttentionArgs &a;
    const SeqCtl &seq;
    int head; // it is the KV head
    int begin, end; // they bound pairs, each being row of the sequence * G + head of the KV head's group
    const int D, G;
    const int32_t low; // it is the lowest position that a row sees
    std::vector<float> &memory; // each thread has its own
    float *keys, *values, *scores; // [TILE][D], [TILE][D], [G][TILE]
    float *chunk, *total; // [pairs][D]
    std::vector<Sums> &sums; // the chunk's come first, then the total's

    Unit(const AttentionArgs &args, const SeqCtl &s, int kv_head, int first, int last,
         std::vector<float> &floats, std::vector<Sums> &pair_sums)
        : a(args), seq(s), head(kv_head), begin(first), end(last), D(args.pool.D), G(args.H / args.pool.Hkv),
          low(lowest_visible(s.n_past, args.first, args.window)), memory(floats), sums(pair_sums) {
        const size_t n = size_t(end - begin), tile = size_t(TILE) * D;
        memory.resize(2 * tile + size_t(G) * TILE + 2 * n * D);
        keys = memory.data();
        values = keys + tile;
        scores = values + tile;
        chunk = scores + size_t(G) * TILE;
        total = chunk + n * D;
        std::fill(chunk, total + n * D, 0.0f);
        sums.assign(2 * n, Sums());
    }

    int32_t position(int row) const {
        return a.committed != 0 ? seq.n_past : a.ctl->rows[seq.row0 + row].position;
    }
    int32_t last_seen(int row) const {
        return a.committed != 0 ? seq.n_past - 1 : a.block != 0 ? seq.n_past + seq.n_rows - 1 : position(row);
    }

    // Loads positions [from, to) as rows of a tile: committed ones, then the ancestors of the row that `path`
    // belongs to.
    void load(int which, int32_t from, int32_t to, const int *path, float *tile) const {
        const HeadRows rows(a.pool, which, a.pages, seq, head);
        for (int32_t p = from, n; p < to; p += n) {
            const bool committed = p < seq.n_past;
            n = committed ? std::min({to, seq.n_past, (p / PAGE + 1) * PAGE}) - p : 1;
            const int32_t at = committed ? p : seq.n_past + path[p - seq.n_past];
            to_float(ggml_type(a.pool.type), rows.at(at), tile + int64_t(p - from) * D, int64_t(n) * D);
        }
    }

    void score(const float *q, int n_heads, const float *tile, int n) {
        int g = 0;
        for (; g + 4 <= n_heads; g += 4) {
            dots_of<4>(q + g * D, tile, n, D, scores + g * TILE, TILE);
        }
        for (; g + 2 <= n_heads; g += 2) {
            dots_of<2>(q + g * D, tile, n, D, scores + g * TILE, TILE);
        }
        for (; g < n_heads; g++) {
            dots_of<1>(q + g * D, tile, n, D, scores + g * TILE, TILE);
        }
    }

    // Turns one head's scores of n keys into weights, and scales what was summed before to the new maximum.
    void update_softmax(float *x, int n, Sums &s, float *acc) const {
        float most = s.max;
        for (int i = 0; i < n; i++) {
            x[i] *= a.scale;
            if (a.softcap > 0) {
                x[i] = a.softcap * std::tanh(x[i] / a.softcap);
            }
            most = x[i] > most ? x[i] : most;
        }
        if (most > s.max) {
            const float shrink = s.max == -INFINITY ? 0.0f : exponential(s.max - most);
            s.sum *= shrink;
            for (int d = 0; d < D; d++) {
                acc[d] *= shrink;
            }
            s.max = most;
        }
        const float base = most == -INFINITY ? 0.0f : most;
        for (int i = 0; i < n; i++) {
            x[i] = exponential(x[i] - base);
        }
        for (int i = 0; i < n; i++) {
            s.sum += x[i];
        }
    }

    // Runs the pairs [p0, p1) over the keys of one chunk up to position `last`.
    void run_chunk(int p0, int p1, int32_t index, int32_t last, const int *path) {
        const int32_t end_of_chunk = std::min(chunk_begin(index + 1), last + 1);
        for (int32_t t0 = chunk_begin(index); t0 < end_of_chunk; t0 += TILE) {
            const int32_t from = std::max(t0, low), to = std::min(t0 + TILE, end_of_chunk);
            if (from >= to) {
                continue;
            }
            load(0, from, to, path, keys);
            load(1, from, to, path, values);
            for (int p = p0; p < p1;) { // the heads of a row see the same keys
                const int row = p / G, n_heads = std::min(p1, (row + 1) * G) - p;
                const int32_t lowest = std::max(from, lowest_visible(position(row), a.first, a.window));
                const int n = std::min(to, last_seen(row) + 1) - lowest;
                if (n > 0) {
                    run_row(p, n_heads, int64_t(lowest - from) * D, n);
                }
                p += n_heads;
            }
        }
        for (int p = p0; p < p1; p++) {
            combine(p - begin);
        }
    }
    void run_row(int p, int n_heads, int64_t offset, int n) {
        const int row = seq.row0 + p / G, q_head = head * G + p % G;
        score(a.q + (int64_t(row) * a.H + q_head) * D, n_heads, keys + offset, n);
        for (int g = 0; g < n_heads; g++) {
            float *acc = chunk + int64_t(p - begin + g) * D;
            update_softmax(scores + g * TILE, n, sums[p - begin + g], acc);
            add_values(acc, values + offset, scores + g * TILE, n, D);
        }
    }

    // Adds a chunk's sums to those of the chunks before it, and clears them for the next.
    void combine(int i) {
        Sums &c = sums[i], &t = sums[end - begin + i];
        float *acc = chunk + int64_t(i) * D, *out = total + int64_t(i) * D;
        const float most = c.max > t.max ? c.max : t.max;
        const float of_chunk = c.max == -INFINITY ? 0.0f : exponential(c.max - most);
        const float of_total = t.max == -INFINITY ? 0.0f : exponential(t.max - most);
        if (c.sum != 0) { // it also does so where the sum is NaN
            t.sum = t.sum * of_total + c.sum * (c.max == -INFINITY ? 1.0f : of_chunk);
            for (int d = 0; d < D; d++) {
                out[d] = std::fma(acc[d], c.max == -INFINITY ? 1.0f : of_chunk, out[d] * of_total);
                acc[d] = 0;
            }
            t.max = most;
        }
        c = Sums();
    }

    void finish() const {
        for (int p = begin; p < end; p++) {
            const int row = seq.row0 + p / G, q_head = head * G + p % G;
            const Sums &s = sums[end - begin + p - begin];
            const float *in = total + int64_t(p - begin) * D;
            float *out = a.out + (int64_t(row) * a.H + q_head) * D;
            if (a.sinks == nullptr) {
                for (int d = 0; d < D; d++) {
                    out[d] = s.sum == 0 ? 0.0f : in[d] / s.sum;
                }
            } else {
                const float sink = a.sinks[q_head], most = s.max > sink ? s.max : sink;
                const float shrink = exponential(s.max - most);
                const float sum = std::fma(s.sum, shrink, exponential(sink - most));
                for (int d = 0; d < D; d++) {
                    out[d] = in[d] * shrink / sum;
                }
            }
            if (a.gate != nullptr) {
                const float *gate = a.gate + row * a.gate_row + q_head * a.gate_head;
                for (int d = 0; d < D; d++) {
                    out[d] *= sigmoid(gate[d]);
                }
            }
        }
    }

    // Runs the committed chunks for all rows at once, and then for each path what lies in the chunk of n_past
    // and behind it.
    void run() {
        const int32_t shared = chunk_at(seq.n_past);
        for (int32_t c = chunk_at(low); c < shared; c++) {
            run_chunk(begin, end, c, seq.n_past - 1, nullptr);
        }
        int path[MAX_ROWS];
        for (int first = 0, last; first < seq.n_rows; first = last + 1) {
            for (last = first; last + 1 < seq.n_rows; last++) {
                if (a.ctl->rows[seq.row0 + last + 1].parent != seq.row0 + last) {
                    break;
                }
            }
            const int p0 = std::max(begin, first * G), p1 = std::min(end, (last + 1) * G);
            if (p0 >= p1) {
                continue;
            }
            int depth = position(last) - seq.n_past;
            for (int row = seq.row0 + last; row >= 0 && depth >= 0; row = a.ctl->rows[row].parent) {
                path[depth--] = row - seq.row0;
            }
            for (int32_t c = std::max(shared, chunk_at(low)); c <= chunk_at(last_seen(last)); c++) {
                run_chunk(p0, p1, c, last_seen(last), path);
            }
        }
        finish();
    }
};

} // namespace

void cpu_kv_move(const KvMoveArgs &a, int ith, int nth) {
    for (int p = 0, part = 0; p < a.n_pools; p++) {
        for (int i = 0; i < 2 * a.pools[p].Hkv; i++, part++) {
            if (part % nth == ith) {
                move_head(a, a.pools[p], i % 2, i / 2);
            }
        }
    }
}

void cpu_kv_store(const KvStoreArgs &a, int ith, int nth) {
    for (int i = ith; i < 2 * a.pool.Hkv; i += nth) {
        store_head(a, i % 2, i / 2);
    }
}

// A unit is a sequence's KV head. Where these are fewer than threads, each is cut by its (row, head) pairs.
void cpu_attention(const AttentionArgs &a, int ith, int nth) {
    static thread_local std::vector<float> floats;
    static thread_local std::vector<Sums> sums;
    const int64_t row_size = int64_t(a.H) * a.pool.D;
    for (int t = ith; t < a.T; t += nth) {
        if (a.ctl->rows[t].seq < 0) {
            std::fill(a.out + t * row_size, a.out + (t + 1) * row_size, 0.0f);
        }
    }
    int busy = 0;
    for (int s = 0; s < a.ctl->n_seqs; s++) {
        busy += a.ctl->seqs[s].n_rows > 0 ? 1 : 0;
    }
    const int parts = busy == 0 ? 1 : (nth + busy * a.pool.Hkv - 1) / (busy * a.pool.Hkv);
    int unit = 0;
    for (int s = 0; s < a.ctl->n_seqs; s++) {
        const SeqCtl &seq = a.ctl->seqs[s];
        const int pairs = seq.n_rows * (a.H / a.pool.Hkv);
        for (int i = 0; i < a.pool.Hkv * parts && pairs > 0; i++, unit++) {
            const int begin = pairs * (i % parts) / parts, end = pairs * (i % parts + 1) / parts;
            if (unit % nth == ith && begin < end) {
                Unit(a, seq, i / parts, begin, end, floats, sums).run();
            }
        }
    }
}

void cpu_kv_gather(const KvGatherArgs &a, int ith, int nth) {
    const int64_t D = a.pool.D;
    const ggml_type from = ggml_type(a.pool.type), to = ggml_type(a.out_type);
    const size_t bytes = ggml_row_size(to, D);
    static thread_local std::vector<float> values;
    values.resize(size_t(D));
    const int64_t begin = a.n_kv * ith / nth, end = a.n_kv * (ith + 1) / nth;
    for (int64_t c = begin; c < end; c++) {
        const SeqCtl &seq = a.ctl->seqs[seq_of_cell(*a.ctl, int32_t(c))];
        const int32_t position = int32_t(c) - seq.cells;
        for (int head = 0; head < a.pool.Hkv; head++) {
            uint8_t *out = static_cast<uint8_t *>(a.out) + (c * a.pool.Hkv + head) * int64_t(bytes);
            // a page that no row sees may be gone
            if (position >= seq.n_past + seq.n_rows || a.pages[seq.pages + position / PAGE] < 0) {
                memset(out, 0, bytes);
                continue;
            }
            const uint8_t *row = HeadRows(a.pool, a.which, a.pages, seq, head).at(position);
            if (from == to) {
                memcpy(out, row, bytes);
            } else {
                to_float(from, row, values.data(), D);
                from_float(to, values.data(), out, D);
            }
        }
    }
}

// A unit is a query head. What a row does not see is 0.
void cpu_row_scores(const RowScoresArgs &a, int ith, int nth) {
    static thread_local std::vector<float> tile, scores;
    const int D = a.pool.D;
    tile.resize(size_t(TILE) * D);
    for (int s = 0; s < a.ctl->n_seqs; s++) {
        const SeqCtl &seq = a.ctl->seqs[s];
        const int64_t end = std::min<int64_t>(a.n, seq.n_past + seq.n_rows); // of cells
        scores.resize(size_t(end));
        for (int h = ith; h < a.H && seq.n_rows > 0; h += nth) {
            const HeadRows rows(a.pool, 0, a.pages, seq, h / (a.H / a.pool.Hkv));
            float *out = a.scores + h * a.n;
            std::fill(out, out + end, 0.0f);
            for (int r = 0; r < seq.n_rows; r++) {
                // Its own position and its ancestors' are seen beside all that is committed.
                bool seen[MAX_ROWS] = {};
                for (int row = seq.row0 + r; row >= 0; row = a.ctl->rows[row].parent) {
                    seen[row - seq.row0] = true;
                }
                const float *q = a.q + (int64_t(seq.row0 + r) * a.H + h) * D;
                float most = -INFINITY;
                for (int64_t at = 0, n; at < end; at += n) {
                    n = std::min({end - at, int64_t(TILE), int64_t(PAGE) - at % PAGE});
                    to_float(ggml_type(a.pool.type), rows.at(int32_t(at)), tile.data(), n * D);
                    dots_of<1>(q, tile.data(), int(n), D, scores.data() + at, TILE);
                    for (int64_t i = at; i < at + n; i++) {
                        float x = scores[size_t(i)] * a.scale;
                        x = a.softcap > 0 ? a.softcap * std::tanh(x / a.softcap) : x;
                        x = i < seq.n_past || seen[i - seq.n_past] ? x : -INFINITY;
                        scores[size_t(i)] = x;
                        most = std::max(most, x);
                    }
                }
                double sum = 0;
                for (int64_t i = 0; i < end; i++) {
                    scores[size_t(i)] =
                        scores[size_t(i)] == -INFINITY ? 0.0f : exponential(scores[size_t(i)] - most);
                    sum += scores[size_t(i)];
                }
                const float share = float(1.0 / (sum * seq.n_rows));
                for (int64_t i = 0; i < end; i++) {
                    out[i] += scores[size_t(i)] * share;
                }
            }
        }
    }
}

void cpu_prefill_mask(const MaskArgs &a, int ith, int nth) {
    const uint16_t hidden = 0xfc00; // this is -inf in F16
    for (int t = ith; t < a.T; t += nth) {
        const SeqCtl &seq = a.ctl->seqs[seq_of_row(*a.ctl, t)];
        const int32_t p = seq.n_past + t - seq.row0, low = lowest_visible(p, a.first, a.window);
        const int32_t end = a.row_ends != nullptr && t < a.n_ends ? a.row_ends[t] : p + 1;
        uint16_t *out = a.out + t * a.n_kv;
        for (int64_t c = 0; c < a.n_kv; c++) {
            out[c] = c >= low && c < end ? 0 : hidden;
        }
    }
}

void cpu_row_tokens(const TokensArgs &a, int ith, int nth) {
    for (int t = ith; t < a.T; t += nth) {
        const int32_t token = a.tokens[t] >= 0 ? a.tokens[t] : a.drafts[2 * int64_t(-1 - a.tokens[t])];
        a.out[t] = token < 0 || token >= a.n_vocab ? 0 : token;
    }
}

} // namespace luce
