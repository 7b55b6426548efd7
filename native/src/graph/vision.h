// A vision tower, which stands in a GGUF of its own: patches of one image become rows that stand in a prompt for the
// embeddings of tokens. Each kind of tower, by the file's projector_type, has its tensors and its graph in a file of its own;
// memory, the run and attention are here.
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
    virtual ~VisionTower() = default;

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
        float rope_base = 0;
        uint32_t most_rows = MOST_IMAGE_ROWS; // of an image that the tower was made for,
        uint32_t usual_rows = 0; // and that it has by default; 0: as many as memory has room for
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

    // Checks that every tensor was taken, and takes memory: a tower comes from open_tower(), which calls it once.
    void settle(uint32_t max_rows);

protected:
    VisionTower(std::shared_ptr<GgufFile> file, const Device &device, const Shape &shape);

    struct Graph {
        Context context;
        ggml_cgraph *nodes = nullptr;
        ggml_tensor *patches = nullptr; // {patch_values, n}
        ggml_tensor *positions = nullptr; // {D, n}: the table's, at each patch
        ggml_tensor *turns = nullptr; // of RoPE, as the kind of tower has it
        ggml_tensor *attended = nullptr; // {D, n}, which blocks fill; null where one has all queries
        ggml_tensor *rows = nullptr; // {E, n / merge^2}
    };

    // The graph of an image of rows x columns patches, and what its inputs are.
    virtual Graph build(uint32_t rows, uint32_t columns) const = 0;
    virtual void write_inputs(const Graph &g, const float *patches, uint32_t rows,
                              uint32_t columns) const = 0;

    // Takes a tensor of the file. The numbers of what the host alone reads are in the mapping.
    ggml_tensor *take(const std::string &name, std::vector<int64_t> shape, bool f32);
    const float *take_for_host(const std::string &name, std::vector<int64_t> shape);
    bool has(const std::string &name) const { return file_->tensor(name) != nullptr; }
    void leave(const std::string &beginning); // Tensors whose names begin so are of no tower.

    // An empty graph of an image of n patches, with its inputs patches and positions, and a place for what blocks attend to.
    Graph begin(int64_t n, size_t layer_nodes) const;
    static ggml_tensor *input(const Graph &g, ggml_type type, int64_t a, int64_t b);
    static ggml_tensor *product(const Graph &g, ggml_tensor *w, ggml_tensor *x); // {K, N}, {K, n} -> {N, n}
    ggml_tensor *gelu(const Graph &g, ggml_tensor *x) const; // by tanh, in place
    // Each patch sees all: queries, keys and values {d, n, H} -> {D, n}.
    ggml_tensor *attend(const Graph &g, ggml_tensor *q, ggml_tensor *k, ggml_tensor *v, float scale) const;
    bool in_blocks() const { return block_bytes_ != 0; }
    // Where a patch stands, of those of an image in the order of merged blocks.
    struct Place {
        uint32_t y, x;
    };
    Place place_of(uint32_t patch, uint32_t columns) const;

private:
    ggml_tensor *attend_in_blocks(const Graph &g, ggml_tensor *q, ggml_tensor *k, ggml_tensor *v,
                                  float scale) const;
    void place();
    void find_largest(uint32_t max_rows);
    std::vector<uint32_t> sizes_to_hold() const;
    uint64_t encode_bytes(uint32_t rows, uint32_t columns) const;
    uint64_t pool_bytes(uint64_t n) const;
    void check_supported(const Graph &g) const;
    void warm_up() const;
    void run_on_cpu(const Graph &g, int n_threads, const std::function<bool(float)> &go_on) const;
    void run_on_gpu(const Graph &g, const std::function<bool(float)> &go_on) const;
    int64_t block_rows(int64_t n) const;

    std::shared_ptr<GgufFile> file_;
    const Device &device_;
    const Shape shape_;
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
    uint64_t weight_bytes_ = 0, identity_ = 0xcbf29ce484222325u;
};

// Reads hyperparameters, and checks every tensor. A CPU computes with the weights in the mapping. A GPU has them uploaded, and
// takes all memory that an image of max_rows rows needs; with 0 it is of the most rows that a part of memory has room for.
// E_MEMORY gives needed and free.
std::shared_ptr<VisionTower> open_tower(std::shared_ptr<GgufFile> file, const Device &device,
                                        uint32_t max_rows);

struct TowerKind {
    const char *projector; // the file's projector_type
    std::shared_ptr<VisionTower> (*make)(std::shared_ptr<GgufFile> file, const Device &device);
};

// What kinds of towers read alike: the sizes at keys of clip.vision.
VisionTower::Shape read_tower_shape(const GgufFile &file);

} // namespace luce
