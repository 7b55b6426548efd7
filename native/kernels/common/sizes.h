// A list of the sizes that kernels are built for. A chapter says each of its lists once (sizes.h): launchers choose an
// instance by it, rules of the lowering ask it, and a model is refused by it.
#pragma once

#include <stdint.h>
#include <string>
#include <type_traits>

namespace luce {

template <int... OF> struct Sizes {
    static constexpr bool has(int64_t n) { return ((n == OF) || ...); }

    // Returns what run(std::integral_constant<int, n>()) does, or `otherwise` where there is no n.
    template <class Result, class Run> static Result with(int n, Result otherwise, const Run &run) {
        (void) (((n == OF) && (otherwise = Result(run(std::integral_constant<int, OF>())), true)) || ...);
        return otherwise;
    }

    // Returns them in words: "64, 128 and 256".
    static std::string text() {
        std::string list;
        size_t left = sizeof...(OF);
        ((list += std::to_string(OF) + (left > 2 ? ", " : left == 2 ? " and " : ""), left--), ...);
        return list;
    }
};

} // namespace luce
