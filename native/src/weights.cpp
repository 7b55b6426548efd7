// From a file's names to checked tensors: hyperparameters, shapes, types, placement.
#include "model.h"

#include <ggml-cpu.h>

#include <algorithm>
#include <cstring>
#include <set>

namespace luce {
namespace {

std::string shape_text(const int64_t *ne, uint32_t n_dims) {
    std::string text = "{";
    for (uint32_t d = 0; d < n_dims; d++) {
        text += (d == 0 ? "" : ", ") + std::to_string(ne[d]);
    }
    return text + "}";
}

bool is_dflash(const std::string &arch) {
    return arch == "dflash" || arch == "dflash-draft" || arch == "qwen35-dflash-draft" ||
           arch == "gemma4-dflash-draft";
}

void check_architecture(const GgufFile &file, const std::string &arch) {
    const char *path = file.path().c_str();
    if (is_dflash(arch)) {
        fail(LUCE_E_UNSUPPORTED,
             "%s: architecture %s is a DFlash drafter: it drafts for a model, it is not one", path,
             arch.c_str());
    }
    if (arch != "qwen35") {
        fail(LUCE_E_UNSUPPORTED, "%s: architecture %s: luce runs qwen35 (dense Qwen3.5 and Qwen3.6)", path,
             arch.c_str());
    }
    if (file.tensor("blk.0.attn_norm.weight") == nullptr &&
        file.find("qwen35.nextn_predict_layers") != nullptr) {
        fail(LUCE_E_UNSUPPORTED,
             "%s holds only a NextN head (there is no blk.0): it drafts for a model, it is not one", path);
    }
}

std::vector<bool> recurrent_layers(const GgufFile &file, uint32_t n_layer, uint32_t n_all) {
    std::vector<bool> recurrent(n_layer);
    const std::string key = "qwen35.attention.recurrent_layers";
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
    const int64_t interval = file.integer_or("qwen35.full_attention_interval", 4, 1, 65536);
    for (uint32_t i = 0; i < n_layer; i++) {
        recurrent[i] = (i + 1) % interval != 0;
    }
    return recurrent;
}

void check_rope_scaling(const GgufFile &file) {
    const std::string key = "qwen35.rope.scaling.type";
    if (file.find(key) != nullptr && file.string(key) != "none") {
        fail(LUCE_E_UNSUPPORTED, "%s: key %s is '%s': luce has no RoPE scaling", file.path().c_str(),
             key.c_str(), file.string(key).c_str());
    }
}

HParams read_hparams(const GgufFile &file) {
    const std::string p = "qwen35.";
    const auto u = [&](const char *key, int64_t lo, int64_t hi) {
        return uint32_t(file.integer(p + key, lo, hi));
    };
    const auto bad = [&](const std::string &what) {
        fail(LUCE_E_UNSUPPORTED, "%s: %s", file.path().c_str(), what.c_str());
    };
    HParams hp;
    const uint32_t n_all = u("block_count", 1, 1024);
    hp.n_nextn = uint32_t(file.integer_or(p + "nextn_predict_layers", 0, 0, n_all - 1));
    hp.n_layer = n_all - hp.n_nextn;
    hp.n_ctx_train = u("context_length", 1, int64_t(1) << 30);
    hp.n_embd = u("embedding_length", 1, 1 << 20);
    hp.n_ff = u("feed_forward_length", 1, 1 << 20);
    hp.n_head = u("attention.head_count", 1, 4096);
    hp.n_head_kv = uint32_t(file.integer_or(p + "attention.head_count_kv", hp.n_head, 1, hp.n_head));
    hp.head_dim = uint32_t(file.integer_or(p + "attention.key_length", hp.n_embd / hp.n_head, 1, 1024));
    const int64_t value_dim = file.integer_or(p + "attention.value_length", hp.head_dim, 1, 1024);
    hp.rope_dim = uint32_t(file.integer_or(p + "rope.dimension_count", hp.head_dim, 0, hp.head_dim));
    hp.rope_base =
        file.find(p + "rope.freq_base") != nullptr ? float(file.number(p + "rope.freq_base")) : 10000.0f;
    hp.rms_eps = float(file.number(p + "attention.layer_norm_rms_epsilon"));
    hp.state_size = u("ssm.state_size", 1, 1024);
    hp.n_k_heads = u("ssm.group_count", 1, 1024);
    hp.n_v_heads = u("ssm.time_step_rank", 1, 1024);
    const uint32_t inner = u("ssm.inner_size", 1, 1 << 20);
    const uint32_t taps = u("ssm.conv_kernel", 1, 64);
    if (value_dim != hp.head_dim) {
        bad(format("attention.key_length is %u and value_length %lld: they must be equal", hp.head_dim,
                   (long long) value_dim));
    }
    if (hp.head_dim != 64 && hp.head_dim != 128 && hp.head_dim != 256) {
        bad(format("attention.key_length is %u: luce runs 64, 128 and 256", hp.head_dim));
    }
    if (hp.n_head % hp.n_head_kv != 0 || hp.n_v_heads % hp.n_k_heads != 0) {
        bad(format("heads must divide: attention %u/%u, DeltaNet %u/%u", hp.n_head, hp.n_head_kv,
                   hp.n_v_heads, hp.n_k_heads));
    }
    if (hp.rope_dim % 2 != 0 || !(hp.rope_base > 0) || !(hp.rms_eps > 0)) {
        bad("rope.dimension_count must be even, rope.freq_base and the RMS epsilon positive");
    }
    if (hp.state_size != 16 && hp.state_size != 32 && hp.state_size != 64 && hp.state_size != 128) {
        bad(format("ssm.state_size is %u: luce runs 16, 32, 64 and 128", hp.state_size));
    }
    if (inner != hp.n_v_heads * hp.state_size) {
        bad(format("ssm.inner_size is %u, expected time_step_rank * state_size = %u", inner,
                   hp.n_v_heads * hp.state_size));
    }
    if (taps != CONV_TAPS) {
        bad(format("ssm.conv_kernel is %u: luce runs %u", taps, CONV_TAPS));
    }
    check_rope_scaling(file);
    hp.conv_dim = (2 * hp.n_k_heads + hp.n_v_heads) * hp.state_size;
    hp.recurrent = recurrent_layers(file, hp.n_layer, n_all);
    return hp;
}

} // namespace

bool is_weight_type(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_Q2_K:
        case GGML_TYPE_Q3_K:
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K:
        case GGML_TYPE_Q6_K:
        case GGML_TYPE_IQ4_NL:
        case GGML_TYPE_IQ4_XS:
        case GGML_TYPE_IQ3_S:
        case GGML_TYPE_IQ3_XXS:
        case GGML_TYPE_IQ2_S:
        case GGML_TYPE_IQ2_XS:
        case GGML_TYPE_IQ2_XXS:
        case GGML_TYPE_IQ1_S:
        case GGML_TYPE_IQ1_M: return true;
        default: return false;
    }
}

const char *type_name(ggml_type type) {
    static const std::vector<std::string> names = [] {
        std::vector<std::string> list;
        for (int t = 0; t < GGML_TYPE_COUNT; t++) {
            list.emplace_back(ggml_type_name(ggml_type(t)) != nullptr ? ggml_type_name(ggml_type(t)) : "?");
            for (char &c : list.back()) {
                c = char(toupper(c));
            }
        }
        return list;
    }();
    return names[size_t(type)].c_str();
}

// Takes tensors out of a file one by one, checking each, and remembers which are left over.
class WeightReader {
public:
    WeightReader(Model &model, const GgufFile &file, const HParams &hp, bool loading = true)
        : m_(model), file_(file), hp_(hp), loading_(loading) {
        for (const GgufTensor &t : file.tensors()) {
            left_.insert(t.name);
        }
    }

    // A matrix {a, b} of any weight type.
    ggml_tensor *matrix(const std::string &name, int64_t a, int64_t b, bool required = true) {
        return take(name, {a, b}, false, required);
    }
    // A vector or small table that the graph reads as F32.
    ggml_tensor *f32(const std::string &name, std::vector<int64_t> shape, bool required = true) {
        return take(name, std::move(shape), true, required);
    }

    Block block(uint32_t il, bool recurrent) {
        const HParams &hp = hp_;
        const std::string p = "blk." + std::to_string(il) + ".";
        const int64_t E = hp.n_embd, FF = hp.n_ff, S = hp.state_size;
        Block b{};
        b.recurrent = recurrent;
        b.attn_norm = f32(p + "attn_norm.weight", {E});
        b.post_norm = f32(p + "post_attention_norm.weight", {E});
        b.ffn_gate = matrix(p + "ffn_gate.weight", E, FF);
        b.ffn_up = matrix(p + "ffn_up.weight", E, FF);
        b.ffn_down = matrix(p + "ffn_down.weight", FF, E);
        if (recurrent) {
            const int64_t Hv = hp.n_v_heads, C = hp.conv_dim;
            b.delta.qkv = matrix(p + "attn_qkv.weight", E, C);
            b.delta.gate = matrix(p + "attn_gate.weight", E, Hv * S);
            b.delta.conv = f32(p + "ssm_conv1d.weight", {CONV_TAPS, C});
            b.delta.dt = f32(p + "ssm_dt.bias", {Hv});
            b.delta.a = f32(p + "ssm_a", {Hv});
            b.delta.alpha = matrix(p + "ssm_alpha.weight", E, Hv);
            b.delta.beta = matrix(p + "ssm_beta.weight", E, Hv);
            b.delta.norm = f32(p + "ssm_norm.weight", {S});
            b.delta.out = matrix(p + "ssm_out.weight", Hv * S, E);
        } else {
            const int64_t D = hp.head_dim, H = hp.n_head, Hkv = hp.n_head_kv;
            b.attn.q = matrix(p + "attn_q.weight", E, 2 * D * H);
            b.attn.k = matrix(p + "attn_k.weight", E, D * Hkv);
            b.attn.v = matrix(p + "attn_v.weight", E, D * Hkv);
            b.attn.out = matrix(p + "attn_output.weight", D * H, E);
            b.attn.q_norm = f32(p + "attn_q_norm.weight", {D});
            b.attn.k_norm = f32(p + "attn_k_norm.weight", {D});
        }
        return b;
    }

    // The NextN block il; what it does not hold is the trunk's.
    NextN nextn(uint32_t il, const Weights &trunk) {
        const std::string p = "blk." + std::to_string(il) + ".nextn.";
        const int64_t E = hp_.n_embd, V = hp_.n_vocab;
        NextN n{};
        n.hp = hp_;
        n.block = block(il, false);
        n.eh_proj = matrix(p + "eh_proj.weight", 2 * E, E);
        n.enorm = f32(p + "enorm.weight", {E});
        n.hnorm = f32(p + "hnorm.weight", {E});
        n.norm = f32(p + "shared_head_norm.weight", {E}, false);
        n.output = matrix(p + "shared_head_head.weight", E, V, false);
        n.token_embd = matrix(p + "embed_tokens.weight", E, V, false);
        n.norm = n.norm == nullptr ? trunk.output_norm : n.norm;
        n.output = n.output == nullptr ? trunk.output : n.output;
        n.token_embd = n.token_embd == nullptr ? trunk.token_embd : n.token_embd;
        return n;
    }

    // Tensors that another reader takes.
    void forget(const std::string &prefix) {
        const auto first = left_.lower_bound(prefix);
        auto last = first;
        while (last != left_.end() && last->compare(0, prefix.size(), prefix) == 0) {
            last++;
        }
        left_.erase(first, last);
    }

    // What the graph would silently ignore is refused by name.
    void finish(const std::string &prefix = "") {
        const auto unknown = left_.lower_bound(prefix);
        if (unknown != left_.end() && unknown->compare(0, prefix.size(), prefix) == 0) {
            fail(LUCE_E_UNSUPPORTED, "%s: tensor %s is not part of the qwen35 that luce runs",
                 file_.path().c_str(), unknown->c_str());
        }
    }

private:
    ggml_tensor *take(const std::string &name, std::vector<int64_t> shape, bool f32_only, bool required) {
        const char *path = file_.path().c_str();
        const GgufTensor *t = file_.tensor(name);
        if (t == nullptr) {
            if (required) {
                fail(LUCE_E_FILE, "%s: tensor %s is missing, expected %s", path, name.c_str(),
                     shape_text(shape.data(), uint32_t(shape.size())).c_str());
            }
            return nullptr;
        }
        shape.resize(GGML_MAX_DIMS, 1);
        if (memcmp(t->ne, shape.data(), sizeof(t->ne)) != 0) {
            uint32_t n = GGML_MAX_DIMS;
            while (n > 1 && shape[n - 1] == 1) {
                n--;
            }
            fail(LUCE_E_FILE, "%s: tensor %s: expected shape %s, found %s", path, name.c_str(),
                 shape_text(shape.data(), n).c_str(), shape_text(t->ne, t->n_dims).c_str());
        }
        if (f32_only ? t->type != GGML_TYPE_F32 : !is_weight_type(t->type)) {
            fail(LUCE_E_UNSUPPORTED, "%s: tensor %s has type %s, expected %s", path, name.c_str(),
                 type_name(t->type), f32_only ? "F32" : "a type that luce multiplies on every device");
        }
        left_.erase(name);
        if (!loading_) {
            return nullptr;
        }
        // CUDA cannot look rows up in IQ4_NL: the embedding is widened there
        const bool rows =
            name == "token_embd.weight" || name.find(".nextn.embed_tokens.") != std::string::npos;
        const bool widen = m_.device_->gpu && t->type == GGML_TYPE_IQ4_NL && rows;
        ggml_tensor *tensor =
            ggml_new_tensor(m_.context_.get(), widen ? GGML_TYPE_F32 : t->type, GGML_MAX_DIMS, t->ne);
        ggml_set_name(tensor, name.c_str());
        m_.tensors_.emplace_back(tensor, t);
        m_.weight_bytes_ += ggml_nbytes(tensor);
        return tensor;
    }

    Model &m_;
    const GgufFile &file_;
    const HParams &hp_;
    std::set<std::string> left_;
    const bool loading_; // false: tensors are checked only
};

// A head's hyperparameters, from a file that may hold nothing else; both values in the error where it does not
// fit the trunk.
static HParams head_hparams(const GgufFile &file, const HParams &trunk) {
    const char *path = file.path().c_str();
    const std::string arch = file.string("general.architecture");
    if (arch != "qwen35") {
        fail(LUCE_E_FILE, "%s: the head's architecture is %s, the model's qwen35", path, arch.c_str());
    }
    HParams hp = read_hparams(file);
    if (hp.n_nextn == 0) {
        fail(LUCE_E_FILE, "%s holds no NextN head: qwen35.nextn_predict_layers is 0 or missing", path);
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

std::shared_ptr<Model> Model::describe(std::shared_ptr<GgufFile> file, std::shared_ptr<GgufFile> head,
                                       const Device &device) {
    auto model = std::make_shared<Model>();
    model->device_ = &device;
    model->architecture_ = file->string("general.architecture");
    check_architecture(*file, model->architecture_);
    HParams &hp = model->hp_;
    hp = read_hparams(*file);
    const GgufTensor *embd = file->tensor("token_embd.weight");
    if (embd == nullptr || embd->n_dims != 2 || embd->ne[1] > (1 << 24)) {
        fail(LUCE_E_FILE, "%s: tensor token_embd.weight is %s", file->path().c_str(),
             embd == nullptr ? "missing" : ("of shape " + shape_text(embd->ne, embd->n_dims)).c_str());
    }
    hp.n_vocab = uint32_t(embd->ne[1]);
    for (const GgufTensor &t : file->tensors()) {
        model->n_params_ += uint64_t(t.ne[0]) * uint64_t(t.ne[1]) * uint64_t(t.ne[2]) * uint64_t(t.ne[3]);
    }
    const size_t n_tensors = file->tensors().size() + (head ? head->tensors().size() : 0) + 1;
    const ggml_init_params params = {ggml_tensor_overhead() * n_tensors, nullptr, /*no_alloc=*/true};
    model->context_.reset(ggml_init(params));

    WeightReader reader(*model, *file, hp);
    Weights &w = model->weights_;
    w.token_embd = reader.matrix("token_embd.weight", hp.n_embd, hp.n_vocab);
    w.output_norm = reader.f32("output_norm.weight", {hp.n_embd});
    w.output = reader.matrix("output.weight", hp.n_embd, hp.n_vocab, false);
    if (w.output == nullptr) {
        w.output = w.token_embd;
    }
    for (uint32_t il = 0; il < hp.n_layer; il++) {
        w.blocks.push_back(reader.block(il, hp.recurrent[il]));
    }
    // every head in the file is checked, whether or not it is asked for
    WeightReader unloaded(*model, *file, hp, /*loading=*/false);
    for (uint32_t il = hp.n_layer; il < hp.n_layer + hp.n_nextn; il++) {
        const std::string prefix = "blk." + std::to_string(il) + ".";
        unloaded.nextn(il, w);
        unloaded.finish(prefix);
        reader.forget(prefix);
    }
    reader.finish();
    if (head) {
        const HParams head_hp = head_hparams(*head, hp);
        WeightReader head_reader(*model, *head, head_hp);
        w.head = std::make_unique<NextN>(head_reader.nextn(head_hp.n_layer, w));
        model->head_file_ = std::move(head);
    }
    model->file_ = std::move(file);
    return model;
}

uint64_t Model::identity() const {
    uint64_t hash = 0xcbf29ce484222325u; // FNV-1a
    const auto add = [&](const void *data, size_t n) {
        for (size_t i = 0; i < n; i++) {
            hash = (hash ^ static_cast<const uint8_t *>(data)[i]) * 0x100000001b3u;
        }
    };
    for (const auto &[tensor, source] : tensors_) {
        add(source->name.data(), source->name.size());
        add(&source->type, sizeof(source->type));
        add(source->ne, sizeof(source->ne));
        add(source->data, size_t(std::min<uint64_t>(source->size, 256)));
    }
    return hash;
}

void Model::stand_in() {
    for (auto &[tensor, source] : tensors_) {
        tensor->data = const_cast<uint8_t *>(source->data);
    }
}

void Model::load(const std::function<bool(float)> &progress) {
    if (!device_->gpu) {
        std::vector<const Mapping *> parts;
        for (const GgufFile *file : {file_.get(), head_file_ == file_ ? nullptr : head_file_.get()}) {
            for (size_t i = 0; file != nullptr && i < file->parts().size(); i++) {
                parts.push_back(file->parts()[i].get());
            }
        }
        for (const Mapping *part : parts) {
            void *base = const_cast<uint8_t *>(part->data());
            buffers_.emplace_back(ggml_backend_cpu_buffer_from_ptr(base, part->size()));
            for (auto &[tensor, source] : tensors_) {
                if (source->data >= part->data() && source->data < part->data() + part->size()) {
                    ggml_backend_tensor_alloc(buffers_.back().get(), tensor,
                                              const_cast<uint8_t *>(source->data));
                }
            }
        }
        if (!progress(1.0f)) {
            fail(LUCE_E_CANCELLED, "loading was cancelled");
        }
        return;
    }
    check_memory(*device_, weight_bytes_, "the model's weights");
    Buffer buffer(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), device_->buffer_type()));
    if (!buffer) {
        fail(LUCE_E_MEMORY, "%s: allocating %s for the weights failed", device_->name.c_str(),
             human_bytes(weight_bytes_).c_str());
    }
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    buffers_.push_back(std::move(buffer));
    std::vector<Upload> items;
    std::vector<float> widened;
    for (auto &[tensor, source] : tensors_) {
        if (tensor->type == source->type) {
            items.push_back({tensor, source->data, source->size});
            continue;
        }
        widened.resize(size_t(ggml_nelements(tensor)));
        ggml_get_type_traits(source->type)->to_float(source->data, widened.data(), int64_t(widened.size()));
        items.push_back(
            {tensor, reinterpret_cast<const uint8_t *>(widened.data()), widened.size() * sizeof(float)});
    }
    upload(*device_, items,
           [&](uint64_t done) { return progress(float(double(done) / double(weight_bytes_))); });
}

} // namespace luce
