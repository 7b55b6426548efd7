// Says how many lanes a warp has.
#pragma once

namespace luce {

constexpr int WARP = 32;

} // namespace luce
