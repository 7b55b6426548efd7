// Checks what a rank makes of its part and of what the others have sent, where it sends its own, and that it does not wait for ever.
// The others' are sent by this program, ahead of the launch, so that one device is enough.
#include "exchange/exchange.h"
#include "made_parts.h"

#include <deque>

namespace {

// A rank among others, at its `count`-th exchange, with boxes for so many values.
struct Rank {
    int n, rank;
    int64_t values;
    std::deque<Device<uint8_t>> boxes;
    Device<int32_t> counts, failure;
    ExchangeRanks args = {};

    Rank(int n_ranks, int own, int64_t n_values, int count, bool dead = false)
        : n(n_ranks), rank(own), values(n_values), counts(filled(count, dead)), failure(std::vector<int32_t>(1, 0)) {
        args.rank = rank;
        args.n_ranks = n;
        args.slot = count % 2;
        args.counts = counts.p;
        args.failure = failure.p;
        args.values = args.step_values = values;
        for (int i = 0; i < n; i++) {
            boxes.emplace_back(std::vector<uint8_t>(size_t(exchange_box_bytes(n, values, values)), EXCHANGE_NOTHING));
            args.boxes[i] = boxes.back().p;
        }
    }
    static std::vector<int32_t> filled(int count, bool dead) {
        std::vector<int32_t> all(size_t(EXCHANGE_COUNTS), count);
        all.back() = dead;
        return all;
    }
    size_t place(int owner, int sender) const {
        return size_t(args.slot * (n - 1) + (sender < owner ? sender : sender - 1));
    }
    // Where values of a sender are, of a prompt and of a step, and its blocks' numbers.
    size_t rows_at(int owner, int sender) const { return place(owner, sender) * size_t(values) * 4; }
    size_t step_at(int owner, int sender) const {
        return 2 * size_t(n - 1) * size_t(values) * 4 + place(owner, sender) * size_t(args.step_values) * 4;
    }
    size_t numbers_at(int sender) const {
        return 2 * size_t(n - 1) * size_t(values + args.step_values) * 4 +
               size_t(sender) * EXCHANGE_BLOCKS * 4;
    }
    // What the others have sent, but for one of them.
    void arrive(const std::vector<Floats> &parts, int count, int but = -1) {
        std::vector<uint8_t> box(boxes[0].n, EXCHANGE_NOTHING);
        for (int other = 0; other < n; other++) {
            const uint32_t number = uint32_t(count + (other == but ? 0 : 1));
            const std::vector<uint32_t> numbers(EXCHANGE_BLOCKS, number);
            memcpy(&box[numbers_at(other)], numbers.data(), numbers.size() * 4);
            if (other != rank) {
                const Floats &part = parts[size_t(other)];
                memcpy(&box[rows_at(rank, other)], part.data(), part.size() * 4);
                memcpy(&box[step_at(rank, other)], part.data(), args.step_values > 0 && other != but ? part.size() * 4 : 0);
            }
        }
        boxes[size_t(rank)].set(box);
    }
    // Whether a step has sent the part to all others and no more, and has left nothing of theirs.
    bool sent_step(const Floats &part, int count) const { return sent(part, count, 0) && nothing_left(); }
    bool nothing_left() const {
        const std::vector<uint8_t> box = boxes[size_t(rank)].get();
        return std::all_of(box.begin() + ptrdiff_t(2 * size_t(n - 1) * size_t(values) * 4), box.begin() + ptrdiff_t(numbers_at(0)),
                           [](uint8_t byte) { return byte == EXCHANGE_NOTHING; });
    }
    // Whether `blocks` blocks with numbers, or blocks of a step, have sent the part to all others, or to one, and no more.
    bool sent(const Floats &part, int count, int64_t blocks, int to = -1) const {
        bool well = true;
        for (int other = 0; other < n; other++) {
            if (other == rank) {
                continue;
            }
            const std::vector<uint8_t> box = boxes[size_t(other)].get();
            std::vector<uint8_t> wanted(box.size(), EXCHANGE_NOTHING);
            if (blocks == 0) {
                memcpy(&wanted[step_at(other, rank)], part.data(), part.size() * 4);
            } else {
                const std::vector<uint32_t> numbers(size_t(blocks), uint32_t(count + 1));
                memcpy(&wanted[rows_at(other, rank)], part.data(), to < 0 || other == to ? part.size() * 4 : 0);
                memcpy(&wanted[numbers_at(rank)], numbers.data(), numbers.size() * 4);
            }
            well = well && box == wanted;
        }
        const std::vector<int32_t> reached = counts.get();
        for (int64_t b = 0; b < EXCHANGE_BLOCKS; b++) {
            well = well && reached[size_t(b)] == count + (b < blocks);
        }
        return well;
    }
};

Floats sum_of(const Floats &x, const std::vector<Floats> &parts) {
    Floats out(x.size());
    for (size_t i = 0; i < x.size(); i++) {
        float sum = parts[0][i];
        for (size_t rank = 1; rank < parts.size(); rank++) {
            sum += parts[rank][i];
        }
        out[i] = x[i] + sum;
    }
    return out;
}

std::vector<Floats> random_parts(int n, size_t values) {
    std::vector<Floats> parts;
    for (int rank = 0; rank < n; rank++) {
        parts.push_back(normals(values));
    }
    return parts;
}

// A NaN whose bits say that nothing is there.
float not_here() {
    const uint32_t bits = ~0u;
    float v;
    memcpy(&v, &bits, sizeof(v));
    return v;
}

// It is sent as another one.
void check_not_a_number() {
    const std::vector<Floats> parts = {Floats(64, not_here()), Floats(64, 1)};
    const Device<float> x(Floats(64, 1)), part(parts[0]), out(64);
    Rank here(2, 0, 64, 3);
    here.arrive(parts, 3);
    must(cuda::exchange({64, 1, x.p, part.p, out.p, here.args}, stream));
    must(cudaStreamSynchronize(stream));
    const uint32_t bits = ~0u >> 1;
    Floats sent(64);
    for (float &v : sent) {
        memcpy(&v, &bits, sizeof(v));
    }
    const Floats got = out.get();
    expect(here.sent_step(sent, 3) && std::all_of(got.begin(), got.end(), [](float v) { return std::isnan(v); }),
           "a NaN that would say that nothing is there is sent as another");
}

void check_rows(int n, int rank, int T, int E, int count, bool step) {
    const size_t values = size_t(T) * size_t(E);
    const std::vector<Floats> parts = random_parts(n, values);
    const Floats x = normals(values);
    const Device<float> dx(x), part(parts[size_t(rank)]), out(values);
    Rank here(n, rank, int64_t(values), count);
    here.args.step_values = step ? here.values : 0;
    here.arrive(parts, count);
    ExchangeArgs a{E, T, dx.p, part.p, out.p, here.args};
    must(cuda::exchange(a, stream));
    must(cudaStreamSynchronize(stream));
    const std::string name = "exchange of " + std::to_string(T) + " rows of " + std::to_string(E) + ", rank " +
                             std::to_string(rank) + " of " + std::to_string(n);
    expect(same_bits(out.get(), sum_of(x, parts)), name);
    const int64_t blocks = std::min<int64_t>((int64_t(values) + 1023) / 1024, EXCHANGE_BLOCKS);
    const Floats &own = parts[size_t(rank)];
    expect((step ? here.sent_step(own, count) : here.sent(own, count, blocks)) && here.failure.get()[0] == 0,
           name + ", what it sends");
}

void check_norm(int n, int rank, int T, int64_t K, int64_t N, int count) {
    const Parts own(T, K, {{12, N}});
    std::vector<Floats> parts = random_parts(n, size_t(T) * size_t(N));
    parts[size_t(rank)] = own.sums[0];
    const Floats x = normals(size_t(T) * size_t(N)), sum = sum_of(x, parts);
    Floats w = normals(size_t(N));
    for (float &v : w) { // so that no zero behind a row's end is negative
        v = std::fabs(v);
    }
    const Device<float> dx(x), dw(w), copy(x.size()), whole(sum);
    const Device<uint8_t> out(size_t(rowmm_x_bytes(T, N))), wanted(out.n);
    Rank here(n, rank, int64_t(x.size()), count);
    here.arrive(parts, count);
    ExchangeNormArgs a{};
    a.pack.T = T;
    a.pack.K = N;
    a.pack.input = ROWMM_RMS;
    a.pack.x = dx.p;
    a.pack.x_row = N;
    a.pack.w = dw.p;
    a.pack.out = out.p;
    a.pack.parts = &own.args;
    a.pack.copy = copy.p;
    a.pack.overlap = 1;
    a.ranks = here.args;
    RowmmPackArgs plain = a.pack;
    plain.parts = nullptr;
    plain.copy = nullptr;
    plain.x = whole.p;
    plain.out = wanted.p;
    must(cudaMemset(out.p, 0, out.n));
    must(cudaMemset(wanted.p, 0, wanted.n));
    must(cuda::exchange_norm(a, stream));
    must(cuda::rowmm_pack(plain, stream));
    must(cudaStreamSynchronize(stream));
    const std::string name = "exchange and norm of " + std::to_string(T) + " rows of " + std::to_string(N) + ", rank " +
                             std::to_string(rank) + " of " + std::to_string(n);
    expect(same_bits(copy.get(), sum), name + ", sums");
    expect(out.get() == wanted.get(), name + ", packed");
    expect(here.sent_step(parts[size_t(rank)], count), name + ", what it sends");
}

void check_gather(int n, int rank, int T, int64_t V, int count) {
    const int last = n - 1;
    const int64_t most = T * most_output_rows(V, n);
    std::vector<Floats> parts;
    Floats all(size_t(T * V));
    int64_t covered = 0;
    for (int r = 0; r < n; r++) {
        const OutputRows rows = output_rows(V, n, r);
        parts.push_back(normals(size_t(T * rows.n)));
        for (int64_t i = 0; i < T * rows.n; i++) {
            all[size_t(i / rows.n * V + rows.first + i % rows.n)] = parts.back()[size_t(i)];
        }
        covered += rows.n;
    }
    Rank here(n, rank, most, count);
    here.args.step_values = 0;
    here.arrive(parts, count);
    const Floats none(all.size(), -1);
    const Device<float> part(parts[size_t(rank)]), out(none);
    const GatherArgs a{V, output_rows(V, n, rank).n, T, part.p, rank == last ? out.p : nullptr, here.args};
    must(cuda::gather(a, stream));
    must(cudaStreamSynchronize(stream));
    const std::string name = "gather of " + std::to_string(T) + " rows of " + std::to_string(V) + ", rank " +
                             std::to_string(rank) + " of " + std::to_string(n);
    expect(covered == V && same_bits(out.get(), rank == last ? all : none), name);
    const int64_t blocks = std::min<int64_t>((most + 1023) / 1024, EXCHANGE_BLOCKS);
    expect(here.sent(parts[size_t(rank)], count, blocks, last) && here.failure.get()[0] == 0,
           name + ", what it sends");
}

// Who waited in vain before waits no more, and says for whom.
void check_dead() {
    const std::vector<Floats> parts = random_parts(3, 64);
    const Device<float> x(Floats(64, 1)), part(parts[0]), out(64);
    Rank here(3, 0, 64, 6, /*dead=*/true);
    here.arrive(parts, 6, /*but=*/2);
    must(cuda::exchange({64, 1, x.p, part.p, out.p, here.args}, stream));
    must(cudaStreamSynchronize(stream));
    expect(here.failure.get()[0] == 3, "an exchange with who does not answer ends and names it");
}

} // namespace

void check_exchange(bool) {
    for (const bool step : {true, false}) {
        check_rows(2, 0, 1, 64, 0, step);
        check_rows(2, 1, 1, 5120, 7, step);
        check_rows(3, 1, 5, 1024, 4, step);
    }
    check_rows(2, 0, 840, 2560, 1, false); // a block has several of its values in turn
    check_norm(2, 0, 1, 512, 5120, 3);
    check_norm(2, 1, 4, 2304, 1024, 4);
    check_norm(4, 2, 17, 512, 384, 5); // the last chunk is a half
    check_not_a_number();
    check_gather(2, 0, 1, 1024, 0);
    check_gather(2, 1, 3, 1024, 5);
    for (const int rank : {0, 1, 2}) {
        check_gather(3, rank, 2, 1000, 4); // the last tile is a part of one
    }
    check_gather(2, 1, 65, 65536, 1); // a block has several of its values in turn
    check_dead();
    ExchangeArgs a{};
    Rank here(2, 0, 64, 0);
    const Device<float> x(64), out(64);
    a = {64, 2, x.p, x.p, out.p, here.args};
    expect(cuda::exchange(a, stream) != 0, "an exchange of more values than a box holds is refused");
    a = {62, 1, x.p, x.p, out.p, here.args};
    expect(cuda::exchange(a, stream) != 0, "an exchange of an odd width is refused");
    a = {64, 0, x.p, x.p, out.p, here.args};
    expect(cuda::exchange(a, stream) == 0, "an exchange of no rows does nothing");
    const Device<float> logits(512);
    GatherArgs of{512, 128, 1, x.p, logits.p, Rank(2, 0, 512, 0).args};
    expect(cuda::gather(of, stream) != 0, "a gather of other rows than the rank has is refused");
    of = {512, 256, 1, logits.p, logits.p, Rank(2, 0, 128, 0).args};
    expect(cuda::gather(of, stream) != 0, "a gather of more values than a box holds is refused");
}
