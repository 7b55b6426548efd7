// Checks that one launch does what the conv and the delta rule of a DeltaNet layer do in two: the results of each row, and
// what is left in the caches, have the same bits. The product's parts are made here.
#include "made_parts.h"

#include <memory>
#include <numeric>

namespace {

// Has what a step of T rows of a layer takes besides the layer.
struct LayerStep {
    DeltaShape shape;
    const Parts &parts;
    Device<float> x, z, beta, alpha, o;

    // The step is of one sequence, however many slots the layer has.
    LayerStep(const Layer &layer, int T, const Parts &of)
        : shape(layer.delta_shape(T, DELTA_VERIFY)), parts(of), x(size_t(T) * layer.s.C()),
          z(size_t(T) * layer.s.Hv * layer.s.S), beta(size_t(T) * layer.s.Hv), alpha(beta.n), o(z.n) {
        shape.n_slots = 1;
    }
    void enqueue(const Layer &layer, const Device<uint32_t> &turns, bool one) const {
        const DeltaLayerArgs args = {
            {{shape, nullptr, layer.w.p, layer.window.p, layer.log.p, layer.ctl.p, x.p},
             &parts.args,
             {z.p, beta.p, alpha.p}},
            {shape, x.p, alpha.p, beta.p, layer.dt.p, layer.a.p, layer.state.p, layer.log.p, layer.ctl.p, o.p},
            turns.p};
        if (one) {
            must(cuda::deltanet_layer(args, stream));
        } else {
            must(cuda::conv_parts(args.conv, stream));
            must(cuda::deltanet(args.delta, stream));
        }
    }
};

struct LayerCheck {
    static constexpr int64_t K = 1024;
    Shape s;
    Layer layer;
    Device<uint32_t> turns{DELTA_TURN_BYTES / sizeof(uint32_t)};
    std::string name;

    LayerCheck(const Shape &shape, int R, int n_slots)
        : s(shape), layer(s, R, random_weights(s), normals(size_t(n_slots) * 3 * s.C()),
                          normals(size_t(n_slots) * s.Hv * s.S * s.S, 0.3f)),
          name("layer " + std::to_string(s.Hk) + "/" + std::to_string(s.Hv) + " R" + std::to_string(R) + " ") {
        turns.set(std::vector<uint32_t>(turns.n));
    }

    // Runs one launch, or two, of T rows, and returns their results, then z.
    std::pair<Floats, Floats> run(int T, const Parts &parts, bool one) {
        const LayerStep step(layer, T, parts);
        expect(cuda::deltanet_with_conv(step.shape) == (T == 1), name + "is one launch");
        step.enqueue(layer, turns, one);
        must(cudaStreamSynchronize(stream));
        return {step.o.get(), step.z.get()};
    }

    // Runs a step of T rows, of which the parents' rows are used, both ways, and accepts some of them.
    void step(int T, int slot, const Ints &parents, const std::string &what) {
        const int64_t values = int64_t(s.Hv) * s.S;
        const Parts parts(T, K, {{13, s.C()}, {12, values}, {8, s.Hv}, {0, s.Hv}});
        const int n = int(parents.size());
        const std::vector<::Part> rows = {{slot, {n, {}, {}, {}}, parents}};
        const Snapshot before = layer.snapshot();
        layer.set_ctl(rows);
        const auto expected = run(T, parts, false);
        const Snapshot after = layer.snapshot();
        layer.restore(before);
        layer.set_ctl(rows);
        const auto got = run(T, parts, true);
        const Snapshot now = layer.snapshot();
        const std::string of = name + what + ", " + std::to_string(n) + " of " + std::to_string(T) + " rows";
        expect(same_bits(got.first, expected.first), of); // what no row has is poison in both
        expect(same_bits(got.second, expected.second), of + ": z");
        expect(same_bits(now.state, after.state), of + ": state");
        expect(same_bits(now.window, after.window), of + ": window");
        expect(same_bits(now.log, after.log), of + ": log");
        const std::vector<uint32_t> counted = turns.get();
        expect(std::all_of(counted.begin(), counted.end(), [](uint32_t x) { return x == 0; }), of + ": turns");
        Timeline &timeline = layer.timelines[size_t(slot)];
        timeline = {n == 0 ? Ints() : path_to(parents, pick(n)), n == 0 ? timeline.bank : timeline.bank ^ 1, false};
    }
};

void check_steps(const Shape &s, int R, int rounds) {
    LayerCheck check(s, R, 2);
    check.step(1, 1, chain(1), "the first row");
    check.step(1, 1, chain(1), "the second row");
    check.step(1, 1, {}, "debts");
    check.layer.timelines[0].fresh = true;
    check.step(1, 0, chain(1), "a fresh row");
    const int most = std::min(2, R); // a step of two rows has two launches
    for (int T = 1; T <= most; T++) {
        check.step(T, 1, chain(T), "a chain");
        check.step(T, 1, random_tree(T, 16, false), "a tree");
        check.step(T, 1, random_order(T - 1), "unordered");
    }
    check.step(most, 1, Ints(size_t(most), -1), "siblings");
    check.layer.timelines[1].fresh = true;
    check.step(most, 1, Ints(size_t(most), -1), "fresh siblings");
    for (int i = 0; i < rounds; i++) {
        // Each third step is wide, and so leaves many rows to be replayed.
        const int T = i % 3 == 0 ? R : 1 + pick(most), n = pick(4) == 0 ? pick(T + 1) : T;
        const Ints parents[] = {chain(n), random_tree(n, 16, false), random_tree(n, 64, true), random_order(n)};
        check.layer.timelines[0].fresh = pick(5) == 0;
        check.step(T, check.layer.timelines[0].fresh ? 0 : pick(2), parents[pick(4)], "random rows");
    }
}

} // namespace

// A graph has all layers of a model, whose caches are their own, each behind the product that makes its parts. There are so
// many weights that they do not stay in L2.
static void time_layers(const char *model, const Shape &s, int64_t K, int n_layers) {
    const Weights w = random_weights(s);
    const Floats windows(size_t(3) * s.C()), states = normals(size_t(s.Hv) * s.S * s.S, 0.3f);
    Device<uint32_t> turns{DELTA_TURN_BYTES / sizeof(uint32_t)};
    turns.set(std::vector<uint32_t>(turns.n));
    std::vector<std::unique_ptr<Layer>> layers;
    for (int i = 0; i < n_layers; i++) {
        layers.push_back(std::make_unique<Layer>(s, 16, w, windows, states));
        layers.back()->log.set(Floats(layers.back()->log.n, 0.1f));
    }
    std::vector<std::unique_ptr<Device<uint8_t>>> weights;
    for (const int64_t N : {s.C(), s.Hv * s.S, s.Hv, s.Hv}) {
        for (int copy = 0; copy < 6; copy++) {
            weights.push_back(std::make_unique<Device<uint8_t>>(size_t(rowmm_packed_bytes(8, K, N))));
            must(int(cudaMemset(weights.back()->p, 0, weights.back()->n)));
        }
    }
    for (int T = 1; T <= 2; T++) {
        const Parts parts(T, K, {{8, s.C()}, {8, int64_t(s.Hv) * s.S}, {8, s.Hv}, {8, s.Hv}});
        for (const auto &layer : layers) {
            layer->timelines[0].pending = Ints(size_t(T + 1) / 2, 0);
            std::iota(layer->timelines[0].pending.begin(), layer->timelines[0].pending.end(), 0);
            layer->set_ctl({{0, {T, {}, {}, {}}, chain(T)}});
        }
        const LayerStep step(*layers[0], T, parts);
        Device<uint8_t> x(size_t(rowmm_x_bytes(T, K)));
        must(int(cudaMemset(x.p, 0, x.n)));
        const auto product = [&](int i) {
            RowmmArgs a = parts.args;
            a.x = x.p;
            a.overlap = 1;
            for (int j = 0; j < 4; j++) {
                a.weights[j].packed = weights[size_t(j * 6 + i % 6)]->p;
            }
            must(cuda::rowmm(a, stream));
        };
        const double alone = median_us(product, 40, n_layers);
        double us[2];
        for (int one : {0, 1}) {
            us[one] = median_us(
                [&](int i) {
                    product(i);
                    step.enqueue(*layers[size_t(i)], turns, one != 0);
                },
                40, n_layers);
        }
        printf("%s, %d rows: a product takes %5.2f us, with two launches behind it %5.2f, with one %5.2f\n", model, T,
               alone, us[0], us[1]);
    }
}

void check_deltanet_layer(bool all) {
    check_steps({2, 4, 128}, 8, all ? 60 : 12);
    check_steps({4, 12, 128}, 8, all ? 60 : 4);
    check_steps({1, 4, 128}, 1, all ? 20 : 2);
    if (all) {
        check_steps({4, 4, 128}, 8, 40);
        check_steps({16, 32, 128}, 16, 4);
        check_steps({16, 48, 128}, 16, 4);
    }
}

void time_deltanet_layer() {
    time_layers("35b-a3b", {16, 32, 128}, 2048, 30);
    time_layers("27b", {16, 48, 128}, 5120, 48);
}
