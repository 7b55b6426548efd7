// Checks that pieces of memory are copied to their places, whole and nothing beside them.
#include "harness.h"

namespace {

void check_pieces(const std::vector<int> &values) { // of each piece, multiples of 4
    constexpr int GAP = 4;
    int all = GAP;
    for (const int n : values) {
        all += n + GAP;
    }
    const Floats from = normals(size_t(all)), before = normals(size_t(all));
    const Device<float> source(from), target(before);
    Floats wanted = before;
    CopyPiecesArgs a{};
    for (int at = GAP, i = 0; i < int(values.size()); i++) { // the first piece goes to the last place
        const int n = values[size_t(i)], to = all - at - n;
        a.pieces[a.n++] = {source.p + at, target.p + to, int64_t(n) * 4};
        std::copy_n(from.begin() + at, n, wanted.begin() + to);
        at += n + GAP;
    }
    must(cuda::copy_pieces(a, stream));
    must(cudaStreamSynchronize(stream));
    expect(same_bits(target.get(), wanted), "copy_pieces of " + std::to_string(values.size()));
}

} // namespace

void check_copies(bool all) {
    check_pieces({});
    check_pieces({4});
    check_pieces({1024, 4, 0, 33000, 8});
    check_pieces(std::vector<int>(CopyPiecesArgs::MOST, 12));
    if (all) {
        check_pieces({1 << 22, 4, 1 << 20});
    }
    const Device<float> x(Floats(16, 0)), y(16);
    CopyPiecesArgs a{};
    a.n = 1;
    a.pieces[0] = {x.p + 1, y.p, 16};
    expect(cuda::copy_pieces(a, stream) != 0, "copy_pieces from an odd address is refused");
    a.pieces[0] = {x.p, y.p, 20};
    expect(cuda::copy_pieces(a, stream) != 0, "copy_pieces of odd bytes is refused");
    a.n = CopyPiecesArgs::MOST + 1;
    expect(cuda::copy_pieces(a, stream) != 0, "more than so many pieces are refused");
}
