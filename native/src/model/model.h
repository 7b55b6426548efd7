// A loaded model has hyperparameters, and weights with their shapes (ggml order: fastest first). A layer's
// shape has what its caches and graph depend on. An architecture knows which tensors a file holds and how
// they are named.
#pragma once

#include "common/activation.h"
#include "model/device.h"
#include "model/gguf_file.h"
#include "model/split.h"

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <variant>
#include <vector>

namespace luce {

constexpr uint32_t MAX_DRAFTERS = 16; // of a model, and of an engine

// Yarn stretches RoPE beyond the trained context, by frequency (Peng et al., YaRN). Factor 1 means that it
// does not.
struct Yarn {
    float factor = 1; // the context is so many times longer
    uint32_t n_ctx_trained = 0; // the context had this length before it was stretched
    float attention = 1; // it scales queries and keys: 1 + 0.1 ln(factor) unless the file says otherwise
    // Between these turns over the trained context, frequencies are blended.
    float beta_fast = 32, beta_slow = 1;
};

struct AttentionShape {
    uint32_t n_head = 0; // H; it counts query heads
    uint32_t n_head_kv = 0; // Hkv
    uint32_t kv_copies = 1; // so many ranks have each of these heads, of which there are fewer than ranks
    uint32_t head_dim = 0; // D
    uint32_t value_dim = 0; // of a head of V
    uint32_t rope_dim = 0; // the first dims of a head rotate
    float rope_base = 0;
    // M-RoPE: pair j turns by a row's height where j % 3 is 1 and j < 3 * [1], by its width where j % 3 is 2 and j < 3 * [2],
    // else by its time. All 0: rows have one position, which is their index.
    int rope_sections[3] = {};
    uint32_t window = 0; // a row sees so many keys, itself included; 0 means all
    float scale = 0; // of scores; 0 means 1 / sqrt(head_dim)
    float softcap = 0; // it bounds scores; 0 means that nothing does
    Yarn yarn;

    bool has_axes() const { return rope_sections[0] > 0; }
};

struct DeltaNetShape {
    uint32_t n_k_heads = 0; // Hk
    uint32_t n_v_heads = 0; // Hv
    uint32_t state_size = 0; // S
    uint32_t n_inner = 0; // Hv*S, as the file says it
    uint32_t conv_taps = 0;
    uint32_t conv_dim() const { return (2 * n_k_heads + n_v_heads) * state_size; } // C
};

struct Attention {
    AttentionShape shape;
    bool gated; // sigmoid(gate) multiplies what a head gives
    ggml_tensor *q; // {E, D*H}, or with a gate {E, 2*D*H}: per head q(D) then gate(D)
    ggml_tensor *k; // {E, D*Hkv}; null where the layer reads the cells of one ahead of it
    ggml_tensor *v; // {E, D*Hkv}
    ggml_tensor *out; // {D*H, E}
    ggml_tensor *q_norm; // {D}
    ggml_tensor *k_norm; // {D}
    ggml_tensor *rope_factors = nullptr; // {rope_dim / 2}, by which RoPE's frequencies are divided, or null
    ggml_tensor *sinks = nullptr; // {H}: a score without a value in each head's softmax, or null

    bool has_cells() const { return k != nullptr; }
};

struct DeltaNet {
    DeltaNetShape shape;
    ggml_tensor *qkv; // {E, C}  q, k, v
    ggml_tensor *gate; // {E, Hv*S}  z
    ggml_tensor *conv; // {CONV_TAPS, C}  tap 0 is the oldest row
    ggml_tensor *dt; // {Hv}
    ggml_tensor *a; // {Hv}  it holds -exp(A_log)
    ggml_tensor *alpha; // {E, Hv}
    ggml_tensor *beta; // {E, Hv}
    ggml_tensor *norm; // {S}
    ggml_tensor *out; // {Hv*S, E}
};

struct Ffn { // This is a gated layer, such as SwiGLU.
    ggml_tensor *gate; // {E, FF}
    ggml_tensor *up; // {E, FF}
    ggml_tensor *down; // {FF, E}
};

struct MoeShape {
    uint32_t n_expert = 0;
    uint32_t n_used = 0; // a row has so many experts
    uint32_t n_ff = 0; // it is the FF of an expert
    uint32_t n_ff_shared = 0; // of the shared expert, where there is one
};

// This is a mixture of experts. Each row has the experts to which the router gives the largest logits. If
// there is a shared expert, each row has it too, scaled by its gate.
struct Moe {
    MoeShape shape;
    ggml_tensor *router; // {E, n}
    ggml_tensor *gate, *up; // {E, FF, n}; they are null where they are fused
    // {E, 2*FF, n}; an expert's gate comes before its up. It is null where they are apart.
    ggml_tensor *gate_up;
    ggml_tensor *down; // {FF, E, n}
    ggml_tensor
        *down_scale; // {n} factors of what they give, which down has too (scales_of); null: there are none
    ggml_tensor *shared_gate; // {E}; null means that there is no shared expert
    Ffn shared;
    Activation activation = SILU;
    bool in_ram = false; // gate, up and down stay in host memory, and are multiplied there
};

struct Block {
    std::variant<Attention, DeltaNet> mixer;
    ggml_tensor *attn_norm; // {E}
    ggml_tensor *post_norm; // {E} ahead of the FFN
    std::variant<Ffn, Moe> ffn;

    const Attention *attention() const { return std::get_if<Attention>(&mixer); }
    const DeltaNet *deltanet() const { return std::get_if<DeltaNet>(&mixer); }
    const Ffn *dense() const { return std::get_if<Ffn>(&ffn); }
    const Moe *moe() const { return std::get_if<Moe>(&ffn); }
};

// How rows of an image stand in a prompt: with three axes of RoPE where the model's rows have those, as rows of text do, or
// so that in sliding layers they see all rows of their image, and in others those before them.
enum class ImageRows { by_axes, as_text, see_each_other };

struct HParams {
    uint32_t n_vocab = 0; // V
    uint32_t n_embd = 0; // E
    uint32_t n_layer = 0; // it counts trunk blocks
    uint32_t n_nextn = 0; // it counts the NextN blocks in the file
    uint32_t n_ctx_train = 0;
    float rms_eps = 0;
    // What luce has to have kernels for: of each block, the trunk's and then the heads', its mixer.
    std::vector<std::variant<AttentionShape, DeltaNetShape>> mixers;
    std::vector<uint32_t>
        cells_of; // of each trunk block the one whose cells it reads; empty: each reads its own
    uint32_t n_ff = 0; // the FF of a dense block, where all have the same
    ImageRows image_rows = ImageRows::by_axes;
    float embedding_scale = 1; // it multiplies embeddings of tokens ahead of the first block
    float logit_softcap = 0; // logits z become softcap * tanh(z / softcap); 0 means that they do not
    MoeShape moe; // with n_expert 0 the model is dense
};

struct Drafter; // drafter.h defines it

// What an architecture alone has of tensors; its file derives a struct of its own.
struct OwnWeights {
    virtual ~OwnWeights() = default;
};

// What makes a rank's part of the logits.
struct RankOutput {
    ggml_tensor *norm; // {E}
    ggml_tensor *output; // {E, n_rows}, or {E, V}, of which these are the first
    int64_t n_rows;
};

struct Weights {
    ggml_tensor *token_embd; // {E, V}, of several ranks the last one's
    std::vector<ggml_tensor *> rank_embd; // each rank's; empty where there is one
    ggml_tensor *output_norm; // {E}
    // {E, V}; it is token_embd where the file ties them. Where ranks share its rows and nothing drafts, the last one's {E, n}.
    ggml_tensor *output;
    std::vector<RankOutput> rank_outputs; // each rank's; empty where the last device has all of it
    std::vector<Block> blocks; // Model::block_of
    std::vector<std::shared_ptr<const Drafter>> drafters; // as they were asked for
    std::shared_ptr<const OwnWeights> own; // null where the architecture has none

    // Whether a matrix gives the model's logits.
    bool is_output(const ggml_tensor *weight) const {
        return weight == output || std::any_of(rank_outputs.begin(), rank_outputs.end(),
                                               [&](const RankOutput &of) { return of.output == weight; });
    }
};

struct ContextFree {
    void operator()(ggml_context *c) const {
        void *const memory = ggml_get_mem_buffer(c);
        ggml_free(c);
        free(memory);
    }
};
using Context = std::unique_ptr<ggml_context, ContextFree>;

// Returns an empty context that holds tensors without their data. ggml_init() would abort where it finds no
// memory, and this throws std::bad_alloc.
inline Context new_context(size_t n_bytes) {
    void *const memory = malloc(n_bytes);
    if (memory == nullptr) {
        throw std::bad_alloc();
    }
    return Context(ggml_init({n_bytes, memory, /*no_alloc=*/true}));
}

// Says whether a tensor was made in the context.
inline bool holds(const Context &context, const ggml_tensor *tensor) {
    const auto *at = reinterpret_cast<const uint8_t *>(tensor);
    const auto *base = static_cast<const uint8_t *>(ggml_get_mem_buffer(context.get()));
    return at >= base && at < base + ggml_get_mem_size(context.get());
}

struct Architecture; // architecture.h defines it

// The file that a drafter is read from, which may be the model's own, and its kind (drafter.h): null is what the file says.
struct DrafterFile {
    std::shared_ptr<GgufFile> file;
    const char *kind;
};

constexpr char NO_IMAGES[] =
    "the model takes no images: its rows have no three axes (rope.dimension_sections)";

// Consecutive blocks of the trunk on one device: none on one that the output and the drafters have for themselves.
struct Placement {
    const Device *device;
    uint32_t first, end; // its blocks, of which a layer is one, or one of each rank
};

class Model {
public:
    // Reads hyperparameters and checks every tensor's presence, shape and type, and touches no weight. The
    // model can then build graphs, for measuring, but it cannot run until load(). The drafters must fit the trunk.
    // The experts of the first n_cpu_experts layers stay in host memory; E_ARG says that there are fewer such layers, or that a
    // split does not suit the model. Each GPU keeps up to copy_bytes of copies (copy_of). Where experts are at home, all of the
    // trunk's are (experts_at_home).
    static std::shared_ptr<Model> describe(std::shared_ptr<GgufFile> file,
                                           const std::vector<DrafterFile> &drafters, const Split &split,
                                           uint32_t n_cpu_experts = 0, uint64_t copy_bytes = 0,
                                           bool experts_at_home = false);

    // Places the weights. A CPU uses them in the mapping, and a GPU has them uploaded. progress gets 0..1,
    // and returns false to cancel.
    void load(const std::function<bool(float)> &progress);

    // Lets the weights count as placed, so that graphs over them can be measured.
    void stand_in();

    // In the order of layers, on devices of one kind. The first has the embeddings too, the last what is of no layer: the
    // output and the drafters. (An engine's memory and streams there are its stages: engine/stage.h.)
    const std::vector<Placement> &placements() const { return placements_; }
    size_t n_with_layers() const { // of the placements, the first ones
        return placements_.size() - (placements_.back().first == placements_.back().end);
    }
    // Ranks are the placements, the first ones, that have all layers each, with a part of their heads and widths: where layers
    // are whole there is one. A layer's blocks are of its shape, and of one rank each.
    uint32_t n_ranks() const { return n_ranks_; }
    uint32_t block_of(uint32_t layer, uint32_t rank) const { return rank * hp_.n_layer + layer; }
    uint32_t layer_of(uint32_t block) const { return block % hp_.n_layer; }
    uint32_t stage_of(uint32_t block) const; // which of these has it
    // Of each layer whether it lies where the one before it does (model/split.h).
    const std::vector<bool> &joined() const { return joined_; }
    bool gpu() const { return placements_[0].device->gpu; }
    bool is_cut() const { return placements_.size() > 1; } // into parts on several devices
    // Whether rows of images may stand in prompts, which they do with three axes of RoPE or as rows of text do.
    bool takes_images() const;
    // Whether rows of an image see each other: then a step has all of an image or none.
    bool images_are_whole() const { return hp_.image_rows == ImageRows::see_each_other; }
    bool has_axes() const;
    std::string device_names() const; // "cuda:0", or of several "cuda:0,cuda:1"
    const GgufFile &file() const { return *file_; }
    const Architecture &architecture() const { return *architecture_; }
    const HParams &hparams() const { return hp_; }
    const Weights &weights() const { return weights_; }
    uint64_t weight_bytes() const { return weight_bytes_; } // it counts those on the device
    // What lies on each placement, and of these each layer of the trunk. Copies count in both.
    std::vector<uint64_t> placed_bytes() const;
    std::vector<uint64_t> layer_bytes() const;
    uint64_t n_params() const { return n_params_; } // it counts the values of all tensors in the file
    // Shapes {K, N} of the packed matrices but for those over the vocabulary, of which a prefill wants one row, and experts.
    std::set<std::pair<int64_t, int64_t>> layer_matrices() const;
    // Returns a packed matrix of the trunk's layers as F16 {K, N}, or null where the model keeps none of it. Prompts'
    // products read it; without it they write the matrix out first, to the same values.
    ggml_tensor *copy_of(const ggml_tensor *weight) const;
    // The trunk's layers take so many bytes as they are, and so many more if a device had room for all copies.
    uint64_t bytes_of_layers() const;
    uint64_t bytes_to_copy() const;
    // Returns a hash of the loaded tensors' names, types, shapes and first bytes. It says which model a checkpoint belongs
    // to.
    uint64_t identity() const;
    // Returns in words what computes with it (Device::arithmetic), and of how many layers a CPU computes the experts. There, and
    // in one build, a cold prompt has the bits of a warm one.
    std::string arithmetic() const;
    // Says whether a layer is the first of its kind on its device. Layers of one kind launch the same kernels: they have the same
    // tensors, of the same types and shapes, and their attention looks equally far.
    bool first_of_kind(uint32_t layer) const { return first_of_kind_[layer]; }
    bool has(const ggml_tensor *weight) const; // it says whether this is one of its weights, or a copy
    // Returns the mixture of the first layer whose experts stay in host memory, or null where there is none.
    const Moe *in_ram() const;
    // Says whether the trunk's experts have their home in host memory, pinned and in the form of the device, which reads them
    // there. An engine has slots for some of them (engine/expert_slots.h).
    bool experts_at_home() const { return experts_at_home_; }

private:
    friend class WeightReader;
    void find_kinds();
    void plan_copies(uint64_t most);
    uint64_t copied_bytes(const ggml_tensor *tensor, uint32_t layer) const;
    uint32_t trunk_layer(const GgufTensor *source) const;
    void place_packed(uint32_t stage, bool at_home);
    void place_copies(uint32_t stage);
    std::string each_device(const std::function<std::string(const Device &)> &text) const;
    void place_mapped(bool all);
    void place_slices();
    uint64_t upload_stage(uint32_t stage, const std::function<bool(uint64_t)> &progress);

    std::shared_ptr<GgufFile> file_;
    std::vector<std::shared_ptr<GgufFile>> drafter_files_; // without the model's own
    std::vector<Placement> placements_;
    std::vector<bool> joined_;
    const Architecture *architecture_ = nullptr;
    HParams hp_;
    Weights weights_;
    std::vector<Context> contexts_; // one a placement
    std::vector<Context> copy_contexts_; // likewise
    std::map<const ggml_tensor *, ggml_tensor *> copies_; // by the matrix
    struct Loaded {
        ggml_tensor *tensor;
        const GgufTensor *source;
        Slice slice;
    };
    std::vector<Loaded> tensors_;
    std::deque<std::vector<float>> scales_; // what scales_of() gives, and what scalar() has read
    std::vector<Buffer> buffers_;
    uint64_t weight_bytes_ = 0;
    uint64_t n_params_ = 0;
    uint32_t n_cpu_experts_ = 0, n_ranks_ = 1;
    bool has_drafters_ = false; // or is to have some
    bool experts_at_home_ = false;
    std::vector<bool> first_of_kind_; // they are in the order of trunk blocks
};

// Says whether a matrix lies in the order of luce's own matmul (kernels/matmul/layout.h) and not in ggml's. On a GPU
// with that matmul, every matrix of a type that it has does. Type and shape are the file's, but the bytes are
// for that matmul alone. Tables, of which rows are looked up, stay as they are. Each matrix of a tensor's
// experts is packed alone.
bool is_packed(const ggml_tensor *weight);

// Returns how far one expert's matrices of a weight {K, N, experts} lie from the next one's, as its device has them.
uint64_t expert_bytes(const ggml_tensor *weight);

// The placement of the model's on which a weight lies.
uint32_t stage_of(const ggml_tensor *weight);

// Says whether ggml multiplies with a type on the CPU and on CUDA.
bool is_weight_type(ggml_type type);

// Returns a type's name as GGUF files have it: "Q4_K", "BF16".
const char *type_name(ggml_type type);

} // namespace luce
