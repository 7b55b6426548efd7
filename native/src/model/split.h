// Says how a model is shared out among several devices: consecutive layers each, in the order of the devices, or of all layers
// a part of their heads and widths each (Cut).
#pragma once

#include <cstdint>
#include <vector>

namespace luce {

struct Device;

// The devices of a model in the order of layers, one or several of a kind (one may come twice), and how many layers each
// has. Without numbers weights are shared out by the devices' free memory.
struct Split {
    std::vector<const Device *> devices;
    std::vector<uint32_t> layers;
    bool tensors = false; // the devices are ranks: each has all layers, and of their matrices a part
    const Device *drafts_on =
        nullptr; // the output and the drafters lie there, and no layer; null: on the last device

    Split(const Device &device) : devices{&device} {}
    Split(std::vector<const Device *> devices, std::vector<uint32_t> layers)
        : devices(std::move(devices)), layers(std::move(layers)) {}
};

// What one of n ranks has of a tensor, along an axis of it: of each of so many equal segments an equal part, that of its number.
// Matrices whose rows are heads or a width are cut by ROWS, those that read these by COLUMNS; each rank's product with the latter
// is a part of a sum. Segments are what lies behind each other in a tensor and is cut alike.
struct Cut {
    int axis = -1; // -1: each rank has all of it
    int64_t segments = 1;
    uint32_t copies = 1; // so many ranks in a row have the same part
    int64_t first = 0, n = 0; // with n it is so many from `first` on, whatever others have
};
constexpr Cut WHOLE{}, COLUMNS{0}, ROWS{1};

// Where a rank's part of a tensor is: byte i lies at first + i / piece * step + i % piece.
struct Slice {
    uint64_t first = 0, piece = 0, step = 0; // with piece 0 it is all of the tensor
};

// Copies n bytes of the part from its byte `begin` on.
void copy_slice(const Slice &slice, const uint8_t *whole, uint64_t begin, uint64_t n, uint8_t *to);

// What has to be shared out, in bytes.
struct Shares {
    std::vector<uint64_t> layers; // each takes so many where it lies
    std::vector<bool> joined; // each lies where the one before it does; empty: none has to
    uint64_t first = 0, last = 0; // what the first device has besides, and the last
    std::vector<uint64_t> free; // of each device, for its layers and these
};

// Returns how many layers each device has, one at least, so that the fullest is as empty as can be. There are as many layers
// as devices, or more, those that are joined counted as one.
std::vector<uint32_t> share_out(const Shares &shares);

// Returns of each layer whether it lies where the one before it does, since it, or one behind, reads cells of one ahead:
// cells_of has for each layer the one whose cells it reads (empty: its own), and what is behind all layers, where drafters
// are, reads those of `read_at_end` and later ones (n_layer: none).
std::vector<bool> joined_layers(uint32_t n_layer, const std::vector<uint32_t> &cells_of,
                                uint32_t read_at_end);

} // namespace luce
