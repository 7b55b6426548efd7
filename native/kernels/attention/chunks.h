// Attention cuts a sequence into chunks by the absolute position alone, so that each key is in the same chunk
// for every row that sees it. A chunk's keys are summed from scratch and the chunks' results are combined in
// order. Chunks are short where a context is short, so that it still fills a GPU. They grow with the
// distance, so that the cost of keeping partial results grows slower than the context.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define LUCE_HOST_DEVICE __host__ __device__
#else
#define LUCE_HOST_DEVICE
#endif

namespace luce {

// From position `begin` on chunks have 2^shift positions; `index` is the first one's.
struct ChunkRegion {
    int32_t begin, shift, index;
};
constexpr int CHUNK_REGIONS = 5;

LUCE_HOST_DEVICE inline ChunkRegion chunk_region(int region) {
    return region == 0   ? ChunkRegion{0, 7, 0}
           : region == 1 ? ChunkRegion{4096, 8, 32}
           : region == 2 ? ChunkRegion{16384, 9, 80}
           : region == 3 ? ChunkRegion{32768, 10, 112}
                         : ChunkRegion{81920, 11, 160};
}
LUCE_HOST_DEVICE inline int region_of_chunk(int32_t chunk) {
    return (chunk >= 32) + (chunk >= 80) + (chunk >= 112) + (chunk >= 160);
}

// Returns the chunk that holds a position.
LUCE_HOST_DEVICE inline int32_t chunk_at(int32_t position) {
    const ChunkRegion r =
        chunk_region((position >= 4096) + (position >= 16384) + (position >= 32768) + (position >= 81920));
    return r.index + ((position - r.begin) >> r.shift);
}

// Returns the first position of a chunk. Chunk i ends where chunk i + 1 begins.
LUCE_HOST_DEVICE inline int32_t chunk_begin(int32_t chunk) {
    const ChunkRegion r = chunk_region(region_of_chunk(chunk));
    return r.begin + ((chunk - r.index) << r.shift);
}

// Returns the lowest position that any row of a sequence sees, where its first row is at n_past.
LUCE_HOST_DEVICE inline int32_t lowest_visible(int32_t position, int32_t first, int32_t window) {
    const int32_t low = window > 0 ? position - window + 1 : 0;
    return low > first ? low : first;
}

} // namespace luce
