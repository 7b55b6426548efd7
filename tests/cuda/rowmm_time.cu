// Times rowmm on the 27b's shapes: each matrix alone, then all of a step's matrices with the norms and gates
// between. Permuting, capture and warm-up stay outside the timing. Weights are never in L2, since copies of a
// matrix take turns, and a step reads 15.8 GB. GB/s counts the weights once. A step here has no attention, no
// conv and no DeltaNet between.
#include "harness.h"
#include "rowmm_reference.h"

#include <functional>
#include <map>
#include <memory>

using namespace rowmm_test;

namespace {

constexpr int64_t E = 5120, FF = 17408, QKV = 10240, Z = 6144, Q = 12288, KV = 1024, V = 248320;
constexpr int Q4 = 12, Q5 = 13, Q6 = 14, Q8 = 8;
constexpr int WIDTHS[] = {1, 2, 4, 8, 16, 32, 64};

// Holds packed weights of one type, as many as wanted, which are fragments of one random matrix over and
// over.
struct Arena {
    int type;
    int64_t used = 0;
    Device<uint8_t> memory;

    Arena(int type, int64_t bytes) : type(type), memory(size_t(bytes)) {
        const int64_t K = E, N = 1024, one = rowmm_packed_bytes(type, K, N);
        Device<uint8_t> src(random_weights(type, K, N, 7)), packed((size_t(one)));
        must(cuda::rowmm_permute({type, K, N, src.p, packed.p}, stream));
        for (int64_t at = 0; at < bytes; at += one) {
            must(cudaMemcpyAsync(memory.p + at, packed.p, size_t(std::min(one, bytes - at)),
                                 cudaMemcpyDeviceToDevice, stream));
        }
        must(cudaStreamSynchronize(stream));
    }
    // Returns the next matrix, or the first again where there is no room.
    const uint8_t *next(int64_t K, int64_t N) {
        const int64_t bytes = rowmm_packed_bytes(type, K, N);
        used = used + bytes > int64_t(memory.n) ? 0 : used;
        used += bytes;
        return memory.p + used - bytes;
    }
};

struct Part {
    int type;
    int64_t N;
};

struct Bench {
    std::map<int, std::unique_ptr<Arena>> arenas;
    Device<float> h, proj, mid, norm, logits, parts; // they hold rows of E, of a projection, ...
    Device<uint8_t> x, scratch;

    Bench()
        : h(normals(64 * E)), proj(64 * 2 * FF), mid(normals(64 * FF)), norm(normals(E)),
          logits(size_t(64) * V), parts(size_t(64) * 1000 * 128), x(size_t(rowmm_x_bytes(64, FF))),
          scratch(size_t(cuda::rowmm_scratch_bytes())) {
        must(cudaMemset(scratch.p, 0, scratch.n));
        must(cudaMemset(proj.p, 0, proj.n * 4));
        must(cudaMemset(x.p, 0, x.n));
        for (const auto &[type, bytes] : std::map<int, int64_t>{
                 {Q4, 9800000000}, {Q5, 1800000000}, {Q6, 3500000000}, {Q8, 800000000}, {1, 1600000000}}) {
            arenas[type].reset(new Arena(type, bytes));
        }
    }
    RowmmPackArgs pack_args(int T, int64_t K, const float *from, int input, bool overlap) {
        RowmmPackArgs a = {};
        a.x = from;
        a.x_row = K;
        a.T = T;
        a.K = K;
        a.out = x.p;
        a.input = input;
        a.head = 128;
        a.eps = 1e-6f;
        a.w = norm.p;
        a.overlap = overlap;
        return a;
    }
    RowmmArgs launch(int T, int64_t K, const std::vector<Part> &parts, float *out, bool overlap) {
        RowmmArgs a = {};
        a.T = T;
        a.K = K;
        a.x = x.p;
        a.scratch = scratch.p;
        a.overlap = overlap;
        for (const Part &p : parts) {
            a.weights[a.n_weights++] = {p.type, p.N, arenas[p.type]->next(K, p.N), out, p.N, nullptr, 0};
            out += T * p.N;
        }
        return a;
    }
    // Launches all products of a step, in order: four of each layer, then the head.
    std::vector<RowmmArgs> launches(int T, bool overlap) {
        std::vector<RowmmArgs> all;
        for (auto &[type, arena] : arenas) {
            arena->used = 0;
        }
        const auto normed = [&](RowmmArgs a) {
            a.normed = 1;
            a.eps = 1e-6f;
            all.push_back(a);
        };
        const auto parted = [&](RowmmArgs a) {
            a.parts = parts.p;
            all.push_back(a);
        };
        for (int layer = 0; layer < 64; layer++) {
            const bool attention = layer % 4 == 3;
            const std::vector<Part> in = attention
                                             ? std::vector<Part>{{Q4, Q}, {Q4, KV}, {Q6, KV}}
                                             : std::vector<Part>{{Q5, QKV}, {Q4, Z}, {Q8, 48}, {Q8, 48}};
            normed(launch(T, E, in, proj.p, overlap));
            parted(launch(T, Z, {{Q4, E}}, nullptr, overlap));
            RowmmArgs gate_up = launch(T, E, {{Q4, FF}, {Q4, FF}}, nullptr, overlap);
            gate_up.parts = parts.p;
            normed(gate_up);
            parted(launch(T, FF, {{layer % 2 == 0 ? Q4 : Q6, E}}, nullptr, overlap));
        }
        normed(launch(T, E, {{Q6, V}}, logits.p, overlap));
        return all;
    }
    void step(const std::vector<RowmmArgs> &all, bool packs, bool products) {
        const int T = all[0].T;
        const bool overlap = all[0].overlap != 0;
        for (size_t i = 0; i < all.size(); i++) {
            RowmmPackArgs a = {};
            switch (i % 4) {
                case 0:
                case 2:
                    a = pack_args(T, E, h.p, ROWMM_RMS, overlap);
                    a.parts = i > 0 ? &all[i - 1] : nullptr;
                    a.copy = h.p;
                    break;
                case 1:
                    a = pack_args(T, Z, mid.p, i / 4 % 4 == 3 ? ROWMM_PLAIN : ROWMM_HEAD_RMS, overlap);
                    a.y = proj.p + T * QKV;
                    a.y_row = Z;
                    break;
                default: a = pack_args(T, FF, nullptr, ROWMM_GLU, overlap); a.parts = &all[i - 1];
            }
            if (packs) {
                must(cuda::rowmm_pack(a, stream));
            }
            if (products) {
                must(cuda::rowmm(all[i], stream));
            }
        }
    }
};

int64_t bytes_of(const std::vector<RowmmArgs> &all) {
    int64_t bytes = 0;
    for (const RowmmArgs &a : all) {
        for (int i = 0; i < a.n_weights; i++) {
            bytes += rowmm_packed_bytes(a.weights[i].type, a.K, a.weights[i].N);
        }
    }
    return bytes;
}

void time_matrices(Bench &b) {
    struct {
        const char *name;
        int64_t K;
        std::vector<Part> parts;
    } shapes[] = {
        {"k 5120->1024 Q4_K", E, {{Q4, KV}}},
        {"z 5120->6144 Q4_K", E, {{Q4, Z}}},
        {"out 6144->5120 Q4_K", Z, {{Q4, E}}},
        {"qkv 5120->10240 Q5_K", E, {{Q5, QKV}}},
        {"q 5120->12288 Q4_K", E, {{Q4, Q}}},
        {"DeltaNet in, mixed", E, {{Q5, QKV}, {Q4, Z}, {Q8, 48}, {Q8, 48}}},
        {"gate, up 5120->34816 Q4_K", E, {{Q4, FF}, {Q4, FF}}},
        {"down 17408->5120 Q4_K", FF, {{Q4, E}}},
        {"down 17408->5120 Q6_K", FF, {{Q6, E}}},
        {"5120->17408 Q8_0", E, {{Q8, FF}}},
        {"5120->17408 F16", E, {{1, FF}}},
        {"head 5120->248320 Q6_K", E, {{Q6, V}}},
    };
    for (int overlap = 1; overlap >= 0; overlap--) {
        printf("rowmm alone, %s: us (TB/s) at rows\n%-28s",
               overlap ? "overlapping launches" : "plain launches", "");
        for (int T : WIDTHS) {
            printf("%16d", T);
        }
        printf("\n");
        for (const auto &s : shapes) {
            printf("%-28s", s.name);
            for (int T : WIDTHS) {
                must(cuda::rowmm_pack(b.pack_args(T, s.K, b.mid.p, ROWMM_PLAIN, false), stream));
                int64_t bytes = 0;
                for (const Part &p : s.parts) {
                    bytes += rowmm_packed_bytes(p.type, s.K, p.N);
                }
                const int turns = int(std::min<int64_t>(100, std::max<int64_t>(3, 1000000000 / bytes)));
                std::vector<RowmmArgs> all;
                for (int i = 0; i < turns; i++) {
                    all.push_back(
                        b.launch(T, s.K, s.parts, s.parts[0].N == V ? b.logits.p : b.proj.p, overlap));
                }
                const double us = median_us(
                                      [&] {
                                          for (const RowmmArgs &a : all) {
                                              must(cuda::rowmm(a, stream));
                                          }
                                      },
                                      5) /
                                  turns;
                printf(" %8.1f (%4.2f)", us, bytes / us * 1e-6);
            }
            printf("\n");
            if (overlap == 0 && s.parts[0].N == Z) {
                break; // a few show the difference
            }
        }
    }
}

void time_steps(Bench &b) {
    const struct {
        const char *name;
        bool overlap, packs, products;
    } modes[] = {{"overlapping launches", true, true, true},
                 {"plain launches", false, true, true},
                 {"overlapping, products alone", true, false, true},
                 {"overlapping, norms and gates alone", true, true, false}};
    for (const auto &mode : modes) {
        printf("step of 64 layers and head, %s:\n", mode.name);
        double one = 0;
        for (int T : WIDTHS) {
            const std::vector<RowmmArgs> all = b.launches(T, mode.overlap);
            const double us = median_us([&] { b.step(all, mode.packs, mode.products); }, 9);
            one = T == 1 ? us : one;
            printf("  %d: %.3f ms (%.2f, %.2f TB/s)", T, us / 1000, us / one, bytes_of(all) / us * 1e-6);
        }
        printf("\n");
    }
}

// Permuting reads and writes the weights once. Unpacking reads them and writes F16.
void time_layouts() {
    const int64_t N = 17408;
    for (int type : {Q4, Q5, Q6, Q8}) {
        const double bytes = double(rowmm_packed_bytes(type, E, N));
        Device<uint8_t> src(random_weights(type, E, N, 3)), packed((size_t(bytes)));
        Device<__half> out(size_t(N) * E);
        const double in =
            median_us([&] { must(cuda::rowmm_permute({type, E, N, src.p, packed.p}, stream)); }, 5);
        const double back =
            median_us([&] { must(cuda::rowmm_unpack({type, E, N, packed.p, out.p}, stream)); }, 5);
        printf("rowmm_permute %-5s %7.1f us, %4.0f GB/s of weights; rowmm_unpack %7.1f us, %4.2f TB/s read "
               "and written\n",
               type_of(type).name, in, bytes / in / 1e3, back, (bytes + 2.0 * N * E) / back * 1e-6);
    }
}

} // namespace

void time_rowmm() {
    time_layouts();
    Bench bench;
    time_steps(bench);
    time_matrices(bench);
}
