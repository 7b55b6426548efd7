// Which ops of ggml give a row other bits when other rows are computed beside it, and by how much. A step takes none of
// these as they are: drafts would change tokens.
//
// Each op runs once over 64 rows' worth of data in steps of T rows and once row by row; a line of JSON an op
// and type: {"op", "type", "differs_at": [T ...], "max_relative_difference"}, relative to the largest value.
//   c++ -std=c++17 -O2 -I GGML/include bench/row_gap.cpp -L luce/lib -lluce-ggml -lluce-ggml-base \
//       -lluce-ggml-cpu -Wl,-rpath,luce/lib -o row_gap && ./row_gap [cpu|gpu]
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int ROWS = 64;
const int WIDTHS[] = {2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 64};

ggml_backend_t g_backend;
std::mt19937 g_random(1);

std::vector<float> normal(size_t n) {
    std::normal_distribution<float> d;
    std::vector<float> v(n);
    std::generate(v.begin(), v.end(), [&] { return d(g_random); });
    return v;
}

std::vector<uint8_t> encode(ggml_type type, const std::vector<float> &x, int64_t n_per_row) {
    const int64_t rows = int64_t(x.size()) / n_per_row;
    std::vector<uint8_t> out(size_t(rows) * ggml_row_size(type, n_per_row));
    ggml_quantize_chunk(type, x.data(), out.data(), 0, rows, n_per_row, nullptr);
    return out;
}

// A constant of the op: its tensor is made anew in each graph, its bytes stay.
struct Constant {
    ggml_type type;
    std::vector<int64_t> ne;
    std::vector<uint8_t> bytes;
};

using Build = std::function<ggml_tensor *(ggml_context *, ggml_tensor *x,
                                          std::vector<ggml_tensor *> constants, ggml_tensor *positions)>;

// Rows [first, first + T) of the op; x {n_in, T} F32 -> {n_out, T} F32
std::vector<float> run(const Build &build, const std::vector<Constant> &constants,
                       const std::vector<float> &x, int64_t n_in, int first, int T) {
    const ggml_init_params params = {ggml_tensor_overhead() * 64 + ggml_graph_overhead(), nullptr, true};
    ggml_context *ctx = ggml_init(params);
    ggml_tensor *input = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_in, T);
    ggml_tensor *positions = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, T);
    ggml_set_input(input);
    ggml_set_input(positions);
    std::vector<ggml_tensor *> tensors;
    for (const Constant &c : constants) {
        tensors.push_back(ggml_new_tensor(ctx, c.type, int(c.ne.size()), c.ne.data()));
        ggml_set_input(tensors.back());
    }
    ggml_tensor *out = build(ctx, input, tensors, positions);
    ggml_set_output(out);
    ggml_cgraph *graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, g_backend);
    ggml_backend_tensor_set(input, x.data() + size_t(first) * n_in, 0, ggml_nbytes(input));
    std::vector<int32_t> at(T);
    for (int i = 0; i < T; i++) {
        at[i] = 1000 + first + i;
    }
    ggml_backend_tensor_set(positions, at.data(), 0, ggml_nbytes(positions));
    for (size_t i = 0; i < constants.size(); i++) {
        ggml_backend_tensor_set(tensors[i], constants[i].bytes.data(), 0, constants[i].bytes.size());
    }
    ggml_backend_graph_compute(g_backend, graph);
    std::vector<float> result(size_t(ggml_nelements(out)));
    ggml_backend_tensor_get(out, result.data(), 0, ggml_nbytes(out));
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return result;
}

void report(const char *op, const std::string &type, const Build &build,
            const std::vector<Constant> &constants, int64_t n_in) {
    const std::vector<float> x = normal(size_t(ROWS) * n_in);
    std::vector<float> alone;
    for (int row = 0; row < ROWS; row++) {
        const std::vector<float> y = run(build, constants, x, n_in, row, 1);
        alone.insert(alone.end(), y.begin(), y.end());
    }
    const size_t n_out = alone.size() / ROWS;
    float largest = 0, worst = 0;
    for (const float v : alone) {
        largest = std::max(largest, std::fabs(v));
    }
    std::string differs;
    for (const int T : WIDTHS) {
        bool same = true;
        for (int first = 0; first + T <= ROWS; first += T) {
            const std::vector<float> y = run(build, constants, x, n_in, first, T);
            const float *expected = alone.data() + size_t(first) * n_out;
            same = same && memcmp(y.data(), expected, y.size() * sizeof(float)) == 0;
            for (size_t i = 0; i < y.size(); i++) {
                worst = std::max(worst, std::fabs(y[i] - expected[i]) / largest);
            }
        }
        differs += same ? "" : (differs.empty() ? "" : ", ") + std::to_string(T);
    }
    printf("{\"op\": \"%s\", \"type\": \"%s\", \"differs_at\": [%s], \"max_relative_difference\": %.2e}\n",
           op, type.c_str(), differs.c_str(), double(worst));
    fflush(stdout);
}

void matmuls() {
    const int64_t K = 4096, N = 1024;
    const std::vector<float> w = normal(size_t(K * N));
    for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K,
                                 GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS}) {
        report(
            "mul_mat", ggml_type_name(type),
            [](ggml_context *ctx, ggml_tensor *x, std::vector<ggml_tensor *> c, ggml_tensor *) {
                ggml_tensor *y = ggml_mul_mat(ctx, c[0], x);
                ggml_prec_set_acc(y, GGML_PREC_F32);
                return y;
            },
            {{type, {K, N}, encode(type, w, K)}}, K);
    }
}

// head dim 256, 24 query heads over 4 KV heads, as in the 27b
void attention(int64_t n_kv, ggml_type type) {
    const int64_t D = 256, H = 24, Hkv = 4;
    const std::vector<float> k = normal(size_t(D * n_kv * Hkv)), v = normal(size_t(D * n_kv * Hkv));
    const std::vector<uint8_t> mask(size_t(n_kv) * 2, 0); // all visible
    const std::vector<int64_t> shape = {D, n_kv, Hkv};
    report(
        "flash_attn_ext", std::string(ggml_type_name(type)) + " over " + std::to_string(n_kv),
        [=](ggml_context *ctx, ggml_tensor *x, std::vector<ggml_tensor *> c, ggml_tensor *) {
            const int64_t T = x->ne[1];
            ggml_tensor *q = ggml_permute(ctx, ggml_reshape_3d(ctx, x, D, H, T), 0, 2, 1, 3);
            ggml_tensor *m = ggml_repeat_4d(ctx, c[2], n_kv, T, 1, 1);
            ggml_tensor *o = ggml_flash_attn_ext(ctx, q, c[0], c[1], m, 1.0f / 16, 0, 0);
            ggml_prec_set_acc(o, GGML_PREC_F32);
            return ggml_reshape_2d(ctx, o, D * H, T);
        },
        {{type, shape, encode(type, k, D)},
         {type, shape, encode(type, v, D)},
         {GGML_TYPE_F16, {n_kv, 1}, mask}},
        D * H);
}

void elementwise() {
    const int64_t n = 5120;
    const std::vector<float> w = normal(n);
    std::vector<uint8_t> bytes(n * sizeof(float));
    memcpy(bytes.data(), w.data(), bytes.size());
    report(
        "rms_norm + mul", "f32",
        [](ggml_context *ctx, ggml_tensor *x, std::vector<ggml_tensor *> c, ggml_tensor *) {
            return ggml_mul(ctx, ggml_rms_norm(ctx, x, 1e-6f), c[0]);
        },
        {{GGML_TYPE_F32, {n}, bytes}}, n);
    report(
        "rope", "f32",
        [](ggml_context *ctx, ggml_tensor *x, std::vector<ggml_tensor *>, ggml_tensor *positions) {
            ggml_tensor *y = ggml_reshape_3d(ctx, x, 256, x->ne[0] / 256, x->ne[1]);
            y = ggml_rope_ext(ctx, y, positions, nullptr, 64, GGML_ROPE_TYPE_NEOX, 0, 1e7f, 1, 0, 1, 0, 0);
            return ggml_reshape_2d(ctx, y, x->ne[0], x->ne[1]);
        },
        {}, n);
    report(
        "swiglu", "f32",
        [](ggml_context *ctx, ggml_tensor *x, std::vector<ggml_tensor *>, ggml_tensor *) {
            return ggml_swiglu(ctx, x);
        },
        {}, n);
}

} // namespace

int main(int argc, char **argv) {
    const bool gpu = argc > 1 ? strcmp(argv[1], "gpu") == 0 : true;
    ggml_backend_load_all();
    g_backend =
        ggml_backend_init_by_type(gpu ? GGML_BACKEND_DEVICE_TYPE_GPU : GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    if (g_backend == nullptr) {
        fprintf(stderr, "no such device\n");
        return 1;
    }
    if (!gpu) {
        ggml_backend_cpu_set_use_ref(g_backend, true); // as luce runs steps
    }
    matmuls();
    for (const int64_t n_kv : {256, 1024, 4096}) {
        attention(n_kv, GGML_TYPE_F16);
        attention(n_kv, GGML_TYPE_Q8_0);
    }
    elementwise();
    ggml_backend_free(g_backend);
    return 0;
}
