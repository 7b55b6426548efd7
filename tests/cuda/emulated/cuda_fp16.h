// Has F16 arithmetic as luce's kernels use it, on a CPU. Each result is rounded once.
#pragma once

#include "cuda_runtime.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

struct __half_raw { uint16_t x; };
struct __half {
    _Float16 v;
    __half() = default;
    explicit __half(_Float16 x) : v(x) {}
    explicit __half(__half_raw raw) { memcpy(&v, &raw.x, 2); }
    operator __half_raw() const {
        __half_raw raw;
        memcpy(&raw.x, &v, 2);
        return raw;
    }
};
struct __half2 { __half x, y; };

// An instruction where there is F16C, and a slow call elsewhere. What becomes a double right after would be a call there too.
#ifdef __F16C__
inline float __half2float(__half h) { return _cvtsh_ss(__half_raw(h).x); }
#else
inline float __half2float(__half h) { return float(h.v); }
#endif
inline __half __float2half_rn(float x) { return __half(_Float16(x)); }
inline uint16_t __half_as_ushort(__half h) { return __half_raw(h).x; }
inline __half __ushort_as_half(uint16_t bits) { return __half(__half_raw{bits}); }
inline __half2 __float2half2_rn(float x) { return {__float2half_rn(x), __float2half_rn(x)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline __half2 __low2half2(__half2 h) { return {h.x, h.x}; }
inline __half2 __high2half2(__half2 h) { return {h.y, h.y}; }
inline float __low2float(__half2 h) { return __half2float(h.x); }

// Of two F16 a float has every product, and a sum or difference that is rounded to F16 as the exact one would be: 24 bits are
// twice 11 and two more.
inline __half __hadd(__half a, __half b) { return __float2half_rn(__half2float(a) + __half2float(b)); }
inline __half __hsub(__half a, __half b) { return __float2half_rn(__half2float(a) - __half2float(b)); }
inline __half __hmul(__half a, __half b) { return __float2half_rn(__half2float(a) * __half2float(b)); }
// The float beside x whose last bit is odd is rounded to F16 as x itself would be.
inline __half __hfma(__half a, __half b, __half c) {
    const double x = double(__half2float(a) * __half2float(b)) + double(__half2float(c));
    const float near = float(x);
    if (double(near) == x || std::isnan(x) || __float_as_uint(near) % 2 == 1) {
        return __float2half_rn(near);
    }
    return __float2half_rn(__uint_as_float(__float_as_uint(near) + (std::abs(double(near)) < std::abs(x) ? 1 : -1)));
}
inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
