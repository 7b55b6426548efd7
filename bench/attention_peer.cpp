// Times ggml's flash attention on the 27B's shape, for tables beside luce's own (tests/cuda/attention_time.cu): 24 heads,
// 4 KV heads, head size 256, F16 cells, sums in F32. A graph has the attention of 16 layers, each with its own KV, and
// the median of its calls is shown per layer. Calls follow each other without a wait, so that what the host needs for one
// is outside the figures where it is less than the device needs. The cells of a sequence are rounded up to 256, as
// llama.cpp does, and the mask hides what lies behind. ggml is given a mask and contiguous cells, which luce finds itself.
// luce's op also multiplies by the gate and packs the result, which are other ops of ggml: so it is timed with those of the
// gate too (a sigmoid and a product, of gates that lie together, which llama.cpp has to copy first).
//
// The files named hold what `kernel_check time attention` has printed on the same GPU; the least of each case,
// ggml's figures and quotients make a line.
//   c++ -std=c++17 -O2 -I GGML/include bench/attention_peer.cpp -L luce/lib -lluce-ggml -lluce-ggml-base \
//       -Wl,-rpath,luce/lib -o attention_peer && ./attention_peer [FILE ...]
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

constexpr int64_t D = 256, H = 24, HKV = 4;
constexpr int REPLAYS = 15, WARM_UP = 4;
constexpr int64_t ROUNDING = 256;

// A Case is a context, a number of sequences, and rows of each.
using Case = std::tuple<int, int, int>;

uint16_t any_half(std::mt19937 &random) {
    const uint32_t bits = random();
    return uint16_t((bits & 0x83ff) | (13 + (bits >> 20) % 2) << 10); // it is between -1 and 1
}

// Fills a tensor piece by piece from the same values.
void fill(ggml_tensor *tensor, const std::vector<uint16_t> &values) {
    const size_t piece = values.size() * sizeof(uint16_t), bytes = ggml_nbytes(tensor);
    for (size_t at = 0; at < bytes; at += piece) {
        ggml_backend_tensor_set(tensor, values.data(), at, std::min(piece, bytes - at));
    }
}

// Returns which keys the rows see: row r of a chain sees those at positions up to context + r.
std::vector<uint16_t> causal_mask(int64_t n_kv, int context, int rows, int seqs) {
    constexpr uint16_t HIDDEN = 0xfc00;
    std::vector<uint16_t> mask(size_t(n_kv) * rows * seqs);
    for (size_t i = 0; i < mask.size(); i++) {
        const int64_t key = int64_t(i) % n_kv, row = int64_t(i) / n_kv % rows;
        mask[i] = key <= context + row ? 0 : HIDDEN;
    }
    return mask;
}

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Returns the median microseconds of a layer.
double time_layers(ggml_backend_t backend, ggml_cgraph *graph, int layers) {
    std::vector<double> us;
    for (int i = 0; i < REPLAYS + WARM_UP; i++) {
        constexpr int CALLS = 8;
        ggml_backend_synchronize(backend);
        const double begin = seconds();
        for (int call = 0; call < CALLS; call++) {
            ggml_backend_graph_compute_async(backend, graph);
        }
        ggml_backend_synchronize(backend);
        if (i >= WARM_UP) {
            us.push_back((seconds() - begin) / CALLS / layers * 1e6);
        }
    }
    std::nth_element(us.begin(), us.begin() + us.size() / 2, us.end());
    return us[us.size() / 2];
}

// Returns the microseconds without and with the gate.
std::pair<double, double> time_case(ggml_backend_t backend, const Case &which) {
    const auto [context, seqs, rows] = which;
    const int64_t n_kv = (context + rows + ROUNDING - 1) / ROUNDING * ROUNDING;
    constexpr int layers = 16;
    ggml_context *ctx = ggml_init(
        {ggml_tensor_overhead() * (16 + 16 * size_t(layers)) + 2 * ggml_graph_overhead(), nullptr, true});
    ggml_tensor *q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, D, H, rows, seqs);
    ggml_tensor *gate = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, D, H, rows, seqs);
    ggml_tensor *mask = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, n_kv, rows, 1, seqs);
    ggml_cgraph *graphs[2] = {ggml_new_graph(ctx), ggml_new_graph(ctx)};
    std::vector<ggml_tensor *> cells;
    for (int i = 0; i < layers; i++) {
        ggml_tensor *k = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, D, HKV, n_kv, seqs);
        ggml_tensor *v = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, D, HKV, n_kv, seqs);
        cells.insert(cells.end(), {k, v});
        for (const bool gated : {false, true}) {
            ggml_tensor *out =
                ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), ggml_permute(ctx, k, 0, 2, 1, 3),
                                    ggml_permute(ctx, v, 0, 2, 1, 3), mask, 1.0f / 16, 0, 0);
            ggml_prec_set_acc(out, GGML_PREC_F32);
            out = gated ? ggml_mul(ctx, out, ggml_sigmoid(ctx, gate)) : out;
            ggml_set_output(out);
            ggml_build_forward_expand(graphs[gated], out);
        }
    }
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    if (buffer == nullptr) {
        fprintf(stderr, "no memory for a context of %d\n", context);
        exit(1);
    }
    std::mt19937 random(1);
    std::vector<uint16_t> values(size_t(8) << 20);
    std::generate(values.begin(), values.end(), [&] { return any_half(random); });
    for (ggml_tensor *tensor : cells) {
        fill(tensor, values);
    }
    std::vector<float> queries(size_t(D * H) * rows * seqs);
    std::normal_distribution<float> normal;
    std::generate(queries.begin(), queries.end(), [&] { return normal(random); });
    ggml_backend_tensor_set(q, queries.data(), 0, ggml_nbytes(q));
    ggml_backend_tensor_set(gate, queries.data(), 0, ggml_nbytes(gate));
    const std::vector<uint16_t> hidden = causal_mask(n_kv, context, rows, seqs);
    ggml_backend_tensor_set(mask, hidden.data(), 0, ggml_nbytes(mask));
    const std::pair us(time_layers(backend, graphs[0], layers), time_layers(backend, graphs[1], layers));
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return us;
}

// Adds luce's figures of F16 cells and chains, the least of each case.
void read_luce(const char *file, std::map<Case, double> &luce) {
    std::ifstream in(file);
    for (std::string line; std::getline(in, line);) {
        int type, context, seqs, rows;
        char name[16];
        double us;
        if (sscanf(line.c_str(), "luce type %d context %d seqs %d rows %d %15s %lf us", &type, &context,
                   &seqs, &rows, name, &us) == 6 &&
            type == GGML_TYPE_F16 && std::string(name) == "chain") {
            double &known = luce.try_emplace({context, seqs, rows}, us).first->second;
            known = std::min(known, us);
        }
    }
}

} // namespace

int main(int argc, char **argv) {
    std::map<Case, double> luce;
    for (int i = 1; i < argc; i++) {
        read_luce(argv[i], luce);
    }
    ggml_backend_load_all();
    ggml_backend_t backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_GPU, nullptr);
    if (backend == nullptr) {
        fprintf(stderr, "there is no GPU\n");
        return 1;
    }
    printf("context seqs rows      luce      ggml   gated luce/ggml luce/gated\n");
    for (const int context : {0, 4096, 32768, 102400}) {
        for (const int seqs : {1, 8}) {
            for (const int rows : {1, 4, 16}) {
                if (rows * seqs > 64) {
                    continue; // a step has at most 64 rows
                }
                const auto [us, gated] = time_case(backend, {context, seqs, rows});
                const auto own = luce.find({context, seqs, rows});
                if (own == luce.end()) {
                    printf("%7d %4d %4d         - %9.2f %7.2f        -          -\n", context, seqs, rows, us,
                           gated);
                } else {
                    printf("%7d %4d %4d %9.2f %9.2f %7.2f %8.2f %10.2f\n", context, seqs, rows, own->second,
                           us, gated, own->second / us, own->second / gated);
                }
                fflush(stdout);
            }
        }
    }
    ggml_backend_free(backend);
    return 0;
}
