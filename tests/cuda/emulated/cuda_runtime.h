// Has what luce's kernels use of CUDA, on a CPU. A block's threads are contexts of their own on one thread,
// which change where they wait for each other, in an order of chance: what one reads without waiting for who writes it is
// there at times, and at times not. Memory is the host's, and launches run when they are made.
// (tests/test_emulated_kernels.py)
#pragma once

#include "common/device_limits.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <type_traits>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __host__
#define __shared__ static
#define __align__(n) alignas(n)
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__

struct int2 { int32_t x, y; };
struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) ulonglong2 { uint64_t x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline dim3 threadIdx, blockIdx, blockDim, gridDim;
using cudaError_t = int;

// ---- a device ----

namespace emulated {

// Says what a device can do. 8.9 and 12.0 have shared memory as 8.6. With few multiprocessors a block has several units of
// small shapes too.
struct DeviceKind {
    const char *name;
    luce::DeviceLimits limits;
};
constexpr DeviceKind KINDS[] = {
    {"9.0", {5, 228 << 10, 227 << 10, 1024, 65536, 50 << 20, true, true}},
    {"8.0", {5, 164 << 10, 163 << 10, 1024, 65536, 40 << 20, false, false}},
    {"8.6", {5, 100 << 10, 99 << 10, 1024, 65536, 6 << 20, false, false}},
};
inline const DeviceKind *kind = KINDS;

// With `dry` launches are refused as the device would, and not run. What a kernel declares as shared is known from when it
// ran before.
inline bool dry;
inline size_t laid_out; // the last of these had so many bytes of shared memory a block
inline dim3 laid_out_grid; // and these blocks
inline int blocks_at_once = 2; // a multiprocessor has room for so many
inline std::map<const void *, size_t> declared, declared_by; // the bytes of each variable, and of each kernel's
inline void declares(const void *variable, size_t bytes) { declared[variable] = bytes; }

} // namespace emulated

// ---- a block ----

namespace emulated {

constexpr int WARP = 32;
// A thread's context lives on from block to block, and runs the body of each.
struct Fiber {
    ucontext_t start;
    jmp_buf at;
    std::vector<char> stack;
    bool begun = false;
};
inline std::vector<std::unique_ptr<Fiber>> fibers;
// A thread rests for as long as a barrier that it waits at has this turn. One that runs and one that is done have turns of
// their own.
struct Rest {
    const unsigned *turn;
    unsigned now;
    bool lasts() const { return *turn == now; }
};
constexpr unsigned FIRST = 0;
constexpr Rest RUNS = {&FIRST, FIRST + 1}, DONE = {&FIRST, FIRST};
inline std::vector<Rest> rests;
inline int current, alive;
struct Chance { // xorshift64, the same in every run; many numbers are drawn, small ones
    uint64_t state = 88172645463325252u;
    uint64_t operator()() {
        state ^= state << 13;
        state ^= state >> 7;
        return state ^= state << 17;
    }
};
inline Chance chance;
inline std::vector<int> order; // threads come in this order, until all had their turn
inline int turn;
inline jmp_buf launcher;
inline std::function<void()> body;
inline uint8_t *dynamic_shared;
inline size_t dynamic_bytes;
inline uint64_t n_begun; // so many blocks have begun

// Goes on with thread i, which does not rest.
inline void resume(int i) {
    Fiber &f = *fibers[size_t(i)];
    current = i;
    threadIdx.x = unsigned(i);
    if (f.begun) {
        _longjmp(f.at, 1);
    }
    f.begun = true;
    setcontext(&f.start);
}
inline void next() {
    const int n = int(order.size());
    for (int resting = 0; resting < 2 * n; resting++) {
        if (++turn >= n) {
            uint64_t drawn = 0;
            for (uint32_t left = uint32_t(n); left > 1; left--) { // four draws of 16 bits a number
                drawn = left % 4 == 0 || drawn == 0 ? chance() : drawn >> 16;
                std::swap(order[left - 1], order[uint32_t(drawn & 0xffff) * left >> 16]);
            }
            turn = 0;
        }
        if (!rests[size_t(order[size_t(turn)])].lasts()) {
            resume(order[size_t(turn)]);
        }
    }
    fprintf(stderr, "all threads of block %u wait for each other\n", blockIdx.x);
    abort();
}
inline void yield() {
    if (_setjmp(fibers[size_t(current)]->at) == 0) {
        next();
    }
}
inline void enter() {
    for (;;) {
        body();
        rests[size_t(current)] = DONE;
        if (_setjmp(fibers[size_t(current)]->at) == 0) {
            if (--alive == 0) {
                _longjmp(launcher, 1);
            }
            next();
        }
    }
}

// At a Barrier n threads wait for each other.
struct Barrier {
    int n = 0;
    unsigned turn = 0;
    void wait(int total) {
        const unsigned now = turn;
        if (++n == total) {
            n = 0;
            turn++;
        }
        if (turn == now) {
            rests[size_t(current)] = {&turn, now};
            yield();
            rests[size_t(current)] = RUNS;
        }
    }
};
inline Barrier block_barrier, warp_barriers[1024 / WARP];

// An Exchange is what each lane of a warp shows the others. It has two turns, so that one wait an exchange is
// enough.
struct Exchange {
    uint64_t words[2][WARP][8];
    int turn[WARP];
};
inline Exchange exchanges[1024 / WARP];
template <typename T> const uint64_t (*exchange(const T &mine))[8] {
    static_assert(sizeof(T) <= sizeof(uint64_t[8]));
    const int warp = int(threadIdx.x) / WARP, lane = int(threadIdx.x) % WARP;
    Exchange &e = exchanges[warp];
    const int turn = e.turn[lane] ^= 1;
    memcpy(e.words[turn][lane], &mine, sizeof(mine));
    warp_barriers[warp].wait(WARP);
    return e.words[turn];
}
template <typename T> T of_lane(const uint64_t (*words)[8], int lane) {
    T x;
    memcpy(&x, words[lane], sizeof(x));
    return x;
}

// Four matrices of 8 x 8 values of two bytes, whose rows are where lanes 8 m .. 8 m + 7 say: of each a lane has two neighbours of
// row lane / 4, or where they are transposed of column lane / 4.
inline void load_matrices(uint32_t (&m)[4], const uint8_t *row) {
    const auto rows = exchange(row);
    const int lane = int(threadIdx.x) % WARP;
    for (int i = 0; i < 4; i++) {
        memcpy(&m[i], of_lane<const uint8_t *>(rows, i * 8 + lane / 4) + lane % 4 * 4, 4);
    }
}
inline void load_transposed(uint32_t (&m)[4], const uint8_t *row) {
    const auto rows = exchange(row);
    const int lane = int(threadIdx.x) % WARP;
    for (int i = 0; i < 4; i++) {
        uint16_t values[2];
        for (int e = 0; e < 2; e++) {
            memcpy(&values[e], of_lane<const uint8_t *>(rows, i * 8 + lane % 4 * 2 + e) + lane / 4 * 2, 2);
        }
        memcpy(&m[i], values, 4);
    }
}

// The tensor core's m16n8k16 of the PTX manual, over pairs of 16-bit values, of which `split` makes two floats. Lane (g = lane /
// 4, t = lane % 4) has rows g and g + 8 of a and c, k 2 t, 2 t + 1 and 8 more, columns 2 t and 2 t + 1 of c, and column g of b:
// its words are a's four and b's two. Sums are in double.
template <typename Pair, typename Split> void mma_16x8x16(float (&c)[4], const uint32_t (&words)[6], Split split) {
    using Four = double __attribute__((vector_size(32)));
    struct Operands { decltype(split(Pair())) a[4], b[2]; } mine; // each value is made a float by who shows it
    for (int i = 0; i < 6; i++) {
        Pair pair;
        memcpy(static_cast<void *>(&pair), &words[i], sizeof(pair));
        (i < 4 ? mine.a[i] : mine.b[i - 4]) = split(pair);
    }
    const auto all = exchange(mine);
    const int g = int(threadIdx.x % 32) / 4, t = int(threadIdx.x) % 4;
    Four sums = {c[0], c[1], c[2], c[3]};
    for (int s = 0; s < 4; s++) {
        const Operands &row = of_lane<Operands>(all, g * 4 + s);
        const Operands &left = of_lane<Operands>(all, t * 8 + s), &right = of_lane<Operands>(all, t * 8 + 4 + s);
        for (int half = 0; half < 2; half++) {
            const auto x = row.a[2 * half], below = row.a[1 + 2 * half], y = left.b[half], beside = right.b[half];
            sums += Four{x.x, x.x, below.x, below.x} * Four{y.x, beside.x, y.x, beside.x} +
                    Four{x.y, x.y, below.y, below.y} * Four{y.y, beside.y, y.y, beside.y};
        }
    }
    for (int i = 0; i < 4; i++) {
        c[i] = float(sums[i]);
    }
}

template <typename F> cudaError_t launch(const void *name, dim3 grid, int threads, size_t shared, const F &kernel) {
    const int most = kind->limits.shared_block;
    if (dry) {
        if (declared_by.count(name) == 0) {
            printf("FAILED a kernel was launched dry that never ran\n");
            exit(1);
        }
        laid_out = declared_by[name] + shared;
        laid_out_grid = grid;
        return threads > 1024 || laid_out > size_t(most) ? 1 : 0;
    }
    declared.clear();
    std::vector<uint8_t> room(shared + 128);
    dynamic_shared = room.data() + (128 - reinterpret_cast<uintptr_t>(room.data()) % 128);
    dynamic_bytes = shared;
    blockDim = dim3(unsigned(threads));
    gridDim = grid;
    body = kernel;
    while (fibers.size() < size_t(threads)) {
        fibers.emplace_back(new Fiber);
        Fiber &f = *fibers.back();
        f.stack.resize(1 << 17);
        getcontext(&f.start);
        f.start.uc_stack.ss_sp = f.stack.data();
        f.start.uc_stack.ss_size = f.stack.size();
        f.start.uc_link = nullptr;
        makecontext(&f.start, enter, 0);
    }
    memset(exchanges, 0, sizeof(exchanges));
    for (unsigned block = 0; block < grid.x * grid.y * grid.z; block++) {
        blockIdx = dim3(block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y);
        memset(room.data(), 0xff, room.size());
        n_begun++;
        rests.assign(size_t(threads), RUNS);
        alive = threads;
        order.resize(size_t(threads));
        std::iota(order.begin(), order.end(), 0);
        turn = threads; // all get another order at once
        if (_setjmp(launcher) == 0) {
            next();
        }
    }
    size_t bytes = 0;
    for (const auto &[variable, size] : declared) {
        bytes += size;
    }
    declared_by[name] = std::max(declared_by[name], bytes);
    if (bytes + shared > size_t(most)) { // the device would have refused it
        printf("FAILED a block with %zu + %zu bytes of shared memory on %s\n", bytes, shared, kind->name);
        return 1;
    }
    return 0;
}
template <typename F> void launch(dim3 grid, int threads, size_t shared, const F &kernel) {
    static int name; // there is one for each kernel
    if (launch(&name, grid, threads, shared, kernel) != 0) {
        exit(1);
    }
}

} // namespace emulated

// ---- intrinsics ----

inline void __syncthreads() { emulated::block_barrier.wait(int(blockDim.x)); }
inline bool __syncthreads_or(bool x) {
    static bool any;
    any |= x;
    __syncthreads();
    const bool result = any;
    __syncthreads();
    any = false;
    __syncthreads();
    return result;
}
inline int __syncthreads_count(bool x) {
    static int all;
    all += int(x);
    __syncthreads();
    const int result = all;
    __syncthreads();
    all = 0;
    __syncthreads();
    return result;
}
inline void __syncwarp() { emulated::warp_barriers[threadIdx.x / 32].wait(32); }
template <typename T> T __shfl_sync(uint32_t, T x, int lane, int width = 32) {
    const int first = int(threadIdx.x % 32) / width * width;
    return emulated::of_lane<T>(emulated::exchange(x), first + lane % width);
}
template <typename T> T __shfl_xor_sync(uint32_t, T x, int mask) {
    return emulated::of_lane<T>(emulated::exchange(x), int(threadIdx.x % 32) ^ mask);
}
template <typename T> T __shfl_up_sync(uint32_t, T x, int n) {
    const int lane = int(threadIdx.x % 32);
    return emulated::of_lane<T>(emulated::exchange(x), lane < n ? lane : lane - n);
}
template <typename T> T __shfl_down_sync(uint32_t, T x, int n) {
    const int lane = int(threadIdx.x % 32);
    return emulated::of_lane<T>(emulated::exchange(x), lane + n > 31 ? lane : lane + n);
}
template <typename T, typename F> T reduced(T x, const F &combine) {
    const auto words = emulated::exchange(x);
    T all = emulated::of_lane<T>(words, 0);
    for (int lane = 1; lane < 32; lane++) {
        all = combine(all, emulated::of_lane<T>(words, lane));
    }
    return all;
}
inline int __reduce_add_sync(uint32_t, int x) {
    return reduced(x, [](int a, int b) { return a + b; });
}
template <typename T> T __reduce_max_sync(uint32_t, T x) {
    return reduced(x, [](T a, T b) { return a > b ? a : b; });
}
template <typename T> T __reduce_min_sync(uint32_t, T x) {
    return reduced(x, [](T a, T b) { return a < b ? a : b; });
}
inline uint32_t __ballot_sync(uint32_t, bool x) {
    const uint32_t bit = x ? 1u << threadIdx.x % 32 : 0;
    return reduced(bit, [](uint32_t a, uint32_t b) { return a | b; });
}
inline bool __all_sync(uint32_t, bool x) {
    const auto words = emulated::exchange(x);
    bool all = true;
    for (int lane = 0; lane < 32; lane++) {
        all = all && emulated::of_lane<bool>(words, lane);
    }
    return all;
}
inline bool __any_sync(uint32_t mask, bool x) { return !__all_sync(mask, !x); }
inline uint32_t __match_any_sync(uint32_t, int x) {
    const auto words = emulated::exchange(x);
    uint32_t same = 0;
    for (int lane = 0; lane < 32; lane++) {
        same |= uint32_t(emulated::of_lane<int>(words, lane) == x) << lane;
    }
    return same;
}
template <typename T> T atomicOr(T *p, T x) {
    const T before = *p;
    *p |= x;
    return before;
}
template <typename T> T atomicExch(T *p, T x) {
    const T before = *p;
    *p = x;
    return before;
}
inline uint32_t atomicInc(uint32_t *p, uint32_t most) {
    const uint32_t before = *p;
    *p = before >= most ? 0 : before + 1;
    return before;
}
template <typename T> T atomicAdd(T *p, T x) {
    const T before = *p;
    *p += x;
    return before;
}
template <typename A, typename B> std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(a) < T(b) ? T(a) : T(b);
}
template <typename A, typename B> std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(a) < T(b) ? T(b) : T(a);
}
using std::isfinite;
using std::isinf;
using std::isnan;
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
inline float __int_as_float(int bits) { return __uint_as_float(uint32_t(bits)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(int64_t x) { return __builtin_ffsll(x); }
inline int __clzll(int64_t x) { return x == 0 ? 64 : __builtin_clzll(uint64_t(x)); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes = uint64_t(high) << 32 | low;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) {
        out |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    }
    return out;
}
template <typename T> T __ldcg(const T *p) { return *p; }
template <typename T> T __ldcv(const T *p) { return *p; }
inline void __trap() {
    fprintf(stderr, "thread %u of block %u traps\n", threadIdx.x, blockIdx.x);
    abort();
}
inline void __threadfence_system() {}
inline void __threadfence() {}
template <typename T> void __stcg(T *p, T x) { *p = x; }
template <typename T> void __stwb(T *p, T x) { *p = x; }

// ---- the runtime ----

using cudaStream_t = void *;
using cudaEvent_t = void *;
enum {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorLaunchOutOfResources = 701,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
template <typename F> cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, F *, int, size_t) {
    *blocks = emulated::blocks_at_once;
    return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaMalloc(void **p, size_t n) {
    *p = aligned_alloc(256, (n + 255) / 256 * 256);
    return *p == nullptr;
}
inline cudaError_t cudaFree(void *p) {
    free(p);
    return cudaSuccess;
}
inline cudaError_t cudaMallocHost(void **p, size_t n) { return cudaMalloc(p, n); }
inline cudaError_t cudaFreeHost(void *p) { return cudaFree(p); }
inline cudaError_t cudaMemset(void *p, int byte, size_t n) {
    memset(p, byte, n);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind) {
    memcpy(to, from, n);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy(to, from, n, kind);
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventCreate(cudaEvent_t *) { return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float *, cudaEvent_t, cudaEvent_t) { return cudaErrorInvalidValue; }
