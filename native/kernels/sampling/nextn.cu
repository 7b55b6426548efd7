// Norms whole rows around the NextN head: its input [RMS(e) * w ; RMS(h) * w], whose e it looks up in the table of
// embeddings, packed as its first product takes it, and the hidden state that a step keeps. A block has one row of one
// of these.
#include "common/device_limits.h"
#include "common/kernels.h"
#include "common/overlap.cuh"
#include "common/whole_norm.cuh"
#include "matmul/file_blocks.cuh"
#include "matmul/plan.h"

namespace luce {
namespace {

// Loads a lane's values of a row of the table.
__device__ __forceinline__ void load_embedding(float (&v)[OWN], int type, const uint8_t *row, int64_t k) {
    switch (type) {
#define LUCE_EMBEDDING(TYPE)                                                                                 \
    case TYPE: values_of<TYPE>(v, row, k); break
        LUCE_EMBEDDING(TYPE_F32);
        LUCE_EMBEDDING(TYPE_F16);
        LUCE_EMBEDDING(TYPE_BF16);
        LUCE_EMBEDDING(TYPE_Q4_0);
        LUCE_EMBEDDING(TYPE_Q4_1);
        LUCE_EMBEDDING(TYPE_Q5_0);
        LUCE_EMBEDDING(TYPE_Q5_1);
        LUCE_EMBEDDING(TYPE_Q8_0);
        LUCE_EMBEDDING(TYPE_Q2_K);
        LUCE_EMBEDDING(TYPE_Q3_K);
        LUCE_EMBEDDING(TYPE_Q4_K);
        LUCE_EMBEDDING(TYPE_Q5_K);
        LUCE_EMBEDDING(TYPE_Q6_K);
#undef LUCE_EMBEDDING
        default: break; // the launcher refuses it
    }
}

// The grid is {e, h; rows}.
__global__ void __launch_bounds__(NORM_MAX_WARPS *WARP)
    nextn_pack_kernel(const __grid_constant__ NextnPackArgs a, RowsLayout layout) {
    let_next_start();
    const int64_t row = blockIdx.y, chunks = chunks_of(a.E);
    const bool is_h = blockIdx.x == 1;
    WholeNorm norm(is_h ? a.h_norm : a.e_norm, a.E);
    const int C = layout.columns;
    uint8_t *out = static_cast<uint8_t *>(a.out) +
                   (row / layout.set * 2 * chunks + (is_h ? chunks : 0)) * int64_t(chunk_bytes(C));
    const auto pack = [&](int chunk, const float (&v)[OWN]) {
        pack_chunk(out + chunk * int64_t(chunk_bytes(C)), C, int(row) % layout.set, layout.wide, v,
                   largest(v), threadIdx.x % WARP);
    };
    if (is_h) {
        const float *x = a.hidden + a.hidden_from[row] * a.E;
        wait_for_previous();
        norm.run(a.eps, [&](float (&v)[OWN], int64_t k) { load_values(v, x, k, a.E); }, pack);
    } else {
        const int32_t given = a.tokens[row];
        wait_for_previous();
        const uint8_t *embedding = static_cast<const uint8_t *>(a.table) +
                                   int64_t(token_of(given, a.drafts, a.n_vocab)) * a.row_bytes;
        norm.run(a.eps, [&](float (&v)[OWN], int64_t k) { load_embedding(v, a.type, embedding, k); }, pack);
    }
}

// The grid is rows.
__global__ void __launch_bounds__(NORM_MAX_WARPS *WARP)
    keep_hidden_kernel(const __grid_constant__ KeepHiddenArgs a) {
    let_next_start();
    const int64_t row = blockIdx.x;
    WholeNorm norm(a.norm, a.E);
    const float *x = a.x + row * a.x_row;
    float *out = a.hidden + a.hidden_to[row] * a.E;
    wait_for_previous();
    norm.run(
        a.eps, [&](float (&v)[OWN], int64_t k) { load_values(v, x, k, a.E); },
        [&](int chunk, const float (&v)[OWN]) { store_values(out, v, norm.first_of(chunk), a.E); });
}

} // namespace

bool nextn_has_table(int32_t type) {
    return has_values(type);
}

int cuda::nextn_pack(const NextnPackArgs &args, void *stream) {
    if (args.T < 1 || args.T > ROWMM_MAX_ROWS || args.E <= 0 || args.E % CHUNK != 0 ||
        !nextn_has_table(args.type) || reinterpret_cast<uintptr_t>(args.out) % 16 != 0) {
        return int(cudaErrorInvalidValue);
    }
    DeviceLimits device;
    if (const int error = device_limits(device); error != 0) {
        return error;
    }
    return int(launch_kernel(nextn_pack_kernel, dim3(2, unsigned(args.T)), norm_threads(args.E), 0,
                             static_cast<cudaStream_t>(stream), true, args,
                             RowsLayout(args.T, device.wgmma)));
}

int cuda::keep_hidden(const KeepHiddenArgs &args, void *stream) {
    if (args.T < 1 || args.E <= 0) {
        return int(cudaErrorInvalidValue);
    }
    return int(launch_kernel(keep_hidden_kernel, dim3(unsigned(args.T)), norm_threads(args.E), 0,
                             static_cast<cudaStream_t>(stream), true, args));
}

} // namespace luce
