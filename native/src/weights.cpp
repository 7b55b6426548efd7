// From a file's names to checked tensors: hyperparameters, shapes, types, placement.
#include "model.h"

#include <ggml-cpu.h>

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
    if (inner != hp.n_v_heads * hp.state_size) {
        bad(format("ssm.inner_size is %u, expected time_step_rank * state_size = %u", inner,
                   hp.n_v_heads * hp.state_size));
    }
    if (hp.state_size != 16 && hp.state_size != 32 && hp.state_size != 64 && hp.state_size != 128) {
        bad(format("ssm.state_size is %u: luce runs 16, 32, 64 and 128", hp.state_size));
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

// Takes tensors out of the file one by one, checking each, and remembers which are left over.
class WeightReader {
public:
    explicit WeightReader(Model &model) : m_(model) {
        for (const GgufTensor &t : model.file_->tensors()) {
            left_.insert(t.name);
            m_.n_params_ += uint64_t(t.ne[0]) * uint64_t(t.ne[1]) * uint64_t(t.ne[2]) * uint64_t(t.ne[3]);
        }
        // room for every tensor of the file
        const ggml_init_params params = {ggml_tensor_overhead() * (left_.size() + 1), nullptr,
                                         /*no_alloc=*/true};
        m_.context_.reset(ggml_init(params));
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
        const HParams &hp = m_.hp_;
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

    // A NextN head is recognised and checked, not loaded: plain decoding does not need it.
    void nextn(uint32_t il) {
        const HParams &hp = m_.hp_;
        const std::string p = "blk." + std::to_string(il) + ".";
        const int64_t E = hp.n_embd, V = hp.n_vocab;
        loading_ = false;
        block(il, false);
        matrix(p + "nextn.eh_proj.weight", 2 * E, E);
        f32(p + "nextn.enorm.weight", {E});
        f32(p + "nextn.hnorm.weight", {E});
        f32(p + "nextn.shared_head_norm.weight", {E}, false);
        matrix(p + "nextn.shared_head_head.weight", E, V, false);
        matrix(p + "nextn.embed_tokens.weight", E, V, false);
        loading_ = true;
    }

    // What the graph would silently ignore is refused by name.
    void finish() {
        if (!left_.empty()) {
            fail(LUCE_E_UNSUPPORTED, "%s: tensor %s%s is not part of the qwen35 that luce runs",
                 m_.file_->path().c_str(), left_.begin()->c_str(),
                 left_.size() > 1 ? format(" (and %zu more)", left_.size() - 1).c_str() : "");
        }
    }

private:
    ggml_tensor *take(const std::string &name, std::vector<int64_t> shape, bool f32_only, bool required) {
        const char *path = m_.file_->path().c_str();
        const GgufTensor *t = m_.file_->tensor(name);
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
        const bool widen = m_.device_->gpu && t->type == GGML_TYPE_IQ4_NL && name == "token_embd.weight";
        ggml_tensor *tensor =
            ggml_new_tensor(m_.context_.get(), widen ? GGML_TYPE_F32 : t->type, GGML_MAX_DIMS, t->ne);
        ggml_set_name(tensor, name.c_str());
        m_.tensors_.emplace_back(tensor, t);
        m_.weight_bytes_ += ggml_nbytes(tensor);
        return tensor;
    }

    Model &m_;
    std::set<std::string> left_;
    bool loading_ = true;
};

std::shared_ptr<Model> Model::describe(std::shared_ptr<GgufFile> file, const Device &device) {
    auto model = std::make_shared<Model>();
    model->device_ = &device;
    model->architecture_ = file->string("general.architecture");
    check_architecture(*file, model->architecture_);
    HParams &hp = model->hp_;
    hp = read_hparams(*file);
    model->file_ = std::move(file);

    const GgufTensor *embd = model->file_->tensor("token_embd.weight");
    if (embd == nullptr || embd->n_dims != 2 || embd->ne[1] > (1 << 24)) {
        fail(LUCE_E_FILE, "%s: tensor token_embd.weight is %s", model->file_->path().c_str(),
             embd == nullptr ? "missing" : ("of shape " + shape_text(embd->ne, embd->n_dims)).c_str());
    }
    hp.n_vocab = uint32_t(embd->ne[1]);
    WeightReader reader(*model);
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
    for (uint32_t il = hp.n_layer; il < hp.n_layer + hp.n_nextn; il++) {
        reader.nextn(il);
    }
    reader.finish();
    return model;
}

void Model::stand_in() {
    for (auto &[tensor, source] : tensors_) {
        tensor->data = const_cast<uint8_t *>(source->data);
    }
}

void Model::load(const std::function<bool(float)> &progress) {
    if (!device_->gpu) {
        for (const auto &part : file_->parts()) {
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
