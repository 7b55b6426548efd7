#include "engine/cache.h"

#include "deltanet/sizes.h"
#include "graph/drafter.h"

#include <algorithm>

namespace luce {

Pool::Pool(uint32_t n) : users_(n, 0) {
    free_.reserve(n);
    for (uint32_t i = n; i > 0; i--) {
        free_.push_back(int32_t(i - 1));
    }
}

int32_t Pool::take() {
    if (free_.empty()) {
        fail(LUCE_E_INTERNAL, "a pool is empty that was counted before");
    }
    const int32_t id = free_.back();
    free_.pop_back();
    users_[size_t(id)] = 1;
    return id;
}

void Pool::release(int32_t id) {
    if (--users_[size_t(id)] == 0) {
        free_.push_back(id);
    }
}

// ---- device memory ----

uint32_t CacheParams::max_pages() const {
    uint32_t rows = n_rows;
    for (const DrafterUse &use : drafters) {
        rows = std::max(rows, use.n_block);
    }
    return (n_ctx + rows + PAGE - 1) / PAGE;
}

uint32_t CacheParams::most_drafts() const {
    uint32_t most = 0;
    for (const DrafterUse &use : drafters) {
        most = std::max(most, use.n_draft);
    }
    return most;
}

// Returns the model's drafters that some use has, in the model's order.
static std::vector<const Drafter *> drafters_of(const Weights &weights, const std::vector<DrafterUse> &uses) {
    std::vector<const Drafter *> used;
    for (const auto &drafter : weights.drafters) {
        const auto is_it = [&](const DrafterUse &use) { return use.drafter == drafter->index; };
        if (std::any_of(uses.begin(), uses.end(), is_it)) {
            used.push_back(drafter.get());
        }
    }
    return used;
}

// Returns the widest window of the trunk's sliding layers, or 0.
static uint32_t widest_window(const Weights &weights) {
    uint32_t widest = 0;
    for (const Block &block : weights.blocks) {
        widest = std::max(widest, block.attention() == nullptr ? 0 : block.attention()->shape.window);
    }
    return widest;
}

// Returns how many window pages there have to be: so many positions in a row lie in two pages more than they fill, at most.
static uint32_t count_window_pages(const CacheParams &p, uint32_t window) {
    const auto of = [&](uint64_t positions) {
        return uint32_t(std::min<uint64_t>((positions + 2 * PAGE - 2) / PAGE, p.max_pages()));
    };
    // A step writes a chunk, or rows with those of a round ahead and drafts, and moves accepted rows of the last one.
    const uint32_t longest = std::max(p.n_chunk, uint32_t(4 * MAX_ROWS)) + uint32_t(MAX_ROWS);
    // One window more is for a sequence that resumes from host memory: it has new pages before its old ones go back.
    return window == 0 ? 0
                       : p.n_sequences * of(uint64_t(window) + longest) + (p.n_checkpoints + 1) * of(window);
}

Cache::Cache(const Model &model, const CacheParams &params)
    : pages(params.n_pages), window_pages(count_window_pages(params, widest_window(model.weights()))),
      sequence_slots(params.n_sequences), checkpoint_slots(params.n_checkpoints), params_(params),
      max_pages_(params.max_pages()), window_(widest_window(model.weights())),
      takes_images_(model.takes_images()), images_are_whole_(model.images_are_whole()),
      drafters_(drafters_of(model.weights(), params.drafters)), drafter_kv_(model.weights().drafters.size()) {
    size_t n_drafter = 0;
    for (const Drafter *drafter : drafters_) {
        n_drafter += drafter->kv.size();
    }
    for (const Placement &on : model.placements()) {
        const bool is_last = &on == &model.placements().back();
        stages_.emplace_back(model, on, 6 * (on.end - on.first) + (is_last ? 2 * n_drafter + 2 : 0));
    }
    if (model.n_ranks() > 1 && model.gpu()) {
        const uint32_t rows = std::max(uint32_t(MAX_ROWS), std::min(params.n_chunk, params.n_ctx));
        const uint32_t verified = std::min(uint32_t(MAX_ROWS), params.n_rows * params.n_sequences);
        exchange_ = std::make_unique<Exchange>(model, rows, std::max(verified, uint32_t(MAX_PROMPTS)));
        for (uint32_t rank = 0; rank < model.n_ranks(); rank++) {
            stages_[rank].state_bytes += exchange_->bytes();
        }
    }
    host_context_ = new_context(ggml_tensor_overhead() * 2);
    ggml_context *last = stages_.back().tensors.get(), *host = host_context_.get();
    uint64_t &last_bytes = stages_.back().state_bytes;
    const int64_t n_slots = params.n_sequences + params.n_checkpoints;
    const auto cells = [&](Stage &stage, const AttentionShape &s, bool sliding) {
        const auto pool = [&] {
            return ggml_new_tensor_4d(stage.tensors.get(), params.kv_type, s.head_dim, PAGE, s.n_head_kv,
                                      sliding ? window_pages.n_free() : params.n_pages);
        };
        KvCells kv = {pool(), pool(), sliding};
        stage.kv_bytes += ggml_nbytes(kv.k) + ggml_nbytes(kv.v);
        return kv;
    };
    // Of a layer of the trunk, a tensor of its own in the place of the third that a layer may have.
    const auto score = [&](Stage &stage, const AttentionShape &s, KvCells &kv) {
        if (params.scores && kv.k != nullptr && s.window == 0) {
            kv.scores =
                ggml_new_tensor_2d(stage.tensors.get(), GGML_TYPE_F32, int64_t(max_pages_) * PAGE, s.n_head);
            stage.state_bytes += ggml_nbytes(kv.scores);
        }
    };
    for (Stage &stage : stages_) {
        for (uint32_t il = stage.first; il < stage.end; il++) {
            const Block &block = model.weights().blocks[il];
            const Attention *a = block.attention();
            if (block.moe() != nullptr && model.experts_at_home()) {
                expert_slots_.emplace_back(stage, *block.moe(), params.n_expert_slots);
            }
            kv_.push_back(a != nullptr && a->has_cells() ? cells(stage, a->shape, a->shape.window > 0)
                                                         : KvCells{});
            DeltaState &d = delta_.emplace_back();
            if (a != nullptr) {
                score(stage, a->shape, kv_.back());
                continue;
            }
            const DeltaNetShape &s = block.deltanet()->shape;
            DeltaShape log{};
            log.R = int32_t(params.n_rows);
            log.Hk = int32_t(s.n_k_heads);
            log.Hv = int32_t(s.n_v_heads);
            log.S = int32_t(s.state_size);
            ggml_context *ctx = stage.tensors.get();
            d.state =
                ggml_new_tensor_4d(ctx, GGML_TYPE_F32, s.state_size, s.state_size, s.n_v_heads, n_slots);
            d.window = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, s.conv_dim(), CONV_TAPS - 1, n_slots);
            d.log = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, log.log_size(), params.n_sequences);
            stage.state_bytes += ggml_nbytes(d.state) + ggml_nbytes(d.window) + ggml_nbytes(d.log);
        }
    }
    drafts_ = ggml_new_tensor_2d(last, GGML_TYPE_I32, 2, choice_entry(MAX_ENQUEUED, 0));
    last_bytes += ggml_nbytes(drafts_);
    given_ = ggml_new_tensor_2d(host, GGML_TYPE_I32, 2, choice_entry(MAX_ENQUEUED, 0));
    host_bytes_ = ggml_nbytes(given_);
    if (params.n_top > 0) {
        uint32_t size = 0;
        for (const Drafter *drafter : drafters_) {
            size = std::max(size, drafter->list_size(params.n_top));
        }
        lists_ = ggml_new_tensor_2d(host, GGML_TYPE_I32, size, choice_entry(0, 0));
        host_bytes_ += ggml_nbytes(lists_);
    }
    for (const Drafter *drafter : drafters_) {
        for (const AttentionShape &shape : drafter->kv) {
            drafter_kv_[drafter->index].push_back(cells(stages_.back(), shape, false));
        }
        lagging_ |= uint32_t(drafter->lags()) << drafter->index;
        if ((drafter->reads & READS_HIDDEN) != 0 && hidden_ == nullptr) {
            hidden_ = ggml_new_tensor_2d(last, GGML_TYPE_F32, model.hparams().n_embd,
                                         n_slots * (2 * int64_t(params.n_rows) + 1) + 2);
            last_bytes += ggml_nbytes(hidden_);
        }
    }
    // Until allocate() nothing is for the graph allocator to place.
    set_data(reinterpret_cast<void *>(uintptr_t(256)));
}

void Cache::set_data(void *data) {
    const auto set = [&](ggml_context *ctx) {
        for (ggml_tensor *t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
            t->data = data;
        }
    };
    for (const Stage &stage : stages_) {
        set(stage.tensors.get());
    }
    set(host_context_.get());
}

void Cache::allocate() {
    set_data(nullptr);
    for (Stage &stage : stages_) {
        stage.allocate();
    }
    if (exchange_) {
        exchange_->allocate(stages_);
    }
    const auto add_pool = [](Stage &stage, const KvCells &kv) {
        if (kv.k != nullptr) {
            const auto at = [](const ggml_tensor *t) { return static_cast<uint8_t *>(t->data); };
            (kv.sliding ? stage.window_pools : stage.pools)
                .push_back({at(kv.k), at(kv.v), kv.k->type, int32_t(kv.k->ne[2]), int32_t(kv.k->ne[0])});
        }
    };
    for (Stage &stage : stages_) {
        for (uint32_t il = stage.first; il < stage.end; il++) {
            add_pool(stage, kv_[il]);
        }
    }
    for (const std::vector<KvCells> &layers : drafter_kv_) {
        for (const KvCells &kv : layers) {
            add_pool(stages_.back(), kv);
        }
    }
    host_buffer_ = pinned(last().device, host_bytes_, "what steps have chosen");
    ggml_backend_buffer_clear(host_buffer_.get(), 0);
    uint8_t *base = static_cast<uint8_t *>(ggml_backend_buffer_get_base(host_buffer_.get()));
    ggml_backend_tensor_alloc(host_buffer_.get(), given_, base);
    if (lists_ != nullptr) {
        ggml_backend_tensor_alloc(host_buffer_.get(), lists_, base + ggml_nbytes(given_));
    }
}

uint64_t Cache::bytes(const Stage &stage) const {
    const bool counts_host = &stage == &last() && !stage.device.gpu;
    return stage.kv_bytes + stage.state_bytes + stage.expert_bytes + (counts_host ? host_bytes_ : 0);
}

const ExpertSlots *Cache::slots_of(const Moe &moe) const {
    const auto is_its = [&](const ExpertSlots &slots) { return &slots.moe == &moe; };
    const auto found = std::find_if(expert_slots_.begin(), expert_slots_.end(), is_its);
    return found == expert_slots_.end() ? nullptr : &*found;
}

uint64_t Cache::layer_bytes(uint32_t layer) const {
    uint64_t bytes = 0;
    const DeltaState &d = delta_[layer];
    for (const ggml_tensor *t : {kv_[layer].k, kv_[layer].v, d.state, d.window, d.log}) {
        bytes += t == nullptr ? 0 : ggml_nbytes(t);
    }
    return bytes;
}

const Stage *Cache::stage_of(size_t layer) const {
    const auto has = [&](const Stage &stage) { return layer < stage.end; };
    return &*std::find_if(stages_.begin(), stages_.end(), has);
}

// Calls fill(first, n) for each run of those of `all` that nobody holds.
template <typename Pool, typename Fill> static void each_free_run(const Pool &all, int32_t count, Fill fill) {
    for (int32_t first = 0, end = 0; first < count; first = end + 1) {
        for (end = first; end < count && all.users(end) == 0; end++) {
        }
        if (end > first) {
            fill(first, end - first);
        }
    }
}

void Cache::poison() {
    for (ExpertSlots &slots : expert_slots_) {
        slots.poison(false);
    }
    const auto rows = [](ggml_tensor *t, int64_t first, int64_t n, size_t row) {
        ggml_backend_tensor_memset(t, 0xff, size_t(first) * row, size_t(n) * row);
    };
    const auto poison_pages = [&](const Pool &pool, int32_t count, bool sliding) {
        each_free_run(pool, count, [&](int32_t first, int32_t n) {
            const auto cells = [&](const KvCells &kv) {
                if (kv.k != nullptr && kv.sliding == sliding) {
                    rows(kv.k, first, n, kv.k->nb[3]);
                    rows(kv.v, first, n, kv.v->nb[3]);
                }
            };
            std::for_each(kv_.begin(), kv_.end(), cells);
            for (const std::vector<KvCells> &layers : drafter_kv_) {
                std::for_each(layers.begin(), layers.end(), cells);
            }
        });
    };
    poison_pages(pages, int32_t(params_.n_pages), false);
    poison_pages(window_pages, int32_t(count_window_pages(params_, window_)), true);
    const auto states = [&](int32_t slot, int32_t n) {
        for (const DeltaState &d : delta_) {
            if (d.state != nullptr) {
                rows(d.state, slot, n, d.state->nb[3]);
                rows(d.window, slot, n, d.window->nb[2]);
            }
        }
        if (keeps_hidden()) {
            const int64_t banks = 2 * int64_t(params_.n_rows) + 1;
            rows(hidden_, hidden_row(slot, 0, 0), n * banks, hidden_->nb[1]);
        }
    };
    const int32_t sequences = int32_t(params_.n_sequences);
    each_free_run(sequence_slots, sequences, [&](int32_t slot, int32_t n) {
        states(slot, n);
        for (const DeltaState &d : delta_) {
            if (d.log != nullptr) {
                rows(d.log, slot, n, d.log->nb[1]);
            }
        }
    });
    each_free_run(checkpoint_slots, int32_t(params_.n_checkpoints),
                  [&](int32_t slot, int32_t n) { states(sequences + slot, n); });
}

int32_t Cache::hidden_row(int32_t slot, int32_t bank, int32_t row) const {
    const int32_t R = int32_t(params_.n_rows);
    return slot * (2 * R + 1) + bank * R + row;
}

int32_t Cache::hidden_unused() const {
    return hidden_row(int32_t(params_.n_sequences + params_.n_checkpoints), 0, 0);
}

uint32_t Cache::first_window_page(uint32_t position) const {
    return position < window_ ? 0 : (position - window_ + 1) / PAGE;
}

void Cache::take(PageLists &lists, uint32_t n, uint32_t first) {
    while (lists.all.size() * PAGE < n) {
        if (has_windows()) {
            lists.window.push_back(lists.all.size() < first ? GONE : window_pages.take());
        }
        lists.all.push_back(pages.take());
    }
}

void Cache::share(const PageLists &lists) {
    for (const int32_t page : lists.all) {
        pages.share(page);
    }
    for (const int32_t page : lists.window) {
        if (page != GONE) {
            window_pages.share(page);
        }
    }
}

void Cache::release(PageLists &lists) {
    for (const int32_t page : lists.all) {
        if (page != GONE) {
            pages.release(page);
        }
    }
    for (const int32_t page : lists.window) {
        if (page != GONE) {
            window_pages.release(page);
        }
    }
    lists.all.clear();
    lists.window.clear();
}

template <typename F> void Cache::each_cells(bool sliding, const F &f) const {
    for (size_t il = 0; il < kv_.size(); il++) {
        if (kv_[il].k != nullptr && kv_[il].sliding == sliding) {
            f(stage_of(il), kv_[il], 0u);
        }
    }
    for (const Drafter *drafter : drafters_) {
        for (const KvCells &cells : drafter_kv_[drafter->index]) {
            if (cells.sliding == sliding) {
                f(&last(), cells, drafter->first);
            }
        }
    }
}

// Adds K and V of a layer's positions begin .. end - 1, which lie in one page.
static void add_cells(std::vector<Cache::Piece> &list, const Stage *on, const KvCells &cells, int32_t page,
                      uint32_t begin, uint32_t end) {
    const uint32_t n = end - begin;
    for (ggml_tensor *t : {cells.k, cells.v}) {
        const size_t at = size_t(page) * t->nb[3];
        if (n == PAGE) {
            list.push_back({on, t, at, t->nb[3]});
            continue;
        }
        for (int64_t head = 0; head < t->ne[2]; head++) { // it is a part of each head
            list.push_back({on, t, at + head * t->nb[2] + begin % PAGE * t->nb[1], n * t->nb[1]});
        }
    }
}

std::vector<Cache::Piece> Cache::rest_pieces(const PageLists &lists, uint32_t n_past, int32_t slot,
                                             int32_t hidden) const {
    std::vector<Piece> list;
    each_cells(true, [&](const Stage *on, const KvCells &cells, uint32_t) {
        for (uint32_t page = first_window_page(n_past); page * PAGE < n_past; page++) {
            add_cells(list, on, cells, lists.window[page], page * PAGE, std::min(n_past, (page + 1) * PAGE));
        }
    });
    const std::vector<Piece> state = state_pieces(slot, hidden);
    list.insert(list.end(), state.begin(), state.end());
    return list;
}

std::vector<Cache::Piece> Cache::kept_pieces(const PageLists &lists, uint32_t n_past, uint32_t first,
                                             uint32_t end) const {
    std::vector<Piece> list;
    for (uint32_t page = first; page < end; page++) {
        each_cells(false, [&](const Stage *on, const KvCells &cells, uint32_t begins) {
            const uint32_t from = std::max(page * PAGE, begins), to = std::min(n_past, (page + 1) * PAGE);
            if (from < to) {
                add_cells(list, on, cells, lists.all[page], from, to);
            }
        });
    }
    return list;
}

std::vector<Cache::Piece> Cache::page_pieces(const PageLists &lists, uint32_t i) const {
    std::vector<Piece> list;
    const auto kv = [&](const Stage *on, const KvCells &cells) {
        const int32_t page = (cells.sliding ? lists.window : lists.all)[i];
        for (ggml_tensor *t : {cells.k, cells.v}) {
            list.push_back({on, t, size_t(page) * t->nb[3], t->nb[3]});
        }
    };
    for (size_t il = 0; il < kv_.size(); il++) {
        if (kv_[il].k != nullptr) {
            kv(stage_of(il), kv_[il]);
        }
    }
    for (const Drafter *drafter : drafters_) {
        for (const KvCells &cells : drafter_kv_[drafter->index]) {
            kv(&last(), cells);
        }
    }
    return list;
}

std::vector<Cache::Piece> Cache::state_pieces(int32_t slot, int32_t hidden) const {
    std::vector<Piece> list;
    for (size_t il = 0; il < delta_.size(); il++) {
        if (const DeltaState &d = delta_[il]; d.state != nullptr) {
            list.push_back({stage_of(il), d.state, size_t(slot) * d.state->nb[3], d.state->nb[3]});
            list.push_back({stage_of(il), d.window, size_t(slot) * d.window->nb[2], d.window->nb[2]});
        }
    }
    if (keeps_hidden()) {
        list.push_back({&last(), hidden_, size_t(hidden) * hidden_->nb[1], hidden_->nb[1]});
    }
    return list;
}

// ---- one sequence ----

Timeline::Timeline(Cache &cache) : cache_(cache) {
    if (cache.sequence_slots.n_free() == 0) {
        fail(LUCE_E_MEMORY, "all %u sequences of the engine are open: close one, or open it with more",
             cache.params().n_sequences);
    }
    // Room is taken for all that it will hold, so that what a step or a commit has begun to book does not
    // lack memory.
    tokens_.reserve(cache.params().n_ctx);
    pages_.all.reserve(cache.max_pages());
    pages_.window.reserve(cache.has_windows() ? cache.max_pages() : 0);
    slot_ = cache.sequence_slots.take();
    clear();
}

Timeline::~Timeline() {
    cache_.release(pages_);
    cache_.sequence_slots.release(slot_);
}

void Timeline::clear() {
    cache_.release(pages_);
    tokens_.clear();
    delta_ = 0;
    debts_ = Debts();
    prompt_only_ = true;
    verified_.n = 0;
    hidden_bank_ = 0;
    hidden_ = cache_.hidden_zero();
    n_drafted_ = 0;
}

void Timeline::resume(const std::vector<int32_t> &tokens, const PageLists &pages, int32_t delta) {
    cache_.share(pages); // before its own are given back, since they may be the same
    clear();
    tokens_.assign(tokens.begin(), tokens.end());
    delta_ = delta;
    pages_.all.assign(pages.all.begin(), pages.all.end());
    pages_.window.assign(pages.window.begin(), pages.window.end());
    hidden_ = cache_.hidden_row(slot_, 0, 0);
    debts_.fresh = false;
}

uint32_t Timeline::pages_wanted(uint32_t n) const {
    const uint32_t need = (n_past() + n + PAGE - 1) / PAGE;
    return need > pages_.all.size() ? need - uint32_t(pages_.all.size()) : 0;
}

void Timeline::take_pages(uint32_t n) {
    cache_.take(pages_, n_past() + n);
}

// Gives back the window pages that no row sees any more. A page may be taken again at once: what writes to it is enqueued
// behind all that reads it.
void Timeline::release_behind_window() {
    const uint32_t moved = debts_.moves ? debts_.replay.n : 0; // rows that the next step has yet to move
    const size_t end = std::min<size_t>(cache_.first_window_page(n_past() - moved), pages_.window.size());
    for (size_t i = end; i > 0 && pages_.window[i - 1] != GONE; i--) {
        cache_.window_pages.release(pages_.window[i - 1]);
        pages_.window[i - 1] = GONE;
    }
}

void Timeline::fill(SeqCtl &seq, int32_t row0, int32_t n_rows, int32_t page_base) const {
    seq.slot = slot_;
    seq.fresh = debts_.fresh;
    seq.row0 = row0;
    seq.n_rows = n_rows;
    seq.n_past = int32_t(n_past());
    seq.bank = debts_.replay.bank;
    seq.n_replay = int32_t(debts_.replay.n);
    seq.moves = debts_.moves;
    seq.n_new = 0;
    seq.pages = page_base;
    std::copy_n(debts_.replay.rows, debts_.replay.n, seq.pending);
}

int32_t Timeline::next_hidden(int32_t row) const {
    const uint32_t unseen = debts_.unseen.n;
    return unseen > 0 ? behind_unseen(int32_t(unseen) + row)
                      : cache_.hidden_row(slot_, hidden_bank_ ^ 1, row);
}

bool Timeline::may_cut_ahead_of(int32_t token) const {
    const bool beside_image = !tokens_.empty() && std::min(tokens_.back(), token) < -1;
    return n_past() % std::min(cache_.n_cut, uint32_t(PAGE)) == 0 ||
           (cache_.images_are_whole() && beside_image);
}

void Timeline::appended(const int32_t *tokens, uint32_t n, int32_t delta) {
    debts_.pay();
    prompt_only_ = prompt_only_ && may_cut_ahead_of(tokens[0]);
    tokens_.insert(tokens_.end(), tokens, tokens + n);
    delta_ = delta;
    release_behind_window();
    verified_.n = 0;
    hidden_ = next_hidden(0);
    hidden_bank_ ^= 1;
    n_drafted_ = 0;
}

void Timeline::verified(const int32_t *tokens, const int32_t *parents, uint32_t n, bool seen) {
    debts_.pay();
    debts_.replay.bank ^= 1;
    verified_.n = n;
    verified_.seen = seen;
    std::copy_n(tokens, n, verified_.tokens);
    std::copy_n(parents, n, verified_.parents);
}

void Timeline::drafted(uint32_t drafter, int32_t anchor, uint32_t n) {
    debts_.moves = false;
    verified_.n = 0; // the drafter's KV of the verified rows is overwritten
    draft_anchor_ = anchor;
    n_drafted_ = n;
    drafter_ = drafter;
}

void Timeline::check_path(const int32_t *path, uint32_t n) const {
    if (n < 1 || n > verified_.n) {
        fail(LUCE_E_ARG, "a path has 1 to %u rows (the verified ones), got %u", verified_.n, n);
    }
    for (uint32_t i = 0; i < n; i++) {
        const int32_t row = path[i];
        if (row < 0 || uint32_t(row) >= verified_.n ||
            verified_.parents[row] != (i == 0 ? -1 : path[i - 1])) {
            fail(LUCE_E_ARG, "path entry %u is row %d, which does not follow %s", i, row,
                 i == 0 ? "the committed tokens" : format("row %d", path[i - 1]).c_str());
        }
    }
}

std::vector<int32_t> Timeline::before(uint32_t row) const {
    std::vector<int32_t> tokens = tokens_;
    for (int32_t at = verified_.n == 0 ? -1 : int32_t(row); at >= 0; at = verified_.parents[at]) {
        tokens.push_back(verified_.tokens[at]);
    }
    std::reverse(tokens.begin() + long(tokens_.size()), tokens.end());
    return tokens;
}

void Timeline::commit(const int32_t *path, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        tokens_.push_back(verified_.tokens[path[i]]);
    }
    std::copy_n(path, n, debts_.replay.rows);
    debts_.replay.n = n;
    const bool skips = path[n - 1] != int32_t(n) - 1; // a prefix lies where it belongs
    debts_.moves = skips;
    release_behind_window();
    const int32_t next = next_hidden(path[n - 1]);
    if (debts_.unseen.n == 0) {
        debts_.unseen.first_hidden = hidden_;
        hidden_bank_ ^= 1;
    }
    hidden_ = next;
    debts_.unseen.n += verified_.seen ? 0 : n;
    verified_.n = 0;
    prompt_only_ = false;
    n_drafted_ = 0;
}

} // namespace luce
