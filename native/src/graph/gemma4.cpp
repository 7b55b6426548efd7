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
    a.q = r.matrix(p + "attn_q.weight", E, D * H);
    a.q_norm = r.f32(p + "attn_q_norm.weight", {D});
    a.out = r.matrix(p + "attn_output.weight", D * H, E);
    if (shape.window == 0) {
        a.rope_factors = r.f32_of_layers("rope_freqs.weight", {shape.rope_dim / 2}, il);
    }
    if (has_cells) {
        a.k = r.matrix(p + "attn_k.weight", E, D * Hkv);
        a.v = r.matrix_or_none(p + "attn_v.weight", E, D * Hkv);
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

    Weights w{};
    w.token_embd = r.table("token_embd.weight", E, hp.n_vocab);
    w.output_norm = r.f32("output_norm.weight", {E});
    w.output = r.matrix_or_none("output.weight", E, hp.n_vocab);
    if (w.output == nullptr) {
        w.output = r.tied("token_embd.weight", w.token_embd);
    }
    r.forget("rope_freqs.weight"); // no layer may be global
    if (own->P > 0) {
        own->ple_embd = r.table("per_layer_token_embd.weight", own->P * L, hp.n_vocab);
        own->ple_proj = r.matrix("per_layer_model_proj.weight", E, own->P * L);
        own->ple_norm = r.f32("per_layer_proj_norm.weight", {own->P});
    }
    for (uint32_t il = 0; il < hp.n_layer; il++) {
        if (il >= n_own) {
            check_has_source(file, hp, n_own, il);
        }
        const Gemma4Layer layer = read_gemma4_layer(r, hp, il, n_ff[il], own->P, il < n_own);
        w.blocks.push_back(layer.block);
        own->blocks.push_back(layer.own);
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

// The feed-forward part of a stream x {E, T} -> {E, T}, without the norm behind it.
Val feed_forward(Val x, const Block &block, const Gemma4Block &own, float eps) {
    const Val normed = norm(x, block.post_norm, eps);
    if (block.moe() == nullptr) {
        return ffn(normed, *block.dense(), GELU);
    }
    const Moe &moe = *block.moe();
    const float by = 1.0f / std::sqrt(float(x.graph->width(x)));
    const Val logits = matmul(scale(norm(x, own.router_norm, eps), by), moe.router); // {n, T}
    const Val experts = mixture(norm(x, own.experts_norm, eps), logits, moe);
    return add(norm(ffn(normed, own.dense, GELU), own.dense_post_norm, eps),
               norm(experts, own.experts_post_norm, eps));
}

} // namespace

Val gemma4_queries(Val q, const Attention &w, float eps) {
    return rotated(q, w.q_norm, w, eps);
}

Val gemma4_behind_attention(Val x, Val mixed, const Block &block, const Gemma4Block &own, float eps,
                            Val of_layer) {
    x = add(x, norm(mixed, own.attn_post_norm, eps));
    x = add(x, norm(feed_forward(x, block, own, eps), own.ffn_post_norm, eps));
    if (of_layer.graph != nullptr) {
        const Val y = matmul(glu(matmul(x, own.ple_gate), of_layer, GELU), own.ple_out);
        x = add(x, norm(y, own.ple_post_norm, eps));
    }
    return scale(x, own.scale);
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
    // Rows of images are not scaled.
    Val x = image_rows(scale(embed_text(g, w.token_embd), g.model.hparams().embedding_scale)); // {E, T}
    const Val embeddings = own.P > 0 ? layer_embeddings(x, own, eps) : Val{};
    std::map<bool, Val> cells; // those that sliding layers, and global ones, read last
    std::vector<Val> outputs; // of the blocks
    for (uint32_t il = 0; il < g.model.hparams().n_layer; il++) {
        if (g.enter(il)) {
            const Block &block = w.blocks[il];
            const Attention &mixer = *block.attention();
            const Val mixed = attention(norm(x, block.attn_norm, eps), mixer, {g.cache.kv(il)}, eps,
                                        cells[mixer.shape.window > 0]);
            const Val of_layer = own.P > 0 ? slice(embeddings, il * own.P, own.P) : Val{}; // {P, T}
            x = gemma4_behind_attention(x, mixed, block, own.blocks[il], eps, of_layer);
            named(x, "l_out-" + std::to_string(il));
        }
        outputs.push_back(x);
    }
    end_step(x, outputs);
}

} // namespace

const Architecture GEMMA4 = {"gemma4",     /*layer_nodes=*/128,   trunk_hparams,
                             gemma4_trunk, /*read_head=*/nullptr, build_gemma4,
                             /*has_ranks=*/false};

} // namespace luce
