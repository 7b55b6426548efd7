// Takes tensors by their names from a file and checks them, and says where each is to lie.
#include "model/weights.h"

#include "common/kernels.h"
#include "exchange/exchange.h"
#include "graph/architecture.h"
#include "graph/drafter.h"
#include "ops/moe.h"
#include "ops/shapes.h"
#include "step/host_experts.h"

#ifdef LUCE_USE_CUDA
#include "matmul/prompt.h"
#include "matmul/quantised.h"
#endif

#include <ggml-cpu.h>

#include <algorithm>
#include <cstring>

namespace luce {

static std::string shape_text(const int64_t *ne, uint32_t n_dims) {
    std::string text = "{";
    for (uint32_t d = 0; d < n_dims; d++) {
        text += (d == 0 ? "" : ", ") + std::to_string(ne[d]);
    }
    return text + "}";
}

bool is_weight_type(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_Q2_K:
        case GGML_TYPE_Q3_K:
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K:
        case GGML_TYPE_Q6_K:
        case GGML_TYPE_IQ4_NL:
        case GGML_TYPE_IQ4_XS:
        case GGML_TYPE_IQ3_S:
        case GGML_TYPE_IQ3_XXS:
        case GGML_TYPE_IQ2_S:
        case GGML_TYPE_IQ2_XS:
        case GGML_TYPE_IQ2_XXS:
        case GGML_TYPE_IQ1_S:
        case GGML_TYPE_IQ1_M:
        case GGML_TYPE_MXFP4:
        case GGML_TYPE_NVFP4:
        case GGML_TYPE_TQ1_0:
        case GGML_TYPE_TQ2_0: return true;
        default: return false;
    }
}

const char *type_name(ggml_type type) {
    static const std::vector<std::string> names = [] {
        std::vector<std::string> list;
        for (int t = 0; t < GGML_TYPE_COUNT; t++) {
            list.emplace_back(ggml_type_name(ggml_type(t)) != nullptr ? ggml_type_name(ggml_type(t)) : "?");
            for (char &c : list.back()) {
                c = char(toupper(c));
            }
        }
        return list;
    }();
    return names[size_t(type)].c_str();
}

WeightReader::WeightReader(Model &model, const GgufFile &file, bool loading)
    : m_(model), file_(file), loading_(loading) {
    for (const GgufTensor &t : file.tensors()) {
        left_.insert(t.name);
    }
}

void WeightReader::forget(const std::string &prefix) {
    const auto first = left_.lower_bound(prefix);
    auto last = first;
    while (last != left_.end() && last->compare(0, prefix.size(), prefix) == 0) {
        last++;
    }
    left_.erase(first, last);
}

void WeightReader::finish(const std::string &prefix, const char *what) const {
    const auto unknown = left_.lower_bound(prefix);
    if (unknown != left_.end() && unknown->compare(0, prefix.size(), prefix) == 0) {
        fail(LUCE_E_UNSUPPORTED, "%s: tensor %s is not part of the %s that luce runs", file_.path().c_str(),
             unknown->c_str(), what == nullptr ? m_.architecture().name : what);
    }
}

// A leaf has no op, so its parameters are free for this mark.
constexpr int32_t PACKED = 0x7061636b, IN_RAM = 0x72616d, AT_HOME = 0x686f6d65;

bool is_packed(const ggml_tensor *weight) {
    return weight->op_params[0] == PACKED;
}

Matrices matrices_of(const ggml_tensor *weight) {
    const int64_t parts = weight->op_params[1];
    return {weight->ne[2] * parts, weight->ne[1] / parts};
}

bool is_in_ram(const ggml_tensor *weight) {
    return weight->op_params[2] == IN_RAM;
}

bool is_at_home(const ggml_tensor *weight) {
    return weight->op_params[2] == AT_HOME;
}

bool WeightReader::in_ram(uint32_t layer) const {
    return layer < m_.n_cpu_experts_;
}

bool WeightReader::packs([[maybe_unused]] ggml_type type) const {
#ifdef LUCE_USE_CUDA
    return m_.gpu() && rowmm_has_type(type);
#else
    return false;
#endif
}

// A leaf's parameter 3 is its stage.
uint32_t stage_of(const ggml_tensor *weight) {
    return uint32_t(weight->op_params[3]);
}

// Returns the layer of the trunk that a tensor is of, or n_layer.
uint32_t WeightReader::trunk_layer(const std::string &name) const {
    unsigned layer = 0;
    const bool in_layer = &file_ == m_.file_.get() && sscanf(name.c_str(), "blk.%u.", &layer) == 1;
    return in_layer ? std::min(uint32_t(layer), m_.hp_.n_layer) : m_.hp_.n_layer;
}

bool WeightReader::is_at_home(const std::string &experts) const {
    return m_.experts_at_home_ && trunk_layer(experts) < m_.hp_.n_layer;
}

uint32_t WeightReader::stage_of(const std::string &name, Kind kind) const {
    if (rank_ >= 0) {
        return uint32_t(rank_);
    }
    if (const uint32_t layer = trunk_layer(name); layer < m_.hp_.n_layer) {
        return m_.stage_of(layer);
    }
    const bool trunk = &file_ == m_.file_.get(), in_layer = name.compare(0, 4, "blk.") == 0;
    const bool output = name.compare(0, 6, "output") == 0 ||
                        (kind == Kind::matrix && name == "token_embd.weight"); // it is tied
    return trunk && !in_layer && !output ? 0 : uint32_t(m_.placements_.size()) - 1;
}

ggml_tensor *WeightReader::f32_of_layers(const std::string &name, std::vector<int64_t> shape,
                                         uint32_t layer) {
    const bool trunk = &file_ == m_.file_.get();
    const uint32_t stage = rank_ >= 0 ? uint32_t(rank_)
                           : trunk    ? m_.stage_of(layer)
                                      : uint32_t(m_.placements_.size()) - 1;
    ggml_tensor *&made = shared_[{name, stage}];
    if (made == nullptr) {
        made = take(name, std::move(shape), Kind::f32, true, WHOLE, 1, &stage);
    }
    return made;
}

uint64_t packed_bytes([[maybe_unused]] const ggml_tensor *weight) {
#ifdef LUCE_USE_CUDA
    const Matrices m = matrices_of(weight);
    return uint64_t(m.n * rowmm_packed_bytes(weight->type, weight->ne[0], m.N));
#else
    return 0;
#endif
}

uint64_t expert_bytes(const ggml_tensor *weight) {
    return is_packed(weight) ? packed_bytes(weight) / uint64_t(weight->ne[2]) : weight->nb[2];
}

// A GPU's tables of pinned pages take 2 MiB of its memory for each GiB that it reaches (measured on an H200).
constexpr uint64_t PINNED_BY_TABLES = 512;

uint64_t bytes_of(const ggml_tensor *weight, bool holds) {
    if (holds && is_in_ram(weight)) {
        return 0;
    }
    const uint64_t bytes = is_packed(weight) ? packed_bytes(weight) : ggml_nbytes(weight);
    return holds && is_at_home(weight) ? bytes / PINNED_BY_TABLES : bytes;
}
uint64_t nbytes_or_0(const ggml_tensor *tensor) {
    return tensor == nullptr ? 0 : ggml_nbytes(tensor);
}

ggml_tensor *WeightReader::tied(const std::string &name, ggml_tensor *table, Cut cut) {
    const auto lies_here = [&] { return luce::stage_of(table) == stage_of(name, Kind::matrix); };
    if (!loading_ || (!packs(table->type) && cut.first == 0 && lies_here())) {
        return table;
    }
    return take(name, {table->ne[0], table->ne[1]}, Kind::matrix, true, cut);
}

// Those of few or odd rows lie whole on the last rank, and so do all where drafts are made on a device of their own.
bool WeightReader::shares_output(int64_t V) const {
    return n_ranks() > 1 && m_.placements_.size() == m_.n_ranks_ && has_output_rows(V, m_.n_ranks_);
}

void WeightReader::output(Weights &w, int64_t E, int64_t V) {
    const std::string name = "output.weight", table = "token_embd.weight";
    const auto matrix = [&](Cut cut) {
        return has(name) ? this->matrix(name, E, V, cut) : tied(table, w.token_embd, cut);
    };
    take_whole();
    if (!shares_output(V)) {
        w.output_norm = f32("output_norm.weight", {E});
        w.output = matrix(WHOLE);
        return;
    }
    for (uint32_t rank = 0; rank < m_.n_ranks_; rank++) {
        const OutputRows rows = output_rows(V, m_.n_ranks_, rank);
        const bool last = rank + 1 == m_.n_ranks_;
        take_rank(rank);
        w.output_norm = f32("output_norm.weight", {E});
        w.output = last && m_.has_drafters_ ? matrix(WHOLE) : nullptr;
        // Where scales lie behind all rows, the first ones of a matrix are none (matmul/layout.h).
        const bool own = w.output == nullptr || (is_packed(w.output) && has_output_scale(w.output->type));
        ggml_tensor *part = own ? matrix({ROWS.axis, 1, 1, rows.first, rows.n}) : w.output;
        w.output = w.output == nullptr ? part : w.output;
        w.rank_outputs.push_back({w.output_norm, part, rows.n});
    }
    take_whole();
}

ggml_tensor *WeightReader::ids(const std::string &name, int64_t n, int64_t end) {
    ggml_tensor *tensor = take(name, {n}, Kind::ids, true);
    const uint8_t *data = file_.tensor(name)->data;
    for (int64_t i = 0, id; i < n; i++) {
        memcpy(&id, data + size_t(i) * sizeof(id), sizeof(id));
        if (id < 0 || id >= end) {
            fail(LUCE_E_FILE, "%s: tensor %s: entry %lld is %lld, expected 0 to %lld", file_.path().c_str(),
                 name.c_str(), (long long) i, (long long) id, (long long) end - 1);
        }
    }
    return tensor;
}

ggml_tensor *WeightReader::order(const std::string &name, int64_t n) {
    ggml_tensor *tensor = take(name, {n}, Kind::order, true);
    const uint8_t *data = file_.tensor(name)->data;
    std::vector<bool> seen(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; i++) {
        int32_t at;
        memcpy(&at, data + size_t(i) * sizeof(at), sizeof(at));
        if (at < 0 || at >= n || seen[size_t(at)]) {
            fail(LUCE_E_FILE,
                 "%s: tensor %s is no order of %lld tokens: entry %lld is %d%s. Convert the checkpoint again",
                 file_.path().c_str(), name.c_str(), (long long) n, (long long) i, at,
                 at < 0 || at >= n ? "" : " again");
        }
        seen[size_t(at)] = true;
    }
    return tensor;
}

ggml_tensor *WeightReader::scaled_experts(const std::string &name, int64_t a, int64_t b, int64_t n,
                                          bool in_ram, Cut cut) {
    ggml_tensor *tensor = experts(name, a, b, n, in_ram, cut);
    if (const std::string scale = name.substr(0, name.rfind(".weight")) + ".scale"; !has(scale)) {
        fail(LUCE_E_FILE, "%s: tensor %s is missing, expected {%lld}", file_.path().c_str(), scale.c_str(),
             (long long) n);
    }
    const float *scales = take_scales(name, n);
    if (tensor != nullptr) {
        tensor->extra = const_cast<float *>(scales);
    }
    return tensor;
}

float WeightReader::scalar(const std::string &name) {
    const GgufTensor *t = file_.tensor(name);
    if (t == nullptr || t->type != GGML_TYPE_F32 || t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3] != 1) {
        fail(LUCE_E_FILE, "%s: tensor %s: expected F32 {1}, found %s", file_.path().c_str(), name.c_str(),
             t == nullptr
                 ? "none"
                 : format("%s %s", type_name(t->type), shape_text(t->ne, t->n_dims).c_str()).c_str());
    }
    left_.erase(name);
    std::vector<float> &value = m_.scales_.emplace_back(1);
    memcpy(value.data(), t->data, sizeof(float));
    return value[0];
}

// E_UNSUPPORTED where a part has no whole blocks of the tensor's type.
Slice WeightReader::slice_of(const GgufTensor &whole, const std::vector<int64_t> &part, Cut cut) const {
    if (rank_ < 0 || cut.axis < 0) {
        return {};
    }
    if (cut.n > 0) {
        const uint64_t row = ggml_row_size(whole.type, whole.ne[0]);
        return {uint64_t(cut.first) * row, uint64_t(cut.n) * row, 0};
    }
    const int64_t values = part[size_t(cut.axis)] / cut.segments, block = ggml_blck_size(whole.type);
    if (cut.axis == 0 && values % block != 0) {
        fail(LUCE_E_UNSUPPORTED,
             "%s: tensor %s lies in blocks of %lld values along %lld, of which %u devices cannot have equal "
             "parts: give each device layers of its own",
             file_.path().c_str(), whole.name.c_str(), (long long) block,
             (long long) (whole.ne[0] / cut.segments), m_.n_ranks_);
    }
    const uint64_t piece = cut.axis == 0 ? ggml_row_size(whole.type, values)
                                         : ggml_row_size(whole.type, whole.ne[0]) * uint64_t(values);
    return {uint64_t(uint32_t(rank_) / cut.copies) * piece, piece, piece * (m_.n_ranks_ / cut.copies)};
}

ggml_tensor *WeightReader::take(const std::string &name, std::vector<int64_t> shape, Kind kind, bool required,
                                Cut cut, int32_t parts, const uint32_t *where) {
    const char *path = file_.path().c_str();
    const GgufTensor *t = file_.tensor(name);
    if (t == nullptr) {
        if (required) {
            fail(LUCE_E_FILE, "%s: tensor %s is missing, expected %s", path, name.c_str(),
                 shape_text(shape.data(), uint32_t(shape.size())).c_str());
        }
        return nullptr;
    }
    shape.resize(GGML_MAX_DIMS, 1);
    std::vector<int64_t> part = shape; // of this rank
    if (cut.n > 0) {
        part[size_t(cut.axis)] = cut.n;
    } else if (rank_ >= 0 && cut.axis >= 0) {
        shape[size_t(cut.axis)] *= m_.n_ranks_ / cut.copies;
    }
    if (memcmp(t->ne, shape.data(), sizeof(t->ne)) != 0) {
        uint32_t n = GGML_MAX_DIMS;
        while (n > 1 && shape[n - 1] == 1) {
            n--;
        }
        fail(LUCE_E_FILE, "%s: tensor %s: expected shape %s, found %s", path, name.c_str(),
             shape_text(shape.data(), n).c_str(), shape_text(t->ne, t->n_dims).c_str());
    }
    const bool fits = kind == Kind::f32     ? t->type == GGML_TYPE_F32
                      : kind == Kind::ids   ? t->type == GGML_TYPE_I64
                      : kind == Kind::order ? t->type == GGML_TYPE_I32
                                            : is_weight_type(t->type);
    if (!fits) {
        fail(LUCE_E_UNSUPPORTED, "%s: tensor %s has type %s, expected %s", path, name.c_str(),
             type_name(t->type),
             kind == Kind::f32     ? "F32"
             : kind == Kind::ids   ? "I64"
             : kind == Kind::order ? "I32"
                                   : "a type that luce multiplies on every device");
    }
    left_.erase(name);
    const bool scaled = t->type == GGML_TYPE_NVFP4 && kind != Kind::table && kind != Kind::router;
    const float *scales = scaled ? take_scales(name, t->ne[2]) : nullptr;
    if (!loading_) {
        return nullptr;
    }
    const bool here = !m_.gpu() || kind == Kind::ram_experts || kind == Kind::ids ||
                      kind == Kind::order; // as the file has it
    const ggml_type type = here                   ? t->type
                           : kind == Kind::router ? GGML_TYPE_F32
                           : kind == Kind::table  ? recoded_table(t->type)
                                                  : recoded_matrix(t->type);
    const uint32_t stage = where != nullptr ? *where : stage_of(name, kind);
    const Slice slice = slice_of(*t, part, cut);
    ggml_tensor *tensor = ggml_new_tensor(m_.contexts_[stage].get(), type, GGML_MAX_DIMS, part.data());
    ggml_set_name(tensor, name.c_str());
    tensor->extra = const_cast<float *>(scales);
    const bool packed = (kind == Kind::matrix || kind == Kind::experts) && packs(type);
    tensor->op_params[0] = packed ? PACKED : 0;
    tensor->op_params[1] = parts;
    tensor->op_params[2] = kind == Kind::ram_experts                   ? IN_RAM
                           : kind == Kind::experts && is_at_home(name) ? AT_HOME
                                                                       : 0;
    tensor->op_params[3] = int32_t(stage);
    m_.tensors_.push_back({tensor, t, slice});
    m_.weight_bytes_ += bytes_of(tensor, m_.placements_[stage].device->holds_weights());
    return tensor;
}

// Takes the factors of n matrices: "ffn_up.scale", or "ffn_up.weight.scale", beside "ffn_up.weight". Those of NVFP4 are
// what the matrix was divided by so that its blocks' scales fit. What activations would be divided by, to have 4 bits
// too, is not needed.
const float *WeightReader::take_scales(const std::string &weight, int64_t n) {
    const std::string base = weight.substr(0, weight.rfind(".weight"));
    const float *found = nullptr;
    for (const std::string &name : {base, weight}) {
        left_.erase(name + ".input_scale");
        const std::string scale = name + ".scale";
        const GgufTensor *t = file_.tensor(scale);
        if (t == nullptr) {
            continue;
        }
        if (t->type != GGML_TYPE_F32 || t->ne[0] != n || t->ne[1] * t->ne[2] * t->ne[3] != 1) {
            fail(LUCE_E_FILE, "%s: tensor %s: expected F32 {%lld}, found %s %s", file_.path().c_str(),
                 scale.c_str(), (long long) n, type_name(t->type), shape_text(t->ne, t->n_dims).c_str());
        }
        left_.erase(scale);
        if (!loading_) {
            continue;
        }
        std::vector<float> &values = m_.scales_.emplace_back(size_t(n));
        memcpy(values.data(), t->data, size_t(n) * sizeof(float));
        found = values.data();
    }
    return found;
}

// Bytes of the trunk's layers and, with the first, of tables; with the last of all else.
static Shares shares_of(const GgufFile &trunk, const std::vector<DrafterFile> &drafters, uint32_t n_layer,
                        const std::vector<const Device *> &devices) {
    Shares shares;
    shares.layers.resize(n_layer, 0);
    for (const GgufTensor &t : trunk.tensors()) {
        unsigned layer = 0;
        const bool in_layer = sscanf(t.name.c_str(), "blk.%u.", &layer) == 1 && layer < n_layer;
        const bool table = t.name == "token_embd.weight" || t.name.compare(0, 10, "per_layer_") == 0;
        (in_layer ? shares.layers[layer] : table ? shares.first : shares.last) += t.size;
    }
    for (const DrafterFile &drafter : drafters) {
        for (const GgufTensor &t :
             drafter.file.get() == &trunk ? std::vector<GgufTensor>() : drafter.file->tensors()) {
            shares.last += t.size;
        }
    }
    for (const Device *device : devices) {
        uint64_t total = 0;
        device->memory(&shares.free.emplace_back(), &total);
    }
    return shares;
}

// E_ARG where the model has fewer parts that may lie apart than there are devices. E_UNSUPPORTED where GPUs would read each
// other's cells; on a CPU, which reads all, a cut that was asked for may be anywhere.
static void check_joined(const GgufFile &file, const std::vector<bool> &joined, const Split &split) {
    if (!split.layers.empty() && !split.devices[0]->gpu) {
        return;
    }
    const char *path = file.path().c_str();
    const size_t n_parts = size_t(std::count(joined.begin(), joined.end(), false));
    if (n_parts < split.devices.size()) {
        fail(LUCE_E_ARG,
             "%s can be cut into %zu parts at most, since layers read each other's cells, and there are %zu "
             "devices",
             path, n_parts, split.devices.size());
    }
    size_t at = 0;
    for (size_t i = 0; i + 1 < split.layers.size(); i++) {
        at += split.layers[i];
        if (joined[at]) {
            size_t first = at, end = at;
            while (joined[first]) {
                first--;
            }
            while (end < joined.size() && joined[end]) {
                end++;
            }
            std::string remedy = first > 0 ? format("ahead of layer %zu or earlier", first) : std::string();
            if (end < joined.size()) {
                remedy += format("%sahead of layer %zu or later", first > 0 ? ", or " : "", end);
            }
            fail(LUCE_E_UNSUPPORTED,
                 "%s was to be cut ahead of layer %zu: layers %zu to %zu lie on one GPU, since they, or a "
                 "drafter behind them, read cells of each other: cut it %s",
                 path, at, first, end - 1, remedy.c_str());
        }
    }
}

// E_ARG, or E_UNSUPPORTED where luce does not run it yet.
static void check_split(const GgufFile &file, const Split &split, uint32_t n_layer, bool experts_in_ram) {
    const size_t n = split.devices.size();
    const char *path = file.path().c_str();
    const bool gpu = split.devices[0]->gpu;
    std::vector<const Device *> all = split.devices;
    if (split.drafts_on != nullptr) {
        all.push_back(split.drafts_on);
    }
    for (const Device *device : all) {
        if (device->gpu != gpu) {
            fail(LUCE_E_ARG, "devices %s and %s are of two kinds", split.devices[0]->name.c_str(),
                 device->name.c_str());
        }
    }
    if (n > n_layer && !split.tensors) {
        fail(LUCE_E_ARG, "%s has %u layers, and there are %zu devices", path, n_layer, n);
    }
    uint32_t sum = 0;
    for (const uint32_t layers : split.layers) {
        sum += layers;
    }
    const bool none = std::find(split.layers.begin(), split.layers.end(), 0u) != split.layers.end();
    if (!split.layers.empty() && (split.layers.size() != n || sum != n_layer || none)) {
        fail(LUCE_E_ARG,
             "%zu devices are given %zu numbers of layers, %u in all: %s has %u, and each device has some", n,
             split.layers.size(), sum, path, n_layer);
    }
    if (all.size() > 1 && (gpu || split.tensors) && experts_in_ram) {
        fail(LUCE_E_UNSUPPORTED,
             "experts in host memory and several GPUs do not go together yet: leave one out");
    }
    if (split.tensors && n > size_t(MAX_RANKS)) {
        fail(LUCE_E_ARG, "%s was to have a part of each matrix on %zu devices: at most %d have one", path, n,
             MAX_RANKS);
    }
    if (split.tensors && (n < 2 || !split.layers.empty())) {
        fail(LUCE_E_ARG, "%s was to have a part of each matrix on %zu devices%s", path, n,
             n < 2 ? ": name two or more" : ", and numbers of layers: leave one out");
    }
}

uint32_t rank_part(const GgufFile &file, uint32_t n, const char *what, uint32_t whole) {
    if (whole % n != 0) {
        fail(LUCE_E_UNSUPPORTED,
             "%s has %u %s, of which %u devices cannot have equal parts: give each device layers of its own",
             file.path().c_str(), whole, what, n);
    }
    return whole / n;
}

HParams rank_hparams(const GgufFile &file, const HParams &whole, uint32_t n) {
    HParams hp = whole;
    if (n == 1) {
        return hp;
    }
    const auto share = [&](const char *what, uint32_t &value) { value = rank_part(file, n, what, value); };
    for (uint32_t il = 0; il < hp.n_layer; il++) {
        if (auto *attention = std::get_if<AttentionShape>(&hp.mixers[il])) {
            share("heads", attention->n_head);
            if (uint32_t &n_kv = attention->n_head_kv; n_kv < n && n % n_kv == 0) {
                attention->kv_copies = n / n_kv;
                n_kv = 1;
            } else {
                share("KV heads", n_kv);
            }
        } else {
            DeltaNetShape &d = std::get<DeltaNetShape>(hp.mixers[il]);
            share("key heads of DeltaNet", d.n_k_heads);
            share("value heads of DeltaNet", d.n_v_heads);
            share("values of DeltaNet's heads", d.n_inner);
        }
    }
    share("values between the products of a feed-forward layer", hp.n_ff);
    share("values between the products of an expert", hp.moe.n_ff);
    share("values between the products of the shared expert", hp.moe.n_ff_shared);
    return hp;
}

std::shared_ptr<Model> Model::describe(std::shared_ptr<GgufFile> file,
                                       const std::vector<DrafterFile> &drafters, const Split &split,
                                       uint32_t n_cpu_experts, uint64_t copy_bytes, bool experts_at_home) {
    auto model = std::make_shared<Model>();
    model->architecture_ = &architecture_of(*file);
    model->file_ = std::move(file);
    const GgufFile &trunk = *model->file_;
    HParams &hp = model->hp_;
    hp = model->architecture_->read_hparams(trunk);
    check_shapes(trunk.path().c_str(), hp);
    if (n_cpu_experts > hp.n_layer) {
        fail(LUCE_E_ARG, "n_cpu_experts is %u, %s has %u layers", n_cpu_experts, trunk.path().c_str(),
             hp.n_layer);
    }
    if (n_cpu_experts > 0 && experts_at_home) {
        fail(LUCE_E_ARG,
             "experts of %u layers were to be multiplied by the CPU, and those of all layers to be read by "
             "the "
             "device: leave one out",
             n_cpu_experts);
    }
    model->n_cpu_experts_ = n_cpu_experts;
    model->experts_at_home_ = experts_at_home;
    model->has_drafters_ = !drafters.empty();
    check_split(trunk, split, hp.n_layer, n_cpu_experts > 0 || experts_at_home);
    uint32_t read_at_end = hp.n_layer;
    for (const DrafterFile &drafter : drafters) {
        const DrafterKind &kind = drafter_kind(drafter.kind, *drafter.file);
        if (split.drafts_on != nullptr && kind.reads_from != nullptr) {
            fail(
                LUCE_E_UNSUPPORTED,
                "%s: %s reads cells of the model's layers, and was to lie on a device without any (%s): give "
                "it none of its own",
                drafter.file->path().c_str(), kind.title, split.drafts_on->name.c_str());
        }
        if (split.tensors && kind.reads_from != nullptr) {
            fail(LUCE_E_UNSUPPORTED,
                 "%s: %s reads cells of the model's layers, of which each of several devices would have a "
                 "part: give each device layers of its own",
                 drafter.file->path().c_str(), kind.title);
        }
        if (split.devices.size() > 1 && kind.reads_from != nullptr) {
            read_at_end = std::min(read_at_end, kind.reads_from(*drafter.file, hp));
        }
    }
    model->joined_ = joined_layers(hp.n_layer, hp.cells_of, read_at_end);
    if (split.tensors) {
        if (!model->architecture_->has_ranks) {
            fail(LUCE_E_UNSUPPORTED,
                 "%s: luce does not share matrices of %s out among devices yet: give each device layers of "
                 "its "
                 "own",
                 trunk.path().c_str(), model->architecture_->name);
        }
        model->n_ranks_ = uint32_t(split.devices.size());
        check_shapes(trunk.path().c_str(), rank_hparams(trunk, hp, model->n_ranks_));
    } else if (split.devices.size() > 1) {
        check_joined(trunk, model->joined_, split);
    }
    std::vector<uint32_t> layers = split.layers;
    if (split.tensors) {
        layers.assign(split.devices.size(), hp.n_layer);
    } else if (split.devices.size() == 1) {
        layers = {hp.n_layer};
    } else if (layers.empty()) {
        Shares shares = shares_of(trunk, drafters, hp.n_layer, split.devices);
        shares.joined = model->joined_;
        shares.last = split.drafts_on != nullptr ? 0 : shares.last;
        layers = share_out(shares);
    }
    for (size_t i = 0, first = 0; i < layers.size(); first += layers[i++]) {
        model->placements_.push_back({split.devices[i], uint32_t(first), uint32_t(first + layers[i])});
    }
    if (split.drafts_on != nullptr) {
        const uint32_t end = model->placements_.back().end;
        model->placements_.push_back({split.drafts_on, end, end});
    }
    const GgufTensor *embd = trunk.tensor("token_embd.weight");
    if (embd == nullptr || embd->n_dims != 2) {
        fail(LUCE_E_FILE, "%s: tensor token_embd.weight is %s", trunk.path().c_str(),
             embd == nullptr ? "missing" : ("of shape " + shape_text(embd->ne, embd->n_dims)).c_str());
    }
    if (embd->ne[1] > CHOICE_MAX_IDS) {
        fail(LUCE_E_UNSUPPORTED,
             "%s: tensor token_embd.weight has %lld rows: luce runs vocabularies of up to %lld",
             trunk.path().c_str(), (long long) embd->ne[1], (long long) CHOICE_MAX_IDS);
    }
    hp.n_vocab = uint32_t(embd->ne[1]);
    for (const GgufTensor &t : trunk.tensors()) {
        model->n_params_ += uint64_t(t.ne[0]) * uint64_t(t.ne[1]) * uint64_t(t.ne[2]) * uint64_t(t.ne[3]);
    }
    if (drafters.size() > MAX_DRAFTERS) {
        fail(LUCE_E_ARG, "a model has at most %u drafters, got %zu", MAX_DRAFTERS, drafters.size());
    }
    size_t n_tensors = trunk.tensors().size() + 2; // one may be tied, and the output there in part too
    for (const DrafterFile &drafter : drafters) {
        n_tensors += drafter.file->tensors().size() + 1;
    }
    for (size_t stage = 0; stage < model->placements_.size(); stage++) {
        model->contexts_.push_back(new_context(ggml_tensor_overhead() * n_tensors));
    }
    WeightReader reader(*model, trunk);
    model->weights_ = model->architecture_->read_trunk(reader, hp);
    reader.finish();
    for (const DrafterFile &from : drafters) {
        const DrafterKind &kind = drafter_kind(from.kind, *from.file);
        const std::shared_ptr<Drafter> drafter = kind.read(*model, *from.file, hp, model->weights_);
        for (const AttentionShape &shape : drafter->kv) {
            check_attention(from.file->path().c_str(), shape, model->gpu() && drafter->n_block > 0);
        }
        drafter->kind = &kind;
        drafter->index = uint32_t(model->weights_.drafters.size());
        model->weights_.drafters.push_back(drafter);
        std::vector<std::shared_ptr<GgufFile>> &files = model->drafter_files_;
        if (from.file != model->file_ && std::find(files.begin(), files.end(), from.file) == files.end()) {
            files.push_back(from.file);
        }
        if (drafter->moe() != nullptr) {
            check_moe(*model->placements_.back().device, from.file->path().c_str(), *drafter->moe());
        }
    }
    model->find_kinds();
    model->plan_copies(copy_bytes);
    for (uint32_t il = 0; il < hp.n_layer; il++) {
        const Moe *moe = model->weights_.blocks[il].moe();
        if (moe == nullptr && n_cpu_experts > 0) {
            fail(LUCE_E_ARG, "n_cpu_experts is %u, and %s has no experts: its architecture is %s",
                 n_cpu_experts, trunk.path().c_str(), model->architecture_->name);
        }
        if (moe == nullptr && experts_at_home) {
            fail(LUCE_E_ARG, "experts were to have slots, and %s has none: its architecture is %s",
                 trunk.path().c_str(), model->architecture_->name);
        }
        if (moe != nullptr && moe->in_ram) {
            check_ram_experts(trunk.path().c_str(), *moe);
        }
        if (moe != nullptr) {
            check_moe(*model->placements_[model->stage_of(il)].device, trunk.path().c_str(), *moe);
        }
    }
    return model;
}

// The tensors of layer N are named "blk.N." and so on in every GGUF.
void Model::find_kinds() {
    std::vector<std::string> kinds(hp_.n_layer);
    for (const auto &[tensor, source, slice] : tensors_) {
        unsigned layer = 0;
        int end = 0;
        sscanf(tensor->name, "blk.%u.%n", &layer, &end);
        if (end > 0 && layer < hp_.n_layer) {
            kinds[layer] += std::string(tensor->name + end) + type_name(tensor->type) +
                            shape_text(tensor->ne, GGML_MAX_DIMS) + (is_in_ram(tensor) ? "in ram;" : ";");
        }
    }
    // By stage: each device loads its kernels. What ranks have of a layer is alike.
    std::set<std::pair<uint32_t, std::string>> found;
    for (uint32_t layer = 0; layer < hp_.n_layer; layer++) {
        if (const Attention *attention = weights_.blocks[layer].attention()) {
            kinds[layer] +=
                format("window %u, softcap %g", attention->shape.window, double(attention->shape.softcap));
        }
        first_of_kind_.push_back(found.insert({stage_of(layer), kinds[layer]}).second);
    }
}

bool Model::has_axes() const {
    return std::any_of(hp_.mixers.begin(), hp_.mixers.end(), [](const auto &mixer) {
        const auto *attention = std::get_if<AttentionShape>(&mixer);
        return attention != nullptr && attention->has_axes();
    });
}

bool Model::takes_images() const {
    return has_axes() || hp_.image_rows != ImageRows::by_axes;
}

bool Model::has(const ggml_tensor *weight) const {
    const auto has_it = [&](const Context &context) { return holds(context, weight); };
    return std::any_of(contexts_.begin(), contexts_.end(), has_it) ||
           std::any_of(copy_contexts_.begin(), copy_contexts_.end(), has_it);
}

const Moe *Model::in_ram() const {
    const Moe *first = weights_.blocks.empty() ? nullptr : weights_.blocks[0].moe();
    return first != nullptr && first->in_ram ? first : nullptr;
}

uint64_t Model::identity() const {
    uint64_t hash = 0xcbf29ce484222325u; // this is the offset basis of FNV-1a
    const auto add = [&](const void *data, size_t n) {
        for (size_t i = 0; i < n; i++) {
            hash = (hash ^ static_cast<const uint8_t *>(data)[i]) * 0x100000001b3u;
        }
    };
    std::set<const GgufTensor *> seen; // a tied one may be there twice
    for (const auto &[tensor, source, slice] : tensors_) {
        if (!seen.insert(source).second) {
            continue;
        }
        add(source->name.data(), source->name.size());
        add(&source->type, sizeof(source->type));
        add(source->ne, sizeof(source->ne));
        add(source->data, size_t(std::min<uint64_t>(source->size, 256)));
    }
    for (const std::vector<float> &scales : scales_) {
        add(scales.data(), scales.size() * sizeof(float));
    }
    return hash;
}

std::vector<uint64_t> Model::placed_bytes() const {
    std::vector<uint64_t> bytes(placements_.size(), 0);
    for (const auto &[tensor, source, slice] : tensors_) {
        const uint32_t stage = luce::stage_of(tensor);
        bytes[stage] +=
            bytes_of(tensor, placements_[stage].device->holds_weights()) + nbytes_or_0(copy_of(tensor));
    }
    return bytes;
}

// A drafter's tensors may have the names of the trunk's layers, so it is asked whose they are. Returns n_layer for others.
uint32_t Model::trunk_layer(const GgufTensor *source) const {
    unsigned layer = 0;
    const bool found = sscanf(source->name.c_str(), "blk.%u.", &layer) == 1 && layer < hp_.n_layer;
    return found && file_->tensor(source->name) == source ? layer : hp_.n_layer;
}

std::vector<uint64_t> Model::layer_bytes() const {
    std::vector<uint64_t> bytes(hp_.n_layer + 1, 0);
    for (const auto &[tensor, source, slice] : tensors_) {
        const bool holds = placements_[luce::stage_of(tensor)].device->holds_weights();
        bytes[trunk_layer(source)] += bytes_of(tensor, holds) + nbytes_or_0(copy_of(tensor));
    }
    bytes.pop_back();
    return bytes;
}

// ---- copies ----

ggml_tensor *Model::copy_of(const ggml_tensor *weight) const {
    const auto found = copies_.find(weight);
    return found == copies_.end() ? nullptr : found->second;
}

// Returns the bytes that a copy of a tensor takes, or 0 for what has none: what is in no layer, what prompts do not multiply by
// cuBLAS, and a shared expert's matrices, which are multiplied with those of the experts.
uint64_t Model::copied_bytes([[maybe_unused]] const ggml_tensor *tensor,
                             [[maybe_unused]] uint32_t layer) const {
#ifdef LUCE_USE_CUDA
    const int64_t K = tensor->ne[0], N = tensor->ne[1];
    if (layer == hp_.n_layer || !is_packed(tensor) || matrices_of(tensor).n != 1 || !gemm_has(K, N)) {
        return 0;
    }
    const Moe *moe = weights_.blocks[layer].moe();
    const bool shared =
        moe != nullptr && !moe->in_ram &&
        (tensor == moe->shared.gate || tensor == moe->shared.up || tensor == moe->shared.down);
    return shared ? 0 : uint64_t(2 * K * N);
#else
    return 0;
#endif
}

uint64_t Model::bytes_to_copy() const {
    uint64_t bytes = 0;
    for (const auto &[tensor, source, slice] : tensors_) {
        bytes += copied_bytes(tensor, trunk_layer(source));
    }
    return bytes;
}

uint64_t Model::bytes_of_layers() const {
    uint64_t bytes = 0;
    for (const auto &[tensor, source, slice] : tensors_) {
        bytes += trunk_layer(source) < hp_.n_layer ? ggml_nbytes(tensor) : 0;
    }
    return bytes;
}

// Describes copies of what prompts multiply by cuBLAS, the first ones, of `most` bytes on each device.
void Model::plan_copies([[maybe_unused]] uint64_t most) {
#ifdef LUCE_USE_CUDA
    std::vector<uint64_t> left(placements_.size(), gpu() ? most : 0);
    for (size_t stage = 0; stage < placements_.size(); stage++) {
        copy_contexts_.push_back(new_context(ggml_tensor_overhead() * (tensors_.size() + 1)));
    }
    for (const auto &[tensor, source, slice] : tensors_) {
        const uint64_t bytes = copied_bytes(tensor, trunk_layer(source));
        uint64_t &room = left[luce::stage_of(tensor)];
        if (bytes > 0 && bytes <= room) {
            room -= bytes;
            ggml_context *context = copy_contexts_[luce::stage_of(tensor)].get();
            ggml_tensor *copy = copies_[tensor] =
                ggml_new_tensor_2d(context, GGML_TYPE_F16, tensor->ne[0], tensor->ne[1]);
            ggml_format_name(copy, "%s.f16", tensor->name);
            copy->op_params[3] = tensor->op_params[3];
        }
    }
#endif
}

uint32_t Model::stage_of(uint32_t block) const {
    uint32_t stage = 0;
    while (block >= placements_[stage].end) {
        stage++;
    }
    return stage;
}

// Devices that have the same text are named once.
std::string Model::each_device(const std::function<std::string(const Device &)> &text) const {
    std::string all, last;
    for (const Placement &placed : placements_) {
        const std::string one = text(*placed.device);
        all += one == last ? "" : (all.empty() ? "" : ", ") + one;
        last = one;
    }
    return all;
}

std::string Model::device_names() const {
    std::string all;
    for (const Placement &placed : placements_) {
        const bool is_rank = n_ranks_ > 1 && placed.end > placed.first;
        all += (all.empty() ? "" : is_rank ? "+" : ",") + placed.device->name;
    }
    return all;
}

std::string Model::arithmetic() const {
    const std::string cpu = find_device("cpu").arithmetic();
    return each_device([](const Device &device) { return device.arithmetic(); }) +
           (n_cpu_experts_ > 0 ? format(", experts of %u layers on %s", n_cpu_experts_, cpu.c_str()) : "") +
           (n_ranks_ > 1 ? format(", each matrix in %u parts", n_ranks_) : "");
}

std::set<std::pair<int64_t, int64_t>> Model::layer_matrices() const {
    std::set<std::pair<int64_t, int64_t>> shapes;
    for (const auto &[tensor, source, slice] : tensors_) {
        const auto is_output = [tensor = tensor](const auto &drafter) { return tensor == drafter->output; };
        const bool output = weights_.is_output(tensor) ||
                            std::any_of(weights_.drafters.begin(), weights_.drafters.end(), is_output);
        if (!output && is_packed(tensor) && matrices_of(tensor).n == 1) { // experts have ops of their own
            shapes.insert({tensor->ne[0], ggml_nelements(tensor) / tensor->ne[0]});
        }
    }
    return shapes;
}

} // namespace luce
