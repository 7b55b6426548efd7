// Checks that rows of images, which lie in pinned memory, take the places of embeddings, and that text keeps its own.
#include "harness.h"

namespace {

void check_rows(int T, int E, const std::vector<int> &images) {
    const Floats x = normals(size_t(T) * E), rows = normals(size_t(T) * E);
    float *held = nullptr;
    must(cudaMallocHost(reinterpret_cast<void **>(&held), rows.size() * sizeof(float)));
    std::copy(rows.begin(), rows.end(), held);
    std::vector<int64_t> from(size_t(T), 0);
    Floats wanted = x;
    for (const int row : images) {
        from[size_t(row)] = int64_t(reinterpret_cast<uintptr_t>(held + size_t(row) * E));
        std::copy_n(rows.begin() + int64_t(row) * E, E, wanted.begin() + int64_t(row) * E);
    }
    const Device<float> dx(x), out(x.size());
    const Device<int64_t> places(from);
    const ImageRowsArgs a{T, E, dx.p, places.p, out.p};
    must(cuda::image_rows(a, stream));
    must(cudaStreamSynchronize(stream));
    must(cudaFreeHost(held));
    expect(same_bits(out.get(), wanted), "image_rows of " + std::to_string(T) + " rows of " + std::to_string(E));
}

} // namespace

void check_image_rows(bool) {
    check_rows(1, 64, {});
    check_rows(1, 64, {0});
    check_rows(9, 1024, {0, 3, 4, 8});
    check_rows(33, 5120, {1, 2, 30, 31, 32});
    ImageRowsArgs a{};
    expect(cuda::image_rows(a, stream) != 0, "image_rows without rows is refused");
    const Device<float> x(Floats(12, 0)), out(12);
    const Device<int64_t> rows(std::vector<int64_t>(2, 0));
    a = {2, 6, x.p, rows.p, out.p};
    expect(cuda::image_rows(a, stream) != 0, "image_rows of an odd width is refused");
    a = {0, 8, x.p, rows.p, out.p};
    expect(cuda::image_rows(a, stream) == 0, "image_rows of no rows does nothing");
}
