#include "engine/prompts.h"

#include "step/shapes.h"

#include <algorithm>

namespace luce {
namespace {

// Rows of an item that are read in one step.
struct Piece {
    uint32_t item;
    uint32_t first; // of the item's tokens
    uint32_t n;
    bool chooses; // the prompt ends with them
};

// One call: its pieces are read in steps of as many as fit, and each step books its sequences.
class Prompts {
public:
    Prompts(Engine &engine, const PromptItem *items, uint32_t n)
        : engine_(engine), items_(items), n_items_(n), chosen_(n) {}

    void check() const;
    void read();
    void tell(int32_t *choices, luce_status *status) const;

private:
    void check(const PromptItem &item) const;
    void check_images(const PromptItem &item) const;
    void check_gaps(const PromptItem &item) const;
    std::vector<PromptPlace> places(const Piece &piece) const;
    uint32_t tail_of(const PromptItem &item) const;
    void read(const std::vector<Piece> &pieces, bool tails);
    void step(StepKind kind, const Piece *pieces, size_t n);
    bool fit(const Piece *pieces, size_t n, StepKind kind) const;
    Sequence &of(const Piece &piece) const { return *items_[piece.item].sequence; }
    const int32_t *tokens(const Piece &piece) const { return items_[piece.item].tokens + piece.first; }

    Engine &engine_;
    const PromptItem *items_;
    const uint32_t n_items_;
    std::vector<Choice> chosen_; // of each item that ends its prompt
    bool begun_ = false; // a step of the call has run
};

void Prompts::check(const PromptItem &item) const {
    const CacheParams &c = engine_.params().cache;
    const uint32_t past = item.sequence->line().n_past();
    item.sequence->check_usable();
    if (item.n_images > 0) {
        check_images(item);
    }
    if (item.n_gaps > 0) {
        check_gaps(item);
    }
    engine_.check_tokens(item.tokens, item.n, item.n_images > 0);
    if (item.n > c.n_chunk) {
        fail(LUCE_E_ARG, "%u tokens of a prompt at once, expected at most %u (n_chunk)", item.n, c.n_chunk);
    }
    if (item.n > c.n_ctx - past) {
        fail(LUCE_E_CONTEXT, "%u tokens after %u do not fit into a context of %u", item.n, past, c.n_ctx);
    }
}

// Rows of images are named below -1, and all that are so named are of one.
void Prompts::check_images(const PromptItem &item) const {
    const CacheParams &c = engine_.params().cache;
    const uint32_t past = item.sequence->line().n_past(), E = engine_.model().hparams().n_embd;
    if (!engine_.cache().takes_images()) {
        fail(LUCE_E_UNSUPPORTED, "%s: %s", engine_.model().file().path().c_str(), NO_IMAGES);
    }
    uint32_t end = 0; // of the tokens that were looked at
    const auto all_text = [&](uint32_t to) {
        const int32_t *named =
            std::find_if(item.tokens + end, item.tokens + to, [](int32_t t) { return t < 0; });
        if (named != item.tokens + to) {
            fail(LUCE_E_ARG, "token %u is %d, and is of no image", uint32_t(named - item.tokens), *named);
        }
    };
    for (uint32_t i = 0; i < item.n_images; i++) {
        const luce_image_span &s = item.images[i];
        if (s.at < end || s.n < 1 || s.n > item.n || s.at > item.n - s.n || s.rows == nullptr ||
            s.n_embd != E) {
            fail(
                LUCE_E_ARG,
                "image span %u has rows %u and %u more of width %u, expected some of %u tokens, in order, of "
                "width %u",
                i, s.at, s.n, s.n_embd, item.n, E);
        }
        const uint64_t all = uint64_t(s.height) * s.width;
        if (s.height > c.n_ctx || s.width > c.n_ctx || s.first >= all || s.n > all - s.first ||
            s.first > past + s.at) {
            fail(LUCE_E_ARG, "image span %u has rows %u to %u of an image of %u x %u, at position %u", i,
                 s.first, s.first + s.n, s.height, s.width, past + s.at);
        }
        if (engine_.model().images_are_whole() && s.n != all) {
            fail(LUCE_E_ARG,
                 "image span %u has %u of an image's %u rows: the model's see each other, so a part of a "
                 "prompt has "
                 "all of them or none",
                 i, s.n, uint32_t(all));
        }
        all_text(s.at);
        end = s.at + s.n;
        if (std::any_of(item.tokens + s.at, item.tokens + end, [](int32_t t) { return t >= -1; })) {
            fail(LUCE_E_ARG, "image span %u: its rows want names below -1", i);
        }
    }
    all_text(item.n);
}

void Prompts::check_gaps(const PromptItem &item) const {
    constexpr int64_t MOST = 1 << 30;
    const Timeline &line = item.sequence->line();
    if (!engine_.params().cache.gaps) {
        fail(LUCE_E_ARG, "the engine was opened without gaps: its prompts leave nothing out");
    }
    if (item.n_images > 0) { // an image's rows have positions by their place in it
        fail(LUCE_E_ARG, "%u gaps among tokens with images: they come in items of their own", item.n_gaps);
    }
    int64_t end = int64_t(line.n_past()) + line.delta() + item.n;
    for (uint32_t i = 0; i < item.n_gaps; i++) {
        const luce_gap &gap = item.gaps[i];
        end += gap.n;
        if (gap.at >= item.n || gap.n < 1 || (i > 0 && gap.at <= item.gaps[i - 1].at) || end > MOST) {
            fail(LUCE_E_ARG,
                 "gap %u leaves %u positions out ahead of token %u, expected 1 or more ahead of one of %u "
                 "tokens, in order, and %lld positions at most",
                 i, gap.n, gap.at, item.n, (long long) MOST);
        }
    }
}

// An image at p stands at time p; its rows have heights and widths from p on, and what follows stands behind the longer side.
// Without axes its rows have a position each, as text has. Rows that see each other see up to the image's end.
std::vector<PromptPlace> Prompts::places(const Piece &piece) const {
    const PromptItem &item = items_[piece.item];
    const Timeline &line = of(piece).line();
    std::vector<PromptPlace> places;
    const luce_image_span *span = item.images, *const end = span + item.n_images;
    const luce_gap *gap = item.gaps, *const last_gap = gap + item.n_gaps;
    while (gap < last_gap && gap->at < piece.first) { // an earlier piece has left them out
        gap++;
    }
    int32_t delta = line.delta();
    for (uint32_t at = piece.first; item.n_images + item.n_gaps > 0 && at < piece.first + piece.n; at++) {
        if (gap < last_gap && gap->at == at) {
            delta += int32_t((gap++)->n);
        }
        const int32_t index = int32_t(line.n_past() + at - piece.first);
        while (span < end && at >= span->at + span->n) {
            span++;
        }
        if (span == end || at < span->at) {
            places.push_back({index + delta, index + delta, index + delta, nullptr, delta, index + 1});
            continue;
        }
        const uint32_t row = span->first + at - span->at;
        const float *values = span->rows + size_t(at - span->at) * span->n_embd;
        const int32_t first = index - int32_t(row);
        const int32_t end_of_row =
            engine_.model().images_are_whole() ? first + int32_t(span->height * span->width) : index + 1;
        if (!engine_.model().has_axes()) {
            places.push_back({index + delta, index + delta, index + delta, values, delta, end_of_row});
            continue;
        }
        const int32_t start = first + delta;
        PromptPlace place = {
            start,     start + int32_t(row / span->width), start + int32_t(row % span->width), values, delta,
            end_of_row};
        if (row + 1 == span->height * span->width) {
            delta += int32_t(std::max(span->height, span->width)) - int32_t(span->height * span->width);
            place.delta = delta;
        }
        places.push_back(place);
    }
    return places;
}

void Prompts::check() const {
    engine_.check_cancelled();
    uint32_t pages = 0;
    for (uint32_t i = 0; i < n_items_; i++) {
        try {
            check(items_[i]);
            if (items_[i].n_images > 0) {
                engine_.step().have_image_room();
            }
            pages += items_[i].sequence->line().pages_wanted(items_[i].n);
            engine_.need_pages(pages);
        } catch (const Error &e) {
            if (n_items_ == 1) {
                throw;
            }
            fail(e.code(), "item %u: %s", i, e.what());
        }
    }
}

// Counts the rows of a prompt's tail (step/tails.h). It cuts no image whose rows see each other: then it begins behind that.
uint32_t Prompts::tail_of(const PromptItem &item) const {
    const uint32_t rows = (item.sequence->line().n_past() + item.n) % TAIL;
    const uint32_t tail = item.last && rows <= engine_.cache().n_tail ? std::min(item.n, rows) : 0;
    for (uint32_t i = 0; i < item.n_images && engine_.model().images_are_whole(); i++) {
        const luce_image_span &s = item.images[i];
        if (s.at < item.n - tail && item.n - tail < s.at + s.n) {
            return item.n - s.at - s.n;
        }
    }
    return tail;
}

// A prompt's tail is a piece of its own, which is read after all that are not.
void Prompts::read() {
    std::vector<Piece> whole, tails;
    for (uint32_t i = 0; i < n_items_; i++) {
        const PromptItem &item = items_[i];
        const uint32_t tail = tail_of(item);
        if (tail < item.n) {
            whole.push_back({i, 0, item.n - tail, item.last && tail == 0});
        }
        if (tail > 0) {
            tails.push_back({i, item.n - tail, tail, true});
        }
    }
    try {
        read(whole, false);
        read(tails, true);
    } catch (...) {
        for (uint32_t i = 0; i < n_items_; i++) {
            items_[i].sequence->begin_step();
        }
        throw;
    }
    for (uint32_t i = 0; i < n_items_; i++) {
        items_[i].sequence->stay_last();
    }
}

// Says whether one step may have these pieces. Where rows' bits depend on how many there are, each is alone.
bool Prompts::fit(const Piece *pieces, size_t n, StepKind kind) const {
    const PromptLimits most = prompt_limits(engine_.params().cache, kind);
    uint32_t rows = 0, n_kv = 0;
    for (size_t i = 0; i < n; i++) {
        rows += pieces[i].n;
        n_kv += kv_bucket(of(pieces[i]).line().n_past() + pieces[i].n);
    }
    return n == 1 ||
           (engine_.cache().n_cut < PAGE && n <= most.prompts && rows <= most.rows && n_kv <= most.n_kv);
}

void Prompts::read(const std::vector<Piece> &pieces, bool tails) {
    for (size_t begin = 0, end = 0; begin < pieces.size(); begin = end) {
        const StepKind first = tails ? StepKind::prefill_tail : StepKind::prefill;
        bool chooses = false;
        for (; end < pieces.size() && fit(&pieces[begin], end + 1 - begin, first); end++) {
            chooses = chooses || pieces[end].chooses;
        }
        step(!tails && chooses ? StepKind::prefill_last : first, &pieces[begin], end - begin);
    }
}

void Prompts::step(StepKind kind, const Piece *pieces, size_t n) {
    engine_.in_step([&] {
        Step &step = engine_.step();
        for (uint32_t i = 0; i < n_items_ && begun_; i++) {
            items_[i].sequence->keep_logits();
        }
        for (size_t i = 0; i < n; i++) {
            of(pieces[i]).begin_step();
            of(pieces[i]).line().take_pages(pieces[i].n);
            engine_.feed_lagging(of(pieces[i]).line());
        }
        Batch batch(step.prefill_host(), engine_.cache());
        std::vector<int32_t> deltas; // behind each piece
        for (size_t i = 0; i < n; i++) {
            const Sequence &sequence = of(pieces[i]);
            const std::vector<PromptPlace> at = places(pieces[i]);
            batch.add_prompt(sequence.line(), sequence.choice_ctl(), tokens(pieces[i]), pieces[i].n, at);
            deltas.push_back(at.empty() ? sequence.line().delta() : at.back().delta);
            if (sequence.chooses() && pieces[i].chooses) {
                step.fetch_logits(uint32_t(i), 1);
            }
        }
        const bool images = batch.place_images(step.image_room(), engine_.model().hparams().n_embd);
        step.prefill(kind, batch.prompts(), batch.n_pages(), images);
        begun_ = true;
        for (size_t i = 0; i < n; i++) {
            const Piece &piece = pieces[i];
            of(piece).line().appended(tokens(piece), piece.n, deltas[i]);
            of(piece).end_step(Sequence::Rows::prompt, piece.chooses ? 1 : 0, uint32_t(i));
            if (piece.chooses) {
                chosen_[piece.item] = step.choices()[i];
            }
        }
    });
}

void Prompts::tell(int32_t *choices, luce_status *status) const {
    std::optional<Error> first;
    for (uint32_t i = 0; i < n_items_; i++) {
        const PromptItem &item = items_[i];
        status[i] = LUCE_OK;
        if (!item.last) {
            continue;
        }
        try {
            choices[i] = checked(chosen_[i], item.sequence->line().n_past());
        } catch (const Error &e) {
            status[i] = e.code();
            item.sequence->fail_with(e.what());
            first = first ? first : e;
        }
    }
    if (first) {
        throw Error(*first);
    }
}

} // namespace

void read_prompts(Engine &engine, const PromptItem *items, uint32_t n, int32_t *choices,
                  luce_status *status) {
    Prompts prompts(engine, items, n);
    prompts.check();
    prompts.read();
    prompts.tell(choices, status);
}

} // namespace luce
