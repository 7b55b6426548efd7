// Checks rowmm's kernel that norms and packs its row itself: it gives what the others give of a row that rowmm_pack has normed.
#include "rowmm_matrix.h"

using namespace rowmm_test;

namespace {

// A launch that norms and packs its row itself gives what it gives of a row that rowmm_pack has normed, as whole results and
// as parts.
void check_own_norm(const std::vector<const Matrix *> &matrices, const std::string &what) {
    const int64_t K = matrices[0]->K;
    Floats w = normals(size_t(K)), x = normals(size_t(K));
    Device<float> dx(x), dw(w);
    Device<uint8_t> packed(size_t(rowmm_x_bytes(1, K)));
    RowmmPackArgs pack = plain(dx, 1, K, packed);
    pack.input = ROWMM_RMS;
    pack.w = dw.p;
    must(cuda::rowmm_pack(pack, stream));
    const auto given = [&](bool itself, bool leaves) {
        Scratch scratch;
        RowmmArgs a = {};
        a.T = a.normed = 1;
        a.K = K;
        a.eps = 1e-5f;
        a.scratch = scratch.memory.p;
        a.overlap = itself;
        a.row = itself ? dx.p : nullptr;
        a.norm = dw.p;
        a.x = itself ? nullptr : packed.p;
        int64_t all = 0;
        for (const Matrix *m : matrices) {
            a.weights[a.n_weights++] = m->weights(nullptr);
            all += m->N;
        }
        Device<float> out(leaves ? size_t(rowmm_parts_bytes(a)) / sizeof(float) : size_t(all));
        out.poison();
        float *to = out.p;
        for (int i = 0; i < a.n_weights; i++) {
            a.weights[i].out = to;
            to += a.weights[i].N;
        }
        a.parts = leaves ? out.p : nullptr;
        must(cuda::rowmm(a, stream));
        must(cudaStreamSynchronize(stream));
        return out.get();
    };
    expect(same_bits(given(true, false), given(false, false)), "rowmm norms its row itself: " + what);
    if (matrices.size() <= 4) {
        expect(same_bits(given(true, true), given(false, true)), "rowmm norms its row itself, as parts: " + what);
    }
}

} // namespace

// Ranges begin anywhere in K, and are long enough to fill the rings more than once.
void check_rowmm_norm(bool all) {
    const Matrix q4(12, 1280, 1100, 41), q5(13, 1280, 400, 42), q6(14, 1280, 180, 43), q8(8, 1280, 48, 44);
    const Matrix f32(0, 1280, 48, 45), f16(1, 1280, 150, 46), last(12, 256, 2900, 48);
    check_own_norm({&q4}, "Q4_K");
    check_own_norm({&q5, &q4, &q8, &q6}, "Q5_K, Q4_K, Q8_0, Q6_K");
    check_own_norm({&q5, &f32, &q8}, "Q5_K, F32, Q8_0");
    check_own_norm({&f16, &q6, &f32}, "F16, Q6_K, F32");
    check_own_norm({&last}, "Q4_K of one chunk");
    for (const Type &t : TYPES) {
        const Matrix odd(t.id, 512, 200, uint32_t(t.id) + 1);
        check_own_norm({&odd}, t.name);
        if (t.values < 256) {
            const Matrix cut(t.id, 288, 33, uint32_t(t.id) + 2);
            check_own_norm({&cut}, std::string(t.name) + " of a part of a chunk");
        }
    }
    if (!all) {
        return;
    }
    const Matrix qkv(12, 2048, 8192, 61), z(12, 2048, 4096, 62), beta(8, 2048, 32, 63), alpha(8, 2048, 32, 64);
    check_own_norm({&qkv, &z, &beta, &alpha}, "the 35b-a3b's qkv, z, beta, alpha");
    const Matrix wide(13, 17408, 1040, 65), head(14, 256, 248320, 66);
    check_own_norm({&wide}, "Q5_K of 17408");
    check_own_norm({&head}, "Q6_K of a vocabulary");
}
