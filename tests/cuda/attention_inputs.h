// Has the inputs of attention's checks.
#pragma once

#include "attention_reference.h"
#include "harness.h"

// These are the inputs of a step's rows.
struct Inputs {
    Floats q, gate, k, v; // [T][H*D], [T][2*H*D], [T][Hkv*D] twice
};

inline Inputs random_inputs(const KvShape &s, int T) {
    const size_t q = size_t(T) * s.H * s.D, kv = size_t(T) * s.width();
    return {normals(q), normals(2 * q), normals(kv), normals(kv)};
}

inline Inputs rows_of(const KvShape &s, const Inputs &in, int first, int n) {
    const auto cut = [&](const Floats &x, size_t width) {
        return Floats(x.begin() + first * width, x.begin() + (first + n) * width);
    };
    const size_t q = size_t(s.H) * s.D;
    return {cut(in.q, q), cut(in.gate, 2 * q), cut(in.k, s.width()), cut(in.v, s.width())};
}

inline std::string name_of(const KvShape &s) {
    return "type " + std::to_string(s.type) + " H " + std::to_string(s.H) + "/" + std::to_string(s.Hkv) +
           " D " + std::to_string(s.D) + " first " + std::to_string(s.first) + " window " +
           std::to_string(s.window) + (s.sinks ? " sinks " : " ");
}
