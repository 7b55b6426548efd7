#include "step_graph.h"

#include "custom_op.h"

#include <ggml-alloc.h>

#include <algorithm>

namespace luce {

uint32_t row_bucket(uint32_t rows, uint32_t n_rows) {
    static const uint32_t list[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 20, 24, 32, 40, 48, 64};
    return std::min(*std::lower_bound(std::begin(list), std::end(list), rows), n_rows);
}

// Multiples of 256, from 1024 on of a quarter of the power of two below: at most 25% more than needed.
uint32_t kv_bucket(uint32_t n, uint32_t n_cells) {
    uint32_t unit = 256;
    while (unit * 8 <= n) {
        unit *= 2;
    }
    return std::min((n + unit - 1) / unit * unit, n_cells);
}

std::vector<StepShape> largest_steps(const Cache &cache, const SessionParams &p) {
    const uint32_t n_kv = cache.n_cells();
    std::vector<StepShape> shapes = {{StepKind::prefill_last, p.n_chunk, n_kv, 0},
                                     {StepKind::verify, p.n_rows, n_kv, 0},
                                     {StepKind::flush, 0, 0, 0}};
    if (cache.has_head()) {
        shapes.push_back({StepKind::catch_up, MAX_ROWS, n_kv, 0});
        shapes.push_back({StepKind::draft, p.n_draft + 1, n_kv, p.n_draft});
    }
    return shapes;
}

Step::Graph::~Graph() {
#ifdef LUCE_USE_CUDA
    cuda::capture_free(captured);
#endif
}

std::unique_ptr<Step::Graph> Step::Graph::build(const Model &model, const Cache &cache, const TrunkRegion &in,
                                                const HeadRegion &head_in, const StepShape &shape) {
    auto g = std::make_unique<Graph>();
    g->shape = shape;
    const uint32_t n_layer = model.hparams().n_layer;
    const size_t n_nodes = 48 * (n_layer + shape.n_drafts + 1) + 64;
    const ggml_init_params params = {ggml_tensor_overhead() * n_nodes +
                                         ggml_graph_overhead_custom(n_nodes, false),
                                     nullptr, /*no_alloc=*/true};
    g->context.reset(ggml_init(params));
    ggml_context *ctx = g->context.get();
    g->nodes = ggml_new_graph_custom(ctx, n_nodes, false);
    switch (shape.kind) {
        case StepKind::prefill:
        case StepKind::prefill_last:
            g->outputs =
                build_qwen35(ctx, g->nodes, model, cache, in.tensors(ctx, shape.rows, shape.n_kv),
                             DELTA_APPEND, shape.kind == StepKind::prefill ? Logits::none : Logits::last);
            break;
        case StepKind::verify:
            g->outputs = build_qwen35(ctx, g->nodes, model, cache, in.tensors(ctx, shape.rows, shape.n_kv),
                                      DELTA_VERIFY, Logits::all);
            break;
        case StepKind::catch_up:
        case StepKind::draft:
            build_nextn(ctx, g->nodes, *model.weights().head, cache,
                        head_in.tensors(ctx, in, shape.rows, shape.n_drafts, shape.n_kv), shape.n_drafts);
            break;
        case StepKind::flush:
            build_flush(ctx, g->nodes, model, cache, in.place(ctx, GGML_TYPE_I32, CTL_SIZE, 1, in.ctl));
            break;
        case StepKind::kv_move: {
            ggml_tensor *path = in.place(ctx, GGML_TYPE_I32, 2 + MAX_ROWS, 1, in.path);
            for (uint32_t il = 0; il < n_layer; il++) {
                const KvCells &kv = cache.kv(il);
                if (kv.k != nullptr) {
                    ggml_build_forward_expand(
                        g->nodes, add_op(ctx, "kv_move", GGML_TYPE_I32, 1, 1, {kv.k, kv.v, path}));
                }
            }
            break;
        }
    }
    return g;
}

// ggml aborts on an op that a device does not have: ask first.
static void check_supported(const Device &device, ggml_cgraph *graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor *node = ggml_graph_node(graph, i);
        if (custom_op(node) == nullptr && !ggml_backend_dev_supports_op(device.dev, node)) {
            const ggml_tensor *a = node->src[0], *b = node->src[1];
            fail(LUCE_E_UNSUPPORTED, "%s has no %s of %s and %s", device.name.c_str(), ggml_op_desc(node),
                 a == nullptr ? "nothing" : type_name(a->type),
                 b == nullptr ? "nothing" : type_name(b->type));
        }
    }
}

StepSizes Step::measure(const Model &model, const Cache &cache, const SessionParams &params) {
    const TrunkRegion in(cache, params);
    const HeadRegion head_in(cache, params);
    StepSizes sizes;
    sizes.inputs = in.end + (cache.has_head() ? head_in.end : 0);
    ggml_gallocr_t galloc = ggml_gallocr_new(model.device().buffer_type());
    for (const StepShape &shape : largest_steps(cache, params)) {
        auto g = Graph::build(model, cache, in, head_in, shape);
        check_supported(model.device(), g->nodes);
        size_t size = 0;
        ggml_gallocr_reserve_n_size(galloc, g->nodes, nullptr, nullptr, &size);
        sizes.compute = std::max<uint64_t>(sizes.compute, size);
    }
    ggml_gallocr_free(galloc);
    return sizes;
}

} // namespace luce
