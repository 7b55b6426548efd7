// Says what a block of the conv knows of a step's sequences: what the control block says of them, and the rows that are
// committed before their first.
#pragma once

#include "deltanet_row.cuh"
#include "kernels.h"

#include <cstddef>

namespace luce {
namespace {

constexpr int GROUP = 16; // a block has at most so many sequences

// Params are what a kernel takes: the arguments and, since DeltaShape's layout is for the host, its strides.
struct Params : ConvArgs {
    int64_t C; // a row has so many channels
    int64_t log_row; // one logged row is so far from the next
    int64_t log_size; // one slot's log is so far from the next
    int32_t group; // a block of a verify has so many sequences

    explicit Params(const ConvArgs &args)
        : ConvArgs(args), C(shape.conv_dim()), log_row(shape.log_qkv(1)), log_size(shape.log_size()),
          group(min(shape.max_seqs(), GROUP)) {}
    int warps() const { return min(shape.T, GROUP); } // so many has a block of a verify
    int64_t committed_values() const { return int64_t(group) * WINDOW * shape.S; }
};

// Returns what is the same in all lanes, so that nvcc knows it. A warp that might have split at a branch on
// it checks before each shuffle that it has not.
__device__ int warp_index() {
    return __shfl_sync(~0u, threadIdx.x / WARP, 0);
}

// Control is what the control block says of one sequence, and n_seqs, in the lanes of a warp. It decides what
// is loaded next, so all of it is loaded before nvcc can wait for one value to branch on it.
struct Control {
    static constexpr int WORDS = sizeof(SeqCtl) / sizeof(int32_t), N = WORDS / WARP + 1;
    static_assert(N == 3, "get() looks into three words");
    int32_t word[N];

    __device__ void load(const StepCtl &ctl, int seq, int lane) {
        const int32_t *words = reinterpret_cast<const int32_t *>(&ctl.seqs[seq]);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int w = lane + n * WARP;
            word[n] = *(w < WORDS ? words + w : &ctl.n_seqs);
        }
    }
    // Returns the value at an offset of SeqCtl.
    __device__ int get(size_t offset) const {
        const int w = int(offset / sizeof(int32_t));
        return __shfl_sync(~0u, w < WARP ? word[0] : w < 2 * WARP ? word[1] : word[2], w % WARP);
    }
    __device__ int n_seqs() const { return get(sizeof(SeqCtl)); }
};

// Committed are the last three committed rows of one head of one sequence, oldest first. They are taken of
// the window followed by the pending rows.
template <int S> struct Committed {
    int slot;
    bool moved; // they are not what the window holds
    float *window; // it is the slot's
    const float *from[WINDOW]; // null stands for zeros
    Channels<S> row[WINDOW];

    __device__ Committed(const Params &a, const Control &ctl, int64_t c0)
        : slot(ctl.get(offsetof(SeqCtl, slot))) {
        const int n = ctl.get(offsetof(SeqCtl, n_replay));
        const bool fresh = ctl.get(offsetof(SeqCtl, fresh));
        const float *log = a.log + slot * a.log_size + c0;
        window = a.window + slot * WINDOW * a.C + c0;
        moved = fresh || n > 0;
#pragma unroll
        for (int i = 0; i < WINDOW; i++) {
            const int at = n + i - WINDOW; // it counts among the pending rows
            const int row = ctl.get(offsetof(SeqCtl, pending) + max(at, 0) * sizeof(int32_t));
            from[i] = at >= 0 ? log + row * a.log_row : fresh ? nullptr : window + (n + i) * a.C;
        }
    }
    __device__ void load(int lane) {
#pragma unroll
        for (int i = 0; i < WINDOW; i++) {
            row[i] = {};
            if (from[i] != nullptr) {
                row[i].load(from[i], lane);
            }
        }
    }
    // Takes them from where store() has left them side by side.
    __device__ void take(const float *rows, int lane) {
#pragma unroll
        for (int i = 0; i < WINDOW; i++) {
            row[i].load(rows + i * S, lane);
        }
    }
    // Leaves them at `to`, each `apart` values behind the one before it.
    __device__ void store(float *to, int64_t apart, int lane) const {
#pragma unroll
        for (int i = 0; i < WINDOW; i++) {
            row[i].store(to + i * apart, lane);
        }
    }
};

} // namespace
} // namespace luce
