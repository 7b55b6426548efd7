// Times attention on the 27B's shape. One CUDA graph runs an op for 16 layers, as a step of the 27B has, each with its own KV,
// and the median of its replays is shown per layer: of attention that packs its result, by one plan for all layers, of the
// kernel that makes its heads, and of the store of cells alone. A replay is CALLS launches of the graph that follow each other
// without a wait, as bench/attention_peer.cpp does with ggml's, so that the start on an idle device is in few of them. GB/s counts the
// K and V of each sequence once. Filling the cells, capture and warm-up are outside the timing. The layers share q and the control
// block.
#include "harness.h"
#include "matmul/quantised.h"

#include <functional>

#include <cuda_fp16.h>

namespace {

constexpr int H = 24, HKV = 4, D = 256, LAYERS = 16, REPLAYS = 15, CALLS = 8;

// Fills with any numbers between -1 and 1.
__global__ void fill_cells(__half *x, size_t n) {
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
         i += size_t(gridDim.x) * blockDim.x) {
        const uint32_t bits = uint32_t(i) * 2654435761u ^ uint32_t(i >> 20) * 40503u;
        x[i] = __ushort_as_half(uint16_t((bits >> 16 & 0x83ff) | (13 + (bits >> 9) % 2) << 10));
    }
}

// Room has the cells of all cases, of one after the other. It is allocated once, as an engine's cells are: what runs in the
// first moments after a large buffer was freed and another allocated takes up to a tenth longer.
struct Room : Device<uint8_t> {
    Room() : Device(size_t(51) << 30) {
        fill_cells<<<2048, 256, 0, stream>>>(reinterpret_cast<__half *>(p), n / 2);
    }
};

struct Cells { // it has the cells of all layers
    const Room &room;
    int type, n_seqs, n_pages; // n_pages are the pages of a sequence
    int64_t cell_bytes;
    Device<int32_t> table;

    static int64_t bytes_of(int kv_type) {
        return kv_type == 1 ? 2 * HKV * D : kv_type == 8 ? HKV * D / 32 * 34 : HKV * D / 32 * 18;
    }
    static Ints shuffled(int n) { // pages in order are read no faster
        Ints pages = chain(n + 1); // -1, 0 ..
        pages.erase(pages.begin());
        std::shuffle(pages.begin(), pages.end(), rng);
        return pages;
    }
    Cells(const Room &where, int kv_type, int seqs, int context)
        : room(where), type(kv_type), n_seqs(seqs), n_pages((context + MAX_ROWS) / PAGE + 1),
          cell_bytes(bytes_of(kv_type)), table(shuffled(seqs * n_pages)) {
        if (size_t(2 * LAYERS) * seqs * n_pages * PAGE * cell_bytes > room.n) {
            fprintf(stderr, "a case has more cells than there is room for\n");
            exit(1);
        }
    }
    KvPool layer(int i) const {
        const size_t size = size_t(n_seqs) * n_pages * PAGE * cell_bytes;
        return {room.p + 2 * i * size, room.p + (2 * i + 1) * size, type, HKV, D};
    }
};

// Times attention_heads over any parts of a product of 5120 values.
double time_heads(const Cells &cells, const Device<StepCtl> &ctl, int T) {
    RowmmArgs parts{};
    parts.T = T;
    parts.K = 5120;
    parts.n_weights = 3;
    for (int i = 0; i < 3; i++) {
        parts.weights[i].type = 8;
        parts.weights[i].N = i == 0 ? 2 * H * D : HKV * D;
    }
    Device<float> memory(normals(size_t(rowmm_parts_bytes(parts)) / sizeof(float)));
    const Device<float> norm(normals(D));
    Device<float> out(size_t(2) * T * H * D);
    const Device<int32_t> positions(chain(T + 1));
    parts.parts = memory.p;
    return median_us(
        [&](int i) {
            must(cuda::attention_heads({&parts, cells.layer(i), T, H, D / 4, 1e7f, 1e-6f,
                                        positions.p, norm.p, norm.p, ctl.p, cells.table.p, out.p,
                                        out.p + size_t(T) * H * D},
                                       stream));
        },
        REPLAYS, LAYERS, CALLS);
}

void time_case(const Cells &cells, int context, const Ints &parents, int max_pages, const char *name) {
    const int rows = int(parents.size()), T = rows * cells.n_seqs;
    StepCtl host = blank_ctl();
    host.n_seqs = cells.n_seqs;
    host.n_rows = T;
    for (int i = 0; i < cells.n_seqs; i++) {
        SeqCtl &seq = host.seqs[i];
        seq.row0 = i * rows;
        seq.n_rows = rows;
        seq.n_past = context;
        seq.n_replay = 0;
        seq.moves = 0;
        seq.pages = i * cells.n_pages;
        for (int r = 0; r < rows; r++) {
            RowCtl &row = host.rows[i * rows + r];
            row.seq = i;
            row.parent = parents[r] < 0 ? -1 : i * rows + parents[r];
            row.position = parents[r] < 0 ? context : host.rows[i * rows + parents[r]].position + 1;
        }
    }
    Device<StepCtl> ctl(1);
    ctl.set({host});
    Device<float> q(normals(size_t(T) * H * D)), gate(normals(size_t(2) * T * H * D));
    Device<uint8_t> packed(size_t(rowmm_x_bytes(T, H * D)));
    Device<float> k(normals(size_t(T) * HKV * D));
    AttentionArgs a{};
    a.T = T;
    a.H = H;
    a.scale = 1 / std::sqrt(float(D));
    a.max_pages = max_pages;
    a.q = q.p;
    a.gate = gate.p + D;
    a.gate_row = 2 * H * D;
    a.gate_head = 2 * D;
    a.ctl = ctl.p;
    a.pages = cells.table.p;
    a.packed = packed.p;
    a.pool = cells.layer(0);
    Device<float> scratch(size_t(attention_scratch(a)));
    a.scratch = scratch.p;
    const Device<uint8_t> plan{size_t(attention_plan_bytes())};
    const auto store = [&](int i) {
        must(cuda::kv_store({cells.layer(i), T, 0, k.p, k.p, ctl.p, cells.table.p}, stream));
    };
    for (int i = 0; i < LAYERS; i++) {
        store(i);
    }
    const double store_us = median_us(store, REPLAYS, LAYERS, CALLS), heads_us = time_heads(cells, ctl, T),
                 us = median_us(
                     [&](int i) {
                         a.pool = cells.layer(i);
                         a.layer = i;
                         if (i == 0) {
                             a.plan = plan.p;
                             must(cuda::attention_plan(a, plan.p, stream));
                         }
                         must(cuda::attention(a, stream));
                     },
                     REPLAYS, LAYERS, CALLS);
    const double bytes = 2.0 * cells.n_seqs * (context + rows) * double(cells.cell_bytes);
    printf(
        "luce type %d context %6d seqs %d rows %2d %-6s %8.2f us %6.0f GB/s, heads %.2f us, store %.2f us\n",
        cells.type, context, cells.n_seqs, rows, name, us, bytes / us / 1e3, heads_us, store_us);
    fflush(stdout);
}

} // namespace

void time_attention(bool all) {
    const Room room;
    for (int context : {0, 1000, 4096, 8192, 32768, 102400}) {
        if (!all && (context == 1000 || context == 8192)) {
            continue;
        }
        for (int type : {1, 8, 2}) {
            if ((type != 1 && (!all || context < 32768)) || (type == 2 && context < 100000)) {
                continue;
            }
            const Cells one(room, type, 1, context);
            const int max_pages = std::max(one.n_pages, 128);
            for (int rows : {1, 2, 4, 8, 16, 64}) {
                if (all || rows != 2) {
                    time_case(one, context, chain(rows), max_pages, "chain");
                }
            }
            if (all) {
                time_case(one, context, random_tree(16, 8, false), max_pages, "tree");
                time_case(one, context, random_tree(64, 12, false), max_pages, "tree");
            }
        }
        const Cells eight(room, 1, 8, context);
        const int max_pages = std::max(eight.n_pages, 128);
        for (int rows : {1, 4}) {
            time_case(eight, context, chain(rows), max_pages, "chain");
        }
    }
}
