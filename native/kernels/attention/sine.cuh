// Finds the sine and the cosine of an angle, with the bits of CUDA 13's sincosf for each of the 2^32 angles that there are. That one
// indexes an array in a thread's memory for angles of 105,615 and more, which positions of long contexts have.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace luce {

// An angle is quarters * pi / 2 + rest.
struct ReducedAngle {
    float rest;
    int quarters;
};

// Multiplies the angle's 24 bits by 192 of 2 / pi, and takes the 64 bits of the product that matter: two of quarters, and what is
// behind the point (Payne and Hanek). The product's words have names, for an array would lie in memory.
__device__ __forceinline__ ReducedAngle reduce_large_angle(float angle) {
    const uint32_t bits = __float_as_uint(angle), mantissa = bits << 8 | 1u << 31;
    uint64_t x = 0;
    const auto word_by = [&](uint32_t of_two_over_pi) {
        x = uint64_t(of_two_over_pi) * mantissa + (x >> 32);
        return uint32_t(x);
    };
    word_by(0x3c439041);
    const uint32_t f = word_by(0xdb629599), e = word_by(0xf534ddc0), d = word_by(0xfc2757d1),
                   c = word_by(0x4e441529), b = word_by(0xa2f9836e), a = uint32_t(x >> 32);
    const int exponent = int(bits >> 23 & 255) - 128, skipped = exponent / 32; // 0 below 2^32
    const uint32_t high = skipped == 0 ? a : skipped == 1 ? b : skipped == 2 ? c : d;
    const uint32_t middle = skipped == 0 ? b : skipped == 1 ? c : skipped == 2 ? d : e;
    const uint32_t low = skipped == 0 ? c : skipped == 1 ? d : skipped == 2 ? e : f;
    const int shift = exponent % 32;
    const uint64_t turns = (uint64_t(high) << 32 | middle) << shift | uint64_t(low) << shift >> 32;
    const uint64_t behind = turns << 2;
    const bool nearer_next = behind >> 63 != 0, negative = bits >> 31 != 0;
    const int quarters = int(turns >> 62) + int(nearer_next);
    const float rest = float(double(int64_t(nearer_next ? ~behind : behind)) * 0x1.921fb54442d19p-64);
    return {nearer_next != negative ? -rest : rest, negative ? -quarters : quarters};
}

__device__ __forceinline__ ReducedAngle reduce_angle(float angle) {
    if (fabsf(angle) >= 105615.0f) {
        return fabsf(angle) == INFINITY ? ReducedAngle{angle * 0.0f, 0} : reduce_large_angle(angle);
    }
    const int quarters = __float2int_rn(angle * 0x1.45f306p-1f); // 2 / pi
    const float n = float(quarters);
    // They are three parts of -pi / 2.
    const float rest = fmaf(n, -0x1.84698ap-48f, fmaf(n, -0x1.4442dp-24f, fmaf(n, -0x1.921fb4p+0f, angle)));
    return {rest, quarters};
}

__device__ __forceinline__ void sine_and_cosine(float angle, float &sine, float &cosine) {
    const ReducedAngle of = reduce_angle(angle);
    const float x = of.rest, square = x * x, cube = fmaf(square, x, 0.0f);
    float odd = fmaf(-0x1.9a82a6p-13f, square, 0x1.110bc8p-7f); // the sine of the rest
    odd = fmaf(fmaf(odd, square, -0x1.55555p-3f), cube, x);
    float even = fmaf(0x1.9758p-16f, square, -0x1.6c0fdap-10f); // the cosine of it
    even = fmaf(fmaf(fmaf(even, square, 0x1.555576p-5f), square, -0x1.fffffep-2f), square, 1.0f);
    const bool swapped = (of.quarters & 1) != 0;
    sine = swapped ? even : odd;
    cosine = swapped ? odd : even;
    sine = (of.quarters & 2) != 0 ? -sine : sine;
    cosine = (of.quarters + 1 & 2) != 0 ? -cosine : cosine;
}

} // namespace luce
