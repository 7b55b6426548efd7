#include "lay_out.h"

static void deltanet_layers() {
    for (int T = 1; T <= MAX_ROWS; T++) {
        for (const int S : {16, 32, 64, 128}) {
            DeltaArgs a = {};
            a.shape = {T, MAX_ROWS, 16, 16, 48, S, DELTA_VERIFY};
            expect(cuda::deltanet(a, stream) == 0, at("the delta rule", S, T));
            a.shape.mode = DELTA_APPEND;
            a.shape.n_prompts = 1;
            expect(cuda::deltanet(a, stream) == 0, at("the delta rule of a prefill", S, T));
        }
    }
}

// Of the eight blocks that one sequence has here, none of five multiprocessors has room for three.
static void spread_layers() {
    const DeviceLimits &limits = emulated::kind->limits;
    for (int T = 5; T <= MAX_ROWS; T++) {
        DeltaArgs a = {};
        a.shape = {T, MAX_ROWS, 1, 2, 2, 128, DELTA_VERIFY};
        expect(cuda::deltanet(a, stream) == 0, at("the delta rule of one sequence", 128, T));
        expect(3 * (emulated::laid_out + size_t(limits.shared_reserved)) > size_t(limits.shared_sm),
               at("three blocks of one sequence on a multiprocessor", 128, T));
    }
}

// A block of the conv has room for the sequences that may be there, so that it fits beside blocks of the product ahead.
static void few_sequences() {
    for (const int T : {2, 8, 16, 64}) {
        const auto bytes_of = [&](int n_slots) {
            ConvArgs a = {};
            a.shape = {T, MAX_ROWS, n_slots, 2, 4, 128, DELTA_VERIFY};
            expect(cuda::conv(a, stream) == 0, at("the conv", 128, T));
            return emulated::laid_out;
        };
        const size_t one = bytes_of(1), each = 3 * 128 * sizeof(float);
        expect(one < 5 << 10, at("a conv's room for one sequence", 128, T));
        // No more have rows than there are rows, and a block has sixteen at most.
        for (const int n_slots : {2, 5, 16, 17, MAX_ROWS}) {
            expect(bytes_of(n_slots) == one + size_t(std::min({n_slots, T, 16}) - 1) * each,
                   at("a conv's room for sequences", 128, T));
        }
    }
}

// Several sequences' blocks are all there at once, one less than there is room for, and one at least.
static void whole_grids() {
    const int multiprocessors = emulated::kind->limits.multiprocessors;
    for (const int T : {2, 8, 64}) {
        DeltaArgs a = {};
        a.shape = {T, MAX_ROWS, 16, 16, 48, 128, DELTA_VERIFY};
        for (const int blocks : {1, 2, 3}) {
            emulated::blocks_at_once = blocks;
            expect(cuda::deltanet(a, stream) == 0 &&
                       emulated::laid_out_grid.x == unsigned(multiprocessors * blocks - 1),
                   at("the delta rule's grid", 128, T));
        }
        emulated::blocks_at_once = 0;
        expect(cuda::deltanet(a, stream) == cudaErrorLaunchOutOfResources,
               at("the delta rule where a multiprocessor has no room for a block", 128, T));
        emulated::blocks_at_once = 2;
    }
}

void lay_out_deltanet() {
    on_each_kind(whole_grids);
    on_each_kind(deltanet_layers);
    on_each_kind(spread_layers);
    on_each_kind(few_sequences);
}
