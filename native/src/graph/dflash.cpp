// Reads a DFlash, DFlash2 or DSpark drafter from a file's names to hyperparameters and checked tensors. It reads
// llama.cpp's layout (architecture dflash) and the older ones (dflash-draft, which the target's architecture and a dash
// may precede), whose keys may have `dflash.` before their name and whose tensors may begin with it. Nothing that a file
// leaves out is guessed: what it has no key for is as its target has it, or in the older layouts as the checkpoints have it
// that they are made of. What luce does not implement is refused by name: dropped in silence, it would show as low
// acceptance and nothing else.
//
// The graphs stand at the end:
//   context   F = RMS(fc [the residual stream where it is tapped]) * hidden_norm of each committed position; a layer's K and V
//             are k_norm(Wk F), rotated to the position, and Wv F, without the layer's own norm
//   block     rows [anchor, mask, mask ..] at the anchor's position and those after it; a layer's rows see the context
//             and, where it is not causal, all of the block, and a layer may have sinks; row i predicts the token at its own
//             position, or where the anchor's row drafts too, at the next one
//   DFlash2   has convolutions over a block's rows around attention and FFN, and a selector: of each row the K best logits
//             z, of which one is taken by z(b) + A[a] . U . B[b] behind the token a of the row before, U of the row itself
//   DSpark    has a Markov head: W2 W1[a] is added to a row's logits, behind the token a of the row before. Its chain is
//             chosen of all of the vocabulary, and its lists are those of a selector with W1 for A, W2 for B, 1 for U. A
//             confidence head may say how likely a draft is right behind each candidate of the row before
#include "graph/dflash.h"

#include "graph/blocks.h"
#include "ops/shapes.h"

#include <cmath>
#include <optional>

namespace luce {
namespace {

// A Markov head's lists have so many candidates of each depth.
constexpr int64_t MARKOV_CANDIDATES = 16;

// A convolution over a block's rows ahead of a sublayer, and another behind it. What a row adds to both kernels is computed
// of the sublayer's input.
struct BlockConv {
    ggml_tensor *base; // {E, taps, 2}; null: there is none
    ggml_tensor *added; // {E, 2*taps*E/G}
};

// A layer of a DFlash drafter has attention without a gate, over context rows and the block.
struct DFlashLayer {
    Attention attention;
    bool causal; // it says whether a block's rows see only those before them, or all of the block
    ggml_tensor *attn_norm; // {E}
    ggml_tensor *ffn_norm; // {E}
    Ffn ffn;
    BlockConv attn_conv, ffn_conv;
};

// How a draft depends on the one before it: by a product of what two tables have of both tokens (LatticeArgs).
struct Pairs {
    ggml_tensor *before; // {R, V}: A or W1
    ggml_tensor *behind; // {R, rows of d2t or V}: B or W2
    ggml_tensor *gates; // {E, R}; null: ones
    ggml_tensor
        *all; // `behind` as a matrix: the chain is chosen of all of the vocabulary. Null: of the K best
    uint32_t k; // K
    // A confidence head, or null: weights of the state {E}, or of that and of what a token adds {E + R}; {1} or null.
    ggml_tensor *confidence = nullptr, *bias = nullptr;
};

// DFlash is a block-diffusion drafter. The keys and values of committed positions come from outputs of the trunk's
// layers in `taps`. One forward over [anchor, mask, mask ..] drafts a whole block.
struct DFlash : Drafter {
    std::vector<uint32_t> taps; // they rise; t is the stream behind t blocks of the trunk: 0 the embeddings
    float rms_eps;
    float embedding_scale; // it scales the block's embeddings
    float logit_scale; // it scales logits
    float softcap; // it bounds them then; 0 means that nothing does
    ggml_tensor *fc; // {n_taps*E, E}
    ggml_tensor *hidden_norm; // {E}
    std::vector<DFlashLayer> layers;
    ggml_tensor *norm; // {E}
    // Embedding {E, V} and output {E, rows of d2t or V} are the drafter's own, or the trunk's.
    ggml_tensor *token_embd;
    // {rows of output} I64: the target's token of each row; null means all of the vocabulary.
    ggml_tensor *d2t;
    std::optional<Pairs> pairs; // conditional candidates

    void feed(Plain &g, const Seen &seen) const override;
    void draft(Plain &g) const override;

private:
    template <typename Sublayer> Val convolved(Val x, const BlockConv &conv, const Sublayer &sublayer) const;
    void choose_by_pairs(Val h, Val logits, Val gates) const;
    // Whether candidates are listed, by which others than the best are had too. Without `all` they are chosen of lists.
    bool lists(const Plain &g) const { return pairs->all == nullptr || g.cache.params().n_top > 0; }
    bool ahead() const { return n_draft == n_block; } // a row drafts the token behind its own position
    Val spread_out(Val logits) const { return spread(logits, d2t, logits.graph->model.hparams().n_vocab); }
};

struct Found {
    const GgufFile &file;
    std::string arch;

    // Returns a key's full name: that of the prefix which has it, else the first one.
    std::string key(const char *name) const {
        for (const std::string &prefix : {arch, arch + ".dflash", std::string("dflash")}) {
            if (file.find(prefix + "." + name) != nullptr) {
                return prefix + "." + name;
            }
        }
        return arch + "." + name;
    }
    bool has(const char *name) const { return file.find(key(name)) != nullptr; }
    float number_or(const char *name, float fallback) const {
        return has(name) ? float(file.number(key(name))) : fallback;
    }
    bool older() const { return arch != "dflash"; } // the layout
    uint32_t size(const char *name, int64_t hi) const { return uint32_t(file.integer(key(name), 1, hi)); }
    // Returns a tensor's full name: the first of these that the file has, else the first.
    std::string tensor(std::initializer_list<const char *> names) const {
        for (const char *name : names) {
            if (file.tensor(name) != nullptr) {
                return name;
            }
        }
        return *names.begin();
    }
    [[noreturn]] void refuse(const std::string &what) const {
        fail(LUCE_E_UNSUPPORTED, "%s: %s", file.path().c_str(), what.c_str());
    }
    [[noreturn]] void bad(const std::string &what) const {
        fail(LUCE_E_FILE, "%s: %s", file.path().c_str(), what.c_str());
    }
};

bool is_end_of(const std::string &name, const std::string &end) {
    return name.size() > end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
}

// Refuses keys of kin of DFlash and of features that luce has no graph for, unless they have the value that
// means none.
void refuse_keys(const Found &f) {
    for (const char *name : {"hyper_connection.count", "expert_count"}) {
        if (f.has(name) && f.file.integer(f.key(name), 0, INT32_MAX) != 0) {
            f.refuse("key " + f.key(name) + ": luce does not implement drafters that have it");
        }
    }
    for (const char *name : {"attention.value_scale", "attention.scale"}) {
        const double value = f.has(name) ? f.file.number(f.key(name)) : 0;
        if (value != 0 && (value != 1 || std::string(name) == "attention.scale")) {
            f.refuse(format("key %s is %g: luce does not implement it", f.key(name).c_str(), value));
        }
    }
    if (f.has("hidden_act") && f.file.string(f.key("hidden_act")) != "silu") {
        f.refuse("key " + f.key("hidden_act") + " is '" + f.file.string(f.key("hidden_act")) +
                 "': luce implements silu");
    }
}

// Refuses drafters whose layers are like Gemma 4's own (DeepSpec has DSpark with them): normed behind attention and FFN too.
void refuse_layers(const Found &f) {
    for (const GgufTensor &t : f.file.tensors()) {
        for (const char *name :
             {".post_attention_norm.weight", ".post_ffw_norm.weight", ".layer_output_scale.weight"}) {
            if (is_end_of(t.name, name)) {
                f.refuse("tensor " + t.name +
                         ": the drafter has layers like Gemma 4's own, with norms behind attention " +
                         "and FFN: luce drafts with layers like Qwen3's alone, as DFlash drafters of Gemma 4 "
                         "have them");
            }
        }
    }
}

Yarn read_yarn(const Found &f) {
    Yarn yarn;
    const std::string type = f.has("rope.scaling.type") ? f.file.string(f.key("rope.scaling.type")) : "none";
    if (type == "none") {
        return yarn;
    }
    if (type != "yarn") {
        f.refuse("key " + f.key("rope.scaling.type") + " is '" + type + "': luce implements yarn");
    }
    const auto optional = [&](const char *name, double fallback) {
        return f.has(name) ? f.file.number(f.key(name)) : fallback;
    };
    const double factor = f.file.number(f.key("rope.scaling.factor"));
    if (!(factor >= 1)) {
        f.bad(format("key %s is %g, expected 1 or more", f.key("rope.scaling.factor").c_str(), factor));
    }
    yarn.factor = float(factor);
    yarn.n_ctx_trained = f.size("rope.scaling.original_context_length", int64_t(1) << 30);
    yarn.attention = float(optional("rope.scaling.yarn_attn_factor", 0.1 * std::log(factor) + 1));
    yarn.beta_fast = float(optional("rope.scaling.yarn_beta_fast", 32));
    yarn.beta_slow = float(optional("rope.scaling.yarn_beta_slow", 1));
    return yarn;
}

AttentionShape read_attention(const Found &f) {
    AttentionShape a;
    a.n_head = f.size("attention.head_count", 4096);
    a.n_head_kv = f.size("attention.head_count_kv", a.n_head);
    a.head_dim = f.size("attention.key_length", 1024);
    a.rope_dim = uint32_t(f.file.integer_or(f.key("rope.dimension_count"), a.head_dim, 2, a.head_dim));
    a.rope_base = float(f.file.number(f.key("rope.freq_base")));
    a.yarn = read_yarn(f);
    a.value_dim = uint32_t(f.file.integer_or(f.key("attention.value_length"), a.head_dim, 1, 1024));
    check_attention(f.file.path().c_str(), a, false); // Model::describe asks for the device
    return a;
}

// Returns one value for each layer.
std::vector<bool> pattern(const Found &f, const char *name, uint32_t n_layer) {
    const std::vector<int64_t> values = f.file.integers(f.key(name));
    if (values.size() != n_layer) {
        f.bad(format("key %s has %zu entries, expected %u (one for each layer)", f.key(name).c_str(),
                     values.size(), n_layer));
    }
    return std::vector<bool>(values.begin(), values.end());
}

// Says which layers' blocks are causal, by one key for all or by a pattern. Without either none is, as in llama.cpp. The
// older layouts have no such key: as their checkpoints' code has it, layers with a window are causal.
std::vector<bool> causal_layers(const Found &f, const std::vector<uint32_t> &window) {
    const uint32_t n_layer = uint32_t(window.size());
    if (f.has("attention.causal_pattern")) {
        if (f.has("attention.causal")) {
            f.bad("keys " + f.key("attention.causal") + " and " + f.key("attention.causal_pattern") +
                  ": expected one of them");
        }
        return pattern(f, "attention.causal_pattern", n_layer);
    }
    if (f.older() && !f.has("attention.causal")) {
        return std::vector<bool>(window.begin(), window.end());
    }
    return std::vector<bool>(n_layer, f.file.integer_or(f.key("attention.causal"), 0, 0, 1) != 0);
}

// Returns the window of each layer, which is 0 where it sees everything. Where a file of an older layout does not say which
// layers slide, all but the last do, as in the checkpoints.
std::vector<uint32_t> windows(const Found &f, uint32_t n_layer) {
    std::vector<uint32_t> out(n_layer, 0);
    const int64_t window = f.file.integer_or(f.key("attention.sliding_window"), 0, 0, int64_t(1) << 30);
    if (window > 0) {
        const bool said = f.has("attention.sliding_window_pattern");
        if (!said && !f.older()) {
            f.bad("key " + f.key("attention.sliding_window_pattern") +
                  " is missing, and attention.sliding_window is not 0");
        }
        std::vector<bool> sliding(n_layer, true);
        sliding.back() = false;
        if (said) {
            sliding = pattern(f, "attention.sliding_window_pattern", n_layer);
        }
        for (uint32_t i = 0; i < n_layer; i++) {
            out[i] = sliding[i] ? uint32_t(window) : 0;
        }
    }
    return out;
}

// llama.cpp's `target_layers` counts a layer's input, older files' `target_layer_ids` the layer whose output it is.
std::vector<uint32_t> read_taps(const Found &f, uint32_t n_layer) {
    const bool older = !f.has("target_layers") && f.has("target_layer_ids");
    const std::string key = f.key(older ? "target_layer_ids" : "target_layers");
    std::vector<uint32_t> taps;
    for (const int64_t value : f.file.integers(key)) {
        const bool known = value >= 0 && value < int64_t(n_layer) + !older;
        const uint32_t tap = known ? uint32_t(value) + older : 0;
        if (!known || (!taps.empty() && tap <= taps.back())) {
            f.bad(format("key %s has %lld: expected rising layers of a target that has %u", key.c_str(),
                         (long long) value, n_layer));
        }
        taps.push_back(tap);
    }
    if (taps.empty()) {
        f.bad("key " + key + " is empty");
    }
    return taps;
}

int32_t read_mask_token(const Found &f, uint32_t n_vocab) {
    const char *common = "tokenizer.ggml.mask_token_id";
    const std::string key =
        f.file.find(common) == nullptr && f.has("mask_token_id") ? f.key("mask_token_id") : common;
    return int32_t(f.file.integer(key, 0, int64_t(n_vocab) - 1));
}

// Fails with both values where the drafter's embedding or vocabulary is not the target's.
void check_target(const Found &f, const HParams &trunk) {
    const uint32_t n_embd = f.size("embedding_length", 1 << 20);
    if (n_embd != trunk.n_embd) {
        f.bad(format("the drafter's embedding_length is %u, the model's %u", n_embd, trunk.n_embd));
    }
    const GgufKv *tokens = f.file.find("tokenizer.ggml.tokens");
    const int64_t n_vocab =
        tokens != nullptr && tokens->type == GGUF_ARR ? int64_t(tokens->count) : trunk.n_vocab;
    const int64_t stated = f.file.integer_or(f.key("vocab_size"), n_vocab, 1, INT32_MAX);
    for (const int64_t n : {n_vocab, stated}) {
        if (n != trunk.n_vocab) {
            f.bad(format("the drafter's vocabulary has %lld tokens, the model's %u", (long long) n,
                         trunk.n_vocab));
        }
    }
}

DFlashLayer read_layer(WeightReader &r, const AttentionShape &shape, int64_t E, int64_t FF, uint32_t il) {
    const std::string p = "blk." + std::to_string(il) + ".";
    DFlashLayer layer{};
    layer.attn_norm = r.f32(p + "attn_norm.weight", {E});
    layer.ffn_norm = r.f32(p + "ffn_norm.weight", {E});
    layer.attention = read_attention(r, p, shape, E, /*gated=*/false);
    layer.attention.sinks = r.f32(p + "attn_sinks.weight", {shape.n_head}, false);
    layer.ffn = read_ffn(r, p, E, FF);
    return layer;
}

// Returns a key's number, and 0 where the file does not have it.
uint32_t optional_size(const Found &f, const char *name, int64_t hi) {
    return uint32_t(f.file.integer_or(f.key(name), 0, 0, hi));
}

BlockConv read_conv(WeightReader &r, const std::string &prefix, int64_t E, int64_t taps, int64_t group) {
    BlockConv conv{};
    if (taps > 0) {
        conv.base = r.f32(prefix + "_conv_base", {E, taps, 2});
        conv.added = r.matrix(prefix + "_conv_proj.weight", E, 2 * taps * (E / group));
    }
    return conv;
}

// Returns how many rows the kernels of convolutions reach over, and how many values share what a row adds to them.
std::pair<uint32_t, uint32_t> conv_sizes(const Found &f, uint32_t E) {
    const uint32_t taps = optional_size(f, "conv_kernel_size", MAX_ROWS),
                   group = optional_size(f, "conv_group_size", E);
    if ((taps == 0) != (group == 0) || (group > 0 && E % group != 0)) {
        f.bad(
            format("keys %s and %s are %u and %u: expected both, and groups that divide embedding_length, %u",
                   f.key("conv_kernel_size").c_str(), f.key("conv_group_size").c_str(), taps, group, E));
    }
    return {taps, group};
}

// Reads a selector or a Markov head over `rows` of a vocabulary of V, where the file has one.
std::optional<Pairs> read_pairs(WeightReader &r, const Found &f, int64_t E, int64_t rows, int64_t V) {
    constexpr int64_t MOST = 65536;
    const int64_t selector = optional_size(f, "selector_rank", MOST);
    const GgufTensor *markov = f.file.tensor("markov_w1.weight");
    Pairs pairs{};
    if (selector > 0 && markov != nullptr) {
        f.bad("key " + f.key("selector_rank") + " and tensor markov_w1.weight: expected one of them");
    }
    if (selector > 0) {
        pairs.k = f.size("selector_top_k", std::min<int64_t>(TOPK_MAX, rows));
        pairs.before = r.table("selector_predecessor.weight", selector, V);
        pairs.behind = r.table("selector_successor.weight", selector, rows);
        pairs.gates = r.matrix("selector_hidden.weight", E, selector);
        return pairs;
    }
    if (markov == nullptr) {
        for (const char *name : {"selector_top_k", "markov_rank"}) {
            if (optional_size(f, name, MOST) > 0) {
                f.bad("key " + f.key(name) + ": the file has neither a selector's rank nor a Markov head");
            }
        }
        return std::nullopt;
    }
    const int64_t rank = f.file.integer_or(f.key("markov_rank"), markov->ne[0], 1, MOST);
    pairs.k = uint32_t(std::min<int64_t>(MARKOV_CANDIDATES, rows));
    pairs.before = r.table("markov_w1.weight", rank, V);
    pairs.behind = r.table("markov_w2.weight", rank, rows);
    pairs.all = r.tied("markov_w2.weight", pairs.behind);
    return pairs;
}

// Reads a confidence head, which says how likely a draft is right where those before it are, where the file has one.
void read_confidence(WeightReader &r, const Found &f, int64_t E, Pairs &pairs) {
    const GgufTensor *proj = f.file.tensor("conf_proj.weight");
    if (proj == nullptr || pairs.all == nullptr) {
        return; // finish() refuses what is left
    }
    pairs.confidence = r.router("conf_proj.weight", proj->ne[0] == E ? E : E + pairs.before->ne[0], 1);
    pairs.bias = r.f32("conf_proj.bias", {1}, false);
}

// Reads embedding and head: the drafter's own where the file has them, else the target's. A drafter with an
// embedding alone uses it as its head too.
void read_ends(WeightReader &r, const Found &f, const HParams &trunk, const Weights &weights, DFlash &d) {
    const int64_t E = trunk.n_embd, V = trunk.n_vocab;
    const GgufTensor *d2t = f.file.tensor("d2t");
    const int64_t rows = d2t == nullptr ? V : d2t->ne[0];
    if (d2t != nullptr && (!r.has("output.weight") || rows > V)) {
        f.bad(format(
            "tensor d2t names %lld tokens: expected an output.weight with as many rows, and no more than "
            "%lld",
            (long long) rows, (long long) V));
    }
    d.d2t = d2t == nullptr ? nullptr : r.ids("d2t", rows, V);
    d.token_embd = r.table("token_embd.weight", E, V, false);
    d.output = r.matrix_or_none("output.weight", E, rows);
    if (d.output == nullptr) {
        d.output = d.token_embd == nullptr ? weights.output : r.tied("token_embd.weight", d.token_embd);
    }
    d.token_embd = d.token_embd == nullptr ? weights.token_embd : d.token_embd;
}

// Says whether general.architecture is that of a DFlash drafter, in any of its layouts.
bool is_dflash(const GgufFile &file) {
    const std::string architecture = file.string("general.architecture");
    return architecture == "dflash" || architecture == "dflash-draft" ||
           is_end_of(architecture, "-dflash-draft");
}

std::shared_ptr<Drafter> read(Model &model, const GgufFile &file, const HParams &trunk,
                              const Weights &weights) {
    const Found f = {file, file.string("general.architecture")};
    if (!is_dflash(file)) {
        f.bad("architecture " + f.arch + " is not that of a DFlash drafter");
    }
    refuse_layers(f);
    refuse_keys(f);
    check_target(f, trunk);
    auto d = std::make_shared<DFlash>();
    d->reads = READS_TAPS;
    d->n_block = f.size("block_size", 65536);
    if (d->n_block < 2 || d->n_block > MAX_ROWS) {
        f.refuse(format("key %s is %u: luce drafts blocks of 2 to %d rows", f.key("block_size").c_str(),
                        d->n_block, MAX_ROWS));
    }
    d->taps = read_taps(f, trunk.n_layer);
    d->mask_token = read_mask_token(f, trunk.n_vocab);
    d->rms_eps = float(file.number(f.key("attention.layer_norm_rms_epsilon")));
    d->logit_scale = f.number_or("logit_scale", 1);
    const uint32_t n_layer = f.size("block_count", 1024);
    const int64_t E = trunk.n_embd, FF = f.size("feed_forward_length", 1 << 20);
    const AttentionShape shape = read_attention(f);
    const std::vector<uint32_t> window = windows(f, n_layer);
    const std::vector<bool> causal = causal_layers(f, window);
    const auto [taps, group] = conv_sizes(f, trunk.n_embd);
    for (uint32_t il = 0; il < n_layer && taps > 0; il++) { // DFlash2's windows end ahead of a row, too
        if (!causal[il] && window[il] > 0 && window[il] < d->n_block) {
            f.refuse(
                format("key %s is %u, less than a block's %u rows: luce has no such windows of rows that see "
                       "those behind them",
                       f.key("attention.sliding_window").c_str(), window[il], d->n_block));
        }
    }

    WeightReader r(model, file);
    d->fc = r.matrix(f.tensor({"fc.weight", "dflash.fc.weight"}), int64_t(d->taps.size()) * E, E);
    d->hidden_norm = r.f32(f.tensor({"enc.output_norm.weight", "dflash.enc.output_norm.weight",
                                     "dflash.hidden_norm.weight", "hidden_norm.weight"}),
                           {E});
    for (uint32_t il = 0; il < n_layer; il++) {
        d->layers.push_back(read_layer(r, shape, E, FF, il));
        const std::string prefix = "blk." + std::to_string(il);
        d->layers.back().attn_conv = read_conv(r, prefix + ".attn", E, taps, group);
        d->layers.back().ffn_conv = read_conv(r, prefix + ".ffn", E, taps, group);
        d->layers.back().causal = causal[il];
        d->layers.back().attention.shape.window = window[il];
        d->kv.push_back(d->layers.back().attention.shape);
    }
    d->norm = r.f32(f.tensor({"output_norm.weight", "dflash.output_norm.weight", "dflash.norm.weight"}), {E});
    read_ends(r, f, trunk, weights, *d);
    // Matrices of a drafter's own take the place of the target's, and are used as the target uses those.
    d->embedding_scale = f.number_or("embedding_scale", trunk.embedding_scale);
    d->softcap = f.number_or("final_logit_softcapping", trunk.logit_softcap);
    if (!(d->rms_eps > 0) || d->softcap < 0) {
        f.bad("the RMS epsilon must be positive and final_logit_softcapping not negative");
    }
    d->pairs = read_pairs(r, f, E, d->output->ne[1], trunk.n_vocab);
    d->form = d->pairs ? Candidates::conditional : Candidates::independent;
    d->n_list = d->pairs ? d->pairs->k : 0;
    // A Markov head's files leave the key out where the anchor's row drafts, and others where it does not.
    const bool from_anchor =
        f.file.integer_or(f.key("sample_from_anchor"), d->pairs && d->pairs->all != nullptr, 0, 1) != 0;
    d->n_draft = d->n_block - (from_anchor ? 0 : 1);
    if (d->n_draft >= MAX_ROWS) {
        f.refuse(format("key %s is %u: luce verifies %d drafts at most", f.key("block_size").c_str(),
                        d->n_block, MAX_ROWS - 1));
    }
    if (d->pairs) {
        read_confidence(r, f, E, *d->pairs);
        d->confident = d->pairs->confidence != nullptr;
    }
    r.finish("", "DFlash drafters");
    return d;
}

// ---- graphs ----

void DFlash::feed(Plain &g, const Seen &seen) const {
    Val features = (*seen.outputs)[taps[0]]; // {E, T}
    for (size_t i = 1; i < taps.size(); i++) {
        features = concat(features, (*seen.outputs)[taps[i]]);
    }
    const Val f = named(own_rows(luce::norm(matmul(features, fc), hidden_norm, rms_eps)), "dflash_features");
    for (size_t il = 0; il < layers.size(); il++) {
        write_kv(f, layers[il].attention, kv_of(g, il), rms_eps);
    }
}

// Convolves what a sublayer takes and what it gives.
template <typename Sublayer>
Val DFlash::convolved(Val x, const BlockConv &conv, const Sublayer &sublayer) const {
    if (conv.base == nullptr) {
        return sublayer(x);
    }
    const Val added = matmul(x, conv.added); // {2*taps*E/G, T}
    const Val y = sublayer(block_conv(x, added, conv.base, 0));
    return block_conv(y, added, conv.base, 1);
}

void DFlash::draft(Plain &g) const {
    Val x = scale(embed(g, token_embd), embedding_scale); // {E, T}
    for (size_t il = 0; il < layers.size(); il++) {
        const DFlashLayer &layer = layers[il]; // K and V of a block's rows lie behind the context's
        const auto attend = [&](Val y) {
            return attention(y, layer.attention, kv_of(g, il), rms_eps, /*block=*/!layer.causal);
        };
        x = add(x, convolved(luce::norm(x, layer.attn_norm, rms_eps), layer.attn_conv, attend));
        const auto feed_forward = [&](Val y) { return ffn(y, layer.ffn); };
        x = add(x, convolved(luce::norm(x, layer.ffn_norm, rms_eps), layer.ffn_conv, feed_forward));
    }
    const Val h = luce::norm(x, norm, rms_eps);
    std::vector<ggml_tensor *> ends = {output};
    if (pairs && pairs->gates != nullptr && lists(g)) {
        ends.push_back(pairs->gates);
    }
    const std::vector<Val> of_h = matmuls(h, ends); // {rows of d2t or V, T} and {R, T}
    const Val own = luce::softcap(scale(of_h[0], logit_scale), softcap);
    g.logits = spread_out(own); // {V, T}
    if (pairs) {
        compute(g.logits);
        choose_by_pairs(named(h, "dflash_hidden"), own, of_h.size() > 1 ? of_h[1] : Val{});
    } else {
        choose(g.logits, ahead());
        keep_best(g.logits);
    }
}

// Rows h {E, T} are normed, `logits` {rows of d2t or V, T} those before what the draft of the row above adds, and gates {R, T}
// or none.
void DFlash::choose_by_pairs(Val h, Val logits, Val gates) const {
    Plain &g = *h.graph;
    const bool exact = pairs->all != nullptr;
    if (lists(g)) {
        const Val best = candidates(logits, d2t, pairs->k);
        const Val anchors = embed(g, pairs->before), before = rows_at(best, pairs->before, By::token);
        lattice(best, anchors, before, rows_at(best, pairs->behind, By::index), gates, {ahead(), !exact});
        if (confident) {
            confidence(h, anchors, before, pairs->confidence, pairs->bias);
        }
    }
    for (uint32_t row = n_block - n_draft; exact && row < n_block; row++) { // each behind the one above
        const Val added = matmul(rows_at(prior_tokens(g, row), pairs->before), pairs->all);
        choose(spread_out(add(one_of_block(logits, row), added)), ahead(), int32_t(row));
    }
}

} // namespace

const DrafterKind DFLASH = {"dflash", "a DFlash drafter", is_dflash, read, /*reads_from=*/nullptr};

} // namespace luce
