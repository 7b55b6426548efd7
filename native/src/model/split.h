// Says how the layers of a model are shared out among several devices: consecutive layers each, in the order of the devices.
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
    const Device *drafts_on =
        nullptr; // the output and the drafters lie there, and no layer; null: on the last device

    Split(const Device &device) : devices{&device} {}
    Split(std::vector<const Device *> devices, std::vector<uint32_t> layers)
        : devices(std::move(devices)), layers(std::move(layers)) {}
};

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
