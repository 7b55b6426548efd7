#include "engine/penalties.h"

#include "abi/status.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace luce {

Penalties check_penalties(const luce_penalties &p, uint32_t n_vocab) {
    if (!(p.repetition >= 0) || std::isinf(p.repetition)) {
        fail(LUCE_E_ARG, "repetition is %g, expected a finite number above 0, or 0 (off)",
             double(p.repetition));
    }
    if (!std::isfinite(p.presence) || !std::isfinite(p.frequency)) {
        fail(LUCE_E_ARG, "presence is %g and frequency %g, expected finite numbers", double(p.presence),
             double(p.frequency));
    }
    if (p.n_bias > 0 && p.bias == nullptr) {
        fail(LUCE_E_ARG, "n_bias is %u, but bias is null", p.n_bias);
    }
    Penalties out;
    for (uint32_t i = 0; i < p.n_bias; i++) {
        const luce_logit_bias &b = p.bias[i];
        if (b.token < 0 || uint32_t(b.token) >= n_vocab) {
            fail(LUCE_E_ARG, "bias %u is of token %d, expected 0 to %u", i, b.token, n_vocab - 1);
        }
        if (!std::isfinite(b.bias)) {
            fail(LUCE_E_ARG, "the bias of token %d is %g, expected a finite number", b.token, double(b.bias));
        }
        out.bias.push_back(b);
    }
    out.n_prompt = p.n_prompt;
    out.repetition = p.repetition == 0 ? 1 : p.repetition;
    out.presence = p.presence;
    out.frequency = p.frequency;
    return out;
}

// Keeps logits finite, however large what is added to them.
static float bounded(float x) {
    return std::min(std::max(x, -FLT_MAX), FLT_MAX);
}

void penalise(float *logits, uint32_t n, const Penalties &p, const std::vector<int32_t> &before) {
    for (const luce_logit_bias &b : p.bias) {
        logits[b.token] = bounded(logits[b.token] + b.bias);
    }
    if (p.repetition == 1 && p.presence == 0 && p.frequency == 0) {
        return;
    }
    std::vector<uint32_t> count(n); // it counts each of the generated tokens
    std::vector<uint8_t> seen(n);
    for (size_t i = 0; i < before.size(); i++) {
        if (before[i] < 0) { // a row of an image
            continue;
        }
        const size_t token = size_t(before[i]);
        if (!seen[token]) {
            seen[token] = 1;
            const float x = logits[token];
            logits[token] = bounded(x < 0 ? x * p.repetition : x / p.repetition);
        }
        count[token] += i >= p.n_prompt;
    }
    for (uint32_t token = 0; token < n; token++) {
        if (count[token] > 0) {
            logits[token] = bounded(logits[token] - bounded(float(count[token]) * p.frequency));
            logits[token] = bounded(logits[token] - p.presence);
        }
    }
}

void apply_mask(float *logits, uint32_t n, const uint8_t *mask, uint64_t mask_size) {
    const auto allowed = [&](uint32_t token) {
        return token / 8 < mask_size && (mask[token / 8] >> (token % 8) & 1) != 0;
    };
    uint32_t first = 0;
    while (first < n && !allowed(first)) {
        first++;
    }
    if (first == n) {
        fail(LUCE_E_ARG, "the mask allows no token");
    }
    for (uint32_t token = 0; token < n; token++) {
        logits[token] = allowed(token) ? logits[token] : -INFINITY;
    }
}

} // namespace luce
