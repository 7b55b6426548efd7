#include "matmul/few_rows_plan.h"
#include "matmul/launch_plan.h"

#include "digest.h"

namespace {

uint8_t *const NOWHERE = reinterpret_cast<uint8_t *>(uintptr_t(1) << 20); // aligned, and never read
float *const FLOATS = reinterpret_cast<float *>(NOWHERE);


struct Product {
    int64_t K;
    std::vector<int64_t> N;
};
std::vector<Product> products_of(const Model &m) {
    const int64_t S = m.S, kv = int64_t(m.kv_heads) * m.D, inner = m.Hv * S;
    if (m.Hv == 0) { // Gemma, or a drafter with its taps
        return {{m.E, {int64_t(m.heads) * m.D, kv, kv}}, {int64_t(m.heads) * m.D, {m.E}}, {m.E, {m.FF, m.FF}}, {m.FF, {m.E}},
                {5 * m.E, {m.E}}, {m.E, {VOCABULARY}}};
    }
    return {{m.E, {(2 * m.Hk + m.Hv) * S, inner, m.Hv, m.Hv}}, // qkv, z, beta and alpha
            {inner, {m.E}},
            {m.E, {2 * int64_t(m.heads) * m.D, kv, kv}}, // q with its gates, k and v
            {int64_t(m.heads) * m.D, {m.E}},
            {m.E, {m.FF, m.FF}},
            {m.FF, {m.E}},
            {m.E, {VOCABULARY}},
            {2 * m.E, {m.E}}};
}
RowmmArgs product(const Product &of, int type, int T) {
    RowmmArgs a{};
    a.T = T;
    a.K = of.K;
    a.x = a.scratch = NOWHERE;
    for (const int64_t N : of.N) {
        const bool gates = N < 128; // beta and alpha
        a.weights[a.n_weights++] = {gates ? TYPE_F32 : type, N, NOWHERE, FLOATS, N, nullptr, 0};
    }
    return a;
}

// The split of K decides the bits: it is one for all numbers of rows, and for whatever way the launch goes.
void expect_same_split(const RowmmPlan &a, const RowmmPlan &b, const std::string &what) {
    const RowmmParams &p = a.params, &q = b.params;
    bool same = p.ranges == q.ranges && p.n_segments == q.n_segments;
    for (int r = 0; same && r <= p.ranges; r++) {
        same = p.first[r] == q.first[r] && (r == 0 || p.first[r - 1] < p.first[r]);
    }
    for (int i = 0; same && i < p.n_segments; i++) {
        same = p.segments[i].first_unit == q.segments[i].first_unit && p.segments[i].units_k == q.segments[i].units_k;
    }
    expect(same, "one split of K of " + what);
}

void check_product(const Card &card, RowmmArgs a, const RowmmPlan &one, const std::string &what) {
    const DeviceLimits &device = card.limits;
    const RowmmPlan plan = plan_rowmm(device, a);
    const RowmmParams &p = plan.params;
    expect(plan.fits, "a ring of " + what + " on " + card.name);
    expect_runs(card, plan.product, 512, what); // the kernels declare 512 bytes at most
    expect_runs(card, plan_sum(p), 0, what);
    expect_same_split(one, plan, what + " on " + card.name);
    // Code for 8.6, 8.9 and 12.0 has registers for one block where it has as many as it wants (launch_blocks).
    const bool one_block = card.capability == 86 || card.capability == 89 || card.capability == 120;
    const int blocks = one_block || (plan.way == RowmmWay::RING && p.columns == 64) ? 1 : plan.way == RowmmWay::WHOLE_K ? 1 : BLOCKS_PER_SM;
    const char *kernel = plan.way == RowmmWay::RING ? "rowmm" : plan.way == RowmmWay::WHOLE_K ? "rowmm of whole K" : "rowmm, normed first";
    expect_waves(kernel, card, plan.product.x, blocks_at_once(card, plan.product, 512, blocks), true, what);
    if (plan.way == RowmmWay::WHOLE_K) {
        expect(plan.product.x <= device.multiprocessors && a.T <= ROWMM_WHOLE_ROWS, "whole blocks at once of " + what);
        return;
    }
    const bool two_teams = plan.way == RowmmWay::RING && p.columns == 64;
    int units = 0;
    for (int r = 0; r < p.ranges; r++) {
        units = std::max(units, p.first[r + 1] - p.first[r]);
    }
    expect_of(kernel, card, p.slots >= std::min(units, 2), "one slot of the ring", what);
    expect(p.slots >= 1 && p.slots <= ROWMM_MAX_SLOTS, "slots of " + what + " on " + card.name);
    // Code for 9.0a takes its stages for known (matmul/rings.cuh).
    const int stages = plan.way == RowmmWay::RING ? rowmm_block(p.columns, plan.rows.wide, device.bulk_copies).stages : 0;
    expect(p.stages == stages || (one_block && p.stages >= 1), "stages of " + what + " on " + card.name);
    expect(plan.product.x == (two_teams ? (p.ranges + 1) / 2 : p.ranges), "a block for each range of " + what);
}

// An H200 is what the plans were measured on.
void check_h200() {
    const Product down = {17408, {5120}}, gate_up = {5120, {17408, 17408}};
    const RowmmPlan plain = plan_rowmm(H200, product(down, TYPE_Q4_K, 1)), wide = plan_rowmm(H200, product(gate_up, TYPE_Q4_K, 64));
    expect(plain.way == RowmmWay::RING && plain.params.ranges == 264 && plain.product.x == 264, "264 blocks of one row");
    expect(wide.rows.wide && wide.product.x == 132, "132 blocks of two teams");
    // Two blocks on a multiprocessor share 228 KiB, less 1 KiB each, what is left to others, and the rows: the rest are slots.
    const int room = 228 * KiB / 2 - KiB - 2560 - Shape<1, false>::row_bytes(1);
    expect(plain.params.slots == room / (8 * fragment_bytes(TYPE_Q4_K)), "as many slots as fit");
    expect(rows_gated_singly(H200) == 8, "gates of up to eight rows by rows");
}

Digest digest_of(const DeviceLimits &device) {
    Digest d;
    for (const int64_t K : {256, 1024, 2048, 2560, 4096, 5120, 6144, 17408, 25600}) {
        for (const int type : TYPES) {
            for (const std::vector<int64_t> &outputs :
                 {std::vector<int64_t>{48, 48}, {1024}, {5120}, {10240, 6144, 48, 48}, {17408, 17408}, {248320}}) {
                for (int T = 1; T <= ROWMM_MAX_ROWS; T++) {
                    for (const int way : {0, 1, 2}) { // as it is, normed in parts, and by the row
                        RowmmArgs a{};
                        a.T = T;
                        a.K = K;
                        a.x = a.scratch = NOWHERE;
                        for (const int64_t N : outputs) {
                            a.weights[a.n_weights++] = {N < 128 ? int(TYPE_F32) : type, N, NOWHERE, reinterpret_cast<float *>(NOWHERE),
                                                        N, nullptr, 0};
                        }
                        a.normed = way > 0;
                        a.parts = way > 0 ? reinterpret_cast<float *>(NOWHERE) : nullptr;
                        a.row = a.norm = way == 2 ? reinterpret_cast<float *>(NOWHERE) : nullptr;
                        if (way == 2 && (T > 1 || norm_first_shared(K, type) > device.shared_block)) {
                            continue;
                        }
                        const RowmmPlan plan = plan_rowmm(device, a);
                        const RowmmParams &p = plan.params;
                        d.add_plan(plan.product);
                        d.add_plan(plan_sum(p));
                        d.add(int(plan.way), plan.fits, p.ranges, p.slots, p.slot_bytes, p.columns, p.rows, plan.rows.set, plan.rows.wide);
                        for (int r = 0; T <= 1 && r <= p.ranges; r++) {
                            d.add(p.first[r], p.pairs[r / 2].range[0], p.pairs[r / 2].range[1], p.pairs[r / 2].apart);
                        }
                    }
                }
            }
        }
        for (int T = 1; T <= ROWMM_MAX_ROWS; T++) {
            for (const auto input : {ROWMM_PLAIN, ROWMM_RMS, ROWMM_GLU, ROWMM_HEAD_RMS}) {
                for (const bool parts : {false, true}) {
                    RowmmArgs from{};
                    RowmmPackArgs a{};
                    a.T = T;
                    a.K = K;
                    a.input = input;
                    a.parts = parts ? &from : nullptr;
                    const PackPlan plan = plan_pack(device, a);
                    d.add_plan(plan.launch);
                    d.add(plan.rows);
                }
            }
        }
    }
    return d;
}

} // namespace

// One wave of a prompt's tiles is enough where there are any, and they are for few rows, or few rows of weights, on Hopper alone.
void check_few_rows(const Card &card, const Product &of) {
    for (const int64_t T : {1, 64, 65, 128, 129, 512, 4096}) {
        const int form = few_form(card.limits, T, of.K, of.N);
        int64_t tiles = 0, most = 0;
        for (const int64_t N : of.N) {
            tiles += form < 0 ? 0 : divided(N, FEW_FORMS[form].columns) * divided(T, FEW_FORMS[form].rows);
            most = std::max(most, N);
        }
        expect(form < 0 || (card.limits.wgmma && tiles <= card.limits.multiprocessors && (T <= FEW_PROMPT_ROWS || most <= FEW_WEIGHTS)),
               "tiles of " + std::to_string(T) + " rows on " + card.name);
    }
}

// What the 27b's layers multiply 128 rows with, by the columns of their tiles.
void check_few_rows_of_the_27b() {
    const auto columns = [](int64_t T, int64_t K, const std::vector<int64_t> &sizes) {
        const int form = few_form(H200, T, K, sizes);
        return form < 0 ? 0 : FEW_FORMS[form].columns;
    };
    expect(columns(128, 5120, {10240, 6144, 48, 48}) == 136, "tiles of qkv, z, beta and alpha");
    expect(columns(128, 5120, {12288, 1024, 1024}) == 112, "tiles of q, k and v");
    expect(columns(128, 6144, {5120}) == 40 && columns(128, 17408, {5120}) == 40, "tiles of out and down");
    expect(columns(128, 5120, {17408}) == 136 && columns(128, 5120, {17408, 17408}) == 0, "gate and up are two waves");
    expect(columns(129, 5120, {1024}) == 0 && columns(2048, 5120, {48}) == 16, "more rows have tiles with few weights alone");
    expect(columns(128, 136, {1024}) == 0, "tiles need whole steps of K");
}

void plan_matmul(const Card &card) {
    const DeviceLimits &device = card.limits;
    for (const Model &m : MODELS) {
        for (const Product &of : products_of(m)) {
            check_few_rows(card, of);
            for (const int type : TYPES) {
                const RowmmPlan one = plan_rowmm(device, product(of, type, 1));
                for (const int T : SOME_ROWS) {
                    const std::string what = std::string(m.name) + "'s product of " + std::to_string(of.K) + " by type " +
                                             std::to_string(type) + " at " + std::to_string(T) + " rows";
                    RowmmArgs a = product(of, type, T);
                    check_product(card, a, one, what);
                    a.parts = FLOATS;
                    a.normed = 1;
                    check_product(card, a, one, what + ", normed, in parts");
                }
                RowmmArgs a = product(of, type, 1);
                a.row = a.norm = FLOATS;
                a.normed = 1;
                if (of.K == m.E && norm_first_shared(of.K, type) <= device.shared_block) { // else its row is packed, as others are
                    check_product(card, a, one, std::string(m.name) + "'s row, normed first");
                }
            }
        }
        for (int T = 1; T <= ROWMM_MAX_ROWS; T++) {
            for (const auto input : {ROWMM_PLAIN, ROWMM_RMS, ROWMM_GLU, ROWMM_HEAD_RMS}) {
                RowmmPackArgs a{};
                a.T = T;
                a.K = m.FF;
                a.input = input;
                const PackPlan plan = plan_pack(device, a);
                expect_runs(card, plan.launch, 4 * KiB, "packing");
                expect(plan.launch.y * plan.rows >= T, "a block for each row that is packed");
            }
        }
    }
    for (const int64_t K : {int64_t(200), int64_t(1536), int64_t(2816), int64_t(5376), ROWMM_POST_K}) {
        RowmmPackArgs a{};
        a.T = ROWMM_MAX_ROWS;
        a.K = K;
        a.input = ROWMM_RMS;
        a.post = FLOATS;
        const LaunchPlan plan = plan_pack(device, a).launch;
        expect_runs(card, plan, KiB, "packing behind a norm");
        expect(plan.x == a.T && plan.threads >= K / 8, "a block has a row that is normed whole, and a lane eight values");
    }
    check_h200();
    check_few_rows_of_the_27b();
    if (card.capability == 90) {
        pin(card, digest_of(device), 0x24c2896f829c9db0);
    }
}
