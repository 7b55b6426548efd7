// qwen35 and qwen35moe (Qwen3.5 and Qwen3.6, dense and with experts), whole: hyperparameters and checked tensors from a
// file's names, which follow llama.cpp's GGUF conventions for the two, and the graph of a step at the end.
#include "graph/qwen35.h"

#include "graph/blocks.h"
#include "graph/keys.h"
#include "graph/nextn.h"
#include "ops/shapes.h"

#include <algorithm>
#include <cstdio>
#include <set>

namespace luce {
namespace {

std::vector<bool> recurrent_layers(const GgufFile &file, uint32_t n_layer, uint32_t n_all) {
    std::vector<bool> recurrent(n_layer);
    const std::string key = prefix_of(file) + "attention.recurrent_layers";
    if (const GgufKv *kv = file.find(key); kv != nullptr && kv->type == GGUF_ARR) {
        const std::vector<int64_t> values = file.integers(key);
        if (values.size() != n_all && values.size() != n_layer) {
            fail(LUCE_E_FILE, "%s: key %s has %zu entries, expected %u (one for each block)",
                 file.path().c_str(), key.c_str(), values.size(), n_all);
        }
        for (uint32_t i = 0; i < n_layer; i++) {
            recurrent[i] = values[i] != 0;
        }
        return recurrent;
    }
    const int64_t interval = file.integer_or(prefix_of(file) + "full_attention_interval", 4, 1, 65536);
    for (uint32_t i = 0; i < n_layer; i++) {
        recurrent[i] = (i + 1) % interval != 0;
    }
    return recurrent;
}

MoeShape read_experts(const GgufFile &file) {
    const std::string p = prefix_of(file);
    MoeShape m;
    m.n_expert = uint32_t(file.integer(p + "expert_count", 1, 1 << 16));
    m.n_used = uint32_t(file.integer(p + "expert_used_count", 1, m.n_expert));
    m.n_ff = uint32_t(file.integer(p + "expert_feed_forward_length", 1, 1 << 20));
    m.n_ff_shared = uint32_t(file.integer_or(p + "expert_shared_feed_forward_length", m.n_ff, 0, 1 << 20));
    return m;
}

DeltaNetShape read_deltanet(const GgufFile &file) {
    const std::string p = prefix_of(file);
    const auto u = [&](const char *key, int64_t hi) { return uint32_t(file.integer(p + key, 1, hi)); };
    DeltaNetShape d;
    d.state_size = u("ssm.state_size", 1024);
    d.n_k_heads = u("ssm.group_count", 1024);
    d.n_v_heads = u("ssm.time_step_rank", 1024);
    d.conv_taps = u("ssm.conv_kernel", 64);
    d.n_inner = u("ssm.inner_size", 1 << 20);
    return d;
}

// Returns the blocks that have tensors of a NextN head, "blk.N.nextn...".
std::set<uint32_t> nextn_blocks(const GgufFile &file) {
    std::set<uint32_t> found;
    for (const GgufTensor &tensor : file.tensors()) {
        uint32_t block = 0;
        int end = 0;
        sscanf(tensor.name.c_str(), "blk.%9u.nextn.%n", &block, &end);
        if (end > 0) {
            found.insert(block);
        }
    }
    return found;
}

bool holds_any(const GgufFile &file, const std::string &prefix) {
    return std::any_of(file.tensors().begin(), file.tensors().end(), [&](const GgufTensor &tensor) {
        return tensor.name.compare(0, prefix.size(), prefix) == 0;
    });
}

// Counts the blocks of the trunk, and behind them those of NextN heads. The keys say how many there are, and files are
// published whose keys do not fit: converters copy them from a configuration, though the checkpoint had no head. So
// tensors decide what the last blocks are: with nextn.* a head, else one of the trunk, or not there.
void count_blocks(const GgufFile &file, HParams &hp) {
    const std::string p = prefix_of(file);
    const uint32_t n_all = uint32_t(file.integer(p + "block_count", 1, 1024));
    const uint32_t promised = uint32_t(file.integer_or(p + "nextn_predict_layers", 0, 0, n_all - 1));
    std::set<uint32_t> heads = nextn_blocks(file);
    hp.n_layer = n_all;
    for (uint32_t il = n_all - promised; il < n_all; il++) {
        const std::string block = "blk." + std::to_string(il) + ".";
        if (heads.count(il) == 0 && !holds_any(file, block)) {
            hp.n_layer--;
        } else if (file.tensor(block + "attn_norm.weight") == nullptr) {
            heads.insert(il); // read_nextn says what it lacks
        }
    }
    hp.n_nextn = uint32_t(heads.size());
    if (heads.empty()) {
        return;
    }
    const uint32_t first = *heads.begin(), last = *heads.rbegin();
    if (first == 0 || last - first + 1 != hp.n_nextn ||
        (first != n_all && first != n_all - promised && last + 1 != n_all)) {
        fail(LUCE_E_FILE,
             "%s: key %sblock_count is %u and nextn_predict_layers %u, but blk.%u is a NextN block",
             file.path().c_str(), p.c_str(), n_all, promised, first);
    }
    hp.n_layer = first;
}

// Reads the sections of M-RoPE. Files for text alone may lack them, or have others than the pairs of a head: then images are
// refused.
void read_sections(const GgufFile &file, AttentionShape &a) {
    const std::string key = prefix_of(file) + "rope.dimension_sections";
    const GgufKv *kv = file.find(key);
    if (kv == nullptr || kv->type != GGUF_ARR || kv->count < 3) {
        return;
    }
    const std::vector<int64_t> values = file.integers(key);
    const bool whole =
        std::all_of(values.begin(), values.begin() + 3, [](int64_t n) { return n > 0 && n < 1024; });
    if (whole && values[0] + values[1] + values[2] == a.rope_dim / 2) {
        std::copy_n(values.begin(), 3, a.rope_sections);
    }
}

HParams read(const GgufFile &file) {
    const std::string p = prefix_of(file);
    const auto u = [&](const char *key, int64_t lo, int64_t hi) {
        return uint32_t(file.integer(p + key, lo, hi));
    };
    HParams hp;
    count_blocks(file, hp);
    check_rope_scaling(file);
    const uint32_t n_all = u("block_count", 1, 1024); // arrays have so many entries
    hp.n_ctx_train = u("context_length", 1, int64_t(1) << 30);
    hp.n_embd = u("embedding_length", 1, 1 << 20);
    hp.rms_eps = float(file.number(p + "attention.layer_norm_rms_epsilon"));
    if (p == "qwen35moe.") {
        hp.moe = read_experts(file);
    } else {
        hp.n_ff = u("feed_forward_length", 1, 1 << 20);
    }
    const std::string heads = p + "attention.head_count", heads_kv = p + "attention.head_count_kv";
    const std::vector<uint32_t> n_head = per_block(file, heads, n_all, 1, 4096);
    const std::vector<uint32_t> n_head_kv =
        file.find(heads_kv) == nullptr ? n_head : per_block(file, heads_kv, n_all, 1, 4096);
    AttentionShape a;
    a.head_dim = uint32_t(file.integer_or(p + "attention.key_length", hp.n_embd / n_head[0], 1, 1024));
    a.value_dim = uint32_t(file.integer_or(p + "attention.value_length", a.head_dim, 1, 1024));
    a.rope_dim = uint32_t(file.integer_or(p + "rope.dimension_count", a.head_dim, 0, a.head_dim));
    a.rope_base = float(file.number(p + "rope.freq_base"));
    read_sections(file, a);
    const DeltaNetShape deltanet = read_deltanet(file);
    const std::vector<bool> recurrent = recurrent_layers(file, hp.n_layer, n_all);
    for (uint32_t il = 0; il < hp.n_layer + hp.n_nextn; il++) {
        a.n_head = n_head[std::min(il, n_all - 1)];
        a.n_head_kv = n_head_kv[std::min(il, n_all - 1)];
        if (il < hp.n_layer && recurrent[il]) {
            hp.mixers.emplace_back(deltanet);
        } else {
            hp.mixers.emplace_back(a);
        }
    }
    return hp;
}

Moe read_moe(WeightReader &r, const HParams &hp, const std::string &p, bool in_ram) {
    const int64_t E = hp.n_embd;
    Moe m = read_mixture(r, p, hp.moe, E, in_ram);
    if (r.has(p + "ffn_gate_inp_shexp.weight")) {
        m.shared_gate = r.router(p + "ffn_gate_inp_shexp.weight", E, 1);
        m.shared = read_ffn(r, p, E, hp.moe.n_ff_shared, "_shexp");
    }
    return m;
}

DeltaNet read_deltanet(WeightReader &r, const std::string &p, const DeltaNetShape &shape, int64_t E) {
    const int64_t Hv = shape.n_v_heads, S = shape.state_size, C = shape.conv_dim();
    // Value head i reads key head i % Hk. So a rank has a part of each run of Hk heads: of the keys, the queries and the values.
    const int64_t runs = std::max<int64_t>(Hv / shape.n_k_heads, 1);
    const Cut of_all = {ROWS.axis, 2 + runs}, rows = {ROWS.axis, runs}, columns = {COLUMNS.axis, runs};
    DeltaNet d{};
    d.shape = shape;
    d.qkv = r.matrix(p + "attn_qkv.weight", E, C, of_all);
    d.gate = r.matrix(p + "attn_gate.weight", E, Hv * S, rows);
    d.conv = r.f32(p + "ssm_conv1d.weight", {shape.conv_taps, C}, true, of_all);
    d.dt = r.f32(p + "ssm_dt.bias", {Hv}, true, columns);
    d.a = r.f32(p + "ssm_a", {Hv}, true, columns);
    d.alpha = r.matrix(p + "ssm_alpha.weight", E, Hv, rows);
    d.beta = r.matrix(p + "ssm_beta.weight", E, Hv, rows);
    d.norm = r.f32(p + "ssm_norm.weight", {S});
    d.out = r.matrix(p + "ssm_out.weight", Hv * S, E, columns);
    return d;
}

Block read_block(WeightReader &r, const HParams &hp, uint32_t il) {
    const std::string p = "blk." + std::to_string(il) + ".";
    const int64_t E = hp.n_embd;
    Block b{};
    b.attn_norm = r.f32(p + "attn_norm.weight", {E});
    b.post_norm = r.f32(p + "post_attention_norm.weight", {E});
    if (hp.moe.n_expert > 0) {
        b.ffn = read_moe(r, hp, p, il < hp.n_layer && r.in_ram(il));
    } else {
        b.ffn = read_ffn(r, p, E, hp.n_ff);
    }
    if (const auto *deltanet = std::get_if<DeltaNetShape>(&hp.mixers[il])) {
        b.mixer = read_deltanet(r, p, *deltanet, E);
    } else {
        b.mixer = read_attention(r, p, std::get<AttentionShape>(hp.mixers[il]), E, /*gated=*/true);
    }
    return b;
}

// Reads the NextN block il. What it does not hold is the trunk's.
NextN read_nextn(WeightReader &r, const HParams &hp, uint32_t il, const Weights &trunk) {
    const std::string p = "blk." + std::to_string(il) + ".nextn.";
    const int64_t E = hp.n_embd, V = hp.n_vocab;
    NextN n;
    n.block = read_block(r, hp, il);
    n.rms_eps = hp.rms_eps;
    n.eh_proj = r.matrix(p + "eh_proj.weight", 2 * E, E);
    n.enorm = r.f32(p + "enorm.weight", {E});
    n.hnorm = r.f32(p + "hnorm.weight", {E});
    n.norm = r.f32(p + "shared_head_norm.weight", {E}, false);
    n.output = r.matrix_or_none(p + "shared_head_head.weight", E, V);
    n.token_embd = r.table(p + "embed_tokens.weight", E, V, false);
    n.norm = n.norm == nullptr ? trunk.output_norm : n.norm;
    n.output = n.output == nullptr ? trunk.output : n.output;
    n.token_embd = n.token_embd == nullptr ? trunk.token_embd : n.token_embd;
    return n;
}

bool holds_trunk(const GgufFile &file) {
    return file.tensor("blk.0.attn_norm.weight") != nullptr;
}

HParams hparams(const GgufFile &file) {
    if (!holds_trunk(file) &&
        (file.find(prefix_of(file) + "nextn_predict_layers") != nullptr || !nextn_blocks(file).empty())) {
        fail(LUCE_E_UNSUPPORTED,
             "%s holds only a NextN head (there is no blk.0): it drafts for a model, it is not one",
             file.path().c_str());
    }
    return read(file);
}

Weights read_trunk(WeightReader &reader, const HParams &hp) {
    Weights w{};
    const uint32_t n_ranks = reader.n_ranks();
    const HParams of_rank = rank_hparams(reader.file(), hp, n_ranks);
    for (uint32_t rank = 0; rank < n_ranks; rank++) {
        reader.take_rank(rank);
        w.token_embd = reader.table("token_embd.weight", hp.n_embd, hp.n_vocab);
        w.rank_embd.push_back(w.token_embd);
        for (uint32_t il = 0; il < hp.n_layer; il++) {
            w.blocks.push_back(read_block(reader, of_rank, il));
        }
    }
    reader.output(w, hp.n_embd, hp.n_vocab);
    WeightReader unloaded = reader.checking();
    for (uint32_t il = hp.n_layer; il < hp.n_layer + hp.n_nextn; il++) {
        const std::string prefix = "blk." + std::to_string(il) + ".";
        read_nextn(unloaded, hp, il, w);
        unloaded.finish(prefix);
        reader.forget(prefix);
    }
    return w;
}

// Reads a head's hyperparameters, from a file that may hold nothing else. The error has both values where the
// head does not fit the trunk.
HParams read_head_shape(const GgufFile &file, const char *expected, const HParams &trunk) {
    const char *path = file.path().c_str();
    const std::string arch = file.string("general.architecture");
    if (arch != expected) {
        fail(LUCE_E_FILE, "%s: the head's architecture is %s, the model's %s", path, arch.c_str(), expected);
    }
    HParams hp = read(file);
    check_shapes(path, hp);
    if (hp.n_nextn == 0) {
        fail(LUCE_E_FILE, "%s holds no NextN head: %s.nextn_predict_layers is %lld, and no block has nextn.*",
             path, expected, (long long) file.integer_or(arch + ".nextn_predict_layers", 0, 0, 1024));
    }
    if (hp.n_embd != trunk.n_embd) {
        fail(LUCE_E_FILE, "%s: the head's embedding_length is %u, the model's %u", path, hp.n_embd,
             trunk.n_embd);
    }
    hp.n_vocab = trunk.n_vocab;
    const GgufKv *tokens = file.find("tokenizer.ggml.tokens");
    const GgufTensor *embd = file.tensor("token_embd.weight");
    const uint64_t n_vocab = embd != nullptr                                 ? uint64_t(embd->ne[1])
                             : tokens != nullptr && tokens->type == GGUF_ARR ? tokens->count
                                                                             : trunk.n_vocab;
    if (n_vocab != trunk.n_vocab) {
        fail(LUCE_E_FILE, "%s: the head's vocabulary has %llu tokens, the model's %u", path,
             (unsigned long long) n_vocab, trunk.n_vocab);
    }
    return hp;
}

std::shared_ptr<NextN> read_head(Model &model, const GgufFile &file, const HParams &trunk,
                                 const Weights &weights) {
    const HParams hp = read_head_shape(file, model.architecture().name, trunk);
    if (&file != &model.file()) { // the model's own file is checked with its trunk
        WeightReader checking(model, file, /*loading=*/false);
        if (holds_trunk(file)) {
            read_trunk(checking, hp);
        } else {
            read_nextn(checking, hp, hp.n_layer, weights);
            for (const char *unused : {"token_embd.weight", "output_norm.weight", "output.weight"}) {
                checking.forget(unused);
            }
        }
        checking.finish();
    }
    WeightReader reader(model, file);
    return std::make_shared<NextN>(read_nextn(reader, hp, hp.n_layer, weights));
}

} // namespace

// ---- the graph: T rows x of E values pass through blocks of DeltaNet or full attention, each with a feed-forward part ----

static Val deltanet(Val x, const DeltaNet &w, const DeltaState &state, float eps) {
    const auto [qkv, z, beta, alpha] = matmul(x, {w.qkv, w.gate, w.beta, w.alpha});
    const Val o = delta_rule(conv(qkv, w, state), alpha, beta, w, state); // {Hv*S, T}
    return matmul(mul(head_norm(o, w.norm, eps), silu(z)), w.out); // {E, T}
}

static void build(Plain &g) {
    const Weights &w = g.model.weights();
    const float eps = g.model.hparams().rms_eps;
    Stream x = embed_stream(g); // {E, T}
    std::vector<Val> outputs = {x.back()}; // the stream ahead of the layers, and behind each
    const auto mixer = [&](Val x, uint32_t i) {
        const Block &block = w.blocks[i];
        const Val y = norm(x, block.attn_norm, eps);
        return block.attention() != nullptr ? attention(y, *block.attention(), {g.cache.kv(i)}, eps)
                                            : deltanet(y, *block.deltanet(), g.cache.delta(i), eps);
    };
    const auto behind = [&](Val x, uint32_t i) {
        return feed_forward(norm(x, w.blocks[i].post_norm, eps), w.blocks[i]);
    };
    for (uint32_t il = 0; il < g.model.hparams().n_layer; il++) {
        if (g.enter(il)) {
            add_part(x, il, mixer);
            add_part(x, il, behind);
            named(x.back(), "l_out-" + std::to_string(il));
        }
        outputs.push_back(x.back());
    }
    end_step(x, outputs);
}

const Architecture QWEN35 = {"qwen35",          /*layer_nodes=*/64, hparams, read_trunk, read_head, build,
                             /*has_ranks=*/true};
const Architecture QWEN35MOE = {"qwen35moe",       /*layer_nodes=*/64, hparams, read_trunk, read_head, build,
                                /*has_ranks=*/true};

} // namespace luce
