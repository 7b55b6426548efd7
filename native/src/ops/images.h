// The op of images in prompts (ops/row.h says how to read it).
#pragma once

#include "cpu/images.h"
#include "ops/row.h"

namespace luce::ops {
using namespace extents;

// Puts rows of images, which lie in host memory (pinned on a GPU), in the places of embeddings.
inline const auto &image_rows = row<ImageRowsArgs>("image_rows", [](auto &op, auto &a) {
    op.in(FIELD(x), {E, T});
    op.in(FIELD(rows), {T});
    op.dims(a.T, T, a.E, E);
    op.out(FIELD(out), {E, T});
    op.runs(cpu_image_rows, LUCE_CUDA(image_rows));
});

} // namespace luce::ops
