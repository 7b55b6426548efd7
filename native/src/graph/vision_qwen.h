// The vision tower of Qwen3.5 and its kin (projector_type qwen3vl_merger), which stands in a GGUF of its own: patches of one
// image become rows that stand in a prompt for the embeddings of tokens. It computes on the CPU.
#pragma once

#include "model/model.h"

#include <set>

namespace luce {

class VisionTower {
public:
    // Reads hyperparameters, and checks and maps every tensor. It computes on `cpu`.
    VisionTower(std::shared_ptr<GgufFile> file, const Device &cpu);

    struct Shape {
        uint32_t D = 0; // width
        uint32_t E = 0; // width of a row
        uint32_t H = 0; // heads
        uint32_t FF = 0;
        uint32_t n_layer = 0;
        uint32_t patch = 0; // pixels of a patch's side
        uint32_t merge = 0; // patches of a row's side
        uint32_t table = 0; // positions of the table's side
        float eps = 0;
        uint32_t patch_values() const { return 3 * patch * patch; }
    };
    const Shape &shape() const { return shape_; }
    const GgufFile &file() const { return *file_; }
    uint64_t weight_bytes() const { return weight_bytes_; }
    uint64_t identity() const { return identity_; } // a hash of the tensors, as Model's

    // Encodes one image: patches F32 (rows * columns, patch_values()) in the order of merged blocks -> out F32
    // (rows * columns / merge^2, E). `go_on` is asked before each operation, on this thread; false: E_CANCELLED.
    void encode(const float *patches, uint32_t rows, uint32_t columns, int n_threads,
                const std::function<bool(float)> &go_on, float *out) const;
    // Bytes that encode() takes.
    uint64_t encode_bytes(uint32_t rows, uint32_t columns) const;

private:
    struct Linear {
        ggml_tensor *weight; // {K, N}, or of a norm {K}
        ggml_tensor *bias; // {N}
    };
    struct Block {
        Linear ln1, qkv, out, ln2, up, down; // qkv {D, 3D}, up {D, FF}
    };
    struct Graph;

    ggml_tensor *take(const std::string &name, std::vector<int64_t> shape, bool f32);
    Linear linear(const std::string &name, int64_t in, int64_t out);
    Linear norm(const std::string &name);
    Graph build(uint32_t rows, uint32_t columns) const;
    void write_positions(const Graph &g, uint32_t rows, uint32_t columns) const;

    std::shared_ptr<GgufFile> file_;
    const Device &cpu_;
    Shape shape_;
    Context context_;
    std::set<std::string> left_; // tensors that were not taken
    ggml_tensor *patch_[2]; // {patch_values, D} of the frames
    ggml_tensor *patch_bias_; // {D}
    ggml_tensor *positions_; // {D, table * table}
    std::vector<Block> blocks_;
    Linear post_norm_; // {D}
    Linear merge_[2]; // {4D, 4D} and {4D, E}
    uint64_t weight_bytes_ = 0, identity_ = 0xcbf29ce484222325u;
};

} // namespace luce
