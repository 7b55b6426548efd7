#include "graph/lowering.h"

#include "cpu/matmul.h"
#include "ops/images.h"
#include "ops/moe.h"
#include "ops/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace luce {

Lowering::Lowering(Plain &graph_, const std::vector<StepInputs> &inputs, ggml_context *context,
                   ggml_cgraph *nodes)
    : plain(graph_), in(inputs.data()), ctx(context), graph(nodes), gpu(graph_.model.gpu()), inputs_(inputs) {
}

StepOutputs lower(Plain &plain, const std::vector<StepInputs> &in, ggml_context *ctx, ggml_cgraph *nodes) {
#ifdef LUCE_USE_CUDA
    if (plain.model.gpu()) {
        return gpu_lowering(plain, in, ctx, nodes)->run();
    }
#endif
    return cpu_lowering(plain, in, ctx, nodes)->run();
}

StepOutputs Lowering::run() {
    made_.assign(plain.nodes.size() * MAX_OUT * size_t(Form::count), nullptr);
    outputs_.runs = {{0, 0, 0}};
    for (int32_t i = 0; size_t(i) < plain.nodes.size(); i++) {
        const Node &n = plain.nodes[size_t(i)];
        const bool in_order = has(n.op, RUNS_IN_ORDER);
        if (!n.dead && (in_order || n.stage >= plain.model.n_ranks())) {
            go_to(n.stage);
        }
        if (!n.dead && in_order) {
            emit(i);
        }
    }
    go_to(plain.last_stage());
    StepOutputs &out = outputs_;
    const auto shown = [&](Val v) {
        ggml_tensor *t = v.graph == nullptr ? nullptr : rows(v);
        if (t != nullptr) {
            ggml_set_output(t);
        }
        return t;
    };
    out.logits = shown(plain.logits);
    out.hidden = shown(plain.hidden);
    out.choice = shown(plain.choice);
    return out;
}

// Such a value has no rows: what reads it finds the cells themselves.
static bool stands_for_cells(Op op, int32_t out) {
    return out == 0 && (op == Op::kv_write || op == Op::norm_rope || op == Op::heads);
}

// Ranks have turns, and behind them the other stages come one after the other.
void Lowering::go_to(uint32_t stage) {
    const uint32_t n_ranks = plain.model.n_ranks();
    if (stage < n_ranks && stage_index() < n_ranks) {
        turn_to(stage);
        return;
    }
    while (stage_index() < stage) {
        turn_to(std::max(stage_index(), n_ranks - 1)); // what is behind the trunk follows the last rank
        next_stage();
    }
}

// What is emitted from here on is of this rank. What the ranks have made stays theirs.
void Lowering::turn_to(uint32_t stage) {
    if (stage == stage_index()) {
        return;
    }
    in = &inputs_[stage];
    if (outputs_.runs.back().first == ggml_graph_n_nodes(graph)) {
        outputs_.runs.pop_back(); // it has no nodes
    }
    outputs_.runs.push_back({stage, ggml_graph_n_nodes(graph), 0});
}

// A stage ends with the rows that later ones read, and the next one begins with copies of them, which are all that it has of
// them: other forms stay behind.
void Lowering::next_stage() {
    const uint32_t next = stage_index() + 1;
    std::map<Val, ggml_tensor *> sent;
    for (const Node &n : plain.nodes) {
        for (const Val v : n.in) {
            if (n.dead || n.stage < next || plain.at(v).stage >= next ||
                stands_for_cells(plain.at(v).op, v.out) || sent.count(v) != 0) {
                continue;
            }
            ggml_tensor *t = rows(v);
            sent[v] = expand(ggml_is_contiguous(t) ? t : ggml_cont(ctx, t));
        }
    }
    in = &inputs_[next];
    std::fill(made_.begin(), made_.end(), nullptr);
    outputs_.runs.push_back({next, ggml_graph_n_nodes(graph), int(sent.size())});
    for (const auto &[v, t] : sent) {
        made(v, Form::rows) = expand(ggml_dup(ctx, t));
    }
}

// ---- forms ----

ggml_tensor *Lowering::rows(Val v) {
    ggml_tensor *&t = made(v, Form::rows);
    if (t == nullptr) {
        emit(v.node);
    }
    if (NormOf norm; t == nullptr && as_norm(v, norm)) { // of a sum whose op leaves the norm in another form
        t = norm_rows(rows(norm.x), norm.w, norm.eps);
    }
    if (t == nullptr) {
        fail(LUCE_E_INTERNAL, "op %d of a plain graph has no rows", int(plain.at(v).op));
    }
    if (plain.at(v).named) {
        if (const auto name = plain.names.find(v); name != plain.names.end()) {
            ggml_set_name(t, name->second.c_str());
        }
    }
    return t;
}

ggml_tensor *Lowering::flat(Val v) {
    ggml_tensor *t = rows(v);
    const int64_t n = plain.width(v), T = plain.at(v).T;
    if (t->ne[0] == n && t->ne[2] == 1) {
        return t;
    }
    return ggml_is_contiguous(t) ? ggml_reshape_2d(ctx, t, n, T) : ggml_cont_2d(ctx, t, n, T);
}

ggml_tensor *Lowering::by_heads(Val v, int64_t D) {
    ggml_tensor *t = rows(v);
    const int64_t H = plain.width(v) / D, T = plain.at(v).T;
    const bool apart = t->ne[0] == D && t->ne[1] == H && t->ne[2] == T;
    return apart ? t : ggml_reshape_3d(ctx, flat(v), D, H, T);
}

bool Lowering::as_norm(Val v, NormOf &norm) const {
    const Node &n = plain.at(v);
    if (n.stage != stage_index()) { // its rows have come from there, and what it norms may have not
        return false;
    }
    if (n.op == Op::norm) {
        norm = {n.in[0], n.w[0], std::get<float>(n.params)};
        return true;
    }
    if ((n.op == Op::add_norm || n.op == Op::add_normed || n.op == Op::add_convolved ||
         n.op == Op::mixture) &&
        v.out == 1) {
        const Node &behind = part(n, "N");
        norm = {{v.graph, v.node, 0}, behind.w[0], std::get<float>(behind.params)};
        return true;
    }
    return false;
}

// ---- ggml's nodes and luce's ----

ggml_tensor *Lowering::expand(ggml_tensor *t) {
    ggml_build_forward_expand(graph, t);
    return t;
}

void Lowering::split_products(const OpNode &y, const std::vector<size_t> &which, Val v) {
    for (size_t i = 0; i < which.size(); i++) {
        made({v.graph, v.node, int32_t(which[i])}, Form::rows) = y[int(i)]; // {N, T}
    }
}

std::vector<ggml_tensor *> Lowering::weights_of(const Node &n) const {
    if (n.op != Op::matmul_first) {
        return n.w;
    }
    ggml_tensor *w = part(n, "M").w[0],
                *first = ggml_view_2d(ctx, w, w->ne[0], n.n[0], w->nb[1], 0); // {K, n}
    first->op_params[0] = w->op_params[0]; // is_packed reads it
    first->extra = w->extra; // scales_of does
    return {first};
}

// In a step of a GPU each row is a matrix of its own in a batch of products with one row: ggml's kernel for one row
// computes them, and reads the weight once for each. Its kernels for several rows would add in another order. So it is with
// the logits of several prompts, each of which has them of one row.
ggml_tensor *Lowering::mul_mat(ggml_tensor *weight, ggml_tensor *x, bool logits) {
    const int64_t T = x->ne[1];
    const bool by_row = plain.prefill() ? logits && T > 1 : gpu;
    if (by_row) {
        x = ggml_view_3d(ctx, x, x->ne[0], 1, T, x->nb[1], x->nb[1], 0); // {K, 1, T}
    }
    ggml_tensor *y = ggml_mul_mat(ctx, weight, x);
    ggml_prec_set_acc(y, GGML_PREC_F32); // otherwise cuBLAS may sum F16 products in F16
    if (ggml_is_quantized(weight->type)) {
        ggml_prec_set_src(y, GGML_PREC_Q8, 1); // otherwise rows may be rounded to 4 bits for weights of 4
    }
    if (const float *factor = scales_of(weight)) {
        y = ggml_scale(ctx, y, *factor);
    }
    return by_row ? ggml_reshape_2d(ctx, y, weight->ne[1], T) : y;
}

ggml_tensor *Lowering::norm_rows(ggml_tensor *x, ggml_tensor *w, float eps) {
    return ggml_mul(ctx, ggml_rms_norm(ctx, x, eps), w);
}

// What rows have chosen, where this stage reads it: the last one, which chooses, on its device, others in host memory.
ggml_tensor *Lowering::chosen() const {
    return stage_index() == plain.last_stage() ? plain.cache.drafts() : plain.cache.given();
}

ggml_tensor *Lowering::embedding(ggml_tensor *table) {
    ggml_tensor *tokens = in->tokens;
    if (!plain.prefill()) { // rows may be drafts that never left the device
        TokensArgs a{};
        a.n_vocab = int32_t(table->ne[1]);
        tokens = ops::row_tokens(ctx, {tokens, chosen()}, a);
    }
    return ggml_get_rows(ctx, table, tokens); // {E, T}
}

ggml_tensor *Lowering::with_images(ggml_tensor *x) {
    return plain.images ? (ggml_tensor *) ops::image_rows(ctx, {x, in->image_rows}, {}) : x;
}

ggml_tensor *Lowering::rotated(ggml_tensor *x, ggml_tensor *factors, const AttentionShape &s) {
    if (s.rope_dim == 0) {
        return x;
    }
    const Yarn &y = s.yarn; // where it blends, ggml scales by 1 + 0.1 ln(factor) itself
    const bool blends = y.factor > 1;
    const float factor = blends ? y.attention / (1.0f + 0.1f * std::log(y.factor)) : 1.0f;
    if (plain.images && s.has_axes()) {
        int sections[GGML_MROPE_SECTIONS] = {s.rope_sections[0], s.rope_sections[1], s.rope_sections[2], 0};
        return ggml_rope_multi(ctx, x, in->axes, factors, int(s.rope_dim), sections, GGML_ROPE_TYPE_IMROPE, 0,
                               s.rope_base, 1.0f, 0.0f, 1.0f, 0.0f, 0.0f);
    }
    // It is plain NEOX, since for text the axes of M-RoPE are all equal.
    return ggml_rope_ext(ctx, x, positions_of(s), factors, int(s.rope_dim), GGML_ROPE_TYPE_NEOX,
                         int(y.n_ctx_trained), s.rope_base, 1.0f / y.factor, blends ? 1.0f : 0.0f, factor,
                         blends ? y.beta_fast : 0.0f, blends ? y.beta_slow : 0.0f);
}

// ---- attention ----

// It is expanded here, since attention reads the cells and not this node.
void Lowering::store(ggml_tensor *k, ggml_tensor *v, const KvLayer &kv) {
    KvStoreArgs a{};
    a.append = plain.prefill();
    expand(ops::kv_store(ctx, {k, v, kv.cells.k, kv.cells.v, in->ctl, pages_of(kv.cells)}, a));
}

void Lowering::emit_norm_rope(const Node &n, Val y) {
    const Node &k_norm = part(n, "k_norm");
    const AttentionShape &shape = *std::get<const AttentionShape *>(part(n, "Q").params);
    const bool queries = n.in.size() > 2;
    NormRopeArgs a{};
    a.rope_dim = int32_t(shape.rope_dim);
    a.base = shape.rope_base;
    a.eps = std::get<float>(k_norm.params);
    ggml_tensor *k = flat(n.in[0]), *q_gate = queries ? flat(n.in[2]) : nullptr;
    const bool axes = plain.images && shape.has_axes();
    a.height_pairs = axes ? shape.rope_sections[1] : 0;
    a.width_pairs = axes ? shape.rope_sections[2] : 0;
    const OpNode both =
        ops::norm_rope(ctx,
                       {k, k_norm.w[0], positions_of(shape), q_gate,
                        queries ? part(n, "q_norm").w[0] : nullptr, axes ? in->axes : nullptr},
                       a);
    if (queries) {
        made({y.graph, y.node, 1}, Form::rows) = both[1];
    }
    store(both[0], flat(n.in[1]), std::get<KvLayer>(n.params));
}

// Attention's own op reads the gates where they lie beside the queries.
ggml_tensor *Lowering::gate_of(Val gate) {
    const Node &n = plain.at(gate);
    return n.op == Op::split_heads ? flat(n.in[0]) : flat(gate);
}

// Adds an op of attention over what a step's rows see, whose plan may be null.
OpNode Lowering::attention(const OpRow<AttentionArgs> &op, const Node &n, ggml_tensor *plan, int32_t layer) {
    const AttendsCommitted *committed = std::get_if<AttendsCommitted>(&n.params);
    const Attends &attends = committed != nullptr ? committed->of : std::get<Attends>(n.params);
    AttentionArgs a{};
    a.first = attends.kv.first;
    a.window = int32_t(attends.shape->window);
    a.max_pages = gpu ? int32_t(plain.cache.max_pages()) : 0;
    a.scale = attends.scale;
    a.softcap = attends.shape->softcap;
    a.committed = committed != nullptr;
    a.block = attends.block ? int32_t(plain.use().n_block) : 0;
    const KvCells &cells = attends.kv.cells;
    std::vector<ggml_tensor *> args = {
        flat(n.in[0]),   n.in.size() > 2 ? gate_of(n.in[2]) : nullptr,         cells.k, cells.v, in->ctl,
        pages_of(cells), n.op == Op::attend && !n.w.empty() ? n.w[0] : nullptr};
    if (plan != nullptr) {
        args.push_back(plan);
        a.layer = layer;
    }
    return op(ctx, args, a);
}

ggml_tensor *Lowering::gathered(const KvCells &cells, ggml_tensor *pool, ggml_type type, uint32_t window) {
    KvGatherArgs gather{};
    gather.n_kv = plain.n_kv;
    gather.out_type = type;
    gather.window = int32_t(window);
    return ops::kv_gather(ctx, {pool, in->ctl, pages_of(cells)}, gather);
}

// The mask {n_kv, T + more} F16 of all rows, of which a prompt over so many cells has its own.
ggml_tensor *Lowering::mask(const AttentionShape &s, uint32_t n_kv, uint32_t more) {
    ggml_tensor *&t = masks_[{stage_index(), s.window, n_kv}];
    if (t == nullptr) {
        MaskArgs a{};
        a.T = int32_t(plain.T + more);
        a.n_kv = n_kv;
        a.window = int32_t(s.window);
        t = ops::prefill_mask(ctx, {in->ctl, row_ends_of(s)}, a);
    }
    return t;
}

ggml_tensor *Lowering::attend_prompt(const Node &n) {
    const Attends &a = std::get<Attends>(n.params);
    const AttentionShape &s = *a.shape;
    const int64_t D = s.head_dim, H = s.n_head;
    const ggml_type type = a.kv.cells.k->type == GGML_TYPE_F32 ? GGML_TYPE_F32 : GGML_TYPE_F16;
    ggml_tensor *q = ggml_reshape_3d(ctx, flat(n.in[0]), D, H, n.T);
    ggml_tensor *keys = gathered(a.kv.cells, a.kv.cells.k, type),
                *values = gathered(a.kv.cells, a.kv.cells.v, type);
    std::vector<ggml_tensor *> made; // {D*H, rows} of one behind the other
    // Where prompts are cut ahead of and behind images too, few rows are attended as ATTEND_ROWS with rows of zeros behind them,
    // so that their bits are the same wherever that was.
    const bool fills = plain.model.images_are_whole();
    const auto is_short = [](const PromptRows &prompt) { return prompt.rows < ATTEND_ROWS; };
    const uint32_t more =
        fills && std::any_of(plain.prompts.begin(), plain.prompts.end(), is_short) ? ATTEND_ROWS : 0;
    int64_t row = 0, cell = 0;
    for (const PromptRows &prompt : plain.prompts) {
        const int64_t n_kv = prompt.n_kv;
        const auto heads = [&](ggml_tensor *t) { // {D, n_kv, Hkv}
            return ggml_view_3d(ctx, t, D, n_kv, s.n_head_kv, t->nb[1], ggml_row_size(type, D),
                                size_t(cell) * t->nb[1]);
        };
        ggml_tensor *K = heads(keys), *V = heads(values), *all = mask(s, prompt.n_kv, more);
        const auto attend = [&](int64_t T) {
            ggml_tensor *some = ggml_view_3d(ctx, q, D, H, T, q->nb[1], q->nb[2], size_t(row) * q->nb[2]);
            const int64_t filled = fills ? std::max(T, int64_t(ATTEND_ROWS)) : T;
            if (filled > T) {
                some = ggml_pad(ctx, some, 0, 0, int(filled - T), 0);
            }
            ggml_tensor *seen = ggml_view_2d(ctx, all, n_kv, filled, all->nb[1], size_t(row) * all->nb[1]);
            ggml_tensor *o = ggml_flash_attn_ext(ctx, ggml_permute(ctx, some, 0, 2, 1, 3), K, V, seen,
                                                 a.scale, 0.0f, s.softcap);
            ggml_prec_set_acc(o, GGML_PREC_F32);
            o = ggml_reshape_2d(ctx, o, D * H, filled);
            made.push_back(filled > T ? ggml_view_2d(ctx, o, D * H, T, o->nb[1], 0) : o);
            row += T;
        };
        const int64_t tail = fills ? 0 : prompt.rows % ATTEND_ROWS, whole = prompt.rows - tail;
        if (whole > 0) {
            attend(whole);
        }
        if (tail > 0) {
            attend(tail);
        }
        cell += n_kv;
    }
    while (made.size() > 1) { // by twos, so that few rows are copied often
        for (size_t i = 0; i < made.size(); i += 2) {
            const bool alone = i + 1 == made.size();
            made[i / 2] = alone ? made[i] : ggml_concat(ctx, made[i], made[i + 1], 1);
        }
        made.resize((made.size() + 1) / 2);
    }
    return made[0]; // {D*H, T}
}

// ---- DeltaNet ----

DeltaShape Lowering::delta_shape(const Node &n) const {
    const DeltaNetShape &s = std::get<Recurs>(n.params).w->shape;
    DeltaShape shape{};
    shape.T = int32_t(n.T);
    shape.R = int32_t(plain.cache.params().n_rows);
    shape.n_slots = int32_t(plain.cache.params().n_sequences);
    shape.Hk = int32_t(s.n_k_heads);
    shape.Hv = int32_t(s.n_v_heads);
    shape.S = int32_t(s.state_size);
    shape.mode = plain.prefill() ? DELTA_APPEND : DELTA_VERIFY;
    shape.n_prompts = int32_t(plain.prompts.size());
    return shape;
}

// ---- experts in host memory ----

// Computes in host memory each row's weighted sum of its experts' results {E, T}. On a CPU `routed` is the route of the
// values x; on a GPU it is what ram_give gives, and x is null.
ggml_tensor *Lowering::host_experts(ggml_tensor *routed, ggml_tensor *x, const Moe &w, int64_t T) {
    RamExpertsArgs a{};
    a.T = int32_t(T);
    a.n_used = int32_t(w.shape.n_used);
    a.activation = w.activation;
    return ops::ram_experts(ctx, {routed, x, w.down, w.gate_up != nullptr ? w.gate_up : w.gate, w.up}, a);
}

ggml_tensor *Lowering::offsets(const ExpertSlots *slots, const ggml_tensor *weight) {
    if (slots == nullptr || weight == nullptr) {
        return nullptr;
    }
    ggml_tensor *table = slots->offsets;
    return ggml_view_1d(ctx, table, table->ne[0], slots->row_of(weight) * table->nb[1]);
}

ggml_tensor *Lowering::counts(const Moe &w) const {
    const ExpertSlots *slots = plain.prefill() ? nullptr : plain.cache.slots_of(w);
    return slots == nullptr ? nullptr : slots->counts;
}

// ---- blocks whose drafts depend on each other ----

ggml_tensor *Lowering::block_node(const Node &n) {
    const Cache &cache = plain.cache;
    const auto ids = [&](ggml_tensor *t) { return ggml_reshape_1d(ctx, t, ggml_nelements(t)); };
    switch (n.op) {
        case Op::block_conv: {
            BlockConvArgs a{};
            a.side = int32_t(std::get<int64_t>(n.params));
            return ops::block_conv(ctx, {values(n.in[0]), flat(n.in[1]), n.w[0], in->ctl}, a);
        }
        case Op::one_of_block: { // {n, blocks}
            ggml_tensor *x = flat(n.in[0]);
            const size_t between = plain.use().n_block * x->nb[1];
            const size_t at = size_t(std::get<int64_t>(n.params)) * x->nb[1];
            return ggml_cont(ctx, ggml_view_2d(ctx, x, n.n[0], n.T, between, at));
        }
        case Op::prior_tokens: {
            PriorArgs a{};
            a.T = int32_t(n.T);
            a.first = int32_t(std::get<int64_t>(n.params));
            a.between = int32_t(plain.use().n_block) - 1;
            a.n_vocab = int32_t(plain.model.hparams().n_vocab);
            return ops::prior_tokens(ctx, {in->tokens, cache.drafts(), in->ctl}, a);
        }
        case Op::candidates: { // {k * T, 3 and room} I32
            CandidatesArgs a{};
            a.K = int32_t(std::get<int64_t>(n.params));
            return ops::candidates(ctx, {flat(n.in[0]), n.w.empty() ? nullptr : n.w[0]}, a);
        }
        case Op::table_rows: {
            ggml_tensor *given = rows(n.in[0]);
            if (const int64_t *by = std::get_if<int64_t>(&n.params)) { // a plane of candidates
                given = ggml_view_1d(ctx, given, given->ne[0], size_t(*by) * given->nb[1]);
            }
            return ggml_get_rows(ctx, n.w[0], ids(given));
        }
        case Op::confidence:
            return expand(ops::confidence(ctx, {flat(n.in[0]), flat(n.in[1]), flat(n.in[2]), n.w[0],
                                                n.w.size() > 1 ? n.w[1] : nullptr, in->ctl, cache.lists()}));
        default: {
            const Links &links = std::get<Links>(n.params);
            LatticeArgs a{};
            a.ahead = links.ahead;
            a.chooses = links.chooses;
            std::vector<ggml_tensor *> args = {rows(n.in[0])};
            for (const size_t i : {1, 2, 3}) {
                args.push_back(flat(n.in[i]));
            }
            args.push_back(n.in.size() > 4 ? flat(n.in[4]) : nullptr);
            args.insert(args.end(), {in->ctl, cache.drafts(), cache.given(), cache.lists()});
            return expand(ops::lattice(ctx, args, a));
        }
    }
}

// ---- rows of prompts ----

ggml_tensor *Lowering::of_prompts(ggml_tensor *input) const {
    return ggml_view_1d(ctx, input, int64_t(plain.prompts.size()), 0);
}

ggml_tensor *Lowering::last_rows(ggml_tensor *x) {
    if (plain.prompts.size() == 1) {
        return ggml_view_2d(ctx, x, x->ne[0], 1, x->nb[1], size_t(x->ne[1] - 1) * x->nb[1]);
    }
    return ggml_get_rows(ctx, x, of_prompts(in->last_rows));
}

// Moves all rows down by one, and puts those that were kept in the places of sequences' first ones.
ggml_tensor *Lowering::previous(ggml_tensor *h) {
    const int64_t T = h->ne[1], n = int64_t(plain.prompts.size());
    ggml_tensor *kept = ggml_get_rows(ctx, plain.cache.hidden(), of_prompts(in->hidden_from)); // {E, prompts}
    if (T == n) {
        return kept;
    }
    ggml_tensor *first = n == 1 ? kept : ggml_view_2d(ctx, kept, h->ne[0], 1, kept->nb[1], 0);
    ggml_tensor *moved =
        ggml_concat(ctx, first, ggml_view_2d(ctx, h, h->ne[0], T - 1, h->nb[1], 0), 1); // {E, T}
    if (n > 1) {
        expand(ggml_set_rows(ctx, moved, kept, of_prompts(in->first_rows)));
    }
    return moved;
}

void Lowering::keep(Val h) {
    expand(ggml_set_rows(ctx, plain.cache.hidden(), values(h), in->hidden_to));
}

// ---- nodes ----

void Lowering::emit(int32_t node) {
    const Node &n = plain.nodes[size_t(node)];
    const Val y = {&plain, node, 0};
    const auto set = [&](ggml_tensor *t) { made(y, Form::rows) = t; };
    const auto real = [&] { return std::get<float>(n.params); };
    const Cache &cache = plain.cache;
    switch (n.op) {
        case Op::embed: set(with_images(embedding(n.w[0]))); break;
        case Op::embed_text: set(embedding(n.w[0])); break;
        case Op::image_rows: set(with_images(flat(n.in[0]))); break;
        case Op::kept_hidden: set(ggml_get_rows(ctx, cache.hidden(), in->hidden_from)); break;
        case Op::previous: set(previous(values(n.in[0]))); break;
        case Op::norm: set(norm_rows(flat(n.in[0]), n.w[0], real())); break;
        case Op::head_norm:
            set(norm_rows(by_heads(n.in[0], n.w[0]->ne[0]), n.w[0], real())); // {D, heads, T}
            break;
        case Op::unit_norm: {
            const UnitNorm &norm = std::get<UnitNorm>(n.params);
            set(ggml_rms_norm(ctx, by_heads(n.in[0], norm.D), norm.eps)); // {D, heads, T}
            break;
        }
        case Op::add: set(ggml_add(ctx, values(n.in[1]), values(n.in[0]))); break;
        case Op::mul: set(ggml_mul(ctx, flat(n.in[0]), flat(n.in[1]))); break;
        case Op::silu: set(ggml_silu(ctx, flat(n.in[0]))); break;
        case Op::gated: {
            ggml_tensor *gate = rows(n.in[1]);
            if ((gate->ne[0] != n.n[0] && gate->ne[0] != 1) || gate->ne[2] != 1) { // of heads, or of one
                gate = ggml_cont_2d(ctx, gate, n.n[0], n.T); // {D*H, T}
            }
            set(ggml_mul(ctx, flat(n.in[0]), ggml_sigmoid(ctx, gate)));
            break;
        }
        case Op::concat: set(ggml_concat(ctx, rows(n.in[0]), rows(n.in[1]), 0)); break;
        case Op::split_heads: {
            const AttentionShape &s = *std::get<const AttentionShape *>(n.params);
            const size_t D = s.head_dim, H = s.n_head, f = sizeof(float);
            ggml_tensor *both = flat(n.in[0]);
            for (int32_t half : {0, 1}) { // {D, H, T}
                made({&plain, node, half}, Form::rows) = ggml_view_3d(
                    ctx, both, int64_t(D), int64_t(H), n.T, 2 * D * f, 2 * D * H * f, size_t(half) * D * f);
            }
            break;
        }
        case Op::rope: {
            const AttentionShape &s = *std::get<const AttentionShape *>(n.params);
            ggml_tensor *factors = n.w.empty() ? nullptr : n.w[0];
            set(rotated(by_heads(n.in[0], s.head_dim), factors, s)); // {D, heads, T}
            break;
        }
        case Op::kv_write: store(flat(n.in[0]), flat(n.in[1]), std::get<KvLayer>(n.params)); break;
        case Op::attend:
        case Op::gated_attend: {
            const bool block = std::get<Attends>(n.params).block;
            set(plain.prefill() ? attend_prompt(n)
                                : attention(block ? ops::block_attention : ops::attention, n, nullptr, 0));
            break;
        }
        case Op::row_scores: {
            const Attends &attends = std::get<Attends>(n.params);
            RowScoresArgs a{};
            a.scale = attends.scale;
            a.softcap = attends.shape->softcap;
            a.on_gpu = gpu;
            const KvCells &cells = attends.kv.cells;
            expand(ops::row_scores(ctx, {flat(n.in[0]), cells.k, in->ctl, pages_of(cells), n.w[0]}, a).node);
            break;
        }
        case Op::attend_committed: set(attention(ops::committed_attention, n, nullptr, 0)); break;
        case Op::conv: {
            const Recurs &r = std::get<Recurs>(n.params);
            ConvArgs a{};
            a.shape = delta_shape(n);
            set(ops::deltanet_conv(ctx, {flat(n.in[0]), n.w[0], r.state.window, r.state.log, in->ctl}, a));
            break;
        }
        case Op::delta_rule: {
            const Recurs &r = std::get<Recurs>(n.params);
            DeltaArgs a{};
            a.shape = delta_shape(n);
            ggml_tensor *qkv = flat(n.in[0]), *alpha = flat(n.in[1]), *beta = flat(n.in[2]);
            set(delta_op(a.shape)(
                ctx, {qkv, alpha, beta, n.w[0], n.w[1], r.state.state, r.state.log, in->ctl}, a));
            break;
        }
        case Op::scale: set(ggml_scale(ctx, values(n.in[0]), real())); break;
        case Op::softcap:
            set(ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, flat(n.in[0]), 1.0f / real())), real()));
            break;
        case Op::first: {
            ggml_tensor *x = flat(n.in[0]);
            set(ggml_cont(ctx, ggml_view_2d(ctx, x, n.n[0], n.T, x->nb[1], 0))); // {n, T}
            break;
        }
        case Op::slice: {
            ggml_tensor *x = flat(n.in[0]);
            const size_t at = size_t(std::get<int64_t>(n.params)) * x->nb[0];
            ggml_tensor *some = ggml_view_2d(ctx, x, n.n[0], n.T, x->nb[1], at); // {n, T}
            set(gpu && !plain.prefill() ? some
                                        : ggml_cont(ctx, some)); // a step's packs take rows that lie apart
            break;
        }
        case Op::last: set(last_rows(flat(n.in[0]))); break; // {n, prompts}
        case Op::own_rows: set(flat(n.in[0])); break;
        case Op::spread: { // a token that the drafter does not have gets a logit that nothing chooses
            ggml_tensor *x = flat(n.in[0]), *all = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 1, n.n[0], n.T);
            all = ggml_set_rows(ctx, ggml_fill(ctx, all, NEVER_CHOSEN),
                                ggml_reshape_3d(ctx, x, 1, x->ne[0], n.T), n.w[0]);
            set(ggml_reshape_2d(ctx, all, n.n[0], n.T)); // {V, T}
            break;
        }
        case Op::cluster_logits: {
            ClusterLogitsArgs a{};
            a.size = int32_t(std::get<int64_t>(n.params));
            a.on_gpu = gpu;
            set(ops::cluster_logits(ctx, {flat(n.in[0]), rows(n.in[1]), n.w[0], n.w[1]}, a)); // {V, T}
            break;
        }
        case Op::keep_hidden:
            if (plain.prefill()) {
                ggml_tensor *last = last_rows(values(n.in[0]));
                expand(ggml_set_rows(ctx, cache.hidden(), last, of_prompts(in->hidden_to)));
            } else {
                keep(n.in[0]);
            }
            break;
        case Op::compute: expand(rows(n.in[0])); break;
        case Op::choose: {
            const Chooses &chooses = std::get<Chooses>(n.params);
            ChooseArgs a{};
            a.ahead = chooses.ahead;
            if (chooses.row != ALL_ROWS) {
                a.first = chooses.row;
                a.between = int32_t(plain.use().n_block) - 1;
            }
            set(expand(ops::choose(ctx, {flat(n.in[0]), in->ctl, cache.drafts(), cache.given()}, a)));
            break;
        }
        case Op::keep_best: {
            TopkArgs a{};
            a.k = int32_t(cache.params().n_top);
            expand(ops::topk(ctx, {flat(n.in[0]), in->ctl, cache.lists()}, a));
            break;
        }
        case Op::block_conv:
        case Op::one_of_block:
        case Op::prior_tokens:
        case Op::candidates:
        case Op::table_rows:
        case Op::confidence:
        case Op::lattice: set(block_node(n)); break;
        case Op::norm_rope: emit_norm_rope(n, y); break;
        case Op::gated_norm: { // {S, H, T}
            const int64_t S = n.w[0]->ne[0], H = n.n[0] / S;
            ggml_tensor *x = norm_rows(ggml_reshape_3d(ctx, flat(n.in[0]), S, H, n.T), n.w[0], real());
            set(ggml_mul(ctx, x, ggml_silu(ctx, ggml_reshape_3d(ctx, flat(n.in[1]), S, H, n.T))));
            break;
        }
        default: emit_own(n, y);
    }
}

} // namespace luce
