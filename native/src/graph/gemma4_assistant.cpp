// An assistant of Gemma 4 (MTP) drafts a chain with the target's K and V: it is a few small layers of the target's kind that
// have queries alone, between two projections, and has a vocabulary of its own width. Names and shapes follow llama.cpp's
// GGUF conventions (architecture gemma4-assistant), or those of forks (gemma4_assistant, whose tensors outside the blocks begin
// with mtp.).
//
//   input   pre [embedding ; h]: the target's embedding of the token that the draft follows, scaled as the target scales it,
//           and the target's state after its output norm at the row that chose this token
//   layer   sliding layers read the cells of the target's last sliding layer that has some, global ones those of the last
//           global one; all drafts are at the anchor's position p and see the positions up to p - 1
//   output  logits of the normed state x; the next draft reads its own token and post x in the place of h
//
// Files of the small models order the vocabulary in clusters of one size, each with a centroid, and have logits of the tokens
// of those clusters alone whose centroids have the largest products with x.
#include "graph/gemma4_assistant.h"

#include "graph/gemma4.h"
#include "graph/keys.h"
#include "ops/shapes.h"

#include <algorithm>
#include <cmath>
#include <optional>

namespace luce {
namespace {

// The clusters of a vocabulary, of which a draft looks at some.
struct Clusters {
    ggml_tensor *centroids; // {e, clusters}
    ggml_tensor *order; // {V}: tokens, cluster by cluster
    int64_t size; // tokens of a cluster
    int64_t n_best; // a row's clusters
};

struct Assistant : Drafter {
    HParams hp; // its own: n_embd is e
    std::vector<Gemma4Layer> layers;
    std::vector<uint32_t> sources; // of each layer the target's whose cells it reads
    ggml_tensor *token_embd; // {E, V}  it is the target's
    ggml_tensor *pre; // {2E, e}
    ggml_tensor *post; // {e, E}
    ggml_tensor *norm; // {e}
    std::optional<Clusters> clusters;

    size_t n_layer() const override { return layers.size(); }
    void draft(Plain &g) const override;
    Val logits(Val h) const;
};

// Which model a file drafts for, and where it does not fit says so of both.
struct Pair {
    const GgufFile &file;
    const Model &model;

    [[noreturn]] void unlike(const std::string &own, const std::string &targets) const {
        fail(
            LUCE_E_FILE,
            "%s does not draft for %s: %s, and the model %s. Take the assistant that was made for this model",
            file.path().c_str(), model.file().path().c_str(), own.c_str(), targets.c_str());
    }
    void same(const char *what, int64_t own, int64_t targets) const {
        if (own != targets) {
            unlike(format("its %s is %lld", what, (long long) own), format("has %lld", (long long) targets));
        }
    }
};

// Returns the width of the models that it drafts for.
uint32_t read_target_width(const GgufFile &file) {
    const std::string key = prefix_of(file) + "embedding_length_out",
                      forks = prefix_of(file) + "n_embd_backbone";
    return uint32_t(
        file.integer(file.find(key) == nullptr && file.find(forks) != nullptr ? forks : key, 1, 1 << 20));
}

// E_UNSUPPORTED: it has parts that no assistant has had yet.
void check_parts(const GgufFile &file, const HParams &hp) {
    const std::string per_layer = prefix_of(file) + "embedding_length_per_layer_input";
    if (hp.moe.n_expert > 0 || file.integer_or(per_layer, 0, 0, 1 << 20) > 0) {
        fail(LUCE_E_UNSUPPORTED, "%s: luce has no assistants with %s", file.path().c_str(),
             hp.moe.n_expert > 0 ? "experts" : "per-layer embeddings");
    }
}

// Returns the target's last layer of a kind that has cells, whose heads a layer of its own has to have.
uint32_t find_source(const Pair &pair, const Weights &target, const AttentionShape &own) {
    const char *kind = own.window > 0 ? "sliding" : "global";
    for (size_t il = target.blocks.size(); il-- > 0;) {
        const Attention &a = *target.blocks[il].attention();
        if (a.has_cells() && (a.shape.window > 0) == (own.window > 0)) {
            pair.same(own.window > 0 ? "key_length_swa" : "key_length", own.head_dim, a.shape.head_dim);
            pair.same(format("head_count_kv in %s layers", kind).c_str(), own.n_head_kv, a.shape.n_head_kv);
            if (own.window > a.shape.window) { // K and V behind the target's window are gone
                pair.same("sliding_window", own.window, a.shape.window);
            }
            return uint32_t(il);
        }
    }
    pair.unlike(format("it has %s layers", kind), "has none");
}

uint32_t first_source(const GgufFile &file, const HParams &trunk) {
    uint32_t first = trunk.n_layer;
    for (const auto &own : gemma4_hparams(file).mixers) {
        const bool slides = std::get<AttentionShape>(own).window > 0;
        uint32_t il = trunk.n_layer;
        while (il > 0) {
            const auto *shape = std::get_if<AttentionShape>(&trunk.mixers[--il]);
            const bool has_cells = trunk.cells_of.empty() || trunk.cells_of[il] == il;
            if (shape != nullptr && has_cells && (shape->window > 0) == slides) {
                first = std::min(first, il);
                break;
            }
        }
    }
    return first;
}

// Names that llama.cpp has for a tensor, forks, and checkpoints.
constexpr const char *CENTROIDS[] = {"masked_embd_centroids.weight", "mtp.centroids.weight",
                                     "masked_embedding.centroids.weight"};
constexpr const char *ORDERS[] = {"masked_embd_ordering", "mtp.token_ordering.weight", "mtp.token_ordering",
                                  "masked_embedding.token_ordering"};
constexpr int64_t N_BEST = 32; // where the file does not say it, as transformers has it

template <size_t N> const char *first_there(const WeightReader &r, const char *const (&names)[N]) {
    const auto *found = std::find_if(names, names + N, [&](const char *name) { return r.has(name); });
    return found == names + N ? nullptr : *found;
}

std::optional<Clusters> read_clusters(WeightReader &r, int64_t e, int64_t V) {
    const GgufFile &file = r.file();
    const std::string keys = prefix_of(file), n_best = keys + "centroid_top_k";
    const char *centroids = first_there(r, CENTROIDS), *order = first_there(r, ORDERS);
    if (file.integer_or(keys + "use_ordered_embeddings", 1, 0, 1) == 0 ||
        (centroids == nullptr && order == nullptr)) {
        for (const char *unused :
             {"masked_embd_", "mtp.centroids.", "mtp.token_ordering", "masked_embedding."}) {
            r.forget(unused);
        }
        return std::nullopt;
    }
    const GgufTensor *given = centroids == nullptr ? nullptr : file.tensor(centroids);
    const int64_t n = given == nullptr ? 1 : given->ne[1];
    Clusters c = {};
    c.centroids = r.matrix(given == nullptr ? CENTROIDS[0] : centroids, e, n);
    c.order = r.order(order == nullptr ? ORDERS[0] : order, V);
    if (n > TOPK_MAX_N) {
        fail(LUCE_E_UNSUPPORTED, "%s: tensor %s has %lld centroids: luce looks at %d at most",
             file.path().c_str(), centroids, (long long) n, int(TOPK_MAX_N));
    }
    if (n < 1 || V % n != 0) {
        fail(LUCE_E_FILE, "%s: tensor %s has %lld centroids, which do not share out %lld tokens",
             file.path().c_str(), centroids, (long long) n, (long long) V);
    }
    c.size = V / n;
    c.n_best = std::min(file.integer_or(n_best, N_BEST, 1, 1 << 20), n);
    if (c.n_best > TOPK_MAX) {
        fail(LUCE_E_UNSUPPORTED, "%s: key %s is %lld: luce looks at %d clusters of a row at most",
             file.path().c_str(), n_best.c_str(), (long long) c.n_best, TOPK_MAX);
    }
    return c;
}

// E_UNSUPPORTED where no kernel looks rows of the head up.
void check_head([[maybe_unused]] const Model &model, [[maybe_unused]] const GgufFile &file,
                [[maybe_unused]] const ggml_tensor *head) {
#ifdef LUCE_USE_CUDA
    if (model.gpu() && !nextn_has_table(head->type)) {
        fail(LUCE_E_UNSUPPORTED,
             "%s: tensor %s has type %s: luce has no ordered vocabularies of that on a GPU: take a file in "
             "another type, or device \"cpu\"",
             file.path().c_str(), head->name, type_name(head->type));
    }
#endif
}

std::shared_ptr<Drafter> read_assistant(Model &model, const GgufFile &file, const HParams &trunk,
                                        const Weights &target) {
    const Pair pair = {file, model};
    if (&model.architecture() != &GEMMA4) {
        pair.unlike("it is an assistant of Gemma 4", std::string("is one of ") + model.architecture().name);
    }
    const std::string keys = prefix_of(file);
    const auto made = std::make_shared<Assistant>();
    Assistant &a = *made;
    a.hp = gemma4_hparams(file);
    check_parts(file, a.hp);
    check_shapes(file.path().c_str(), a.hp);
    const int64_t E = read_target_width(file), e = a.hp.n_embd, V = trunk.n_vocab;
    pair.same("embedding_length_out", E, trunk.n_embd);
    if (const GgufTensor *head = file.tensor("token_embd.weight"); head != nullptr && head->n_dims == 2) {
        pair.same("vocabulary", head->ne[1], V);
    }
    const std::vector<uint32_t> n_ff =
        per_block(file, keys + "feed_forward_length", a.hp.n_layer, 1, 1 << 20);

    WeightReader r(model, file);
    const auto outside = [&](const std::string &name) { // of the blocks
        return (r.has("nextn." + name) || !r.has("mtp." + name) ? "nextn." : "mtp.") + name;
    };
    a.token_embd = target.token_embd;
    a.pre = r.matrix(outside("pre_projection.weight"), 2 * E, e);
    a.post = r.matrix(outside("post_projection.weight"), e, E);
    a.norm = r.f32("output_norm.weight", {e});
    a.clusters = read_clusters(r, e, V);
    const char *head = r.has("output.weight") ? "output.weight" : "token_embd.weight";
    a.output = a.clusters ? r.table(head, e, V) : r.matrix(head, e, V);
    if (a.clusters) {
        check_head(model, file, a.output);
    }
    for (uint32_t il = 0; il < a.hp.n_layer; il++) {
        const AttentionShape &shape = std::get<AttentionShape>(a.hp.mixers[il]);
        a.sources.push_back(find_source(pair, target, shape));
        a.layers.push_back(read_gemma4_layer(r, a.hp, il, n_ff[il], 0, /*has_cells=*/false));
    }
    r.forget("token_embd.weight");
    r.forget("rope_freqs.weight");
    r.finish("", "assistants");
    a.form = Candidates::chain;
    a.reads = READS_HIDDEN | READS_CELLS;
    a.n_draft = LUCE_MAX_DRAFT;
    return made;
}

void Assistant::draft(Plain &g) const {
    const float eps = hp.rms_eps, by = std::sqrt(float(g.model.hparams().n_embd));
    Val x = matmul(concat(scale(embed(g, token_embd), by), kept_hidden(g)), pre); // {e, T}
    for (size_t i = 0; i < layers.size(); i++) {
        const Block &block = layers[i].block;
        const Attention &w = *block.attention();
        const Val q = gemma4_queries(matmul(luce::norm(x, block.attn_norm, eps), w.q), w, eps); // {D*H, T}
        const Val mixed = matmul(attend_committed(q, {g.cache.kv(sources[i])}, w.shape), w.out); // {e, T}
        x = gemma4_behind_attention(x, mixed, block, layers[i].own, eps);
    }
    Val z = logits(luce::norm(x, norm, eps));
    if (const uint32_t n = g.use().n_part; n > 0) {
        z = luce::first(z, n);
    }
    choose(z, /*ahead=*/true);
    keep_best(z);
}

// Returns the logits {V, T} of normed states {e, T}, and keeps what the next draft reads of these. (transformers caps none. A
// file may still say a cap, which would bring tokens back that are never chosen, and so is for heads without clusters.)
Val Assistant::logits(Val h) const {
    if (!clusters) {
        keep_hidden(matmul(h, post)); // {E, T}
        return softcap(matmul(h, output), hp.logit_softcap);
    }
    h = own_rows(h); // what looks rows of the head up reads them
    const auto [next, scores] = matmul(h, {post, clusters->centroids}); // {E, T} and {clusters, T}
    keep_hidden(next);
    const Val best = candidates(scores, nullptr, clusters->n_best);
    return cluster_logits(h, best, output, clusters->order, clusters->size);
}

} // namespace

const DrafterKind ASSISTANT = {"assistant", "an assistant",
                               [](const GgufFile &file) {
                                   const std::string name = file.string("general.architecture");
                                   return name == "gemma4-assistant" || name == "gemma4_assistant";
                               },
                               read_assistant, first_source};

} // namespace luce
