// Checks attention over paged KV (attention_steps.h).
#include "attention_steps.h"

using namespace attention_test;

// Sinks, where rows have few chunks and many, with a window, in company, with and without gates, and of rows that see nothing.
static void check_sinks(int type) {
    check_case({4, 2, 64, type, 0, 0, 0, false, true}, {{255, 2}, {chain(7), any_tree(3)}, false, 7, 2},
               "few chunks");
    check_case({2, 1, 128, type, 1, 0, 3.0f, true, true}, {{2500}, {chain(2)}, false, 2, 1}, "many chunks");
    check_case({6, 1, 256, type, 0, 9, 0, false, true}, {{300, 0}, {chain(4), chain(2)}, true, 0, 2},
               "a window");
    check_case({6, 1, 256, type, 0, 9, 0, false, true}, {{300, 0}, {chain(4), chain(2)}, false, 4, 0},
               "a window");
    check_committed({4, 2, 64, type, 0, 33, 0, false, true}, {300, 0, 1}, {1, 2, 3}, "company");
}

// Any number of query heads over a KV head, among them more than a unit takes.
void check_attention_f32() {
    for (const KvShape &s :
         std::vector<KvShape>{{4, 2, 64, 0}, {34, 2, 64, 0}, {17, 1, 64, 0, 1, 70, 3.0f}}) {
        check_case(s, {{255}, {any_tree(7)}, false, 2}, "context 255");
        check_case(s, {{300, 30}, {any_tree(5), chain(3)}, true, 0}, "company");
        check_case(s, {{2500}, {chain(1)}, false, 1}, "many chunks");
        check_case(s, {{40, 30}, {{}, {}}, false, 0}, "sequences without rows");
    }
    check_committed({4, 2, 64, 0, 0, 33, 0, false}, {300, 0, 1, 33}, {1, 2, 3, 5}, "company");
    check_sinks(0);
    expect(cuda::attention_plan({}, nullptr, stream) == 0 && cuda::attention({}, stream) == 0,
           "attention of a step without rows");
}

// Each kernel (of a type of cells and a size of heads), where blocks have several units. Of one sequence a unit has more pairs
// than a warpgroup takes, of the other fewer. Then both have fewer, so that warpgroups take units by turns, and packed cells are
// unpacked ahead.
static void check_each_kernel() {
    const int first = watched() ? 150 : 400, decoded = watched() ? 1 : MAX_ROWS;
    const auto contexts = [&](int type) { // a tile of F32 has few keys, which keep a tool busy
        return watched() && type == 0 ? Ints{40 + pick(30), 20} : Ints{first + pick(100), 70};
    };
    for (int D : {64, 128, 256, 512}) {
        for (int type : {0, 1, 2, 8}) {
            const KvShape s{12, 2, D, type};
            check_case(s, {contexts(type), {any_tree(12), chain(3)}, false, 1, decoded},
                       "many pairs and few");
            check_case(s, {contexts(type), {any_tree(3), chain(2)}, true, 0, decoded}, "few pairs");
        }
    }
    check_case({12, 2, 128, 1, 1, 250, 5.0f}, {{600, 400}, {any_tree(12), chain(3)}, false, 1, decoded},
               "a window");
    check_case({8, 1, 512, 1, 0, 250, 0, false}, {{600, 400}, {any_tree(12), chain(3)}, true, 0, decoded},
               "a window");
    // Blocks take units one by one here.
    for (int type : {1, 8}) {
        check_case({6, 1, 256, type}, {{2300}, {chain(1)}, false, 1, watched() ? 1 : MAX_ROWS},
                   "many chunks");
    }
}

// Of many sequences a block has many units. A row alone has other blocks for each chunk.
static void check_many_sequences() {
    for (const KvShape &s :
         std::vector<KvShape>{{24, 4, 256, 1}, {8, 4, 64, 8}, {12, 4, 128, 1, 0, 3000}, {8, 4, 64, 0}}) {
        for (int rows : {1, 3, 4}) {
            Case c{{}, {}, false, 1};
            for (int i = 0; i < 8; i++) {
                c.contexts.push_back(3000 + pick(1500));
                c.parents.push_back(chain(rows));
            }
            check_case(s, c, "many units of " + std::to_string(rows) + " rows");
        }
    }
}

void check_attention_units(bool all) {
    multiprocessors_told = std::min(multiprocessors_told, 2); // so few blocks have all there is to see
    check_each_kernel();
    if (all) {
        check_attention_f32();
        check_many_sequences();
    }
    for (int type : {1, 2, 8}) {
        check_sinks(type);
    }
}

// Tensor cores, where they are emulated: one context of each type of cells and size of heads, of few pairs and of many.
void check_attention_tiles() {
    multiprocessors_told = std::min(multiprocessors_told, 2);
    for (int type : {1, 8, 2}) {
        for (int D : {64, 128, 256, 512}) {
            check_case({8, 2, D, type}, {{140 + pick(60)}, {any_tree(5)}, false, 2, 2}, "tiles");
        }
    }
    check_case({16, 1, 512, 1, 0, 70, 0, false}, {{150, 30}, {random_tree(5, 3, true), chain(1)}, true, 0, 2},
               "a window");
    check_case({4, 1, 512, 0, 0, 70, 0, false}, {{150, 30}, {random_tree(5, 3, true), chain(1)}, true, 0, 2},
               "a window");
    check_case({32, 2, 512, 1}, {{20}, {chain(1)}, false, 1, 1}, "more heads than a group has");
    for (int type : {0, 1, 8}) {
        check_committed({8, 2, 256, type, 0, 70, 0, false}, {128 + pick(60), 20}, {1, 2}, "a window");
        check_committed({8, 1, 512, type, 0, 0, 0, false}, {128 + pick(2), 1}, {3, 1}, "all");
    }
    check_sinks(1); // means of packed cells are as those of F16
}

void check_attention(bool all) {
    multiprocessors_told = std::min(multiprocessors_told, 2);
    for (const KvShape &s : SHAPES) {
        if (!all) { // a sanitizer gets one context of a shape
            const int turn = int(&s - SHAPES.data()), n = turn % 3 * (s.type == 0 ? 40 : 128);
            check_case(s, {{n}, {any_tree(1 + pick(8))}, turn % 2 == 1, 1, 2}, "a context");
            continue;
        }
        for (int n : {0, 1, 63, 127, 128, 129, 255, 256, 257}) {
            const int T = 1 + pick(64);
            for (bool spoiled : {false, true}) {
                const std::string what = (spoiled ? "spoiled context " : "context ") + std::to_string(n);
                check_case(s, {{n}, {any_tree(T)}, spoiled, spoiled ? 0 : 3}, what);
            }
        }
        for (int round = 0; round < 6; round++) { // other sequences keep it company
            Case c{{}, {}, round % 2 == 1, 2};
            int left = MAX_ROWS;
            for (int i = 0; i < 1 + pick(9); i++) {
                const int T = pick(3) == 0 ? pick(2) : std::min(left, pick(24));
                c.contexts.push_back(pick(1500));
                c.parents.push_back(any_tree(std::min(left, T)));
                left -= int(c.parents.back().size());
            }
            check_case(s, c, "company " + std::to_string(round));
        }
    }
    if (all) {
        for (int T = 1; T <= MAX_ROWS; T++) { // it tries all widths of a chain and of a tree
            check_case({6, 1, 256, 1}, {{pick(600)}, {T % 2 == 0 ? chain(T) : any_tree(T)}, false, 1},
                       "width " + std::to_string(T));
        }
        for (int n : {4095, 4096, 4097, 16384 - 3, 20000, 32768 - 1, 40000, 81920 - 2, 90000}) {
            const KvShape s{n > 30000 ? 6 : 12, n > 30000 ? 1 : 2, 256, n % 3 == 1 ? 8 : 1};
            check_case(s, {{n, 300}, {any_tree(9), chain(3)}, false, 1}, "context " + std::to_string(n));
        }
        check_case({3, 1, 64, 1}, {{4200}, {chain(1)}, false, 1}, "an odd number of results");
        check_case({4, 1, 128, 0}, {{5000}, {any_tree(20)}, false, 2}, "context 5000");
    }
    for (const KvShape &s : SHAPES) {
        const int n = s.window > 0 ? s.window : 128;
        check_committed(s, {n - 1 + pick(3), 0, 700, 1}, {1 + pick(8), 2, 1, 1}, "company");
        if (all) {
            check_committed(s, {255 + pick(3)}, {1}, "one row");
            check_committed(s, {4095 + pick(3), 20}, {16, 1 + pick(40)}, "many rows");
        }
    }
    for (const auto &[type, error] : worst) {
        printf("attention, type %d: relative error at most %.2e\n", type, error);
    }
}
