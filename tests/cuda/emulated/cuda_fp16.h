// Has F16 arithmetic as luce's kernels use it, on a CPU. Each result is rounded once.
#pragma once

#include "cuda_runtime.h"

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

// An instruction where there is F16C, and a slow call elsewhere.
inline float __half2float(__half h) { return float(h.v); }
inline __half __float2half_rn(float x) { return __half(_Float16(x)); }
inline uint16_t __half_as_ushort(__half h) { return __half_raw(h).x; }
inline __half __ushort_as_half(uint16_t bits) { return __half(__half_raw{bits}); }
inline __half2 __float2half2_rn(float x) { return {__float2half_rn(x), __float2half_rn(x)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline __half2 __low2half2(__half2 h) { return {h.x, h.x}; }
inline __half2 __high2half2(__half2 h) { return {h.y, h.y}; }
inline float __low2float(__half2 h) { return __half2float(h.x); }
inline __half __hadd(__half a, __half b) { return __half(_Float16(double(__half2float(a)) + double(__half2float(b)))); }
inline __half __hsub(__half a, __half b) { return __half(_Float16(double(__half2float(a)) - double(__half2float(b)))); }
inline __half __hmul(__half a, __half b) { return __half(_Float16(double(__half2float(a)) * double(__half2float(b)))); }
inline __half __hfma(__half a, __half b, __half c) {
    return __half(_Float16(double(__half2float(a)) * double(__half2float(b)) + double(__half2float(c))));
}
inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
