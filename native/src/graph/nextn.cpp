// The NextN head (MTP) predicts the token after the next one, from a hidden state and the next token's embedding: it is one
// block of the target's kind between norms of its own and a language-model head.
#include "graph/nextn.h"

#include "graph/architecture.h"
#include "graph/blocks.h"

namespace luce {

static std::shared_ptr<Drafter> read_nextn(Model &model, const GgufFile &file, const HParams &trunk,
                                           const Weights &weights) {
    const Architecture &target = model.architecture();
    if (target.read_head == nullptr) {
        fail(LUCE_E_UNSUPPORTED, "%s: luce has no NextN heads of %s", file.path().c_str(), target.name);
    }
    std::shared_ptr<NextN> head = target.read_head(model, file, trunk, weights);
    head->form = Candidates::chain;
    head->reads = READS_HIDDEN;
    head->n_draft = LUCE_MAX_DRAFT;
    head->kv = {head->block.attention()->shape};
    head->first = 1; // the KV of position p comes from the hidden state at p - 1
    return head;
}

// Any file may hold a head, beside a trunk or alone: the reader says why one does not.
const DrafterKind NEXTN = {"nextn", "a NextN head", [](const GgufFile &) { return true; }, read_nextn,
                           /*reads_from=*/nullptr};

// eh_proj [RMS(embed(token)) * enorm ; RMS(h) * hnorm], h {E, T} -> {E, T}
Val NextN::input(Plain &g, Val before) const {
    const Val e = luce::norm(embed(g, token_embd), enorm, rms_eps);
    return matmul(concat(e, luce::norm(before, hnorm, rms_eps)), eh_proj);
}

void NextN::feed(Plain &g, const Seen &seen) const {
    const Val x = luce::norm(input(g, seen.before), block.attn_norm, rms_eps);
    write_kv(x, *block.attention(), kv_of(g, 0), rms_eps);
}

void NextN::draft(Plain &g) const {
    Val x = input(g, kept_hidden(g)); // {E, T}
    x = add(x, attention(luce::norm(x, block.attn_norm, rms_eps), *block.attention(), kv_of(g, 0), rms_eps));
    x = add(x, feed_forward(luce::norm(x, block.post_norm, rms_eps), block));
    const Val h = luce::norm(x, norm, rms_eps);
    keep_hidden(h);
    Val logits = matmul(h, output); // {V, T}
    if (const uint32_t n = g.use().n_part; n > 0) {
        logits = luce::first(logits, n);
    }
    choose(logits, /*ahead=*/true);
    keep_best(logits);
}

} // namespace luce
