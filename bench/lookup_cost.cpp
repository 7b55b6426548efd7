// What the lookup drafter costs on the host: one line of JSON a text, {"text", "tokens", "index_ns_per_token",
// "median_us", "p99_us", "worst_us"}, of a draft of 31 tokens after each of the last rounds, which commit 8 tokens each. Outside: nothing;
// the first call, which indexes the whole text, is index_ns_per_token.
//   c++ -std=c++17 -O2 -I native/src bench/lookup_cost.cpp native/src/engine/lookup.cpp -o lookup_cost && ./lookup_cost
#include "engine/lookup.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>

namespace {

constexpr uint32_t TOKENS = 100'000, DRAFT = 31, COMMITTED = 8, ROUNDS = 1000;

using Clock = std::chrono::steady_clock;

double microseconds(Clock::time_point from) {
    return std::chrono::duration<double, std::micro>(Clock::now() - from).count();
}

// tokens: at least TOKENS + ROUNDS * COMMITTED.
void measure(const char *name, const std::vector<int32_t> &tokens) {
    luce::Lookup lookup(1u << 17);
    std::vector<int32_t> text(tokens.begin(), tokens.begin() + TOKENS);
    text.reserve(tokens.size());
    int32_t draft[DRAFT];
    uint32_t matched;
    const auto first = Clock::now();
    lookup.find(text, tokens[TOKENS], draft, DRAFT, &matched);
    const double index_us = microseconds(first);
    std::vector<double> times;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        const auto begin = tokens.begin() + long(text.size());
        text.insert(text.end(), begin, begin + COMMITTED);
        const auto start = Clock::now();
        lookup.find(text, tokens[text.size()], draft, DRAFT, &matched);
        times.push_back(microseconds(start));
    }
    std::sort(times.begin(), times.end());
    printf("{\"text\": \"%s\", \"tokens\": %u, \"index_ns_per_token\": %.1f, \"median_us\": %.2f, "
           "\"p99_us\": %.2f, \"worst_us\": %.2f}\n",
           name, TOKENS, 1000 * index_us / TOKENS, times[ROUNDS / 2], times[ROUNDS * 99 / 100], times.back());
}

} // namespace

int main() {
    const size_t n = TOKENS + (ROUNDS + 1) * COMMITTED;
    std::mt19937 random(1);
    std::vector<int32_t> fresh(n), files(n), same(n, 11);
    for (int32_t &token : fresh) {
        token = int32_t(random() % 250'000);
    }
    // 40 tokens that follow each other in lines, lines that return: what code looks like
    for (size_t i = 0; i < n;) {
        const uint32_t line = random() % 500, length = 8 + line % 24;
        for (uint32_t j = 0; j < length && i < n; j++, i++) {
            files[i] = int32_t(line * 31 + j * j * 7) % 4000;
        }
    }
    std::vector<int32_t> two(n); // two tokens that alternate at random: every hash has a long list
    for (int32_t &token : two) {
        token = int32_t(random() % 2);
    }
    measure("fresh", fresh);
    measure("lines that return", files);
    measure("one token", same);
    measure("two tokens", two);
}
