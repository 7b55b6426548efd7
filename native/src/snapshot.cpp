// Saving and restoring a session's committed state. The bytes depend on the committed tokens only: pending rows
// are replayed first, the head catches up, and nothing beyond n_past is written.
//   header | tokens i32[n_past] | for each block: K and V rows, or state and window | the head's K and V rows of
//   positions 1 .. n_past - 1, and the hidden state of position n_past - 1
#include "session.h"

#include <cstring>

namespace luce {
namespace {

struct Header {
    char magic[8]; // "LUCESAVE"
    uint32_t version; // of this layout
    uint32_t kv_type; // ggml type id
    uint64_t model; // Model::identity
    uint64_t size; // of everything
    uint64_t checksum; // of everything, itself taken as 0
    uint32_t n_past;
    uint32_t has_head;
};
constexpr char MAGIC[8] = {'L', 'U', 'C', 'E', 'S', 'A', 'V', 'E'};
constexpr uint32_t VERSION = 1;

// 64 bits at a time: states are hundreds of megabytes.
uint64_t checksum(const uint8_t *data, uint64_t n) {
    uint64_t hash = 0x9e3779b97f4a7c15u ^ n;
    for (uint64_t i = 0; i < n; i += 8) {
        uint64_t word = 0;
        memcpy(&word, data + i, size_t(n - i < 8 ? n - i : 8));
        hash = (hash ^ word) * 0xff51afd7ed558ccdu;
        hash ^= hash >> 32;
    }
    return hash;
}

uint64_t checksum(Header header, const uint8_t *data) {
    header.checksum = 0;
    const uint64_t of_header = checksum(reinterpret_cast<const uint8_t *>(&header), sizeof(header));
    return of_header ^ checksum(data + sizeof(header), header.size - sizeof(header));
}

// One piece of the caches: `size` bytes of `tensor` from `offset`.
struct Piece {
    ggml_tensor *tensor;
    size_t offset, size;
};

// hidden_cell: where the hidden state of the last position lies.
std::vector<Piece> pieces(const HParams &hp, const Cache &cache, uint32_t n_past, uint32_t hidden_cell) {
    std::vector<Piece> list;
    const auto rows = [&](ggml_tensor *t, uint32_t first, uint32_t n) {
        if (n > 0) {
            list.push_back({t, first * t->nb[1], n * t->nb[1]});
        }
    };
    for (uint32_t il = 0; il < hp.n_layer; il++) {
        if (hp.recurrent[il]) {
            list.push_back({cache.delta(il).state, 0, ggml_nbytes(cache.delta(il).state)});
            list.push_back({cache.delta(il).window, 0, ggml_nbytes(cache.delta(il).window)});
        } else {
            rows(cache.kv(il).k, 0, n_past);
            rows(cache.kv(il).v, 0, n_past);
        }
    }
    if (cache.has_head() && n_past > 0) {
        rows(cache.head_kv().k, 1, n_past - 1);
        rows(cache.head_kv().v, 1, n_past - 1);
        rows(cache.hidden(), hidden_cell, 1);
    }
    return list;
}

uint64_t total_size(const std::vector<Piece> &list, uint32_t n_past) {
    uint64_t size = sizeof(Header) + n_past * sizeof(int32_t);
    for (const Piece &p : list) {
        size += p.size;
    }
    return size;
}

} // namespace

uint64_t Session::save_size() const {
    check_usable();
    return total_size(pieces(model_->hparams(), cache_, cache_.n_past(), 0), cache_.n_past());
}

void Session::save(uint8_t *data) {
    check_usable();
    failed_ = true; // until all of it has worked
    cache_.discard();
    step_->flush();
    step_->catch_up();
    const uint32_t n_past = cache_.n_past();
    const uint32_t hidden = cache_.owed().empty() ? 0 : uint32_t(cache_.owed().back());
    const std::vector<Piece> list = pieces(model_->hparams(), cache_, n_past, hidden);
    uint8_t *at = data + sizeof(Header);
    if (n_past > 0) {
        memcpy(at, cache_.tokens().data(), n_past * sizeof(int32_t));
        at += n_past * sizeof(int32_t);
    }
    for (const Piece &p : list) {
        step_->read(p.tensor, at, p.offset, p.size);
        at += p.size;
    }
    Header h{};
    memcpy(h.magic, MAGIC, sizeof(MAGIC));
    h.version = VERSION;
    h.kv_type = params_.kv_type;
    h.model = model_->identity();
    h.size = total_size(list, n_past);
    h.n_past = n_past;
    h.has_head = cache_.has_head();
    h.checksum = checksum(h, data);
    memcpy(data, &h, sizeof(h));
    failed_ = false;
}

void Session::restore(const uint8_t *data, uint64_t size) {
    Header h{};
    if (size < sizeof(h)) {
        fail(LUCE_E_ARG, "%llu bytes are no saved session", (unsigned long long) size);
    }
    memcpy(&h, data, sizeof(h));
    if (memcmp(h.magic, MAGIC, sizeof(MAGIC)) != 0 || h.version != VERSION) {
        fail(LUCE_E_ARG, "these bytes are no session saved by this version of luce");
    }
    if (h.size != size || h.checksum != checksum(h, data)) {
        fail(LUCE_E_ARG, "the saved session is damaged: %llu of %llu bytes, or its checksum is wrong",
             (unsigned long long) size, (unsigned long long) h.size);
    }
    if (h.model != model_->identity()) {
        fail(LUCE_E_ARG, "the session was saved with another model");
    }
    if (h.kv_type != uint32_t(params_.kv_type)) {
        fail(LUCE_E_ARG, "the session was saved with kv_type %s, this one has %s",
             h.kv_type < GGML_TYPE_COUNT ? type_name(ggml_type(h.kv_type)) : "?", type_name(params_.kv_type));
    }
    if (h.has_head != uint32_t(cache_.has_head())) {
        fail(LUCE_E_ARG, "the session was saved %s a NextN head, this one is %s",
             h.has_head ? "with" : "without", cache_.has_head() ? "with one" : "without");
    }
    if (h.n_past > params_.n_ctx) {
        fail(LUCE_E_ARG, "the saved session has %u tokens, this one's context is %u", h.n_past,
             params_.n_ctx);
    }
    const std::vector<Piece> list = pieces(model_->hparams(), cache_, h.n_past, 0);
    if (total_size(list, h.n_past) != size) {
        fail(LUCE_E_ARG, "the saved session's layout is another: %llu bytes, expected %llu",
             (unsigned long long) size, (unsigned long long) total_size(list, h.n_past));
    }
    const uint8_t *at = data + sizeof(h);
    std::vector<int32_t> tokens(h.n_past);
    if (h.n_past > 0) {
        memcpy(tokens.data(), at, h.n_past * sizeof(int32_t));
        check_tokens(tokens.data(), h.n_past);
        at += h.n_past * sizeof(int32_t);
    }
    failed_ = true; // until all of it has worked
    for (const Piece &p : list) {
        step_->write(p.tensor, at, p.offset, p.size);
        at += p.size;
    }
    cache_.restored(std::move(tokens));
    n_drafted_ = 0;
    failed_ = false;
}

} // namespace luce
