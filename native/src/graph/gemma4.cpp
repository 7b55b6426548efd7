// gemma4 (Gemma 4, the text part of all sizes), whole: hyperparameters and checked tensors from a file's names, which follow
// llama.cpp's GGUF conventions, and the graph of a step at the end.
//
// Layers look back over a window (sliding) or over all (global), with heads of their own size. Each part of a block is normed
// ahead and behind, and a number of its own scales the stream behind a block. In the small models the last layers have no
// keys and values, but read those of the last layer of their kind that has; and each layer adds what it makes of an embedding
// of its own of each token (per-layer embeddings).
#include "graph/gemma4.h"

#include "graph/blocks.h"
#include "graph/keys.h"

#include <cmath>

namespace luce {
namespace {

struct Gemma4 : OwnWeights {
    std::vector<Gemma4Block> blocks;
    int64_t P = 0; // values of a token's embedding for one layer; 0: there are none
    ggml_tensor *ple_embd = nullptr; // {P*L, V} of all layers
    ggml_tensor *ple_proj = nullptr; // {E, P*L}
    ggml_tensor *ple_norm = nullptr; // {P}
};

} // namespace

// ---- hyperparameters ----

HParams gemma4_hparams(const GgufFile &file) {
    const std::string p = prefix_of(file);
    const auto u = [&](const char *key, int64_t lo, int64_t hi) {
        return uint32_t(file.integer(p + key, lo, hi));
    };
    check_rope_scaling(file);
    HParams hp;
    hp.n_layer = u("block_count", 1, 1024);
    hp.n_ctx_train = u("context_length", 1, int64_t(1) << 30);
    hp.n_embd = u("embedding_length", 1, 1 << 20);
    hp.embedding_scale = std::sqrt(float(hp.n_embd));
    hp.rms_eps = float(file.number(p + "attention.layer_norm_rms_epsilon"));
    const std::string cap = p + "final_logit_softcapping";
    hp.logit_softcap = file.find(cap) != nullptr ? float(file.number(cap)) : 0;
    if (!(hp.logit_softcap >= 0)) {
        fail(LUCE_E_FILE, "%s: key %s is %g, expected no negative number", file.path().c_str(), cap.c_str(),
             double(hp.logit_softcap));
    }
    if (file.integer_or(p + "expert_count", 0, 0, 1 << 16) > 0) {
        hp.moe.n_expert = u("expert_count", 1, 1 << 16);
        hp.moe.n_used = u("expert_used_count", 1, hp.moe.n_expert);
        hp.moe.n_ff = u("expert_feed_forward_length", 1, 1 << 20);
    }
    const std::vector<uint32_t> n_head = per_block(file, p + "attention.head_count", hp.n_layer, 1, 4096);
    const std::vector<uint32_t> n_head_kv =
        per_block(file, p + "attention.head_count_kv", hp.n_layer, 1, 4096);
    const std::vector<uint32_t> sliding =
        per_block(file, p + "attention.sliding_window_pattern", hp.n_layer, 0, 1);
    // No key says how rows of an image see each other: in models without these embeddings those of one image all do, in
    // sliding layers.
    const bool small = file.integer_or(p + "embedding_length_per_layer_input", 0, 0, 1 << 20) > 0;
    hp.image_rows = small ? ImageRows::as_text : ImageRows::see_each_other;
    for (uint32_t il = 0; il < hp.n_layer; il++) {
        const std::string swa = sliding[il] != 0 ? "_swa" : "";
        AttentionShape a;
        a.n_head = n_head[il];
        a.n_head_kv = n_head_kv[il];
        a.head_dim = u(("attention.key_length" + swa).c_str(), 1, 1024);
        a.value_dim = u(("attention.value_length" + swa).c_str(), 1, 1024);
        a.rope_dim = u(("rope.dimension_count" + swa).c_str(), 0, a.head_dim);
        a.rope_base = float(file.number(p + "rope.freq_base" + swa));
        a.window = sliding[il] != 0 ? u("attention.sliding_window", 1, int64_t(1) << 30) : 0;
        a.scale = 1;
        hp.mixers.emplace_back(a);
    }
    return hp;
}

namespace {

// The last shared_kv_layers layers read the cells of the last one of their kind ahead of them all.
uint32_t layers_with_cells(const GgufFile &file, uint32_t n_layer) {
    const std::string key = prefix_of(file) + "attention.shared_kv_layers";
    return n_layer - uint32_t(file.integer_or(key, 0, 0, int64_t(n_layer) - 1));
}

HParams trunk_hparams(const GgufFile &file) {
    HParams hp = gemma4_hparams(file);
    const uint32_t n_own = layers_with_cells(file, hp.n_layer);
    const auto slides = [&](uint32_t il) { return std::get<AttentionShape>(hp.mixers[il]).window > 0; };
    for (uint32_t il = 0; il < hp.n_layer; il++) {
        uint32_t source = std::min(il, n_own - 1);
        while (il >= n_own && source > 0 && slides(source) != slides(il)) {
            source--;
        }
        hp.cells_of.push_back(source);
    }
    return hp;
}

} // namespace

// ---- tensors ----

namespace {

Attention read_attention(WeightReader &r, const std::string &p, const AttentionShape &shape, int64_t E,
                         bool has_cells, uint32_t il) {
    const int64_t D = shape.head_dim, H = shape.n_head, Hkv = shape.n_head_kv;
    Attention a{};
    a.shape = shape;
    const Cut of_kv = {ROWS.axis, 1, shape.kv_copies};
    a.q = r.matrix(p + "attn_q.weight", E, D * H, ROWS);
    a.q_norm = r.f32(p + "attn_q_norm.weight", {D});
    a.out = r.matrix(p + "attn_output.weight", D * H, E, COLUMNS);
    if (shape.window == 0) {
        a.rope_factors = r.f32_of_layers("rope_freqs.weight", {shape.rope_dim / 2}, il);
    }
    if (has_cells) {
        a.k = r.matrix(p + "attn_k.weight", E, D * Hkv, of_kv);
        a.v = r.matrix_or_none(p + "attn_v.weight", E, D * Hkv, of_kv);
        a.k_norm = r.f32(p + "attn_k_norm.weight", {D});
    } else { // published files may hold them
        for (const char *unused : {"attn_k.weight", "attn_v.weight", "attn_k_norm.weight"}) {
            r.forget(p + unused);
        }
    }
    return a;
}

// E_FILE: none of the first n_own layers, which have keys and values, is of the kind of layer il, which has none, or the last
// of them has other heads of these.
void check_has_source(const GgufFile &file, const HParams &hp, uint32_t n_own, uint32_t il) {
    const auto shape = [&](uint32_t layer) { return std::get<AttentionShape>(hp.mixers[layer]); };
    uint32_t source = n_own;
    while (source > 0 && shape(source - 1).window != shape(il).window) {
        source--;
    }
    if (source == 0) {
        fail(LUCE_E_FILE,
             "%s: keys shared_kv_layers and sliding_window_pattern: layer %u, a %s one, has no layer to read",
             file.path().c_str(), il, shape(il).window > 0 ? "sliding" : "global");
    }
    if (shape(source - 1).n_head_kv != shape(il).n_head_kv) {
        fail(LUCE_E_FILE,
             "%s: key attention.head_count_kv is %u of layer %u, which reads those of layer %u, expected %u",
             file.path().c_str(), shape(il).n_head_kv, il, source - 1, shape(source - 1).n_head_kv);
    }
}

} // namespace

Gemma4Layer read_gemma4_layer(WeightReader &r, const HParams &hp, uint32_t il, uint32_t n_ff, int64_t P,
                              bool has_cells) {
    const std::string p = "blk." + std::to_string(il) + ".";
    const int64_t E = hp.n_embd;
    const auto norm = [&](const char *name) { return r.f32(p + name + ".weight", {E}); };
    Block b{};
    Gemma4Block g{};
    b.attn_norm = norm("attn_norm");
    b.mixer = read_attention(r, p, std::get<AttentionShape>(hp.mixers[il]), E, has_cells, il);
    g.attn_post_norm = norm("post_attention_norm");
    b.post_norm = norm("ffn_norm");
    if (hp.moe.n_expert > 0) {
        Moe moe = read_mixture(r, p, hp.moe, E, r.in_ram(il), /*scaled=*/true);
        moe.activation = GELU;
        b.ffn = moe;
        g.dense = read_ffn(r, p, E, n_ff);
        g.router_norm = r.f32(p + "ffn_gate_inp.scale", {E});
        g.experts_norm = norm("pre_ffw_norm_2");
        g.dense_post_norm = norm("post_ffw_norm_1");
        g.experts_post_norm = norm("post_ffw_norm_2");
    } else {
        b.ffn = read_ffn(r, p, E, n_ff);
    }
    g.ffn_post_norm = norm("post_ffw_norm");
    if (P > 0) {
        g.ple_gate = r.matrix(p + "inp_gate.weight", E, P);
        g.ple_out = r.matrix(p + "proj.weight", P, E);
        g.ple_post_norm = norm("post_norm");
    }
    g.scale = r.scalar(p + "layer_output_scale.weight");
    return {b, g};
}

namespace {

Weights gemma4_trunk(WeightReader &r, const HParams &hp) {
    const GgufFile &file = r.file();
    const std::string keys = prefix_of(file);
    const int64_t E = hp.n_embd, L = hp.n_layer;
    const auto own = std::make_shared<Gemma4>();
    own->P = file.integer_or(keys + "embedding_length_per_layer_input", 0, 0, 1 << 20);
    const std::vector<uint32_t> n_ff = per_block(file, keys + "feed_forward_length", hp.n_layer, 1, 1 << 20);
    const uint32_t n_own = layers_with_cells(file, hp.n_layer);

    const uint32_t n_ranks = r.n_ranks();
    if (n_ranks > 1 && own->P > 0) {
        fail(LUCE_E_UNSUPPORTED,
             "%s has embeddings of each layer: luce does not share matrices of such models out among devices "
             "yet: give each device layers of its own",
             file.path().c_str());
    }
    const HParams of_rank = rank_hparams(file, hp, n_ranks);
    Weights w{};
    for (uint32_t rank = 0; rank < n_ranks; rank++) {
        r.take_rank(rank);
        w.token_embd = r.table("token_embd.weight", E, hp.n_vocab);
        w.rank_embd.push_back(w.token_embd);
        for (uint32_t il = 0; il < hp.n_layer; il++) {
            if (il >= n_own) {
                check_has_source(file, hp, n_own, il);
            }
            const uint32_t ff =
                rank_part(file, n_ranks, "values between the products of a feed-forward layer", n_ff[il]);
            const Gemma4Layer layer = read_gemma4_layer(r, of_rank, il, ff, own->P, il < n_own);
            w.blocks.push_back(layer.block);
            own->blocks.push_back(layer.own);
        }
    }
    r.output(w, E, hp.n_vocab);
    r.forget("rope_freqs.weight"); // no layer may be global
    if (own->P > 0) {
        own->ple_embd = r.table("per_layer_token_embd.weight", own->P * L, hp.n_vocab);
        own->ple_proj = r.matrix("per_layer_model_proj.weight", E, own->P * L);
        own->ple_norm = r.f32("per_layer_proj_norm.weight", {own->P});
    }
    w.own = own;
    return w;
}

// ---- the graph: T rows x of E values pass through blocks of attention and a gated feed-forward layer, or a mixture beside one ----

Val rotated(Val heads, ggml_tensor *norm, const Attention &w, float eps) {
    return rope(head_norm(heads, norm, eps), w.shape, w.rope_factors);
}

// Attention of rows x {E, T}, which are normed -> {E, T}. `cells` are those that layers of this kind read: a layer with K of its
// own writes its own ahead.
Val attention(Val x, const Attention &w, const KvLayer &kv, float eps, Val &cells) {
    const int64_t D = w.shape.head_dim;
    Val q;
    if (!w.has_cells()) {
        q = matmul(x, w.q); // {D*H, T}
    } else {
        std::vector<ggml_tensor *> weights = {w.q, w.k};
        if (w.v != nullptr) {
            weights.push_back(w.v);
        }
        const std::vector<Val> qkv = matmuls(x, weights); // {D*H, T}, {D*Hkv, T}, and the same or none
        q = qkv[0];
        cells = kv_write(kv, rotated(qkv[1], w.k_norm, w, eps), unit_norm(qkv.back(), D, eps));
    }
    return matmul(attend(gemma4_queries(q, w, eps), cells, w.shape), w.out);
}

// What is summed of a feed-forward part of a stream x {E, T}: of its dense layer, and of the experts beside it.
Val dense_part(Val x, const Block &block, const Gemma4Block &own, float eps) {
    const Ffn &dense = block.moe() == nullptr ? *block.dense() : own.dense;
    return ffn(norm(x, block.post_norm, eps), dense, GELU);
}
Val experts_part(Val x, const Block &block, const Gemma4Block &own, float eps) {
    const Moe &moe = *block.moe();
    const float by = 1.0f / std::sqrt(float(x.graph->width(x)));
    const Val logits = matmul(scale(norm(x, own.router_norm, eps), by), moe.router); // {n, T}
    return mixture(norm(x, own.experts_norm, eps), logits, moe);
}

// The stream behind a block, of these sums, of which that of experts may be absent.
Val behind_ffn(Val x, Val dense, Val experts, const Gemma4Block &own, float eps, Val of_layer) {
    const Val y = experts.graph == nullptr
                      ? dense
                      : add(norm(dense, own.dense_post_norm, eps), norm(experts, own.experts_post_norm, eps));
    x = add(x, norm(y, own.ffn_post_norm, eps));
    if (of_layer.graph != nullptr) {
        const Val made = matmul(glu(matmul(x, own.ple_gate), of_layer, GELU), own.ple_out);
        x = add(x, norm(made, own.ple_post_norm, eps));
    }
    return scale(x, own.scale);
}

} // namespace

Val gemma4_queries(Val q, const Attention &w, float eps) {
    return rotated(q, w.q_norm, w, eps);
}

Val gemma4_behind_attention(Val x, Val mixed, const Block &block, const Gemma4Block &own, float eps,
                            Val of_layer) {
    x = add(x, norm(mixed, own.attn_post_norm, eps));
    const Val dense = dense_part(x, block, own, eps);
    const Val experts = block.moe() == nullptr ? Val{} : experts_part(x, block, own, eps);
    return behind_ffn(x, dense, experts, own, eps, of_layer);
}

namespace {

// Each layer's own embeddings of a step's tokens {P*L, T}: those of the table, and what the model's make of theirs, x {E, T}.
// A row of an image has the first token's in the table.
Val layer_embeddings(Val x, const Gemma4 &w, float eps) {
    const float E = float(x.graph->width(x)), P = float(w.P);
    const Val made = head_norm(scale(matmul(x, w.ple_proj), 1 / std::sqrt(E)), w.ple_norm, eps);
    return scale(add(made, scale(embed_text(*x.graph, w.ple_embd), std::sqrt(P))), 1 / std::sqrt(2.0f));
}

void build_gemma4(Plain &g) {
    const Weights &w = g.model.weights();
    const Gemma4 &own = static_cast<const Gemma4 &>(*w.own);
    const float eps = g.model.hparams().rms_eps;
    Stream x; // {E, T}
    for (uint32_t rank = 0; rank < g.model.n_ranks(); rank++) {
        g.enter(0, rank);
        // Rows of images are not scaled.
        x.push_back(image_rows(scale(embed_text(g, w.rank_embd[rank]), g.model.hparams().embedding_scale)));
    }
    const Val embeddings = own.P > 0 ? layer_embeddings(x[0], own, eps) : Val{};
    std::map<std::pair<uint32_t, bool>, Val>
        cells; // those that sliding layers, and global ones, of a rank read last
    std::vector<Val> outputs = {x.back()}; // the stream ahead of the layers, and behind each
    const auto mixer = [&](Val x, uint32_t i) {
        const Attention &a = *w.blocks[i].attention();
        return attention(norm(x, w.blocks[i].attn_norm, eps), a, {g.cache.kv(i)}, eps,
                         cells[{i / g.model.hparams().n_layer, a.shape.window > 0}]);
    };
    const auto dense = [&](Val x, uint32_t i) { return dense_part(x, w.blocks[i], own.blocks[i], eps); };
    const auto experts = [&](Val x, uint32_t i) { return experts_part(x, w.blocks[i], own.blocks[i], eps); };
    for (uint32_t il = 0; il < g.model.hparams().n_layer; il++) {
        if (g.enter(il)) {
            const Stream mixed = sum_of_parts(x, il, mixer);
            for (uint32_t rank = 0; rank < x.size(); rank++) {
                g.enter(il, rank);
                const Gemma4Block &block = own.blocks[g.model.block_of(il, rank)];
                x[rank] = add(x[rank], norm(mixed[rank], block.attn_post_norm, eps));
            }
            const Stream of_dense = sum_of_parts(x, il, dense);
            const Stream of_experts =
                w.blocks[il].moe() == nullptr ? Stream(x.size()) : sum_of_parts(x, il, experts);
            const Val of_layer = own.P > 0 ? slice(embeddings, il * own.P, own.P) : Val{}; // {P, T}
            for (uint32_t rank = 0; rank < x.size(); rank++) {
                g.enter(il, rank);
                x[rank] = behind_ffn(x[rank], of_dense[rank], of_experts[rank],
                                     own.blocks[g.model.block_of(il, rank)], eps, of_layer);
            }
            named(x.back(), "l_out-" + std::to_string(il));
        }
        outputs.push_back(x.back());
    }
    end_step(x, outputs);
}

} // namespace

const Architecture GEMMA4 = {"gemma4",          /*layer_nodes=*/128,   trunk_hparams,
                             gemma4_trunk,      /*read_head=*/nullptr, build_gemma4,
                             /*has_ranks=*/true};

} // namespace luce
