// The vision tower of Qwen3.5 and its kin (projector_type qwen3vl_merger), which stands in a GGUF of its own: patches of one
// image become rows that stand in a prompt for the embeddings of tokens.
#pragma once

#include "model/model.h"

#include <atomic>
#include <mutex>
#include <set>

namespace luce {

constexpr uint32_t FEWEST_IMAGE_ROWS = 64,
                   MOST_IMAGE_ROWS = 16384; // as transformers bounds an image's pixels

class VisionTower {
public:
    // Reads hyperparameters, and checks every tensor. A CPU computes with the weights in the mapping. A GPU has them uploaded,
    // and takes all memory that an image of max_rows rows needs; with 0 it is of the most rows that a part of memory has room for.
    // E_MEMORY gives needed and free.
    VisionTower(std::shared_ptr<GgufFile> file, const Device &device, uint32_t max_rows);

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
    const Device &device() const { return device_; }
    uint64_t weight_bytes() const { return weight_bytes_; }
    uint64_t identity() const { return identity_; } // a hash of the tensors, as Model's
    uint32_t max_rows() const { return max_rows_; } // of an image
    uint64_t scratch_bytes() const { return scratch_bytes_; } // of an image of so many; a GPU holds them

    // Encodes one image: patches F32 (rows * columns, patch_values()) in the order of merged blocks -> out F32
    // (rows * columns / merge^2, E). `go_on` is asked meanwhile, on this thread; false: E_CANCELLED. On a CPU threads encode
    // beside each other, on a GPU one after the other.
    void encode(const float *patches, uint32_t rows, uint32_t columns, int n_threads,
                const std::function<bool(float)> &go_on, float *out) const;

    // For tests: towers on a CPU build the graph of a GPU, whose blocks of queries take so many bytes of scores; 0: their own.
    static std::atomic<uint64_t> block_bytes_on_cpu;

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
    void place();
    void find_largest(uint32_t max_rows);
    std::vector<uint32_t> sizes_to_hold() const;
    uint64_t encode_bytes(uint32_t rows, uint32_t columns) const;
    uint64_t pool_bytes(uint64_t n) const;
    void check_supported(const Graph &g) const;
    void warm_up() const;
    void run_on_cpu(const Graph &g, int n_threads, const std::function<bool(float)> &go_on) const;
    void run_on_gpu(const Graph &g, const std::function<bool(float)> &go_on) const;
    Linear linear(const std::string &name, int64_t in, int64_t out);
    Linear norm(const std::string &name);
    Graph build(uint32_t rows, uint32_t columns) const;
    ggml_tensor *attend(const Graph &g, ggml_tensor *qkv) const;
    ggml_tensor *attend_in_blocks(const Graph &g, ggml_tensor *qkv) const;
    int64_t block_rows(int64_t n) const;
    void write_inputs(const Graph &g, const float *patches, uint32_t rows, uint32_t columns) const;

    std::shared_ptr<GgufFile> file_;
    const Device &device_;
    Shape shape_;
    Context context_;
    std::set<std::string> left_; // tensors that were not taken
    std::vector<std::pair<ggml_tensor *, const GgufTensor *>> taken_;
    Buffer weights_; // null on a CPU
    uint32_t max_rows_ = 0;
    uint64_t scratch_bytes_ = 0;
    uint64_t block_bytes_; // of scores; 0 where attention is one op
    // On a GPU they are held, by one encode at a time.
    mutable std::mutex encoding_;
    Backend backend_;
    mutable GraphAllocator allocator_; // of a GPU, under device_lock()
    ggml_tensor *patch_[2]; // {patch_values, D} of the frames
    ggml_tensor *patch_bias_; // {D}
    const float *positions_; // {D, table * table}, which the host reads
    std::vector<Block> blocks_;
    Linear post_norm_; // {D}
    Linear merge_[2]; // {4D, 4D} and {4D, E}
    uint64_t weight_bytes_ = 0, identity_ = 0xcbf29ce484222325u;
};

} // namespace luce
